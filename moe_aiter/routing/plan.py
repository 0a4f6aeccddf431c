"""Which row belongs to which choice: the permutation behind every MoE step."""

from typing import NamedTuple

from torch import Tensor

from ..kernels.base.check import check_plan
from ..kernels.rows import permute as rows
from ..kernels.rows.sort import sort_by_expert


class RoutePlan(NamedTuple):
    """The rows of T tokens with k experts each: R = T * k rows, sorted by expert.

    All tensors are int32, on the device.  A dropped choice has no row: its rank is -1, and as many entries at
    the end of `order` are -1.
    """

    order: Tensor  # (R,) row r holds choice order[r] = t*k + j
    rank: Tensor  # (T, k) choice (t, j) sits in row rank[t, j]
    group_sizes: Tensor  # (E,) rows of each expert; sums to R less the dropped choices


def make_plan(expert_ids: Tensor, num_experts: int) -> RoutePlan:
    """Sort the choices `expert_ids` (T, k), int32 or int64, by expert; returns a `RoutePlan`.

    Stable, deterministic, without synchronisation.  A negative id, usually -1, drops the choice.  If a token
    has the same expert twice, both choices count.  An id of `num_experts` or more raises ValueError on the
    CPU, and on a GPU with MOE_AITER_DEBUG=1; otherwise it drops the choice too.  Other errors: see
    `sort_by_expert`.
    """
    return RoutePlan(*sort_by_expert(expert_ids, num_experts))


def permute(x: Tensor, plan: RoutePlan, routing_weights: Tensor | None = None) -> Tensor:
    """Copy each token to the rows of its experts, (T, H) -> (R, H), times `routing_weights` (T, k) if given.

    Rows past sum(group_sizes) are zeros.  Differentiable in `x` and `routing_weights`.
    Raises ValueError for sizes that disagree.
    """
    check_plan(plan)
    return rows.permute(x, *plan[:2], routing_weights)


def unpermute(x: Tensor, plan: RoutePlan, routing_weights: Tensor | None = None) -> Tensor:
    """Sum each token's rows of `x`, (R, H) -> (T, H), times `routing_weights` (T, k) if given.

    Sums are float32, over j = 0..k-1 in this order, and rounded once; a dropped choice adds nothing.
    Differentiable in `x` and `routing_weights`.
    Raises ValueError for sizes that disagree.
    """
    check_plan(plan)
    return rows.unpermute(x, *plan[:2], routing_weights)
