"""The two projections of experts that have low-rank adapters, without the product of an adapter's factors.

    adapted_up     z[r]   = w[e] @ x[order[r] // k] + bias[e] + b[e] @ low[r]
    adapted_down   out[t] = sum over j of s[t, j] * (w[e] @ a[r] + bias[e] + b[e] @ low[r])

(T, H) -> (R, N) and back, for the row r = rank[t, j] of each choice and its expert e.  low (R, r) is the
adapter's first product, an `adapted_up` or a `segment_gmm` of its own, perhaps with a dropout before it.  The
caller computes what stands between the two projections.

Without an adapter both are grouped products whose gradients keep no rows that were only moved: neither those
of x nor those that are summed up.  The gradient of the routing weights is <u, a> + <g, low> + <dout, bias>,
with u = w[e].T @ dout and g = b[e].T @ dout.  A frozen weight gets no gradient.

`w` may be a frozen weight of 4 bits (../quantize/four_bit.py): its packed codes, the other parts last.

`add_low_rank` adds an adapter's second product to that of the weight, in place: `out[s:e] += x[s:e] @ w[g]`,
with M rows, G groups, r in, N out.  r is a rank and so short that reading and writing `out` once dominates.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...op import Written, binds, bound, define_inplace_op, define_op, fill, gradients, pick, takes
from ..base.check import (
    check_axes,
    check_float,
    check_groups,
    check_own_memory,
    check_plan_values,
    check_routing_weights,
    check_size,
    split_groups,
)
from ..base.tile import TILE_DTYPES
from ..grouped.four_bit import FourBitInputs, four_bit_gmm_op
from ..grouped.gmm import gmm_op, gmm_reference
from ..grouped.segment_gmm import SHORT_K, SegmentInputs, bind_segments, segment_gmm_op
from ..grouped.segments import segment_weight_gradient
from ..grouped.tgmm import chosen, fill_gmm, weight_gradient
from ..quantize.four_bit import FourBit, check_four_bit
from ..rows.permute import check_sorted_rows, permute_op, unpermute_op, unpermute_reference
from ..rows.sums import bias_dots, group_sum, scaled_rows, weigh_rows_op
from .up import ZInputs, expert_up_reference, up_gradients

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


def whole(w: Tensor, four_bit: tuple, x: Tensor) -> Tensor:
    """Return the weight (E, N, K), dequantised to the dtype of `x` if it is one of 4 bits."""
    return FourBit(w, *four_bit, x.dtype).dequantize() if has_four_bits(four_bit) else w


def adapted_up_reference(x, w, bias, low, b, order, rank, group_sizes, *four_bit):
    w = whole(w, four_bit, x)
    z, _ = expert_up_reference(x, w, bias, order, rank, group_sizes, *PLAIN)
    return z if low is None else z + gmm_reference(low, b.mT, group_sizes, None)


def adapted_down_reference(a, w, bias, low, b, routing_weights, order, rank, group_sizes, *four_bit):
    w = whole(w, four_bit, a)
    y = gmm_reference(a, w.mT, group_sizes, bias)
    y = y if low is None else y + gmm_reference(low, b.mT, group_sizes, None)
    return unpermute_reference(y, order, rank, routing_weights)


# adapted: launcher


def has_four_bits(four_bit: tuple) -> bool:
    """Whether the last fields of an op's inputs, which end with a format, are of a weight of 4 bits."""
    return bool(four_bit) and bool(four_bit[-1])


def check_weight(four_bit: tuple, w_axes: str, w: Tensor, **named: tuple[Tensor, str]) -> None:
    """Raise unless the axes of `w`, perhaps of 4 bits, are those of the words, and fit the input's."""
    ((name, (x, axes)),) = named.items()
    if not has_four_bits(four_bit):
        check_axes(**{name: (x, axes)}, w=(w, w_axes))
        return check_float(**{name: x}, w=w)
    check_axes(**{name: (x, axes)})
    check_float(**{name: x})
    check_four_bit(w, *four_bit)
    axis = w_axes.rpartition(" ")[2]
    words = f"{name} is ({axes.replace(axis, axis + '={}')})", f"w is ({w_axes}={{}}) in 4 bits"
    check_size(words[0], x.shape[1], words[1], 2 * w.shape[2])


def check_adapter(low, b, w, order, group_sizes, x) -> None:
    check_axes(w=(w, "E, N, K"), group_sizes=(group_sizes, "E"))
    if (low is None) != (b is None):
        raise ValueError("low and b go together: one of them is None")
    if low is None:
        return
    check_axes(low=(low, "R, r"), order=(order, "R"), w=(w, "E, N, K"), b=(b, "E, N, r"))
    check_float(x=x, low=low, b=b)


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
    scales: Tensor | None = None  # those of a weight of 4 bits, whose codes are w
    nested: Tensor | None = None
    offset: Tensor | None = None
    table: Tensor | None = None
    format: str = ""


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
    scales: Tensor | None = None  # those of a weight of 4 bits, whose codes are w
    nested: Tensor | None = None
    offset: Tensor | None = None
    table: Tensor | None = None
    format: str = ""


UP, DOWN = (cls._fields.index("scales") for cls in (AdaptedUpInputs, AdaptedDownInputs))  # of 4 bits


