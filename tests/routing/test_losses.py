"""The losses against their formulas written out, and their gradients."""

import math

import pytest
import torch

from moe_aiter.routing.losses import attach_loss, load_balance_loss, z_loss
from moe_aiter.routing.plan import make_plan
from moe_aiter.routing.router import route

SCORES = ("softmax", "sigmoid")


def routed(num_tokens=23, num_experts=6, top_k=2, score="softmax", device="cpu", dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_experts, generator=gen, dtype=torch.float64).to(device, dtype)
    return route(logits.requires_grad_(), top_k, score=score)


def balance_by_hand(scores, expert_ids, kept):
    """E * sum f_e P_e over the tokens `kept`, in Python floats."""
    num_experts = len(scores[0])
    choices = [e for t in kept for e in expert_ids[t] if e >= 0]
    loss = 0.0
    for e in range(num_experts):
        f = choices.count(e) / len(choices)
        p = sum(scores[t][e] / sum(scores[t]) for t in kept) / len(kept)
        loss += num_experts * f * p
    return loss


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_load_balance_by_hand(device, score, top_k):
    routing = routed(top_k=top_k, score=score, device=device)
    want = balance_by_hand(routing.scores.tolist(), routing.expert_ids.tolist(), range(23))
    loss = load_balance_loss(routing.scores, routing.expert_ids)
    assert loss.shape == () and loss.item() == pytest.approx(want, rel=1e-6)
    group_sizes = make_plan(routing.expert_ids, 6).group_sizes
    assert torch.equal(loss, load_balance_loss(routing.scores, group_sizes=group_sizes))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_load_balance_is_1_at_balance(device, score, top_k):
    # token t prefers experts t, t+1, ..., so each expert is chosen, and liked, equally often
    logits = torch.stack([torch.linspace(2, -2, 8).roll(t) for t in range(16)]).to(device)
    routing = route(logits, top_k, score=score)
    loss = load_balance_loss(routing.scores, routing.expert_ids)
    torch.testing.assert_close(loss, torch.ones((), device=device))


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_load_balance_is_e_when_one_expert_takes_all(device, num_tokens):
    logits = torch.zeros(num_tokens, 5, device=device)
    logits[:, 3] = 100.0
    routing = route(logits, 1)
    torch.testing.assert_close(load_balance_loss(routing.scores, routing.expert_ids).item(), 5.0)


def test_load_balance_does_not_depend_on_the_number_of_tokens(device):
    routing = routed(device=device)
    once = load_balance_loss(routing.scores, routing.expert_ids)
    twice = load_balance_loss(routing.scores.repeat(2, 1), routing.expert_ids.repeat(2, 1))
    torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("score", SCORES)
def test_load_balance_gradient_by_hand(device, score):
    routing = routed(score=score, device=device)
    scores = routing.scores.detach().requires_grad_()
    (dscores,) = torch.autograd.grad(load_balance_loss(scores, routing.expert_ids), scores)
    counts = routing.expert_ids.flatten().bincount(minlength=6).double()
    slope = 6 * counts / counts.sum() / 23  # of the loss in score[t, e] / sum(score[t])
    total = routing.scores.sum(1, keepdim=True)
    share = routing.scores / total
    want = (slope - (share * slope).sum(1, keepdim=True)) / total
    torch.testing.assert_close(dscores, want, check_dtype=False)


def test_load_balance_gradient_evens_the_load(device):
    routing = routed(num_tokens=400, device=device, dtype=torch.float32)
    logits = (routing.logits.detach() + torch.linspace(3, 0, 6, device=device)).requires_grad_()
    losses = []
    for _ in range(30):
        now = route(logits, 2)
        losses.append(load_balance_loss(now.scores, now.expert_ids))
        (dlogits,) = torch.autograd.grad(losses[-1], logits)
        logits = (logits.detach() - 400 * dlogits).requires_grad_()
    assert losses[0] > 1.5 and losses[-1] < 1.1


@pytest.mark.parametrize("score", SCORES)
def test_masked_tokens_do_not_count(device, score):
    routing = routed(score=score, device=device)
    mask = torch.arange(23, device=device) % 3 != 0
    kept = mask.nonzero().flatten()
    masked = load_balance_loss(routing.scores, routing.expert_ids, mask=mask)
    alone = load_balance_loss(routing.scores[kept], routing.expert_ids[kept])
    torch.testing.assert_close(masked, alone)
    torch.testing.assert_close(z_loss(routing.logits, mask), z_loss(routing.logits[kept]))
    for a, b in ((masked, alone), (z_loss(routing.logits, mask), z_loss(routing.logits[kept]))):
        grads = [torch.autograd.grad(v, routing.logits, retain_graph=True)[0] for v in (a, b)]
        torch.testing.assert_close(*grads)


def test_masked_nan_stays_out(device):
    """Of the value, and of what is handed back: 0 times NaN is not 0."""
    logits = routed(device=device).logits.detach()
    logits[5] = float("nan")
    scores = logits.softmax(1)
    mask = torch.arange(23, device=device) != 5
    expert_ids = route(logits, 2).expert_ids
    for loss, x in (
        (lambda s: load_balance_loss(s, expert_ids, mask=mask), scores),
        (lambda z: z_loss(z, mask), logits),
    ):
        x = x.detach().requires_grad_()
        value = loss(x)
        (dx,) = torch.autograd.grad(value, x)
        assert value.isfinite() and dx.isfinite().all() and dx[5].count_nonzero() == 0


