"""Rows as 8-bit floats, each with a scale of its own.

    x[..., m, :] ~ x8[..., m, :] * scale[..., m]      scale = the row's largest |x| / the largest 8-bit float

so the largest number of a row is exact but for a rounding, and nothing overflows.  A row of zeros stays one.
A row that holds an infinity or a NaN becomes NaN as a whole: a product would spread it there anyway.
"""

import torch
from torch import Tensor

from ..backend import copy_into, define_op, takes
from ._check import FLOATS, check_tensor
from ._fp8 import native_fp8
from ._groups import wide
from ._tile import TILE_DTYPES
from ._triton import cdiv, jit_kernel, next_power_of_2, tl, triton

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST = 2.0**-126  # the smallest scale, whose reciprocal is finite as well
ELEMENTS = 8192  # of a tile of rows that lie in memory as rows

# reference


def quantize_rows_reference(x, format):
    dtype = FORMATS[format]
    amax = x.abs().amax(-1).to(torch.float32)
    scale = (amax / torch.finfo(dtype).max).clamp(min=LEAST).masked_fill(~amax.isfinite(), float("nan"))
    return (wide(x) * (1 / scale)[..., None]).to(dtype), scale


# kernel


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
        amax = largest(x)
    else:
        amax = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(0, K, BLOCK_K):
            mask = row_mask & (k < K - first)[None, :]
            at = (first + k).to(tl.int64)[None, :] * x_stride_k
            amax = tl.maximum(amax, largest(tl.load(x_ptrs + at, mask=mask, other=0.0)))
    scale = tl.where(amax == float("inf"), float("nan"), tl.maximum(tl.div_rn(amax, MOST), LEAST))
    inverse = tl.div_rn(1.0, scale)[:, None]
    tl.store(scale_ptr + group * M + m, scale, mask=m < M)
    if WHOLE:
        tl.store(out_ptrs + k[None, :], (x.to(tl.float32) * inverse).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        for first in range(0, K, BLOCK_K):
            mask = row_mask & (k < K - first)[None, :]
            at = (first + k).to(tl.int64)[None, :] * x_stride_k
            x = tl.load(x_ptrs + at, mask=mask, other=0.0).to(tl.float32) * inverse
            tl.store(out_ptrs + first + k[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def largest(x):
    """The largest magnitude of each row, in float32; infinity for a NaN as well."""
    x = tl.abs(x.to(tl.float32))
    return tl.max(tl.where(x == x, x, float("inf")), 1)


# launcher


def new_quantize_rows(x, format):
    check_tensor("x", x)
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be (M, K) or (G, M, K), but it has shape {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, not {x.dtype}")
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    return x.new_empty(x.shape, dtype=FORMATS[format]), x.new_empty(x.shape[:-1], dtype=torch.float32)


def tile_of_rows(K: int) -> tuple[int, int, int]:
    """Rows, elements of each, and warps."""
    block_k = min(next_power_of_2(K), ELEMENTS)
    return max(ELEMENTS // 2 // block_k, 1), block_k, 4 if block_k < ELEMENTS else 8


def tile_of_columns(K: int) -> tuple[int, int, int]:
    """The same for columns that lie side by side: one program at a time on an SM, or what it reads twice
    would leave L2 in between."""
    return 32, min(max(next_power_of_2(K), 32), 1024), 16


@takes(*TILE_DTYPES)
def launch_quantize_rows(out, x, format):
    x8, scale = out
    if x8.dtype not in native_fp8():  # nor does Triton convert to what a GPU does not multiply
        return copy_into(out, quantize_rows_reference(x, format))
    x = x if x.dim() == 3 else x[None]
    G, M, K = x.shape
    block_m, block_k, warps = tile_of_columns(K) if x.stride(1) == 1 < x.stride(2) else tile_of_rows(K)
    tiles = cdiv(M, block_m)
    quantize_rows_kernel[(G * tiles,)](
        x, x8, scale, M, K, tiles, x.stride(),
        MOST=torch.finfo(x8.dtype).max, LEAST=LEAST, WHOLE=block_k >= K, BLOCK_M=block_m, BLOCK_K=block_k,
        num_warps=warps,
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
    """The rows of `x`, (M, K) or (G, M, K) of any floating dtype and strides, as 8-bit floats with scales.

    Returns x8, contiguous, float8_e4m3fn or with `format` "e5m2" float8_e5m2, and float32 scales (M,) or
    (G, M), with x ~ x8 * scale[..., None].  `x.mT` gives the columns of x, as rows.  Not differentiable.
    Raises ValueError for another shape or format, TypeError for a dtype that is not floating.
    Source: row-wise scaling as in torchao.float8, whose scales are these in float32.
    """
    return quantize_rows_op(x.detach(), format)


def dequantize_rows(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantize_rows` kept, in `dtype`."""
    product = torch.promote_types(dtype, torch.float32)
    return (x8.to(product) * scale.to(product)[..., None]).to(dtype)
