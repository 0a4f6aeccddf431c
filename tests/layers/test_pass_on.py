"""A product adds the router's gradient of the tokens to that of the experts, where nobody watches."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter import Experts, MoE
from moe_aiter.layers import moe as module
from moe_aiter.routing import router

H, WIDTH, E, K, T = 16, 12, 6, 2, 13


@pytest.fixture
def added(monkeypatch):
    """Whether each product of a backward pass was added to a gradient."""
    found, product = [], router.add_logits_product

    def watched(out, *rest):
        before = None if out is None else out.data_ptr()
        dx = product(out, *rest)
        found.append(out is not None and dx.data_ptr() == before)
        return dx

    monkeypatch.setattr(router, "add_logits_product", watched)
    return found


def gradients(moe, x, run=None):
    x = x.detach().requires_grad_()
    moe.zero_grad()
    out = (moe if run is None else run)(x)
    out.float().square().sum().backward()
    return [x.grad, *(None if p.grad is None else p.grad.clone() for p in moe.parameters())]


def apart(moe, x, monkeypatch, **how):
    """The same with two gradients that autograd adds up."""
    with monkeypatch.context() as patch:
        patch.setattr(MoE, "is_private", lambda *_: False)
        return gradients(moe, x, **how)


def assert_same(got, want, **close):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **close)


OPTIONS = {
    "plain": {},
    "bias and shared": {"bias": True, "shared_intermediate": 8},
    "losses": {"load_balance_coef": 0.1, "z_loss_coef": 0.01},
    "recompute": {"recompute": "z"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("frozen", [None, "router", "experts"])
def test_the_sum_of_both(device, options, frozen, added, monkeypatch):
    moe, x = MoE(H, WIDTH, E, K, device=device, **options), torch.randn(2, T, H, device=device)
    if frozen:
        moe.get_submodule(frozen).requires_grad_(False)
    want = apart(moe, x, monkeypatch)
    assert_same(gradients(moe, x), want)
    assert added == [False, True]


def test_a_leaf_without_gradient(device, added):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device)
    moe(x).square().sum().backward()
    assert added == [] and all(p.grad is not None for p in moe.parameters())
    assert not moe.requires_grad_(False)(x).requires_grad


def test_one_of_the_two_alone(device, monkeypatch):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device)

    def logits(x):
        return moe(x, return_routing=True)[1].routing.logits

    assert_same(gradients(moe, x, logits), apart(moe, x, monkeypatch, run=logits))
    one = MoE(
        H, WIDTH, E, 1, device=device
    )  # a single weight is constant: its router has a gradient of zeros
    assert_same(gradients(one, x), apart(one, x, monkeypatch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(device, dtype, added, monkeypatch):
    """The product of logits in float32 is added in the dtype of x where it is that of a 16-bit GEMM."""
    moe, x = MoE(H, WIDTH, E, K, device=device, dtype=dtype), torch.randn(T, H, device=device).to(dtype)
    close = {} if dtype == torch.float64 else {"atol": 2e-2, "rtol": 2e-2}
    assert_same(gradients(moe, x), apart(moe, x, monkeypatch), **close)
    assert added[0] == (dtype == torch.float64 or device.type == "cuda")


def test_a_router_in_float32(device, added, monkeypatch):
    moe, x = MoE(H, WIDTH, E, K, device=device).bfloat16(), torch.randn(T, H, device=device).bfloat16()
    moe.router.float()
    assert_same(gradients(moe, x), apart(moe, x, monkeypatch), atol=2e-2, rtol=2e-2)
    assert added == [False, False]


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_autocast(device, inner, monkeypatch):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device).to(inner)

    def run(x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return moe(x)

    close = {"atol": 2e-2, "rtol": 2e-2} if inner == torch.bfloat16 else {}
    assert_same(gradients(moe, x, run), apart(moe, x, monkeypatch, run=run), **close)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(device, use_reentrant, added, monkeypatch):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device)
    got = gradients(moe, x, lambda x: checkpoint(moe, x, use_reentrant=use_reentrant))
    assert added == [True]
    assert_same(got, apart(moe, x, monkeypatch))


def test_a_second_backward_pass(device, added, monkeypatch):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device, requires_grad=True)
    out, dout = moe(x), torch.randn(T, H, device=device)
    kept = dout.clone()
    first = torch.autograd.grad(out, x, dout, retain_graph=True)
    second = torch.autograd.grad(out, x, dout)
    assert_same(first, second)
    assert added == [True, True] and torch.equal(dout, kept)


def test_second_derivatives(device, added):
    """Where a graph of the gradient is made, nothing in it is overwritten."""

    def fn(x, weight, bias):
        logits, tokens = router.LogitsAndTokens.apply(x, weight, bias)
        return logits.square().sum(), tokens.pow(3)

    x, weight, bias = (torch.randn(*s, device=device, dtype=torch.float64) for s in ((3, 4), (2, 4), (2,)))
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(fn, inputs)
    assert any(added)
    added.clear()
    assert torch.autograd.gradgradcheck(fn, inputs)
    torch.autograd.grad([fn(*inputs)[0], fn(*inputs)[1].sum()], x, create_graph=True)
    assert added[-1] is False


def test_compiled(device, added, monkeypatch):
    torch.compiler.reset()
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert_same(gradients(moe, x, compiled), apart(moe, x, monkeypatch))


class Other(nn.Module):
    """Experts of one's own, whose gradient of the tokens is that of the output."""

    def forward(self, x, routing_weights, plan):
        return x + routing_weights.square().sum()


