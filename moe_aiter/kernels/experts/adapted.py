"""The two projections of experts that have low-rank adapters, without the product of an adapter's factors.

    adapted_up     z[r]   = w[e] @ x[order[r] // k] + bias[e] + b[e] @ low[r]
    adapted_down   out[t] = sum over j of s[t, j] * (w[e] @ a[r] + bias[e] + b[e] @ low[r])

(T, H) -> (R, N) and back, for the row r = rank[t, j] of each choice and its expert e.  low (R, r) is the
adapter's first product, an `adapted_up` or a `segment_gmm` of its own, perhaps with a dropout before it.  The
caller computes what stands between the two projections.

Without an adapter both are grouped products whose gradients keep no rows that were only moved: neither those
of x nor those that are summed up.  The gradient of the routing weights is <u, a> + <g, low> + <dout, bias>,
with u = w[e].T @ dout and g = b[e].T @ dout.  A frozen weight gets no gradient.

`add_low_rank` adds an adapter's second product to that of the weight, in place: `out[s:e] += x[s:e] @ w[g]`,
with M rows, G groups, r in, N out.  r is a rank and so short that reading and writing `out` once dominates.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...op import Written, binds, define_inplace_op, define_op, fill, gradients, takes
from ..base.check import (
    check_axes,
    check_float,
    check_groups,
    check_own_memory,
    check_plan_values,
    check_routing_weights,
    split_groups,
)
from ..base.tile import TILE_DTYPES
from ..grouped.gmm import gmm_op, gmm_reference
from ..grouped.segment_gmm import SHORT_K, SegmentInputs, bind_segments, segment_gmm_op
from ..grouped.segments import segment_weight_gradient
from ..grouped.tgmm import chosen, fill_gmm, weight_gradient
from ..rows.permute import check_sorted_rows, permute_op, unpermute_reference
from ..rows.sums import bias_dots, group_sum, scaled_rows, weigh_rows_op
from .up import expert_up_reference, up_gradients

# add_low_rank: reference


def add_low_rank_reference(out, x, w, group_sizes):
    add = chosen(out, x, out)
    pairs = zip(split_groups(out, group_sizes), split_groups(x, group_sizes), w.unbind(), strict=False)
    for o, rows, weight in pairs:
        if len(rows):
            add(o, rows, weight, o)


# add_low_rank: launcher


class AddLowRankInputs(NamedTuple):
    """The inputs of the op `add_low_rank`: see the function of this name."""

    out: Written  # (M, N)
    x: Tensor  # (M, r)
    w: Tensor  # (G, r, N)
    group_sizes: Tensor  # (G,)


def check_add_low_rank(i: AddLowRankInputs) -> None:
    check_axes(x=(i.x, "M, r"), w=(i.w, "G, r, N"), out=(i.out, "M, N"), group_sizes=(i.group_sizes, "G"))
    check_float(out=i.out, x=i.x, w=i.w)
    check_groups(i.group_sizes, i.x, w=i.w, out=i.out)
    check_own_memory("out", i.out)


@binds
@takes(*TILE_DTYPES)
def bind_add_low_rank(i: AddLowRankInputs) -> Callable:
    if i.w.shape[1] > SHORT_K or not i.out.is_contiguous():
        return lambda out, i: out.add_(segment_gmm_op(i.x, i.w, i.group_sizes, None, None))
    add = bind_segments(SegmentInputs(*i[1:], None, None), i.out.dtype, zero_rest=False, add=True)
    return lambda out, i: add(out, SegmentInputs(*i[1:], None, None))


# add_low_rank: op

add_low_rank_op = define_inplace_op(
    "add_low_rank",
    AddLowRankInputs,
    check=check_add_low_rank,
    check_values=lambda i: check_plan_values(len(i.x), i.group_sizes),
    reference=lambda i: add_low_rank_reference(*i),
    triton=bind_add_low_rank,
)


# add_low_rank: public


def add_low_rank(out: Tensor, x: Tensor, w: Tensor, group_sizes: Tensor) -> None:
    """Add to each group of rows of `out` (M, N) its rows of `x` (M, r) times its matrix of `w` (G, r, N).

    `group_sizes` (G,) as in `gmm`; rows past the groups stay as they are.  All of one dtype; sums are kept in
    float32 and rounded once, with what `out` held in them.  Not differentiable.  Raises ValueError for shapes
    and devices that do not fit, and for an `out` that shares memory, TypeError for dtypes.
    """
    add_low_rank_op(out, x, w, group_sizes)


PLAIN = "relu", False, True  # an activation without a gate, not applied; keep z

# adapted: reference


def adapted_up_reference(x, w, bias, low, b, order, rank, group_sizes):
    z, _ = expert_up_reference(x, w, bias, order, rank, group_sizes, *PLAIN)
    return z if low is None else z + gmm_reference(low, b.mT, group_sizes, None)


def adapted_down_reference(a, w, bias, low, b, routing_weights, order, rank, group_sizes):
    y = gmm_reference(a, w.mT, group_sizes, bias)
    y = y if low is None else y + gmm_reference(low, b.mT, group_sizes, None)
    return unpermute_reference(y, order, rank, routing_weights)


# adapted: launcher


def check_adapter(low, b, w, order, group_sizes) -> None:
    check_axes(w=(w, "E, N, K"), group_sizes=(group_sizes, "E"))
    if (low is None) != (b is None):
        raise ValueError("low and b go together: one of them is None")
    if low is None:
        return
    check_axes(low=(low, "R, r"), order=(order, "R"), w=(w, "E, N, K"), b=(b, "E, N, r"))
    check_float(w=w, low=low, b=b)


class AdaptedUpInputs(NamedTuple):
    """The inputs of the op `adapted_up`: w[e] @ x, and b[e] @ low with an adapter, of each choice."""

    x: Tensor  # (T, H)
    w: Tensor  # (E, N, H)
    bias: Tensor | None  # (E, N)
    low: Tensor | None  # (R, r)
    b: Tensor | None  # (E, N, r)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)


class AdaptedDownInputs(NamedTuple):
    """The inputs of the op `adapted_down`: the weighted sum of w[e] @ a and b[e] @ low for each token."""

    a: Tensor  # (R, N)
    w: Tensor  # (E, H, N)
    bias: Tensor | None  # (E, H)
    low: Tensor | None  # (R, r)
    b: Tensor | None  # (E, H, r)
    routing_weights: Tensor  # (T, k)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)


def new_adapted_up(i: AdaptedUpInputs) -> Tensor:
    check_axes(x=(i.x, "T, H"), w=(i.w, "E, N, H"), rank=(i.rank, "T, k"))
    check_float(x=i.x, w=i.w)
    check_groups(i.group_sizes, i.x, w=i.w, bias=i.bias, low=i.low, b=i.b, order=i.order, rank=i.rank)
    check_adapter(i.low, i.b, i.w, i.order, i.group_sizes)
    return i.x.new_empty(i.order.shape[0], i.w.shape[1])


def new_adapted_down(i: AdaptedDownInputs) -> Tensor:
    check_sorted_rows(i.a, i.order)
    check_axes(a=(i.a, "R, N"), w=(i.w, "E, H, N"))
    check_float(a=i.a, w=i.w)
    check_routing_weights(i.routing_weights, i.rank, i.a)
    check_groups(i.group_sizes, i.a, w=i.w, bias=i.bias, low=i.low, b=i.b, order=i.order, rank=i.rank)
    check_adapter(i.low, i.b, i.w, i.order, i.group_sizes)
    return i.a.new_empty(i.rank.shape[0], i.w.shape[1])


@takes(*TILE_DTYPES)
def launch_adapted_up(z, x, w, bias, low, b, order, rank, group_sizes):
    """By the kernel that gathers, then the adapter in place: two passes over z more instead of four."""
    product = x, w, bias, order, rank, group_sizes, *PLAIN[:2]
    fill("expert_z", z, *product)
    if low is not None:
        add_low_rank_op(z, low, b.mT, group_sizes)


def fill_adapted_up(z, x, w, bias, low, b, order, rank, group_sizes):
    """By torch, each group straight into its place."""
    fill_gmm(z, permute_op(x, order, rank, None), w.mT, group_sizes, bias)
    if low is not None:
        add_low_rank_op(z, low, b.mT, group_sizes)


def fill_adapted_down(out, a, w, bias, low, b, routing_weights, order, rank, group_sizes):
    y = gmm_op(a, w.mT, group_sizes, bias)  # (R, H)
    if low is not None:
        add_low_rank_op(y, low, b.mT, group_sizes)
    inputs = y, order, rank, routing_weights
    fill("unpermute", out, *inputs)


@takes(*TILE_DTYPES)
def launch_adapted_down(out, *inputs):
    fill_adapted_down(out, *inputs)


# adapted: op


def save_adapted_up(ctx, i: AdaptedUpInputs, output):
    ctx.save_for_backward(i.x, i.w, i.low, i.b, i.order, i.rank, i.group_sizes)
    ctx.bias_dtype = None if i.bias is None else i.bias.dtype


def backward_adapted_up(ctx, dz):
    x, w, low, b, order, rank, group_sizes = ctx.saved_tensors
    needs = AdaptedUpInputs(*ctx.needs_input_grad)
    dlow = segment_gmm_op(dz, b, group_sizes, None, None) if needs.low else None
    db = segment_weight_gradient(b.mT, low, dz, group_sizes, None, None).mT if needs.b else None
    whole = order.shape[0] * x.shape[1] * x.element_size()  # the rows of dx in one piece
    rest = order, rank, group_sizes, ctx.bias_dtype, whole, None
    dx, dw, dbias = up_gradients(needs[:3], dz, x, w, *rest)
    return gradients(AdaptedUpInputs, x=dx, w=dw, bias=dbias, low=dlow, b=db)


def save_adapted_down(ctx, i: AdaptedDownInputs, output):
    ctx.save_for_backward(*i)


def backward_adapted_down(ctx, dout):
    a, w, bias, low, b, routing_weights, order, rank, group_sizes = ctx.saved_tensors
    needs = AdaptedDownInputs(*ctx.needs_input_grad)
    weighed = routing_weights, order, rank
    dw = dbias = dlow = db = None
    rows = permute_op(dout, order, rank, None)  # (R, H), not yet weighted
    da, ds = weigh_rows_op(gmm_op(rows, w, group_sizes, None), a, *weighed)
    if low is not None:
        dlow, more = weigh_rows_op(segment_gmm_op(rows, b, group_sizes, None, None), low, *weighed)
        ds = ds + more
    if needs.b:
        db = segment_weight_gradient(b.mT, scaled_rows(low, *weighed), rows, group_sizes, None, None).mT
    del rows
    if needs.w:
        dw = weight_gradient(w, None, dout, scaled_rows(a, *weighed), group_sizes, order, rank.shape[1])
    if bias is not None:
        ds = ds + bias_dots(dout, bias, rank, group_sizes)
    if needs.bias:
        s = routing_weights.to(ds.dtype).contiguous()
        dbias = group_sum(dout, group_sizes, order, rank.shape[1], s).to(bias.dtype)
    dlow, ds = dlow if needs.low else None, ds.to(routing_weights.dtype)
    return gradients(AdaptedDownInputs, a=da, w=dw, bias=dbias, low=dlow, b=db, routing_weights=ds)


def check_adapted_values(i: AdaptedUpInputs | AdaptedDownInputs) -> None:
    check_plan_values(len(i.order), i.group_sizes, i.order, i.rank)


adapted_up = define_op(
    "adapted_up",
    AdaptedUpInputs,
    new=new_adapted_up,
    check_values=check_adapted_values,
    reference=lambda i: adapted_up_reference(*i),
    torch=fill_adapted_up,
    triton=launch_adapted_up,
    save=save_adapted_up,
    backward=backward_adapted_up,
)
adapted_down = define_op(
    "adapted_down",
    AdaptedDownInputs,
    new=new_adapted_down,
    check_values=check_adapted_values,
    reference=lambda i: adapted_down_reference(*i),
    torch=fill_adapted_down,
    triton=launch_adapted_down,
    save=save_adapted_down,
    backward=backward_adapted_down,
)
