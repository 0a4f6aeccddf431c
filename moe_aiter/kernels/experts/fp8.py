"""The experts with 8-bit products: in training as one autograd node, and forward only with 8-bit weights.

    z = gate_up8 x8,      y = down8 a8         a = f(z)              forward
    u = down8'.T dout8,   dx = gate_up8.T (c dz)8                    backward
    dgate_up = dz8' outer x8,   ddown = dout8 outer (s a)8'          where all products are of 8 bits

Every operand has a scale for each row along the axis that is summed over (`quantize_rows`).  So backward
quantises down again, by columns; forward has kept the columns' largest magnitudes beside z.  Of gate_up,
backward uses the numbers of forward: dz takes over c, the scales of gate_up's rows, before it is quantised
(`quantize_folded`), and forward has kept c.  This does not work for down, because dout is quantised once for
all experts of a token.

Weights and forward's operands are e4m3; dout and dz have the format of the gradients.  The gradients of the
weights, 3 of the 9 units of product, come in two recipes:

* from rows that are not quantised, x, dout, dz and s * f(z) in the dtype of x: torchao's rowwise_with_gw_hp;
* from 8-bit rows too, with scales as in `tgmm_fp8`, similar to torchao's rowwise.  Then backward needs x only
  as 8-bit rows, which are saved in its place.

A third recipe, `block`, has the scales of DeepSeek-V3 (`quantize_blocks`): for blocks of 128 columns of a
token or a gradient, and for square blocks of a weight.  Backward quantises the transposed weights, which
gives the numbers of forward, and takes over no scales.  The gradients of the weights are those of the first
recipe.

All else that is saved has the dtype of x.  The gradient of the quantisation is that of the identity.

On Hopper, kernels multiply 8-bit floats, add the products in float32 and multiply the sums by the scales, for
`block` the sum over each block.  On other devices, and for sizes that these kernels do not support, torch or
Triton multiplies the quantised numbers in the dtype of x, which is slower.

`quantized_experts` takes weights that were quantised once, for inference:

    out[t] = sum over j of s[t, j] * (down8 @ f(gate_up8 @ x8[t] + gate_up_bias) + down_bias)

with a scale for each row of a weight, of a token and of the activation's result.  On Hopper it uses the
products of `experts_fp8`, whose epilogue applies the activation.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...op import (
    IMPLS,
    Written,
    binds,
    define_op,
    extended,
    fill,
    gradients,
    is_last_use,
    is_unwatched,
    pick,
    saved_tensors,
)
from ...private_api import Scoped, release_saved
from .. import hopper
from ..base.activations import get_activation
from ..base.check import check_plan, check_tensor, refuse_gradient, take_rows
from ..base.fp8 import ROW_BLOCK
from ..base.launch import cdiv
from ..base.sources import arrived, late
from ..base.tile import column_slices
from ..grouped.gmm import GmmUnpermuteInputs, bind_token_sum, has_blocks
from ..grouped.scaled_gemm import scaled_gmm
from ..grouped.tgmm import weight_gradient
from ..grouped.tgmm_fp8 import num_bytes, quantize_y, weight_gradient_fp8
from ..quantize.blocks import plan_row_blocks
from ..quantize.layouts import factors_of_rows, quantize_folded, quantize_transposed, transpose_rows8
from ..quantize.rows import (
    FORMATS,
    QuantizeRowsInputs,
    is_read_once,
    new_quantize_rows,
    quantize_by_amax,
    quantize_rows,
    quantize_rows_and_amax,
)
from ..quantize.scale_blocks import dequantize, quantize_blocks
from ..rows.permute import unpermute, weights_of
from ..rows.sums import group_sum
from .down import (
    DownGradInputs,
    DownGradOverZInputs,
    down_gradients,
    new_beside_dz,
    new_expert_down_grad,
    over_z,
)
from .glu import glu
from .inputs import ExpertInputs, check_expert_values
from .keep_fp8 import keeps_fp8, kept_fp8
from .up import UpInputs, ZInputs, up_gradients

# experts_fp8

ALL = "_all"
BLOCK = "block"
RECIPES = (*FORMATS, *(format + ALL for format in FORMATS), BLOCK)  # the format of gradients, with ALL or not


def quantize_tokens(x: Tensor, format: str, blocks: bool) -> tuple[Tensor, Tensor]:
    """Rows of 8-bit floats with a scale for each row, or for each block of its columns."""
    return quantize_blocks(x, False, format) if blocks else quantize_rows(x, format)


class QuantizedTokens(NamedTuple):
    """Tokens or gradients (T, H) that were quantised before, for example by the rank that sent them."""

    x: Tensor  # (T, H), zeros without memory: its shape, its dtype, and its place in a graph
    x8: Tensor  # (T, H)
    scale: Tensor  # (T,), or of blocks

    @property
    def dtype(self) -> torch.dtype:
        """That of the tokens."""
        return self.x.dtype


# what backward reads in place of the gradient of the experts' output, which is zeros then
quantized_dout: Scoped[QuantizedTokens | None] = Scoped("quantized_dout", None)


# experts_fp8: inputs


class UpFp8Inputs(NamedTuple):
    """The inputs of the op `expert_up_fp8`: those of `expert_up` as 8-bit floats with scales."""

    x8: Tensor  # (T, H)
    x_scale: Tensor  # (T,)
    w8: Tensor  # (E, width, H)
    w_scale: Tensor  # (E, width)
    bias: Tensor | None  # (E, width)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)
    activation: str
    interleaved: bool
    save_z: bool
    dtype: torch.dtype | None  # of z and a

    def as_up(self, rounded: bool = False) -> UpInputs:
        """Return the inputs of `expert_up` that these stand for, or of 8 bits without scales."""
        x, w = self.x8, self.w8
        if rounded:
            x, w = dequantize(x, self.x_scale, self.dtype), dequantize(w, self.w_scale, self.dtype)
        rest = self.order, self.rank, self.group_sizes, self.activation, self.interleaved, self.save_z
        return UpInputs(x, w, self.bias, *rest, 0, None)


ZFp8Inputs = extended("ZFp8Inputs", UpFp8Inputs, save_z=None)  # of `expert_up_fp8`, z alone is computed


def with_z(i: ZFp8Inputs) -> UpFp8Inputs:
    """Return the inputs of `expert_up_fp8`."""
    return UpFp8Inputs(*i[:-1], True, i.dtype)


class DownGradFp8Inputs(NamedTuple):
    """The inputs of the op `expert_down_grad_fp8`: `expert_down_grad` of 8-bit floats with scales."""

    dout8: Tensor  # (T, H)
    dout_scale: Tensor  # (T,)
    z: Tensor  # (R, width)
    w8: Tensor  # (E, I, H): columns of down as rows
    w_scale: Tensor  # (E, I)
    routing_weights: Tensor  # (T, k)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)
    activation: str
    interleaved: bool
    need_a: bool


DownGradFp8OverZInputs = extended("DownGradFp8OverZInputs", DownGradFp8Inputs, z=Written)  # z becomes dz


def as_down_grad(i: DownGradFp8Inputs | DownGradFp8OverZInputs, rounded: bool = False) -> DownGradInputs:
    """Return the inputs of `expert_down_grad` that these stand for, or of 8 bits without scales."""
    dout, w, dtype = i.dout8, i.w8, i.z.dtype
    if rounded:
        dout, w = dequantize(dout, i.dout_scale, dtype), dequantize(w, i.w_scale, dtype)
    routing, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)
    return DownGradInputs(dout, i.z, w.mT, i.routing_weights, *routing, *act, i.need_a)


class GmmUnpermuteFp8Inputs(NamedTuple):
    """The inputs of the op `gmm_unpermute_fp8`: those of `gmm_unpermute` as 8-bit floats with scales."""

    x8: Tensor  # (R, K)
    x_scale: Tensor  # (R,), or of blocks
    w8: Tensor  # (E, N, K)
    w_scale: Tensor  # (E, N), or to `fold` (E, K), or of blocks
    group_sizes: Tensor  # (E,)
    bias: Tensor | None  # (E, N)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    routing_weights: Tensor | None  # (T, k)
    row_bytes: int | torch.SymInt  # the most for the rows of the product
    fold: bool  # the scales of the weight lie along the sum, and x8 has taken them over
    dtype: torch.dtype | None  # of the product

    def rounded(self) -> GmmUnpermuteInputs:
        """Return the inputs of `gmm_unpermute` that these stand for."""
        if self.fold:  # without the scales of the weight that the rows took over
            folded = dequantize(self.x8, self.x_scale, torch.promote_types(self.dtype, torch.float32))
            x = (folded / factors_of_rows(self.w_scale, self.group_sizes, len(self.x8))).to(self.dtype)
            w = dequantize(self.w8.mT, self.w_scale, self.dtype)
        else:
            x = dequantize(self.x8, self.x_scale, self.dtype)
            w = dequantize(self.w8, self.w_scale, self.dtype).mT
        routing = self.order, self.rank, self.routing_weights
        return GmmUnpermuteInputs(x, w, self.group_sizes, self.bias, *routing, self.row_bytes)


# experts_fp8: launcher


@binds
def bind_up(i: UpFp8Inputs, write_a: bool = True) -> Callable:
    launch = hopper.bind_expert_up(i.as_up(), write_a, i.dtype, has_blocks(i.w_scale))

    def launch_up(out, i):
        launch(out, i.as_up(), (take_rows(i.x_scale, i.order, i.rank.shape[1]), i.w_scale))

    return launch_up


@binds
def bind_z(i: ZFp8Inputs) -> Callable:
    launch = bind_up(with_z(i), write_a=False)
    return lambda z, i: launch((z, None), with_z(i))


@binds
def bind_gmm_unpermute_fp8(i: GmmUnpermuteFp8Inputs) -> Callable:
    (R, K), (E, N, _), fold = i.x8.shape, i.w8.shape, i.fold
    blocks, bind = not fold and has_blocks(i.w_scale), hopper.launcher("gmm", "bind_product")
    launches = [
        (
            n,
            bind(i.x8[:0], i.w8[:, n].mT, (R, K, E), i.dtype, zero_rest=False, blocks=blocks),
            bind_token_sum(i.rank.shape, n.stop - n.start, N),
        )
        for n in column_slices(N, R * i.dtype.itemsize, i.row_bytes)
    ]

    def launch(out, i):
        for n, product, sum_up in launches:
            rows = out.new_empty(R, n.stop - n.start)
            bias = None if i.bias is None else i.bias[:, n]
            rows_n = slice(n.start // ROW_BLOCK, cdiv(n.stop, ROW_BLOCK)) if blocks else n  # of the scales
            w, w_scale = i.w8[:, n].mT, None if fold else i.w_scale[:, rows_n]
            product(rows, i.x8, w, i.group_sizes, bias, x_scale=i.x_scale, w_scale=w_scale)
            sum_up(out[:, n], rows, i.rank, weights_of(i.routing_weights))
            del rows  # before those of the next columns

    return launch


@binds
def bind_down_grad(i: DownGradFp8Inputs | DownGradFp8OverZInputs) -> Callable:
    launch = hopper.bind_expert_down_grad(as_down_grad(i), has_blocks(i.w_scale))

    def launch_down_grad(out, i):
        launch(out, as_down_grad(i), (take_rows(i.dout_scale, i.order, i.rank.shape[1]), i.w_scale))

    return launch_down_grad


bind_gmm_unpermute_fp8.fits = hopper.fits_gmm_unpermute_fp8
bind_up.fits = bind_z.fits = hopper.fits_up_fp8
bind_down_grad.fits = hopper.fits_down_grad_fp8


# experts_fp8: op


def new_up(i: UpFp8Inputs) -> tuple[Tensor, Tensor]:
    R, width, projections = i.order.shape[0], i.w8.shape[1], get_activation(i.activation).projections
    z = i.x8.new_empty(R if i.save_z else 0, width, dtype=i.dtype)
    return z, z.new_empty(R, width // projections)


def everywhere(op: str, as_inputs: Callable) -> dict:
    """Return the implementations of an op that launches another one, with the inputs `as_inputs(i)`."""

    def launch(out, i):
        fill(op, out, as_inputs(i))

    return {"torch": launch, "triton": launch}


expert_up_fp8_op = define_op(
    "expert_up_fp8", UpFp8Inputs, outputs=2, new=new_up,
    **everywhere("expert_up", lambda i: i.as_up(rounded=True)), hopper=bind_up,
)  # fmt: skip
expert_z_fp8_op = define_op(
    "expert_z_fp8", ZFp8Inputs, new=lambda i: new_up(with_z(i))[0],
    **everywhere("expert_z", lambda i: ZInputs(*with_z(i).as_up(rounded=True)[:8])), hopper=bind_z,
)  # fmt: skip
gmm_unpermute_fp8_op = define_op(
    "gmm_unpermute_fp8", GmmUnpermuteFp8Inputs,
    new=lambda i: i.x8.new_empty(i.rank.shape[0], i.w8.shape[1], dtype=i.dtype),
    **everywhere("gmm_unpermute", GmmUnpermuteFp8Inputs.rounded), hopper=bind_gmm_unpermute_fp8,
)  # fmt: skip
expert_down_grad_fp8_op = define_op(
    "expert_down_grad_fp8", DownGradFp8Inputs, outputs=3,
    new=lambda i: new_expert_down_grad(as_down_grad(i)),
    **everywhere("expert_down_grad", lambda i: as_down_grad(i, rounded=True)), hopper=bind_down_grad,
)  # fmt: skip
expert_down_grad_fp8_over_z_op = define_op(
    "expert_down_grad_fp8_over_z", DownGradFp8OverZInputs, outputs=2,
    new=lambda i: new_beside_dz(as_down_grad(i)),
    **everywhere("expert_down_grad_over_z", lambda i: DownGradOverZInputs(*as_down_grad(i, rounded=True))),
    hopper=over_z(bind_down_grad),
)  # fmt: skip


ExpertsFp8Inputs = extended(
    "ExpertsFp8Inputs", ExpertInputs,
    bytes_of_y=int | torch.SymInt,  # the most for the rows of y, and of dx
    bytes_of_dx=int | torch.SymInt,
    peak=int | torch.SymInt,  # the bytes that a step takes at most, if its memory allows for it
    need_dx=bool,
    save_x8=bool,  # whether 8-bit rows of x serve backward in the place of x
    recipe=str,  # one of RECIPES
    x8=Tensor | None,  # (T, H): x, where that has no numbers
    x_scale=Tensor | None,
)  # fmt: skip


def new_experts(i: ExpertsFp8Inputs) -> tuple[Tensor, ...]:
    """The output, z, the scales of gate_up's rows, and the largest magnitudes of down's columns where they
    cost no other look at it: as far as backward asks for them; and x as 8-bit rows with scales, where these
    serve backward in its place and are not given."""
    (E, width, _), I = i.gate_up.shape, i.down.shape[2]  # noqa: E741
    rows = i.order.shape[0] if i.save_z else 0
    z, by_rows = i.x.new_empty(rows, width), i.recipe != BLOCK
    asked = (by_rows and i.need_dx, width), (by_rows and is_read_once(i.down), I)
    kept = [z.new_empty(E if rows and some else 0, n, dtype=torch.float32) for some, n in asked]
    x8 = new_quantize_rows(QuantizeRowsInputs(i.x if i.save_x8 and i.x8 is None else i.x[:0], "e4m3"))
    return i.x.new_empty(i.x.shape), z, *kept, *x8


def launch_experts(out: tuple[Tensor, ...], i: ExpertsFp8Inputs) -> None:
    y, z, gate_up_scale, down_amax, *x8 = out
    routing, act, blocks = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved), i.recipe == BLOCK
    if i.x8 is not None:
        x8 = i.x8, i.x_scale
    elif i.save_x8:
        fill("quantize_rows", tuple(x8), QuantizeRowsInputs(i.x, "e4m3"))
    else:
        x8 = quantize_tokens(i.x, "e4m3", blocks)
    a = i.x.new_empty(i.order.shape[0], i.down.shape[2])
    w8 = blocks_of_weight(i.gate_up) if blocks else rows_of_weight(i.gate_up)
    if gate_up_scale.numel():
        gate_up_scale.copy_(w8[1])
    up = UpFp8Inputs(*x8, *w8, i.gate_up_bias, *routing, *act, i.save_z, i.x.dtype)
    fill("expert_up_fp8", (z, a), up)
    del up, w8, x8  # and with them 8 bits of each weight
    a8 = quantize_tokens(a, "e4m3", blocks)
    del a
    w8 = blocks_of_weight(i.down) if blocks else rows_and_amax(i.down, down_amax)
    rest = i.group_sizes, i.down_bias, i.order, i.rank, i.routing_weights, i.bytes_of_y, False, i.x.dtype
    fill("gmm_unpermute_fp8", y, GmmUnpermuteFp8Inputs(*a8, *w8, *rest))


def blocks_of_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    return kept_fp8(w, "blocks", lambda: quantize_blocks(w, True))


def transposed_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers and scales of `blocks_of_weight` for w.mT."""

    def make() -> tuple[Tensor, Tensor]:
        if not keeps_fp8(w):
            return quantize_blocks(w.mT, True)
        w8, scale = blocks_of_weight(w)
        return transpose_rows8(w8), scale.mT.contiguous()

    return kept_fp8(w, "blocks transposed", make, backward=True)


