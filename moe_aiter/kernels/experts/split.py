"""Experts whose gate and up are weights of their own, as in torchtitan and in many checkpoints.

The kernels take both as one, (E, 2I, H), so the two have to be copied.  A backward pass that kept the copy
would keep the weights of all layers, which FSDP frees between the passes; so it is made again there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...op import define_op, fill, gradients
from ..base.check import check_device, check_plan, check_shape, check_tensor, needs_grad
from ..grouped.tgmm import tgmm_accumulate
from .down import expert_down_op
from .inputs import ExpertInputs, check_expert_values, check_experts, check_main_grad, row_bytes
from .mlp import expert_mlp
from .up import UpInputs, new_expert_up, up_gradients

ACTIVATION = "swiglu", False  # whether gate and up come in turn


def joined(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """(E, 2I, H): gate rows first, cast and copied at once."""
    E, width, H = gate.shape
    both = gate.new_empty(E, 2 * width, H, dtype=dtype)
    both[:, :width].copy_(gate)
    both[:, width:].copy_(up)
    return both


def shape_of_joined(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the metadata of `joined` and no memory."""
    return gate[:, :1].to(dtype).expand(-1, 2 * gate.shape[1], -1)


# launcher


class UpSplitInputs(NamedTuple):
    """The inputs of the op `expert_up_split`: those of `expert_up`, with gate and up apart."""

    x: Tensor  # (T, H)
    gate: Tensor  # (E, I, H)
    up: Tensor  # (E, I, H)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)
    row_bytes: int | torch.SymInt  # the most for the rows of dx
    gate_main_grad: Tensor | None  # (E, I, H)
    up_main_grad: Tensor | None  # (E, I, H)

    def whole(self, gate_up: Tensor) -> UpInputs:
        """Return the inputs of `expert_up` with this weight."""
        routing = self.order, self.rank, self.group_sizes
        return UpInputs(self.x, gate_up, None, *routing, *ACTIVATION, True, self.row_bytes, None)


# op


def save_expert_up_split(ctx, i: UpSplitInputs, output):
    # main gradients are not saved as tensors: other backward passes may add to them first
    ctx.rest = i.row_bytes, i.gate_main_grad, i.up_main_grad
    ctx.save_for_backward(i.x, i.gate, i.up, i.order, i.rank, i.group_sizes)
    ctx.set_materialize_grads(False)


def backward_expert_up_split(ctx, dz, da):
    # da is always None, as in expert_up
    x, gate, up, order, rank, group_sizes = ctx.saved_tensors
    row_bytes, *main_grads = ctx.rest
    routing = order, rank, group_sizes
    needs_x, *wanted = ctx.needs_input_grad[:3]
    width = gate.shape[1]
    for part, main_grad in enumerate(main_grads):
        if wanted[part] and main_grad is not None:
            half = dz[:, part * width : (part + 1) * width]  # (R, I)
            tgmm_accumulate(main_grad.mT, x, half, group_sizes, order, rank.shape[1])
            wanted[part] = False
    needs = needs_x, any(wanted), False
    dx, dgate_up, _ = up_gradients(needs, dz, x, joined(gate, up, x.dtype), *routing, None, row_bytes, None)
    dgate = dgate_up[:, :width].to(gate.dtype) if wanted[0] else None
    dup = dgate_up[:, width:].to(up.dtype) if wanted[1] else None
    return gradients(UpSplitInputs, x=dx, gate=dgate, up=dup)


expert_up_split_op = define_op(
    "expert_up_split", UpSplitInputs, outputs=2, check_values=check_expert_values,
    new=lambda i: new_expert_up(i.whole(shape_of_joined(i.gate, i.x.dtype))),
    # of any kind: expert_up picks its own
    torch=lambda out, i: fill("expert_up", out, i.whole(joined(i.gate, i.up, i.x.dtype))),
    save=save_expert_up_split, backward=backward_expert_up_split,
)  # fmt: skip

# public


def split_expert_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, routing_weights: Tensor,
    plan: tuple[Tensor, Tensor, Tensor], *, gate_main_grad: Tensor | None = None,
    up_main_grad: Tensor | None = None, down_main_grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`expert_mlp` of SwiGLU experts whose first weight is two tensors, gate and up.

        out[t] = sum over j of s[t, j] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))

    where e is token t's choice j.

    gate, up: (E, I, H), down: (E, H, I); any floating dtype, multiplied in that of x; any strides.
    The other arguments, the result (T, H) and the errors are those of `expert_mlp`.

    Differentiable in the first five.  Kept for backward: x, the routing, z (T * k, 2I), and gate and up as
    they are given: each direction copies them into one, which is freed when that has been multiplied.
    """
    check_plan(plan)
    check_tensor("x", x)
    weights = {"gate": gate, "up": up, "down": down}
    for name, weight in weights.items():
        check_shape(name, weight, "E", *("HI" if name == "down" else "IH"))
        if not weight.is_floating_point():
            raise TypeError(f"{name} must be floating, not {weight.dtype}")
    if gate.shape != up.shape:
        raise ValueError(f"gate is (E, I, H) = {tuple(gate.shape)} but up is {tuple(up.shape)}")
    check_device(x=x, **weights)
    main_grads = {"gate_main_grad": gate_main_grad, "up_main_grad": up_main_grad}
    for name, main_grad in main_grads.items():
        check_main_grad(name, main_grad, gate.shape, x)
    down, like_joined = down.to(x.dtype), shape_of_joined(gate, x.dtype)
    i = ExpertInputs(x, like_joined, None, down, None, routing_weights, *plan, *ACTIVATION, True)
    i = i._replace(down_main_grad=down_main_grad)
    check_experts(i)
    if not (i.need_grad() or needs_grad(up)):
        return expert_mlp(x, joined(gate, up, x.dtype), down, routing_weights, plan)
    bytes_of_y, bytes_of_dx = row_bytes(i, None)
    z, a = expert_up_split_op(x, gate, up, *plan, bytes_of_dx, *main_grads.values())
    # z has no other user, so backward may spend it
    act = *ACTIVATION, True
    return expert_down_op(a, z, down, None, routing_weights, *plan, *act, bytes_of_y, down_main_grad)
