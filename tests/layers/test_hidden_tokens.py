"""What a mask hides matters nowhere: not in outputs, losses, gradients or statistics."""

import pytest
import torch

from moe_aiter import (
    Capacity,
    ExpertChoice,
    GroupLimit,
    MoE,
    Monitor,
    Router,
    Sinkhorn,
    TokenRounding,
    TopP,
    ZeroCompute,
    route,
)

H, E, T = 16, 8, 12
COEFS = {
    "load_balance_coef": 0.1,
    "sequence_balance_coef": 0.1,
    "global_balance_coef": 0.1,
    "z_loss_coef": 0.1,
}
LAYERS = {
    "losses": COEFS,
    "shared expert": COEFS | {"shared_intermediate": 4, "shared_gate": True, "bias": True},
    "capacity": {"capacity": Capacity(0.5, drop="probability")},
    "sigmoid and bias": {"score": "sigmoid", "selection_bias": True},
    "groups": {"choice": GroupLimit(4, 2)},
    "top-p": {"choice": TopP(0.5)},
    "Sinkhorn": {"choice": Sinkhorn()},
    "expert choice": {"choice": ExpertChoice(), "renormalize": False},
    "rounding": {"choice": TokenRounding(4)},
    "jitter": {"jitter": 1e-3},
    "zero compute": COEFS | {"zero_compute": ZeroCompute(2, 1), "capacity": Capacity(0.5)},
    "latent": {"latent": 4, "shared_intermediate": 4},
}
GARBAGE = {"NaN": float("nan"), "inf": float("inf"), "large": 3e38}


def run(moe, x, mask, **kwargs):
    """The visible outputs, and the gradients of x and of each parameter."""
    torch.manual_seed(1)  # for jitter
    moe.zero_grad()
    x = x.clone().requires_grad_()
    out = moe(x, mask=mask, **kwargs)
    out[mask].square().sum().backward()
    return [out, x.grad] + [p.grad for p in moe.parameters()]


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_values_and_gradients_of_a_layer(device, kind, garbage):
    moe = MoE(H, 8, E, 2, device=device, **kind)
    x = torch.randn(2, T // 2, H, device=device)
    mask = torch.rand(2, T // 2, device=device) > 0.4
    expected = run(moe, x, mask)
    if moe.load is not None:
        moe.load.zero_()
    found = run(moe, x.masked_fill(~mask[..., None], garbage), mask)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert not found[0][~mask].any() and not found[1][~mask].any()


def test_a_routing_that_is_given(device):
    moe, mask = MoE(H, 8, E, 2, device=device), torch.rand(T, device=device) > 0.4
    x, ids = torch.randn(T, H, device=device), torch.randint(0, E, (T, 2), device=device)
    expected = run(moe, x, mask, expert_ids=ids)
    found = run(moe, x.masked_fill(~mask[:, None], float("nan")), mask, expert_ids=ids)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    weights = torch.rand(T, 2, device=device).masked_fill(~mask[:, None], float("nan"))
    out = moe(x, mask=mask, expert_ids=ids, routing_weights=weights)
    assert out.isfinite().all() and not out[~mask].any()


@pytest.mark.parametrize("newest", [False, True])
def test_a_gradient_that_is_nan_where_the_output_is_hidden(device, newest):
    more = {"latent": 4, "zero_compute": ZeroCompute(4)} if newest else {"shared_intermediate": 4}
    moe = MoE(H, 8, E, 2, **more, device=device)
    x = torch.randn(T, H, device=device, requires_grad=True)
    mask = torch.rand(T, device=device) > 0.4
    moe(x, mask=mask).backward(torch.ones_like(x).masked_fill(~mask[:, None], float("nan")).detach())
    assert all(t.grad.isfinite().all() for t in (x, *moe.parameters()))


def test_the_router_alone(device):
    router, mask = Router(H, E, 2, bias=True, device=device), torch.rand(T, device=device) > 0.4
    x = torch.randn(T, H, device=device).masked_fill(~mask[:, None], float("nan")).requires_grad_()
    routing = router(x, mask=mask)
    routing.routing_weights.square().sum().backward()
    assert (routing.expert_ids[~mask] == -1).all() and routing.logits.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (x, router.weight, router.bias)) and not x.grad[~mask].any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_logits(device, score):
    mask = torch.rand(T, device=device) > 0.4
    logits = torch.randn(T, E, device=device).masked_fill(~mask[:, None], float("nan")).requires_grad_()
    routing = route(logits, 2, score=score, mask=mask)
    (routing.routing_weights.square().sum() + routing.scores.square().sum()).backward()
    assert logits.grad.isfinite().all() and not logits.grad[~mask].any()


def test_a_router_of_another_class(device):
    class Other(Router):
        def forward(self, x):
            return super().forward(x)

    moe = MoE(H, 8, E, 2, device=device)
    moe.router = Other(H, E, 2, device=device)
    mask = torch.rand(T, device=device) > 0.4
    found = run(moe, torch.randn(T, H, device=device).masked_fill(~mask[:, None], float("nan")), mask)
    assert all(t.isfinite().all() for t in found)


def test_statistics(device):
    moe, mask = MoE(H, 8, E, 2, device=device), torch.rand(T, device=device) > 0.4
    x = torch.randn(T, H, device=device)
    found = []
    for garbage in (0.0, float("nan")):
        with Monitor(moe) as monitor:
            moe(x.masked_fill(~mask[:, None], garbage), mask=mask)
            found.append(monitor.read())
    assert repr(found[0]) == repr(found[1])


KINDS = {
    "capacity": {"capacity": Capacity(0.7)},
    "capacity by weight": {"capacity": Capacity(0.7, drop="probability")},
    "expert choice": {"choice": ExpertChoice(), "renormalize": False},
    "rounding": {"choice": TokenRounding(4)},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_hidden_tokens_do_not_count(device, kind):
    """A padded batch is routed as its visible tokens alone are."""
    moe, mask = MoE(H, 8, E, 2, device=device, **kind), torch.rand(40, device=device) > 0.5
    x = torch.randn(40, H, device=device)
    _, (padded, _) = moe(x, mask=mask, return_routing=True)
    _, (alone, _) = moe(x[mask], return_routing=True)
    assert torch.equal(padded.expert_ids[mask], alone.expert_ids)
