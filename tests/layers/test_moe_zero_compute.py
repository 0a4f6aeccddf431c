"""An MoE with experts without weights, against the sum over a token's choices; and where else it goes."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_aiter import (
    Capacity,
    LoRAExperts,
    MoE,
    Monitor,
    ZeroCompute,
    balance_step,
    load_balance_loss,
    record_routes,
    replay_routes,
    use_main_grad,
)

H, WIDTH, E, K, T = 12, 8, 5, 4, 23
ZERO = ZeroCompute(identity=3, zero=2)
LONGCAT = {"renormalize": False, "scale": 6.0, "selection_bias": True}


def build(device="cpu", zero=ZERO, **options):
    moe = MoE(H, WIDTH, E, K, zero_compute=zero, device=device, **options)
    if moe.router.selection_bias is not None:
        moe.router.selection_bias.normal_(std=0.1)
    return moe


def by_hand(moe, x, zero=ZERO):
    """MoE(x) = sum_i g_i E_i(x) of arXiv 2509.01322, expert by expert for all tokens."""
    routing = moe.router(x)
    ids, weights = routing[:2]
    out = torch.zeros_like(x)
    for e in range(E + zero.count):
        g = (weights * (ids == e)).sum(1, keepdim=True).to(x.dtype)
        if e < E:
            gate, up = (x @ moe.experts.gate_up[e].mT).chunk(2, 1)
            out = out + g * ((torch.nn.functional.silu(gate) * up) @ moe.experts.down[e].mT)
        elif e < E + zero.identity:
            out = out + g * x
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("zero", [ZERO, ZeroCompute(identity=2), ZeroCompute(zero=4)], ids=str)
def test_values_and_gradients(device, zero, dtype):
    moe = build(device, zero, dtype=dtype, **LONGCAT)
    x = torch.randn(T, H, device=device, dtype=dtype, requires_grad=True)
    dout = torch.randn_like(x)
    inputs = [x, *moe.parameters()]
    got, want = moe(x), by_hand(moe, x, zero)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(out, inputs, dout) for out in (got, want))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_no_row_for_them(device):
    moe, seen = build(device, **LONGCAT), []
    moe.experts.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    x = torch.randn(T, H, device=device)
    _, (routing, plan) = moe(x, return_routing=True)
    real = (routing.expert_ids < E).sum()
    assert 0 < real < T * K and seen[0].group_sizes.shape == (E,) and seen[0].group_sizes.sum() == real
    assert (seen[0].order[real:] == -1).all() and ((seen[0].rank < 0) == (routing.expert_ids >= E)).all()
    assert plan.group_sizes.shape == (E + ZERO.count,) and plan.group_sizes.sum() == T * K
    with torch.no_grad():
        moe.router.selection_bias[:E] = -9.0  # all choices are without weights
    torch.testing.assert_close(moe(x), by_hand(moe, x))
    assert not seen[-1].group_sizes.any()


@pytest.mark.parametrize("drop", ["position", "probability"])
def test_losses_counts_and_capacity(device, drop):
    coefs = {"load_balance_coef": 0.5, "sequence_balance_coef": 0.25, "global_balance_coef": 0.25}
    moe = build(device, capacity=Capacity(0.5, drop), **coefs, **LONGCAT)
    plain = build(device, **LONGCAT)
    plain.load_state_dict(moe.state_dict())
    x = torch.randn(1, T, H, device=device, requires_grad=True)
    out, (routing, plan) = moe(x, return_routing=True)
    _, (whole, rows) = plain(x, return_routing=True)
    assert (plan.group_sizes[:E] < rows.group_sizes[:E]).any()
    assert torch.equal(plan.group_sizes[E:], rows.group_sizes[E:])
    assert torch.equal(moe.load, rows.group_sizes.long())
    want = plain(x, expert_ids=routing.expert_ids[None], routing_weights=whole.routing_weights[None])
    balance = load_balance_loss(whole.scores, whole.expert_ids, zero_compute=ZERO)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.sum(), [x, *moe.parameters()])
    for a, b in zip(got, torch.autograd.grad(want.sum() + balance, [x, *plain.parameters()]), strict=True):
        torch.testing.assert_close(a, b)
    bias = moe.router.selection_bias.clone()
    balance_step(moe, 0.1)
    assert torch.equal(moe.router.selection_bias[E:], bias[E:]) and not moe.load.any()
    assert not torch.equal(moe.router.selection_bias[:E], bias[:E])


def test_training_reaches_the_share_that_is_aimed_at():
    torch.manual_seed(0)
    moe = build(zero=ZeroCompute(3, real_share=0.75), **LONGCAT)
    x = torch.randn(512, H)
    for _ in range(300):
        moe(x)
        load = moe.load / moe.load.sum()
        balance_step(moe, 2e-2, rule="proportional")
    assert abs(load[:E].sum() - 0.75) < 0.02 and (load[:E] - 0.15).abs().max() < 0.02


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "compiled"])
def test_checkpointed_and_compiled(device, how):
    torch.compiler.reset()
    moe, x = build(device, **LONGCAT, load_balance_coef=0.1), torch.randn(T, H, device=device)
    run = {
        "reentrant": lambda x: checkpoint(moe, x, use_reentrant=True),
        "non-reentrant": lambda x: checkpoint(moe, x, use_reentrant=False),
        "compiled": torch.compile(moe, fullgraph=True, backend="aot_eager"),
    }[how]
    results = []
    for fn in (moe, run):
        moe.zero_grad()
        moe.load.zero_()
        given = x.clone().requires_grad_()
        out = fn(given)
        out.square().sum().backward()
        results.append([out, given.grad, moe.load.clone(), *(p.grad for p in moe.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_and_half(device):
    moe, x = build(device, **LONGCAT), torch.randn(T, H, device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out = moe(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe(x), rtol=0.05, atol=0.05)
    half = copy.deepcopy(moe).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16 and half.router.selection_bias.dtype == torch.float32


def test_main_grad_and_lora(device):
    moe, x = build(device, **LONGCAT), torch.randn(T, H, device=device)
    want = torch.autograd.grad(moe(x).square().sum(), moe.experts.down)[0]
    use_main_grad(moe, torch.optim.SGD(moe.parameters(), 0.1))
    moe(x).square().sum().backward()
    torch.testing.assert_close(moe.experts.down.main_grad, want)
    moe, x = build(device, **LONGCAT), torch.randn(T, H, device=device)
    want = moe(x)
    moe.experts = LoRAExperts(moe.experts, rank=2)
    torch.testing.assert_close(moe(x), want)


def test_routes_and_monitor():
    moe, x = build(**LONGCAT), torch.randn(T, H)
    with Monitor(moe) as monitor, record_routes(moe) as routes:
        want = moe(x)
    (statistics,) = monitor.read().values()
    assert statistics.choices.shape == (E + ZERO.count,) and statistics.choices.sum() == T * K
    other = copy.deepcopy(moe)
    other.router.selection_bias.zero_()
    with replay_routes(other, routes):
        torch.testing.assert_close(other(x), want)
    assert str(ZERO) in repr(moe)


def test_errors():
    with pytest.raises(TypeError, match="zero_compute must be a ZeroCompute, not int"):
        MoE(H, WIDTH, E, K, zero_compute=3)
    with pytest.raises(ValueError, match="top_k is 11 but num_experts is 10"):
        MoE(H, WIDTH, E, 11, zero_compute=ZERO)
    assert MoE(H, WIDTH, 1, 3, zero_compute=ZeroCompute(2))(torch.randn(0, H)).shape == (0, H)
    with pytest.raises(ValueError, match="expert_ids holds 10 but num_experts is 10"):
        build()(torch.randn(3, H), expert_ids=torch.full((3, 2), 10))
