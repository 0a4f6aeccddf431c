"""Routes that are given: replayed, by a hash, forced; and jitter."""

import pytest
import torch

from moe_aiter import Forced, GroupLimit, MoE, OptimizedMoELayer, Router, hash_experts, route, route_to
from moe_aiter.routing.choices import Choice
from moe_aiter.routing.scores import SCORES

H, WIDTH, E, K, T = 16, 8, 6, 2, 13
MODES = [(score, renormalize) for score in SCORES for renormalize in (True, False)]
MODES.remove(("topk_softmax", False))


@pytest.mark.parametrize("score, renormalize", MODES)
def test_a_replay_weighs_as_the_choice_did(device, score, renormalize):
    logits = torch.randn(T, E, device=device, dtype=torch.float64).requires_grad_()
    how = {"score": score, "renormalize": renormalize, "scale": 2.5}
    routing = route(logits, K, **how)
    replayed = route_to(logits, routing.expert_ids.int(), **how)
    for got, want in zip(replayed, routing, strict=True):
        torch.testing.assert_close(got, want)
    ids = routing.expert_ids.clone()
    ids[2, 1], ids[5] = -1, -1
    assert torch.autograd.gradcheck(lambda z: route_to(z, ids, **how)[1:3], logits)
    weights = route_to(logits, ids, **how).routing_weights
    assert (weights[ids < 0] == 0).all() and (weights[ids >= 0] > 0).all()


@pytest.mark.parametrize("score", ["softmax", "topk_softmax"])
def test_experts_far_below_the_best_share_their_weight(device, score):
    """Their scores underflow to 0, but a renormalised softmax depends on the chosen logits alone."""
    logits = torch.tensor([[500.0, 0, 1, -1]] * T, device=device, requires_grad=True)
    bias = torch.tensor([-2.0, 1, 1, 0], device=device)
    ids = torch.tensor([[1, 2]] * T, device=device)
    found = [
        route_to(logits, ids, score=score).routing_weights,
        route(logits, K, score=score, renormalize=True, selection_bias=bias).routing_weights,
        route(logits, K, score=score, renormalize=True, choice=Forced()).routing_weights[1::2].flip(1),
    ]
    want = [logits[:, 1:3].softmax(1), logits[:, 1:3].softmax(1), logits[1::2, 2:].softmax(1).flip(1)]
    for got, plain in zip(found, want, strict=True):
        torch.testing.assert_close(got, plain)
        grads = [torch.autograd.grad(w[:, 0].sum(), logits, retain_graph=True)[0] for w in (got, plain)]
        torch.testing.assert_close(*grads)
        assert grads[0].abs().sum() > 1
    logits = logits.detach().index_fill(1, ids[0], -torch.inf).requires_grad_()  # experts ruled out weigh 0
    weights = route_to(logits, ids, score=score).routing_weights
    assert weights.count_nonzero() == 0
    assert torch.autograd.grad(weights.sum(), logits)[0].count_nonzero() == 0


@pytest.mark.parametrize("score", ["softmax", "topk_softmax"])
def test_no_choice_hides_a_nan(device, score):
    """One NaN or +inf among the logits of a token makes its weights NaN, and their gradient."""
    for bad in (torch.nan, torch.inf):
        rows = [[0.0, 1, 2, bad], [0, 1, 2, 3], [-torch.inf] * 4]
        logits = torch.tensor(rows, device=device, requires_grad=True)
        found = [
            route_to(logits, torch.tensor([[0, -1], [0, 1], [2, 1]], device=device), score=score),
            route(logits, K, score=score, selection_bias=torch.zeros(4, device=device)),
            route(logits, K, score=score, choice=GroupLimit(1, 1)),
        ]
        for routing in found:
            nan = routing.routing_weights.isnan() | (routing.expert_ids < 0)
            assert nan[0].all() and nan[2].all() and not nan[1].any()
            (grad,) = torch.autograd.grad(routing.routing_weights.sum(), logits)
            assert grad[0].isnan().any() and grad[2].isnan().any() and not grad[1].isnan().any()
    least = torch.finfo(torch.float32).min
    logits = torch.tensor([[least, least, least]], device=device)
    weights = route_to(logits, torch.tensor([[0, 1, -1]], device=device), score=score).routing_weights
    assert weights.tolist() == [[0.5, 0.5, 0]]


def test_a_layer_replays_ids_and_weights(device):
    """Whatever the logits are now, the output is that of the recorded routing, to the bit."""
    moe = MoE(H, WIDTH, E, K, score="sigmoid", device=device)
    x = torch.randn(3, 5, H, device=device)
    out, (routing, _) = moe(x, return_routing=True)
    ids, weights = (t.detach().view(3, 5, K) for t in routing[:2])
    assert weights.dtype == torch.float32
    torch.testing.assert_close(moe(x, expert_ids=ids), out)
    with torch.no_grad():
        moe.router.weight.neg_()
    assert not torch.allclose(moe(x), out) and not torch.allclose(moe(x, expert_ids=ids), out)
    again, (same, _) = moe(x, expert_ids=ids, routing_weights=weights, return_routing=True)
    assert torch.equal(again, out) and torch.equal(same.expert_ids, routing.expert_ids)
    again.sum().backward()
    assert moe.router.weight.grad is None or moe.router.weight.grad.count_nonzero() == 0
    moe(x, expert_ids=ids).sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0


