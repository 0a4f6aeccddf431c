"""Cases of routing: which experts, what weights, which rows, and the losses."""

import itertools
import math

import torch
import torch.nn.functional as F

import moe_aiter
from moe_aiter import routing
from moe_aiter.kernels.rows.permute import row_dots
from moe_aiter.kernels.rows.route import choose_experts
from moe_aiter.kernels.rows.sums import weigh_rows_op
from moe_aiter.routing.plan import make_plan

from . import choosing, loops
from .draw import DEVICE, Draw
from .hold import Case, Loss, target
from .products import wide_or


@target
def permute(draw: Draw) -> Case:
    """A plan, its permutation and its inverse, and their inner products."""
    dtype, T, H, E, k = draw.dtype(), draw.size(), draw.size(1), draw.count(), draw.count(high=4)
    ids = draw.experts(T, k, E)
    order, rank, sizes = loops.sort(ids, E)
    weighed = draw.flip()
    tensors = {"x": draw.numbers(T, H, dtype=dtype), "rows": draw.numbers(T * k, H, dtype=dtype)}
    if weighed:
        tensors["weights"] = draw.numbers(T, k, dtype=wide_or(draw, dtype))

    def ours(x, rows, weights=None):
        plan = make_plan(ids, E)
        for a, b in zip(plan, (order, rank, sizes), strict=True):
            assert torch.equal(a, b), "the plan differs"
        there, home = routing.permute(x, plan, weights), routing.unpermute(rows, plan, weights)
        dots = row_dots(rows, x, plan.order, plan.rank)
        if weights is None:
            return there, home, dots
        with torch.no_grad():
            return there, home, dots, *weigh_rows_op(rows, rows, weights, plan.order, plan.rank)

    def plain(x, rows, weights=None):
        there, home = loops.permuted(x, rank, weights), loops.unpermuted(rows, rank, weights)
        wide = loops.sum_dtype(x.dtype)
        used = (rank >= 0).to(wide)
        each = rows.to(wide)[rank.clamp(min=0).long()]  # (T, k, H)
        dots = (each * x.to(wide)[:, None]).sum(2) * used
        if weights is None:
            return there, home, dots
        with torch.no_grad():
            by_row = weights.flatten()[order.clamp(min=0).long()].to(wide) * (order >= 0)
            return there, home, dots, (rows * by_row[:, None]).to(rows.dtype), (each * each).sum(2) * used

    return Case(ours, plain, tensors)


@target
def sort(draw: Draw) -> Case:
    T, E, k = draw.size(), draw.size(1), draw.count(high=5)
    tensors = {"ids": draw.experts(T, k, E)}

    def ours(ids):
        order, rank, sizes = moe_aiter.sort_by_expert(ids, E)
        return order, rank, sizes, moe_aiter.load_statistics(sizes).load

    def plain(ids):
        order, rank, sizes = loops.sort(ids, E)
        return order, rank, sizes, (sizes.double() / max(int(sizes.sum()), 1)).float()

    return Case(ours, plain, tensors, gradients=False)


@target
def topk(draw: Draw) -> Case:
    """Ties, signed zeros, infinities and NaN."""
    dtype, T, E = draw.dtype(), draw.size(), draw.size(1)
    k = draw.count(1, min(E, 9))
    scores = draw.grid(T, E, dtype=dtype, step=0.25, most=draw.pick(2, 9, 100)).clone()
    strange = torch.rand(T, E, generator=draw.gen) < 0.1
    if draw.flip(0.3):
        special = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
        drawn = special[torch.randint(4, (T, E), generator=draw.gen)]
        scores = scores.where(~strange.to(DEVICE), drawn.to(scores))
    tensors = {"scores": draw.lay(scores)}

    def ours(scores):
        return moe_aiter.topk(scores, k)

    def plain(scores):
        keys = [[math.inf if v != v else v for v in row] for row in scores.detach().tolist()]
        nans = [[v != v for v in row] for row in scores.detach().tolist()]
        ids = [
            sorted(range(E), key=lambda e: (not nan[e], -row[e], e))[:k]
            for row, nan in zip(keys, nans, strict=True)
        ]
        ids = torch.tensor(ids, dtype=torch.int64, device=scores.device).view(T, k)
        return scores.gather(1, ids), ids

    return Case(ours, plain, tensors, exact=True)


# routers


def scores_of(logits, score):
    """(T, E), token by token."""
    kinds = {"softmax": lambda z: z.softmax(0), "sigmoid": torch.sigmoid}
    kinds |= {"topk_softmax": kinds["softmax"], "sqrt_softplus": lambda z: F.softplus(z, threshold=40).sqrt()}
    return torch.stack([kinds[score](z) for z in logits]) if len(logits) else logits * 1.0


