"""The experts with most of their products of 8-bit floats: one autograd node.

    z = gate_up8 x8,      y = down8 a8         a = f(z)              forward
    u = down8'.T dout8,   dx = gate_up8'.T dz8                       backward

Every operand has a scale for each row along the axis that is summed over (`quantize_rows`), so backward
quantises the weights again, by columns.  Weights and what goes forward are e4m3, dout and dz of the format of
the gradients.  The gradients of the weights, 3 of the 9 units of product, are of rows that are not quantised:
x, dout, dz and s * f(z), in the dtype of x, as is all that is saved.  It is the recipe that torchao calls
rowwise_with_gw_hp.  To the quantisation the gradient is that of the identity.

On Hopper, kernels multiply 8-bit floats and scale sums of float32.  Elsewhere, and for sizes that do not fit
them, the quantised numbers are multiplied in the dtype of x, which costs time instead of saving it.
"""

import functools

import torch
from torch import Tensor

from ..backend import define_op, pick
from ..dispatch import is_last_use, is_unwatched
from . import hopper
from ._expert_inputs import ExpertInputs, check_expert_values
from ._groups import take_rows
from .expert_down import down_gradients, new_beside_dz, new_expert_down_grad
from .expert_loop import ARGUMENTS
from .expert_up import new_expert_up, up_gradients, z_alone
from .gmm_unpermute import column_chunks, new_gmm_unpermute
from .permute import launch_unpermute
from .quantize import FORMATS, dequantize_rows, quantize_rows


def check_fp8(fp8: str | None) -> None:
    """Raise ValueError unless this is None or the name of the gradients' format."""
    if fp8 is not None and fp8 not in FORMATS:
        raise ValueError(f"unknown fp8 {fp8!r}; known: None, {', '.join(FORMATS)}")


# reference


def rounded(x: Tensor, format: str = "e4m3") -> Tensor:
    """What the 8-bit floats and scales of the rows of x stand for, in its dtype."""
    return dequantize_rows(*quantize_rows(x, format), x.dtype)


def rounded_up(out, x, gate_up, *rest) -> None:
    inputs = rounded(x), rounded(gate_up), *rest, 0, None
    pick("expert_up", *inputs)(out, *inputs)


def rounded_z(z, x, gate_up, *rest) -> None:
    inputs = rounded(x), rounded(gate_up), *rest
    pick("expert_z", *inputs)(z, *inputs)


def rounded_home(out, x, w, *rest) -> None:
    *rest, gradients = rest
    inputs = rounded(x, gradients), rounded(w.mT).mT, *rest
    pick("gmm_unpermute", *inputs)(out, *inputs)


def rounded_down_grad(out, dout, z, down, *rest) -> None:
    *rest, gradients = rest
    inputs = rounded(dout, gradients), z, rounded(down.mT).mT, *rest
    pick("expert_down_grad", *inputs)(out, *inputs)


def rounded_over_z(out, dout, z, down, *rest) -> None:
    *rest, gradients = rest
    inputs = rounded(dout, gradients), z, rounded(down.mT).mT, *rest
    pick("expert_down_grad_over_z", *inputs)(out, *inputs)


# launcher


def launch_up(out, x, gate_up, bias, order, rank, *rest) -> None:
    (x, x_scale), (gate_up, w_scale) = quantize_rows(x), quantize_rows(gate_up)
    scales = take_rows(x_scale, order, rank.shape[1]), w_scale
    launch = hopper.launcher("expert_up", "launch_expert_up")
    launch(out, x, gate_up, bias, order, rank, *rest, scales=scales)


def launch_home(out, x, w, group_sizes, bias, order, rank, routing_weights, row_bytes, gradients) -> None:
    (x8, x_scale), (w8, w_scale) = quantize_rows(x, gradients), quantize_rows(w.mT)
    launch = hopper.launcher("gmm", "launch_gmm")
    for n in column_chunks(out.shape[1], x.shape[0] * x.element_size(), row_bytes):
        rows = x.new_empty(x.shape[0], n.stop - n.start)
        some_bias = None if bias is None else bias[:, n]
        launch(rows, x8, w8[:, n].mT, group_sizes, some_bias, x_scale=x_scale, w_scale=w_scale[:, n])
        launch_unpermute(out[:, n], rows, order, rank, routing_weights)
        del rows  # before the next chunk's


def launch_down_grad(out, dout, z, down, routing_weights, order, rank, *rest) -> None:
    *rest, gradients = rest
    (dout, dout_scale), (w8, w_scale) = quantize_rows(dout, gradients), quantize_rows(down.mT)
    scales = take_rows(dout_scale, order, rank.shape[1]), w_scale
    launch = hopper.launcher("down_grad", "launch_down_grad")
    launch(out, dout, z, w8.mT, routing_weights, order, rank, *rest, scales=scales)


def launch_over_z(out, dout, z, *rest) -> None:
    launch_down_grad((z, *out), dout, z, *rest)


for launch, fits in (
    (launch_up, hopper.fits_up_fp8),
    (launch_home, hopper.fits_home_fp8),
    (launch_down_grad, hopper.fits_down_grad_fp8),
    (launch_over_z, hopper.fits_down_grad_fp8),
):
    launch.takes, launch.fits = hopper.DTYPES, fits


# op


def everywhere(launch) -> dict:
    """Of an op whose other implementations are those of another op."""
    return {"torch": launch, "triton": launch}


