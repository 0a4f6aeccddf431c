"""8-bit operands: their formats, their products in torch, and their scales.

`NATIVE` lists the 8-bit floats that each GPU multiplies directly.  Kernels convert all others to float16,
which is exact.  `product` multiplies 8-bit tensors in torch; products of int8 are exact.  `check_scales`,
`as_vector` and `as_rows` check scales and biases and bring them into the layout that kernels read.
"""

import functools
import numbers

import torch
from torch import Tensor

from ...config import interpret
from ...private_api import int8_product
from .check import FLOATS, OCP, check_tensor, wide
from .fixed_rows import multiply_rows
from .launch import tl, triton

# formats

FP8 = {  # dtype -> the format that `decode` knows
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2: "e5m2",
}
MOST_K = 131071  # products of -128 and -128 of which int32 holds a sum
MOST_IMPRECISE = tl.constexpr(128)  # 8-bit products that Hopper's tensor core adds up, with some 14 bits
ROW_BLOCK = 128  # rows that are summed together: a line of memory, and of shared memory as wgmma reads it
NATIVE = {  # architecture -> what its matrix instructions multiply, where Triton emits these
    90: OCP,
    100: OCP,
    103: OCP,
    "gfx942": (torch.float8_e4m3fnuz,),
    "gfx950": OCP,
}


@triton.jit
def decode(x, FORMAT: tl.constexpr):
    """Bytes of a FORMAT as float16; x itself without one.

    Sign, exponent and mantissa move to their bits in float16, whose exponent has another bias: a power of two
    corrects it, for subnormal numbers as well.
    """
    if FORMAT is None:
        out = x
    elif FORMAT == "e5m2":
        out = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        bits = x.to(tl.uint16)
        moved = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        if FORMAT == "e4m3fn":
            out = tl.where((bits & 0x7F) == 0x7F, float("nan"), moved * 256.0)
        else:
            out = tl.where(bits == 0x80, float("nan"), moved * 128.0)
    return out


