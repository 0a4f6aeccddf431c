"""Choices other than the k highest scores, each against a loop in plain Python."""

import math

import pytest
import torch

from moe_aiter import MoE
from moe_aiter.routing.choices import GroupLimit
from moe_aiter.routing.router import Router, route
from moe_aiter.routing.scores import SCORES

T, E, K = 23, 12, 3
LIMITS = [
    GroupLimit(groups, top, score, masked)
    for groups, top in ((4, 2), (3, 1), (1, 1), (6, 6))
    for score in ("max", "top2")
    for masked in (0.0, -math.inf)
]


def draw(*shape, seed=0, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device, dtype)


def with_ties(num_tokens=T, num_experts=E, **where):
    """Logits of a few values only, so that most rows hold ties."""
    return (draw(num_tokens, num_experts, **where) * 1.5).round() / 2


def score_by_hand(z, score):
    if score == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in z]
    if score == "sqrt_softplus":
        return [math.sqrt(math.log(1 + math.exp(v))) for v in z]
    p = [math.exp(v) for v in z]
    return [v / sum(p) for v in p]


def highest(values, k):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def weights_by_hand(p, ids, renormalize=True, scale=1.0):
    total = sum(p[e] for e in ids if e >= 0) if renormalize else 1.0
    return [p[e] / total * scale if e >= 0 else 0.0 for e in ids]


def limited_by_hand(q, top_k, limit):
    size = len(q) // limit.num_groups
    groups = [q[i * size : (i + 1) * size] for i in range(limit.num_groups)]
    best = [max(g) if limit.score == "max" else sum(sorted(g)[-2:]) for g in groups]
    kept = highest(best, limit.top_groups)
    return highest([v if e // size in kept else limit.masked for e, v in enumerate(q)], top_k)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_group_limit_by_hand(device, limit, score):
    top_k = min(K, limit.top_groups * E // limit.num_groups)
    for logits in (draw(T, E, device=device), with_ties(device=device)):
        routing = route(logits, top_k, score=score, scale=2.5, choice=limit)
        scores = routing.scores.tolist()
        for t, p in enumerate(scores):
            # of our own scores, whose ties are exact
            assert routing.expert_ids[t].tolist() == limited_by_hand(p, top_k, limit)
            torch.testing.assert_close(p, score_by_hand(logits[t].tolist(), score))
        weights = [
            weights_by_hand(p, i, scale=2.5) for p, i in zip(scores, routing.expert_ids.tolist(), strict=True)
        ]
        torch.testing.assert_close(routing.routing_weights.tolist(), weights)
        assert routing.routing_weights.dtype == torch.float64


@pytest.mark.parametrize("renormalize", [False, True])
def test_one_group_is_no_limit(device, renormalize):
    logits = draw(T, E, dtype=torch.float32, device=device)
    for score in ("softmax", "sigmoid"):
        how = {"score": score, "renormalize": renormalize}
        for got, want in zip(
            route(logits, K, choice=GroupLimit(1, 1), **how), route(logits, K, **how), strict=True
        ):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("choice", [None, GroupLimit(4, 2), GroupLimit(4, 2, "max", 0.0)], ids=str)
def test_gradcheck(device, choice, renormalize):
    logits = draw(5, E, device=device).requires_grad_()
    for score in ("softmax", "sigmoid", "sqrt_softplus"):
        how = {"score": score, "renormalize": renormalize, "scale": 0.5, "choice": choice}
        assert torch.autograd.gradcheck(lambda z, how=how: route(z, K, **how)[1:3], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sqrt_softplus_far_out_is_finite(device, dtype):
    logits = torch.tensor(
        [[-1e4, -200.0, -90.0, 0.0, 39.0, 1e4]], device=device, dtype=dtype
    ).requires_grad_()
    routing = route(logits, 6, score="sqrt_softplus", renormalize=False)
    assert routing.expert_ids[0, :3].tolist() == [5, 4, 3] and routing.expert_ids.sum() == 15
    torch.testing.assert_close(routing.scores[0, 5].item(), 100.0)
    (dlogits,) = torch.autograd.grad(routing.routing_weights.sum(), logits)
    assert dlogits.isfinite().all() and routing.scores.isfinite().all()


def test_logits_that_are_not_numbers_name_distinct_experts(device):
    logits = draw(6, E, dtype=torch.float32, device=device)
    logits[1], logits[2, 3], logits[4, ::2] = float("nan"), float("nan"), float("-inf")
    for choice in (None, GroupLimit(4, 2), GroupLimit(4, 2, "max", 0.0)):
        ids = route(logits, K, score="sqrt_softplus", choice=choice).expert_ids
        assert ids.min() >= 0 and ids.max() < E and all(len(set(row)) == K for row in ids.tolist())


def test_half_precision_and_autocast_stay_float32(device):
    logits = draw(T, E, dtype=torch.bfloat16, device=device)
    for score in SCORES:
        how = {"score": score, "choice": GroupLimit(4, 2)}
        plain = route(logits, K, **how)
        assert plain.routing_weights.dtype == plain.scores.dtype == torch.float32
        with torch.autocast(logits.device.type, dtype=torch.bfloat16):
            under = route(logits, K, **how)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, under, strict=True))


@pytest.mark.parametrize("options", [{"score": "sqrt_softplus"}, {"choice": GroupLimit(4, 2)}], ids=str)
def test_layer(device, options):
    """Forward and backward, twice the same; without tokens; in one graph; and the options in its text."""
    moe = MoE(16, 8, E, K, device=device, load_balance_coef=0.1, z_loss_coef=0.1, **options)
    x = draw(T, 16, dtype=torch.float32, device=device).requires_grad_()

    def step(fn, x):
        out = fn(x)
        return out, *torch.autograd.grad(out.square().sum(), [x, *moe.parameters()])

    first, second = step(moe, x), step(moe, x)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))
    assert first[2].abs().sum() > 0
    assert moe(x[:0]).shape == (0, 16)
    torch.compiler.reset()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (T, 8):
            part = x[:num_tokens].detach().requires_grad_()
            for got, want in zip(step(compiled, part), step(moe, part), strict=True):
                torch.testing.assert_close(got, want)
    assert all(str(v) in repr(moe) for v in options.values())


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: GroupLimit(0, 1), "num_groups must be at least 1, not 0"),
        (lambda: GroupLimit(2, 3), "top_groups is 3 but num_groups is 2"),
        (lambda: GroupLimit(2, 1, "mean"), "unknown score 'mean' of a group; known: max, top2"),
        (lambda: GroupLimit(2, 1, masked=1.0), "masked must be 0 or -inf, not 1.0"),
        (lambda: Router(8, E, K, choice=GroupLimit(5, 2)), "num_experts is 12, which 5 groups cannot share"),
        (lambda: Router(8, E, 1, choice=GroupLimit(12, 2)), "needs groups of at least 2 experts"),
        (lambda: Router(8, E, 4, choice=GroupLimit(4, 1)), "top_k is 4 but 1 groups have 3 experts"),
        (lambda: route(torch.zeros(2, E), 4, choice=GroupLimit(4, 1)), "top_k is 4 but 1 groups have 3"),
        (lambda: MoE(8, 8, E, 4, choice=GroupLimit(4, 1)), "top_k is 4 but 1 groups have 3 experts"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_errors_of_type():
    with pytest.raises(TypeError, match="choice must be a Choice, not str"):
        Router(8, E, K, choice="groups")
    with pytest.raises(TypeError, match=r"logits must be float16.* not torch.int64"):
        route(torch.zeros(2, E, dtype=torch.int64), K, choice=GroupLimit(4, 2))
