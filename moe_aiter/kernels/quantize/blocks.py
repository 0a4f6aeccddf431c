"""Rows laid out for 8-bit products that sum over rows: by columns, in row blocks.

    row r of group g  ->  row block first[g] + (r - s) // ROW_BLOCK, offset (r - s) % ROW_BLOCK

where s is the first row of g.  A row block has ROW_BLOCK rows of one group.  Tensor cores need 8-bit operands
whose summed axis is contiguous, so each row block of the result holds column after column,
(C, columns, ROW_BLOCK).  Offsets past a group's end are zero.

`plan_row_blocks` computes where the rows of each group lie.  Each group begins a new row block, and only the
device knows how many there are: at most C = rows // ROW_BLOCK + G, or 0 without groups.  Unused row blocks
begin past the end of the last group; no kernel writes or reads them.

`quantize_row_blocks` gives each column of a row block its own scale (the 1 x 128 scales of DeepSeek-V3,
arXiv 2412.19437).  `transpose_row_blocks` moves the bytes of rows that are 8-bit floats already.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import binds, copy_into, define_op, takes
from ..base.check import Float, Float8, Index, check_fields, check_rows, wide
from ..base.fp8 import ROW_BLOCK, native_fp8
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES, dense
from .rows import (
    FORMATS,
    QuantizeRowsInputs,
    dtype_of,
    interleave,
    limits,
    magnitude,
    quantize_rows_reference,
    scale_and_inverse,
)


class PlanRowBlocksInputs(NamedTuple):
    """The inputs of the op `plan_row_blocks`: in which row blocks the rows of each group lie."""

    group_sizes: Annotated[Index, "G"]
    rows: int | torch.SymInt


class QuantizeRowBlocksInputs(NamedTuple):
    """The inputs of the op `quantize_row_blocks`: the columns of factor[order[r] // top_k] * y[r]."""

    y: Annotated[Float, "M, N"]
    factor: Annotated[Tensor, "T"]
    order: Annotated[Index, "M"]
    top_k: int
    row_blocks: Annotated[Index, "C, 2"]
    format: str


class TransposeRowBlocksInputs(NamedTuple):
    """The inputs of the op `transpose_row_blocks`: the columns of x8[order[r] // top_k]."""

    x8: Annotated[Float8, "T, K"]
    order: Annotated[Index, "M"] | None  # None: row r is x8[r]
    top_k: int
    row_blocks: Annotated[Index, "C, 2"]


def most_row_blocks(rows: int, groups: int) -> int:
    return rows // ROW_BLOCK + groups if groups else 0


# plan_row_blocks: reference


def plan_row_blocks_reference(i: PlanRowBlocksInputs) -> tuple[Tensor, Tensor]:
    G, rows = len(i.group_sizes), i.rows
    size = i.group_sizes.long().clamp(0, rows)
    end = size.cumsum(0)
    start, end = (end - size).clamp(max=rows), end.clamp(max=rows)
    last = ((end - start + ROW_BLOCK - 1) // ROW_BLOCK).cumsum(0)
    first = torch.cat((last.new_zeros(1), last[:-1]))
    block = torch.arange(most_row_blocks(rows, G), device=size.device)
    group = torch.searchsorted(last, block, right=True).clamp(max=G - 1)
    row_blocks = torch.stack((start[group] + (block - first[group]) * ROW_BLOCK, end[group]), 1)
    by_size = (end - start).argsort(descending=True, stable=True)
    return torch.stack((by_size, first[by_size], last[by_size]), 1), row_blocks


def rows_in(row_blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The row at each offset of each block, (C, ROW_BLOCK), and whether there is one."""
    row = row_blocks[:, :1].long() + torch.arange(ROW_BLOCK, device=row_blocks.device)
    return row, row < row_blocks[:, 1:]


def rows_of_blocks(y: Tensor, row_blocks: Tensor, rows: int) -> Tensor:
    """The inverse: (C, columns, ROW_BLOCK) as (rows, columns), zeros for rows in no group."""
    row, there = rows_in(row_blocks)
    out = y.new_zeros(rows + 1, y.shape[1])  # the last one takes what is at offsets without a row
    out[row.where(there, rows)] = y.mT
    return out[:rows]


# plan_row_blocks: kernel


@jit_kernel
def plan_row_blocks_kernel(
    group_sizes_ptr,  # (G,)
    spans_ptr,  # (G, 3): group, its first row block and its end, the group of most rows first
    row_blocks_ptr,  # (C, 2): first row, and the row where the group ends
    M, G, C,
    ROW_BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    size = tl.load(group_sizes_ptr + g, mask=g < G, other=0).to(tl.int64)
    size = tl.minimum(tl.maximum(size, 0), M)  # or the sum could overflow
    end = tl.cumsum(size, 0)
    start, end = tl.minimum(end - size, M), tl.minimum(end, M)
    size = end - start
    count = (size + ROW_BLOCK - 1) // ROW_BLOCK
    mine = g == group
    my_size, my_count = tl.sum(tl.where(mine, size, 0), 0), tl.sum(tl.where(mine, count, 0), 0)
    my_start, my_end = tl.sum(tl.where(mine, start, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    first = tl.sum(tl.where(g < group, count, 0), 0)
    ahead = (g < G) & ((size > my_size) | ((size == my_size) & (g < group)))
    span_ptr = spans_ptr + 3 * tl.sum(ahead.to(tl.int32), 0)
    tl.store(span_ptr, group)
    tl.store(span_ptr + 1, first.to(tl.int32))
    tl.store(span_ptr + 2, (first + my_count).to(tl.int32))
    last = tl.where(group == G - 1, C, first + my_count)  # past the last row block, rows past the end
    for begin in range(first, last, BLOCK):
        block = begin + tl.arange(0, BLOCK)
        row = my_start + (block - first) * ROW_BLOCK
        tl.store(row_blocks_ptr + 2 * block, row.to(tl.int32), mask=block < last)
        tl.store(row_blocks_ptr + 2 * block + 1, my_end.to(tl.int32), mask=block < last)


# plan_row_blocks: launcher


def new_plan_row_blocks(i: PlanRowBlocksInputs) -> tuple[Tensor, Tensor]:
    G = check_fields(i)["G"]
    spans = i.group_sizes.new_empty(G, 3, dtype=torch.int32)
    return spans, spans.new_empty(most_row_blocks(i.rows, G), 2)


@binds
def bind_plan_row_blocks(i: PlanRowBlocksInputs) -> Callable:
    G, rows = len(i.group_sizes), i.rows
    sizes = rows, G, most_row_blocks(rows, G)
    kernel = bind_kernel(
        plan_row_blocks_kernel, (G,), ROW_BLOCK=ROW_BLOCK, BLOCK_G=next_power_of_2(G), BLOCK=128, num_warps=1
    )
    return lambda outs, i: kernel(i.group_sizes.contiguous(), *outs, *sizes)


# plan_row_blocks: op


plan_row_blocks_op = define_op(
    "plan_row_blocks", PlanRowBlocksInputs, outputs=2, new=new_plan_row_blocks,
    reference=plan_row_blocks_reference, triton=bind_plan_row_blocks,
)  # fmt: skip


# plan_row_blocks: public


def plan_row_blocks(group_sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row blocks of `rows` rows, of which groups have `group_sizes` (G,); nothing synchronises.

    Two int32 tensors: `spans` (G, 3), each group's number, first row block and end row block, the group of
    most rows first; and `row_blocks` (C, 2), C = rows // ROW_BLOCK + G, or 0 without groups: the first row of
    each, and the row where its group ends.  Unused row blocks begin past an end.
    """
    return plan_row_blocks_op(group_sizes, rows)


# row blocks: reference


def take_row_blocks(x: Tensor, source: Tensor, there: Tensor) -> Tensor:
    """The rows `source` (C, ROW_BLOCK) of x by columns, zeros if not `there`: (C, columns, ROW_BLOCK)."""
    if not len(x):
        return x.new_zeros(len(source), x.shape[1], ROW_BLOCK)
    return x[source.where(there, 0)].masked_fill(~there[..., None], 0).mT


def tokens_of(row_blocks: Tensor, order: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """The token at each offset of each block, and whether there is one."""
    row, there = rows_in(row_blocks)
    if order is None:
        return row, there
    token = order.clamp(min=0).long() // top_k
    return token[row.where(there, 0)] if len(order) else row, there


def quantize_row_blocks_reference(i: QuantizeRowBlocksInputs) -> tuple[Tensor, Tensor]:
    token, there = tokens_of(i.row_blocks, i.order, i.top_k)
    row, _ = rows_in(i.row_blocks)
    factor = take_row_blocks(i.factor[:, None], token, there)
    y = take_row_blocks(wide(i.y), row, there) * factor
    return quantize_rows_reference(QuantizeRowsInputs(y, i.format))


def transpose_row_blocks_reference(i: TransposeRowBlocksInputs) -> Tensor:
    columns = take_row_blocks(i.x8.view(torch.uint8), *tokens_of(i.row_blocks, i.order, i.top_k))
    return columns.contiguous().view(i.x8.dtype)


# row blocks: kernel


@jit_kernel
def quantize_row_blocks_kernel(
    y_ptr,  # (M, N)
    factor_ptr,  # (T,) float32
    order_ptr,  # (M,)
    row_blocks_ptr,  # (C, 2)
    out_ptr,  # (C, N, ROW_BLOCK)
    scale_ptr,  # (C, N) float32
    N,
    tiles,  # of a row block
    y_strides,  # m, n
    MOST: tl.constexpr, LEAST: tl.constexpr, TOP_K: tl.constexpr, ROW_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Some columns of a row block, read along the columns and written along the rows."""
    QUARTER: tl.constexpr = ROW_BLOCK // 4
    block, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row, end = tl.load(row_blocks_ptr + 2 * block), tl.load(row_blocks_ptr + 2 * block + 1)
    if row >= end:
        return
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    y_ptrs = y_ptr + n.to(tl.int64)[:, None] * y_strides[1]
    factors = ()  # two loads after one another, so all of the first come first
    for i in tl.static_range(4):
        m = row + tl.arange(0, QUARTER) * 4 + i
        choice = tl.maximum(tl.load(order_ptr + m, mask=m < end, other=0), 0)
        factors = factors + (tl.load(factor_ptr + choice // TOP_K, mask=m < end, other=0.0),)
    quarters, most = (), tl.zeros((BLOCK_N, QUARTER), tl.float32)
    for i in tl.static_range(4):
        m = row + tl.arange(0, QUARTER) * 4 + i
        mask = (n < N)[:, None] & (m < end)[None, :]
        y = tl.load(y_ptrs + m.to(tl.int64)[None, :] * y_strides[0], mask=mask, other=0.0)
        y = y.to(tl.float32) * factors[i][None, :]
        most = tl.maximum(most, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
        quarters = quarters + (y,)
    scale, inverse = scale_and_inverse(tl.max(magnitude(most), 1), MOST, LEAST)
    tl.store(scale_ptr + block * N + n, scale, mask=n < N)
    scaled = ()
    for i in tl.static_range(4):
        scaled = scaled + (quarters[i] * inverse[:, None],)
    y8 = interleave(scaled).to(out_ptr.dtype.element_ty)
    offsets = tl.arange(0, ROW_BLOCK)[None, :]
    tl.store(out_ptr + (block * N + n[:, None]) * ROW_BLOCK + offsets, y8, mask=(n < N)[:, None])


@triton.jit
def pair_bytes(x, y):
    """Return bytes 0 and 2, and bytes 1 and 3, of x and y in turn."""
    even = (x & 0x00FF00FF) | ((y & 0x00FF00FF) << 8)
    odd = ((x >> 8) & 0x00FF00FF) | (y & 0xFF00FF00)
    return even, odd


@triton.jit
def pair_halves(x, y):
    """The lower halves of x and y, and the upper ones."""
    return (x & 0xFFFF) | (y << 16), (x >> 16) | (y & 0xFFFF0000)


@triton.jit
def transpose_words(rows):
    """Words of four bytes, (words, N) of rows 4 * n + i in rows[i], as words of four rows: (4 * words, N)."""
    # bytes 0 and 2, and 1 and 3, of two rows; then each byte of four
    even, odd = pair_bytes(rows[0], rows[1])
    later_even, later_odd = pair_bytes(rows[2], rows[3])
    first, third = pair_halves(even, later_even)
    second, fourth = pair_halves(odd, later_odd)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))  # (words, N, 2, 2)
    return words.permute(0, 2, 3, 1).reshape(4 * rows[0].shape[0], rows[0].shape[1])


@jit_kernel
def transpose_row_blocks_kernel(
    x_ptr,  # (T, W) words of four bytes
    order_ptr,  # (M,), or None where row r is x's own
    row_blocks_ptr,  # (C, 2)
    out_ptr,  # (C, 4 * W, ROW_BLOCK // 4)
    C, W,
    x_stride,  # t
    TOP_K: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Some columns of a row block.  Programs take these columns of all row blocks before the next columns, so
    that a token's columns stay in L2 for all its experts."""
    QUARTER: tl.constexpr = ROW_BLOCK // 4
    block, tile = (tl.program_id(0) % C).to(tl.int64), tl.program_id(0) // C
    row, end = tl.load(row_blocks_ptr + 2 * block), tl.load(row_blocks_ptr + 2 * block + 1)
    if row >= end:
        return
    w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = ()
    for i in tl.static_range(4):
        m = row + tl.arange(0, QUARTER) * 4 + i
        token = m
        if order_ptr is not None:
            token = tl.maximum(tl.load(order_ptr + m, mask=m < end, other=0), 0) // TOP_K
        mask = (w < W)[:, None] & (m < end)[None, :]
        x = tl.load(x_ptr + token.to(tl.int64)[None, :] * x_stride + w[:, None], mask=mask, other=0)
        rows = rows + (x.to(tl.uint32, bitcast=True),)
    words = transpose_words(rows)
    k = tile * BLOCK_W * 4 + tl.arange(0, 4 * BLOCK_W)
    offsets = tl.arange(0, QUARTER)[None, :]
    out_ptrs = out_ptr + (block * (4 * W) + k[:, None]) * QUARTER + offsets
    # streamed past L2, which is for the tokens
    tl.store(out_ptrs, words.to(tl.int32, bitcast=True), mask=(k < 4 * W)[:, None], cache_modifier=".cs")


# row blocks: launcher


def new_quantize_row_blocks(i: QuantizeRowBlocksInputs) -> tuple[Tensor, Tensor]:
    size, dtype = check_fields(i), dtype_of(i.format)
    shape = size["C"], size["N"]
    return i.y.new_empty(*shape, ROW_BLOCK, dtype=dtype), i.y.new_empty(shape, dtype=torch.float32)


def new_transpose_row_blocks(i: TransposeRowBlocksInputs) -> Tensor:
    size = check_fields(i)
    check_rows("x8", i.x8, "K", i.order, i.top_k, size["T" if i.order is None else "M"])
    return i.x8.new_empty(size["C"], size["K"], ROW_BLOCK)


@binds
@takes(*TILE_DTYPES)
def bind_quantize_row_blocks(i: QuantizeRowBlocksInputs) -> Callable:
    if FORMATS[i.format] not in native_fp8():
        return lambda outs, i: copy_into(outs, quantize_row_blocks_reference(i))
    C, N = i.row_blocks.shape[0], i.y.shape[1]
    block_n = min(max(next_power_of_2(N), 16), 32)
    tiles = cdiv(N, block_n)
    kernel = bind_kernel(
        quantize_row_blocks_kernel, (C * tiles,),
        **limits(i.format), TOP_K=i.top_k, ROW_BLOCK=ROW_BLOCK, BLOCK_N=block_n, num_warps=2,
    )  # fmt: skip
    strides = i.y.stride()
    return lambda outs, i: kernel(i.y, *dense(i.factor, i.order, i.row_blocks), *outs, N, tiles, strides)


@binds
def bind_transpose_row_blocks(i: TransposeRowBlocksInputs) -> Callable:
    C, words = i.row_blocks.shape[0], i.x8.shape[1] // 4
    whole_words = i.x8.stride(1) == 1 and i.x8.stride(0) % 4 == 0  # a slice of columns too
    stride = i.x8.stride(0) // 4 if whole_words else words
    block_w = min(max(next_power_of_2(words), 16), 32)
    kernel = bind_kernel(
        transpose_row_blocks_kernel, (C * cdiv(words, block_w),),
        TOP_K=i.top_k, ROW_BLOCK=ROW_BLOCK, BLOCK_W=block_w, num_warps=4,
    )  # fmt: skip

    def launch(out, i):
        if i.x8.storage_offset() % 4:  # no whole words
            return copy_into(out, transpose_row_blocks_reference(i))
        x = i.x8 if whole_words else i.x8.flatten()
        kernel(x.view(torch.int32), *dense(i.order, i.row_blocks), out.view(torch.int32), C, words, stride)

    return launch


bind_transpose_row_blocks.fits = lambda i: i.x8.shape[1] % 4 == 0


# row blocks: op


quantize_row_blocks_op = define_op(
    "quantize_row_blocks", QuantizeRowBlocksInputs, outputs=2, new=new_quantize_row_blocks,
    reference=quantize_row_blocks_reference, triton=bind_quantize_row_blocks,
)  # fmt: skip
transpose_row_blocks_op = define_op(
    "transpose_row_blocks", TransposeRowBlocksInputs, new=new_transpose_row_blocks,
    reference=transpose_row_blocks_reference, triton=bind_transpose_row_blocks,
)  # fmt: skip


# row blocks: public


def quantize_row_blocks(
    y: Tensor, factor: Tensor, order: Tensor, top_k: int, row_blocks: Tensor, format: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """Row r of `y` (M, N), times factor[order[r] // top_k], as 8-bit floats (C, N, ROW_BLOCK) by columns, and
    a float32 scale for each column of each block, (C, N).  `factor` (T,) is float32.  Not differentiable.
    Raises ValueError for shapes that do not fit or another format, TypeError for dtypes."""
    return quantize_row_blocks_op(y.detach(), factor, order, top_k, row_blocks, format)


def transpose_row_blocks(x8: Tensor, order: Tensor | None, top_k: int, row_blocks: Tensor) -> Tensor:
    """The rows order // top_k of `x8` (T, K), 8-bit floats, by columns: (C, K, ROW_BLOCK), the same bytes.
    Without an order these are its own rows."""
    return transpose_row_blocks_op(x8, order, top_k, row_blocks)
