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

from torch import Tensor

from ...op import define_inplace_op, define_op, fill, takes
from ..base.check import (
    check_device,
    check_float,
    check_groups,
    check_own_memory,
    check_plan_values,
    check_routing_weights,
    check_shape,
    check_size,
    split_groups,
)
from ..base.tile import TILE_DTYPES
from ..grouped.gmm import gmm_op, gmm_reference
from ..grouped.segment_gmm import SHORT_K, SegmentInputs, bind_segments, segment_gmm_op
from ..grouped.segment_tgmm import segment_weight_gradient
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


def check_add_low_rank(out, x, w, group_sizes):
    check_shape("out", out, "M", "N")
    check_shape("x", x, "M", "r")
    check_shape("w", w, "G", "r", "N")
    check_size("x is (M, r={})", x.shape[1], "w is (G, r={}, N)", w.shape[1])
    check_float(out=out, x=x, w=w)
    check_groups(group_sizes, x, w=w)
    check_size("group_sizes is ({},)", group_sizes.shape[0], "w is (G={}, r, N)", w.shape[0])
    check_device(x=x, out=out)
    if out.shape != (x.shape[0], w.shape[2]):
        raise ValueError(f"out must be (M, N) = {(x.shape[0], w.shape[2])}, but it is {tuple(out.shape)}")
    check_own_memory("out", out)


@takes(*TILE_DTYPES)
def launch_add_low_rank(out, x, w, group_sizes):
    if w.shape[1] <= SHORT_K and out.is_contiguous():
        i = SegmentInputs(x, w, group_sizes, None, None)
        bind_segments(i, out.dtype, zero_rest=False, add=True)(out, i)
    else:
        out.add_(segment_gmm_op(x, w, group_sizes, None, None))


# add_low_rank: op

add_low_rank_op = define_inplace_op(
    "add_low_rank(Tensor(a!) out, Tensor x, Tensor w, Tensor group_sizes) -> ()",
    check=check_add_low_rank,
    check_values=lambda out, x, w, group_sizes: check_plan_values(len(x), group_sizes),
    reference=add_low_rank_reference,
    triton=launch_add_low_rank,
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
    check_size("group_sizes is ({},)", group_sizes.shape[0], "the weight is (E={}, N, K)", w.shape[0])
    if (low is None) != (b is None):
        raise ValueError("low and b go together: one of them is None")
    if low is None:
        return
    check_shape("low", low, "R", "r")
    check_shape("b", b, "E", "N", "r")
    check_float(w=w, low=low, b=b)
    check_size("low is (R={}, r)", low.shape[0], "order is (R={},)", order.shape[0])
    expected = (*w.shape[:2], low.shape[1])
    if b.shape != expected:
        raise ValueError(f"b must be (E, N, r) = {expected}, but it is {tuple(b.shape)}")


def new_adapted_up(x, w, bias, low, b, order, rank, group_sizes):
    check_shape("x", x, "T", "H")
    check_shape("w", w, "E", "N", "H")
    check_size("x is (T, H={})", x.shape[1], "w is (E, N, H={})", w.shape[2])
    check_size("rank is (T={}, k)", rank.shape[0], "x is (T={}, H)", x.shape[0])
    check_float(x=x, w=w)
    check_groups(group_sizes, x, w=w, bias=bias, low=low, b=b, order=order, rank=rank)
    check_adapter(low, b, w, order, group_sizes)
    return x.new_empty(order.shape[0], w.shape[1])


def new_adapted_down(a, w, bias, low, b, routing_weights, order, rank, group_sizes):
    check_sorted_rows(a, order)
    check_shape("w", w, "E", "H", "N")
    check_size("a is (R, N={})", a.shape[1], "w is (E, H, N={})", w.shape[2])
    check_float(a=a, w=w)
    check_routing_weights(routing_weights, rank, a)
    check_groups(group_sizes, a, w=w, bias=bias, low=low, b=b, order=order, rank=rank)
    check_adapter(low, b, w, order, group_sizes)
    return a.new_empty(rank.shape[0], w.shape[1])


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
    home = y, order, rank, routing_weights
    fill("unpermute", out, *home)


@takes(*TILE_DTYPES)
def launch_adapted_down(out, *inputs):
    fill_adapted_down(out, *inputs)


# adapted: op


def save_adapted_up(ctx, inputs, output):
    x, w, bias, low, b, *routing = inputs
    ctx.save_for_backward(x, w, low, b, *routing)
    ctx.bias_dtype = None if bias is None else bias.dtype


def backward_adapted_up(ctx, dz):
    x, w, low, b, order, rank, group_sizes = ctx.saved_tensors
    *base, need_low, need_b = ctx.needs_input_grad[:5]
    dlow = segment_gmm_op(dz, b, group_sizes, None, None) if need_low else None
    db = segment_weight_gradient(b.mT, low, dz, group_sizes, None, None).mT if need_b else None
    whole = order.shape[0] * x.shape[1] * x.element_size()  # the rows of dx in one piece
    rest = order, rank, group_sizes, ctx.bias_dtype, whole, None
    return *up_gradients(base, dz, x, w, *rest), dlow, db, None, None, None


def save_adapted_down(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward_adapted_down(ctx, dout):
    a, w, bias, low, b, routing_weights, order, rank, group_sizes = ctx.saved_tensors
    _, need_w, need_bias, need_low, need_b, *_ = ctx.needs_input_grad
    weighed = routing_weights, order, rank
    dw = dbias = dlow = db = None
    rows = permute_op(dout, order, rank, None)  # (R, H), not yet weighted
    da, ds = weigh_rows_op(gmm_op(rows, w, group_sizes, None), a, *weighed)
    if low is not None:
        dlow, more = weigh_rows_op(segment_gmm_op(rows, b, group_sizes, None, None), low, *weighed)
        ds = ds + more
    if need_b:
        db = segment_weight_gradient(b.mT, scaled_rows(low, *weighed), rows, group_sizes, None, None).mT
    del rows
    if need_w:
        dw = weight_gradient(w, None, dout, scaled_rows(a, *weighed), group_sizes, order, rank.shape[1])
    if bias is not None:
        ds = ds + bias_dots(dout, bias, rank, group_sizes)
    if need_bias:
        s = routing_weights.to(ds.dtype).contiguous()
        dbias = group_sum(dout, group_sizes, order, rank.shape[1], s).to(bias.dtype)
    dlow = dlow if need_low else None
    return da, dw, dbias, dlow, db, ds.to(routing_weights.dtype), None, None, None


def check_adapted_values(x, w, bias, low, b, *rest):
    order, rank, group_sizes = rest[-3:]
    check_plan_values(len(order), group_sizes, order, rank)


adapted_up = define_op(
    "adapted_up(Tensor x, Tensor w, Tensor? bias, Tensor? low, Tensor? b, Tensor order, Tensor rank, "
    "Tensor group_sizes) -> Tensor",
    new=new_adapted_up,
    check_values=check_adapted_values,
    reference=adapted_up_reference,
    torch=fill_adapted_up,
    triton=launch_adapted_up,
    save=save_adapted_up,
    backward=backward_adapted_up,
)
adapted_down = define_op(
    "adapted_down(Tensor a, Tensor w, Tensor? bias, Tensor? low, Tensor? b, Tensor routing_weights, "
    "Tensor order, Tensor rank, Tensor group_sizes) -> Tensor",
    new=new_adapted_down,
    check_values=check_adapted_values,
    reference=adapted_down_reference,
    torch=fill_adapted_down,
    triton=launch_adapted_down,
    save=save_adapted_down,
    backward=backward_adapted_down,
)
