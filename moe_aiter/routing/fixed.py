"""Route to fixed experts instead of the highest logits: recorded experts, or those of a hash table."""

import torch
from torch import Tensor

from ..kernels.base.check import (
    check_axes,
    check_device,
    check_finite,
    check_float,
    check_index,
    check_sizes,
    checked,
)
from .router import Routing
from .scores import Scored, check_score, scores_of


def route_to(
    logits: Tensor, expert_ids: Tensor, routing_weights: Tensor | None = None, *, score: str = "softmax",
    renormalize: bool | None = None, scale: float = 1.0,
) -> Routing:  # fmt: skip
    """Route each token to the experts `expert_ids` (T, k), from a recording or a hash; -1 drops a choice.

    The weights are those that `route` computes for these experts from `logits` (T, E), with the same
    gradient.  If you pass `routing_weights` (T, k), for example recorded in float32, they are used as they
    are, and no gradient goes through them to the logits.  Recorded ids repeat the choices of an earlier
    forward pass, for example that of an inference engine (Ma et al. 2025, arXiv 2510.11370); recorded weights
    repeat its weights too.

    Raises ValueError for sizes that disagree and for a score that `route` refuses, as `topk_softmax` for one
    column of ids without weights; TypeError for ids that are not int32 or int64, and for weights that are not
    floating.  An id of E or more has the weight 0 here; see `make_plan` for when such an id raises an error.
    """
    check_axes(logits=(logits, "T, E"), expert_ids=(expert_ids, "T, k"))
    check_index(expert_ids=expert_ids)
    check_sizes(k=expert_ids.shape[1])
    slots = expert_ids.shape[1]
    if routing_weights is not None:
        slots = max(slots, 2)  # weights that are given train no router anyway
    elif slots == 1 and score == "topk_softmax":
        raise ValueError(
            "expert_ids is (T, k=1), and score='topk_softmax' makes each routing weight 1 and the router's "
            "gradient 0: pass routing_weights too, or use score='softmax'"
        )
    renormalize = check_score(score, renormalize, slots)
    check_float(logits=logits)
    check_finite(scale=scale)
    if routing_weights is not None:
        check_axes(expert_ids=(expert_ids, "T, k"), routing_weights=(routing_weights, "T, k"))
        if not routing_weights.is_floating_point():
            raise TypeError(f"routing_weights must be floating, not {routing_weights.dtype}")
    check_device(logits=logits, expert_ids=expert_ids, routing_weights=routing_weights)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = scores_of(logits, score)
    expert_ids = expert_ids.long()
    if routing_weights is None:
        routing_weights = Scored(logits, scores, score, renormalize, scale).weigh(expert_ids)
    return Routing(expert_ids, routing_weights, scores, logits)


@checked
def hash_experts(
    num_tokens: int, num_experts: int, top_k: int, *, seed: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Draw `top_k` distinct random experts for each of `num_tokens` token ids: (num_tokens, top_k) int64.

    Roller et al. 2021, arXiv 2106.04426: `moe(x, expert_ids=table[token_ids])` routes by token id.  A `seed`
    gives the same table on every machine.
    Raises ValueError if `top_k` is more than `num_experts`.
    """
    check_sizes(num_tokens=num_tokens, num_experts=num_experts, top_k=top_k)
    if top_k > num_experts:
        raise ValueError(f"top_k is {top_k} but num_experts is {num_experts}")
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_tokens, num_experts, generator=generator)
    return draws.sort(dim=1, stable=True).indices[:, :top_k].contiguous().to(device)