def keep(module, inputs):
    inputs[0].register_hook(lambda dx: None)


WATCHED = {
    "experts of one's own": lambda moe: setattr(moe, "experts", Other()),
    "a hook before the experts": lambda moe: moe.experts.register_forward_pre_hook(keep),
    "a hook after the router": lambda moe: moe.router.register_forward_hook(lambda *_: None),
    "an instance's forward": lambda moe: setattr(moe.experts, "forward", moe.experts.forward),
    "a compiled router": lambda moe: moe.router.compile(backend="eager"),
}


@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
def test_a_gradient_that_others_see_is_left_alone(device, watch, added):
    torch.compiler.reset()
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device, requires_grad=True)
    watch(moe)
    dout = torch.randn(T, H, device=device)
    before = dout.clone()
    moe(x).backward(dout)
    assert not any(added) and torch.equal(dout, before)


@pytest.mark.parametrize("method", ["forward", "__call__"])
def test_a_class_that_was_given_another_method(device, method, added, monkeypatch):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device, requires_grad=True)
    other = Other.forward
    monkeypatch.setattr(Experts, method, lambda self, *inputs: other(self, *inputs), raising=False)
    dout = torch.randn(T, H, device=device)
    before = dout.clone()
    moe(x).backward(dout)
    assert not any(added) and torch.equal(dout, before)


def test_a_global_hook(device, added):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(T, H, device=device, requires_grad=True)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert module.is_changed(moe.router, module.ROUTER_CALL)
        moe(x).sum().backward()
    finally:
        handle.remove()
    assert added == [False]


@pytest.mark.parametrize("of", ["the object", "the class", "a subclass"])
def test_another_choice_counts_without_gradients_too(device, of, monkeypatch):
    """Few tokens are routed by a launch of their own only if the router chooses as it does here."""
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(3, H, device=device)

    def twice(self, *inputs, **how):
        routing = choose(self, *inputs, **how)
        return routing._replace(routing_weights=2 * routing.routing_weights)

    with torch.no_grad():
        once, choose = moe(x), router.Router.choose
        assert moe.plans_few(x, None, return_routing=False)
        if of == "the object":
            moe.router.choose = twice.__get__(moe.router)
        elif of == "the class":
            monkeypatch.setattr(router.Router, "choose", twice)
        else:
            moe.router.__class__ = type("Twice", (router.Router,), {"choose": twice})
        assert not moe.plans_few(x, None, return_routing=False)
        torch.testing.assert_close(moe(x), 2 * once)
