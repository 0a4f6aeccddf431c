"""Weights that travel to guest slots, and gradients that come back."""

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels.rows.guests import add_guests, clear_guests, places_in, send_guests
from moe_aiter.kernels.rows.lend import lend_rows

pytestmark = pytest.mark.interpret
RANKS, EACH, GUESTS = 3, 4, 5
DTYPES = torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn


def draw(n: int, dtype: torch.dtype, gap: int, device: str) -> torch.Tensor:
    """(EACH, n) with contiguous rows, `gap` numbers apart."""
    whole = torch.randint(0, 100, (EACH, n + gap), device=device).to(dtype)
    return whole[:, gap:] if gap else whole


def loans(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    sizes = (torch.rand(RANKS, RANKS * EACH) ** 6 * 3000).int()
    _, guests_of = lend_rows(sizes.to(device), EACH, GUESTS, 1, 1)
    assert (guests_of >= 0).any() and (guests_of < 0).any()
    return guests_of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n, gap", [(1, 0), (31, 1), (64, 64), (5000, 0), (4098, 2)])
@pytest.mark.parametrize("rank", range(RANKS))
def test_send(dtype, n, gap, rank, device):
    w, guests_of = draw(n, dtype, gap, device), loans(device)
    places = torch.full((RANKS, GUESTS, n), 101, device=device).to(dtype)
    want = places.clone()
    for b, g in (guests_of // EACH == rank).nonzero().tolist():
        want[b, g] = w[guests_of[b, g] - rank * EACH]
    send_guests([w], [places_in(places)], guests_of, rank * EACH)
    assert torch.equal(places.float(), want.float())


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("n, gap", [(1, 0), (31, 1), (64, 64), (5000, 0), (4098, 2)])
@pytest.mark.parametrize("rank", range(RANKS))
def test_add(dtype, n, gap, rank, device):
    w, guests_of = draw(n, dtype, gap, device), loans(device)
    wide = torch.promote_types(dtype, torch.float32)
    # sums that 16 bits hold, which the interpreter does not round to the nearest
    places = torch.randint(-50, 50, (RANKS, GUESTS, n), device=device).to(wide)
    places[guests_of < 0] = torch.nan  # unused slots: a read of them would show
    want = w.clone()
    for b, g in (guests_of // EACH == rank).nonzero().tolist():
        e = guests_of[b, g] - rank * EACH
        want[e] = (want[e].to(wide) + places[b, g]).to(dtype)
    add_guests([w], [places_in(places)], guests_of, rank * EACH)
    assert torch.equal(w, want)


@pytest.mark.parametrize("sizes", [(64, 4096), (4098, 31), (5, 31, 64), (16, 32, 48, 64)], ids=str)
def test_several_tensors(sizes, device):
    """Those of one dtype are copied two by two; of what lies at multiples of 16 bytes or does not."""
    guests_of = loans(device)
    dtypes = torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16
    parts = [draw(n, dtype, 0, device) for n, dtype in zip(sizes, dtypes, strict=False)]
    for wide in (False, True):
        places = [torch.zeros(RANKS, GUESTS, n, device=device) for n in sizes]
        places = places if wide else [p.to(t.dtype) for p, t in zip(places, parts, strict=True)]
        for p in places:
            p += 3 * wide
        ours, alone = [t.clone() for t in parts], [t.clone() for t in parts]
        copies = [p.clone() for p in places]
        move = add_guests if wide else send_guests
        move(ours, list(map(places_in, places)), guests_of, EACH)
        for t, p in zip(alone, copies, strict=True):
            move([t], [places_in(p)], guests_of, EACH)
        assert all(map(torch.equal, ours + places, alone + copies))
        changed = zip(ours, parts, strict=True) if wide else ((p, torch.zeros_like(p)) for p in places)
        assert all(not torch.equal(new, old) for new, old in changed)


@pytest.mark.parametrize("guests", [[2, 5, -1], [-1, -1, -1]])
@pytest.mark.parametrize("n", [1, 4097])
def test_clear(guests, n, device):
    region = torch.full((7, n), torch.nan, device=device)
    slots = [region[:3], region[3:6]]
    clear_guests(slots, torch.tensor(guests, dtype=torch.int32, device=device))
    some = guests[0] >= 0 or (region.is_cpu and not interpret)
    assert (region[:6] == 0).all() if some else region.isnan().all()
    assert region[6].isnan().all()
