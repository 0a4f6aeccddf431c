"""Sums over rows: of each group, over the choices of a token, and of the partial sums of several programs.

`group_sum` is the gradient of a grouped matmul's bias:

    out[g] = y[s:e].sum(0)

for each group g, whose rows are [s, e).  With `order`, row r stands for row order[r] // top_k.

`weigh_rows` is the backward pass of a weighted sum of rows, in one pass over the rows:

    out[r]     = s[t, j] * x[r]      the gradient of a row; x is the gradient without the weight
    dots[t, j] = <x[r], y[r]>        the gradient of the row's weight; y is the row

for the row r = rank[t, j] of each choice.  A row without a choice becomes zeros, a dropped choice gets 0.

`sum_parts` adds up the partial sums (P, R) of several programs, and gives each choice the sum of its row.
"""

import torch
from torch import Tensor

from ...op import define_op, takes
from ..base.check import (
    check_device,
    check_float,
    check_groups,
    check_plan_values,
    check_routing_weights,
    check_rows,
    check_shape,
    split_groups,
    sum_dtype,
    take_rows,
    wide,
)
from ..base.launch import cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES, dense, group_rows
from .permute import check_sorted_rows

# group_sum: reference


def group_sum_reference(y, group_sizes, order, top_k, scale):
    y = wide(take_rows(y, order, top_k))
    y = y if scale is None else y * take_rows(scale.flatten(), order, 1)[:, None]
    parts = split_groups(y, group_sizes)[:-1]
    return torch.stack([p.sum(0) for p in parts]) if parts else y.new_zeros(0, y.shape[1])


# group_sum: kernel


