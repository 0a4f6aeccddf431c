"""The op behind a monitor: its sums beside a count by hand, and what it refuses."""

import math

import pytest
import torch

from moe_aiter.routing import make_plan
from moe_aiter.routing.balance import SCALARS, record_op, record_routing

E, K, T = 5, 2, 11


def by_hand(ids, kept_ids, logits=None, mask=None):
    """The sums, with a loop over tokens and experts."""
    choices, dropped = [0.0] * E, [0.0] * E
    for row, kept_row in zip(ids.tolist(), kept_ids.tolist(), strict=True):
        for e, kept in zip(row, kept_row, strict=True):
            if e >= 0:
                choices[e] += 1
                dropped[e] += kept < 0
    tokens = [t for t in range(len(ids)) if mask is None or mask[t]]
    scalars = [len(tokens), 0.0, 0.0, 0.0, 0.0]
    for z in [] if logits is None else [logits[t].tolist() for t in tokens]:
        scalars[1] += 1
        scalars[2] += math.sqrt(sum(a * a for a in z))
        scalars[3] += math.log(sum(map(math.exp, z)))
        scalars[4] = max(scalars[4], *map(abs, z))
    return torch.tensor([*choices, *dropped, *scalars], dtype=torch.float64)


def draw(device, dropping=0.3):
    ids = torch.rand(T, E).argsort(1)[:, :K].to(device)
    kept = ids.masked_fill(torch.rand(T, K).to(device) < dropping, -1)
    return ids, kept, 5 * torch.randn(T, E).to(device)


def totals(device):
    return torch.zeros(2 * E + SCALARS, dtype=torch.float64, device=device)


def sizes(ids):
    return make_plan(ids, E).group_sizes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_logits", [False, True])
def test_sums_by_hand_over_two_calls(device, with_logits, masked):
    got, want = totals(device), 0
    largest = []
    for _ in range(2):
        ids, kept, logits = draw(device)
        mask = (torch.arange(T) % 3 > 0).to(device) if masked else None
        if masked:
            ids, kept = (t.masked_fill(~mask[:, None], -1) for t in (ids, kept))
            logits[~mask] = math.nan  # nobody looks at padding
        logits = logits if with_logits else None
        record_routing(got, ids, sizes(ids), sizes(kept), logits, mask)
        one = by_hand(ids, kept, logits, mask)
        largest.append(one[-1].item())
        want = want + one
    want[-1] = max(largest)
    assert torch.equal(got[: 2 * E + 2].cpu(), want[: 2 * E + 2])
    torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_of_any_dtype(device, dtype):
    ids, kept, logits = draw(device)
    got = totals(device)
    record_routing(got, ids, sizes(ids), sizes(kept), logits.to(dtype))
    torch.testing.assert_close(got.cpu(), by_hand(ids, kept, logits.to(dtype)), rtol=1e-6, atol=0)


def test_a_logit_that_is_no_number_shows(device):
    ids, kept, logits = draw(device)
    logits[3, 1] = math.nan
    got = totals(device)
    record_routing(got, ids, sizes(ids), sizes(kept), logits)
    assert got[-3:].isnan().all() and got[:-3].isfinite().all()


def test_no_tokens_add_nothing(device):
    ids = torch.empty(0, K, dtype=torch.int64, device=device)
    got = totals(device)
    record_routing(got, ids, sizes(ids), sizes(ids), torch.empty(0, E, device=device))
    assert got.count_nonzero() == 0


def test_torch_accepts_the_op(device):
    ids, kept, logits = draw(device)
    inputs = totals(device), ids, sizes(ids), sizes(kept), logits, None
    record_op(*inputs)
    torch.library.opcheck(torch.ops.moe_aiter.record_routing.default, inputs)


@pytest.mark.parametrize(
    "place, value, text",
    [
        (
            0,
            torch.zeros(2 * E + SCALARS + 2, dtype=torch.float64),
            r"\(E=5,\) but the monitor counts E=6 exp",
        ),
        (1, torch.zeros(T, dtype=torch.int64), r"expert_ids must be \(T, k\)"),
        (3, torch.zeros(4, dtype=torch.int32), r"kept is \(E=4,\) but the monitor counts E=5 experts"),
        (4, torch.zeros(3, E), r"logits is \(T=3, E\) but expert_ids is \(T=11, k\)"),
        (5, torch.ones(T + 1, dtype=torch.bool), r"mask is \(T=12\) but expert_ids is \(T=11, k\)"),
        (2, torch.zeros(E, dtype=torch.int32, device="meta"), "totals is on cpu but group_sizes is on meta"),
    ],
)
def test_errors(place, value, text):
    ids, kept, logits = draw("cpu")
    inputs = [totals("cpu"), ids, sizes(ids), sizes(kept), logits, torch.ones(T, dtype=torch.bool)]
    inputs[place] = value
    with pytest.raises(ValueError, match=text):
        record_routing(*inputs)
