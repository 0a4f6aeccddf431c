"""AITER's `aiter.ops.topk`: routing within groups of experts, over `route` and `GroupLimit`."""

import torch
from torch import Tensor

from ....kernels.base.check import (
    check_device,
    check_flags,
    check_float,
    check_index,
    check_shape,
    check_tensor,
    check_whole_shape,
    renamed,
)
from ....routing import GroupLimit, route
from ....routing.choices import Choice

__all__ = ["biased_grouped_topk", "grouped_topk"]

NAMES = {
    "logits": "gating_output", "top_k": "topk", "scale": "routed_scaling_factor",
    "selection_bias": "correction_bias", "num_groups": "num_expert_group", "choice": "num_expert_group",
    "top_groups": "topk_group",
}  # fmt: skip


@renamed(**NAMES)
def biased_grouped_topk(
    gating_output: Tensor, correction_bias: Tensor, topk_weights: Tensor, topk_ids: Tensor,
    num_expert_group: int, topk_group: int, need_renorm: bool, routed_scaling_factor: float = 1.0,
) -> None:  # fmt: skip
    """Route as DeepSeek-V3 does: write each token's experts and weights to `topk_ids` and `topk_weights`.

    With p = sigmoid(gating_output) and q = p + correction_bias, the k highest q are chosen among the experts
    of the `topk_group` groups, of `num_expert_group` equal ones, whose two highest q have the largest sum.
    The weights are p, with `need_renorm` over their sum, times `routed_scaling_factor`.  One group means no
    groups.

    gating_output: (T, E), any floating dtype and strides.  correction_bias: (E,), any floating dtype.
    topk_weights: (T, k), floating, and topk_ids: (T, k), int32 or int64, of any strides: the best first; the
        lower expert first among equals.

    Without gradient.  Groups have two experts or more.  Raises ValueError for shapes, devices and numbers
    that do not fit, TypeError for dtypes; nothing is written then.
    """
    check_tensor("correction_bias", correction_bias)
    choice = within_groups(num_expert_group, topk_group, "top2")
    given = gating_output, topk_weights, topk_ids
    choose(*given, need_renorm, "sigmoid", routed_scaling_factor, choice, correction_bias)


@renamed(**NAMES)
def grouped_topk(
    gating_output: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_expert_group: int, topk_group: int,
    need_renorm: bool, is_softmax: bool = True, routed_scaling_factor: float = 1.0,
) -> None:  # fmt: skip
    """Route as DeepSeek-V2 does: as `biased_grouped_topk`, but by p alone, and by the highest p of a group.

    p is softmax(gating_output) over all experts, or its sigmoid with `is_softmax=False`.
    """
    check_flags(is_softmax=is_softmax)
    choice = within_groups(num_expert_group, topk_group, "max")
    score = "softmax" if is_softmax else "sigmoid"
    choose(gating_output, topk_weights, topk_ids, need_renorm, score, routed_scaling_factor, choice)


def within_groups(num_groups: int, top_groups: int, score: str) -> Choice | None:
    choice = GroupLimit(num_groups, top_groups, score)
    return None if num_groups == 1 else choice


@torch.no_grad()
def choose(
    gating_output: Tensor, topk_weights: Tensor, topk_ids: Tensor, need_renorm: bool, score: str,
    scale: float = 1.0, choice: Choice | None = None, selection_bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Write what `route` chooses, and its weights, which for one expert and `need_renorm` are `scale`."""
    check_flags(need_renorm=need_renorm)
    check_shape("gating_output", gating_output, "T", "E")
    check_shape("topk_ids", topk_ids, "T", "k")
    top_k = topk_ids.shape[1]
    for name, x in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        check_whole_shape(name, x, (gating_output.shape[0], top_k))
    check_device(gating_output=gating_output, topk_weights=topk_weights, topk_ids=topk_ids)
    check_float(topk_weights=topk_weights)
    check_index(topk_ids=topk_ids)
    routing = route(
        gating_output, top_k, score=score, renormalize=need_renorm and top_k > 1, scale=scale,
        need_scores=False, choice=choice, selection_bias=selection_bias,
    )  # fmt: skip
    topk_ids.copy_(routing.expert_ids)
    if need_renorm and top_k == 1:
        topk_weights.fill_(scale)
    else:
        topk_weights.copy_(routing.routing_weights)
