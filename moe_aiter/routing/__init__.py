"""Which token goes to which experts, with what weight and in which row; how evenly, and the losses for it."""

from .capacity import Capacity
from .choices import ExpertChoice, Forced, GroupLimit, Sinkhorn, TokenRounding, TopP
from .fixed import hash_experts, route_to
from .losses import (
    LoadStatistics,
    attach_loss,
    load_balance_loss,
    load_statistics,
    sequence_balance_loss,
    z_loss,
)
from .plan import RoutePlan, make_plan, permute, unpermute
from .router import Router, Routing, route
from .zero_compute import ZeroCompute

__all__ = [
    "Capacity", "ExpertChoice", "Forced", "GroupLimit", "LoadStatistics", "RoutePlan", "Router", "Routing",
    "Sinkhorn", "TokenRounding", "TopP", "ZeroCompute", "attach_loss", "hash_experts", "load_balance_loss",
    "load_statistics", "make_plan", "permute", "route", "route_to", "sequence_balance_loss", "unpermute",
    "z_loss",
]  # fmt: skip