def rows_of_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    return kept_fp8(w, "rows", lambda: quantize_rows(w))


def rows_and_amax(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of w (E, A, B); the columns' largest magnitudes go into `amax` (E, B), unless it is empty."""
    # a later request for the magnitudes uses what is kept
    if amax.numel() or (is_read_once(w) and keeps_fp8(w)):
        *w8, found = kept_fp8(w, "rows and amax", lambda: quantize_rows_and_amax(w))
        if amax.numel():
            amax.copy_(found)
        return tuple(w8)
    return rows_of_weight(w)


def save_experts(ctx, i: ExpertsFp8Inputs, output):
    # a main gradient is not saved: another backward pass may change it first
    needs_x = not i.save_x8 and (ctx.needs_input_grad[1] or not i.save_z)
    *kept, x8, x_scale = output[1:]
    if i.save_x8 and i.x8 is not None:
        x8, x_scale = i.x8, i.x_scale
    ctx.save_for_backward(i.x if needs_x else None, *i[1:9], *kept, x8, x_scale)
    ctx.others, ctx.x_shape = (*i[9:-2], None, None), i.x.shape
    ctx.set_materialize_grads(False)


def backward_experts(ctx, dout, *_):
    with late():
        *saved, z, gate_up_scale, down_amax, x8, x_scale = saved_tensors(ctx)
    i, needs = ExpertsFp8Inputs(*saved, *ctx.others), ExpertsFp8Inputs(*ctx.needs_input_grad)
    blocks, x8 = i.recipe == BLOCK, (x8, x_scale)
    format = "e4m3" if blocks else i.recipe.removesuffix(ALL)
    given = quantized_dout.get()
    dout8 = quantize_tokens(dout, format, blocks) if given is None else given[1:]
    routing, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)
    spend_z = not i.save_z or is_last_use(z)
    if not i.save_z:
        x8 = x8 if i.save_x8 else quantize_tokens(arrived(i.x), "e4m3", blocks)
        w8, gate_up_scale = blocks_of_weight(i.gate_up) if blocks else rows_of_weight(i.gate_up)
        z = expert_z_fp8_op(*x8, w8, gate_up_scale, i.gate_up_bias, *routing, *act, dout.dtype)
        del w8
    over_z = spend_z and is_unwatched(z, dout)
    columns = transposed_blocks if blocks else lambda w: quantize_columns(w, down_amax)
    grad = functools.partial(down_grad, over_z, dout8, columns)
    by_columns, of_down, of_gate_up = None, weight_gradient, weight_gradient
    if i.recipe.endswith(ALL):
        row_blocks = plan_row_blocks(i.group_sizes, i.order.shape[0])
        by_columns = functools.partial(quantize_y, row_blocks, i.order, i.rank.shape[1])
        grad = functools.partial(with_columns_of_a, grad, functools.partial(by_columns, "e4m3", dout8[1]))
        of_down = functools.partial(weight_gradient_fp8, dout8, i.peak - num_bytes(dout, z, *x8))
    if over_z:
        release_saved(ctx)  # so that dz, in the memory of z, is freed where it is deleted
    saved = z, i.down, i.down_bias, i.routing_weights, *routing
    needs_down = needs.down, needs.down_bias
    dz, ddown, ddown_bias, ds = down_gradients(
        needs_down, False, dout, saved, *act, i.down_main_grad, grad, of_down
    )
    del z, saved, dout8, grad, of_down  # where dz is not in the memory of z
    dbias = group_sum(dz, i.group_sizes).to(i.gate_up_bias.dtype) if needs.gate_up_bias else None
    dz8 = quantize_dz(dz, gate_up_scale, i.group_sizes, format, blocks) if needs.x else None
    if not needs.gate_up:
        dz = None
    elif by_columns:
        dz = by_columns(format, x8[1], dz)
    dx = None
    if needs.x:
        w8 = transposed_blocks(i.gate_up) if blocks else transposed_rows(i.gate_up, gate_up_scale)
        inputs = *dz8, *w8, i.group_sizes, None, i.order, i.rank, None, i.bytes_of_dx, not blocks, dout.dtype
        dx = gmm_unpermute_fp8_op(*inputs)
        del dz8, w8, inputs
    if by_columns:
        of_gate_up = functools.partial(weight_gradient_fp8, x8, i.peak - num_bytes(dout, ddown, dx))
    needs_up, rest = (False, needs.gate_up, False), (None, 0, i.gate_up_main_grad)
    _, dgate_up, _ = up_gradients(needs_up, dz, i.x, i.gate_up, *routing, *rest, of_gate_up)
    of_weights = {"gate_up": dgate_up, "gate_up_bias": dbias, "down": ddown, "down_bias": ddown_bias}
    return gradients(ExpertsFp8Inputs, x=dx, routing_weights=ds, **of_weights)