def test_a_replay_with_losses_and_padding(device):
    coefs = {"load_balance_coef": 0.1, "sequence_balance_coef": 0.1, "z_loss_coef": 0.1}
    moe = MoE(H, WIDTH, E, K, device=device, **coefs)
    x, mask = torch.randn(3, 5, H, device=device), torch.ones(3, 5, dtype=torch.bool, device=device)
    mask[1, 2:] = False
    ids = moe(x, return_routing=True)[1].routing.expert_ids.view(3, 5, K)
    grads = []
    for given in ({}, {"expert_ids": ids}):
        out = moe(x, mask=mask, **given)
        grads.append((out, *torch.autograd.grad(out.square().sum(), list(moe.parameters()))))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_hash(device):
    table = hash_experts(1000, E, 3, device=device)
    assert table.shape == (1000, 3) and table.dtype == torch.int64 and table.device.type == device.type
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < E for row in table.tolist())
    assert torch.equal(table, hash_experts(1000, E, 3, device=device))
    assert not torch.equal(table, hash_experts(1000, E, 3, seed=1, device=device))
    assert table.flatten().bincount(minlength=E).min() > 400
    moe = MoE(H, WIDTH, E, K, device=device)
    token_ids = torch.randint(0, 1000, (3, 5), device=device)
    out, (routing, _) = moe(
        torch.randn(3, 5, H, device=device), expert_ids=table[token_ids], return_routing=True
    )
    assert torch.equal(routing.expert_ids.view(3, 5, 3), table[token_ids])
    out.sum().backward()
    assert moe.router.weight.grad.isfinite().all()


@pytest.mark.parametrize("how", ["round_robin", "random"])
def test_forced(device, how):
    moe = MoE(H, WIDTH, E, 4, choice=Forced(how), device=device)
    x = torch.ones(3 * 30, H, device=device)  # all alike
    out, (routing, plan) = moe(x, return_routing=True)
    if how == "round_robin":
        want = [[(t * 4 + j) % E for j in range(4)] for t in range(90)]
        assert routing.expert_ids.tolist() == want
        assert plan.group_sizes.tolist() == [60] * E
    else:
        assert plan.group_sizes.min() > 40
        assert not torch.equal(moe(x, return_routing=True)[1].routing.expert_ids, routing.expert_ids)
    assert all(len(set(row)) == 4 for row in routing.expert_ids.tolist())
    replayed = route_to(routing.logits, routing.expert_ids)
    torch.testing.assert_close(routing.routing_weights, replayed.routing_weights)
    out.sum().backward()
    assert moe.router.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter(device, dtype):
    moe = MoE(H, WIDTH, E, K, jitter=0.1, device=device, dtype=dtype)
    plain = MoE(H, WIDTH, E, K, device=device, dtype=dtype)
    plain.load_state_dict(moe.state_dict())
    x = torch.randn(T, H, device=device, dtype=dtype).requires_grad_()
    before = x.detach().clone()
    torch.manual_seed(1)
    out, (routing, _) = moe(x, return_routing=True)
    torch.manual_seed(1)
    noise = torch.empty(T, H, device=device).uniform_(0.9, 1.1)
    want = plain.router((x * noise).to(dtype))
    torch.testing.assert_close(routing.logits, want.logits)
    # the experts see x itself
    rest = plain(x, expert_ids=routing.expert_ids, routing_weights=routing.routing_weights)
    torch.testing.assert_close(out, rest)
    (out.sum() + 0.0).backward()
    assert torch.equal(x, before) and moe.router.weight.grad.abs().sum() > 0
    assert torch.equal(moe.eval()(x), plain(x)) and "jitter=0.1" in repr(moe)


def test_the_gradient_goes_through_the_jitter(device):
    router = Router(H, E, K, jitter=0.5, device=device, dtype=torch.float64)
    x = torch.randn(4, H, device=device, dtype=torch.float64).requires_grad_()

    def weights(x):
        torch.manual_seed(2)
        return router(x).routing_weights

    assert torch.autograd.gradcheck(weights, x)


X = torch.zeros(3, 5, H)
IDS = torch.zeros(3, 5, K, dtype=torch.int64)


class Mine(Router):
    def forward(self, x):
        return super().forward(x)


