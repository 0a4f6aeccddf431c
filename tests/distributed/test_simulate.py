"""What lending experts would bring, for given loads."""

import numpy as np
import pytest
import torch

from moe_aiter.distributed import simulate
from moe_aiter.distributed.loans import CPU, GPU, least_rows, rates_of, useful_guests
from moe_aiter.kernels.rows.lend import lend_rows

SIZES = 1024, 512  # 1,572,864 weights: 3,145,728 bytes of bfloat16, and 9,437,184 of a slot
ZIPF = [100000, 50000, 33333, 25000, 20000, 16667, 14286, 12500]


def test_a_table():
    assert str(simulate(ZIPF, 4, 1, SIZES)).splitlines() == [
        "rank  rows before  rows after  borrowed experts (rows)",
        "   0      150,000      68,080  none",
        "   1       58,333      67,933  1 (9,600)",
        "   2       36,667      67,899  0 (31,232)",
        "   3       26,786      67,874  0 (41,088)",
        "predicted share of the balanced rate: 45% before, 90% after; guest slots of a rank: 1, 9.4 MB",
    ]


def test_shares():
    """The busiest rank decides, whose transfers take the time of 2,500 rows each."""
    found, balanced = simulate(ZIPF, 4, 1, SIZES), sum(ZIPF) / 4
    assert found.least == 2500 and found.slot_bytes == 9437184
    assert found.share_before == balanced / 150000
    assert found.share_after == pytest.approx(balanced / (68080 + 3 * 2500), rel=1e-12)
    borrows = simulate([0, 0, 30000, 30000], 2, 2, SIZES)
    assert borrows.rows_after == (29952, 30048) and borrows.borrowed == ({2: 29952}, {})
    assert borrows.share_after == pytest.approx(30000 / (30048 + 2500), rel=1e-12)
    slow = simulate(ZIPF, 4, 1, SIZES, link=24e9)
    assert slow.least == 25000 and slow.borrowed == ({}, {}, {0: 31232}, {0: 41088})


def test_the_plan_is_that_of_lend_rows():
    found, sizes = simulate(ZIPF, 4, 2, SIZES, rate=300e12), torch.zeros(4, 8, dtype=torch.int64)
    sizes[2] = torch.tensor(ZIPF)
    shares, guests_of = lend_rows(sizes, 2, 2, 128, 1250)
    assert found.rows_after == tuple((shares[:, 1] - shares[:, 0]).sum(1).tolist())
    assert [[*of] for of in found.borrowed] == [[n for n in of if n >= 0] for of in guests_of.tolist()]


def test_forms_of_counts():
    whole = simulate(ZIPF, 4, 2, SIZES)
    halves = torch.tensor(ZIPF).div(2, rounding_mode="floor")
    parts = torch.stack([halves, torch.tensor(ZIPF) - halves])
    numbers = torch.tensor(ZIPF), np.array(ZIPF), np.array(ZIPF) + 0.4, tuple(ZIPF)
    for same in (*numbers, parts, parts.tolist(), parts.double().T.contiguous().T):
        assert simulate(same, 4, 2, SIZES) == whole


def test_without_loans():
    for counts, ranks, guests in ((ZIPF, 4, 0), (ZIPF, 1, 3), ([5000] * 8, 4, 4), ([0] * 8, 4, 4)):
        found = simulate(counts, ranks, guests, SIZES)
        assert found.rows_after == found.rows_before and not any(found.borrowed)
        assert found.share_after == found.share_before
        assert found.guests == (guests if ranks > 1 else 0)
    assert simulate([0] * 8, 4, 4, SIZES).share_after == 1


def test_auto():
    """Eight slots, or as many as there is use, experts or memory for."""
    few = [n // 20 for n in ZIPF]
    assert simulate([1000] * 64, 2, "auto", SIZES).guests == 8
    assert simulate(ZIPF, 4, "auto", SIZES).guests == 6
    assert simulate(few, 4, "auto", SIZES).guests == sum(few) // 4 // 2500 == 1
    assert simulate(few, 8, "auto", SIZES).guests == 0
    big = simulate([1000] * 64, 2, "auto", (4096, 8192), gated=False)
    assert big.guests == 2 and big.slot_bytes == 2 * 6 * 2 * 4096 * 8192 <= 2**30
    assert simulate([1000] * 64, 2, "auto", (4096, 8192)).guests == 1


def test_least_rows():
    """2,500 rows for weights of 16 bits, fewer for smaller ones, and a few dozen on a CPU."""
    numbers = 3 * 2048 * 768
    assert rates_of("cuda") is GPU and rates_of("cpu") is CPU
    assert [least_rows(numbers * bits // 8, numbers, GPU) for bits in (32, 16, 8, 4)] == [
        5000,
        2500,
        1250,
        625,
    ]
    assert least_rows(numbers * 4, numbers, CPU) == 40
    assert least_rows(1, 10**9, GPU) == 1
    assert useful_guests(10**6, 2500, 100, 10**9) == 1


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"counts": [1.0, -1.0]}, "counts must be from 0 to"),
        ({"counts": [1.0, float("nan")]}, "counts must be from 0 to"),
        ({"counts": [2**30, 2**29 + 1]}, "counts must be from 0 to 1073741823 for an expert, as in one call"),
        ({"counts": 3}, r"counts must be \(E,\) or \(S, E\)"),
        ({"counts": []}, r"counts must be \(E,\) or \(S, E\)"),
        ({"ranks": 3}, "use at most 2 ranks"),
        ({"guests": 2}, "guests=2, but the other ranks hold 1 experts"),
        ({"guests": "many"}, "guests must be a number or 'auto', not 'many'"),
        ({"sizes": (4, 4, 4)}, r"sizes must be \(H, I\)"),
        ({"sizes": (4, 0)}, r"sizes\[1\] must be at least 1"),
        ({"sizes": (4, 10**200)}, "sizes must be at most 2147483647"),
        ({"rate": 0.0}, "rate must be above 0"),
    ],
)
def test_bad_arguments(changed, message):
    with pytest.raises(ValueError, match=message):
        simulate(**{"counts": [9, 5], "ranks": 2, "guests": 1, "sizes": (8, 4)} | changed)


def test_extreme_arguments():
    """Links and products of any speed: a loan then pays from the first row on, or never."""
    load = [10_000, 0], 2, 1, (8, 4)
    assert simulate(*load, link=1e-320).rows_after == (10_000, 0)
    assert simulate(*load, link=1e-300, rate=1e300).share_after == 0.5
    assert simulate(*load, link=1e300, rate=1e-300).rows_after == (5008, 4992)
    with pytest.raises(TypeError, match="counts must be dense real numbers"):
        simulate(torch.ones(8).to_sparse(), 2, 1, (8, 4))
