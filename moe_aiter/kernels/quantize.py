"""Rows as 8-bit floats or as int8, each with a scale of its own.

    x[..., m, :] ~ x8[..., m, :] * scale[..., m]      scale = the row's largest |x| / the largest 8-bit number

so the largest number of a row is exact but for a rounding, and nothing overflows.  A row of zeros stays one;
its scale, and that of a row of nothing, is the least there is.
A row that holds an infinity or a NaN becomes NaN as a whole, of int8 by its scale: a product would spread it
there anyway.

A scale is the product of two float32 and its inverse a quotient, both correctly rounded, so it has the same
bits wherever it is computed.  Columns that lie side by side are read twice: see `quantize_amax`.
"""

import torch
from torch import Tensor

from ..op import copy_into, define_op, takes
from ._check import FLOATS, check_tensor
from ._fp8 import native_fp8
from ._groups import wide
from ._tile import TILE_DTYPES
from ._triton import cdiv, jit_kernel, next_power_of_2, tl, triton

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OF_ROWS = {**FORMATS, "int8": torch.int8}
LEAST = 2.0**-126  # the smallest scale, whose reciprocal is finite as well
ELEMENTS = 8192  # of a tile of rows that lie in memory as rows

# reference


def most(dtype: torch.dtype) -> float:
    """The largest number; of int8 that of either sign."""
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def scale_of(amax: Tensor, format: str) -> Tensor:
    """The scales of rows whose largest magnitudes are these, float32."""
    scale = (amax * (1 / most(OF_ROWS[format]))).clamp(min=LEAST)
    return scale.masked_fill(~amax.isfinite(), float("nan"))


def amax_reference(x, dim):
    """The largest magnitudes in float32; infinity for a NaN as well, and 0 where there is nothing."""
    sizes = x.abs()
    amax = (sizes.amax(dim) if x.shape[dim] else sizes.sum(dim)).to(torch.float32)
    return amax.masked_fill(amax.isnan(), float("inf"))


def quantize_by_amax_reference(x, amax, format):
    scale = scale_of(amax, format)
    x8 = wide(x) * (1 / scale)[..., None]
    x8 = x8.round().nan_to_num(0) if format == "int8" else x8  # to even, as floats are
    return x8.to(OF_ROWS[format]), scale


def quantize_rows_reference(x, format):
    return quantize_by_amax_reference(x, amax_reference(x, -1), format)


# kernel


