"""Choices of a variable number of experts, and those that look at all tokens, against plain Python."""

import math

import pytest
import torch
from check import Peak
from routing.test_choices import draw, highest, weights_by_hand, with_ties

from moe_aiter import Capacity, ExpertChoice, MoE, Router, Sinkhorn, TokenRounding, TopP, route
from moe_aiter.routing.scores import SCORES

T, E, K, H = 23, 6, 2, 16
ALL = [
    TopP(0.6),
    Sinkhorn(),
    ExpertChoice(),
    ExpertChoice(3),
    TokenRounding(4),
    TokenRounding(4, "up"),
    TokenRounding(4, "down"),
    TokenRounding(4, "up", 1),
]
every = pytest.mark.parametrize("choice", ALL, ids=str)


def mask_of(device="cpu"):
    return (torch.arange(T) % 5 != 2).to(device)


def experts_of(row):
    return [e for e in row if e >= 0]


def top_p_by_hand(q, top_k, p):
    ids, total = [], 0.0
    for e in highest(q, top_k):
        if ids and total >= p * sum(q):
            break
        ids.append(e)
        total += q[e]
    return ids


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 1.0])
def test_top_p_by_hand(device, p, score):
    logits = draw(T, E, device=device) * 2
    routing = route(logits, 4, score=score, scale=1.5, choice=TopP(p))
    for t, q in enumerate(routing.scores.tolist()):
        ids = routing.expert_ids[t].tolist()
        want = top_p_by_hand(q, 4, p)
        assert ids == want + [-1] * (4 - len(want))
        torch.testing.assert_close(routing.routing_weights[t].tolist(), weights_by_hand(q, ids, scale=1.5))


def test_top_p_stops_where_the_share_is_reached(device):
    logits = torch.zeros(3, 4, device=device)
    assert route(logits, 4, choice=TopP(0.5)).expert_ids.tolist() == [[0, 1, -1, -1]] * 3
    assert route(logits, 1, choice=TopP(0.5)).expert_ids.tolist() == [[0]] * 3


@pytest.mark.parametrize("choice", [TopP(0.9), Sinkhorn(), ExpertChoice(), TokenRounding(4)], ids=str)
def test_many_choices_take_memory_in_proportion(choice):
    """Not the square of the choices for each token."""
    logits = torch.randn(256, 128)
    with Peak() as peak:
        route(logits, 128, choice=choice)
    assert peak.most < 50 * logits.nbytes


def sinkhorn_by_hand(z, iterations):
    v = [0.0] * len(z[0])
    for _ in range(iterations):
        u = [-math.log(sum(math.exp(a + b) for a, b in zip(row, v, strict=True))) for row in z]
        v = [
            math.log(len(z) / len(v)) - math.log(sum(math.exp(row[e] + u[t]) for t, row in enumerate(z)))
            for e in range(len(v))
        ]
    return [[a + b for a, b in zip(row, v, strict=True)] for row in z]


@pytest.mark.parametrize("iterations", [1, 8])
def test_sinkhorn_by_hand(device, iterations):
    logits = draw(T, E, device=device) + torch.linspace(2, 0, E, device=device)
    routing = route(logits, K, choice=Sinkhorn(iterations), score="sigmoid")
    for row, ids in zip(
        sinkhorn_by_hand(logits.tolist(), iterations), routing.expert_ids.tolist(), strict=True
    ):
        assert ids == highest(row, K)


def test_sinkhorn_evens_the_load(device):
    logits = draw(600, E, device=device) + torch.linspace(3, 0, E, device=device)
    even, plain = (
        route(logits, 1, choice=choice).expert_ids.flatten().bincount(minlength=E).max().item()
        for choice in (Sinkhorn(), None)
    )
    assert plain > 300 and even < 140


