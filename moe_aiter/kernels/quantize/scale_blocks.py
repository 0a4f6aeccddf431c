"""8-bit floats with a scale for each block of ROW_BLOCK columns: the scales of DeepSeek-V3.

    x[..., m, k] ~ x8[..., m, k] * scale[..., m // rows, k // ROW_BLOCK]

A block has one row (tokens and gradients), or is square with ROW_BLOCK rows (weights).  A square block is
also a block of the transposed weight, so backward multiplies the same 8-bit numbers as forward.  If a size is
no multiple of ROW_BLOCK, the last block is smaller.  Scales are computed as in `quantize_rows`: a block that
holds an infinity or a NaN becomes NaN as a whole.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...op import binds, copy_into, define_op, takes
from ..base.check import check_tensor, wide
from ..base.fp8 import ROW_BLOCK, native_fp8
from ..base.launch import bind_kernel, cdiv, jit_kernel, tl
from ..base.tile import TILE_DTYPES
from .rows import (
    FORMATS,
    QuantizeRowsInputs,
    as_groups,
    by_parts,
    dequantize_rows,
    dtype_of,
    fill_by_parts,
    limits,
    magnitude,
    new_quantize_rows,
    quantize_rows_reference,
    scale_and_inverse,
)


class QuantizeBlocksInputs(NamedTuple):
    """The inputs of the op `quantize_blocks`: x[m, k] ~ x8[m, k] * scale[m // rows, k // ROW_BLOCK]."""

    x: Tensor  # (M, K) or (G, M, K)
    square: bool  # ROW_BLOCK rows have a scale, else each row
    format: str


# reference


def quantize_blocks_reference(i: QuantizeBlocksInputs) -> tuple[Tensor, Tensor]:
    (M, K), rows = i.x.shape[-2:], ROW_BLOCK if i.square else 1
    down, across = cdiv(M, rows), cdiv(K, ROW_BLOCK)
    padded = F.pad(wide(i.x), (0, across * ROW_BLOCK - K, 0, down * rows - M))
    parts = padded.unflatten(-1, (across, ROW_BLOCK)).unflatten(-3, (down, rows)).transpose(-3, -2)
    blocks = parts.flatten(-2)  # (..., down, across, numbers of a block)
    x8, scale = quantize_rows_reference(QuantizeRowsInputs(blocks, i.format))
    x8 = x8.unflatten(-1, (rows, ROW_BLOCK)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return x8[..., :M, :K].contiguous(), scale


def fill_blocks(outs: tuple[Tensor, Tensor], i: QuantizeBlocksInputs) -> None:
    fill_by_parts(outs, i, quantize_blocks_reference, ROW_BLOCK if i.square else 1)


# kernel


@jit_kernel
def quantize_blocks_kernel(
    x_ptr,  # (G, M, K)
    out_ptr,  # (G, M, K), contiguous
    scale_ptr,  # (G, down, across) float32
    M, K,
    tiles,  # of a group, one above the other
    down,  # scales of a group, one above the other
    across,
    x_strides,  # g, m, k
    MOST: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    BLOCK_M: tl.constexpr,  # ROWS, or several blocks of one row
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    column, tile = tl.program_id(0) % across, tl.program_id(0) // across
    group, first = (tile // tiles).to(tl.int64), tile % tiles * BLOCK_M
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    mask = (m < M - first)[:, None] & (k < K - column * BLOCK_K)[None, :]
    # offsets within a block have 32 bits: those of 64 would spill
    x_ptr += group * x_strides[0] + first.to(tl.int64) * x_strides[1]
    x_ptr += (column * BLOCK_K).to(tl.int64) * x_strides[2]
    x = tl.load(x_ptr + (m[:, None] * x_strides[1] + k[None, :] * x_strides[2]), mask=mask, other=0.0)
    amax = tl.max(magnitude(x), 1)
    if ROWS > 1:
        amax = tl.zeros_like(amax) + tl.max(amax, 0)
    scale, inverse = scale_and_inverse(amax, MOST, LEAST)
    scale_ptrs = scale_ptr + (group * down + (first + m) // ROWS) * across + column
    tl.store(scale_ptrs, scale, mask=(m < M - first) & (m % ROWS == 0))
    x8 = (x.to(tl.float32) * inverse[:, None]).to(out_ptr.dtype.element_ty)
    out_ptr += (group * M + first) * K + column * BLOCK_K
    tl.store(out_ptr + (m[:, None] * K + k[None, :]), x8, mask=mask)


# launcher


def new_quantize_blocks(i: QuantizeBlocksInputs) -> tuple[Tensor, Tensor]:
    dtype_of(i.format)
    x8, scale = new_quantize_rows(QuantizeRowsInputs(i.x, i.format))
    *groups, M, K = i.x.shape
    return x8, scale.new_empty(*groups, cdiv(M, ROW_BLOCK if i.square else 1), cdiv(K, ROW_BLOCK))


@binds
@takes(*TILE_DTYPES)
def bind_quantize_blocks(i: QuantizeBlocksInputs) -> Callable:
    if FORMATS[i.format] not in native_fp8() or not i.x.numel():
        return lambda outs, i: copy_into(outs, quantize_blocks_reference(i))
    ((G, M, K), strides), rows, block_m = as_groups(i.x), 1, 32
    if i.square:
        rows = block_m = ROW_BLOCK
    tiles, across = cdiv(M, block_m), cdiv(K, ROW_BLOCK)
    kernel = bind_kernel(
        quantize_blocks_kernel, (G * tiles * across,),
        **limits(i.format), ROWS=rows, BLOCK_M=block_m, BLOCK_K=ROW_BLOCK, num_warps=8 if i.square else 4,
    )  # fmt: skip
    sizes = M, K, tiles, cdiv(M, rows), across, strides
    return lambda outs, i: kernel(i.x, *outs, *sizes)


# op

quantize_blocks_op = define_op(
    "quantize_blocks", QuantizeBlocksInputs, outputs=2, new=new_quantize_blocks,
    reference=quantize_blocks_reference, triton=bind_quantize_blocks, torch=fill_blocks,
)  # fmt: skip

# public


def quantize_blocks(x: Tensor, square: bool, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """`x`, (M, K) or (G, M, K) of any floating dtype and strides, as 8-bit floats with scales of blocks.

    Returns x8, contiguous, and float32 scales: (..., M, K / ROW_BLOCK), or if `square` (..., M / ROW_BLOCK,
    K / ROW_BLOCK), rounded up.  Not differentiable.  Raises ValueError for another shape or format, TypeError
    for a dtype that is not floating.
    """
    check_tensor("x", x)
    return quantize_blocks_op(x.detach(), square, format)


def dequantize(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantize_blocks` or `quantize_rows` kept, in `dtype`."""
    if scale.dim() < x8.dim():
        return dequantize_rows(x8, scale, dtype)
    return by_parts(blocks_back, x8, scale, dtype, ROW_BLOCK if scale.shape[-2] < x8.shape[-2] else 1)


def blocks_back(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    (M, K), scale = x8.shape[-2:], scale.repeat_interleave(ROW_BLOCK, -1)
    if scale.shape[-2] < M:
        scale = scale.repeat_interleave(ROW_BLOCK, -2)
    product = torch.promote_types(dtype, torch.float32)
    return (x8.to(product) * scale[..., :M, :K].to(product)).to(dtype)
