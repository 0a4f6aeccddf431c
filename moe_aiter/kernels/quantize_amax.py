"""Both ways to quantise a weight while reading it but once each way.

Forward wants the rows of a weight as 8-bit floats, backward its columns as rows, each with a scale of its own
(`quantize_rows`).  Whoever quantises the rows sees all numbers of each column too, and keeps the columns'
largest magnitudes; with these, columns that lie side by side are read once, tile by tile, instead of twice.
The results are those of `quantize_rows`, bit for bit.
"""

import torch
from torch import Tensor

from ..op import copy_into, define_op, takes
from ._check import check_device, check_tensor
from ._fp8 import native_fp8
from ._tile import TILE_DTYPES
from ._triton import cdiv, jit_kernel, next_power_of_2, tl
from .quantize import (
    LEAST,
    amax_reference,
    in_turn,
    launch_quantize_rows,
    limits,
    magnitude_bits,
    magnitude_of,
    new_quantize_rows,
    quantize_by_amax_reference,
    quantize_rows_reference,
    scale_and_inverse,
)

LONGEST = 16384  # the rows of which a tile holds a whole one, and the largest magnitudes so far
ROWS = 128  # the most whose columns' largest magnitudes one program finds
PROGRAMS = 2048  # with fewer rows each, as long as there are fewer programs

# reference


def quantize_rows_and_amax_reference(x, format):
    return *quantize_rows_reference(x, format), amax_reference(x, -2)


# kernel


