"""Move tokens to their experts' rows and back.

    permute    out[r] = w[order[r]] * x[order[r] // k]              (T, H) -> (R, H)
    unpermute  out[t] = sum over j of w[t, j] * rows[rank[t, j]]    (R, H) -> (T, H)
    row_dots   out[t, j] = <rows[rank[t, j]], x[t]>                 (R, H), (T, H) -> (T, k)

T tokens, k choices each, R <= T*k rows, H columns; `order` (R,) and `rank` (T, k) are inverse, -1 marks a row
or choice that is dropped.  Each is the gradient of the others, and w may be absent, which is a weight of 1.

Rows may be in several windows, each with a rank of its own (`merge_plans`).  A rank of ELSEWHERE says that
the row is in another window, whose sums are in `out` already.  Kernels that add then add to `out`; all others
treat the choice as dropped.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...op import SCOPES, binds, define_op, gradients, takes
from ...private_api import Scoped
from ..base.check import Float, Index, Operand, check_fields, check_order, check_plan_values, sum_dtype, wide
from ..base.host import HOST_DTYPES, array, ext, host, indices, num_threads
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import dense, in_units, unit_of

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELSEWHERE = tl.constexpr(-2)  # the only rank below -1
TOKENS = 64  # of a program that looks for tokens with rows
GATHERED = 8  # rows of a program that gathers them
UNROLL = 16  # choices a token up to which the loop over them is unrolled, so that its loads overlap


class PermuteInputs(NamedTuple):
    """The inputs of the op `permute`: out[r] = routing_weights[order[r]] * x[order[r] // k]."""

    x: Annotated[Operand, "T, H"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    routing_weights: Annotated[Float, "T, k"] | None


rows_alone: Scoped[bool] = Scoped("rows_alone", False)  # inside, experts return rows without their weights
SCOPES.append(rows_alone)


def weights_of(routing_weights: Tensor | None) -> Tensor | None:
    """Return the weights of rows in a sum: None inside of `rows_alone`, where each token has one row."""
    return None if rows_alone.get() else routing_weights


class UnpermuteInputs(NamedTuple):
    """The inputs of the op `unpermute`: out[t] = sum over j of routing_weights[t, j] * x[rank[t, j]]."""

    x: Annotated[Operand, "R, H"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    routing_weights: Annotated[Float, "T, k"] | None


class RowDotsInputs(NamedTuple):
    """The inputs of the op `row_dots`: out[t, j] = <rows[rank[t, j]], x[t]>."""

    rows: Annotated[Operand, "R, H"]
    x: Annotated[Operand, "T, H"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]


# reference
def permute_reference(i: PermuteInputs) -> Tensor:
    tokens = i.order.clamp(min=0).long()
    out = i.x[tokens // i.rank.shape[1]]
    if i.routing_weights is not None:
        out = wide(out) * i.routing_weights.flatten()[tokens, None]
    return out.masked_fill((i.order < 0)[:, None], 0).to(i.x.dtype)


def unpermute_reference(i: UnpermuteInputs) -> Tensor:
    rows, rank, weights = i.x, i.rank, weights_of(i.routing_weights)
    out = torch.zeros(len(rank), rows.shape[1], dtype=sum_dtype(rows), device=rows.device)
    rows = rows if len(rows) else F.pad(rows, (0, 0, 0, 1))  # a row for dropped choices to point at
    for j in range(rank.shape[1]):
        row = wide(rows[rank[:, j].clamp(min=0).long()])
        if weights is not None:
            row = row * weights[:, j, None]
        out += row.masked_fill((rank[:, j] < 0)[:, None], 0)
    return out.to(rows.dtype)


def row_dots_reference(i: RowDotsInputs) -> Tensor:
    picked = wide(i.rows[i.rank.clamp(min=0).long().flatten()]).view(*i.rank.shape, -1)
    return (picked * wide(i.x)[:, None]).sum(2).masked_fill(i.rank < 0, 0)


# kernel
@jit_kernel
def permute_kernel(
    x_ptr,  # (T, H)
    order_ptr,  # (R,)
    rank_ptr,  # (T, k)
    weights_ptr,  # (T, k) or None
    out_ptr,  # (R, H)
    R, H,
    x_strides,  # t, h
    TOP_K: tl.constexpr, UNIT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token: its columns are read once and written to its k rows."""
    H, x_strides = in_units((H, x_strides), UNIT)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    h_mask = h < H
    x = tl.load(x_ptr + t * x_strides[0] + h.to(tl.int64) * x_strides[1], mask=h_mask)
    for j in range(TOP_K):
        i = t * TOP_K + j
        row = tl.load(rank_ptr + i).to(tl.int64)
        unused = tl.load(order_ptr + i, mask=i < R, other=0) < 0  # row i belongs to no choice
        out = x
        if weights_ptr is not None:
            out = x.to(tl.float32) * tl.load(weights_ptr + i).to(tl.float32)
        tl.store(out_ptr + row * H + h, out.to(out_ptr.dtype.element_ty), mask=h_mask & (row >= 0))
        if unused:
            tl.store(out_ptr + i * H + h, tl.zeros_like(x).to(out_ptr.dtype.element_ty), mask=h_mask)


@jit_kernel
def gather_rows_kernel(
    x_ptr,  # (T, H)
    order_ptr,  # (R,)
    out_ptr,  # (R, H), contiguous
    T, R, H,
    x_strides,  # t, h
    TOP_K: tl.constexpr, UNIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Row r of out is row order[r] // TOP_K of x, or any row where there is none: no group counts it."""
    H, x_strides = in_units((H, x_strides), UNIT)
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    source = tl.minimum(tl.maximum(tl.load(order_ptr + r, mask=r < R, other=0), 0) // TOP_K, T - 1)
    mask = (r < R)[:, None] & (h < H)[None, :]
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_strides[0] + h.to(tl.int64)[None, :] * x_strides[1]
    tl.store(out_ptr + r[:, None] * H + h[None, :], tl.load(x_ptrs, mask=mask), mask=mask)


@triton.jit
def add_row(acc, i, rows_ptr, rank_ptr, weights_ptr, cols, h_mask, rows_stride_r):
    """acc + w[i] * rows[rank[i]]; a dropped choice adds nothing, whatever its weight is."""
    row = tl.load(rank_ptr + i).to(tl.int64)
    x = tl.load(rows_ptr + row * rows_stride_r + cols, mask=h_mask & (row >= 0), other=0.0).to(tl.float32)
    if weights_ptr is not None:
        x *= tl.load(weights_ptr + i, mask=row >= 0, other=0.0).to(tl.float32)
    return acc + x


@triton.jit
def sum_token(
    t, h, rows_ptr, rank_ptr, weights_ptr, out_ptr, H, rows_strides, out_stride_t,
    TOP_K: tl.constexpr, UNROLLED: tl.constexpr, ADD: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Write the sum of the rows of token t, columns h, to out.

    With ADD, the sum is added to what `out` holds for a token that has a rank of ELSEWHERE.  With ADD and
    SOME, a token without rows keeps what `out` holds.
    """
    h_mask = h < H
    cols = h.to(tl.int64) * rows_strides[1]
    acc = tl.zeros(h.shape, tl.float32)
    if ADD:
        least = tl.load(rank_ptr + t * TOP_K)
        most = least
        for j in tl.static_range(1, TOP_K):
            rank = tl.load(rank_ptr + t * TOP_K + j)
            least, most = tl.minimum(least, rank), tl.maximum(most, rank)
        if SOME:
            h_mask &= most >= 0
        there = h_mask & (least == ELSEWHERE)
        acc += tl.load(out_ptr + t * out_stride_t + h, mask=there, other=0.0).to(tl.float32)
    if UNROLLED:
        for j in tl.static_range(TOP_K):
            acc = add_row(acc, t * TOP_K + j, rows_ptr, rank_ptr, weights_ptr, cols, h_mask, rows_strides[0])
    else:
        for j in range(TOP_K):
            acc = add_row(acc, t * TOP_K + j, rows_ptr, rank_ptr, weights_ptr, cols, h_mask, rows_strides[0])
    tl.store(out_ptr + t * out_stride_t + h, acc.to(out_ptr.dtype.element_ty), mask=h_mask)


@jit_kernel
def unpermute_kernel(
    rows_ptr,  # (R, H)
    rank_ptr,  # (T, k)
    weights_ptr,  # (T, k) or None
    out_ptr,  # (T, H)
    H,
    rows_strides,  # r, h
    out_stride_t, TOP_K: tl.constexpr, UNROLLED: tl.constexpr, ADD: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token's columns."""
    H, rows_strides, out_stride_t = in_units((H, rows_strides, out_stride_t), UNIT)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pointers = rows_ptr, rank_ptr, weights_ptr, out_ptr
    sum_token(t, h, *pointers, H, rows_strides, out_stride_t, TOP_K, UNROLLED, ADD, False)


@jit_kernel
def unpermute_some_kernel(
    rows_ptr,  # (R, H)
    rank_ptr,  # (T, k)
    weights_ptr,  # (T, k) or None
    out_ptr,  # (T, H)
    T, H,
    rows_strides,  # r, h
    out_stride_t, TOP_K: tl.constexpr, UNROLLED: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least TOP_K
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The columns of some tokens, of which few or none have rows."""
    H, rows_strides, out_stride_t = in_units((H, rows_strides, out_stride_t), UNIT)
    first = tl.program_id(0) * TOKENS
    tokens, j = first + tl.arange(0, TOKENS)[:, None], tl.arange(0, BLOCK_K)[None, :]
    ranks = tl.load(rank_ptr + tokens.to(tl.int64) * TOP_K + j, mask=(tokens < T) & (j < TOP_K), other=-1)
    last = first
    if tl.max(tl.max(ranks, 1), 0) >= 0:
        last = tl.minimum(first + TOKENS, T)
    pointers = rows_ptr, rank_ptr, weights_ptr, out_ptr
    for i in range(last - first):
        t = first.to(tl.int64) + i
        for start in range(0, H, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            sum_token(t, h, *pointers, H, rows_strides, out_stride_t, TOP_K, UNROLLED, True, True)


@jit_kernel
def row_dots_kernel(
    rows_ptr,  # (R, H)
    x_ptr,  # (T, H)
    rank_ptr,  # (T, k)
    out_ptr,  # (T, k) float32
    H,
    rows_strides,  # r, h
    x_strides,  # t, h
    TOP_K: tl.constexpr, UNIT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    H, rows_strides, x_strides = in_units((H, rows_strides, x_strides), UNIT)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rank_ptr + i).to(tl.int64)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(0, H, BLOCK_H):
        h = (first + tl.arange(0, BLOCK_H)).to(tl.int64)
        mask = (h < H) & (row >= 0)
        r = tl.load(rows_ptr + row * rows_strides[0] + h * rows_strides[1], mask=mask, other=0.0)
        x = tl.load(x_ptr + i // TOP_K * x_strides[0] + h * x_strides[1], mask=mask, other=0.0)
        acc += r.to(tl.float32) * x.to(tl.float32)
    tl.store(out_ptr + i, tl.sum(acc, 0))


# launcher
def check_routed(i) -> dict[str, int]:
    """Do as `check_fields` for inputs with an `order` (R,) and a `rank` (T, k), which must fit together."""
    size = check_fields(i)
    if i.rank.shape[1] < 1:
        raise ValueError(f"rank is (T, k={i.rank.shape[1]}); k must be at least 1")
    check_order(i.order, i.rank)
    return size


def check_values(i) -> None:
    check_plan_values(len(i.order), order=i.order, rank=i.rank)


def new_routed(i, rows: str, columns: str) -> Tensor:
    """Do as `check_routed`, and return a new tensor with these two axes of the inputs."""
    size = check_routed(i)
    return i.x.new_empty(size[rows], size[columns])


def new_row_dots(i: RowDotsInputs) -> Tensor:
    size = check_routed(i)
    return i.rows.new_empty(size["T"], size["k"], dtype=sum_dtype(i.rows))


def block_of(columns: int) -> int:
    """Columns for a program of 4 warps: 16 bytes a thread, or less for a narrow row."""
    return min(1024, next_power_of_2(max(columns, 1)))


@binds
@takes(*TRITON_DTYPES)
def bind_permute(i: PermuteInputs) -> Callable:
    (T, H), block = i.x.shape, block_of(i.x.shape[1])
    unit = unit_of((H,), i.x.stride())
    kernel = bind_kernel(permute_kernel, (T, cdiv(H, block)), TOP_K=i.rank.shape[1], UNIT=unit, BLOCK_H=block)
    sizes = i.order.shape[0], H, i.x.stride()
    return lambda out, i: kernel(i.x, *dense(i.order, i.rank, i.routing_weights), out, *sizes)


def bind_gather_rows(x: Tensor, rows: int, top_k: int) -> Callable:
    """Return `gather(x, order, out)` for that many rows: row r of `out` is row order[r] // top_k of x."""
    H, block = x.shape[1], block_of(min(x.shape[1], 512))
    grid, unit = (cdiv(rows, GATHERED), cdiv(H, block)), unit_of((H,), x.stride())
    kernel = bind_kernel(gather_rows_kernel, grid, TOP_K=top_k, UNIT=unit, BLOCK_R=GATHERED, BLOCK_H=block)
    sizes = x.shape[0], rows, H, x.stride()
    return lambda x, order, out: kernel(x, *dense(order), out, *sizes)


def bind_unpermute_columns(
    choices: Sequence[int], columns: int, rows_strides: Sequence[int], out_stride: int, add: bool = False,
    some: bool = False,
) -> Callable:  # fmt: skip
    """Return `launch(out, rows, rank, routing_weights)` of `unpermute` for `choices`, (T, k), and the row
    stride of `out`, which may be some columns of a wider tensor.

    With `add` or `some`, the sum is added to what `out` holds for a token that has a rank of ELSEWHERE.  With
    `some`, a token without rows keeps what `out` holds.
    """
    (T, top_k), block = choices, block_of(columns)
    constants = {"TOP_K": top_k, "UNROLLED": top_k <= UNROLL, "BLOCK_H": block}
    constants["UNIT"] = unit_of((columns, out_stride), rows_strides)
    if some:
        constants |= {"TOKENS": TOKENS, "BLOCK_K": next_power_of_2(top_k)}
        kernel, sizes = bind_kernel(unpermute_some_kernel, (cdiv(T, TOKENS),), **constants), (T, columns)
    else:
        grid, sizes = (T, cdiv(columns, block)), (columns,)
        kernel = bind_kernel(unpermute_kernel, grid, ADD=add, **constants)

    def launch(out, rows, rank, routing_weights):
        kernel(rows, *dense(rank, routing_weights), out, *sizes, rows_strides, out_stride)

    return launch


@binds
@takes(*TRITON_DTYPES)
def bind_unpermute(i: UnpermuteInputs) -> Callable:
    H = i.x.shape[1]
    unpermute = bind_unpermute_columns(i.rank.shape, H, i.x.stride(), H)
    return lambda out, i: unpermute(out, i.x, i.rank, weights_of(i.routing_weights))


@binds
@takes(*TRITON_DTYPES)
def bind_row_dots(i: RowDotsInputs) -> Callable:
    H, top_k = i.x.shape[1], i.rank.shape[1]
    strides = i.rows.stride(), i.x.stride()
    unit = unit_of((H,), *strides)
    kernel = bind_kernel(row_dots_kernel, (i.rank.numel(),), TOP_K=top_k, UNIT=unit, BLOCK_H=block_of(H))
    return lambda out, i: kernel(i.rows, i.x, i.rank.contiguous(), out, H, *strides)


@takes(*HOST_DTYPES)
def launch_permute_host(out: Tensor, i: PermuteInputs) -> None:
    weights = None if i.routing_weights is None else array(i.routing_weights.float())
    ext.gather(array(i.x), indices(i.order), weights, array(out), i.rank.shape[1], num_threads())


@takes(*HOST_DTYPES)
def launch_unpermute_host(out: Tensor, i: UnpermuteInputs) -> None:
    weights = weights_of(i.routing_weights)
    weights = None if weights is None else array(weights.float())
    ext.unpermute(array(i.x), indices(i.rank), weights, array(out), num_threads())


@takes(*HOST_DTYPES)
def launch_row_dots_host(out: Tensor, i: RowDotsInputs) -> None:
    ext.row_dots(array(i.rows), array(i.x), indices(i.rank), array(out), num_threads())


# op
def save_permute(ctx, i, output):
    needs = PermuteInputs(*ctx.needs_input_grad[: len(i)])  # torch's dispatcher has one more
    weighted = i.routing_weights is not None and needs.routing_weights
    ctx.save_for_backward(i.x if weighted else None, i.order, i.rank, i.routing_weights)


def backward_permute(ctx, dout):
    x, order, rank, routing_weights = ctx.saved_tensors
    dx = dweights = None
    if PermuteInputs(*ctx.needs_input_grad).x:
        dx = unpermute(dout, order, rank, routing_weights)
    if x is not None:
        dweights = row_dots(dout, x, order, rank).to(routing_weights.dtype)
    return gradients(PermuteInputs, x=dx, routing_weights=dweights)


def backward_unpermute(ctx, dout):
    rows, order, rank, routing_weights = ctx.saved_tensors
    drows = dweights = None
    if UnpermuteInputs(*ctx.needs_input_grad).x:
        drows = permute(dout, order, rank, routing_weights)
    if rows is not None:
        dweights = row_dots(rows, dout, order, rank).to(routing_weights.dtype)
    return gradients(UnpermuteInputs, x=drows, routing_weights=dweights)


def backward_row_dots(ctx, ddots):
    rows, x, order, rank = ctx.saved_tensors
    needs = RowDotsInputs(*ctx.needs_input_grad)
    drows = permute(x, order, rank, ddots) if needs.rows else None
    dx = unpermute(rows, order, rank, ddots) if needs.x else None
    return gradients(RowDotsInputs, rows=drows, x=dx)


permute_op = define_op(
    "permute", PermuteInputs, new=lambda i: new_routed(i, "R", "H"), check_values=check_values,
    reference=permute_reference, triton=bind_permute, host=host(launch_permute_host),
    save=save_permute, backward=backward_permute,
)  # fmt: skip
unpermute_op = define_op(
    "unpermute", UnpermuteInputs, new=lambda i: new_routed(i, "T", "H"), check_values=check_values,
    reference=unpermute_reference, triton=bind_unpermute, host=host(launch_unpermute_host),
    save=save_permute, backward=backward_unpermute,
)  # fmt: skip
row_dots_op = define_op(
    "row_dots", RowDotsInputs, new=new_row_dots, check_values=check_values, reference=row_dots_reference,
    triton=bind_row_dots, host=host(launch_row_dots_host), backward=backward_row_dots,
    save=lambda ctx, i, output: ctx.save_for_backward(*i),
)  # fmt: skip


# public
def permute(x: Tensor, order: Tensor, rank: Tensor, routing_weights: Tensor | None = None) -> Tensor:
    """Copy each token of `x` (T, H) to its k rows, (R, H): row r is x[order[r] // k], in the dtype of `x`.

    `order` (R,) and `rank` (T, k), int32 or int64, are those of `sort_by_expert` or any such pair: rank[t, j]
    is the row of choice t*k + j, order the inverse, and -1 marks what is dropped.  A row with the order -1 is
    zeros.  With `routing_weights` (T, k), of any floating dtype, row r is multiplied in float32 by the weight
    of its choice.  Differentiable in `x` and `routing_weights`; strides are free.

    Raises ValueError for shapes or devices that do not fit, TypeError for dtypes; with MOE_AITER_DEBUG=1 also
    ValueError for an index of R or more, and for an `order` and a `rank` that are not inverse.
    """
    return permute_op(x, order, rank, routing_weights)


def unpermute(rows: Tensor, order: Tensor, rank: Tensor, routing_weights: Tensor | None = None) -> Tensor:
    """Sum each token's k rows of `rows` (R, H), times its `routing_weights` (T, k) if given; returns (T, H).

    The inverse of `permute`, which documents `order`, `rank` and the errors.  The sum runs over j = 0..k-1
    in this order in float32 (float64 for float64) and is rounded once.  A dropped choice, rank -1, adds
    nothing.  Differentiable in `rows` and `routing_weights`; strides are free.
    """
    return unpermute_op(rows, order, rank, routing_weights)


def row_dots(rows: Tensor, x: Tensor, order: Tensor, rank: Tensor) -> Tensor:
    """The inner product of each token of `x` (T, H) with each of its k rows of `rows` (R, H), as (T, k).

    In float32, or float64 for float64; 0 for a dropped choice.  This is the routing weights' gradient in
    `unpermute` and `permute`, which documents `order`, `rank` and the errors.  Differentiable in `rows`, `x`.
    """
    return row_dots_op(rows, x, order, rank)