@triton.jit
def sum_rows(
    y_ptr,  # (M, N), or (T, N) read at order // top_k
    order_ptr,  # (M,) or None
    scale_ptr,  # (M * top_k,) read at order, or None
    row,
    row_end,
    n,  # (columns,)
    N,
    top_k,
    y_strides,  # m, n
    BLOCK_M: tl.constexpr,
):
    """The columns n of the rows [row, row_end), added up in float32, BLOCK_M rows at a time."""
    acc = tl.zeros((BLOCK_M, n.shape[0]), tl.float32)
    columns = n.to(tl.int64)[None, :] * y_strides[1]
    for start in range(row, row_end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        m_mask = m < row_end
        choice = m if order_ptr is None else tl.maximum(tl.load(order_ptr + m, mask=m_mask, other=0), 0)
        y_ptrs = y_ptr + (choice // top_k).to(tl.int64)[:, None] * y_strides[0] + columns
        y = tl.load(y_ptrs, mask=m_mask[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if scale_ptr is not None:
            y *= tl.load(scale_ptr + choice, mask=m_mask, other=0.0)[:, None]
        acc += y
    return tl.sum(acc, 0)


@jit_kernel
def group_sum_kernel(
    y_ptr,  # (M, N), or (T, N) read at order // top_k
    order_ptr,  # (M,) or None
    scale_ptr,  # (M * top_k,) read at order, or None
    out_ptr,  # (G, N) float32
    group_sizes_ptr,  # (G,)
    M,
    N,
    G,
    top_k,
    y_strides,  # m, n
    out_strides,  # g, n
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group = tl.program_id(0)
    row, row_end = group_rows(group, group_sizes_ptr, M, G, BLOCK_G)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = sum_rows(y_ptr, order_ptr, scale_ptr, row, row_end, n, N, top_k, y_strides, BLOCK_M)
    tl.store(out_ptr + group.to(tl.int64) * out_strides[0] + n * out_strides[1], total, mask=n < N)


# group_sum: launcher


def new_group_sum(y, group_sizes, order, top_k, scale):
    rows = y.shape[0] if order is None else order.shape[0]
    check_rows("y", y, "N", order, top_k, rows)
    check_groups(group_sizes, y, order=order, scale=scale)
    if scale is not None and (scale.numel() != rows or not scale.is_contiguous()):
        raise ValueError(
            f"scale must be contiguous with {rows} elements, but it has shape {tuple(scale.shape)}"
        )
    return y.new_empty(group_sizes.shape[0], y.shape[1], dtype=sum_dtype(y))


@takes(torch.float16, torch.bfloat16, torch.float32)
def launch_group_sum(out, y, group_sizes, order, top_k, scale):
    G, N = out.shape
    M = y.shape[0] if order is None else order.shape[0]
    order, group_sizes = dense(order, group_sizes)
    block_n = 64
    group_sum_kernel[(G, cdiv(N, block_n))](
        y, order, scale, out, group_sizes, M, N, G, top_k, y.stride(), out.stride(),
        BLOCK_G=next_power_of_2(G), BLOCK_M=32, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


# group_sum: op


group_sum_op = define_op(
    "group_sum(Tensor y, Tensor group_sizes, Tensor? order, int top_k, Tensor? scale) -> Tensor",
    new=new_group_sum,
    check_values=lambda y, group_sizes, order, *_: check_plan_values(
        len(y if order is None else order), group_sizes, order
    ),
    reference=group_sum_reference,
    triton=launch_group_sum,
)


# group_sum: public


def group_sum(
    y: Tensor, group_sizes: Tensor, order: Tensor | None = None, top_k: int = 1, scale: Tensor | None = None
) -> Tensor:
    """The sum of each group's rows, in float32: (M, N) -> (G, N), the gradient of `gmm`'s `bias`.

    With `order`, row r stands for `y[order[r] // top_k]`, times the element order[r] of `scale` if given.
    Not differentiable.
    """
    return group_sum_op(y, group_sizes, order, top_k, scale)


def bias_dots(dout: Tensor, bias: Tensor, rank: Tensor, group_sizes: Tensor) -> Tensor:
    """<dout, bias> of each choice (T, k), 0 for a dropped one: of every expert, then of the chosen ones.

    E products a token instead of k rows gathered.
    """
    expert = torch.searchsorted(group_sizes.cumsum(0), rank.long(), right=True).clamp(max=len(bias) - 1)
    return (wide(dout) @ wide(bias).T).gather(1, expert).masked_fill(rank < 0, 0)


# weigh_rows: reference


def weigh_rows_reference(x, y, routing_weights, order, rank):
    choice, used = order.clamp(min=0).long(), (order >= 0)[:, None]
    s = routing_weights.flatten().to(sum_dtype(x))[choice, None]
    dots = (wide(x) * wide(y)).sum(1)[rank.clamp(min=0).long()]
    return (wide(x) * s).where(used, 0).to(x.dtype), dots.masked_fill(rank < 0, 0)


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
    N,
    x_strides,  # r, n
    y_strides,  # r, n
    BLOCK: tl.constexpr,
):
    """One choice, and a row that has none."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rank_ptr + i).to(tl.int64)
    s = tl.load(weights_ptr + i, mask=row >= 0, other=0.0).to(tl.float32)
    unused = tl.load(order_ptr + i) < 0
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


def new_weigh_rows(x, y, routing_weights, order, rank):
    check_sorted_rows(x, order)
    check_shape("y", y, "R", "N")
    check_float(x=x, y=y)
    if x.shape != y.shape:
        raise ValueError(f"x is {tuple(x.shape)} but y is {tuple(y.shape)}")
    check_routing_weights(routing_weights, rank, x)
    check_device(x=x, y=y, order=order, rank=rank)
    return x.new_empty(x.shape), x.new_empty(rank.shape, dtype=sum_dtype(x))


@takes(*TILE_DTYPES)
def launch_weigh_rows(outs, x, y, routing_weights, order, rank):
    out, dots = outs
    weights, order, rank = routing_weights.contiguous(), order.contiguous(), rank.contiguous()
    block = min(1024, next_power_of_2(max(x.shape[1], 1)))
    weigh_rows_kernel[(rank.numel(),)](
        x, y, weights, order, rank, out, dots, x.shape[1], x.stride(), y.stride(), BLOCK=block
    )


# weigh_rows: op

weigh_rows_op = define_op(
    "weigh_rows(Tensor x, Tensor y, Tensor routing_weights, Tensor order, Tensor rank) -> (Tensor, Tensor)",
    new=new_weigh_rows,
    check_values=lambda x, y, routing_weights, order, rank: check_plan_values(len(x), order=order, rank=rank),
    reference=weigh_rows_reference,
    triton=launch_weigh_rows,
)


def scaled_rows(x: torch.Tensor, *plan: torch.Tensor) -> torch.Tensor:
    """Each row of `x` times the weight of its choice."""
    return weigh_rows_op(x, x, *plan)[0]


# sum_parts: kernel


@jit_kernel
def sum_parts_kernel(
    parts_ptr,  # (P, M) float32
    rank_ptr,  # (C,)
    out_ptr,  # (C,)
    P,
    M,
    C,
    BLOCK: tl.constexpr,
):
    """out[c] = the sum of column rank[c] of parts, in order; 0 for a dropped choice."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(rank_ptr + c, mask=c < C, other=-1).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for p in range(0, P):
        acc += tl.load(parts_ptr + p * tl.cast(M, tl.int64) + r, mask=r >= 0, other=0.0)
    tl.store(out_ptr + c, acc, mask=c < C)


# sum_parts: launcher


def sum_parts(parts: Tensor, rank: Tensor, out: Tensor) -> None:
    """out[t, j] = the sum of column rank[t, j] of `parts` (P, R); 0 for a dropped choice."""
    block, (P, R) = 256, parts.shape
    sum_parts_kernel[(cdiv(rank.numel(), block),)](
        parts, rank.contiguous(), out, P, R, rank.numel(), BLOCK=block, num_warps=4
    )
