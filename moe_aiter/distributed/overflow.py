"""Rows past the first window of shared experts, added to results that are there.

How many rows a rank has is known on the GPU alone, so the kernels of these windows always run.  With no rows
they do almost nothing: tokens without rows are neither read nor written.  Each window is rounded for itself.
Where products take the rows of one rank after the other, so do these: `passes` has one of each window.
Nothing of it is kept for backward, which computes z again.

`weights` are what `cast_weights` returns.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.base.lent import own_sizes
from ..kernels.base.sources import by_source
from ..kernels.experts.down import down_gradients
from ..kernels.experts.inputs import row_bytes
from ..kernels.experts.mlp import BothInputs, by_expert, new_inputs
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..kernels.experts.up import add_to_gate_up, expert_up_op, expert_z_op
from ..kernels.grouped.gmm import gmm_unpermute_add_op
from ..kernels.grouped.tgmm import weight_gradient
from ..kernels.rows.sums import group_sum
from ..op import pick
from ..routing.plan import RoutePlan

WHOLE = itertools.repeat(None)  # each window in one pass


def options_of(experts: object) -> ExpertOptions | None:
    """Return the options with which `expert_mlp` computes these experts from their weights, or None if they
    compute in another way."""
    find = getattr(experts, "kernel_options", None)
    return None if find is None else find()


def can_add(experts: object, x: Tensor) -> bool:
    """Whether these functions compute the experts: with 16 or 32 bits, and all experts at once, as on a GPU.

    In other cases autograd adds up the windows, which takes longer.
    """
    options = options_of(experts)
    return options is not None and options.fp8 is None and pick("expert_mlp", (x,)) is not by_expert


@torch.no_grad()
def add_output(
    out: Tensor, options: ExpertOptions, x: Tensor, s: Tensor, plans: Iterable[RoutePlan],
    weights: ExpertWeights, passes: Iterable[Any] = WHOLE,
) -> None:  # fmt: skip
    """Add the experts' output of these rows to `out` (T, H); of `passes`, one for each plan, some rows."""
    for i, some in zip(inputs_of(options, x, s, plans, weights), passes, strict=False):
        with by_source.set(some):
            _, a = expert_up_op(*i.up())
            gmm_unpermute_add_op(out, *i.as_gmm_unpermute(a))


@torch.no_grad()
def add_dx(
    dx: Tensor, dout: Tensor, options: ExpertOptions, x: Tensor, s: Tensor, plans: Iterable[RoutePlan],
    weights: ExpertWeights, passes: Iterable[Any],
) -> None:  # fmt: skip
    """Add some of these rows' part to the gradient of x."""
    for i, some in zip(inputs_of(options, x, s, plans, weights), passes, strict=False):
        with by_source.set(some):
            dz, *_ = gradients_of_z(i, dout, (False, False), None, None)
            add_rows_of_dx(dx, dz, i)


@torch.no_grad()
def add_gradients(
    gradients: Sequence[Tensor | None], dout: Tensor, options: ExpertOptions, x: Tensor, s: Tensor,
    plans: Iterable[RoutePlan], weights: ExpertWeights, dlent: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """Add these rows' part to the gradients of x, s and the weights; None for those that are not wanted.

    `dlent` are those of the guests' weights, of which products find the first two by `guest_gradients`.
    """
    dx, ds, dgate_up, ddown, dgate_up_bias, ddown_bias = gradients
    *_, dguest_bias, dguest_down_bias = dlent or (None, None)
    for i in inputs_of(options, x, s, plans, weights):
        needs = ddown is not None, ddown_bias is not None
        dz, _, more_bias, more_ds = gradients_of_z(i, dout, needs, i.down_bias, ddown)
        if ds is not None:
            ds += more_ds
        if ddown_bias is not None:
            add_to_both(ddown_bias, dguest_down_bias, more_bias)
        if dgate_up_bias is not None:
            add_to_both(dgate_up_bias, dguest_bias, group_sum(dz, i.group_sizes))
        if dx is not None:
            add_rows_of_dx(dx, dz, i)
        if dgate_up is not None:
            sizes = own_sizes(i.group_sizes, i.gate_up, i.guest_gate_up)
            weight_gradient(i.gate_up.mT, dgate_up.mT, i.x, dz, sizes, i.order, i.rank.shape[1])
            if i.guest_gate_up is not None:
                add_to_gate_up(i.x, dz, i.group_sizes, i.order, i.rank.shape[1])


def add_to_both(own: Tensor, guests: Tensor | None, more: Tensor) -> None:
    own += more[: len(own)]
    if guests is not None:
        guests += more[len(own) :]


def gradients_of_z(
    i: BothInputs, dout: Tensor, needs: tuple[bool, bool], down_bias: Tensor | None, ddown: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute z again; return dz and the gradients of down, its bias and the routing weights."""
    routing, act = (i.order, i.rank, i.group_sizes), (i.activation, i.interleaved)
    z = expert_z_op(i.x, i.gate_up, i.gate_up_bias, *routing, *act, i.guest_gate_up)
    saved = z, i.down, down_bias, i.routing_weights, *routing
    computed: tuple[Tensor, ...] = down_gradients(
        needs, True, dout, saved, *act, ddown, guests=i.guest_down
    )  # fmt: skip
    return computed


def add_rows_of_dx(dx: Tensor, dz: Tensor, i: BothInputs) -> None:
    of_dx = i.gate_up, i.group_sizes, None, i.order, i.rank, None, i.bytes_of_dx, i.guest_gate_up
    gmm_unpermute_add_op(dx, dz, *of_dx)


def targets(experts: object, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return what gradients of weights are added to: the main gradient of a trained weight that has one."""
    main = experts.main_grads() if hasattr(experts, "main_grads") else ()
    return [d if m is None else m for d, m in itertools.zip_longest(gradients, main)]


def cast_weights(dtype: torch.dtype, weights: Sequence[Any], lent: Sequence[Any]) -> ExpertWeights:
    """Return gate_up, down and their biases as one value, cast, with those of guests if there are any."""
    cast = [[t.to(dtype) for t in some[:2]] + [*some[2:]] for some in (weights, lent)]
    own = ExpertWeights(*cast[0])
    return own.with_guests(*cast[1]) if lent else own


def inputs_of(
    options: ExpertOptions, x: Tensor, s: Tensor, plans: Iterable[RoutePlan], weights: ExpertWeights
) -> Iterator[BothInputs]:
    """Yield the inputs of each window.  `x` has been cast; backward is not under forward's autocast."""
    for plan in plans:
        i = new_inputs(x, weights, s, plan, options)
        yield BothInputs(*i, *row_bytes(i, options.row_chunks), *(weights.guests or (None, None)))
