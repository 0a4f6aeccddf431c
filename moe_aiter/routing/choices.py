"""Ways to choose experts other than each token's k highest scores: values for `choice` of `route`.

Each has `check`, which raises ValueError for sizes that do not fit, and `pick`, which gets what experts are
ranked by, (T, E) and without gradient, and returns the experts: (T, slots) int64, -1 for a slot without one.
All on the device, without a synchronisation; ties go to the lower expert.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels._check import check_sizes
from ..kernels.topk import topk


@dataclass(frozen=True)
class GroupLimit:
    """Top-k among the experts of a token's best `top_groups` of `num_groups` equal groups.

    DeepSeek-V2 (arXiv 2405.04434, 2.2.2) and DeepSeek-V3 (arXiv 2412.19437, 2.1.2).  With q the scores,

        best[g] = max of q over group g               score="max", DeepSeek-V2
        best[g] = sum of the 2 highest q of group g   score="top2", DeepSeek-V3
        chosen  = top-k of q[e] where e's group is among the top_groups highest of best, else `masked`

    `masked` is -inf, or 0 as in DeepSeek's first code, which differs where a selection bias makes q negative:
    then an expert outside the groups may be chosen.
    """

    num_groups: int
    top_groups: int
    score: str = "top2"
    masked: float = -math.inf

    def __post_init__(self):
        check_sizes(num_groups=self.num_groups, top_groups=self.top_groups)
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups is {self.top_groups} but num_groups is {self.num_groups}")
        if self.score not in ("max", "top2"):
            raise ValueError(f"unknown score {self.score!r} of a group; known: max, top2")
        if self.masked not in (0, -math.inf):
            raise ValueError(f"masked must be 0 or -inf, not {self.masked}")

    def check(self, top_k: int, num_experts: int) -> None:
        if num_experts % self.num_groups:
            raise ValueError(
                f"num_experts is {num_experts}, which {self.num_groups} groups cannot share evenly"
            )
        size = num_experts // self.num_groups
        if self.score == "top2" and size < 2:
            raise ValueError("score='top2' needs groups of at least 2 experts, but they have 1")
        if self.top_groups * size < top_k:
            raise ValueError(
                f"top_k is {top_k} but {self.top_groups} groups have {self.top_groups * size} experts"
            )

    def pick(self, ranked: Tensor, top_k: int) -> Tensor:
        num_tokens, num_experts = ranked.shape
        size = num_experts // self.num_groups
        groups = ranked.view(num_tokens, self.num_groups, size)
        best = groups.amax(2) if self.score == "max" else groups.topk(2, 2).values.sum(2)  # (T, groups)
        ids = topk(best, self.top_groups)[1]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, ids, True)
        return topk(groups.masked_fill(~kept[:, :, None], self.masked).view_as(ranked), top_k)[1]


@dataclass(frozen=True)
class Forced:
    """An even load whatever the logits are: for measurements, not for training.

    how="round_robin"  choice j of token t is expert (t * k + j) mod E: as even as can be
    how="random"       k distinct experts for each token, drawn anew each time

    The weights are those of the router.
    """

    how: str = "round_robin"

    def __post_init__(self):
        if self.how not in ("round_robin", "random"):
            raise ValueError(f"unknown how {self.how!r}; known: round_robin, random")

    def check(self, top_k: int, num_experts: int) -> None:
        pass

    def pick(self, ranked: Tensor, top_k: int) -> Tensor:
        if self.how == "random":
            return topk(torch.rand_like(ranked), top_k)[1]
        num_tokens, num_experts = ranked.shape
        choices = torch.arange(num_tokens * top_k, device=ranked.device)
        return (choices % num_experts).view(num_tokens, top_k)


CHOICES = (GroupLimit, Forced)
Choice = GroupLimit | Forced
