"""Transposed grouped matmul, and the sum of each group's rows: the gradients of a grouped matmul's weights.

    tgmm       out[g] = x[s:e].T @ y[s:e]     the gradient of w
    group_sum  out[g] = y[s:e].sum(0)         the gradient of bias

for each group g, whose rows are [s, e).  Both can gather: with `order`, row r stands for row
order[r] // top_k.
"""

import torch
from torch import Tensor

from .. import tuning
from ..backend import define_inplace_op, define_op, takes
from . import hopper
from ._check import check_device, check_float, check_own_memory, check_shape
from ._groups import check_groups, check_plan_values, check_rows, split_groups, sum_dtype, take_rows, wide
from ._tile import TILE_DTYPES, dense, group_rows, halves, swizzle, tile_options
from ._triton import cdiv, jit_kernel, next_power_of_2, tl, triton

# reference


def tgmm_reference(x, y, group_sizes, order, top_k, columns_first):
    x = take_rows(x, order, top_k)
    x, y = (y, x) if columns_first else (x, y)
    pairs = zip(split_groups(x, group_sizes)[:-1], split_groups(y, group_sizes)[:-1], strict=True)
    return (
        torch.stack([a.T @ b for a, b in pairs])
        if len(group_sizes)
        else x.new_zeros(0, x.shape[1], y.shape[1])
    )


def tgmm_accumulate_reference(out, x, y, group_sizes, order, top_k):
    out += tgmm_reference(wide(x), wide(y), group_sizes, order, top_k, False)


def group_sum_reference(y, group_sizes, order, top_k, scale):
    y = wide(take_rows(y, order, top_k))
    y = y if scale is None else y * take_rows(scale.flatten(), order, 1)[:, None]
    parts = split_groups(y, group_sizes)[:-1]
    return torch.stack([p.sum(0) for p in parts]) if parts else y.new_zeros(0, y.shape[1])


# kernel


@triton.jit
def load_source(order_ptr, m, end, TOP_K: tl.constexpr):
    """The row to read for each of the rows m; for a dropped row, which no group should count, the first."""
    return m if order_ptr is None else tl.maximum(tl.load(order_ptr + m, mask=m < end, other=0), 0) // TOP_K


@jit_kernel
def tgmm_kernel(
    x_ptr,  # (M, K), or (T, K) read at order // top_k
    y_ptr,  # (M, N)
    order_ptr,  # (M,) or None
    out_ptr,  # (G, K, N)
    group_sizes_ptr,  # (G,)
    M,
    N,
    K,
    G,
    x_strides,  # m, k
    y_strides,  # m, n
    out_strides,  # g, k, n
    TOP_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # here BLOCK_M x BLOCK_N is a tile of out[g] (K, N), and BLOCK_K rows are summed over at a time
    x_stride_m, x_stride_k = x_strides
    y_stride_m, y_stride_n = y_strides
    tiles_k, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_k, tile_n = swizzle(tl.program_id(0), G * tiles_k, tiles_n, GROUP_M, NUM_DIES)
    group = tile_k // tiles_k
    row, row_end = group_rows(group, group_sizes_ptr, M, G, BLOCK_G)
    k = tile_k % tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)

    m = row + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (k % K)[None, :] * x_stride_k
    y_ptrs = y_ptr + m[:, None] * y_stride_m + (n % N)[None, :] * y_stride_n
    full_end = row + (row_end - row) // BLOCK_K * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(row, full_end, BLOCK_K):
        source = load_source(order_ptr, m, full_end, TOP_K)
        x = tl.load(x_ptrs + source.to(tl.int64)[:, None] * x_stride_m)
        y = tl.load(y_ptrs)
        acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        m += BLOCK_K
        y_ptrs += BLOCK_K * y_stride_m
    if full_end < row_end:
        mask = (m < row_end)[:, None]
        source = load_source(order_ptr, m, row_end, TOP_K)
        x = tl.load(x_ptrs + source.to(tl.int64)[:, None] * x_stride_m, mask=mask, other=0.0)
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        acc = tl.dot(x.T, y, acc, input_precision=PRECISION)

    out_base = out_ptr + group.to(tl.int64) * out_strides[0]
    out_ptrs = out_base + k.to(tl.int64)[:, None] * out_strides[1] + n.to(tl.int64)[None, :] * out_strides[2]
    mask = (k < K)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        add_columns(acc, k, tile_n * BLOCK_N, K, N, out_base, out_strides)
    else:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_columns(
    acc,  # (rows, columns) of a tile, or of a part of it
    k,  # (rows,)
    first,  # column
    K,
    N,
    out_ptr,  # (K, N)
    out_strides,  # g, k, n
):
    """out += acc, a few columns at a time: acc and all that it is added to would not fit in registers."""
    WIDTH: tl.constexpr = acc.shape[1]
    if WIDTH > 32:
        half: tl.constexpr = WIDTH // 2
        left, right = halves(acc)
        add_columns(left, k, first, K, N, out_ptr, out_strides)
        add_columns(right, k, first + half, K, N, out_ptr, out_strides)
    else:
        n = first + tl.arange(0, WIDTH)
        out_ptrs = (
            out_ptr + k.to(tl.int64)[:, None] * out_strides[1] + n.to(tl.int64)[None, :] * out_strides[2]
        )
        mask = (k < K)[:, None] & (n < N)[None, :]
        acc += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit_kernel
