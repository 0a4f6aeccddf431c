"""Which row belongs to which choice: the permutation behind every MoE step."""

from typing import NamedTuple

from torch import Tensor

from ..kernels.base.check import check_plan
from ..kernels.rows import permute as rows
from ..kernels.rows.sort import sort_by_expert


class RoutePlan(NamedTuple):
    """T tokens choose k of E experts, giving R = T*k rows sorted by expert.  All int32, on the device.

    A dropped choice has no row: its rank is -1, and as many rows at the end have the order -1.
    """

    order: Tensor  # (R,) row r holds choice order[r] = t*k + j
    rank: Tensor  # (T, k) choice (t, j) sits in row rank[t, j]
    group_sizes: Tensor  # (E,) rows of each expert; sums to R less the dropped choices


def make_plan(expert_ids: Tensor, num_experts: int) -> RoutePlan:
    """Sort the choices `expert_ids` (T, k), int32 or int64, by expert; stable, deterministic, without a sync.

    A negative id, usually -1, drops the choice.  The same expert twice for a token is legal and counts
    twice.  Raises as `sort_by_expert` does: for an id of `num_experts` or more on the CPU, and on a GPU with
    MOE_AITER_DEBUG=1; else that drops the choice too.
    """
    return RoutePlan(*sort_by_expert(expert_ids, num_experts))


def permute(x: Tensor, plan: RoutePlan, routing_weights: Tensor | None = None) -> Tensor:
    """(T, H) -> (R, H): copy each token to the rows of its experts, times `routing_weights` (T, k) if given.

    Rows past sum(group_sizes) are zeros.  Differentiable in `x` and `routing_weights`.
    """
    check_plan(plan)
    return rows.permute(x, *plan[:2], routing_weights)


def unpermute(x: Tensor, plan: RoutePlan, routing_weights: Tensor | None = None) -> Tensor:
    """(R, H) -> (T, H): the sum of each token's rows of `x`, times `routing_weights` (T, k) if given.

    In float32, in the order j = 0..k-1, rounded once; a dropped choice adds nothing.
    Differentiable in `x` and `routing_weights`.
    """
    check_plan(plan)
    return rows.unpermute(x, *plan[:2], routing_weights)