@triton.jit
def magnitude(x):
    """In float32; infinity for a NaN as well."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x == x, x, float("inf"))


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in float32, ordered as magnitudes are, where a NaN comes last."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def magnitude_of(bits):
    """In float32; infinity for a NaN as well."""
    return tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_and_inverse(amax, MOST: tl.constexpr, LEAST: tl.constexpr):
    scale = tl.where(amax == float("inf"), float("nan"), tl.maximum(amax * (1 / MOST), LEAST))
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def rounded_to(x, DTYPE: tl.constexpr):
    """float32 as 8 bits, to the nearest and to even; NaN, which int8 has not, as 0."""
    if tl.int8 == DTYPE:
        x = tl.where(x == x, x + 12582912.0 - 12582912.0, 0.0)  # 1.5 * 2**23 leaves no bits for a fraction
    return x.to(DTYPE)


@triton.jit
def in_turn(parts):
    """Numbers 4 * n + i of each row, which parts[i] (rows, N) hold, as one: (rows, 4 * N).  A thread that has
    four in turn moves them as one."""
    x = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return x.reshape(parts[0].shape[0], 4 * parts[0].shape[1])


@jit_kernel
def quantize_rows_kernel(
    x_ptr,  # (G, M, K)
    out_ptr,  # (G, M, K), contiguous
    scale_ptr,  # (G, M) float32
    M,
    K,
    tiles,  # of a group
    x_strides,  # g, m, k
    MOST: tl.constexpr,  # the largest number of the result's dtype
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # a row fits in a tile
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_stride_g, x_stride_m, x_stride_k = x_strides
    x_ptrs = x_ptr + group * x_stride_g + m.to(tl.int64)[:, None] * x_stride_m
    out_ptrs = out_ptr + (group * M + m[:, None]) * K
    row_mask = (m < M)[:, None]
    if WHOLE:
        mask = row_mask & (k < K)[None, :]
        x = tl.load(x_ptrs + k.to(tl.int64)[None, :] * x_stride_k, mask=mask, other=0.0)
        amax = tl.max(magnitude(x), 1)
    else:
        amax = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(0, K, BLOCK_K):
            mask = row_mask & (k < K - first)[None, :]
            at = (first + k).to(tl.int64)[None, :] * x_stride_k
            amax = tl.maximum(amax, tl.max(magnitude(tl.load(x_ptrs + at, mask=mask, other=0.0)), 1))
    scale, inverse = scale_and_inverse(amax, MOST, LEAST)
    tl.store(scale_ptr + group * M + m, scale, mask=m < M)
    if WHOLE:
        tl.store(
            out_ptrs + k[None, :],
            rounded_to(x.to(tl.float32) * inverse[:, None], out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        for first in range(0, K, BLOCK_K):
            mask = row_mask & (k < K - first)[None, :]
            at = (first + k).to(tl.int64)[None, :] * x_stride_k
            x = tl.load(x_ptrs + at, mask=mask, other=0.0).to(tl.float32) * inverse[:, None]
            tl.store(out_ptrs + first + k[None, :], rounded_to(x, out_ptr.dtype.element_ty), mask=mask)


# launcher


def new_quantize_rows(x, format):
    check_tensor("x", x)
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be (M, K) or (G, M, K), but it has shape {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, not {x.dtype}")
    if format not in OF_ROWS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(OF_ROWS)}")

    return x.new_empty(x.shape, dtype=OF_ROWS[format]), x.new_empty(x.shape[:-1], dtype=torch.float32)


def tile_of_rows(K: int) -> tuple[int, int, int]:
    """Rows, elements of each, and warps."""
    block_k = min(next_power_of_2(max(K, 1)), ELEMENTS)
    return max(ELEMENTS // 2 // block_k, 1), block_k, 4 if block_k < ELEMENTS else 8


def tile_of_columns(K: int) -> tuple[int, int, int]:
    """The same for columns that lie side by side, where they are read twice."""
    return 64, min(max(next_power_of_2(K), 32), 128), 4


def limits(x8) -> dict:
    return {"MOST": most(x8.dtype), "LEAST": LEAST}


@takes(*TILE_DTYPES)
def launch_quantize_rows(out, x, format):
    x8, scale = out
    # nor does Triton convert to floats that a GPU does not multiply
    if format != "int8" and x8.dtype not in native_fp8():
        return copy_into(out, quantize_rows_reference(x, format))
    x = x if x.dim() == 3 else x[None]
    G, M, K = x.shape
    block_m, block_k, warps = tile_of_columns(K) if x.stride(1) == 1 < x.stride(2) else tile_of_rows(K)
    tiles = cdiv(M, block_m)
    quantize_rows_kernel[(G * tiles,)](
        x, x8, scale, M, K, tiles, x.stride(),
        **limits(x8), WHOLE=block_k >= K, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
        enable_fp_fusion=False,  # or what is rounded to a whole number is a product that was not yet rounded
    )  # fmt: skip


# op

quantize_rows_op = define_op(
    "quantize_rows(Tensor x, str format) -> (Tensor, Tensor)",
    new=new_quantize_rows,
    reference=quantize_rows_reference,
    triton=launch_quantize_rows,
)

# public


def quantize_rows(x: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """The rows of `x`, (M, K) or (G, M, K) of any floating dtype and strides, as 8 bits with scales.

    Returns x8, contiguous, float8_e4m3fn, or float8_e5m2 or int8 by `format`, and float32 scales (M,) or
    (G, M), with x ~ x8 * scale[..., None].  `x.mT` gives the columns of x, as rows.  Not differentiable.
    Raises ValueError for another shape or format, TypeError for a dtype that is not floating.
    Source: row-wise scaling as in torchao.float8, whose scales are these in float32.
    """
    check_tensor("x", x)
    return quantize_rows_op(x.detach(), format)


def dequantize_rows(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantize_rows` kept, in `dtype`."""
    product = torch.promote_types(dtype, torch.float32)
    return (x8.to(product) * scale.to(product)[..., None]).to(dtype)
