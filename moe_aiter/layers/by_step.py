"""Experts step by step: each weight's product beside those of its adapter, and an activation between them.

The weights may have 4 bits, and the factors of the adapters may come from anywhere.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.experts.adapted import adapted_down, adapted_up
from ..kernels.grouped.gmm import gmm
from ..kernels.grouped.segment_gmm import segment_gmm
from ..kernels.quantize.four_bit import FourBit
from ..routing.plan import RoutePlan, unpermute


class LowRank(NamedTuple):
    """The factors of each expert's adapter.  a and b have the dtype of the weight."""

    a: Tensor  # (E, r, in), the scaling in it
    b: Tensor  # (E, out, r)
    growth: Tensor | None = None  # (E, out), float32: what DoRA multiplies each row by, less 1
    dropout: float = 0.0  # of the input of A; 0 outside training


class Projection(NamedTuple):
    """A weight of each expert and what goes with it."""

    weight: Tensor | FourBit  # (E, out, in)
    bias: Tensor | None  # (E, out)
    adapter: LowRank | None = None


def experts_by_step(
    x: Tensor, up: Projection, act: Callable[[Tensor], Tensor], down: Projection, routing_weights: Tensor,
    plan: RoutePlan, *, norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """(T, H) -> (T, H): both projections, `act` from (R, width) to (R, I) between them, `norm` of each
    expert's output (R, H) behind them.

    No product of two factors is made.  Kept for the backward pass are x, what `act` keeps and its result.  A
    dropout draws once for each token before the first projection, whose experts then see the same, and
    once for each row before the second.
    """
    a = act(up_rows(x, up, plan)).to(x.dtype)  # (R, I)
    return weighted_sum(a, down, routing_weights, plan, norm)


def up_rows(x: Tensor, up: Projection, plan: RoutePlan) -> Tensor:
    """(T, H) -> (R, width)."""
    adapter = up.adapter
    w, four_bit = split_weight(up.weight)
    if adapter is None:
        return adapted_up(x, w, up.bias, None, None, *plan, *four_bit)
    low = adapted_up(F.dropout(x, adapter.dropout), adapter.a, None, None, None, *plan)  # (R, r)
    if adapter.growth is None:
        return adapted_up(x, w, up.bias, low, adapter.b, *plan, *four_bit)
    z = adapted_up(x, w, None, low, adapter.b, *plan, *four_bit)
    return grown(z, adapter.growth, up.bias, plan.group_sizes)


def weighted_sum(
    a: Tensor, down: Projection, routing_weights: Tensor, plan: RoutePlan,
    norm: Callable[[Tensor], Tensor] | None,
) -> Tensor:  # fmt: skip
    """(R, I) -> (T, H)."""
    adapter, lens = down.adapter, plan.group_sizes
    low = b = growth = None
    if adapter is not None:
        low = segment_gmm(F.dropout(a, adapter.dropout), adapter.a.mT, lens)  # (R, r)
        b, growth = adapter.b, adapter.growth
    w, four_bit = split_weight(down.weight)
    if norm is None and growth is None:
        return adapted_down(a, w, down.bias, low, b, routing_weights, *plan, *four_bit)
    bias = down.bias if growth is None else None
    if four_bit:
        rows = torch.arange(len(a), dtype=plan.order.dtype, device=a.device)  # each where it is
        y = adapted_up(a, w, bias, low, b, rows, rows[:, None], lens, *four_bit)  # (R, H)
    else:
        y = gmm(a, w.mT, lens, bias=bias, trans_rhs=False)  # (R, H)
        y = y if low is None or b is None else y + segment_gmm(low, b.mT, lens)
    if growth is not None:
        y = grown(y, growth, down.bias, lens)
    return unpermute(y if norm is None else norm(y), plan, routing_weights)


def split_weight(weight: Tensor | FourBit) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the second and the last arguments of `adapted_up` and `adapted_down` for a weight."""
    return (weight.packed, weight.parts) if isinstance(weight, FourBit) else (weight, ())


def grown(y: Tensor, growth: Tensor, bias: Tensor | None, lens: Tensor) -> Tensor:
    """DoRA's part, which a bias has none in, rounded once."""
    out = y * (1 + spread(growth, lens, y))
    return (out if bias is None else out + spread(bias, lens, y)).to(y.dtype)


def spread(values: Tensor, lens: Tensor, x: Tensor) -> Tensor:
    """The row of `values` (G, N) of each row's group, for `x` (R, K); zeros past the groups.

    As the bias of a product of nothing, whose gradient is a sum in a fixed order.
    """
    nothing = x[:, :0], x.new_empty(len(values), 0, values.shape[1])
    return gmm(*nothing, lens, bias=values, preferred_element_type=values.dtype)
