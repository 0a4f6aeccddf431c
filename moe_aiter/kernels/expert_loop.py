"""The experts on a CPU: one expert after the other, from its tokens to its share of the output.

    z = gate_up[e] @ x[token] + gate_up_bias[e]
    out[token] += weight * (down[e] @ f(z) + down_bias[e])

A block of an expert's rows stays in cache from the first step to the last, in scratch that every block
reuses; torch does the matrix products, C++ what lies between them.  Only x, z and the routing are kept for
the backward pass, and without z it is computed again.  Sums run in float32, expert by expert, so two runs
give the same bits.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import define_op, takes
from ._check import check_float
from ._expert_inputs import ExpertInputs, check_experts
from ._groups import sum_dtype, take_rows, wide
from ._host import HOST_DTYPES, check_built, host
from ._loop_steps import Block, HostSteps, Scratch, TorchSteps, WeightGradient, blocks, linear
from .activations import get_activation
from .gmm import gmm_reference
from .permute import unpermute_reference


class LoopGrads(NamedTuple):
    """The gradients that the backward op returns, in order; or which of them it must compute."""

    x: Tensor | bool
    gate_up: Tensor | bool
    gate_up_bias: Tensor | bool
    down: Tensor | bool
    down_bias: Tensor | bool
    routing_weights: Tensor | bool  # always computed: it comes with dz for nothing


# reference
def expert_loop_reference(*inputs):
    i = ExpertInputs(*inputs)
    rows = take_rows(i.x, i.order, i.rank.shape[1])
    z = gmm_reference(rows, i.gate_up.mT, i.group_sizes, i.gate_up_bias)
    a = get_activation(i.activation)(z, i.interleaved)
    y = gmm_reference(a, i.down.mT, i.group_sizes, i.down_bias)
    return unpermute_reference(y, i.order, i.rank, i.routing_weights), z if i.save_z else z[:0]


# launcher: one loop, for the steps in C++ and in torch
def run_forward(steps_class: type, outs: tuple[Tensor, Tensor], *inputs) -> None:
    i, (out, z) = ExpertInputs(*inputs), outs
    steps = steps_class(i.routing_weights, get_activation(i.activation), i.interleaved)
    steps.prepare(z)
    scratch = Scratch(i.x, len(i.order), steps.view)
    total = out if out.dtype == sum_dtype(out) else out.new_empty(out.shape, dtype=sum_dtype(out))
    total.zero_()
    order, x_view, z_view, total_view = map(steps.view, (i.order.int(), i.x.contiguous(), z, total))
    gate_up, down = i.gate_up.unbind(0), i.down.unbind(0)
    gate_up_bias, down_bias = (per_expert(bias, i.x, len(down)) for bias in (i.gate_up_bias, i.down_bias))
    last = 0
    for expert, first, last, *_ in blocks(i.group_sizes, len(i.order)):
        if first == last:
            continue
        n, choices, (H, channels) = last - first, order[first:last], down[expert].shape
        rows, rows_view = scratch.take("rows", n, H)
        a, a_view = scratch.take("a", n, channels)
        end = first + len(rows)  # padding reaches into the next rows of z, which are written after these
        in_place = i.save_z and end <= len(z)
        z_rows = (z[first:end], z_view[first:last]) if in_place else scratch.take("z", n, z.shape[1])
        steps.gather(x_view, choices, rows_view)
        linear(rows, gate_up[expert], gate_up_bias[expert], z_rows[0])
        if i.save_z and not in_place:
            z[first:last].copy_(z_rows[0][:n])
        steps.glu(z_rows[1], a_view)
        linear(a, down[expert], down_bias[expert], rows)
        steps.accumulate(rows_view, choices, True, total_view)
    z[last:].zero_()
    if total is not out:
        out.copy_(total)


def per_expert(bias: Tensor | None, x: Tensor, num_experts: int) -> tuple:
    return (None,) * num_experts if bias is None else bias.to(x.dtype).unbind(0)


class BackwardLoop:
    """What the blocks of one backward pass share."""

    def __init__(self, steps_class: type, grads: tuple, dout: Tensor, z: Tensor, *rest):
        self.i = i = ExpertInputs(*rest[:-1])
        self.grads, self.needs = LoopGrads(*grads), LoopGrads(*rest[-1])
        self.gate_up, self.down = i.gate_up.unbind(0), i.down.unbind(0)
        biases = (per_expert(bias, i.x, len(self.down)) for bias in (i.gate_up_bias, i.down_bias))
        self.gate_up_bias, self.down_bias = biases
        self.products = {
            name: WeightGradient(getattr(self.grads, name), getattr(i, f"{name}_main_grad"))
            for name in ("gate_up", "down")
            if getattr(self.needs, name)
        }
        self.steps = steps_class(i.routing_weights, get_activation(i.activation), i.interleaved)
        self.steps.prepare(self.grads.gate_up, self.grads.down)
        view = self.steps.view
        self.scratch = Scratch(i.x, len(i.order), view)
        self.dout, self.x, self.order = map(view, (dout.contiguous(), i.x.contiguous(), i.order.int()))
        self.z, self.z_view = z, view(z)
        self.totals = {
            name: dout.new_zeros(getattr(self.grads, name).shape, dtype=sum_dtype(dout))
            for name in ("x", "gate_up_bias", "down_bias", "routing_weights")
        }
        self.total_views = {name: view(total) for name, total in self.totals.items()}

    def run(self) -> None:
        for block in blocks(self.i.group_sizes, len(self.i.order)):
            if block.first < block.last:
                self.run_block(block)
            else:
                for product in self.products.values():
                    product.clear(block)
        for name, total in self.totals.items():
            getattr(self.grads, name).copy_(total)

    def run_block(self, block: Block) -> None:
        expert, first, last, *_ = block
        needs, steps, totals, n = self.needs, self.steps, self.total_views, last - first
        choices, (H, channels) = self.order[first:last], self.down[expert].shape
        dy, dy_view = self.scratch.take("rows", n, H, clear=True)
        steps.gather(self.dout, choices, dy_view)
        if needs.down_bias:
            steps.column_sum(dy_view, choices, True, totals["down_bias"][expert])

        x, z = self.inputs_of(block, choices)
        da, da_view = self.scratch.take("da", n, channels)
        a, a_view = self.scratch.take("a", n, channels, clear=True)
        dz, dz_view = self.scratch.take("dz", n, self.gate_up[expert].shape[0], clear=True)
        torch.mm(dy, self.down[expert], out=da)
        steps.glu_backward(da_view, z, choices, (dz_view, a_view, totals["routing_weights"].reshape(-1)))
        if self.down_bias[expert] is not None:
            dots = wide(dy[:n]) @ wide(self.down_bias[expert])
            self.totals["routing_weights"].view(-1)[self.i.order[first:last]] += dots

        if needs.down:
            self.products["down"].add(block, dy, a)
        if needs.gate_up:
            self.products["gate_up"].add(block, dz, x)
        if needs.gate_up_bias:
            steps.column_sum(dz_view, choices, False, totals["gate_up_bias"][expert])
        if needs.x:
            torch.mm(dz, self.gate_up[expert], out=dy)
            steps.accumulate(dy_view, choices, False, totals["x"])

    def inputs_of(self, block: Block, choices) -> tuple:
        """The rows of x, if a product needs them, and of z, saved or computed again, as the steps see it."""
        expert, first, last, *_ = block
        n, (width, H), x = last - first, self.gate_up[expert].shape, None
        if self.needs.gate_up or not len(self.z):
            x, x_view = self.scratch.take("x", n, H, clear=True)
            self.steps.gather(self.x, choices, x_view)
        if len(self.z):
            return x, self.z_view[first:last]
        z, z_view = self.scratch.take("z", n, width)
        linear(x, self.gate_up[expert], self.gate_up_bias[expert], z)
        return x, z_view


def run_backward(steps_class: type, grads: tuple, *inputs) -> None:
    BackwardLoop(steps_class, grads, *inputs).run()


def new_expert_loop(*inputs):
    i = ExpertInputs(*inputs)
    check_experts(i)
    check_built(i.x)
    return i.x.new_empty(i.x.shape), i.x.new_empty(i.order.shape[0] if i.save_z else 0, i.gate_up.shape[1])


def new_expert_loop_backward(dout, z, *rest):
    i, needs = ExpertInputs(*rest[:-1]), LoopGrads(*rest[-1])
    check_float(x=i.x, dout=dout, z=z)
    if dout.shape != i.x.shape:
        raise ValueError(f"dout is {tuple(dout.shape)} but x is {tuple(i.x.shape)}")
    elsewhere = {"gate_up": i.gate_up_main_grad is not None, "down": i.down_main_grad is not None}

    def new(name: str, needed: bool) -> Tensor:
        return torch.empty_like(getattr(i, name)) if needed and not elsewhere.get(name) else dout.new_empty(0)

    grads = LoopGrads(*(new(name, needed) for name, needed in needs._asdict().items()))
    # always there, so the op has an output even where every gradient goes elsewhere
    return grads._replace(routing_weights=i.routing_weights.new_empty(i.rank.shape))


# op
def save_expert_loop(ctx, inputs, output):
    i = ExpertInputs(*inputs)
    tensors, ctx.others = (
        i[:9],
        i[9:],
    )  # a main gradient is not saved: another backward pass may change it first
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)


def backward_expert_loop(ctx, dout, dz):
    nothing = ExpertInputs(*[None] * len(ExpertInputs._fields))
    if dout is None:
        return nothing
    z, *tensors = ctx.saved_tensors
    needed = dict(zip(ExpertInputs._fields, ctx.needs_input_grad, strict=True))
    needs = [needed[name] for name in LoopGrads._fields]
    grads = expert_loop_backward_op(dout, z, *tensors, *ctx.others, needs)
    onto_main = {"gate_up": ctx.others[-2] is not None, "down": ctx.others[-1] is not None}
    given = zip(LoopGrads._fields, grads, needs, strict=True)
    return nothing._replace(**{name: grad for name, grad, need in given if need and not onto_main.get(name)})


ARGUMENTS = (
    "Tensor x, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, Tensor routing_weights, "
    "Tensor order, Tensor rank, Tensor group_sizes, str activation, bool interleaved, bool save_z, "
)
expert_loop_op = define_op(
    f"expert_loop({ARGUMENTS} Tensor? gate_up_main_grad, Tensor? down_main_grad) -> (Tensor, Tensor)",
    new=new_expert_loop,
    reference=expert_loop_reference,
    torch=functools.partial(run_forward, TorchSteps),
    host=host(takes(*HOST_DTYPES)(functools.partial(run_forward, HostSteps))),
    save=save_expert_loop,
    backward=backward_expert_loop,
)
expert_loop_backward_op = define_op(
    f"expert_loop_backward(Tensor dout, Tensor z, {ARGUMENTS} Tensor(a!)? gate_up_main_grad, "
    "Tensor(b!)? down_main_grad, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    new=new_expert_loop_backward,
    torch=functools.partial(run_backward, TorchSteps),
    host=host(takes(*HOST_DTYPES)(functools.partial(run_backward, HostSteps))),
)
