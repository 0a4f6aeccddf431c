"""Experts step by step: each weight's product beside those of its adapter, and an activation between them.

The weights may have 4 bits, and the factors of the adapters may come from anywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import settings
from ..kernels.experts.adapted import adapted_down, adapted_low, adapted_up
from ..kernels.grouped.gmm import gmm
from ..kernels.grouped.segment_gmm import segment_gmm
from ..kernels.quantize.four_bit import FourBit
from ..op import is_plain
from ..routing.plan import RoutePlan, make_plan, unpermute

NO_PARTS = (None, None, None, None, "")  # of a weight that has not 4 bits


class Several(NamedTuple):
    """The rows of each expert's adapters, one adapter behind the other: S segments of rows."""

    lens: Tensor  # (S,) rows of each
    numbers: Tensor  # (S,) its pair of factors; -1: rows without an adapter
    scale: Tensor | None  # (S, r), float32: what each rank is multiplied by; None: 1


class LowRank(NamedTuple):
    """The factors of each expert's adapter.  a and b have the dtype of the weight."""

    a: Tensor  # (E, r, in), the scaling in it; with `several` (W, r, in) without
    b: Tensor  # (E, out, r), or (W, out, r)
    growth: Tensor | None = None  # (E, out), float32: what DoRA multiplies each row by, less 1
    dropout: float = 0.0  # of the input of A; 0 outside training
    several: Several | None = None  # adapters for each expert; then without DoRA


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
    w, parts = split_weight(up.weight)
    if adapter is None:
        return adapted_up(x, w, up.bias, None, None, *plan, *parts)
    dropped, several = F.dropout(x, adapter.dropout), adapter.several
    if several is not None:
        low = adapted_low(dropped, adapter.a, *plan[:2], *several[:2])  # (R, r)
        low = scaled(low, several)
        return adapted_up(x, w, up.bias, low, adapter.b, *plan, *parts, *several[:2])
    low = adapted_up(dropped, adapter.a, None, None, None, *plan)  # (R, r)
    if adapter.growth is None:
        return adapted_up(x, w, up.bias, low, adapter.b, *plan, *parts)
    z = adapted_up(x, w, None, low, adapter.b, *plan, *parts)
    return grown(z, adapter.growth, up.bias, plan.group_sizes)


def weighted_sum(
    a: Tensor, down: Projection, routing_weights: Tensor, plan: RoutePlan,
    norm: Callable[[Tensor], Tensor] | None,
) -> Tensor:  # fmt: skip
    """(R, I) -> (T, H)."""
    adapter, lens = down.adapter, plan.group_sizes
    low = b = growth = None
    segments: tuple[Tensor | None, Tensor | None] = None, None
    if adapter is not None:
        b, growth, dropped = adapter.b, adapter.growth, F.dropout(a, adapter.dropout)
        if adapter.several is None:
            low = segment_gmm(dropped, adapter.a.mT, lens)  # (R, r)
        else:
            segments = adapter.several[:2]
            low = segment_gmm(dropped, adapter.a.mT, segments[0], weight_indices=segments[1])
            low = scaled(low, adapter.several)
    w, parts = split_weight(down.weight)
    if norm is None and growth is None:
        return adapted_down(a, w, down.bias, low, b, routing_weights, *plan, *parts, *segments)
    bias = down.bias if growth is None else None
    if isinstance(down.weight, FourBit):
        rows = torch.arange(len(a), dtype=plan.order.dtype, device=a.device)  # each where it is
        y = adapted_up(a, w, bias, low, b, rows, rows[:, None], lens, *parts, *segments)  # (R, H)
    else:
        y = gmm(a, w.mT, lens, bias=bias, trans_rhs=False)  # (R, H)
        if low is not None and b is not None:
            lens_of_b = lens if segments[0] is None else segments[0]
            y = y + segment_gmm(low, b.mT, lens_of_b, weight_indices=segments[1])
    if growth is not None:
        y = grown(y, growth, down.bias, lens)
    return unpermute(y if norm is None else norm(y), plan, routing_weights)


def split_weight(weight: Tensor | FourBit) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the second and the later arguments of `adapted_up` and `adapted_down` for a weight."""
    return (weight.packed, weight.parts) if isinstance(weight, FourBit) else (weight, NO_PARTS)


def scaled(low: Tensor, several: Several) -> Tensor:
    """Return `low` (R, r) times the scale of its rows."""
    if several.scale is None:
        return low
    return (low * spread(several.scale, several.lens, low)).to(low.dtype)


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


# several adapters for each expert


def by_adapter(plan: RoutePlan, adapter_ids: Tensor, adapters: int) -> RoutePlan:
    """Return the plan with the rows of each expert sorted by adapter; those without one come last.

    Its group_sizes are (E * (adapters + 1),).  Ids are (T,); nothing waits for the device.
    """
    if settings.debug and not torch.compiler.is_compiling() and is_plain((adapter_ids,)):
        most = max(adapter_ids.tolist(), default=-1)
        if most >= adapters:
            raise ValueError(f"adapter_ids holds {most} but there are {adapters} adapters")
    experts = plan.group_sizes.shape[0]
    ends = plan.group_sizes.cumsum(0, dtype=plan.rank.dtype)
    expert = torch.searchsorted(ends, plan.rank, right=True)  # (T, k); of a dropped choice any
    ids = adapter_ids.where((adapter_ids >= 0) & (adapter_ids < adapters), adapters).long()
    groups = expert * (adapters + 1) + ids[:, None]
    return make_plan(groups.where((plan.rank >= 0) & (expert < experts), -1), experts * (adapters + 1))


def split_plan(plan: RoutePlan, experts: int) -> tuple[RoutePlan, tuple[Tensor, Tensor] | None]:
    """Return the plan of `by_adapter` with rows by expert alone, and the segments of its rows.

    The segments are their lengths and their pairs of factors, -1 for none.  Another plan has none.
    """
    lens = plan.group_sizes
    if lens.shape[0] == experts:
        return plan, None
    groups = lens.shape[0] // experts
    pairs = torch.arange(experts * (groups - 1), dtype=lens.dtype, device=lens.device).view(experts, -1)
    numbers = F.pad(pairs, (0, 1), value=-1).flatten()
    sizes = lens.view(experts, groups).sum(1, dtype=lens.dtype)
    return plan._replace(group_sizes=sizes), (lens, numbers)


def low_rank(factors: Sequence[Any], dropout: float, segments: tuple[Tensor, Tensor] | None) -> LowRank:
    """Return the adapters of `LoRAFactors.local_factors`: `third` is their growth, or scale if several."""
    a, b, third = factors
    if segments is None:
        return LowRank(a, b, third, dropout)
    if third is not None:  # (E * adapters, r), and zeros for rows without an adapter
        experts = segments[0].shape[0] - third.shape[0]
        third = F.pad(third.unflatten(0, (experts, -1)), (0, 0, 0, 1)).flatten(0, 1)
    return LowRank(a, b, None, dropout, Several(*segments, third))
