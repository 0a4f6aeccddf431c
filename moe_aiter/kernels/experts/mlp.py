"""The experts of a MoE layer as one function of the tokens: up, activation, down, weighted sum.

    out[t] = sum over j of s[t, j] * (down[e] @ f(gate_up[e] @ x[t] + gate_up_bias[e]) + down_bias[e])

where e is token t's choice j.

On a GPU each kernel computes one kind of product for all experts.  On a CPU one op computes expert after
expert from end to end, while the expert's rows are in the cache.

`expert_both` is both projections as one autograd node that keeps nothing but its inputs.  Its backward pass
makes z again, writes dz over it, and continues as those of `expert_down` and `expert_up` do.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...invariance import batch_invariant
from ...op import IMPLS, binds, bound, define_op, extended, gradients, pick, saved_tensors, takes
from .. import hopper
from ..base.check import cast_as_linear, check_plan, needs_grad
from ..base.lent import all_weights, without
from ..base.sources import by_source, in_turn
from ..base.tile import TILE_DTYPES
from ..grouped.gmm import GmmUnpermuteInputs, bind_gmm_unpermute
from .cpu import expert_loop_op, expert_loop_reference
from .down import DownInputs, down_gradients, expert_down_op
from .few import bind_few, takes_few
from .fp8 import ALL, QuantizedTokens, experts_fp8_op
from .inputs import (
    ExpertInputs,
    check_expert_values,
    check_experts,
    row_bytes,
    row_bytes_fp8,
)
from .options import ExpertOptions, ExpertWeights
from .up import UpInputs, expert_up_op, expert_z_op, up_gradients

Guests = tuple[Tensor | None, Tensor | None]  # the weights of guests, gate_up and down: see base/lent.py

# expert_both: launcher


MORE = dict.fromkeys(("bytes_of_y", "bytes_of_dx"), int | torch.SymInt)
MORE |= dict.fromkeys(("guest_gate_up", "guest_down"), Tensor | None)


class BothInputs(extended("BothInputs", ExpertInputs, **MORE)):
    """The inputs of the op `expert_both`: ExpertInputs, the most bytes for the rows of y and of dx, and the
    weights of guests, see base/lent.py."""

    __slots__ = ()

    def up(self) -> UpInputs:
        """Return the inputs of `expert_up`, without z."""
        routing = self.order, self.rank, self.group_sizes
        return UpInputs(
            self.x, self.gate_up, self.gate_up_bias, *routing, self.activation, self.interleaved, False, 0,
            None, self.guest_gate_up,
        )  # fmt: skip

    def as_gmm_unpermute(self, a: Tensor) -> GmmUnpermuteInputs:
        """Return the inputs of the product with down and the weighted sum of its rows."""
        routing = self.order, self.rank, self.routing_weights
        guests = None if self.guest_down is None else self.guest_down.mT
        return GmmUnpermuteInputs(
            a, self.down.mT, self.group_sizes, self.down_bias, *routing, self.bytes_of_y, guests
        )  # fmt: skip


@binds
@takes(*TILE_DTYPES)
def bind_expert_both(i: BothInputs) -> Callable:
    shape = i.order.shape[0], i.down.shape[2]  # of a
    impl = pick("expert_up", i.up())
    up = bound(impl, i.up())
    down = bind_gmm_unpermute(i.as_gmm_unpermute(i.x.new_empty(shape)))

    def launch(out, i):
        a = i.x.new_empty(shape)
        with in_turn(lambda: [impl]):
            up((a[:0], a), i.up())
            down(out, i.as_gmm_unpermute(a))

    return launch


# expert_both: op


def both_reference(i: BothInputs) -> Tensor:
    weights = all_weights(i.gate_up, i.guest_gate_up), all_weights(i.down, i.guest_down)
    return expert_loop_reference(i._replace(gate_up=weights[0], down=weights[1]))[0]


def save_expert_both(ctx, i: BothInputs, output):
    # a main gradient is not saved: another backward pass may change it first
    *tensors, guest_gate_up, guest_down = i
    ctx.save_for_backward(*tensors[:9], guest_gate_up, guest_down)
    ctx.others, ctx.x_shape = tensors[9:], i.x.shape


def backward_expert_both(ctx, dout):
    *tensors, guest_gate_up, guest_down = saved_tensors(ctx)
    i = BothInputs(*tensors, *ctx.others, guest_gate_up, guest_down)
    needs = BothInputs(*ctx.needs_input_grad)
    routing, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)
    z = expert_z_op(i.x, i.gate_up, i.gate_up_bias, *routing, *act, i.guest_gate_up)
    saved = z, i.down, i.down_bias, i.routing_weights, *routing
    needs_down = needs.down, needs.down_bias
    dz, ddown, ddown_bias, ds = down_gradients(
        needs_down, True, dout, saved, *act, i.down_main_grad, guests=i.guest_down
    )  # fmt: skip
    del z, saved  # where dz is not in its memory
    bias_dtype = None if i.gate_up_bias is None else i.gate_up_bias.dtype
    rest = bias_dtype, i.bytes_of_dx, i.gate_up_main_grad
    dx, dgate_up, dbias = up_gradients(
        needs[:3], dz, i.x, i.gate_up, *routing, *rest, guests=i.guest_gate_up
    )  # fmt: skip
    return gradients(
        BothInputs, x=dx, gate_up=dgate_up, gate_up_bias=dbias, down=ddown, down_bias=ddown_bias,
        routing_weights=ds,
    )  # fmt: skip


expert_both_op = define_op(
    "expert_both", BothInputs, new=lambda i: i.x.new_empty(i.x.shape), check_values=check_expert_values,
    reference=both_reference, triton=bind_expert_both, save=save_expert_both,
    backward=backward_expert_both,
)  # fmt: skip


# expert_forward: `expert_both` where no gradient is needed, so that backward has no bits of z to repeat


def forward_impls() -> set[Callable]:
    return {impl for op in ("expert_up", "gmm_into", "expert_both") for impl in IMPLS[op].values()}


OURS = forward_impls()


@binds
@takes(*TILE_DTYPES)
def bind_expert_forward(i: BothInputs) -> Callable:
    """Compute few tokens by two kernels of their own, unless someone has registered another kernel."""
    if takes_few(i) and i.guest_down is None and forward_impls() == OURS:
        return bind_few(i)
    return bound(pick("expert_both", i), i)


expert_forward_op = define_op(
    "expert_forward", BothInputs, new=lambda i: i.x.new_empty(i.x.shape), check_values=check_expert_values,
    reference=both_reference, triton=bind_expert_forward,
)  # fmt: skip


# expert_mlp: backends


def by_layer(i: ExpertInputs, row_chunks: int | None = None, guests: Guests = (None, None)) -> Tensor:
    """Every expert's up-projection, then every expert's down-projection.

    They are two nodes if z is saved, so that it can be freed, or become dz, when the first has run backward.
    """
    if not i.save_z:
        op = expert_both_op if i.need_grad() or by_source.get() is not None else expert_forward_op
        return op(*i, *row_bytes(i, row_chunks), *guests)
    return up_and_down(i, i.routing_weights, (i.order, i.rank, i.group_sizes), row_chunks, guests)


def up_and_down(
    i: ExpertInputs, down_weights: Tensor, down_plan: tuple[Tensor, Tensor, Tensor], row_chunks: int | None,
    guests: Guests = (None, None),
) -> Tensor:  # fmt: skip
    """Both projections as two nodes, of which the second sums rows with a routing that may be another."""
    act = i.activation, i.interleaved
    bytes_of_y, bytes_of_dx = row_bytes(i, row_chunks)
    plan = i.order, i.rank, i.group_sizes
    up = i.x, i.gate_up, i.gate_up_bias, *plan, *act, i.save_z, bytes_of_dx, i.gate_up_main_grad, guests[0]
    # z has no other user, so backward may write over it
    down = i.down, i.down_bias, down_weights, *down_plan, *act, True, bytes_of_y, i.down_main_grad, guests[1]

    def impls() -> tuple[Callable, ...]:
        return pick("expert_up", UpInputs(*up)), pick("expert_down", DownInputs(i.x, i.x, *down))

    with in_turn(impls):
        z, a = expert_up_op(*up)
        return expert_down_op(a, z, *down)


def by_expert(i: ExpertInputs, row_chunks: int | None = None) -> Tensor:
    """One expert from end to end, then the next; there are no rows of Y or dX, only of one expert."""
    return expert_loop_op(*i)[0]


def by_layer_on_hopper(
    i: ExpertInputs, row_chunks: int | None = None, guests: Guests = (None, None)
) -> Tensor:
    return by_layer(i, row_chunks, guests)


def in_8_bits(
    i: ExpertInputs, row_chunks: int | None, fp8: str, x8: Tensor | None, x_scale: Tensor | None
) -> Tensor:
    """Multiply in FP8.  Some recipes keep x in 8 bits for the gradient of gate_up and to compute z again."""
    backward_needs_x = i.need_grad() and (i.gate_up.requires_grad or not i.save_z)
    save_x8 = fp8.endswith(ALL) and backward_needs_x
    most = row_bytes_fp8(i, row_chunks) if fp8.endswith(ALL) else (*row_bytes(i, row_chunks), 0)
    return experts_fp8_op(*i, *most, i.x.requires_grad, save_x8, fp8, x8, x_scale)[0]


by_layer.takes, by_layer_on_hopper.takes = TILE_DTYPES, hopper.DTYPES
by_layer_on_hopper.fits = lambda i: hopper.is_hopper(i[0].device)
IMPLS["expert_mlp"] = {
    "hopper": by_layer_on_hopper,
    "triton": by_layer,
    "host": by_expert,
    "torch": by_expert,
}


# expert_mlp: public


def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, routing_weights: Tensor, plan: tuple[Tensor, Tensor, Tensor], *,
    activation: str = "swiglu", interleaved: bool = False, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, gate_up_main_grad: Tensor | None = None,
    down_main_grad: Tensor | None = None, row_chunks: int | None = None, recompute: str = "none",
    fp8: str | None = None,
) -> Tensor:  # fmt: skip
    """Send each token through its experts and return the weighted sum of their outputs.

    x: (T, H), float32, bfloat16, float16 or, on the slow reference path, float64.
    gate_up: (E, 2I, H) for a gated activation, gate rows first, or gate and up rows
        alternating if `interleaved`; (E, I, H) for a plain one.  down: (E, H, I).  Dtype of x, any strides.
    routing_weights: (T, k), any floating dtype; used in float32.
    plan: order (T * k,), rank (T, k) and group_sizes (E,), as `make_plan` or `sort_by_expert` return them.
    activation: swiglu, swiglu_oai, geglu, geglu_tanh, reglu, silu, gelu, relu, relu2, or what
        `swiglu_limit` and `swiglu_softcap` return.
    gate_up_bias: (E, 2I or I), down_bias: (E, H), any floating dtype.
    gate_up_main_grad, down_main_grad: shaped like the weights, any floating dtype, usually float32.  Where
        set, backward adds the weight's gradient there, and autograd gets None for that weight.
    row_chunks: in how many chunks of columns a GPU computes the (R, H) rows that each token's sum reads, and
        those of dx; R = T * k.  A chunk has at least 256 columns.  These rows are often the largest tensor
        of a step: more chunks take less memory and more time.  None: as few chunks as raise the peak of a
        training step by at most an eighth.
    recompute: "none", or "z" to keep only x and the routing, and to compute the pre-activations z (R, 2I)
        again in the backward pass, with the same results to the bit.  A step then multiplies two ninths more
        (a sixth for a plain activation).  This lowers the memory that all layers hold for backward; the peak
        of a single layer's backward pass stays.
    fp8: "e4m3" or "e5m2", the format of gradients: products multiply 8-bit floats with row-wise scales,
        except those for the weights' gradients; "e4m3_all" and "e5m2_all" include these (`tgmm_fp8`); "block"
        is "e4m3" with scales of blocks (`quantize_blocks`).  A Hopper GPU multiplies 8-bit floats if H is a
        multiple of 256 and I of 64; otherwise the quantised numbers are converted to the dtype of x.

    Returns (T, H) in the dtype of x; torch.autocast casts x and the weights.  Differentiable in x, weights,
    biases and routing_weights; gradients that nothing needs are not computed.  Kept for backward: x, routing,
    z unless recomputed; with `fp8` a float32 for each column of the weights, with "_all" x in 8 bits only.

    Raises ValueError for shapes or devices that do not fit, TypeError for dtypes; with MOE_AITER_DEBUG=1 also
    ValueError for a plan that contradicts itself.
    Source: the formula of Shazeer et al. 2017, arXiv 1701.06538; data flow as in SonicMoE, arXiv 2512.14080.
    """
    main_grads = gate_up_main_grad, down_main_grad
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, *main_grads)
    options = ExpertOptions(activation, interleaved, row_chunks, recompute, fp8)
    return mix_experts(x, weights, routing_weights, plan, options)


def mix_experts(
    x: Tensor | QuantizedTokens, weights: ExpertWeights, routing_weights: Tensor,
    plan: tuple[Tensor, Tensor, Tensor], options: ExpertOptions,
) -> Tensor:  # fmt: skip
    """Do as `expert_mlp`, with its weights and its options as values.

    With `fp8`, `x` may be tokens that were quantised as this recipe does; a recipe without "_all" reads their
    own numbers in backward, which hooks for saved tensors put in their place.
    """
    x, *x8 = x if isinstance(x, QuantizedTokens) else (x, None, None)
    if weights.guests is not None:
        _, *guests = cast_as_linear(x, *weights.guests)
        weights = weights._replace(guests=tuple(guests))
    i = new_inputs(x, weights, routing_weights, plan, options)
    if options.fp8 is not None:
        return in_8_bits(i, options.row_chunks, options.fp8, *x8)
    rest = () if weights.guests is None else (weights.guests,)
    return pick("expert_mlp", i)(i, options.row_chunks, *rest)


def new_inputs(
    x: Tensor, w: ExpertWeights, routing_weights: Tensor, plan: tuple, options: ExpertOptions
) -> ExpertInputs:
    """Return the inputs of the experts, checked, and cast under torch.autocast; guests must be cast."""
    options.check()
    check_plan(plan)
    x, gate_up, down = cast_as_linear(x, w.gate_up, w.down)
    x = by_rows(x) if batch_invariant() and x.is_cuda and x.dtype in hopper.DTYPES else x
    tensors = x, gate_up, w.gate_up_bias, down, w.down_bias, routing_weights
    save_z = options.recompute == "none" and needs_grad(*tensors)
    main_grads = w.gate_up_main_grad, w.down_main_grad
    i = ExpertInputs(*tensors, *plan, options.activation, options.interleaved, save_z, *main_grads)
    part = i
    if w.guests is not None:
        part = without(i, "down", w.guests[1])
        part = without(part, "gate_up", w.guests[0], "group_sizes", "gate_up_bias", "down_bias")
    check_experts(part)
    return i


def by_rows(x: Tensor) -> Tensor:
    """Return x (T, H) so that Hopper's kernels take it, whose sums are their own, wherever its tokens lie."""
    whole = x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) * x.itemsize % 16 == 0
    if whole and not torch.compiler.is_compiling():
        whole = x.storage_offset() * x.itemsize % 16 == 0
    fits = x.shape[1] * x.itemsize % 16 == 0  # or they never do
    return x.clone(memory_format=torch.contiguous_format) if fits and not whole else x


def expert_rows(
    x: Tensor, weights: ExpertWeights, plan: tuple[Tensor, Tensor, Tensor], options: ExpertOptions
) -> Tensor:
    """Return the rows (R, H) that `expert_mlp` sums, in the order of the plan; zeros for dropped choices.

    For models that process each expert's output before the weighted sum.  `row_chunks`, `recompute` and `fp8`
    have no effect.
    """
    i = new_inputs(x, weights, torch.ones_like(plan[1], dtype=torch.float32), plan, options)
    rows = torch.arange(len(i.order), dtype=i.order.dtype, device=i.order.device).where(i.order >= 0, -1)
    alone = rows, rows[:, None], i.group_sizes  # each row is the only one of a token of its own
    i = i._replace(save_z=i.need_grad())
    return up_and_down(i, i.routing_weights.view(-1, 1), alone, None)
