"""The router's gradient of all experts, against a dense sum with detached numbers, by autograd."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_aiter import Capacity, LoRAExperts, MoE, TopP, ZeroCompute, use_main_grad

H, WIDTH, E, K, T = 12, 8, 6, 2, 19
MODES = [
    {"score": "softmax", "renormalize": False},
    {"score": "softmax", "renormalize": True, "scale": 2.5},
    {"score": "sigmoid", "renormalize": True, "scale": 1.5, "selection_bias": True},
    {"score": "topk_softmax"},
]


def build(device="cpu", top_k=K, **options):
    return MoE(H, WIDTH, E, top_k, dense_router_gradient=True, device=device, **options)


def by_hand(moe, x):
    """sum over chosen of s_e y_e + (dense - dense.detach()), y_e constants there: (T, H)."""
    routing = moe.router(x)
    ids, s = routing[:2]
    p, k = routing.scores, ids.shape[1]
    chosen = torch.zeros_like(p).scatter(1, ids, 1.0)
    norm = (
        (p * chosen).sum(1, keepdim=True) if moe.router.renormalize and k > 1 else torch.ones_like(p[:, :1])
    )
    others = p / norm.detach() * (1 - chosen) * moe.router.scale
    out = 0
    for e in range(E):
        gate, up = (x @ moe.experts.gate_up[e].mT).chunk(2, 1)
        y = (torch.nn.functional.silu(gate) * up) @ moe.experts.down[e].mT
        dense = others[:, e : e + 1] * y.detach()
        out = out + (s * (ids == e)).sum(1, keepdim=True) * y + dense - dense.detach()
    return out


def gradients(out, x, moe, dout):
    return torch.autograd.grad(out, [x, *moe.parameters()], dout)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_values_and_gradients(device, mode):
    moe = build(device, dtype=torch.float64, **mode)
    x = torch.randn(T, H, device=device, dtype=torch.float64, requires_grad=True)
    dout, got, want = torch.randn_like(x), moe(x), by_hand(moe, x)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(gradients(out, x, moe, dout) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    plain = copy.deepcopy(moe)
    plain.dense_router_gradient = False
    assert torch.equal(plain(x), got)  # forward is the same to the bit
    sparse = gradients(plain(x), x, plain, dout)
    mine = dict(
        zip(["x", *(n for n, _ in moe.named_parameters())], gradients(moe(x), x, moe, dout), strict=True)
    )
    assert not torch.allclose(mine["router.weight"], sparse[1])
    torch.testing.assert_close(mine["experts.down"], sparse[-1])


@pytest.mark.parametrize("top_k", [1, E])
def test_few_and_all(device, top_k):
    moe = build(device, top_k, renormalize=False, dtype=torch.float64)
    x = torch.randn(T, H, device=device, dtype=torch.float64, requires_grad=True)
    dout = torch.randn_like(x)
    for a, b in zip(*(gradients(out, x, moe, dout) for out in (moe(x), by_hand(moe, x))), strict=True):
        torch.testing.assert_close(a, b)
    empty = moe(x[:0])
    empty.sum().backward()
    assert empty.shape == (0, H) and not moe.router.weight.grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(device, reentrant):
    moe, x = build(device, load_balance_coef=0.1), torch.randn(T, H, device=device, requires_grad=True)
    dout = torch.randn_like(x)
    moe(x).backward(dout)
    want = [x.grad, *(p.grad for p in moe.parameters())]
    x.grad = None
    moe.zero_grad()
    checkpoint(moe, x, use_reentrant=reentrant).backward(dout)
    for a, b in zip([x.grad, *(p.grad for p in moe.parameters())], want, strict=True):
        torch.testing.assert_close(a, b)


def test_padding(device):
    """NaN at padding and in its gradient reaches nothing."""
    moe, mask = build(device, latent=4), torch.rand(T, device=device) > 0.4
    x = torch.randn(T, H, device=device)
    dout = torch.randn_like(x)

    def run(fill):
        given = x.masked_fill(~mask[:, None], fill).requires_grad_()
        moe.zero_grad()
        moe(given, mask=mask).backward(dout.masked_fill(~mask[:, None], fill))
        return [given.grad, *(p.grad.clone() for p in moe.parameters())]

    for a, b in zip(run(0.0), run(float("nan")), strict=True):
        torch.testing.assert_close(a, b)


def test_latent_lora_main_grad_and_autocast(device):
    moe, x = build(device, latent=4), torch.randn(T, H, device=device)
    plain = copy.deepcopy(moe)
    plain.dense_router_gradient = False
    use_main_grad(moe, torch.optim.SGD(moe.parameters(), 0.1))
    moe(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(moe.experts.down.main_grad, plain.experts.down.grad)
    torch.testing.assert_close(moe.from_latent.weight.grad, plain.from_latent.weight.grad)
    assert not torch.allclose(moe.router.weight.grad, plain.router.weight.grad)
    moe = build(device)
    moe.experts = LoRAExperts(moe.experts, rank=2)
    moe(x).square().sum().backward()
    whole = moe.router.weight.grad.clone()
    moe.zero_grad()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        moe(x).float().square().sum().backward()
    torch.testing.assert_close(moe.router.weight.grad, whole, rtol=0.1, atol=0.05 * whole.abs().max().item())


def test_a_given_routing(device):
    moe, x = build(device, renormalize=False), torch.randn(T, H, device=device)
    ids = moe(x, return_routing=True)[1].routing.expert_ids
    grads = []
    for given in ({}, {"expert_ids": ids}):
        moe.zero_grad()
        moe(x, **given).square().sum().backward()
        grads.append(moe.router.weight.grad.clone())
    torch.testing.assert_close(*grads)
    moe.zero_grad()
    moe(x, expert_ids=ids, routing_weights=torch.rand(T, K, device=device)).sum().backward()
    assert moe.router.weight.grad is None
    moe.eval()
    moe(x).square().sum().backward()  # without the estimator
    assert not torch.allclose(moe.router.weight.grad, grads[0])


def test_refusals(monkeypatch):
    options = {"choice": TopP(0.5), "capacity": Capacity(1.0), "zero_compute": ZeroCompute(1)}
    for name, value in options.items():
        with pytest.raises(ValueError, match=f"dense_router_gradient=True, but {name} is"):
            build(**{name: value})
    moe, x = build(), torch.randn(T, H)
    with pytest.raises(Exception, match=r"dense_router_gradient does not work under torch.compile"):
        torch.compile(moe, fullgraph=True, backend="aot_eager")(x)
    monkeypatch.setattr(moe.experts, "dispatcher", lambda experts, x, s, plan: x)
    with pytest.raises(NotImplementedError, match="experts that ranks share"):
        moe(x)