def quantize_dz(dz: Tensor, gate_up_scale: Tensor, group_sizes: Tensor, format: str, blocks: bool) -> tuple:
    if blocks or not len(dz):
        return quantize_tokens(dz, format, blocks)
    return quantize_folded(dz, gate_up_scale, group_sizes, format)


def with_columns_of_a(grad: Callable, by_columns: Callable, *inputs) -> tuple:
    """dz, s * f(z) by columns, where it was asked for, and ds."""
    dz, a, ds = grad(*inputs)
    return dz, by_columns(a) if inputs[-1] else a, ds


def transposed_rows(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit rows of w (E, A, B) as (E, B, A).  Their scales are known but where there were no tokens."""
    if keeps_fp8(w) or not scale.numel():
        w8 = kept_fp8(w, "rows transposed", lambda: transpose_rows8(rows_of_weight(w)[0]), backward=True)
        return w8, scale
    return quantize_transposed(w, scale), scale


def quantize_columns(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of w (E, A, B) as rows, whose largest magnitudes are `amax` (E, B) unless that is empty."""
    make = (lambda: quantize_by_amax(w.mT, amax)) if amax.numel() else (lambda: quantize_rows(w.mT))
    return kept_fp8(w, "columns", make, backward=True)


def down_grad(
    over_z: bool, dout8: tuple, columns: Callable, dout: Tensor, z: Tensor, down: Tensor, *rest
) -> tuple[Tensor, ...]:
    """dz, with `over_z` in the memory of z, s * f(z) and ds; `columns` quantises the columns of down."""
    inputs = *dout8, z, *columns(down), *rest
    if not over_z:
        return expert_down_grad_fp8_op(*inputs)
    beside = expert_down_grad_fp8_over_z_op(*inputs)
    return z.detach(), *beside


experts_fp8_op = define_op(
    "experts_fp8", ExpertsFp8Inputs, outputs=6, new=new_experts, check_values=check_expert_values,
    torch=launch_experts, save=save_experts, backward=backward_experts,
)  # fmt: skip


# quantized_experts


ALL_ROWS = 2**62  # bytes: the rows of the second product come in one slice


def format_of(w8: Tensor) -> str:
    return "int8" if w8.dtype == torch.int8 else "e4m3"


class QuantizedInputs(NamedTuple):
    """The inputs of `quantized_experts`."""

    x: Tensor
    gate_up: tuple[Tensor, Tensor, Tensor | None]
    down: tuple[Tensor, Tensor, Tensor | None]
    routing_weights: Tensor
    plan: tuple[Tensor, Tensor, Tensor]
    activation: str
    interleaved: bool

    def up(self, x8: Tensor, x_scale: Tensor | None) -> UpFp8Inputs:
        """Return the inputs of the up-projection."""
        act = self.activation, self.interleaved
        return UpFp8Inputs(x8, x_scale, *self.gate_up, *self.plan, *act, False, self.x.dtype)


def by_groups(i: QuantizedInputs) -> Tensor:
    order, rank, group_sizes = i.plan
    format = format_of(i.gate_up[0])
    product = i.x.dtype if i.x.dtype != torch.float64 else torch.float32

    def multiply(rows: Tensor, weight: tuple, **gathered) -> Tensor:
        w8, w_scale, bias = weight
        x8, x_scale = quantize_rows(rows, format)
        beside = x_scale, w_scale, bias
        return scaled_gmm(x8, w8.mT, group_sizes, *beside, **gathered, out_dtype=product)

    z = multiply(i.x, i.gate_up, order=order, top_k=rank.shape[1])  # (R, width)
    a = glu(z, i.activation, i.interleaved)
    del z
    return unpermute(multiply(a, i.down), order, rank, i.routing_weights).to(i.x.dtype)


def on_hopper(i: QuantizedInputs) -> Tensor:
    order, rank, group_sizes = i.plan
    format = format_of(i.gate_up[0])
    _, a = expert_up_fp8_op(*i.up(*quantize_rows(i.x, format)))
    a8 = quantize_rows(a, format)
    del a
    w8, w_scale, bias = i.down
    rest = group_sizes, bias, order, rank, i.routing_weights, ALL_ROWS, False, i.x.dtype
    return gmm_unpermute_fp8_op(*a8, w8, w_scale, *rest)


def fits_hopper(i: QuantizedInputs) -> bool:
    up, (w8, *_) = i.gate_up[0], i.down
    fits = hopper.fits_up_fp8(i.up(i.x, None)) and w8.shape[2] % 16 == 0 and w8.shape[1] % 8 == 0
    return fits and hopper.multiplies(up, up) and hopper.multiplies(w8, w8)


on_hopper.takes, on_hopper.fits = hopper.DTYPES, fits_hopper
IMPLS["quantized_experts"] = {"hopper": on_hopper, "triton": by_groups, "torch": by_groups}


def quantized_experts(
    x: Tensor, gate_up: tuple[Tensor, Tensor, Tensor | None], down: tuple[Tensor, Tensor, Tensor | None],
    routing_weights: Tensor, plan: tuple[Tensor, Tensor, Tensor], activation: str, interleaved: bool,
) -> Tensor:  # fmt: skip
    """`expert_mlp` with weights as (8 bits, scale, bias), the bias or None.

    `gate_up` (E, 2I, H), (E, 2I), (E, 2I), `down` (E, H, I), (E, H), (E, H), as `quantize_rows` gives the
    first two; `x` (T, H) of any floating dtype, which the result (T, H) has.  Not differentiable.
    Raises ValueError for shapes and devices, TypeError for dtypes, RuntimeError where it would need a
    gradient.
    """
    check_tensor("x", x)
    check_plan(plan)
    refuse_gradient("a quantised layer", x, routing_weights)
    i = QuantizedInputs(x, gate_up, down, routing_weights, plan, activation, interleaved)
    return pick("quantized_experts", i)(i)
