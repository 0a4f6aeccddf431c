"""Triton, where it is installed, and fast launches of kernels.

macOS and Windows have no Triton.  There kernels are never launched, but the files that define them also hold
the references and the public functions, and must still import.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...config import settings
from ...op import FAR, ROCM, keep
from ...private_api import current_device, current_stream, launch_inside, triton_launches

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:

    def _no_triton(*args, **kwargs):
        raise RuntimeError("this kernel needs Triton, which is not installed: pip install triton")

    triton = SimpleNamespace(jit=lambda fn: _no_triton)
    tl = SimpleNamespace(constexpr=lambda value: value)
    JITFunction, TensorDescriptor = None, object
else:
    CompiledKernel, JITFunction, launch_hooks = triton_launches()

__all__ = ["bind_kernel", "cdiv", "jit_kernel", "next_power_of_2", "num_programs", "num_sms", "tl", "triton"]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.  Triton's own serves kernels as well, and takes launchers microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


@functools.cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(x: Tensor) -> int:
    """One program for each SM; as many as an H200 has where there is no GPU to ask."""
    return num_sms(x.device.index or 0) if x.is_cuda else 132


# Launching a kernel past most of Triton's Python.
#
# Triton looks at every argument of every launch to find out what it had compiled for; that takes the host
# as long as a small kernel takes the GPU. An op calls `bind_kernel` once for all inputs of one metadata: then
# the first launch alone compiles, and every other gives the compiled kernel the addresses of its tensors.
# What TMA reads of a descriptor depends on numbers alone, and is kept for the next tensor in the same place.


def bind_kernel(kernel: Callable, grid: tuple, **constants) -> Callable[..., None]:
    """Return `launch(*args)` for arguments that are alike in all but addresses and the values of floats.

    Alike are tensors of one dtype whose addresses are all multiples of 16 bytes, or all not, and equal ints,
    tuples and None.  With MOE_AITER_DEBUG=1 each launch checks that.
    """
    if JITFunction is not None and isinstance(kernel, JITFunction):
        return BoundKernel(kernel, grid, constants)
    return functools.partial(kernel[grid], **constants)


class BoundKernel:
    """A launcher for a GPU, as `bind_kernel` returns it."""

    def __init__(self, kernel: Callable, grid: tuple, constants: dict):
        self.kernel, self.grid, self.constants = kernel, (*grid, 1, 1)[:3], constants
        self.compiled = self.key = None

    def __call__(self, *args) -> None:
        if settings.debug:
            self.check(args)
        if self.compiled is None or is_watched():
            return self.first(args)
        run, kernel, tensors, boxes, as_one, rest = self.compiled
        values = [*args, *rest]
        for n in tensors:
            values[n] = args[n].data_ptr()
        for n, *form in boxes:
            values[n : n + 1] = mapped(args[n], *form)
        stream = current_stream(current_device())
        if as_one:
            run(*self.grid, stream, *kernel, values)
        else:
            run(*self.grid, stream, *kernel, *values)

    def first(self, args: tuple) -> None:
        """Launch through Triton, which compiles, and keep the kernel if it runs on a GPU."""
        compiled = self.kernel.run(*args, grid=self.grid, warmup=False, **self.constants)
        if isinstance(compiled, CompiledKernel) and torch.cuda.is_initialized():
            rest = [self.constants[name] for name in self.kernel.arg_names[len(args) :]]
            own = compiled.function, compiled.packed_metadata, None, None, None
            run, kernel, forms, as_one = launch_inside(compiled) or (compiled.run, own, [], False)
            tensors = [n for n, a in enumerate(args) if isinstance(a, Tensor)]
            at = [n for n, a in enumerate(args) if isinstance(a, Boxed)]
            boxes = [(n, *form) for n, form in zip(at, forms, strict=False)]
            boxes.reverse()  # what one becomes moves what is behind it
            self.compiled = run, kernel, tensors, boxes, as_one, rest

    def check(self, args: tuple) -> None:
        """Raise AssertionError if Triton could compile these arguments in another way than the first ones."""
        key = [specialisation(a) for a in args]
        if self.key is None:
            self.key = key
        if key != self.key:
            raise AssertionError(f"{self.kernel.__name__} is bound to {self.key}, not to {key}")


def is_watched() -> bool:
    """Whether a hook observes each launch, for example a profiler's: a chain of hooks, or one function."""
    enter, leave = launch_hooks.launch_enter_hook, launch_hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Boxed:
    """Either of Triton's descriptors, by which TMA copies boxes of this shape, without Triton's checks."""

    def __init__(self, x: Tensor, shape: tuple, strides: tuple, box: tuple):
        self.base, self.shape, self.strides, self.block_shape = x, shape, strides, box

    @property
    def specialisation(self) -> tuple:
        return self.base.dtype, self.block_shape  # the rest of a descriptor is data


class Descriptor(Boxed, TensorDescriptor):
    """Triton's descriptor: see `boxes_of`."""


MAPPED: dict[Any, list] = {}  # a form, an address, the shape and the strides -> see `mapped`
MOST_MAPPED = 8192  # of a kilobyte each


def mapped(a: Boxed, form: str, expand: Callable[[Boxed], list]) -> list:
    """Return the arguments that `expand` makes of a descriptor, of which the first is its map for TMA.

    `form` is what a map depends on beside these numbers.  It holds no memory but an address, so whichever
    tensor is there later, a map of equal numbers is the same map.
    """
    key = form, a.base.data_ptr(), a.shape, a.strides
    found = MAPPED.get(key)
    if found is None:
        found = expand(a)
        keep(MAPPED, key, found, MOST_MAPPED)
    return found


def specialisation(a) -> object:
    """Return what Triton may compile a kernel for, of one of its arguments, and a little more.

    Of a tensor the dtype, whether its address is a multiple of 16, and on AMD whether its memory is below
    2 GiB; of a float the type; of a descriptor the dtype and the box; of everything else the value.
    """
    if isinstance(a, Tensor):
        return a.dtype, a.data_ptr() % 16 == 0, ROCM and a.untyped_storage().size() < FAR
    return float if isinstance(a, float) else getattr(a, "specialisation", a)


jit_kernel = triton.jit  # marks a kernel that Python launches
