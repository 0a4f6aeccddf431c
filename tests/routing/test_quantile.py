"""Quantile balancing: the bias against margins sorted by hand, the loads it gives, what is counted when."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_aiter import GroupLimit, MoE, ZeroCompute, balance_step
from moe_aiter.routing.quantile import count_margins, quantile_bias

H, E, K, T, BINS = 16, 8, 3, 400, 1000


def skewed(device="cpu", tokens=T, dtype=torch.float32):
    """Scores of experts that are not chosen evenly."""
    return (
        torch.randn(tokens, E, device=device, dtype=dtype) + torch.linspace(-1, 1, E, device=device)
    ).sigmoid()


def load_of(scores, bias):
    return torch.zeros(E).scatter_add(
        0, (scores + bias).topk(K).indices.flatten().cpu(), torch.ones(len(scores) * K)
    )


def bias_by_hand(scores, bias):
    """The k / E quantile of all margins, sorted."""
    cutoff = (scores + bias).sort(dim=1, descending=True).values[:, K]
    new = []
    for e in range(E):
        margins = sorted((cutoff - scores[:, e]).tolist())
        new.append(margins[len(margins) * K // E - 1])
    return torch.tensor(new) - sum(new) / E


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_by_hand(device, spread, dtype):
    scores, bias = skewed(device, dtype=dtype), torch.randn(E, device=device) * spread
    counts = torch.zeros(E, BINS, dtype=torch.int64, device=device)
    for part in scores.split(150):  # micro-batches
        count_margins(counts, part, bias, K)
    assert (counts.sum(1) == T).all()
    width = (2 + (bias.max() - bias.min()).item()) / BINS
    new = quantile_bias(bias, counts, K)
    torch.testing.assert_close(new.cpu(), bias_by_hand(scores.cpu(), bias.cpu()), rtol=0, atol=4 * width)
    assert new.dtype == torch.float32 and new.mean().abs() < 1e-6


def test_loads_become_even(device):
    """A few steps with the same tokens: the largest load falls from almost twice the mean to the mean."""
    scores, bias = skewed(device, 4000), torch.zeros(E, device=device)
    assert load_of(scores, bias).max() > 1.5 * 4000 * K / E
    for _ in range(6):
        counts = torch.zeros(E, BINS, dtype=torch.int64, device=device)
        count_margins(counts, scores, bias, K)
        bias = quantile_bias(bias, counts, K)
    assert (load_of(scores, bias) / (4000 * K / E) - 1).abs().max() < 0.05


def test_padding_and_nothing(device):
    scores, mask = skewed(device), torch.rand(T, device=device) < 0.5
    bias = torch.randn(E, device=device) * 0.1
    some, all_of_them = (torch.zeros(E, BINS, dtype=torch.int64, device=device) for _ in range(2))
    count_margins(some, scores.masked_fill(~mask[:, None], 0.7), bias, K, mask)
    count_margins(all_of_them, scores[mask], bias, K)
    assert torch.equal(some, all_of_them)
    nothing = torch.zeros_like(some)
    count_margins(nothing, scores[:0], bias, K)
    assert not nothing.any() and torch.equal(quantile_bias(bias, nothing, K), bias)
    one = torch.zeros(E, 1, dtype=torch.int64, device=device)
    count_margins(one, scores, bias, K)
    assert quantile_bias(bias, one, K).abs().max() < 1e-6  # one bin knows nothing


def build(device="cpu", **options):
    return MoE(H, 8, E, K, score="sigmoid", selection_bias=True, quantile_bins=BINS, device=device, **options)


@pytest.mark.parametrize("how", ["eager", "reentrant", "non-reentrant", "compiled"])
def test_a_layer(device, how):
    torch.compiler.reset()
    moe = build(device)
    run = {
        "eager": moe,
        "reentrant": lambda x: checkpoint(moe, x, use_reentrant=True),
        "non-reentrant": lambda x: checkpoint(moe, x, use_reentrant=False),
        "compiled": torch.compile(moe, fullgraph=True, backend="aot_eager"),
    }[how]
    x = torch.randn(2, 100, H, device=device, requires_grad=True)
    scores = moe(x.detach(), return_routing=True)[1].routing.scores.detach()
    moe.margins.zero_()
    for part in x:
        run(part).square().sum().backward()
    moe.eval()
    moe(x)  # does not count
    want = torch.zeros_like(moe.margins)
    count_margins(want, scores, moe.router.selection_bias, K)
    assert moe.margins.sum() == 200 * E and (moe.margins - want).abs().sum() <= 4  # on the edge of a bin
    expected = quantile_bias(moe.router.selection_bias, moe.margins, K)
    half = copy.deepcopy(moe)
    balance_step(moe, rule="quantile")
    torch.testing.assert_close(moe.router.selection_bias, expected)
    balance_step(half, 0.5, rule="quantile")
    torch.testing.assert_close(half.router.selection_bias, expected / 2)
    assert not moe.margins.any() and not moe.load.any() and "margins" not in moe.state_dict()


def test_other_rules_forget_the_margins():
    moe = build()
    moe(torch.randn(20, H))
    balance_step(moe)
    assert not moe.margins.any() and moe.router.selection_bias.abs().max() > 0
    moe.reset_parameters()
    assert not moe.router.selection_bias.any()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: MoE(H, 8, E, K, quantile_bins=9), "quantile_bins is 9, but selection_bias is False"),
        (lambda: build(choice=GroupLimit(2, 1)), "quantile_bins is 1000, but choice is GroupLimit"),
        (lambda: build(zero_compute=ZeroCompute(1)), "quantile_bins is 1000, but zero_compute is"),
        (
            lambda: MoE(H, 8, E, K, score="sqrt_softplus", selection_bias=True, quantile_bins=9),
            "score='sqrt_softplus' has no largest value",
        ),
        (lambda: MoE(H, 8, K, K, selection_bias=True, quantile_bins=9), "top_k is 3, all of the experts"),
        (lambda: MoE(H, 8, E, K, selection_bias=True, quantile_bins=-1), "quantile_bins must be at least 1"),
        (
            lambda: balance_step(MoE(H, 8, E, K, selection_bias=True), rule="quantile"),
            "an MoE with a selection bias has no quantile_bins",
        ),
        (lambda: balance_step(build(), 1.5, rule="quantile"), "rate is 1.5, but at most 1"),
        (
            lambda: count_margins(torch.zeros(E, 3).long(), torch.rand(2, E), torch.zeros(E), E),
            "top_k is 8 of E=8 experts",
        ),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