def group_sum_kernel(
    y_ptr,  # (M, N), or (T, N) read at order // top_k
    order_ptr,  # (M,) or None
    scale_ptr,  # (M * top_k,) read at order, or None
    out_ptr,  # (G, N) float32, contiguous
    group_sizes_ptr,  # (G,)
    M,
    N,
    G,
    top_k,
    y_strides,  # m, n
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group = tl.program_id(0)
    row, row_end = group_rows(group, group_sizes_ptr, M, G, BLOCK_G)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(row, row_end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        m_mask = m < row_end
        choice = m if order_ptr is None else tl.maximum(tl.load(order_ptr + m, mask=m_mask, other=0), 0)
        y_ptrs = y_ptr + (choice // top_k).to(tl.int64)[:, None] * y_strides[0] + n[None, :] * y_strides[1]
        y = tl.load(y_ptrs, mask=m_mask[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if scale_ptr is not None:
            y *= tl.load(scale_ptr + choice, mask=m_mask, other=0.0)[:, None]
        acc += y
    tl.store(out_ptr + group.to(tl.int64) * N + n, tl.sum(acc, 0), mask=n < N)


# launcher


def new_tgmm(x, y, group_sizes, order, top_k, columns_first):
    check_shape("y", y, "M", "N")
    check_rows("x", x, "K", order, top_k, y.shape[0])
    check_float(x=x, y=y)
    check_groups(group_sizes, x, y=y, order=order)
    G, K, N = group_sizes.shape[0], x.shape[1], y.shape[1]
    return x.new_empty(G, N, K) if columns_first else x.new_empty(G, K, N)


def check_tgmm_values(x, y, group_sizes, order, *_):
    check_plan_values(len(y), group_sizes, order)


def check_tgmm_accumulate(out, x, y, group_sizes, order, top_k):
    expected = new_tgmm(x, y, group_sizes, order, top_k, False).shape
    if out.shape != expected or not out.is_floating_point():
        raise ValueError(
            f"out must be floating (G, K, N) = {tuple(expected)}, but it is {out.dtype} {tuple(out.shape)}"
        )
    check_device(x=x, out=out)
    check_own_memory("out", out)


def new_group_sum(y, group_sizes, order, top_k, scale):
    rows = y.shape[0] if order is None else order.shape[0]
    check_rows("y", y, "N", order, top_k, rows)
    check_groups(group_sizes, y, order=order, scale=scale)
    if scale is not None and (scale.numel() != rows or not scale.is_contiguous()):
        raise ValueError(
            f"scale must be contiguous with {rows} elements, but it has shape {tuple(scale.shape)}"
        )
    return y.new_empty(group_sizes.shape[0], y.shape[1], dtype=sum_dtype(y))


@takes(*TILE_DTYPES)
def launch_tgmm(out, x, y, group_sizes, order, top_k, columns_first, accumulate=False):
    out = out.mT if columns_first else out
    G, K, N = out.shape
    M = y.shape[0]
    order, group_sizes = dense(order, group_sizes)
    # the pipeline spends stages on the indices, so gathering has rows of its own
    config = tuning.lookup("tgmm" if order is None else "tgmm_gather", x.dtype, M, N, K, G)
    tgmm_kernel[(G * cdiv(K, config.block_m) * cdiv(N, config.block_n),)](
        x, y, order, out, group_sizes, M, N, K, G, x.stride(), y.stride(), out.stride(),
        TOP_K=top_k, ACCUMULATE=accumulate, BLOCK_G=next_power_of_2(G), **tile_options(config),
    )  # fmt: skip


@takes(*TILE_DTYPES)
def launch_tgmm_accumulate(out, x, y, group_sizes, order, top_k):
    launch_tgmm(out, x, y, group_sizes, order, top_k, False, accumulate=True)


@takes(torch.float16, torch.bfloat16, torch.float32)
def launch_group_sum(out, y, group_sizes, order, top_k, scale):
    G, N = out.shape
    M = y.shape[0] if order is None else order.shape[0]
    order, group_sizes = dense(order, group_sizes)
    block_n = 64
    group_sum_kernel[(G, cdiv(N, block_n))](
        y, order, scale, out, group_sizes, M, N, G, top_k, y.stride(),
        BLOCK_G=next_power_of_2(G), BLOCK_M=32, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip


# op


tgmm_op = define_op(
    "tgmm(Tensor x, Tensor y, Tensor group_sizes, Tensor? order, int top_k, bool columns_first) -> Tensor",
    new=new_tgmm,
    check_values=check_tgmm_values,
    reference=tgmm_reference,
    triton=launch_tgmm,
    hopper=hopper.launch_tgmm,
)
tgmm_accumulate_op = define_inplace_op(
    "tgmm_accumulate(Tensor(a!) out, Tensor x, Tensor y, Tensor group_sizes, Tensor? order, int top_k) -> ()",
    check=check_tgmm_accumulate,
    check_values=lambda out, *inputs: check_tgmm_values(*inputs),
    reference=tgmm_accumulate_reference,
    triton=launch_tgmm_accumulate,
    hopper=hopper.launch_tgmm_accumulate,
)
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


def tgmm(x: Tensor, y: Tensor, group_sizes: Tensor, order: Tensor | None = None, top_k: int = 1) -> Tensor:
    """`x[s:e].T @ y[s:e]` for each group of rows [s, e): (M, K), (M, N) -> (G, K, N).

    The gradient of `gmm`'s `w`.

    With `order` (M,), `x` is (T, K) with M = T * top_k, and row r stands for `x[order[r] // top_k]`: rows are
    gathered as they are loaded.  A group without rows gives exact zeros.  Not differentiable.
    Dtypes, strides and errors as in `gmm`.
    """
    return tgmm_op(x, y, group_sizes, order, top_k, False)


def tgmm_accumulate(
    out: Tensor, x: Tensor, y: Tensor, group_sizes: Tensor, order: Tensor | None = None, top_k: int = 1
) -> None:
    """Add `tgmm(x, y, ...)` to `out` (G, K, N), of any floating dtype: float32 `main_grad` accumulation."""
    tgmm_accumulate_op(out, x, y, group_sizes, order, top_k)


def weight_gradient(w, main_grad, x, y, group_sizes, order=None, top_k=1) -> Tensor | None:
    """The gradient of a weight `w` (G, K, N), in the memory layout of `w`, so that autograd need not copy it.

    With a `main_grad` it is added there, and None is returned.
    """
    if main_grad is not None:
        return tgmm_accumulate_op(main_grad, x, y, group_sizes, order, top_k)
    columns_first = w.stride(1) < w.stride(2)
    dw = tgmm_op(x, y, group_sizes, order, top_k, columns_first)
    return dw.mT if columns_first else dw


def group_sum(
    y: Tensor, group_sizes: Tensor, order: Tensor | None = None, top_k: int = 1, scale: Tensor | None = None
) -> Tensor:
    """The sum of each group's rows, in float32: (M, N) -> (G, N), the gradient of `gmm`'s `bias`.

    With `order`, row r stands for `y[order[r] // top_k]`, times the element order[r] of `scale` if given.
    Not differentiable.
    """
    return group_sum_op(y, group_sizes, order, top_k, scale)