@pytest.mark.parametrize("most", [None, 1, 2])
def test_expert_choice_by_hand(device, most):
    for logits in (draw(T, E, device=device), with_ties(T, E, device=device)):
        routing = route(logits, K, choice=ExpertChoice(most), renormalize=False)
        p = routing.scores.tolist()
        capacity = math.ceil(T * K / E)
        takers = [highest([row[e] for row in p], capacity) for e in range(E)]
        for t, ids in enumerate(routing.expert_ids.tolist()):
            want = [e for e in highest(p[t], E) if t in takers[e]][:most]
            assert ids == want + [-1] * ((most or E) - len(want))
            torch.testing.assert_close(
                routing.routing_weights[t].tolist(), weights_by_hand(p[t], ids, renormalize=False)
            )


def rounding_by_hand(p, top_k, tile, to, renormalize):
    """{(t, e): weight} after the rounding."""
    own = [highest(row, top_k) for row in p]
    totals = [sum(row[e] for e in ids) if renormalize else 1.0 for row, ids in zip(p, own, strict=True)]
    kept = {}
    for e in range(len(p[0])):
        chose = [t for t in range(len(p)) if e in own[t]]
        others = [t for t in range(len(p)) if e not in own[t]]
        chose.sort(key=lambda t, e=e: -p[t][e] / totals[t])
        others.sort(key=lambda t, e=e: -p[t][e])
        c = len(chose)
        below, above = c // tile * tile, -(-c // tile) * tile
        target = {"down": below, "up": above, "nearest": above if c - below >= tile / 2 else below}[to]
        target = c if target > len(p) else target
        kept |= {(t, e): p[t][e] / totals[t] for t in chose[:target]}
        kept |= {(t, e): p[t][e] for t in others[: max(target - c, 0)]}
    return kept


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("to", ["down", "up", "nearest"])
@pytest.mark.parametrize("tile", [1, 4, 5, 16, 64, 2**63 - 1, 2**70])
@pytest.mark.pairwise
def test_token_rounding_by_hand(device, tile, to, renormalize):
    logits = draw(T, E, device=device)
    routing = route(logits, K, choice=TokenRounding(tile, to), renormalize=renormalize)
    got = {
        (t, e): w
        for t, (ids, weights) in enumerate(
            zip(routing.expert_ids.tolist(), routing.routing_weights.tolist(), strict=True)
        )
        for e, w in zip(ids, weights, strict=True)
        if e >= 0
    }
    want = rounding_by_hand(routing.scores.tolist(), K, tile, to, renormalize)
    assert got.keys() == want.keys()
    for choice, weight in want.items():
        assert got[choice] == pytest.approx(weight)
    counts = [sum(e == expert for _, e in got) for expert in range(E)]
    assert tile >= 16 or all(c % tile == 0 for c in counts)


@every
def test_padding_changes_nothing_for_others(device, choice):
    """The tokens that count are routed as if there were no others."""
    logits, mask = draw(T, E, device=device), mask_of(device)
    whole = route(logits, K, choice=choice, mask=mask)
    alone = route(logits[mask], K, choice=choice)
    if not isinstance(choice, ExpertChoice):  # its capacity is a share of all tokens
        assert torch.equal(whole.expert_ids[mask], alone.expert_ids)
        used = alone.expert_ids >= 0
        torch.testing.assert_close(whole.routing_weights[mask][used], alone.routing_weights[used])
    assert (whole.expert_ids[~mask] == -1).all()
    other = logits.clone()
    other[~mask] = 50.0
    assert torch.equal(route(other, K, choice=choice, mask=mask).expert_ids, whole.expert_ids)


@every
def test_gradcheck(device, choice):
    logits = draw(9, E, device=device).requires_grad_()
    for renormalize in (False, True):
        how = {"choice": choice, "renormalize": renormalize, "scale": 2.0}

        def used(z, how=how):
            routing = route(z, K, **how)
            return routing.routing_weights.where(routing.expert_ids >= 0, 0), routing.scores

        assert torch.autograd.gradcheck(used, logits)