def with_mine():
    moe = MoE(H, WIDTH, E, K)
    moe.router = Mine(H, E, K)
    return moe


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda m: m(X, expert_ids=IDS[0]), ValueError, r"expert_ids is \(5, 2\) but x is \(3, 5, 16\)"),
        (lambda m: m(X, routing_weights=IDS.float()), ValueError, "without their expert_ids"),
        (
            lambda m: m(X, expert_ids=IDS, routing_weights=torch.ones(3, 5, 1)),
            ValueError,
            r"expert_ids is \(T, k=2\) but routing_weights is \(T, k=1\)",
        ),
        (lambda m: m(X, expert_ids=IDS.float()), TypeError, "expert_ids must be int32 or int64"),
        (lambda m: m(X, expert_ids=[1]), TypeError, "expert_ids must be a tensor, not list"),
        (lambda m: m(X, expert_ids=IDS, routing_weights=IDS), TypeError, "routing_weights must be floating"),
        (lambda m: with_mine()(X, expert_ids=IDS), ValueError, "Mine has a forward of its own"),
        (lambda m: m(X, expert_ids=IDS[..., :0]), ValueError, "k must be at least 1, not 0"),
        (
            lambda m: route_to(torch.zeros(2, E), IDS[0]),
            ValueError,
            r"\(T=2, E\) but expert_ids is \(T=5, k\)",
        ),
        (lambda m: hash_experts(9, 4, 5), ValueError, "top_k is 5 but num_experts is 4"),
        (lambda m: Forced("evenly"), ValueError, "unknown how 'evenly'; known: round_robin, random"),
        (lambda m: Router(H, E, K, jitter=1.0), ValueError, "jitter must be from 0 to below 1, not 1.0"),
        (
            lambda m: MoE(H, WIDTH, E, K, jitter=-0.1),
            ValueError,
            "jitter must be from 0 to below 1, not -0.1",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(MoE(H, WIDTH, E, K))


def test_an_expert_that_is_not_there(no_debug):
    """Said without debug mode on the CPU, compiled or not, by the layers that take ids."""
    ids = torch.tensor([[0, 1], [5, E]])
    x, message = torch.randn(2, H), f"expert_ids holds {E} but num_experts is {E}"
    moe = MoE(H, WIDTH, E, K)
    for layer in (moe, torch.compile(moe, backend="aot_eager")):
        with pytest.raises(ValueError, match=message):
            layer(x, expert_ids=ids)
    with pytest.raises(ValueError, match=message):
        OptimizedMoELayer(H, E, WIDTH)(x, ids, torch.ones(2, 2))


@pytest.mark.parametrize("how", ["given", "choice", "bias", "compiled"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_the_gradient_of_logits_far_apart(device, score, how):
    """By differences of the weights' gradients: nothing is lost where one weight is nearly 1."""
    gen = torch.Generator().manual_seed(1)
    z, d = torch.randn(40, 6, generator=gen).to(device), torch.randn(40, 2, generator=gen).to(device)
    z -= 15  # of which sigmoids and softplus make shares of 1e-6 and 1e-3
    z[:, 2] += 14
    ids = torch.tensor([2, 4], device=device).expand(40, 2)
    given = {"given": lambda z: route_to(z, ids, score=score, scale=3.0)}
    given["compiled"] = torch.compile(given["given"], fullgraph=True, backend="aot_eager")
    bias = torch.tensor([0.0, 0, 200, 0, 100, 0], device=device)
    given["bias"] = lambda z: route(z, 2, score=score, scale=3.0, selection_bias=bias.to(z.dtype))
    given["choice"] = lambda z: route(z, 2, score=score, scale=3.0, choice=Fixed(ids))

    def gradient(fn, z):
        z = z.clone().requires_grad_()
        return torch.autograd.grad(fn(z).routing_weights, z, d.to(z.dtype))[0][:, [2, 4]].double()

    got, want = gradient(given[how], z), gradient(given["given"], z.double())
    if score == "softmax":
        weights = torch.func.vjp(lambda z: given["given"](z).routing_weights, z)[1]
        assert ((weights(d)[0][:, [2, 4]] - want).abs() <= 1e-4 * want.abs()).all()
    assert ((got - want).abs() <= 2e-6 * want.abs()).all()


class Fixed(Choice):
    def __init__(self, ids):
        self.ids = ids

    def pick(self, ranked, top_k, mask):
        return self.ids.clone()


@pytest.mark.parametrize("score, renormalize", MODES)
def test_one_column(device, score, renormalize):
    """Of ids alone, and with weights, which need no score; a weight of 1 would train no router."""
    how = {"score": score, "renormalize": renormalize}
    moe, x = MoE(H, WIDTH, E, K, **how).to(device), torch.randn(T, H, device=device)
    ids, weights = torch.randint(E, (T, 1), device=device), torch.rand(T, 1, device=device)
    logits = torch.randn(T, E, device=device)
    assert torch.equal(route_to(logits, ids, weights, **how).routing_weights, weights)
    whole = moe(x, expert_ids=ids, routing_weights=torch.ones_like(weights))
    given = moe(x, expert_ids=ids, routing_weights=weights)
    torch.testing.assert_close(given, whole * weights, atol=1e-5, rtol=1e-5)
    if score != "topk_softmax":
        moe(x, expert_ids=ids).sum().backward()
        assert moe.router.weight.grad.count_nonzero()
        return
    for call in (lambda: moe(x, expert_ids=ids), lambda: route_to(logits, ids, **how)):
        with pytest.raises(
            ValueError, match=r"expert_ids is \(T, k=1\), .* pass routing_weights too, or use"
        ):
            call()
