"""Ways to choose experts other than each token's k highest scores: values for `choice` of `route`.

All on the device, without a synchronisation; ties go to the lower expert, and to the lower token.  A token
with fewer experts than there are slots has the id -1 in the rest, which the kernels skip.
"""

import functools
import math
import warnings
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..invariance import refuse_batch
from ..kernels.base.check import check_known, check_range, check_sizes
from ..kernels.rows.route import decide
from ..kernels.rows.topk import topk
from .scores import Scored


class Choice:
    """The base of all ways to choose experts and to weigh them."""

    by_logits = False  # ranked by logits, not by scores
    takes_bias = True  # whether a selection bias changes anything
    takes_capacity = True
    by_token = True  # a token's experts depend on its own scores alone

    def check(self, top_k: int, num_experts: int) -> None:
        """Raise ValueError for sizes that do not fit."""

    def check_by_token(self) -> None:
        """Raise ValueError if batch invariance is on and this choice looks at other tokens, or at chance."""
        if not self.by_token:
            refuse_batch(f"{self} does not choose the experts of a token by its own scores alone")

    def most_experts(self, top_k: int, num_experts: int) -> int:
        """Return how many weights of a token are divided by their sum at most."""
        return top_k

    def pick(self, ranked: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
        """The experts (T, slots) int64, -1 for none, by what they are ranked by: (T, E), without gradient.

        Where `mask` (T,) is False no other token is to depend on this one, whose own experts do not matter.
        """
        raise NotImplementedError

    def choose(
        self, scored: Scored, ranked: Tensor, top_k: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The experts (T, slots), and their weights."""
        expert_ids = decide("experts", lambda: self.pick(ranked, top_k, mask), *ranked.shape)
        return expert_ids, scored.weigh(expert_ids)


@dataclass(frozen=True)
class GroupLimit(Choice):
    """Choose the top k among the experts of a token's best `top_groups` of `num_groups` equal groups.

    DeepSeek-V2 (arXiv 2405.04434, 2.2.2) and DeepSeek-V3 (arXiv 2412.19437, 2.1.2).  With q the scores,

        best[g] = max of q over group g               score="max", DeepSeek-V2
        best[g] = sum of the 2 highest q of group g   score="top2", DeepSeek-V3
        chosen  = top-k of q[e] where e's group is among the top_groups highest of best, else `masked`

    `masked` is -inf, or 0 as in DeepSeek's first code.  The two differ if a selection bias makes q negative:
    with 0, an expert outside of the best groups may then be chosen.
    """

    num_groups: int
    top_groups: int
    score: str = "top2"
    masked: float = -math.inf

    def __post_init__(self) -> None:
        check_sizes(num_groups=self.num_groups, top_groups=self.top_groups)
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups is {self.top_groups} but num_groups is {self.num_groups}")
        if self.score not in ("max", "top2"):
            raise ValueError(f"unknown score {self.score!r} of a group; known: max, top2")
        check_range({"masked": self.masked}, lambda n: n in (0, -math.inf), "0 or -inf")

    def check(self, top_k: int, num_experts: int) -> None:
        if num_experts % self.num_groups:
            raise ValueError(
                f"num_experts is {num_experts}, which {self.num_groups} groups cannot share evenly (choice)"
            )
        size = num_experts // self.num_groups
        if self.score == "top2" and size < 2:
            raise ValueError("score='top2' needs groups of at least 2 experts, but they have 1")
        if self.top_groups * size < top_k:
            raise ValueError(
                f"top_k is {top_k} but {self.top_groups} groups have {self.top_groups * size} experts"
            )

    def pick(self, ranked: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
        num_tokens, num_experts = ranked.shape
        size = num_experts // self.num_groups
        groups = ranked.view(num_tokens, self.num_groups, size)
        best = groups.amax(2) if self.score == "max" else groups.topk(2, 2).values.sum(2)  # (T, groups)
        ids = topk(best, self.top_groups)[1]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, ids, True)
        return topk(groups.masked_fill(~kept[:, :, None], self.masked).view_as(ranked), top_k)[1]


@dataclass(frozen=True)
class Forced(Choice):
    """Force an even load, whatever the logits are: for measurements, not for training.

    how="round_robin"  choice j of token t is expert (t * k + j) mod E: as even as possible
    how="random"       k distinct random experts for each token, drawn anew in each call

    The routing weights are still computed from the logits.
    """

    how: str = "round_robin"
    takes_bias = False
    by_token = False

    def __post_init__(self) -> None:
        check_known("how", self.how, ("round_robin", "random"))

    def pick(self, ranked: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
        if self.how == "random":
            return topk(torch.rand_like(ranked), top_k)[1]
        num_tokens, num_experts = ranked.shape
        choices = torch.arange(num_tokens * top_k, device=ranked.device)
        return (choices % num_experts).view(num_tokens, top_k)


@dataclass(frozen=True)
class TopP(Choice):
    """Choose as many experts as reach a share `p` of a token's scores, at least 1 and at most `top_k`.

    Huang et al. 2024, arXiv 2403.07652: in the order of rank, an expert is chosen if the scores of the
    experts before it sum to less than p * sum_e score[e].
    """

    p: float

    def __post_init__(self) -> None:
        check_range({"p": self.p}, lambda p: 0 < p <= 1, "above 0 and at most 1")

    def choose(
        self, scored: Scored, ranked: Tensor, top_k: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = scored.scores.detach()
        expert_ids = decide("experts", lambda: self.fewest(scores, ranked, top_k), *ranked.shape)
        return expert_ids, scored.weigh(expert_ids)

    def fewest(self, scores: Tensor, ranked: Tensor, top_k: int) -> Tensor:
        expert_ids = topk(ranked, top_k)[1]
        *columns, _ = scores.gather(1, expert_ids).unbind(1)
        # torch calls its cumsum of floats on a GPU nondeterministic, and refuses it
        before = torch.stack([*accumulate(columns, initial=scores.new_zeros(scores.shape[0]))], 1)
        enough = before >= self.p * scores.sum(1, keepdim=True)
        enough = enough & (torch.arange(top_k, device=scores.device) > 0)
        return expert_ids.masked_fill(enough, -1)


@dataclass(frozen=True)
class Sinkhorn(Choice):
    """Choose the top k of balanced logits, which spread the tokens evenly over the experts.

    Clark et al. 2022 (S-BASE), arXiv 2202.01169; for k > 1 as in Megatron.  From v = 0, repeat `iterations`
    times

        u[t] = -log sum_e exp(z[t, e] + v[e])
        v[e] = log(T / E) - log sum_t exp(z[t, e] + u[t])

    Then each token's exp(z + u + v) sum to about 1, and each expert's to T / E.  The experts are the top k of
    z + v; their weights are the router's own scores.  Not causal: a token's experts depend on other tokens,
    later ones included.
    """

    iterations: int = 8
    by_logits = True
    takes_bias = False
    by_token = False

    def __post_init__(self) -> None:
        check_sizes(iterations=self.iterations)

    def pick(self, ranked: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
        num_experts = ranked.shape[1]
        v = ranked.new_zeros(num_experts)
        for _ in range(self.iterations):
            balanced = ranked - (ranked + v).logsumexp(1, keepdim=True)  # z + u
            if mask is not None:
                balanced = balanced.masked_fill(~mask[:, None], -math.inf)
            # log(T / E) is the same for all, and changes no order
            v = -balanced.logsumexp(0)
            v = v.nan_to_num(posinf=0.0)  # without tokens
        return topk(ranked + v, top_k)[1]


@dataclass(frozen=True)
class ExpertChoice(Choice):
    """Let each expert choose its C = ceil(T * top_k / E) highest-scoring tokens; a token gets 0 to E experts.

    Zhou et al. 2022, arXiv 2202.09368, whose weights are softmax scores without renormalisation
    (renormalize=False).  `top_k` is the mean number of experts of a token.  Not causal: a token's experts
    depend on other tokens, later ones included.

    `max_per_token` limits a token to its best experts, and the memory of the layer to that many rows for each
    token; None means E.  Tokens that a mask hides do not count in T.
    """

    max_per_token: int | None = None
    takes_bias = False  # it would be the same for all tokens of an expert
    takes_capacity = False
    by_token = False

    def __post_init__(self) -> None:
        warn_of_later_tokens()
        if self.max_per_token is not None:
            check_sizes(max_per_token=self.max_per_token)

    def check(self, top_k: int, num_experts: int) -> None:
        check_slots("max_per_token", self.max_per_token, num_experts)

    def most_experts(self, top_k: int, num_experts: int) -> int:
        return self.max_per_token or num_experts

    def pick(self, ranked: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
        num_tokens, num_experts = ranked.shape
        capacity = -(-(num_tokens if mask is None else mask.sum()) * top_k // num_experts)
        by_expert = ranked if mask is None else ranked.masked_fill(~mask[:, None], -math.inf)
        order = by_expert.sort(dim=0, descending=True, stable=True).indices  # (T, E)
        first = torch.arange(num_tokens, device=ranked.device)[:, None] < capacity
        taken = torch.zeros_like(ranked, dtype=torch.bool).scatter(0, order, first.expand_as(order))
        return highest_of(ranked, taken, self.max_per_token or num_experts)


@dataclass(frozen=True)
class TokenRounding(Choice):
    """Choose the top k, then round each expert's number of tokens to a multiple of `tile`.

    Guo et al. 2025 (SonicMoE), arXiv 2512.14080: grouped products then have no partly filled tiles.  An
    expert chosen by c tokens keeps the first c' of all tokens in this order: first the tokens that chose the
    expert, by weight; then the others, by score.

        to="down"     c' = the multiple below c          drops the lowest weights
        to="up"       c' = the multiple above c          adds the highest scores
        to="nearest"  c' = the nearer one, up at half

    If c' is more than the number of tokens, the expert keeps c tokens.  Dropping a choice changes no other
    weight; an added choice has the weight scale * score, not renormalised.  `max_added` limits the experts
    added to a token to the best, and the memory of the layer to top_k + max_added rows for each token.  With
    None, it is E - top_k, and c' is always reached.  Not causal.
    """

    tile: int = 128
    to: str = "nearest"
    max_added: int | None = None
    takes_capacity = False
    by_token = False

    def __post_init__(self) -> None:
        check_sizes(tile=self.tile)
        check_known("to", self.to, ("down", "up", "nearest"))
        if self.max_added is not None:
            check_sizes(max_added=self.max_added)
            if self.to == "down":
                raise ValueError("max_added is given, but to='down' adds nothing")

    def check(self, top_k: int, num_experts: int) -> None:
        check_slots("max_added", self.max_added, num_experts - top_k)

    def choose(
        self, scored: Scored, ranked: Tensor, top_k: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        own = decide("experts", lambda: topk(ranked, top_k)[1], *ranked.shape)
        weights = scored.weigh(own)
        chose = torch.zeros_like(ranked, dtype=torch.bool).scatter(1, own, True)
        value = ranked.scatter(1, own, weights.detach().to(ranked.dtype))
        if mask is not None:
            chose, value = chose & mask[:, None], value.masked_fill(~mask[:, None], -math.inf)
        order = value.sort(dim=0, descending=True, stable=True).indices
        first = chose.gather(0, order).byte().sort(dim=0, descending=True, stable=True).indices
        place = torch.arange(ranked.shape[0], device=ranked.device)[:, None]
        kept = torch.zeros_like(chose).scatter(0, order.gather(0, first), place < self.rounded(chose, mask))
        expert_ids = decide("kept", lambda: own.masked_fill(~kept.gather(1, own), -1), *ranked.shape)
        slots = self.max_added or ranked.shape[1] - top_k
        if self.to == "down" or not slots:
            return expert_ids, weights
        added = decide("added", lambda: highest_of(ranked, kept & ~chose, slots), *ranked.shape)
        weights = torch.cat([weights, scored._replace(renormalize=False).weigh(added)], 1)
        return torch.cat([expert_ids, added], 1), weights

    def rounded(self, chose: Tensor, mask: Tensor | None) -> Tensor:
        """(T, E) -> c' (E,)."""
        count = chose.sum(0)
        tile = min(self.tile, 2**62)  # so that the sum fits into 64 bits
        rest = {"down": 0, "up": tile - 1, "nearest": tile // 2}[self.to]
        target = (count + rest) // tile * tile
        num_tokens = chose.shape[0] if mask is None else mask.sum()
        return target.where(target <= num_tokens, count)


@functools.cache  # once a process
def warn_of_later_tokens() -> None:
    warnings.warn(
        "ExpertChoice lets later tokens decide which experts an earlier token gets: do not train a causal "
        "language model with it, whose loss would be too good",
        stacklevel=4,
    )


def highest_of(ranked: Tensor, chosen: Tensor, slots: int) -> Tensor:
    """The highest ranked of the `chosen` (T, E) experts of each token: (T, slots), -1 past the last."""
    ids = topk(ranked.masked_fill(~chosen, -math.inf), slots)[1]
    return ids.masked_fill(~chosen.gather(1, ids), -1)


def check_slots(name: str, slots: int | None, most: int) -> None:
    if slots is not None and slots > most:
        raise ValueError(f"{name} is {slots} but there are only {most} experts for it")
