"""Without a switch every gradient of every path has the same bits in each run; torch's own agrees."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_aiter import Capacity, ExpertChoice, GroupLimit, LoRAExperts, Sinkhorn, TokenRounding, TopP
from moe_aiter.layers.moe import MoE

H, WIDTH, E, K, T = 64, 48, 12, 3, 300
LOSSES = {
    "load_balance_coef": 0.1,
    "sequence_balance_coef": 0.1,
    "global_balance_coef": 0.1,
    "z_loss_coef": 0.01,
}
FULL = {"bias": True, "shared_intermediate": 32, "shared_gate": True, **LOSSES}
PATHS = {
    "plain": {},
    "full": FULL,
    "without z": FULL | {"recompute": "z"},
    "in chunks": FULL | {"row_chunks": 2},
    "relu2": FULL | {"activation": "relu2"},
    "interleaved": {"interleaved": True, "activation": "swiglu_oai"},
    "probabilities": FULL | {"renormalize": False},
    "gpt-oss": {"score": "topk_softmax"},
    "sigmoid": FULL | {"score": "sigmoid", "selection_bias": True, "choice": GroupLimit(4, 2)},
    "sqrt_softplus": FULL | {"score": "sqrt_softplus"},
    "capacity": FULL | {"capacity": Capacity(0.8, "probability")},
    "top-p": FULL | {"choice": TopP(0.4)},
    "expert choice": FULL | {"choice": ExpertChoice(5), "renormalize": False},
    "rounding": FULL | {"choice": TokenRounding(16, "nearest", 3)},
    "sinkhorn": FULL | {"choice": Sinkhorn(4)},
}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def same_twice(step):
    first, second = step(), step()
    for (name, a), b in zip(first.items(), second.values(), strict=True):
        assert a is not None and a.count_nonzero() > 0, name
        assert torch.equal(a, b), name


def run(moe, x, **given):
    if moe.load is not None:
        moe.load.zero_()
    x = x.detach().requires_grad_()
    out, (routing, _) = moe(x, return_routing=True, **given)
    weights = routing.routing_weights
    weights.retain_grad()
    moe.zero_grad()
    out.float().square().sum().backward()
    grads = {name: p.grad for name, p in moe.named_parameters() if p.requires_grad}
    return {"out": out, "x": x.grad, "routing_weights": weights.grad} | grads


@pytest.mark.parametrize("switched", [False, True], ids=["as it is", "torch's switch"])
@pytest.mark.parametrize("path", PATHS)
def test_every_gradient(device, path, switched, request):
    if switched:
        request.getfixturevalue("deterministic")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    moe = MoE(H, WIDTH, E, K, device=device, dtype=dtype, **PATHS[path])
    x = torch.randn(2, T // 2, H, device=device, dtype=dtype)
    mask = torch.rand(2, T // 2, device=device) < 0.9
    same_twice(lambda: run(moe, x, mask=mask))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(device, deterministic, reentrant):
    moe = MoE(H, WIDTH, E, K, device=device, **FULL)
    x = torch.randn(T, H, device=device)

    def step():
        moe.load.zero_()
        moe.zero_grad()
        given = x.clone().requires_grad_()
        checkpoint(moe, given, use_reentrant=reentrant).square().sum().backward()
        return {"x": given.grad} | {name: p.grad for name, p in moe.named_parameters()}

    same_twice(step)


def test_main_gradients(device, deterministic):
    moe, x = MoE(H, WIDTH, E, K, device=device), torch.randn(2, T, H, device=device)

    def step():
        for p in moe.experts.parameters():
            p.main_grad = torch.zeros_like(p)
        for micro_batch in x:
            moe(micro_batch).square().sum().backward()
        return {name: p.main_grad for name, p in moe.experts.named_parameters()}

    same_twice(step)


def test_adapters(device, deterministic):
    moe = MoE(H, WIDTH, E, K, device=device)
    moe.experts = LoRAExperts(moe.experts, rank=4).to(device)
    with torch.no_grad():
        for p in moe.experts.parameters():
            p.add_(0.01 * torch.randn_like(p))
    x = torch.randn(T, H, device=device)
    same_twice(lambda: run(moe, x))
