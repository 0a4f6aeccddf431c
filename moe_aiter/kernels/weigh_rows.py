"""What a weighted sum of rows asks of its backward pass, in one pass over them:

    out[r]     = s[t, j] * x[r]      the gradient of a row, with x the one that it would have unweighted
    dots[t, j] = <x[r], y[r]>        the gradient of its weight, with y the row

for the row r = rank[t, j] of each choice.  A row without a choice becomes zeros, a dropped choice has 0.
"""

import torch

from ..op import define_op, takes
from ._check import check_device, check_float, check_routing_weights, check_shape
from ._groups import check_plan_values, sum_dtype, wide
from ._tile import TILE_DTYPES
from ._triton import jit_kernel, next_power_of_2, tl
from .permute import check_sorted_rows

# reference


def weigh_rows_reference(x, y, routing_weights, order, rank):
    choice, used = order.clamp(min=0).long(), (order >= 0)[:, None]
    s = routing_weights.flatten().to(sum_dtype(x))[choice, None]
    dots = (wide(x) * wide(y)).sum(1)[rank.clamp(min=0).long()]
    return (wide(x) * s).where(used, 0).to(x.dtype), dots.masked_fill(rank < 0, 0)


# kernel


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


# launcher


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


# op

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
