"""Rows as 8-bit floats that have taken over the scales of the weight that they multiply.

    x[r, :] * factor[g, :] ~ x8[r, :] * scale[r]      for row r of group g

A product sums over the columns of x, so scales that a weight has along these do not factor out of the sum.
Rows take them over before they are quantised, and then the weight's 8-bit numbers need no others.
"""

import torch
from torch import Tensor

from ..op import copy_into, define_op, takes
from ._check import check_float, check_shape, check_size
from ._fp8 import native_fp8
from ._groups import check_groups, wide
from ._tile import TILE_DTYPES, dense, locate, row_tiles
from ._triton import jit_kernel, next_power_of_2, tl
from .quantize import (
    ELEMENTS,
    amax_reference,
    limits,
    magnitude,
    new_quantize_rows,
    quantize_by_amax_reference,
    rounded_to,
    scale_and_inverse,
)

ROWS = 32  # of a group that one program quantises, with one look at the group's factors

# reference


def factors_of_rows(factor: Tensor, group_sizes: Tensor, rows: int) -> Tensor:
    """factor[g] (G, K) for each row of group g, (rows, K), ones past the groups."""
    end = group_sizes.long().clamp(0, rows).cumsum(0).clamp(max=rows)
    group = torch.searchsorted(end, torch.arange(rows, device=end.device), right=True)
    return torch.cat((factor, factor.new_ones(1, factor.shape[1])))[group]


def quantize_folded_reference(x, factor, group_sizes, format):
    x = wide(x) * factors_of_rows(factor, group_sizes, len(x))
    past = torch.arange(len(x), device=x.device) >= group_sizes.long().clamp(min=0).sum()
    x = x.masked_fill(past[:, None], 0)
    return quantize_by_amax_reference(x, amax_reference(x, -1), format)


# kernel


@jit_kernel
def quantize_folded_kernel(
    x_ptr,  # (M, K)
    factor_ptr,  # (G, K) float32
    group_sizes_ptr,  # (G,)
    out_ptr,  # (M, K), contiguous
    scale_ptr,  # (M,) float32
    M,
    K,
    G,
    x_stride,  # m; columns lie side by side
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # a row fits in a tile
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group, row, end = locate(tl.program_id(0), group_sizes_ptr, M, G, BLOCK_G, ROWS)
    if group > G:
        return
    end = tl.minimum(row + ROWS, end)
    live = tl.where(group < G, end, row)  # rows past the last group become zeros
    k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    factor_ptrs = factor_ptr + tl.minimum(group, G - 1).to(tl.int64) * K + k
    if WHOLE:
        columns = (k < K)[None, :]
        factor = tl.load(factor_ptrs, mask=k < K, other=0.0)[None, :]
        m = row + rows
        mask = (m < live)[:, None] & columns
        later = tl.load(x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
        for first in range(row, end, BLOCK_M):
            x = later.to(tl.float32) * factor
            m = first + rows
            n = m + BLOCK_M
            ahead = (n < live)[:, None] & columns
            later = tl.load(x_ptr + n.to(tl.int64)[:, None] * x_stride + k[None, :], mask=ahead, other=0.0)
            scale, inverse = scale_and_inverse(tl.max(magnitude(x), 1), MOST, LEAST)
            tl.store(scale_ptr + m, scale, mask=m < end)
            x8 = rounded_to(x * inverse[:, None], out_ptr.dtype.element_ty)
            out_ptrs = out_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
            tl.store(out_ptrs, x8, mask=(m < end)[:, None] & columns)
    else:
        for first in range(row, end, BLOCK_M):
            m = first + rows
            x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
            amax = tl.zeros((BLOCK_M,), tl.float32)
            for begin in range(0, K, BLOCK_K):
                mask = (m < live)[:, None] & (k < K - begin)[None, :]
                x = tl.load(x_ptrs + begin, mask=mask, other=0.0).to(tl.float32)
                x *= tl.load(factor_ptrs + begin, mask=k < K - begin, other=0.0)[None, :]
                amax = tl.maximum(amax, tl.max(magnitude(x), 1))
            scale, inverse = scale_and_inverse(amax, MOST, LEAST)
            tl.store(scale_ptr + m, scale, mask=m < end)
            for begin in range(0, K, BLOCK_K):
                mask = (m < live)[:, None] & (k < K - begin)[None, :]
                x = tl.load(x_ptrs + begin, mask=mask, other=0.0).to(tl.float32)
                x *= tl.load(factor_ptrs + begin, mask=k < K - begin, other=0.0)[None, :]
                x8 = rounded_to(x * inverse[:, None], out_ptr.dtype.element_ty)
                mask = (m < end)[:, None] & (k < K - begin)[None, :]
                tl.store(out_ptr + m.to(tl.int64)[:, None] * K + (begin + k)[None, :], x8, mask=mask)


# launcher


def new_quantize_folded(x, factor, group_sizes, format):
    check_shape("x", x, "M", "K")
    check_shape("factor", factor, "G", "K")
    check_float(x=x)
    check_groups(group_sizes, x, factor=factor)
    check_size("x is (M, K={})", x.shape[1], "factor is (G, K={})", factor.shape[1])
    check_size("factor is (G={}, K)", factor.shape[0], "group_sizes is (G={},)", group_sizes.shape[0])
    if factor.dtype != torch.float32:
        raise TypeError(f"factor must be float32, not {factor.dtype}")
    return new_quantize_rows(x, format)


def tile_folded(K: int) -> tuple[int, int, int, int]:
    """Rows of a program, of a step, elements of each, and warps: 32 elements a thread, a factor for each."""
    block_k = min(next_power_of_2(max(K, 32)), ELEMENTS)
    return ROWS, max(1024 // block_k, 1), block_k, max(block_k // 1024, 1)


@takes(*TILE_DTYPES)
def launch_quantize_folded(out, x, factor, group_sizes, format):
    x8, scale = out
    if x8.dtype not in native_fp8() or not len(factor):
        return copy_into(out, quantize_folded_reference(x, factor, group_sizes, format))
    (M, K), G = x.shape, len(factor)
    rows, block_m, block_k, warps = tile_folded(K)
    x = x if x.stride(1) == 1 else x.contiguous()
    factor, group_sizes = dense(factor, group_sizes)
    quantize_folded_kernel[(row_tiles(M, G, rows),)](
        x, factor, group_sizes, x8, scale, M, K, G, x.stride(0),
        **limits(x8), WHOLE=block_k >= K, BLOCK_G=next_power_of_2(G + 1), ROWS=rows,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip


# op

quantize_folded_op = define_op(
    "quantize_folded(Tensor x, Tensor factor, Tensor group_sizes, str format) -> (Tensor, Tensor)",
    new=new_quantize_folded,
    reference=quantize_folded_reference,
    triton=launch_quantize_folded,
)

# public


def quantize_folded(
    x: Tensor, factor: Tensor, group_sizes: Tensor, format: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of the rows of `x` (M, K), those of group g times `factor[g]`, (G, K) in float32.

    Rows past the groups become zeros.  Not differentiable.  Raises ValueError for shapes that do not fit or
    another format, TypeError for dtypes.
    """
    return quantize_folded_op(x.detach(), factor, group_sizes, format)
