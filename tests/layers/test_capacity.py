"""Experts of limited capacity: who is dropped, and what the layer makes of it."""

import math

import pytest
import torch

from moe_aiter import Capacity, MoE, ZeroCompute, load_balance_loss, make_plan
from moe_aiter.routing.capacity import drop_over_capacity

H, WIDTH, E, K, T = 16, 8, 6, 2, 29


def dropped_by_hand(ids, weights, num_experts, limit, policy):
    ids = [list(row) for row in ids]
    for e in range(num_experts):
        takers = [(t, j) for t, row in enumerate(ids) for j, id_ in enumerate(row) if id_ == e]
        if policy == "probability":
            takers.sort(key=lambda c: -weights[c[0]][c[1]])  # stable
        for t, j in takers[limit:]:
            ids[t][j] = -1
    return ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 6.0])
@pytest.mark.parametrize("policy", ["position", "probability"])
@pytest.mark.pairwise
def test_dropped_by_hand(device, policy, factor, dtype):
    ids = torch.rand(T, E).argsort(1)[:, :K].to(device, dtype)
    ids[:9, 0] = 3  # crowded
    ids[4, 1] = -1
    weights = (torch.rand(T, K, dtype=torch.float64) * 8).round().to(device)  # with ties
    capacity = Capacity(factor, policy)
    got = drop_over_capacity(ids, weights, make_plan(ids, E), capacity)
    limit = math.ceil(factor * T * K / E)
    assert got.tolist() == dropped_by_hand(ids.tolist(), weights.tolist(), E, limit, policy)
    assert got.dtype == dtype and make_plan(got, E).group_sizes.max() <= limit


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("zero", [None, ZeroCompute(2, real_share=0.7777)])
@pytest.mark.parametrize("factor", [5e-324, 1e-9, 1e-7, 1e6, 1e15, 1e18, 1e30, 1.7e308])
def test_factors_out_of_all_proportion(device, factor, zero, masked):
    """The limit is from 1 to all choices."""
    ids = torch.rand(T, E).argsort(1)[:, :K].to(device)
    ids[:9, 0] = 3
    mask = torch.ones(T, dtype=torch.bool, device=device) if masked else None
    plan = make_plan(ids, E + (0 if zero is None else zero.count))
    got = drop_over_capacity(ids, torch.rand(T, K, device=device), plan, Capacity(factor), mask, zero)
    limit = 1 if factor < 1 else T * K
    assert got.tolist() == dropped_by_hand(ids.tolist(), None, E, limit, "position")


@pytest.mark.parametrize("policy", ["position", "probability"])
def test_layer(device, policy):
    """A layer with a capacity is one that was given the ids that are left; its losses see them all."""
    coefs = {"load_balance_coef": 0.5, "sequence_balance_coef": 0.1}
    moe = MoE(H, WIDTH, E, K, capacity=Capacity(0.8, policy), device=device, **coefs, selection_bias=True)
    plain = MoE(H, WIDTH, E, K, device=device, selection_bias=True)
    plain.load_state_dict(moe.state_dict())
    x = (torch.randn(1, T, H, device=device) + 0.5).requires_grad_()
    out, (routing, plan) = moe(x, return_routing=True)
    _, (whole, all_rows) = plain(x, return_routing=True)
    ids = drop_over_capacity(*whole[:2], all_rows, moe.capacity)
    assert torch.equal(routing.expert_ids, ids) and 0 < (ids < 0).sum() < T * K
    assert plan.group_sizes.sum() == (ids >= 0).sum() and moe.load.sum() == T * K
    want, _ = plain(x, expert_ids=ids[None], routing_weights=whole.routing_weights[None], return_routing=True)
    torch.testing.assert_close(out, want)
    balance = load_balance_loss(whole.scores, group_sizes=all_rows.group_sizes)
    added = (want.sum() + 0.6 * balance).to(torch.float32)  # one sequence: both losses are the same
    for a, b in zip(
        torch.autograd.grad(out.sum(), [x, *moe.parameters()]),
        torch.autograd.grad(added, [x, *plain.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert moe(x[:, :0]).shape == (1, 0, H) and str(moe.capacity) in repr(moe)


def test_one_graph(device):
    torch.compiler.reset()
    for policy in ("position", "probability"):
        moe = MoE(H, WIDTH, E, K, capacity=Capacity(0.8, policy), device=device)
        x = torch.randn(T, H, device=device)
        torch.testing.assert_close(torch.compile(moe, fullgraph=True, backend="aot_eager")(x), moe(x))


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: Capacity(0.0), ValueError, "factor must be above 0 and finite, not 0.0"),
        (lambda: Capacity(math.nan), ValueError, "factor must be above 0 and finite, not nan"),
        (lambda: Capacity(1.0, "last"), ValueError, "unknown drop 'last'; known: position, probability"),
        (lambda: MoE(H, WIDTH, E, K, capacity=1.25), TypeError, "capacity must be a Capacity, not float"),
        (
            lambda: drop_over_capacity(
                torch.zeros(3, 2, dtype=torch.int64),
                torch.zeros(3, 1),
                make_plan(torch.zeros(3, 2).int(), 4),
                Capacity(1),
            ),
            ValueError,
            r"expert_ids is \(T, k=2\) but routing_weights is \(T, k=1\)",
        ),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
