"""The sum of each group's rows: the gradient of a grouped matmul's bias.

    out[g] = y[s:e].sum(0)

for each group g, whose rows are [s, e).  With `order`, row r stands for row order[r] // top_k.
"""

import torch
from torch import Tensor

from ..op import define_op, takes
from ._groups import check_groups, check_plan_values, check_rows, split_groups, sum_dtype, take_rows, wide
from ._tile import dense, group_rows
from ._triton import cdiv, jit_kernel, next_power_of_2, tl, triton

# reference


def group_sum_reference(y, group_sizes, order, top_k, scale):
    y = wide(take_rows(y, order, top_k))
    y = y if scale is None else y * take_rows(scale.flatten(), order, 1)[:, None]
    parts = split_groups(y, group_sizes)[:-1]
    return torch.stack([p.sum(0) for p in parts]) if parts else y.new_zeros(0, y.shape[1])


# kernel


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


# launcher


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


# op


group_sum_op = define_op(
    "group_sum(Tensor y, Tensor group_sizes, Tensor? order, int top_k, Tensor? scale) -> Tensor",
    new=new_group_sum,
    check_values=lambda y, group_sizes, order, *_: check_plan_values(
        len(y if order is None else order), group_sizes, order
    ),
    reference=group_sum_reference,
    triton=launch_group_sum,
)


# public


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
