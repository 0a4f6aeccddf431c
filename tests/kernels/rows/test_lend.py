"""Experts lent for one call: who computes which rows."""

import pytest
import torch

from moe_aiter.kernels.rows.lend import LendInputs, lend_reference, lend_rows

SHAPES = [(1, 1), (1, 7), (2, 2), (3, 7), (4, 16), (5, 11), (8, 256)]  # ranks, experts
ALL, MANY = 2**31 - 1, 2**62


def check(sizes, each, guests, block, least):
    """Whatever holds for each plan; returns the rows of a rank."""
    shares, guests_of = lend_rows(sizes, each, guests, block, least)
    for got, want in zip(
        (shares, guests_of), lend_reference(LendInputs(sizes, each, guests, block, least)), strict=True
    ):
        assert got.dtype == torch.int32 and torch.equal(got.cpu().long(), want)
    ranks, experts = sizes.shape
    total, (shares, guests_of) = sizes.sum(0).cpu().long(), (t.cpu().long() for t in (shares, guests_of))
    home = torch.arange(experts) // each
    loads = torch.zeros(ranks, dtype=torch.int64).index_add(0, home, total)
    rows = shares[:, 1] - shares[:, 0]
    assert (rows >= 0).all() and (shares[(rows == 0)[:, None].expand_as(shares)] == 0).all()
    for n in range(experts):
        parts = sorted(part for part in shares[:, :, n].tolist() if part[0] < part[1])
        assert [0, *[end for _, end in parts]] == [*[begin for begin, _ in parts], total[n]]
        assert rows[home[n], n] == 0 or shares[home[n], 0, n] == 0
        loans = [shares[r, 1, n] - shares[r, 0, n] for r in range(ranks) if r != home[n] and rows[r, n]]
        assert all(loan >= least and loan % block == 0 for loan in loans)
    for r, borrowed in enumerate(guests_of.tolist()):
        some = [n for n in range(experts) if rows[r, n] and home[n] != r]
        assert borrowed == some + [-1] * (guests - len(some))
    cap, after = -(-int(total.sum()) // ranks), rows.sum(1)
    assert (after <= loads.clamp(min=cap)).all() and (after[guests_of[:, 0] >= 0] <= cap).all()
    if (loads - cap).max() < least:
        assert (guests_of == -1).all()
    return after


def skewed(ranks, experts, device, dtype=torch.int32):
    """Sizes of a power law, and a few experts without rows."""
    weights = torch.rand(experts).pow(4) * (torch.rand(experts) > 0.1)
    return (torch.rand(ranks, experts) * weights * 4000).to(device, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("guests", [1, 2, 8, 9])
@pytest.mark.parametrize("block, least", [(1, 1), (8, 8), (128, 300), (100, 7)])
@pytest.mark.pairwise
def test_drawn_sizes(backend, device, shape, guests, block, least):
    ranks, experts = shape
    for dtype in (torch.int32, torch.int64):
        check(skewed(*shape, device, dtype), -(-experts // ranks), guests, block, least)


def test_one_rank_has_all(backend, device):
    """Loans end when the others are full or have no free slot, or when a loan would be too small."""
    sizes = torch.zeros(4, 16, dtype=torch.int32, device=device)
    sizes[:, 4:8] = 100
    assert check(sizes, 4, 1, 1, 1).tolist() == [400] * 4
    sizes[:] = 0
    sizes[1, 8:12] = torch.tensor([40, 400, 40, 80])
    assert check(sizes, 4, 2, 1, 1).tolist() == [140] * 4
    assert check(sizes, 4, 1, 1, 1).tolist() == [140, 140, 160, 120]  # of the last no slot is free
    assert check(sizes, 4, 2, 8, 50).tolist() == [136, 136, 160, 128]
    assert check(sizes, 4, 2, 8, 137).tolist() == [0, 0, 560, 0]  # 140 rows are 17 blocks and a half


def test_few_slots_leave_rows(backend, device):
    sizes = torch.full((2, 8), 50, dtype=torch.int32, device=device)
    sizes[:, 4:] = 0
    assert [check(sizes, 4, guests, 1, 1).tolist() for guests in (1, 2, 3)] == [
        [300, 100],
        [200, 200],
        [200, 200],
    ]


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (8, 256)], ids=str)
def test_no_rows(backend, device, shape):
    ranks, experts = shape
    assert not check(
        torch.zeros(shape, dtype=torch.int32, device=device), -(-experts // ranks), 3, 8, 8
    ).any()


@pytest.mark.parametrize("garbage", [-1, -MANY, ALL, MANY])
def test_garbage_ends(backend, device, garbage):
    """Sizes that another rank has not sent: the plan is that of sizes within bounds."""
    sizes = skewed(4, 10, device, torch.int64)
    sizes[1], sizes[3, ::3] = garbage, garbage
    want = lend_rows(sizes.clamp(0, ALL // 4), 3, 2, 8, 8)
    for got, expected in zip(lend_rows(sizes, 3, 2, 8, 8), want, strict=True):
        assert torch.equal(got, expected)
    check(sizes.clamp(0, ALL // 4), 3, 2, 8, 8)


def test_strides(backend, device):
    sizes = skewed(4, 10, device)
    wide = torch.cat([sizes, sizes - 99], 1)
    for got, want in zip(lend_rows(wide[:, :10], 3, 2, 8, 8), lend_rows(sizes, 3, 2, 8, 8), strict=True):
        assert torch.equal(got, want)


def test_bad_sizes(device):
    sizes = torch.ones(2, 5, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"group_sizes is \(2, 5\), but 2 ranks hold 2 experts each"):
        lend_rows(sizes, 2, 1, 1, 1)
    for name, given in {
        "each": (0, 1, 1, 1),
        "guests": (3, 0, 1, 1),
        "block": (3, 1, 0, 1),
        "least": (3, 1, 1, 0),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            lend_rows(sizes, *given)
