"""Sums over rows: of each group, over the choices of a token, and of the partial sums of several programs.

`group_sum` is the gradient of a grouped matmul's bias:

    out[g] = y[s:e].sum(0)

for each group g, whose rows are [s, e).  With `order`, row r stands for row order[r] // top_k.

`weigh_rows` is the backward pass of a weighted sum of rows, in one pass over the rows:

    out[r]     = s[t, j] * x[r]      the gradient of a row; x is the gradient without the weight
    dots[t, j] = <x[r], y[r]>        the gradient of the row's weight; y is the row

for the row r = rank[t, j] of each choice.  A row without a choice becomes zeros, a dropped choice gets 0.

`bind_add_partial_sums` adds up the partial sums (P, R) of several programs: each choice gets the sum of its
row.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import binds, define_op, takes
from ..base.check import (
    Float,
    Index,
    Operand,
    check_fields,
    check_row_values,
    check_rows,
    split_groups,
    sum_dtype,
    take_rows,
    wide,
)
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES, dense, group_rows, in_units, unit_of, whole_units
from .permute import block_of, check_values


class GroupSumInputs(NamedTuple):
    """The inputs of the op `group_sum`: out[g] = the sum of scale[order[r]] * y[order[r] // top_k] over the
    rows r of group g."""

    y: Tensor  # (M, N), or (T, N) with order
    group_sizes: Annotated[Index, "G"]
    order: Annotated[Index, "M"] | None
    top_k: int
    scale: Tensor | None  # M numbers, contiguous


class WeighRowsInputs(NamedTuple):
    """The inputs of the op `weigh_rows`: out[r] = s * x[r] and dots[t, j] = <x[r], y[r]>, where s is
    routing_weights[t, j] and r is rank[t, j]."""

    x: Annotated[Operand, "R, N"]
    y: Annotated[Operand, "R, N"]
    routing_weights: Annotated[Float, "T, k"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]


# group_sum: reference


def group_sum_reference(i: GroupSumInputs) -> Tensor:
    y = wide(take_rows(i.y, i.order, i.top_k))
    y = y if i.scale is None else y * take_rows(i.scale.flatten(), i.order, 1)[:, None]
    groups = split_groups(y, i.group_sizes)[:-1]
    return torch.stack([p.sum(0) for p in groups]) if groups else y.new_zeros(0, y.shape[1])


# group_sum: kernel


@triton.jit
def sum_rows(
    y_ptr,  # (M, N), or (T, N) read at order // top_k
    order_ptr,  # (M,) or None
    scale_ptr,  # (T * top_k,) read at order, or None
    row, row_end,
    n,  # (columns,)
    N, top_k,
    y_strides,  # m, n
    BLOCK_M: tl.constexpr, UNIT: tl.constexpr = 1,
):  # fmt: skip
    """The columns n of the rows [row, row_end), added up in float32, BLOCK_M rows at a time.

    Rows side by side are read in whole units, with some before and behind these.
    """
    acc = tl.zeros((BLOCK_M, n.shape[0]), tl.float32)
    columns = n.to(tl.int64)[None, :] * y_strides[1]
    read_end = whole_units(row_end + UNIT - 1, UNIT)
    for start in range(whole_units(row, UNIT), row_end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        m_mask = m < read_end
        choice = m if order_ptr is None else tl.maximum(tl.load(order_ptr + m, mask=m_mask, other=0), 0)
        y_ptrs = y_ptr + (choice // top_k).to(tl.int64)[:, None] * y_strides[0] + columns
        y = tl.load(y_ptrs, mask=m_mask[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if scale_ptr is not None:
            y *= tl.load(scale_ptr + choice, mask=m_mask, other=0.0)[:, None]
        if UNIT > 1:
            y = tl.where(((m >= row) & (m < row_end))[:, None], y, 0.0)
        acc += y
    return tl.sum(acc, 0)


@jit_kernel
def group_sum_kernel(
    y_ptr,  # (M, N), or (T, N) read at order // top_k
    order_ptr,  # (M,) or None
    scale_ptr,  # (T * top_k,) read at order, or None
    out_ptr,  # (G, N) float32
    group_sizes_ptr,  # (G,)
    M, N, G, top_k,
    y_strides,  # m, n
    out_strides,  # g, n
    UNIT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    N, y_strides = in_units((N, y_strides), UNIT)
    group = tl.program_id(0)
    row, row_end = group_rows(group, group_sizes_ptr, M, BLOCK_G)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = sum_rows(y_ptr, order_ptr, scale_ptr, row, row_end, n, N, top_k, y_strides, BLOCK_M)
    tl.store(out_ptr + group.to(tl.int64) * out_strides[0] + n * out_strides[1], total, mask=n < N)


# group_sum: launcher


def new_group_sum(i: GroupSumInputs) -> Tensor:
    rows = i.y.shape[0] if i.order is None else i.order.shape[0]
    check_rows("y", i.y, "N", i.order, i.top_k, rows)
    check_fields(i)
    choices = i.y.shape[0] * i.top_k
    if i.scale is not None and (i.scale.numel() != choices or not i.scale.is_contiguous()):
        raise ValueError(
            f"scale must be contiguous with {choices} elements, but it has shape {tuple(i.scale.shape)}"
        )
    return i.y.new_empty(i.group_sizes.shape[0], i.y.shape[1], dtype=sum_dtype(i.y))


def bind_sum_groups(
    M: int, N: int, G: int, top_k: int, y_strides: Sequence[int], out_strides: Sequence[int]
) -> Callable:
    """Return `launch(out, y, group_sizes, order, scale)` of `group_sum` for M rows in G groups."""
    block_n, sizes = 64, (M, N, G, top_k, y_strides, out_strides)
    kernel = bind_kernel(
        group_sum_kernel, (G, cdiv(N, block_n)), UNIT=unit_of((N,), y_strides),
        BLOCK_G=next_power_of_2(G), BLOCK_M=32, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip

    def launch(out, y, group_sizes, order, scale):
        order, group_sizes = dense(order, group_sizes)
        kernel(y, order, scale, out, group_sizes, *sizes)

    return launch


@binds
@takes(torch.float16, torch.bfloat16, torch.float32)
def bind_group_sum(i: GroupSumInputs) -> Callable:
    (M, N), G = i.y.shape, i.group_sizes.shape[0]
    M = M if i.order is None else i.order.shape[0]
    add = bind_sum_groups(M, N, G, i.top_k, i.y.stride(), (N, 1))
    return lambda out, i: add(out, i.y, i.group_sizes, i.order, i.scale)


def bind_bias_grad(i) -> Callable:
    """Return `launch(out, i)` that fills the `bias_grad` of the inputs of the op `tgmm_into`."""
    M, G, of_y = i.y.shape[0], i.group_sizes.shape[0], i.sums_of_y
    rows, top_k = (i.y, 1) if of_y else (i.x, i.top_k)
    add = bind_sum_groups(M, rows.shape[1], G, top_k, rows.stride(), i.bias_grad.stride())

    def launch(out, i):
        add(i.bias_grad, *((i.y, i.group_sizes, None) if of_y else (i.x, i.group_sizes, i.order)), None)

    return launch


# group_sum: op


group_sum_op = define_op(
    "group_sum", GroupSumInputs, new=new_group_sum, check_values=lambda i: check_row_values(i.y, i),
    reference=group_sum_reference, triton=bind_group_sum,
)  # fmt: skip


# group_sum: public


def group_sum(
    y: Tensor, group_sizes: Tensor, order: Tensor | None = None, top_k: int = 1, scale: Tensor | None = None
) -> Tensor:
    """The sum of each group's rows, in float32: (M, N) -> (G, N), the gradient of `gmm`'s `bias`.

    With `order`, row r stands for `y[order[r] // top_k]`, times the element order[r] of `scale` if given.
    Not differentiable.
    """
    return group_sum_op(y, group_sizes, order, top_k, scale)


# weigh_rows: reference


def weigh_rows_reference(i: WeighRowsInputs) -> tuple[Tensor, Tensor]:
    choice, used, x = i.order.clamp(min=0).long(), (i.order >= 0)[:, None], wide(i.x)
    s = i.routing_weights.flatten().to(x.dtype)[choice, None]
    dots = (x * wide(i.y)).sum(1)[i.rank.clamp(min=0).long()]
    return (x * s).where(used, 0).to(i.x.dtype), dots.masked_fill(i.rank < 0, 0)


# weigh_rows: kernel


@jit_kernel
def weigh_rows_kernel(
    x_ptr,  # (R, N)
    y_ptr,  # (R, N)
    weights_ptr,  # (T, k)
    order_ptr,  # (R,)
    rank_ptr,  # (T, k)
    out_ptr,  # (R, N), contiguous
    dots_ptr,  # (T, k) float32
    R, N,
    x_strides,  # r, n
    y_strides,  # r, n
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One choice, and a row that has none."""
    N, x_strides, y_strides = in_units((N, x_strides, y_strides), UNIT)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rank_ptr + i).to(tl.int64)
    s = tl.load(weights_ptr + i, mask=row >= 0, other=0.0).to(tl.float32)
    unused = tl.load(order_ptr + i, mask=i < R, other=0) < 0
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, N, BLOCK):
        n = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = (n < N) & (row >= 0)
        x = tl.load(x_ptr + row * x_strides[0] + n * x_strides[1], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * y_strides[0] + n * y_strides[1], mask=mask, other=0.0)
        acc += x * y.to(tl.float32)
        tl.store(out_ptr + row * N + n, (x * s).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + i * N + n, tl.zeros_like(x).to(out_ptr.dtype.element_ty), mask=(n < N) & unused)
    tl.store(dots_ptr + i, tl.sum(acc, 0))