@every
def test_layer(device, choice):
    """Forward and backward with losses and padding, twice the same, against the double loop's routing."""
    coefs = {"load_balance_coef": 0.1, "sequence_balance_coef": 0.1, "z_loss_coef": 0.1}
    moe = MoE(H, 8, E, K, device=device, choice=choice, **coefs)
    x = draw(1, T, H, dtype=torch.float32, device=device).requires_grad_()
    mask = mask_of(device)[None]

    def step(fn):
        out = fn(x, mask=mask)
        return out, *torch.autograd.grad(out.square().sum(), [x, *moe.parameters()])

    first, second = step(moe), step(moe)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))
    assert first[2].abs().sum() > 0 and first[0][~mask].count_nonzero() == 0
    _, (routing, plan) = moe(x, mask=mask, return_routing=True)
    assert plan.group_sizes.sum() == (routing.expert_ids >= 0).sum()
    replayed = moe(
        x, expert_ids=routing.expert_ids[None], routing_weights=routing.routing_weights.detach()[None]
    )
    torch.testing.assert_close(replayed, first[0])
    assert str(choice) in repr(moe)
    torch.compiler.reset()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for got, want in zip(step(compiled), first, strict=True):
        torch.testing.assert_close(got, want)
    other = MoE(H, 8, E, K, device=device, choice=choice)
    other.load_state_dict(moe.state_dict())
    assert torch.equal(other(x, mask=mask), first[0])


@every
def test_no_tokens_and_one(device, choice):
    moe = MoE(H, 8, E, K, device=device, choice=choice)
    for num_tokens in (0, 1):
        x = draw(num_tokens, H, dtype=torch.float32, device=device)
        out = moe(x)
        out.sum().backward()
        assert out.shape == x.shape and moe.router.weight.grad.isfinite().all()
    nothing = torch.zeros(1, dtype=torch.bool, device=device)
    assert moe(x, mask=nothing).count_nonzero() == 0


@every
def test_half_precision_and_autocast_stay_float32(device, choice):
    logits = draw(T, E, dtype=torch.bfloat16, device=device)
    plain = route(logits, K, choice=choice)
    assert plain.routing_weights.dtype == plain.scores.dtype == torch.float32
    with torch.autocast(logits.device.type, dtype=torch.bfloat16):
        under = route(logits, K, choice=choice)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, under, strict=True))


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: TopP(0.0), "p must be above 0 and at most 1, not 0.0"),
        (lambda: Sinkhorn(0), "iterations must be at least 1, not 0"),
        (lambda: ExpertChoice(0), "max_per_token must be at least 1, not 0"),
        (lambda: Router(H, E, K, choice=ExpertChoice(7)), "max_per_token is 7 but there are only 6"),
        (lambda: TokenRounding(0), "tile must be at least 1, not 0"),
        (lambda: TokenRounding(4, "even"), "unknown to 'even'; known: down, up, nearest"),
        (lambda: TokenRounding(4, "down", 1), "max_added is given, but to='down' adds nothing"),
        (lambda: Router(H, E, K, choice=TokenRounding(max_added=5)), "max_added is 5 but there are only 4"),
        (lambda: Router(H, E, K, choice=ExpertChoice(), selection_bias=True), "would change nothing for Exp"),
        (
            lambda: Router(H, E, K, choice=Sinkhorn(), selection_bias=True),
            "would change nothing for Sinkhorn",
        ),
        (
            lambda: route(torch.zeros(2, E), K, choice=Sinkhorn(), selection_bias=torch.zeros(E)),
            "would change nothing for Sinkhorn",
        ),
        (lambda: MoE(H, 8, E, K, choice=ExpertChoice(), capacity=Capacity(1.0)), "decides how many tokens"),
        (lambda: route(torch.zeros(2, E), K, mask=torch.ones(3, dtype=torch.bool)), r"mask is \(T=3,\)"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
