"""The MoE layer inside what people train with: compile, autocast, checkpointing, accumulation, a loop."""

import copy

import pytest
import torch
from check import few
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_aiter.layers.moe import MoE

H, WIDTH, E, K, T = 16, 12, 6, 2, 13
FULL = {
    "bias": True,
    "shared_intermediate": 8,
    "shared_gate": True,
    "load_balance_coef": 0.1,
    "z_loss_coef": 0.01,
}


def build(device, **options):
    return MoE(H, WIDTH, E, K, device=device, **options)


def gradients(fn, x, moe):
    x = x.detach().requires_grad_()
    out = fn(x)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *moe.parameters()])


def assert_same(got, want, **close):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **close)


SIGMOID = FULL | {"score": "sigmoid"}


@pytest.mark.parametrize("options", few([{}, FULL, SIGMOID], SIGMOID), ids=["plain", "full", "sigmoid"])
def test_one_graph_for_any_number_of_tokens(device, options):
    torch.compiler.reset()
    moe = build(device, **options)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (T, 8, 31):
            x = torch.randn(num_tokens, H, device=device)
            assert_same(gradients(compiled, x, moe), gradients(moe, x, moe))


def test_compiled_with_routing_returned(device):
    torch.compiler.reset()
    moe = build(device)
    x = torch.randn(2, 5, H, device=device)
    out, (routing, plan) = torch.compile(moe, fullgraph=True, backend="aot_eager")(x, return_routing=True)
    want, (want_routing, want_plan) = moe(x, return_routing=True)
    assert_same([out, *routing, *plan], [want, *want_routing, *want_plan])


def test_compiled_with_main_grad(device):
    torch.compiler.reset()
    moe = build(device)
    x = torch.randn(T, H, device=device)
    moe(x).square().sum().backward()
    want = {name: p.grad for name, p in moe.named_parameters()}
    moe.zero_grad()
    for p in moe.experts.parameters():
        p.main_grad = torch.zeros_like(p)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(x).square().sum().backward()
    for name, p in moe.named_parameters():
        got = p.main_grad if name.startswith("experts") else p.grad
        torch.testing.assert_close(got, 2 * want[name])
        assert (p.grad is None) == name.startswith("experts")


def test_compiled_under_autocast(device):
    torch.compiler.reset()
    moe = build(device, **FULL)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x = torch.randn(T, H, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got, want = compiled(x), moe(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_behaves_as_for_linear_layers(dtype, device):
    """Lower-precision experts between float32 leaves; the router chooses as without autocast."""
    moe = build(device, **FULL)
    x = torch.randn(T, H, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype):
        out, (routing, _) = moe(x, return_routing=True)
    exact, (plain, _) = moe(x, return_routing=True)
    assert out.dtype == dtype
    for a, b in zip(routing, plain, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.02)
    out.sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in moe.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(device, use_reentrant):
    moe = build(device, **FULL)
    x = torch.randn(T, H, device=device)
    want = gradients(moe, x, moe)
    x.requires_grad_()
    out = checkpoint(moe, x, use_reentrant=use_reentrant)
    out.square().sum().backward()  # reentrant checkpointing does not allow torch.autograd.grad
    # not to the bit: without gradients the CPU keeps z elsewhere, and its products depend on the alignment
    assert_same((out, x.grad, *(p.grad for p in moe.parameters())), want)


def test_one_layer_twice_in_a_graph(device):
    moe = build(device, **FULL)
    twin = copy.deepcopy(moe)
    x = torch.randn(T, H, device=device)
    got = gradients(lambda x: moe(moe(x)), x, moe)
    first = x.clone().requires_grad_()
    out = twin(moe(first))
    grads = torch.autograd.grad(out.square().sum(), [first, *moe.parameters(), *twin.parameters()])
    count = len(list(moe.parameters()))
    summed = [a + b for a, b in zip(grads[1 : 1 + count], grads[1 + count :], strict=True)]
    assert_same(got, [out.detach(), grads[0], *summed])


def test_frozen_experts_and_frozen_router(device):
    moe = build(device, **FULL)
    x = torch.randn(T, H, device=device)
    want = dict(zip(["out", "x", *dict(moe.named_parameters())], gradients(moe, x, moe), strict=True))
    for part in ("experts", "router"):
        moe.requires_grad_(True)
        moe.get_submodule(part).requires_grad_(False)
        x = x.detach().requires_grad_()
        moe(x).square().sum().backward()
        torch.testing.assert_close(x.grad, want["x"])
        for name, p in moe.named_parameters():
            if name.startswith(part):
                assert p.grad is None
            else:
                torch.testing.assert_close(p.grad, want[name])
        moe.zero_grad()


def test_inputs_without_gradient(device):
    moe = build(device, **FULL)
    x = torch.randn(T, H, device=device)
    moe(x).square().sum().backward()
    want = gradients(moe, x, moe)[2:]
    assert_same([p.grad for p in moe.parameters()], want)
    with torch.inference_mode():
        assert torch.equal(moe(x), moe(x))


def test_main_grad_under_autocast(device):
    """What mixed-precision training with accumulation does: float32 leaves and buffers, two micro-batches."""
    moe = build(device)
    weights = [moe.experts.gate_up, moe.experts.down]
    x = torch.randn(2, T, H, device=device)

    def step():
        for micro_batch in x:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                out = moe(micro_batch)
            out.float().square().sum().backward()

    step()
    want = [w.grad for w in weights]
    moe.zero_grad()
    for w in weights:
        w.main_grad = torch.zeros_like(w)
    step()
    assert all(w.grad is None for w in weights) and moe.router.weight.grad is not None
    assert_same([w.main_grad for w in weights], want, rtol=0.02, atol=0.02)


def test_two_runs_give_the_same_bits(device):
    moe = build(device, **FULL)
    x = torch.randn(64, H, device=device)
    runs = [gradients(moe, x, moe) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.norm = nn.LayerNorm(H, device=device)
        self.moe = build(device, load_balance_coef=0.01)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def test_a_training_loop_learns(device):
    """Three blocks, AdamW, clipping, two micro-batches a step: the loss falls to a tenth."""
    net = nn.Sequential(*(Block(device) for _ in range(3)), nn.Linear(H, 1, device=device))
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    x = torch.randn(2, 64, 4, H, device=device)
    y = (x[..., :1] * x[..., 1:2]).sin() + x[..., 2:3].abs()
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = sum(nn.functional.mse_loss(net(a), b) for a, b in zip(x, y, strict=True)) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