@jit_kernel
def quantize_rows_and_amax_kernel(
    x_ptr,  # (G, M, K)
    out_ptr,  # (G, M, K), contiguous
    scale_ptr,  # (G, M) float32
    amax_ptr,  # (G, blocks, K) float32: the largest magnitudes of each column in each block of rows
    M,
    K,
    blocks,
    x_strides,  # g, m, k
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row
):
    group, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    x_stride_g, x_stride_m, x_stride_k = x_strides
    x_ptr += group * x_stride_g
    at = k.to(tl.int64)[None, :] * x_stride_k
    begin, end = block * ROWS, min(block * ROWS + ROWS, M)
    m = begin + rows
    mask = (m < end)[:, None] & (k < K)[None, :]
    later = tl.load(x_ptr + m.to(tl.int64)[:, None] * x_stride_m + at, mask=mask, other=0.0)
    # one row of maxima for each of a step's rows: threads that share a column meet but once, at the end
    columns = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for first in range(begin, end, BLOCK_M):
        x = later
        m = first + rows
        mask = (m < end)[:, None] & (k < K)[None, :]
        n = m + BLOCK_M
        ahead = (n < end)[:, None] & (k < K)[None, :]
        later = tl.load(x_ptr + n.to(tl.int64)[:, None] * x_stride_m + at, mask=ahead, other=0.0)
        bits = magnitude_bits(x)
        columns = tl.maximum(columns, bits)
        scale, inverse = scale_and_inverse(magnitude_of(tl.max(bits, 1)), MOST, LEAST)
        tl.store(scale_ptr + group * M + m, scale, mask=m < end)
        x8 = (x.to(tl.float32) * inverse[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (group * M + m[:, None]) * K + k[None, :], x8, mask=mask)
    amax = magnitude_of(tl.max(columns, 0))
    tl.store(amax_ptr + (group * blocks + block) * K + k, amax, mask=k < K)


@jit_kernel
def quantize_columns_kernel(
    x_ptr,  # (G, M, K)
    amax_ptr,  # (G, M) float32
    out_ptr,  # (G, M, K), contiguous
    scale_ptr,  # (G, M) float32
    M,
    K,
    tiles_m,
    tiles_k,
    x_strides,  # g, k; numbers m lie side by side
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile at a time, read along m and written along k."""
    QUARTER: tl.constexpr = BLOCK_K // 4
    tile_k, tile = tl.program_id(0) % tiles_k, tl.program_id(0) // tiles_k
    group, tile_m = (tile // tiles_m).to(tl.int64), tile % tiles_m
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    amax = tl.load(amax_ptr + group * M + m, mask=m < M, other=0.0)
    scale, inverse = scale_and_inverse(amax, MOST, LEAST)
    tl.store(scale_ptr + group * M + m, scale, mask=(m < M) & (tile_k == 0))
    x_stride_g, x_stride_k = x_strides
    x_ptrs = x_ptr + group * x_stride_g + m[:, None]
    four = tile_k * BLOCK_K + tl.arange(0, QUARTER) * 4
    parts = ()
    for i in tl.static_range(4):
        mask = (m < M)[:, None] & (four + i < K)[None, :]
        x = tl.load(x_ptrs + (four + i).to(tl.int64)[None, :] * x_stride_k, mask=mask, other=0.0)
        parts = parts + (x.to(tl.float32) * inverse[:, None],)
    mask = (m < M)[:, None] & (k < K)[None, :]
    tl.store(
        out_ptr + (group * M + m[:, None]) * K + k[None, :],
        in_turn(parts).to(out_ptr.dtype.element_ty),
        mask=mask,
    )


# launcher


def new_quantize_rows_and_amax(x, format):
    out = new_quantize_rows(x, format)
    return *out, x.new_empty(*x.shape[:-2], x.shape[-1], dtype=torch.float32)


def new_quantize_by_amax(x, amax, format):
    out = new_quantize_rows(x, format)
    check_tensor("amax", amax)
    if amax.dtype != torch.float32 or amax.shape != x.shape[:-1]:
        raise ValueError(
            f"amax must be {tuple(x.shape[:-1])} in float32, not {tuple(amax.shape)} in {amax.dtype}"
        )
    check_device(x=x, amax=amax)
    return out


def is_read_once(x: Tensor) -> bool:
    """Whether the kernel below finds the columns' largest magnitudes by the way."""
    return x.stride(-1) == 1 and x.shape[-1] <= LONGEST


def tile_with_amax(G: int, M: int, K: int, itemsize: int) -> tuple[int, int, int, int]:
    """Rows of a block, of a step, elements of each, and warps.

    A warp has whole rows, or a part of one, 2 KiB, of float32 1 KiB: of warps that shared columns each step
    would be a conversion through shared memory.
    """
    block_k = max(next_power_of_2(K), 16)
    rows = min(max(next_power_of_2(G * M // PROGRAMS), 16), ROWS)
    block_m, warps = max(1024 // block_k, 1), min(max(block_k // (1024 if itemsize == 2 else 256), 1), 16)
    return max(rows, block_m), block_m, block_k, warps


@takes(*TILE_DTYPES)
def launch_quantize_rows_and_amax(out, x, format):
    x8, scale, amax = out
    if x8.dtype not in native_fp8() or not is_read_once(x):
        launch_quantize_rows((x8, scale), x, format)
        return amax.copy_(amax_reference(x, -2))
    if not x.numel():  # there may be columns all the same
        scale.fill_(LEAST)
        return amax.zero_()
    x = x if x.dim() == 3 else x[None]
    G, M, K = x.shape
    rows, block_m, block_k, warps = tile_with_amax(G, M, K, x.element_size())
    blocks = cdiv(M, rows)
    parts = amax.new_empty(G, blocks, K)
    quantize_rows_and_amax_kernel[(G * blocks,)](
        x, x8, scale, parts, M, K, blocks, x.stride(),
        **limits(x8), ROWS=rows, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    torch.amax(parts, 1, out=amax.view(G, K))


@takes(*TILE_DTYPES)
def launch_quantize_by_amax(out, x, amax, format):
    x8, scale = out
    if x8.dtype not in native_fp8():
        return copy_into(out, quantize_by_amax_reference(x, amax, format))
    if x.stride(-2) != 1 or not x.numel():  # there may be scales all the same
        return launch_quantize_rows(out, x, format)
    x = x if x.dim() == 3 else x[None]
    G, M, K = x.shape
    block_m, block_k, warps = 64, 128, 8  # whole lines to read and to write
    tiles_m, tiles_k = cdiv(M, block_m), cdiv(K, block_k)
    quantize_columns_kernel[(G * tiles_m * tiles_k,)](
        x, amax.contiguous(), x8, scale, M, K, tiles_m, tiles_k, x.stride()[::2],
        **limits(x8), BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip


# op

quantize_rows_and_amax_op = define_op(
    "quantize_rows_and_amax(Tensor x, str format) -> (Tensor, Tensor, Tensor)",
    new=new_quantize_rows_and_amax,
    reference=quantize_rows_and_amax_reference,
    triton=launch_quantize_rows_and_amax,
)
quantize_by_amax_op = define_op(
    "quantize_by_amax(Tensor x, Tensor amax, str format) -> (Tensor, Tensor)",
    new=new_quantize_by_amax,
    reference=quantize_by_amax_reference,
    triton=launch_quantize_by_amax,
)


# public


def quantize_rows_and_amax(x: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_rows`, and the largest magnitude of each column, (K,) or (G, K) in float32: infinity where
    there is a NaN."""
    return quantize_rows_and_amax_op(x.detach(), format)


def quantize_by_amax(x: Tensor, amax: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """`quantize_rows` of an x whose rows' largest magnitudes are known: `amax`, (M,) or (G, M) in float32, as
    `quantize_rows_and_amax` returns those of the columns of `x.mT`.  Raises ValueError for another."""
    return quantize_by_amax_op(x.detach(), amax, format)
