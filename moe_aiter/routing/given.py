"""Experts that no logit chose: recorded ones, those of a hash, and for measurements an even spread."""

import torch
from torch import Tensor

from ..kernels.base.check import (
    check_axes,
    check_device,
    check_finite,
    check_float,
    check_index,
    check_sizes,
    check_tensor,
    checked,
)
from .router import Routing
from .scores import check_score, scores_of, weigh


def route_to(
    logits: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor | None = None,
    *,
    score: str = "softmax",
    renormalize: bool | None = None,
    scale: float = 1.0,
) -> Routing:
    """Route to the experts `expert_ids` (T, k) that are given, by a replay or a hash; -1 drops a choice.

    Weights are those that `route` would give these experts for `logits` (T, E), with that gradient; or
    `routing_weights` (T, k), recorded in float32 say, which are taken as they are: then no gradient goes to
    the logits through them.  Replayed ids make a forward pass choose as an earlier one did, that of an
    inference engine say (Ma et al. 2025, arXiv 2510.11370); replayed weights make it weigh alike too.

    Raises ValueError for sizes that disagree and a score that `route` refuses, TypeError for ids that are not
    int32 or int64 and weights that are not floating.  An id of E or more weighs 0 here; `make_plan`, which
    the layer calls next, says when it raises.
    """
    check_axes(logits=(logits, "T, E"), expert_ids=(expert_ids, "T, k"))
    check_index(expert_ids=expert_ids)
    check_sizes(k=expert_ids.shape[1])
    renormalize = check_score(score, renormalize, expert_ids.shape[1])
    check_float(logits=logits)
    check_finite(scale=scale)
    if routing_weights is not None:
        check_tensor("routing_weights", routing_weights)
    check_device(logits=logits, expert_ids=expert_ids, routing_weights=routing_weights)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = scores_of(logits, score)
    expert_ids = expert_ids.long()
    if routing_weights is None:
        routing_weights = weigh(scores, expert_ids, renormalize, scale)
    elif routing_weights.shape != expert_ids.shape:
        shapes = tuple(routing_weights.shape), tuple(expert_ids.shape)
        raise ValueError("routing_weights is {} but expert_ids is {}".format(*shapes))
    elif not routing_weights.is_floating_point():
        raise TypeError(f"routing_weights must be floating, not {routing_weights.dtype}")
    return Routing(expert_ids, routing_weights, scores, logits)


@checked
def hash_experts(
    num_tokens: int, num_experts: int, top_k: int, *, seed: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """`top_k` distinct experts for each of `num_tokens` token ids, at random: (num_tokens, top_k) int64.

    Roller et al. 2021, arXiv 2106.04426: `moe(x, expert_ids=table[token_ids])` routes by token.
    The same on every machine for one `seed`.
    """
    check_sizes(num_tokens=num_tokens, num_experts=num_experts, top_k=top_k)
    if top_k > num_experts:
        raise ValueError(f"top_k is {top_k} but num_experts is {num_experts}")
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_tokens, num_experts, generator=generator)
    return draws.sort(dim=1, stable=True).indices[:, :top_k].contiguous().to(device)