def weights_of(scores, ids, renormalize, scale, logits=None):
    """(T, slots), 0 for an empty slot; in the truth the chosen are divided by their exact sum.

    `logits` are given if the scores are their softmax and may underflow to 0.
    """
    there = ids >= 0
    chosen = scores.gather(1, ids.clamp(min=0)) * there
    if renormalize and logits is not None:
        chosen = logits.gather(1, ids.clamp(min=0)).masked_fill(~there, -1e30).softmax(1) * there
    elif renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    return chosen * scale


def draw_choice(draw: Draw, E: int, k: int):
    """Another way to choose, or None."""
    divisors = [n for n in range(1, E + 1) if E % n == 0]
    kind = draw.pick("none", "none", "none", "groups", "p", "sinkhorn", "expert", "rounding", "even")
    if kind == "groups":
        G = draw.pick(*divisors)
        fewest = -(-k // (E // G))
        score = draw.pick("max", "top2") if E // G > 1 else "max"
        most = draw.pick(-math.inf, 0)
        return moe_aiter.GroupLimit(G, draw.form.randint(fewest, G), score, most)
    if kind == "p":
        return moe_aiter.TopP(draw.pick(0.1, 0.5, 0.9, 1.0))
    if kind == "sinkhorn":
        return moe_aiter.Sinkhorn(draw.pick(1, 4))
    if kind == "expert":
        return moe_aiter.ExpertChoice(draw.pick(None, draw.form.randint(1, E)))
    if kind == "rounding":
        to = draw.pick("down", "up", "nearest")
        most = draw.form.randint(1, E - k) if to != "down" and k < E and draw.flip() else None
        return moe_aiter.TokenRounding(draw.pick(1, 4, 7), to, most)
    return moe_aiter.Forced() if kind == "even" else None


def chosen_by(choice, scores, logits, k, how, bias=None, mask=None) -> torch.Tensor:
    """(T, slots): the experts by the definition of the choice, also of hidden tokens."""
    ranked = (scores if bias is None else scores + bias).tolist()
    shown = [True] * len(ranked) if mask is None else mask.tolist()
    if choice is None:
        ids = [choosing.top(row, k) for row in ranked]
    elif isinstance(choice, moe_aiter.GroupLimit):
        ids = choosing.group_limit(ranked, k, *vars(choice).values())
    elif isinstance(choice, moe_aiter.TopP):
        ids = choosing.top_p(ranked, scores.tolist(), k, choice.p)
    elif isinstance(choice, moe_aiter.Sinkhorn):
        ids = choosing.sinkhorn(logits.tolist(), k, choice.iterations, shown)
    elif isinstance(choice, moe_aiter.ExpertChoice):
        ids = choosing.expert_choice(ranked, k, choice.max_per_token, shown)
    elif isinstance(choice, moe_aiter.TokenRounding):
        own = torch.tensor([choosing.top(row, k) for row in ranked], dtype=torch.int64).view(-1, k)
        weights = weights_of(scores, own.to(scores.device), *how)
        ids = choosing.token_rounding(ranked, weights.tolist(), k, choice, shown)
    else:
        E = scores.shape[1]
        ids = [[(t * k + j) % E for j in range(k)] for t in range(len(scores))]
    width = len(ids[0]) if ids else slots_of(choice, k, scores.shape[1])
    return torch.tensor(ids, dtype=torch.int64, device=scores.device).view(-1, width)


def slots_of(choice, k, E):
    if isinstance(choice, moe_aiter.ExpertChoice):
        return choice.max_per_token or E
    if isinstance(choice, moe_aiter.TokenRounding) and choice.to != "down":
        return k + (choice.max_added or E - k)
    return k


def rounded_weights(scores, ids, own, renormalize, scale):
    """Of `TokenRounding`: what is dropped changes no other weight, what is added is its score."""
    k = own.shape[1]
    first = weights_of(scores, own, renormalize, scale)
    return torch.cat([first, weights_of(scores, ids[:, k:], False, scale)], 1)


def draw_scoring(draw: Draw, k: int, choice=None, E: int = 0) -> dict:
    """A score, and weights that sum to 1 only where a token can have several experts."""
    k = slots_of(choice, k, E) if isinstance(choice, moe_aiter.ExpertChoice) else k
    known = "softmax", "softmax", "sigmoid", "sqrt_softplus", *(["topk_softmax"] if k > 1 else [])
    score = draw.pick(*known)
    renormalize = score == "topk_softmax" or (k > 1 and draw.flip())
    return {"score": score, "renormalize": renormalize, "scale": draw.pick(1.0, 2.5)}


class PlainRoute:
    """Experts, weights and scores of logits; the experts are those of the first call, in float64."""

    def __init__(self, choice, k, scoring, bias=None, mask=None):
        self.choice, self.k, self.bias, self.mask = choice, k, bias, mask
        self.score, self.how = scoring["score"], (scoring["renormalize"], scoring["scale"])
        self.ids = self.own = None

    def __call__(self, logits):
        """(T, slots) experts, weights that are 0 for an empty slot, and (T, E) scores."""
        scores = scores_of(logits.to(loops.sum_dtype(logits.dtype)), self.score)
        if self.ids is None:
            bias = None if self.bias is None else self.bias.double()
            chosen = scores.detach(), logits.detach(), self.k, self.how, bias, self.mask
            self.ids = chosen_by(self.choice, *chosen)
            self.own = chosen_by(None, *chosen[:5])
            if self.mask is not None:
                self.ids = self.ids.masked_fill(~self.mask[:, None], -1)
        if isinstance(self.choice, moe_aiter.TokenRounding):
            weights = rounded_weights(scores, self.ids, self.own, *self.how)
        else:
            weights = weights_of(scores, self.ids, *self.how)
        return self.ids, weights * (self.ids >= 0), scores


def hide(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`x` with NaN in the rows of hidden tokens; where rows share memory as it is."""
    if mask is not None and 0 not in x.stride():
        x[~mask] = float("nan")
    return x


def seen(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`x` with zeros for hidden tokens."""
    return x if mask is None else x.where(mask[:, None], 0)


def draw_logits(draw: Draw, T: int, E: int, choice, dtype) -> torch.Tensor:
    """Many ties, but for choices that compare what was computed from different numbers."""
    if choice is None and draw.flip(0.7):
        return draw.grid(T, E, dtype=dtype, step=0.25, most=draw.pick(1, 12))
    return draw.numbers(T, E, dtype=dtype, scale=draw.pick(0.3, 2.0))


@target
def route(draw: Draw) -> Case:
    dtype, T, E = draw.dtype(), draw.size(high=40), draw.count(high=12)
    k = draw.count(high=min(E, 5))
    choice = draw_choice(draw, E, k)
    scoring = draw_scoring(draw, k, choice, E)
    mask = draw.mask(T) if draw.flip(0.3) else None
    takes_bias = choice is None or choice.takes_bias
    bias = draw.grid(E, dtype=torch.float32, step=1 / 64, most=20) if takes_bias and draw.flip(0.3) else None
    tensors = {"logits": hide(draw_logits(draw, T, E, choice, dtype), mask)}
    plain_route = PlainRoute(choice, k, scoring, bias, mask)
    need_scores = draw.flip()

    def ours(logits):
        how = {"choice": choice, "selection_bias": bias, "mask": mask, "need_scores": need_scores}
        found = moe_aiter.route(logits, k, **scoring, **how)
        weights = found.routing_weights.where(found.expert_ids >= 0, 0)
        return found.expert_ids, weights, found.scores if need_scores else None, found.logits

    def plain(logits):
        wide = seen(logits.to(loops.sum_dtype(logits.dtype)), mask)
        ids, weights, scores = plain_route(wide)
        return ids, weights, scores if need_scores else None, wide

    return Case(ours, plain, tensors)


@target
def route_to(draw: Draw) -> Case:
    """Experts that are given; their weights too; and those of a hash."""
    dtype, T, E = draw.dtype(), draw.size(), draw.count(high=12)
    k = draw.count(high=min(E, 5))
    scoring, recorded = draw_scoring(draw, k), draw.flip(0.3)
    ids = draw.experts(T, k, E)
    tensors = {"logits": draw_logits(draw, T, E, None, dtype)}
    if recorded:
        tensors["weights"] = draw.numbers(T, k, dtype=torch.float32)
    of_logits = "softmax" in scoring["score"]
    if of_logits and draw.flip(0.3):
        tensors["logits"] = tensors["logits"] * 32  # scores that underflow
    table = moe_aiter.hash_experts(T, E, k, seed=T, device=DEVICE) if T else ids
    assert all(len(set(row)) == k and 0 <= min(row) <= max(row) < E for row in table.tolist() if T)

    def ours(logits, weights=None):
        found = moe_aiter.route_to(logits, ids, weights, **scoring)
        return found.expert_ids, found.routing_weights, found.scores

    def plain(logits, weights=None):
        logits = logits.to(loops.sum_dtype(logits.dtype))
        scores = scores_of(logits, scoring["score"])
        how = scoring["renormalize"], scoring["scale"], logits if of_logits else None
        given = weights_of(scores, ids.long(), *how)
        return ids.long(), given if weights is None else weights, scores

    return Case(ours, plain, tensors)


@target
def far_apart(draw: Draw) -> Case:
    """One expert with nearly all of a token's weight: the gradient of each token, however small it is."""
    dtype, T, E = draw.dtype(), draw.size(1), draw.count(2, high=12)
    k = draw.count(2, high=min(E, 5))
    scoring = {"score": draw.pick("softmax", "sigmoid", "sqrt_softplus"), "renormalize": True}
    scoring["scale"] = draw.pick(1.0, 2.5)
    ids = torch.rand(T, E, generator=draw.gen).argsort(1)[:, :k].to(DEVICE)
    gap, logits = draw.pick(3, 6, 9, 12), draw.numbers(T, E, dtype=dtype).clone()
    logits.scatter_add_(1, ids[:, :1], torch.full_like(logits, gap))
    if scoring["score"] == "sigmoid":
        logits -= gap  # torch's slope of a sigmoid loses the digits near 1
    fused = scoring["score"] != "sqrt_softplus" and draw.flip()

    def ours(logits):
        if fused:
            how = {"sigmoid": scoring["score"] == "sigmoid", "scale": scoring["scale"]}
            return choose_experts(logits, k, **how, fixed_ids=ids)[1]
        return moe_aiter.route_to(logits, ids, **scoring).routing_weights

    def plain(logits):
        scores = scores_of(logits.to(loops.sum_dtype(logits.dtype)), scoring["score"])
        return weights_of(scores, ids, scoring["renormalize"], scoring["scale"])

    return Case(ours, plain, {"logits": draw.lay(logits)}, by_row=True)


# losses


def balance(scores, ids, mask, zero=0):
    """E * sum over experts of their share of the choices times their mean share of the scores.

    The last `zero` have the mean of their shares each.
    """
    T, E = scores.shape
    wide = scores.to(loops.sum_dtype(scores.dtype))
    tokens = [t for t in range(T) if mask is None or bool(mask[t])]
    chosen = [e for t in tokens for e in ids[t].tolist() if 0 <= e < E]
    out = loops.nothing(wide)
    for e in range(E):
        count = chosen.count(e) if e < E - zero else sum(c >= E - zero for c in chosen) / zero
        f = count / max(len(chosen), 1)
        for t in tokens:
            out = out + f * wide[t, e] / wide[t].sum() / len(tokens)
    return out * E


def draw_offsets(draw, T):
    """Where packed sequences begin and the last one ends; some are empty, and tokens may be left."""
    inner = sorted(draw.form.randint(0, T) for _ in range(draw.size(high=5)))
    return torch.tensor([0, *inner], dtype=draw.pick(torch.int32, torch.int64), device=DEVICE)


def sequence_balance(scores, ids, offsets, mask, zero=0):
    values = []
    for begin, end in itertools.pairwise(offsets):
        rows = slice(begin, end)
        part = None if mask is None else mask[rows]
        if begin < end and (part is None or bool(part.any())):
            values.append(balance(scores[rows], ids[rows], part, zero))
    return torch.stack(values).mean() if values else balance(scores, ids, mask) * 0


def squared(logits, mask):
    wide = logits.to(loops.sum_dtype(logits.dtype))
    tokens = [t for t in range(len(logits)) if mask is None or bool(mask[t])]
    return sum((wide[t].logsumexp(0) ** 2 for t in tokens), loops.nothing(wide)) / max(len(tokens), 1)


@target
def losses(draw: Draw) -> Case:
    """All three, by themselves and attached to another tensor."""
    dtype, length, sequences = draw.dtype(), draw.size(1, 9), draw.size(high=4)
    T, E = length * sequences, draw.count(high=9)
    k = draw.count(high=min(E, 4))
    ids = draw.experts(T, k, E)
    mask = draw.mask(T) if draw.flip() else None
    by_sizes = mask is None and draw.flip()
    offsets, how = range(0, T + 1, length), {"sequence_length": length}
    if draw.flip(0.3):
        offsets = draw_offsets(draw, T)
        how = {"cu_seqlens": offsets}
    tensors = {
        "scores": draw.numbers(T, E, dtype=dtype).abs() + 0.1,
        "logits": draw.numbers(T, E, dtype=dtype),
    }

    def ours(scores, logits):
        if by_sizes:
            given = {"group_sizes": make_plan(ids, E).group_sizes}
        else:
            given = {"expert_ids": ids, "mask": mask}
        one = moe_aiter.load_balance_loss(scores, **given)
        two = moe_aiter.sequence_balance_loss(scores, ids, mask=mask, **how)
        return one, two, moe_aiter.attach_loss(moe_aiter.z_loss(logits, mask), one * 3)

    def plain(scores, logits):
        one, two = balance(scores, ids, mask), sequence_balance(scores, ids, offsets, mask)
        return one, two, squared(logits, mask) + loops.nothing(scores), Loss(one * 3)

    return Case(ours, plain, tensors)
