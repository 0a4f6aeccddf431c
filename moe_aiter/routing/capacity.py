"""Experts that take a limited number of choices; the rest are dropped."""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..kernels.base.check import check_axes, check_known, check_positive
from .plan import RoutePlan, make_plan
from .zero_compute import ZeroCompute, real_experts

POLICIES = ("position", "probability")


@dataclass(frozen=True)
class Capacity:
    """Limit each expert to ceil(factor * T * k / E) choices; a dropped choice gets the expert id -1.

    Lepikhin et al. 2020 (GShard), arXiv 2006.16668, and Fedus et al. 2021 (Switch), arXiv 2101.03961, eq. 3.

    drop="position"     an expert keeps its first choices, ordered by token t, then by slot j
    drop="probability"  an expert keeps its choices with the highest routing weights; ties go to the first

    A dropped choice adds nothing to its token, whose other weights stay as they are.  Losses and the
    selection bias count the choices before any is dropped.
    With `ZeroCompute`, T * k counts the share of the choices that is meant for the E experts; experts without
    weights take any number.
    Raises ValueError for a `factor` that is not above 0 and for another `drop`.
    """

    factor: float
    drop: str = "position"

    def __post_init__(self) -> None:
        check_positive(factor=self.factor)
        check_known("drop", self.drop, POLICIES)


def drop_over_capacity(
    expert_ids: Tensor, routing_weights: Tensor, plan: RoutePlan, capacity: Capacity,
    mask: Tensor | None = None, zero_compute: ZeroCompute | None = None,
) -> Tensor:  # fmt: skip
    """`expert_ids` (T, k) with -1 for each choice over its expert's capacity; `plan` is that of `expert_ids`.

    Tokens where `mask` (T,) bool is False do not count in T.  Deterministic, without a synchronisation.
    Raises ValueError for weights of another shape.
    """
    check_axes(expert_ids=(expert_ids, "T, k"), routing_weights=(routing_weights, "T, k"))
    num_routed = plan.group_sizes.shape[0]
    num_experts = real_experts(num_routed, zero_compute)
    choices = expert_ids.numel() if mask is None else mask.sum() * expert_ids.shape[1]
    # in whole numbers, which torch.export can write down, and which times the choices fit into 64 bits
    share = Fraction(capacity.factor).limit_denominator(10**6) / num_experts
    if zero_compute is not None:
        share *= Fraction(*zero_compute.share(num_experts))
    share = Fraction(min(share.numerator, share.denominator), share.denominator).limit_denominator(10**9)
    numerator, denominator = (share.numerator, share.denominator) if share.numerator else (1, 10**9)
    limit = -(-numerator * choices // denominator)
    rank = plan.rank
    if capacity.drop == "probability":
        best = routing_weights.detach().flatten().sort(descending=True, stable=True).indices
        ranked = make_plan(expert_ids.flatten()[best][:, None], num_routed).rank.flatten()
        rank = torch.empty_like(ranked).scatter(0, best, ranked).view_as(expert_ids)
    first = plan.group_sizes.cumsum(0) - plan.group_sizes  # (E,) the first row of each expert
    place = rank - first[expert_ids.clamp(0, num_routed - 1).long()]
    return expert_ids.masked_fill((place >= limit) & (expert_ids < num_experts), -1)