# weigh_rows: launcher


def new_weigh_rows(i: WeighRowsInputs) -> tuple[Tensor, Tensor]:
    check_fields(i)
    return i.x.new_empty(i.x.shape), i.x.new_empty(i.rank.shape, dtype=sum_dtype(i.x))


@binds
@takes(*TILE_DTYPES)
def bind_weigh_rows(i: WeighRowsInputs) -> Callable:
    N = i.x.shape[1]
    strides = i.x.stride(), i.y.stride()
    unit, sizes = unit_of((N,), *strides), (*i.x.shape, *strides)
    kernel = bind_kernel(weigh_rows_kernel, (i.rank.numel(),), UNIT=unit, BLOCK=block_of(N))
    return lambda outs, i: kernel(i.x, i.y, *dense(i.routing_weights, i.order, i.rank), *outs, *sizes)


# weigh_rows: op

weigh_rows_op = define_op(
    "weigh_rows", WeighRowsInputs, outputs=2, new=new_weigh_rows, check_values=check_values,
    reference=weigh_rows_reference, triton=bind_weigh_rows,
)  # fmt: skip


def scaled_rows(x: torch.Tensor, *plan: torch.Tensor) -> torch.Tensor:
    """Each row of `x` times the weight of its choice."""
    return weigh_rows_op(x, x, *plan)[0]


# add_partial_sums: kernel


@jit_kernel
def add_partial_sums_kernel(
    partial_sums_ptr,  # (P, M) float32
    rank_ptr,  # (C,)
    out_ptr,  # (C,)
    P, M, C, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[c] = the sum of column rank[c] of the partial sums, in order; 0 for a dropped choice."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(rank_ptr + c, mask=c < C, other=-1).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for p in range(0, P):
        acc += tl.load(partial_sums_ptr + p * tl.cast(M, tl.int64) + r, mask=r >= 0, other=0.0)
    tl.store(out_ptr + c, acc, mask=c < C)


# add_partial_sums: launcher


def bind_add_partial_sums(count: int, rows: int, choices: int) -> Callable:
    """Return `launch(partial_sums, rank, out)` with out[t, j] = the sum of column rank[t, j] of the partial
    sums, (count, rows); 0 for a dropped choice."""
    block, sizes = 256, (count, rows, choices)
    kernel = bind_kernel(add_partial_sums_kernel, (cdiv(choices, block),), BLOCK=block, num_warps=4)
    return lambda partial_sums, rank, out: kernel(partial_sums, rank.contiguous(), out, *sizes)
