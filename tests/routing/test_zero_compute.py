"""Experts without weights: their part in plans, losses, the selection bias and capacities."""

import math

import pytest
import torch

from moe_aiter import Capacity, ZeroCompute, load_balance_loss, make_plan, sequence_balance_loss
from moe_aiter.routing.balance import selection_bias_step
from moe_aiter.routing.capacity import drop_over_capacity
from moe_aiter.routing.zero_compute import rows_of

E, K, T = 6, 4, 24
ZERO = [ZeroCompute(identity=3), ZeroCompute(2, 1), ZeroCompute(zero=2), ZeroCompute(3, real_share=0.5)]
every_kind = pytest.mark.parametrize("zero", ZERO, ids=str)


def share_of(zero):
    return zero.real_share or E / (E + zero.count)


def choices(zero, tokens=T):
    return torch.rand(tokens, E + zero.count).argsort(1)[:, :K]


def longcat_loss(zero, scores, ids):
    """sum_e E c_e / (K_e T) P_e + c_Z / ((K - K_e) T) P_Z: arXiv 2509.01322, each group one expert."""
    tokens, k_e = len(ids), share_of(zero) * K
    counts = [(ids == e).sum().item() for e in range(E + zero.count)]
    mean = (scores / scores.sum(1, keepdim=True)).double().mean(0).tolist()
    loss = sum(E * counts[e] / (k_e * tokens) * mean[e] for e in range(E))
    return loss + sum(counts[E:]) / ((K - k_e) * tokens) * sum(mean[E:])


@every_kind
def test_load_balance_loss(device, zero):
    ids, scores = choices(zero).to(device), torch.rand(T, E + zero.count, device=device)
    want = longcat_loss(zero, scores, ids)
    got = load_balance_loss(scores, ids, zero_compute=zero)
    torch.testing.assert_close(got.item(), want, rtol=1e-5, atol=1e-6)
    sizes = make_plan(ids, E + zero.count).group_sizes
    assert load_balance_loss(scores, group_sizes=sizes, zero_compute=zero) == got
    sequences = [longcat_loss(zero, scores[i : i + 8], ids[i : i + 8]) for i in range(0, T, 8)]
    got = sequence_balance_loss(scores, ids, 8, zero_compute=zero)
    torch.testing.assert_close(got.item(), sum(sequences) / 3, rtol=1e-5, atol=1e-6)


@every_kind
def test_the_loss_is_1_at_the_load_that_is_aimed_at(zero):
    share, count = share_of(zero), zero.count
    load = torch.tensor([share / E] * E + [0.0] * (count - 1) + [1 - share])  # one has all of the others
    scores = torch.rand(T, E + count)
    loss = load_balance_loss(scores, group_sizes=load, zero_compute=zero)
    torch.testing.assert_close(loss.item(), 1.0, rtol=1e-5, atol=0)
    step = selection_bias_step(torch.zeros(E + count), (load * 720).round().long(), 0.1, zero_compute=zero)
    assert not step.any()


@pytest.mark.parametrize("rule", ["sign", "proportional"])
@every_kind
def test_step_by_hand(device, zero, rule):
    """LongCat-Flash: mu * (K_e / (K E) - T_i / (K T_all)), with mu = rate * E * K / K_e; 0 for the others."""
    load = torch.randint(0, 50, (E + zero.count,), device=device)
    step = selection_bias_step(torch.zeros(E + zero.count, device=device), load, 0.01, rule, False, zero)
    total, share = load.sum().item(), share_of(zero)
    wanted = [share / E - c / total for c in load.tolist()]
    if rule == "sign":
        wanted = [0.01 * ((v > 1e-12) - (v < -1e-12)) for v in wanted]
    else:
        wanted = [0.01 * E / share * v for v in wanted]
    torch.testing.assert_close(step.tolist(), wanted[:E] + [0.0] * zero.count, rtol=1e-5, atol=1e-8)


def test_a_mean_that_is_taken_off_changes_no_difference(device):
    zero, load = ZERO[1], torch.randint(0, 50, (E + 3,), device=device)
    steps = [selection_bias_step(load.float(), load, 0.1, "proportional", z, zero) for z in (False, True)]
    torch.testing.assert_close(steps[0] - steps[0].mean(), steps[1])


@every_kind
def test_rows_of_experts_with_weights(device, zero):
    ids = choices(zero).to(device)
    ids[3] = E  # a token without rows
    ids[5, 1] = -1
    plan = rows_of(make_plan(ids, E + zero.count), E)
    want = make_plan(ids.masked_fill(ids >= E, -1), E)
    assert all(map(torch.equal, plan, want))
    weights = torch.rand(T, K, device=device)
    found = zero.identity_weight(ids, weights, E)
    chosen = (ids >= E) & (ids < E + zero.identity)
    torch.testing.assert_close(found, (weights * chosen).sum(1, keepdim=True))


def test_no_tokens_and_one_expert(device):
    for ids in (torch.zeros(0, 1), torch.ones(1, 1), torch.zeros(1, 1)):
        ids = ids.long().to(device)
        plan = rows_of(make_plan(ids, 2), 1)
        assert plan.group_sizes.tolist() == [int((ids == 0).sum())] and plan.order.shape == (len(ids),)


@pytest.mark.parametrize("drop", ["position", "probability"])
@every_kind
def test_capacity(device, zero, drop):
    ids, weights = choices(zero).to(device), torch.rand(T, K, device=device)
    plan = make_plan(ids, E + zero.count)
    kept = drop_over_capacity(ids, weights, plan, Capacity(0.75, drop), zero_compute=zero)
    limit = math.ceil(round(0.75 * share_of(zero) * T * K / E, 9))
    before, after = (make_plan(i, E + zero.count).group_sizes for i in (ids, kept))
    assert torch.equal(after[:E], before[:E].clamp_max(limit)) and torch.equal(after[E:], before[E:])
    assert (after < before).any()


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: ZeroCompute(), ValueError, "identity and zero are both 0"),
        (lambda: ZeroCompute(-1), ValueError, "identity must be at least 1|identity"),
        (lambda: ZeroCompute(1.5), TypeError, "identity"),
        (lambda: ZeroCompute(1, real_share=1), ValueError, "real_share must be from 0.0001 to 0.9999, not 1"),
        (lambda: ZeroCompute(1, real_share=math.nan), ValueError, "real_share must be from"),
        (lambda: ZeroCompute(1, real_share="half"), TypeError, "real_share"),
        (
            lambda: load_balance_loss(
                torch.rand(3, 2), torch.zeros(3, 1).long(), zero_compute=ZeroCompute(2)
            ),
            ValueError,
            "there are 2 experts in all, which leaves none beside ZeroCompute",
        ),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
