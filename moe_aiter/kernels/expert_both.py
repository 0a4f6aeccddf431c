"""Both projections of the experts as one autograd node, which keeps nothing but its inputs.

The backward pass makes z again, writes dz over it, and then is that of `expert_down` and of `expert_up`.
"""

from ..op import define_op, saved_tensors, takes
from ._expert_inputs import NUM_INPUTS, ExpertInputs, check_expert_values
from ._tile import TILE_DTYPES
from .expert_down import down_gradients
from .expert_loop import ARGUMENTS, expert_loop_reference
from .expert_up import expert_up_op, expert_z_op, up_gradients
from .gmm_unpermute import launch_gmm_unpermute

# launcher


@takes(*TILE_DTYPES)
def launch_expert_both(out, *inputs):
    *inputs, bytes_of_y, _ = inputs
    i = ExpertInputs(*inputs)
    routing = i.order, i.rank, i.group_sizes
    _, a = expert_up_op(i.x, i.gate_up, i.gate_up_bias, *routing, i.activation, i.interleaved, False, 0, None)
    way_home = i.order, i.rank, i.routing_weights, bytes_of_y
    launch_gmm_unpermute(out, a, i.down.mT, i.group_sizes, i.down_bias, *way_home)


# op


def save_expert_both(ctx, inputs, output):
    # a main gradient is not saved: another backward pass may change it first
    ctx.save_for_backward(*inputs[:9])
    ctx.others, ctx.x_shape = inputs[9:], inputs[0].shape


def backward_expert_both(ctx, dout):
    *others, _, bytes_of_dx = ctx.others
    i = ExpertInputs(*saved_tensors(ctx), *others)
    needs = ExpertInputs(*ctx.needs_input_grad[:NUM_INPUTS])
    routing, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)
    z = expert_z_op(i.x, i.gate_up, i.gate_up_bias, *routing, *act)
    saved = z, i.down, i.down_bias, i.routing_weights, *routing
    needs_down = needs.down, needs.down_bias
    dz, ddown, ddown_bias, ds = down_gradients(needs_down, True, dout, saved, *act, i.down_main_grad)
    del z, saved  # where dz is not in its memory
    bias_dtype = None if i.gate_up_bias is None else i.gate_up_bias.dtype
    rest = bias_dtype, bytes_of_dx, i.gate_up_main_grad
    dx, dgate_up, dbias = up_gradients(needs[:3], dz, i.x, i.gate_up, *routing, *rest)
    return dx, dgate_up, dbias, ddown, ddown_bias, ds, *[None] * 10


expert_both_op = define_op(
    f"expert_both({ARGUMENTS} Tensor? gate_up_main_grad, Tensor? down_main_grad, SymInt bytes_of_y, "
    "SymInt bytes_of_dx) -> Tensor",
    new=lambda x, *_: x.new_empty(x.shape),
    check_values=lambda *inputs: check_expert_values(*inputs[:NUM_INPUTS]),
    reference=lambda *inputs: expert_loop_reference(*inputs[:NUM_INPUTS])[0],
    triton=launch_expert_both,
    save=save_expert_both,
    backward=backward_expert_both,
)
