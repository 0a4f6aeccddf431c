"""Scores of any kind and the weights of any choice, in plain torch: what has no fused kernel."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.check import check_finite, check_known
from ..kernels.base.fixed_rows import each_number
from ..kernels.rows.route import needs_own_gradient, shares_backward, weigh

SCORES = ("softmax", "topk_softmax", "sigmoid", "sqrt_softplus")
FUSED = ("softmax", "topk_softmax", "sigmoid")
EXACT_FROM = 40.0  # softplus(z) is z from here on, in float64 too


def check_score(score: str, renormalize: bool | None, top_k: int, most: int | None = None) -> bool:
    """Return `renormalize`, or its default for None; raise where weights of 1 would train no router.

    `most` is the number of experts that a token can have, if not `top_k`.
    """
    single = (top_k if most is None else most) == 1
    case = "top_k=1" if top_k == 1 else "one expert a token"
    check_known("score", score, SCORES)
    if renormalize is not None and not isinstance(renormalize, bool):
        raise TypeError(f"renormalize must be a bool or None, not {type(renormalize).__name__}")
    if score == "topk_softmax":
        if renormalize is False:
            raise ValueError("renormalize=False, but the weights of score='topk_softmax' always sum to 1")
        if single:
            raise ValueError(
                f"score='topk_softmax' with {case} makes every routing weight 1, and the router's gradient "
                "0: use score='softmax'"
            )
        return True
    if renormalize and single:
        raise ValueError(
            f"renormalize=True with {case} makes every routing weight 1, and the router's gradient 0: use "
            "renormalize=False"
        )
    return top_k > 1 and not single if renormalize is None else renormalize


def scores_of(logits: Tensor, score: str) -> Tensor:
    """(T, E) -> (T, E), in the dtype of the logits."""
    if score == "sigmoid":
        return each_number(torch.sigmoid, logits)
    if score == "sqrt_softplus":
        return each_number(sqrt_softplus, logits)
    return logits.softmax(1)


def sqrt_softplus(logits: Tensor) -> Tensor:
    # the root of 0 has no finite slope, and softplus underflows to 0
    return F.softplus(logits, threshold=EXACT_FROM).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


class Scored(NamedTuple):
    """What the weights of a choice are computed from."""

    logits: Tensor  # (T, E)
    scores: Tensor  # (T, E)
    score: str
    renormalize: bool
    scale: float

    def weigh(self, expert_ids: Tensor) -> Tensor:
        """The weights of `expert_ids`, (T, k) each.

        An id outside [0, E) weighs 0.  A renormalised softmax is the softmax of the chosen logits, because
        their scores may all underflow to 0; a logit of -inf weighs 0 there.
        """
        check_finite(scale=self.scale)
        of_logits = self.renormalize and self.score in ("softmax", "topk_softmax")
        used = (expert_ids >= 0) & (expert_ids < self.logits.shape[1])
        ids = expert_ids.where(used, 0).long()
        chosen = self.scores.gather(1, ids)
        if not of_logits:
            return self.weigh_chosen(chosen.where(used, 0), True)
        # a NaN or +inf among a token's logits makes all its scores NaN; its weights must become NaN too.
        # "+ 0 * chosen" would do, but inductor replaces 0 * chosen with 0
        nan_or_one = torch.ones_like(chosen).masked_fill(chosen.isnan(), math.nan)
        chosen = self.logits.gather(1, ids) * nan_or_one
        used = used & (chosen != -math.inf)
        chosen = chosen.where(used, -math.inf).masked_fill(~used.any(1, keepdim=True), 0)
        return self.weigh_chosen(chosen, False).where(used, 0)

    def weigh_chosen(self, chosen: Tensor, of_scores: bool) -> Tensor:
        """The weights of chosen scores; where they are a softmax, of chosen logits."""
        if not self.renormalize:
            return weigh(chosen, True, False, self.scale)
        if not needs_own_gradient():
            return RenormalizedWeights.apply(chosen, of_scores, self.scale)
        # the sum is 1, but with a division by it torch's gradient of a softmax does not cancel
        return weigh(chosen if of_scores else chosen.softmax(1), True, True, self.scale)


class RenormalizedWeights(torch.autograd.Function):
    """`weigh` of renormalised weights, with the gradient that the op `route` has."""

    apply: ClassVar[Callable[[Tensor, bool, float], Tensor]]

    @staticmethod
    def forward(ctx: Any, chosen: Tensor, of_scores: bool, scale: float) -> Tensor:
        weights = weigh(chosen, of_scores, True, scale)
        ctx.save_for_backward(weights, chosen if of_scores else None)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor, None, None]:
        weights, chosen = ctx.saved_tensors
        return shares_backward(dweights, weights, ctx.scale, chosen), None, None