@triton.jit
def add_product(
    acc,  # (rows of x, columns of w), or TRANSPOSED
    x, w, X_FORMAT: tl.constexpr, W_FORMAT: tl.constexpr, TRANSPOSED: tl.constexpr, PROMOTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x @ w of what `decode` makes of both; int32 for int8.

    PROMOTED: the tensor core begins each sum of MOST_IMPRECISE products at zero and float32 adds them up.  A
    step of a tile that is no longer is such a sum.  Within a longer one Triton adds in between, which is as
    exact, but ptxas then lets every instruction wait for the one before.
    """
    x, w = decode(x, X_FORMAT), decode(w, W_FORMAT)
    left, right = (w.T, x.T) if TRANSPOSED else (x, w)
    if PROMOTED and x.shape[1] > MOST_IMPRECISE:
        acc = tl.dot(left, right, acc, input_precision=PRECISION, max_num_imprecise_acc=MOST_IMPRECISE)
    elif PROMOTED:  # the compiler would fold this into the sum, were these not 8-bit floats
        acc += tl.dot(left, right, input_precision=PRECISION)
    else:
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc


def native_fp8() -> tuple[torch.dtype, ...]:
    """The 8-bit floats that the matrix instructions of the GPU at hand multiply, of those in NATIVE."""
    return () if interpret else NATIVE.get(triton.runtime.driver.active.get_current_target().arch, ())


def as_operands(*tensors: Tensor) -> tuple[list[Tensor], list[str | None]]:
    """Return the tensors that a kernel loads, and how `decode` converts each of them."""
    formats = [FP8.get(t.dtype) for t in tensors]
    native = native_fp8() if any(formats) else ()
    if all(f is None or t.dtype in native for t, f in zip(tensors, formats, strict=True)):
        return list(tensors), [None] * len(tensors)
    return [as_loaded(t, f) for t, f in zip(tensors, formats, strict=True)], formats


def as_loaded(x: Tensor, format: str | None) -> Tensor:
    """Return what a kernel loads of a tensor that `as_operands` has found to be of this format."""
    return x.view(torch.uint8) if format else x


def is_promoted(x: Tensor) -> bool:
    """Whether the tensor core must not sum more than MOST_IMPRECISE products: see `add_product`.

    Hopper's wgmma keeps some 14 bits of a sum of 8-bit products: over K = 4096 that alone is an error of
    about 1 %, and over 256 it is above float16's own rounding, for any K.  Tiles of fewer than 64 rows and
    columns have no wgmma; mma.sync multiplies 8-bit floats as float16 there, whose sums are float32.
    """
    return x.dtype in FP8 and triton.runtime.driver.active.get_current_target().arch == 90


# products in torch


def product(x, w):
    """x @ w in float32: of int8 exact, and rounded once."""
    if x.dtype != torch.int8:
        return multiply_rows(wide(x), wide(w))
    # torch's own is wrong where there is one number to sum
    if x.is_cpu and 1 < x.shape[1] <= MOST_K and has_exact_int8():
        w = in_rows(w.mT).mT if w.mT.is_contiguous() else in_rows(w)
        return int8_product(in_rows(x), w).to(torch.float32)
    return (x.to(torch.float64) @ w.to(torch.float64)).to(torch.float32)


def in_rows(t):
    """Contiguous, even where there is but one row: torch's `_int_mm` misreads other strides."""
    return t.contiguous().view(-1).view(t.shape)


@functools.cache
def has_exact_int8() -> bool:
    """Whether this CPU multiplies int8 as it should: an old one saturates the sums of two products."""
    x = torch.tensor([[-128, 127], [127, 127]], dtype=torch.int8).repeat(32, 64)
    return torch.equal(int8_product(x, x.T).double(), x.double() @ x.T.double())


# scales and biases


def check_scales(
    shape_of_x: tuple, shape_of_w: tuple, x_scale, w_scale, bias=None, shape_of_bias: tuple = ()
) -> None:
    """Raise unless the scales are float32 of these shapes, and the bias is of any floating dtype."""
    for name, t, shape in (
        ("x_scale", x_scale, shape_of_x),
        ("w_scale", w_scale, shape_of_w),
        ("bias", bias, shape_of_bias),
    ):
        if t is None:
            continue
        if t.dtype not in (FLOATS if name == "bias" else (torch.float32,)):
            raise TypeError(f"{name} must be {'floating' if name == 'bias' else 'float32'}, not {t.dtype}")
        if t.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, but it has shape {tuple(t.shape)}")


def has_8_bits(lhs: Tensor, rhs: Tensor, **scales: Tensor | None) -> bool:
    """Whether these are operands of 8 bits.  Raises TypeError for scales of others."""
    bytes_ = torch.int8, *FP8
    for scale in (name for name, t in scales.items() if t is not None):
        for name, t in (("lhs", lhs), ("rhs", rhs)):
            if t.dtype not in bytes_:
                raise TypeError(f"{scale} is for operands of 8 bits, but {name} is {t.dtype}")
    return {lhs.dtype, rhs.dtype} <= set(bytes_)


def check_two_scales(**scales: Tensor | None) -> None:
    """Raise unless every scale is a tensor: operands of 8 bits have one each."""
    for name, scale in scales.items():
        if scale is None:
            raise ValueError(f"operands of 8 bits have {' and '.join(scales)}, but {name} is missing")
        check_tensor(name, scale)


def check_8_bit_options(**options: object) -> None:
    """Raise if there is an option that products of 8 bits do not have."""
    for name, option in options.items():
        if option is not None:
            raise ValueError(f"operands of 8 bits take no {name}")


def as_vector(
    name: str, scale: Tensor | float | None, x: Tensor, size: int, shapes: tuple[tuple[int, ...], ...]
) -> Tensor | None:
    """A scale of one of these shapes, or of one element, as (size,), without a copy."""
    if scale is None:
        return None
    if isinstance(scale, numbers.Real):
        return x.new_full((1,), scale, dtype=torch.float32).expand(size)
    check_tensor(name, scale)
    if scale.numel() == 1:
        return scale.reshape(1).expand(size)
    if scale.shape in shapes:
        return scale.reshape(size)
    allowed = ", ".join(map(str, shapes))
    raise ValueError(
        f"{name} must be a number, of one element, or {allowed}, but it has shape {tuple(scale.shape)}"
    )


def as_rows(name: str, scale: Tensor | float | None, x: Tensor, rows: int) -> Tensor | None:
    """A scale as (G, rows), without a copy."""
    G = x.shape[0]
    if scale is None:
        return None
    if isinstance(scale, numbers.Real):
        return x.new_full((1, 1), scale, dtype=torch.float32).expand(G, rows)
    check_tensor(name, scale)
    shape = tuple(scale.shape)
    if shape in ((G, rows), (G, rows, 1)):
        return scale.reshape(G, rows)
    if shape in ((G,), (G, 1), (G, 1, 1)) or scale.numel() == 1:
        return scale.reshape(-1, 1).expand(G, rows)
    allowed = f"a number, ({G},), ({G}, 1, 1), ({G}, {rows}) or ({G}, {rows}, 1)"
    raise ValueError(f"{name} must be {allowed}, but it has shape {shape}")
