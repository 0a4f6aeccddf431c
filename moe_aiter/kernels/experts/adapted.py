"""The two projections of experts that have low-rank adapters, without the product of an adapter's factors.

    adapted_low    low[r] = a[p] @ x[order[r] // k]
    adapted_up     z[r]   = w[e] @ x[order[r] // k] + bias[e] + b[e] @ low[r]
    adapted_down   out[t] = sum over j of s[t, j] * (w[e] @ a[r] + bias[e] + b[e] @ low[r])

(T, H) -> (R, N) and back, for the row r = rank[t, j] of each choice and its expert e.  low (R, r) is the
adapter's first product, an `adapted_up` or a `segment_gmm` of its own, perhaps with a dropout before it.  The
caller computes what stands between the two projections.

If each expert has several adapters, its rows are sorted by adapter, and `lens` are the lengths of these
segments of rows.  Then b[p] takes the place of b[e], with p = weight_indices[s] for the segment s of the row,
or -1 for rows without an adapter.  `adapted_low` is the first product for such segments; like `adapted_up`
it keeps x and not its rows.

Without an adapter both are grouped products whose gradients keep no rows that were only moved: neither those
of x nor those that are summed up.  The gradient of the routing weights is <u, a> + <g, low> + <dout, bias>,
with u = w[e].T @ dout and g = b[e].T @ dout.  A frozen weight gets no gradient.

`w` may be a frozen weight of 4 or 8 bits (../quantize/four_bit.py): its packed codes, the other parts last.
With 8 bits, the rows of each product are quantised too, as in fp8.py with the recipe `block`.

`add_low_rank` adds an adapter's second product to that of the weight, in place: `out[s:e] += x[s:e] @ w[g]`,
with M rows, G groups, r in, N out.  r is a rank and so short that reading and writing `out` once dominates.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

from torch import Tensor

from ...op import Written, binds, bound, define_inplace_op, define_op, fill, gradients, pick, takes
from ..base.check import (
    Float,
    Index,
    Operand,
    check_axes,
    check_fields,
    check_float,
    check_own_memory,
    check_plan_values,
    check_size,
    split_groups,
    take_rows,
)
from ..base.sources import arrived, late
from ..base.tile import TILE_DTYPES
from ..grouped.four_bit import FourBitInputs, four_bit_gmm_op
from ..grouped.gmm import GmmFp8Inputs, GroupedInputs, gmm_fp8_op, gmm_op, gmm_reference
from ..grouped.segment_gmm import (
    SHORT_K,
    SegmentInputs,
    bind_segments,
    segment_gmm_op,
    segment_gmm_reference,
)
from ..grouped.segments import segment_weight_gradient, weight_numbers
from ..grouped.tgmm import chosen, fill_gmm, weight_gradient
from ..hopper import fits_up_fp8
from ..quantize.four_bit import FP8, FourBit, check_four_bit, codes_in
from ..quantize.layouts import transpose_rows8
from ..quantize.scale_blocks import dequantize, quantize_blocks
from ..rows.permute import UnpermuteInputs, permute_op, unpermute_op, unpermute_reference
from ..rows.sums import group_sum, scaled_rows, weigh_rows_op
from .down import bias_dots
from .fp8 import ZFp8Inputs
from .inputs import check_expert_values
from .up import ZInputs, up_gradients

# add_low_rank: reference


class AddLowRankInputs(NamedTuple):
    """The inputs of the op `add_low_rank`: see the function of this name."""

    out: Written  # (M, N)
    x: Annotated[Operand, "M, r"]
    w: Operand  # (G, r, N), or with weight_indices (W, r, N)
    group_sizes: Annotated[Index, "G"]
    weight_indices: Annotated[Index, "G"] | None = None


def add_low_rank_reference(i: AddLowRankInputs) -> None:
    add = chosen(i.out, i.x, i.out)
    out, x = (split_groups(t, i.group_sizes) for t in (i.out, i.x))
    numbers = weight_numbers(i.weight_indices, len(i.group_sizes), len(i.w))
    for o, rows, n in zip(out, x, numbers, strict=False):
        if len(rows) and n is not None:
            add(o, rows, i.w[n], o)


# add_low_rank: launcher


def check_add_low_rank(i: AddLowRankInputs) -> None:
    check_fields(i)
    count = "G" if i.weight_indices is None else "W"
    check_axes(
        x=(i.x, "M, r"), w=(i.w, f"{count}, r, N"), out=(i.out, "M, N"), group_sizes=(i.group_sizes, "G")
    )
    check_float(x=i.x, out=i.out)
    check_own_memory("out", i.out)


@binds
@takes(*TILE_DTYPES)
def bind_add_low_rank(i: AddLowRankInputs) -> Callable:
    if i.w.shape[1] > SHORT_K or not i.out.is_contiguous():
        return lambda out, i: out.add_(segment_gmm_op(*segments_of(i)))
    add = bind_segments(segments_of(i), i.out.dtype, zero_rest=False, add=True)
    return lambda out, i: add(out, segments_of(i))


def segments_of(i: AddLowRankInputs) -> SegmentInputs:
    return SegmentInputs(i.x, i.w, i.group_sizes, None, i.weight_indices)


# add_low_rank: op

add_low_rank_op = define_inplace_op(
    "add_low_rank", AddLowRankInputs, check=check_add_low_rank,
    check_values=lambda i: check_plan_values(len(i.x), i.group_sizes), reference=add_low_rank_reference,
    triton=bind_add_low_rank,
)  # fmt: skip


# add_low_rank: public


def add_low_rank(out: Tensor, x: Tensor, w: Tensor, group_sizes: Tensor) -> None:
    """Add to each group of rows of `out` (M, N) its rows of `x` (M, r) times its matrix of `w` (G, r, N).

    `group_sizes` (G,) as in `gmm`; rows past the groups stay as they are.  All of one dtype; sums are kept in
    float32 and rounded once, with what `out` held in them.  Not differentiable.  Raises ValueError for shapes
    and devices that do not fit, and for an `out` that shares memory, TypeError for dtypes.
    """
    add_low_rank_op(out, x, w, group_sizes)


PLAIN = "relu", False  # an activation without a gate, not applied


class AdaptedUpInputs(NamedTuple):
    """The inputs of the op `adapted_up`: w[e] @ x, and b[e] @ low with an adapter, of each choice."""

    x: Annotated[Operand, "T, H"]
    w: Tensor  # (E, N, H)
    bias: Tensor | None  # (E, N)
    low: Annotated[Operand, "R, r"] | None
    b: Operand | None  # (E, N, r), or with lens (W, N, r)
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    group_sizes: Annotated[Index, "E"]
    scales: Tensor | None = None  # those of a weight of 4 bits, whose codes are w
    nested: Tensor | None = None
    offset: Tensor | None = None
    table: Tensor | None = None
    format: str = ""
    lens: Annotated[Index, "S"] | None = None  # rows of low by segments of several adapters an expert
    weight_indices: Annotated[Index, "S"] | None = None


class AdaptedDownInputs(NamedTuple):
    """The inputs of the op `adapted_down`: the weighted sum of w[e] @ a and b[e] @ low for each token."""

    a: Annotated[Operand, "R, N"]
    w: Tensor  # (E, H, N)
    bias: Tensor | None  # (E, H)
    low: Annotated[Operand, "R, r"] | None
    b: Operand | None  # (E, H, r), or with lens (W, H, r)
    routing_weights: Annotated[Float, "T, k"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    group_sizes: Annotated[Index, "E"]
    scales: Tensor | None = None  # those of a weight of 4 bits, whose codes are w
    nested: Tensor | None = None
    offset: Tensor | None = None
    table: Tensor | None = None
    format: str = ""
    lens: Annotated[Index, "S"] | None = None  # rows of low by segments of several adapters an expert
    weight_indices: Annotated[Index, "S"] | None = None


class AdaptedLowInputs(NamedTuple):
    """The inputs of the op `adapted_low`: a[weight_indices[s]] @ x of each row, in segment s of rows."""

    x: Annotated[Operand, "T, H"]
    a: Annotated[Operand, "W, r, H"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    lens: Annotated[Index, "S"]
    weight_indices: Annotated[Index, "S"]


# adapted: reference


def parts_of(i: AdaptedUpInputs | AdaptedDownInputs) -> tuple:
    """Return what a weight of 4 bits has beside its codes; the last of it, the format, is "" for others."""
    return i.scales, i.nested, i.offset, i.table, i.format


def whole(i: AdaptedUpInputs | AdaptedDownInputs) -> Tensor:
    """Return the weight (E, N, K), dequantised to the dtype of the rows if it is one of 4 or 8 bits."""
    return FourBit(i.w, *parts_of(i), i[0].dtype).dequantize() if i.format else i.w


def adapted_rows(i: AdaptedUpInputs | AdaptedDownInputs, rows: Tensor) -> Tensor:
    """Return w[e] @ rows[r] + bias[e] + b[e] @ low[r] for the row r of each choice."""
    if i.format == FP8:
        rows = dequantize(*quantize_blocks(rows, False), rows.dtype)
    out = gmm_reference(GroupedInputs(rows, whole(i).mT, i.group_sizes, i.bias))
    if i.low is None:
        return out
    return out + segment_gmm_reference(SegmentInputs(i.low, i.b.mT, *segments_of_low(i)))


def segments_of_low(i: AdaptedUpInputs | AdaptedDownInputs) -> tuple[Tensor, None, Tensor | None]:
    """Return the segments of `low` as those of `SegmentInputs`."""
    return i.group_sizes if i.lens is None else i.lens, None, i.weight_indices


def adapted_low_reference(i: AdaptedLowInputs) -> Tensor:
    rows = take_rows(i.x, i.order, i.rank.shape[1])
    return segment_gmm_reference(SegmentInputs(rows, i.a.mT, i.lens, None, i.weight_indices))


def adapted_up_reference(i: AdaptedUpInputs) -> Tensor:
    return adapted_rows(i, take_rows(i.x, i.order, i.rank.shape[1]))


def adapted_down_reference(i: AdaptedDownInputs) -> Tensor:
    return unpermute_reference(UnpermuteInputs(adapted_rows(i, i.a), i.order, i.rank, i.routing_weights))


# adapted: launcher


def new_adapted(i: AdaptedUpInputs | AdaptedDownInputs, rows: str, axes: str, w_axes: str) -> Tensor:
    """Do as `check_fields`, and check `w`, perhaps of 4 bits, beside the first input, with these axes.

    Return a new result, with so many rows as the axis `rows` has.
    """
    size, name, x, w = check_fields(i), i._fields[0], i[0], i.w
    if i.format:
        check_four_bit(w, *parts_of(i))
        axis = w_axes.rpartition(" ")[2]
        bits = 8 // codes_in(i.format)
        words = f"{name} is ({axes.replace(axis, axis + '={}')})", f"w is ({w_axes}={{}}) in {bits} bits"
        check_size(words[0], x.shape[1], words[1], codes_in(i.format) * w.shape[2])
    else:
        check_axes(**{name: (x, axes)}, w=(w, w_axes))
        check_float(**{name: x}, w=w)
    check_axes(w=(w, "E, N, K"), group_sizes=(i.group_sizes, "E"))
    if (i.low is None) != (i.b is None):
        raise ValueError("low and b go together: one of them is None")
    if (i.lens is None) != (i.weight_indices is None) or (i.lens is not None and i.low is None):
        raise ValueError("lens and weight_indices go together, with low and b")
    if i.b is not None:
        b = i.b, "E, N, r" if i.lens is None else "W, N, r"
        check_axes(low=(i.low, "R, r"), b=b)
        check_axes(w=(w, "E, N, K"), b=b)
    return x.new_empty(size[rows], w.shape[1])


def as_product(i: AdaptedUpInputs) -> tuple[str, NamedTuple]:
    """Return the op of the product with the weight, which gathers rows, and its inputs."""
    gather = i.order, i.rank.shape[1]
    if i.format == FP8:
        product = by_blocks(i.x, i.w, i.scales, i.group_sizes, i.bias, *gather)
        routing = i.order, i.rank, i.group_sizes
        z = ZFp8Inputs(product.x, product.x_scale, i.w, i.scales, i.bias, *routing, *PLAIN, i.x.dtype)
        return ("expert_z_fp8", z) if fits_up_fp8(z) else ("gmm_fp8", product)  # the former gathers faster
    if i.format:
        return "four_bit_gmm", FourBitInputs(i.x, i.w, *parts_of(i), True, i.group_sizes, i.bias, *gather)
    return "expert_z", ZInputs(i.x, i.w, i.bias, i.order, i.rank, i.group_sizes, *PLAIN)


def by_blocks(x: Tensor, w8: Tensor, scale: Tensor, group_sizes, bias, order=None, top_k=1) -> GmmFp8Inputs:
    """Return the inputs of the product of 8 bits, for which rows of x are quantised."""
    x8, x_scale = quantize_blocks(x, False)
    return GmmFp8Inputs(x8, w8.mT, group_sizes, x_scale, scale, bias, order, top_k, x.dtype)


@binds
@takes(*TILE_DTYPES)
def bind_adapted_up(i: AdaptedUpInputs) -> Callable:
    """Bind the gathering product, and then the adapter in place: two more passes over z instead of four."""
    if i.format == FP8:
        return fill_adapted_up
    op, inputs = as_product(i)
    multiply = bound(pick(op, inputs), inputs)

    def launch(z, i):
        multiply(z, as_product(i)[1])
        if i.low is not None:
            add_adapter(z, i)

    return launch


def add_adapter(out: Tensor, i: AdaptedUpInputs | AdaptedDownInputs) -> None:
    lens, _, weight_indices = segments_of_low(i)
    add_low_rank_op(out, i.low, i.b.mT, lens, weight_indices)


def fill_adapted_up(z: Tensor, i: AdaptedUpInputs) -> None:
    """Compute by torch, each group in its place."""
    if i.format:
        op, inputs = as_product(i)
        fill(op, z, inputs)
    else:
        rows = permute_op(i.x, i.order, i.rank, None)
        fill_gmm(z, GroupedInputs(rows, i.w.mT, i.group_sizes, i.bias))
    if i.low is not None:
        add_adapter(z, i)


def multiplied(x: Tensor, w: Tensor, parts: tuple, transpose: bool, group_sizes, bias=None) -> Tensor:
    """Return x @ w[g].T + bias[g] of each group, or without `transpose` x @ w[g]; `parts` as `parts_of`."""
    if parts[-1] == FP8:
        w, scale = (w, parts[0]) if transpose else (transpose_rows8(w), parts[0].mT.contiguous())
        return gmm_fp8_op(*by_blocks(x, w, scale, group_sizes, bias))
    if parts[-1]:
        return four_bit_gmm_op(x, w, *parts, transpose, group_sizes, bias, None, 1)
    return gmm_op(x, w.mT if transpose else w, group_sizes, bias)


def fill_adapted_down(out: Tensor, i: AdaptedDownInputs) -> None:
    y = multiplied(i.a, i.w, parts_of(i), True, i.group_sizes, i.bias)  # (R, H)
    if i.low is not None:
        add_adapter(y, i)
    fill("unpermute", out, UnpermuteInputs(y, i.order, i.rank, i.routing_weights))


@takes(*TILE_DTYPES)
def launch_adapted_down(out: Tensor, i: AdaptedDownInputs) -> None:
    fill_adapted_down(out, i)


def new_adapted_low(i: AdaptedLowInputs) -> Tensor:
    size = check_fields(i)
    return i.x.new_empty(size["R"], size["r"])


def fill_adapted_low(low: Tensor, i: AdaptedLowInputs) -> None:
    rows = permute_op(i.x, i.order, i.rank, None)  # (R, H)
    fill("segment_gmm", low, SegmentInputs(rows, i.a.mT, i.lens, None, i.weight_indices))


@takes(*TILE_DTYPES)
def launch_adapted_low(low: Tensor, i: AdaptedLowInputs) -> None:
    fill_adapted_low(low, i)


# adapted: op


def backward_adapted_low(ctx, dlow):
    with late():
        x, a, order, rank, lens, weight_indices = ctx.saved_tensors
    needs, segments = AdaptedLowInputs(*ctx.needs_input_grad), (lens, None, weight_indices)
    dx = da = None
    if needs.x:
        dx = unpermute_op(segment_gmm_op(dlow, a, *segments), order, rank, None)
    if needs.a:
        da = segment_weight_gradient(a.mT, permute_op(arrived(x), order, rank, None), dlow, *segments).mT
    return gradients(AdaptedLowInputs, x=dx, a=da)


def save_adapted_up(ctx, i: AdaptedUpInputs, output):
    *parts, ctx.format = parts_of(i)
    segments = i.lens, i.weight_indices
    ctx.save_for_backward(i.x, i.w, i.low, i.b, i.order, i.rank, i.group_sizes, *segments, *parts)
    ctx.bias_dtype = None if i.bias is None else i.bias.dtype


def backward_adapted_up(ctx, dz):
    with late():
        x, w, low, b, order, rank, group_sizes, lens, weight_indices, *parts = ctx.saved_tensors
    needs = AdaptedUpInputs(*ctx.needs_input_grad)
    segments = group_sizes if lens is None else lens, None, weight_indices
    dlow = segment_gmm_op(dz, b, *segments) if needs.low else None
    db = segment_weight_gradient(b.mT, low, dz, *segments).mT if needs.b else None
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
    *parts, ctx.format = parts_of(i)
    ctx.save_for_backward(*i[:9], i.lens, i.weight_indices, *parts)


def backward_adapted_down(ctx, dout):
    a, w, bias, low, b, routing_weights, order, rank, group_sizes, *rest = ctx.saved_tensors
    lens, weight_indices, *parts = rest
    segments = group_sizes if lens is None else lens, None, weight_indices
    needs = AdaptedDownInputs(*ctx.needs_input_grad)
    weighed = routing_weights, order, rank
    dw = dbias = dlow = db = None
    rows = permute_op(dout, order, rank, None)  # (R, H), not yet weighted
    u = multiplied(rows, w, (*parts, ctx.format), False, group_sizes)
    da, ds = weigh_rows_op(u, a, *weighed)
    if low is not None:
        dlow, more = weigh_rows_op(segment_gmm_op(rows, b, *segments), low, *weighed)
        ds = ds + more
    if needs.b:
        db = segment_weight_gradient(b.mT, scaled_rows(low, *weighed), rows, *segments).mT
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


adapted_low = define_op(
    "adapted_low", AdaptedLowInputs, new=new_adapted_low,
    check_values=lambda i: check_plan_values(len(i.order), i.lens, i.order, i.rank),
    reference=adapted_low_reference, torch=fill_adapted_low, triton=launch_adapted_low,
    save=lambda ctx, i, output: ctx.save_for_backward(*i), backward=backward_adapted_low,
)  # fmt: skip
adapted_up = define_op(
    "adapted_up", AdaptedUpInputs, new=lambda i: new_adapted(i, "R", "T, H", "E, N, H"),
    check_values=check_expert_values,
    reference=adapted_up_reference, torch=fill_adapted_up, triton=bind_adapted_up, save=save_adapted_up,
    backward=backward_adapted_up,
)  # fmt: skip
adapted_down = define_op(
    "adapted_down", AdaptedDownInputs, new=lambda i: new_adapted(i, "T", "R, N", "E, H, N"),
    check_values=check_expert_values,
    reference=adapted_down_reference, torch=fill_adapted_down, triton=launch_adapted_down,
    save=save_adapted_down, backward=backward_adapted_down,
)  # fmt: skip
