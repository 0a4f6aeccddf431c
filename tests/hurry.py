"""Triton's interpreter without most of its time, in which it does things again or for nothing.

Values stay the same, but for the last bits of products.  One check is left out, that of overflowing integers:
the interpreter computes each, and asserts it with its option `debug` alone, which is False.
"""

import dataclasses
import functools
import types

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def hurry():
    patch_once()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    types_of_numpy()
    types_of_blocks()
    sums_of_rows()
    compare = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or compare(self, other)


def patch_once():
    """A launch patches triton.language, and each call of a device function would do so again."""
    patch, patched = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)

    @functools.cache
    def modules(fn):
        return [m for m in fn.__globals__.values() if m is tl or m is core]

    def patch_lang(fn):
        return patch(fn) if any(core.is_builtin(m.load) for m in modules(fn)) else patched

    interpreter._patch_lang = patch_lang


def types_of_numpy():
    """They are found in a dictionary that is made for each."""
    find, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = get_np_dtype


def sums_of_rows():
    """On some processors NumPy adds up a row of a float32 product in an order that depends on the row's place
    in the tile, which no GPU does.  float64 sums, rounded to float32, have the same bits at each place."""
    create = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *how):
        if d.data.dtype != np.float32:
            return create(self, a, b, d, *how)
        wide = interpreter.TensorHandle(d.data.astype(np.float64), tl.float64)
        exact = create(self, a, b, wide, *how).data
        return interpreter.TensorHandle(exact.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def types_of_blocks():
    """Each block's shape is checked, multiplied, printed and made of constants; there are few shapes."""
    make, alone = core.block_type.__init__, (core.tuple([]), core.constexpr(1))
    shapes, printed = {}, {}

    def block_type(self, element_ty, shape):
        sizes = shape.values if type(shape) is core.tuple else shape
        key = tuple(s.value if type(s) is core.constexpr else s for s in sizes)
        if key not in shapes:
            make(self, element_ty, shape)
            of_tensors = core.tuple([core.constexpr(s) for s in self.shape]), core.constexpr(self.numel)
            shapes[key] = self.shape, self.numel, of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensors = shapes[key]
        name = key, element_ty.name
        if name not in printed:
            printed[name] = f"<{self.shape}, {element_ty}>"
        self.name = printed[name]

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = getattr(type, "of_tensors", alone)

    def equal(self, other):
        if type(other) is core.tuple:
            other = other.values
        return core.constexpr(self.values == (list(other) if isinstance(other, tuple) else other))

    core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = block_type, tensor, equal