UP = (
    "Tensor x, Tensor gate_up, Tensor? bias, Tensor order, Tensor rank, Tensor group_sizes, "
    "str activation, bool interleaved"
)
DOWN = (
    "Tensor down, Tensor routing_weights, Tensor order, Tensor rank, Tensor group_sizes, "
    "str activation, bool interleaved, bool need_a, str gradients"
)
expert_up_fp8_op = define_op(
    f"expert_up_fp8({UP}, bool save_z) -> (Tensor, Tensor)",
    new=lambda *inputs: new_expert_up(*inputs, None),
    **everywhere(rounded_up),
    hopper=launch_up,
)
expert_z_fp8_op = define_op(
    f"expert_z_fp8({UP}) -> Tensor",
    new=lambda *inputs: inputs[0].new_empty(inputs[3].shape[0], inputs[1].shape[1]),
    **everywhere(rounded_z),
    hopper=z_alone(launch_up),
)
gmm_unpermute_fp8_op = define_op(
    "gmm_unpermute_fp8(Tensor x, Tensor w, Tensor group_sizes, Tensor? bias, Tensor order, Tensor rank, "
    "Tensor? routing_weights, SymInt row_bytes, str gradients) -> Tensor",
    new=lambda *inputs: new_gmm_unpermute(*inputs[:8]),
    **everywhere(rounded_home),
    hopper=launch_home,
)
expert_down_grad_fp8_op = define_op(
    f"expert_down_grad_fp8(Tensor dout, Tensor z, {DOWN}) -> (Tensor, Tensor, Tensor)",
    new=lambda *inputs: new_expert_down_grad(*inputs[:-1]),
    **everywhere(rounded_down_grad),
    hopper=launch_down_grad,
)
expert_down_grad_fp8_over_z_op = define_op(
    f"expert_down_grad_fp8_over_z(Tensor dout, Tensor(a!) z, {DOWN}) -> (Tensor, Tensor)",
    new=lambda *inputs: new_beside_dz(*inputs[:-1]),
    **everywhere(rounded_over_z),
    hopper=launch_over_z,
)


def new_experts(*inputs):
    i = ExpertInputs(*inputs[:14])
    return i.x.new_empty(i.x.shape), i.x.new_empty(i.order.shape[0] if i.save_z else 0, i.gate_up.shape[1])


def launch_experts(out, *inputs) -> None:
    *inputs, bytes_of_y, _, _ = inputs
    i, (y, z) = ExpertInputs(*inputs), out
    routing, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)
    a = i.x.new_empty(i.order.shape[0], i.down.shape[2])
    up = i.x, i.gate_up, i.gate_up_bias, *routing, *act, i.save_z
    pick("expert_up_fp8", *up)((z, a), *up)
    home = a, i.down.mT, i.group_sizes, i.down_bias, i.order, i.rank, i.routing_weights, bytes_of_y, "e4m3"
    pick("gmm_unpermute_fp8", *home)(y, *home)


def save_experts(ctx, inputs, output):
    # a main gradient is not saved: another backward pass may change it first
    ctx.save_for_backward(*inputs[:9], output[1])
    ctx.others = inputs[9:]
    ctx.set_materialize_grads(False)


def backward_experts(ctx, dout, _):
    *saved, z = ctx.saved_tensors
    *others, _, bytes_of_dx, gradients = ctx.others
    i, needs = ExpertInputs(*saved, *others), ExpertInputs(*ctx.needs_input_grad[:14])
    routing, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)
    spend_z = not i.save_z or is_last_use(z)
    if not i.save_z:
        z = expert_z_fp8_op(i.x, i.gate_up, i.gate_up_bias, *routing, *act)
    over_z = spend_z and is_unwatched(z, dout)
    grad = functools.partial(down_grad_over_z if over_z else down_grad, gradients)
    saved = z, i.down, i.down_bias, i.routing_weights, *routing
    needs_down = needs.down, needs.down_bias
    dz, ddown, ddown_bias, ds = down_gradients(needs_down, False, dout, saved, *act, i.down_main_grad, grad)
    del z, saved  # where dz is not in its memory
    dx = None
    if needs.x:
        home = i.group_sizes, None, i.order, i.rank, None, bytes_of_dx, gradients
        dx = gmm_unpermute_fp8_op(dz, i.gate_up, *home)
    rest = None if i.gate_up_bias is None else i.gate_up_bias.dtype, bytes_of_dx, i.gate_up_main_grad
    needs_up = False, needs.gate_up, needs.gate_up_bias
    _, dgate_up, dbias = up_gradients(needs_up, dz, i.x, i.gate_up, *routing, *rest)
    return dx, dgate_up, dbias, ddown, ddown_bias, ds, *[None] * 11


def down_grad(gradients: str, *inputs) -> tuple[Tensor, ...]:
    return expert_down_grad_fp8_op(*inputs, gradients)


def down_grad_over_z(gradients: str, dout: Tensor, z: Tensor, *rest) -> tuple[Tensor, ...]:
    """The same, but dz is in the memory of z."""
    a, ds = expert_down_grad_fp8_over_z_op(dout, z, *rest, gradients)
    torch.autograd.graph.increment_version(z)  # if anybody had saved z after all, torch would raise
    return z.detach(), a, ds


experts_fp8_op = define_op(
    f"experts_fp8({ARGUMENTS} Tensor? gate_up_main_grad, Tensor? down_main_grad, SymInt bytes_of_y, "
    "SymInt bytes_of_dx, str gradients) -> (Tensor, Tensor)",
    new=new_experts,
    check_values=lambda *inputs: check_expert_values(*inputs[:14]),
    torch=launch_experts,
    save=save_experts,
    backward=backward_experts,
)
