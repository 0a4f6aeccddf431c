"""Experts without a product: the router may choose them, and they give the token itself or nothing."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..kernels.base.check import check_range, check_sizes
from .plan import RoutePlan


@dataclass(frozen=True)
class ZeroCompute:
    """Experts without weights, among which the router chooses beside the E experts of the layer.

        out[t] = sum over choices j of token t of s[t, j] * (expert[e](x[t])    e < E
                                                             x[t]               E <= e < E + identity
                                                             0                  E + identity <= e)

    Meituan 2025 (LongCat-Flash), arXiv 2509.01322, 2.1, has identity experts.  Jin et al. 2024 (MoE++), arXiv
    2410.07348, 3.1, calls them copy experts, and has zero experts too.  Their choices have no row, so no
    product runs for them.

    `real_share` is the share of all choices that balancing aims to give to the E experts, evenly: K_e / K of
    LongCat-Flash, which is 8 / 12 there.  None gives every expert, with or without weights, the same load.
    The losses and `balance_step` use it as LongCat-Flash does:
      losses          with f the experts' shares of the choices and Z = identity + zero, the factor of P_e is
                      f_e * E / real_share for e < E, and sum_z f_z / (1 - real_share) for the Z others: they
                      are one group, as in LongCat-Flash with a group for each expert
      selection bias  an expert's violation is real_share * sum(c) / E - c[e]; the bias of the Z others stays
    Raises ValueError without any expert, and for a `real_share` that is not from 0.0001 to 0.9999.
    """

    identity: int = 0
    zero: int = 0
    real_share: float | None = None

    def __post_init__(self) -> None:
        for name, count in (("identity", self.identity), ("zero", self.zero)):
            if count != 0:
                check_sizes(**{name: count})
        if not self.count:
            raise ValueError("identity and zero are both 0: there is nothing to choose")
        if self.real_share is not None:
            share = {"real_share": self.real_share}
            check_range(share, lambda n: 1e-4 <= n <= 1 - 1e-4, "from 0.0001 to 0.9999")

    @property
    def count(self) -> int:
        return self.identity + self.zero

    def share(self, num_experts: int) -> tuple[int, int]:
        """The share of the choices that `num_experts` experts should get: numerator and denominator."""
        if self.real_share is None:
            common = math.gcd(num_experts, self.count)
            return num_experts // common, (num_experts + self.count) // common
        share = Fraction(self.real_share).limit_denominator(10**4)
        return share.numerator, share.denominator

    def identity_weight(self, expert_ids: Tensor, routing_weights: Tensor, num_experts: int) -> Tensor:
        """The sum of a token's routing weights for identity experts: (T, 1)."""
        chosen = (expert_ids >= num_experts) & (expert_ids < num_experts + self.identity)
        return routing_weights.where(chosen, 0).sum(1, keepdim=True)


def real_experts(num_routed: int, zero_compute: ZeroCompute | None) -> int:
    """Return how many of the router's experts have weights.  Raises ValueError if none has."""
    num_experts = num_routed - (0 if zero_compute is None else zero_compute.count)
    if num_experts < 1:
        raise ValueError(f"there are {num_routed} experts in all, which leaves none beside {zero_compute}")
    return num_experts


def over_target(load: Tensor, zero_compute: ZeroCompute | None) -> Tensor:
    """Shares of the choices (..., E + Z) over those aimed at, in units of 1 / (E + Z)."""
    if zero_compute is None:
        return load
    if not isinstance(zero_compute, ZeroCompute):
        raise TypeError(f"zero_compute must be a ZeroCompute, not {type(zero_compute).__name__}")
    num_experts = real_experts(load.shape[-1], zero_compute)
    numerator, denominator = zero_compute.share(num_experts)
    share = numerator / denominator
    real, others = load.split([num_experts, zero_compute.count], -1)
    others = others.sum(-1, keepdim=True).expand_as(others)
    return torch.cat([real * (num_experts / share), others / (1 - share)], -1) / load.shape[-1]


def rows_of(plan: RoutePlan, num_experts: int) -> RoutePlan:
    """The part of `plan` for its first `num_experts` experts: other choices are dropped."""
    group_sizes = plan.group_sizes[:num_experts]
    rows = group_sizes.sum()
    past = torch.arange(plan.order.shape[0], device=plan.order.device) >= rows
    order, rank = plan.order.masked_fill(past, -1), plan.rank.masked_fill(plan.rank >= rows, -1)
    return RoutePlan(order, rank, group_sizes)