def new_adapted_up(i: AdaptedUpInputs) -> Tensor:
    check_weight(i[UP:], "E, N, H", i.w, x=(i.x, "T, H"))
    check_axes(x=(i.x, "T, H"), rank=(i.rank, "T, k"))
    check_groups(i.group_sizes, i.x, w=i.w, bias=i.bias, low=i.low, b=i.b, order=i.order, rank=i.rank)
    check_adapter(i.low, i.b, i.w, i.order, i.group_sizes, i[0])
    return i.x.new_empty(i.order.shape[0], i.w.shape[1])


def new_adapted_down(i: AdaptedDownInputs) -> Tensor:
    check_sorted_rows(i.a, i.order)
    check_weight(i[DOWN:], "E, H, N", i.w, a=(i.a, "R, N"))
    check_routing_weights(i.routing_weights, i.rank, i.a)
    check_groups(i.group_sizes, i.a, w=i.w, bias=i.bias, low=i.low, b=i.b, order=i.order, rank=i.rank)
    check_adapter(i.low, i.b, i.w, i.order, i.group_sizes, i[0])
    return i.a.new_empty(i.rank.shape[0], i.w.shape[1])


def as_product(i: AdaptedUpInputs) -> tuple[str, tuple]:
    """Return the op of the product with the weight, which gathers rows, and its inputs."""
    if i.format:
        group = i.group_sizes, i.bias, i.order, i.rank.shape[1]
        return "four_bit_gmm", FourBitInputs(i.x, i.w, *i[UP:], True, *group)
    return "expert_z", ZInputs(i.x, i.w, i.bias, i.order, i.rank, i.group_sizes, *PLAIN[:2])


@binds
@takes(*TILE_DTYPES)
def bind_adapted_up(i: AdaptedUpInputs) -> Callable:
    """Bind the gathering product, and then the adapter in place: two more passes over z instead of four."""
    op, inputs = as_product(i)
    multiply = bound(pick(op, *inputs), inputs)

    def launch(z, i):
        multiply(z, as_product(i)[1])
        if i.low is not None:
            add_low_rank_op(z, i.low, i.b.mT, i.group_sizes)

    return launch


def fill_adapted_up(z, x, w, bias, low, b, order, rank, group_sizes, *four_bit):
    """Compute by torch, each group in its place."""
    if has_four_bits(four_bit):
        fill("four_bit_gmm", z, x, w, *four_bit, True, group_sizes, bias, order, rank.shape[1])
    else:
        fill_gmm(z, permute_op(x, order, rank, None), w.mT, group_sizes, bias)
    if low is not None:
        add_low_rank_op(z, low, b.mT, group_sizes)


def multiplied(x: Tensor, w: Tensor, four_bit: tuple, transpose: bool, group_sizes, bias=None) -> Tensor:
    """Return x @ w[g].T + bias[g] of each group, or without `transpose` x @ w[g]."""
    if has_four_bits(four_bit):
        return four_bit_gmm_op(x, w, *four_bit, transpose, group_sizes, bias, None, 1)
    return gmm_op(x, w.mT if transpose else w, group_sizes, bias)


def fill_adapted_down(out, a, w, bias, low, b, routing_weights, order, rank, group_sizes, *four_bit):
    y = multiplied(a, w, four_bit, True, group_sizes, bias)  # (R, H)
    if low is not None:
        add_low_rank_op(y, low, b.mT, group_sizes)
    inputs = y, order, rank, routing_weights
    fill("unpermute", out, *inputs)


@takes(*TILE_DTYPES)
def launch_adapted_down(out, *inputs):
    fill_adapted_down(out, *inputs)


# adapted: op


def save_adapted_up(ctx, i: AdaptedUpInputs, output):
    ctx.save_for_backward(i.x, i.w, i.low, i.b, i.order, i.rank, i.group_sizes, *i[UP:-1])
    ctx.bias_dtype, ctx.format = None if i.bias is None else i.bias.dtype, i.format


def backward_adapted_up(ctx, dz):
    x, w, low, b, order, rank, group_sizes, *parts = ctx.saved_tensors
    needs = AdaptedUpInputs(*ctx.needs_input_grad)
    dlow = segment_gmm_op(dz, b, group_sizes, None, None) if needs.low else None
    db = segment_weight_gradient(b.mT, low, dz, group_sizes, None, None).mT if needs.b else None
    if ctx.format:
        dx = dw = dbias = None
        if needs.x:
            rows = multiplied(dz, w, (*parts, ctx.format), False, group_sizes)
            dx = unpermute_op(rows, order, rank, None)
        if needs.bias:
            dbias = group_sum(dz, group_sizes).to(ctx.bias_dtype)
    else:
        in_one_piece = order.shape[0] * x.shape[1] * x.element_size()  # the rows of dx
        rest = order, rank, group_sizes, ctx.bias_dtype, in_one_piece, None
        dx, dw, dbias = up_gradients(needs[:3], dz, x, w, *rest)
    return gradients(AdaptedUpInputs, x=dx, w=dw, bias=dbias, low=dlow, b=db)


def save_adapted_down(ctx, i: AdaptedDownInputs, output):
    ctx.save_for_backward(*i[:-1])
    ctx.format = i.format


def backward_adapted_down(ctx, dout):
    a, w, bias, low, b, routing_weights, order, rank, group_sizes, *parts = ctx.saved_tensors
    needs = AdaptedDownInputs(*ctx.needs_input_grad)
    weighed = routing_weights, order, rank
    dw = dbias = dlow = db = None
    rows = permute_op(dout, order, rank, None)  # (R, H), not yet weighted
    u = multiplied(rows, w, (*parts, ctx.format), False, group_sizes)
    da, ds = weigh_rows_op(u, a, *weighed)
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
    triton=bind_adapted_up,
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
