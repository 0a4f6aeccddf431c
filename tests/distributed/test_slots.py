"""Where tokens and rows stand: padding, windows."""

import pytest
import torch

from moe_aiter.distributed.slots import ROWS, pad, window, windows
from moe_aiter.kernels.base.check import check_plan_values
from moe_aiter.routing.plan import make_plan


@pytest.mark.parametrize("shape", [(3,), (3, 2), (0, 2)])
def test_padding(shape):
    x = torch.randn(shape)
    padded = pad(x, 4, -1)
    assert padded.shape == (4, *shape[1:])
    assert torch.equal(padded[: shape[0]], x) and (padded[shape[0] :] == -1).all()
    assert pad(x, shape[0]) is x


@pytest.mark.parametrize("rows", [1, 7, 26, 100])
@pytest.mark.parametrize("dropped", [False, True])
def test_windows_are_a_partition(rows, dropped):
    ids = torch.randint(-1 if dropped else 0, 5, (13, 2))
    plan = make_plan(ids, 5)
    found = [window(plan, first, rows) for first in range(0, 26, rows)]
    for part in found:
        check_plan_values(len(part.order), *part[::-1][:1], part.order, part.rank)
    assert torch.equal(torch.cat([part.order for part in found]), plan.order)
    assert torch.equal(sum(part.group_sizes for part in found), plan.group_sizes)
    ranks = torch.stack([part.rank + 1 for part in found])  # 0 for a dropped choice
    assert ((ranks > 0).sum(0) == (plan.rank >= 0)).all()
    starts = (torch.arange(len(found)) * rows)[:, None, None]
    assert torch.equal((ranks + starts).where(ranks > 0, 0).sum(0) - 1, plan.rank)


@pytest.mark.parametrize(
    "choices, bound, expected",
    [(0, 0, (1, 1)), (1, 5, (1, 1)), (768, 384, (2, 384)), (768, 385, (2, 512)), (768, 1000, (1, 768))],
)
def test_how_many_windows(choices, bound, expected):
    count, rows = windows(choices, bound)
    assert (count, rows) == expected
    assert count * rows >= choices and rows <= max(bound + ROWS, 1)