def test_dropped_choices_are_no_choices(device):
    routing = routed(device=device)
    expert_ids = routing.expert_ids.clone()
    expert_ids[::4, 1] = -1
    loss = load_balance_loss(routing.scores, expert_ids)
    want = balance_by_hand(routing.scores.tolist(), expert_ids.tolist(), range(23))
    assert loss.item() == pytest.approx(want, rel=1e-6)


def test_z_loss_by_hand(device):
    logits = routed(device=device).logits
    rows = [math.log(sum(math.exp(z) for z in row)) for row in logits.tolist()]
    loss = z_loss(logits)
    assert loss.item() == pytest.approx(sum(v * v for v in rows) / 23)
    (dlogits,) = torch.autograd.grad(loss, logits)
    lse = logits.logsumexp(1, keepdim=True)
    torch.testing.assert_close(dlogits, 2 / 23 * lse * logits.softmax(1))


def test_attached_loss_is_added(device):
    x = torch.randn(4, 3, device=device, requires_grad=True)
    y = x.exp()
    out = attach_loss(y, x.square().sum())
    assert torch.equal(out, y)
    (dx,) = torch.autograd.grad((5 * out).sum(), x)
    torch.testing.assert_close(dx, 5 * y + 2 * x)


def test_gradcheck(device):
    routing = routed(num_tokens=5, score="sigmoid", device=device)
    mask = torch.tensor([True, True, False, True, True], device=device)
    assert torch.autograd.gradcheck(
        lambda s: load_balance_loss(s, routing.expert_ids, mask=mask), routing.scores
    )
    assert torch.autograd.gradcheck(lambda z: z_loss(z, mask), routing.logits)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_no_tokens_give_0(device, num_tokens):
    """No tokens at all, or none that counts."""
    routing = routed(num_tokens=num_tokens, device=device)
    mask = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    balance = load_balance_loss(routing.scores, routing.expert_ids, mask=mask)
    z = z_loss(routing.logits, mask)
    assert balance == 0 and z == 0
    if num_tokens == 0:
        assert load_balance_loss(routing.scores, routing.expert_ids) == 0 and z_loss(routing.logits) == 0
    (dlogits,) = torch.autograd.grad(balance + z, routing.logits)
    assert dlogits.count_nonzero() == 0


def test_half_precision_scores_are_summed_in_float32(device):
    routing = routed(num_tokens=4096, device=device, dtype=torch.float32)
    exact = load_balance_loss(routing.scores.half().double(), routing.expert_ids)
    loss = load_balance_loss(routing.scores.half(), routing.expert_ids)
    torch.testing.assert_close(loss, exact.float(), rtol=1e-5, atol=0)


def test_one_graph_for_any_number_of_tokens(device):
    torch.compiler.reset()

    def losses(logits):
        routing = route(logits, 2)
        return load_balance_loss(routing.scores, routing.expert_ids) + z_loss(routing.logits)

    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (3, 8, 21):
            logits = routed(num_tokens=num_tokens, device=device, dtype=torch.float32).logits
            got, want = compiled(logits), losses(logits)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in (got, want)))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda s, i, m: load_balance_loss(s), ValueError, "either expert_ids or group_sizes"),
        (lambda s, i, m: load_balance_loss(s, i, group_sizes=i[0]), ValueError, "either expert_ids or"),
        (lambda s, i, m: load_balance_loss(s, group_sizes=i[0], mask=m), ValueError, "mask needs expert_ids"),
        (lambda s, i, m: load_balance_loss(s, i[1:]), ValueError, r"\(T=4, E\) but expert_ids is \(T=3, k\)"),
        (
            lambda s, i, m: load_balance_loss(s, group_sizes=i[:, 0]),
            ValueError,
            r"E=5\) but group_sizes is \(E=4",
        ),
        (lambda s, i, m: load_balance_loss(s, group_sizes=i), ValueError, r"group_sizes must be \(E\)"),
        (lambda s, i, m: load_balance_loss(s[0], i), ValueError, r"scores must be \(T, E\)"),
        (lambda s, i, m: load_balance_loss(s, i, mask=m[1:]), ValueError, r"\(T=4, E\) but mask is \(T=3,\)"),
        (lambda s, i, m: z_loss(s, m[1:]), ValueError, r"logits is \(T=4, E\) but mask is \(T=3,\)"),
        (lambda s, i, m: z_loss(s, m.int()), TypeError, "mask must be bool, not torch.int32"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.rand(4, 5), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, dtype=torch.bool))


def test_ids_of_other_tokens_are_refused_under_a_mask():
    scores, mask = torch.rand(10, 8), torch.ones(10, dtype=torch.bool)
    for ids in (
        torch.arange(10) % 8,
        torch.zeros(1, 2, dtype=torch.long),
        torch.zeros(9, 2, dtype=torch.long),
    ):
        with pytest.raises(ValueError, match="expert_ids"):
            load_balance_loss(scores, ids, mask=mask)


def test_z_loss_of_half_precision_logits_is_summed_in_float32():
    logits = torch.full((10000, 4), 3.0, dtype=torch.float16)
    torch.testing.assert_close(z_loss(logits), z_loss(logits.float()))


def test_attach_loss_wants_a_scalar():
    with pytest.raises(TypeError, match="x must be a tensor, not list"):
        attach_loss([1.0], torch.ones(()))
    with pytest.raises(ValueError, match=r"loss must be a scalar, but it has shape \(3,\)"):
        attach_loss(torch.ones(2), torch.ones(3))
