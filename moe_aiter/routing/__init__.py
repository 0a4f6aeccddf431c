"""Which token goes to which experts, with what weight and in which row; how evenly, and the losses for it."""

from .choices import GroupLimit
from .losses import attach_loss, load_balance_loss, sequence_balance_loss, z_loss
from .plan import RoutePlan, make_plan, permute, unpermute
from .router import Router, Routing, route
from .stats import LoadStatistics, load_statistics

__all__ = [
    "GroupLimit",
    "LoadStatistics",
    "RoutePlan",
    "Router",
    "Routing",
    "attach_loss",
    "load_balance_loss",
    "load_statistics",
    "make_plan",
    "permute",
    "route",
    "sequence_balance_loss",
    "unpermute",
    "z_loss",
]
