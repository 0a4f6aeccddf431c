"""Load statistics against a definition in Python, and their extremes."""

import math

import pytest
import torch

from moe_aiter.routing.losses import load_statistics


def by_hand(sizes):
    total, mean = sum(sizes), sum(sizes) / len(sizes)
    load = [n / total for n in sizes]
    entropy = -sum(f * math.log(f) for f in load if f) / math.log(len(sizes))
    return load, max(sizes) / mean - 1, min(sizes) / mean, sizes.count(0), entropy


@pytest.mark.parametrize("sizes", [[3, 1, 0, 4], [1, 0], [7, 9, 8], [5, 0, 0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_by_hand(device, sizes, dtype):
    stats = load_statistics(torch.tensor(sizes, dtype=dtype, device=device))
    for got, want in zip(stats, by_hand(sizes), strict=True):
        assert got.tolist() == pytest.approx(want, abs=1e-6)


def test_balance_and_collapse(device):
    even = load_statistics(torch.full((8,), 5, device=device))
    assert (even.imbalance, even.smallest, even.idle) == (0, 1, 0) and even.entropy.item() == pytest.approx(1)
    one = load_statistics(torch.tensor([0, 0, 30, 0], device=device))
    assert (one.imbalance, one.smallest, one.idle, one.entropy) == (3, 0, 3, 0)


def test_no_tokens(device):
    stats = load_statistics(torch.zeros(4, dtype=torch.int32, device=device))
    assert (stats.imbalance, stats.smallest, stats.idle, stats.entropy) == (0, 0, 4, 0)
    assert stats.load.tolist() == [0] * 4


@pytest.mark.parametrize("tokens, entropy", [(6, 1), (0, 0)])
def test_one_expert(device, tokens, entropy):
    stats = load_statistics(torch.tensor([tokens], device=device))
    assert stats.entropy == entropy and stats.imbalance == 0


def test_a_batch_is_its_rows(device):
    batch = torch.tensor([[3, 1, 0, 4], [0, 0, 0, 0], [2, 2, 2, 2]], device=device)
    stats = load_statistics(batch)
    for i, row in enumerate(batch):
        for got, want in zip(stats, load_statistics(row), strict=True):
            assert torch.equal(got[i], want)


@pytest.mark.gpu
def test_stays_on_the_device():
    sizes = torch.tensor([3, 1, 0, 4], device="cuda", dtype=torch.int32)
    load_statistics(sizes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = load_statistics(sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.idle == 1


def test_always_float32_without_gradient():
    stats = load_statistics(torch.full((4,), 40000.0, dtype=torch.float16).requires_grad_())
    assert stats.load.tolist() == [0.25] * 4 and stats.load.dtype == torch.float32
    assert not stats.imbalance.requires_grad
    assert load_statistics(torch.tensor([0.25, 0.25, 0.25, 0.1])).load.sum().item() == pytest.approx(1)


def test_errors():
    with pytest.raises(TypeError, match="group_sizes must be a tensor, not list"):
        load_statistics([1, 2])
    with pytest.raises(ValueError, match=r"group_sizes must be \(\.\.\., E\) with E >= 1"):
        load_statistics(torch.zeros(3, 0))
