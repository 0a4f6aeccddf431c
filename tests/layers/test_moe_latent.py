"""Experts that act on latent vectors: NVIDIA Nemotron 3's layer, by its formula; and where else it goes."""

import copy

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients
from layers.double_loop import experts_loop, mlp, router_loop
from torch.utils.checkpoint import checkpoint

from moe_aiter import Capacity, LoRAExperts, MoE, ZeroCompute, use_main_grad

H, L, WIDTH, E, K, T = 12, 5, 8, 6, 2, 13
NEMOTRON = {"activation": "relu2", "score": "sigmoid", "scale": 2.5, "shared_intermediate": 7}


def build(device="cpu", **options):
    return MoE(H, WIDTH, E, K, latent=L, device=device, **options)


def loop(x, params):
    """from_latent(sum_j s_j expert_j(to_latent(x))) + shared(x); the router sees x."""
    ids, weights, _ = router_loop(x, params, K, "sigmoid", scale=2.5)
    inside = {k.removeprefix("experts."): v for k, v in params.items() if k.startswith("experts.")}
    out = experts_loop(x @ params["to_latent.weight"].mT, ids, weights, inside, "relu2")
    shared = params["shared.gate_up.weight"], params["shared.down.weight"]
    out = out @ params["from_latent.weight"].mT
    return out + torch.stack([mlp(row, *shared, None, None, "relu2") for row in x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients(device, dtype):
    moe, x = build(device, **NEMOTRON).to(dtype), torch.randn(T, H, device=device).to(dtype)
    names = [name for name, _ in moe.named_parameters()]

    def ours(x, *params):
        return torch.func.functional_call(moe, dict(zip(names, params, strict=True)), (x,))

    def theirs(x, *params):
        return loop(x, dict(zip(names, params, strict=True)))

    floor = 1e-6 if dtype == torch.float32 else 1e-3
    assert_as_good_as_torch(with_gradients(ours), with_gradients(theirs), x, *moe.parameters(), floor=floor)


def test_parameters(device):
    moe = build(device, bias=True)
    shapes = {name: tuple(p.shape) for name, p in moe.named_parameters()}
    assert shapes["experts.gate_up"] == (E, 2 * WIDTH, L) and shapes["experts.down"] == (E, L, WIDTH)
    assert shapes["to_latent.weight"] == (L, H) and shapes["from_latent.weight"] == (H, L)
    assert shapes["router.weight"] == (E, H) and not any("latent.bias" in name for name in shapes)
    before = copy.deepcopy(moe.state_dict())
    moe.reset_parameters()
    assert not any(torch.equal(before[name], p) for name, p in moe.named_parameters())


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "compiled"])
def test_checkpointed_and_compiled(device, how):
    torch.compiler.reset()
    options = NEMOTRON | {"load_balance_coef": 0.1, "capacity": Capacity(0.8)}
    moe, x = build(device, **options), torch.randn(T, H, device=device)
    run = {
        "reentrant": lambda x: checkpoint(moe, x, use_reentrant=True),
        "non-reentrant": lambda x: checkpoint(moe, x, use_reentrant=False),
        "compiled": torch.compile(moe, fullgraph=True, backend="aot_eager"),
    }[how]
    results = []
    for fn in (moe, run):
        moe.zero_grad()
        given = x.clone().requires_grad_()
        out = fn(given)
        out.square().sum().backward()
        results.append([out, given.grad, *(p.grad for p in moe.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_identity_experts_give_the_token_itself(device):
    moe = build(device, zero_compute=ZeroCompute(1), renormalize=False)
    x, ids = torch.randn(T, H, device=device), torch.full((T, 1), E, device=device)
    torch.testing.assert_close(moe(x, expert_ids=ids, routing_weights=torch.full_like(x[:, :1], 0.5)), x / 2)


def test_main_grad_lora_and_autocast(device):
    moe, x = build(device, **NEMOTRON), torch.randn(T, H, device=device)
    want = torch.autograd.grad(moe(x).square().sum(), moe.experts.down)[0]
    use_main_grad(moe, torch.optim.SGD(moe.parameters(), 0.1))
    moe(x).square().sum().backward()
    torch.testing.assert_close(moe.experts.down.main_grad, want)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert moe(x).dtype == torch.bfloat16
    moe.experts = LoRAExperts(moe.experts, rank=2)
    moe(x).square().sum().backward()
    assert moe.experts.down_lora.B.grad is not None and moe.to_latent.weight.grad is not None


@pytest.mark.parametrize("shape", [(H,), (0, H), (2, 1, H)], ids=str)
def test_few_tokens(device, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    out = build(device, **NEMOTRON)(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


def test_errors():
    for latent, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="latent"):
            MoE(H, WIDTH, E, K, latent=latent)
    with pytest.raises(TypeError, match=r"x is torch.float64 but to_latent is torch.float32"):
        build()(torch.randn(T, H, dtype=torch.float64))
