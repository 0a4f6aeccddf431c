"""Plans of several sources, joined: the plan of all their choices, for some of the experts."""

import pytest
import torch

from moe_aiter.kernels.base.check import check_plan_values
from moe_aiter.kernels.rows.merge import merge_plans
from moe_aiter.kernels.rows.permute import ELSEWHERE
from moe_aiter.kernels.rows.sort import sort_by_expert


def merged(ids, num_experts, first, count, rows=10**6, last_first=False):
    """Join the plans of ids (S, T, k)."""
    plans = [sort_by_expert(part, num_experts) for part in ids]
    ranks, sizes = torch.stack([p[1].flatten() for p in plans]), torch.stack([p[2] for p in plans])
    return merge_plans(ranks, sizes, ids.shape[2], first, count, rows, last_first)


@pytest.mark.parametrize("shape", [(2, 0, 2), (1, 1, 1), (3, 13, 3), (2, 400, 2)], ids=str)
@pytest.mark.parametrize("first, count", [(0, 7), (0, 3), (3, 4), (6, 1)])
def test_merge(backend, device, shape, first, count):
    ids = torch.randint(-1, 7, shape, device=device)
    ids = ids.masked_fill(ids == 4, 5)  # an expert without rows
    order, (rank,), (sizes,), spans = merged(ids, 7, first, count)
    mine = torch.where((ids >= first) & (ids < first + count), ids - first, -1).flatten(0, 1)
    for got, want in zip((order, rank, sizes), sort_by_expert(mine, count), strict=True):
        assert torch.equal(got, want)
    for source in range(shape[0]):
        for e in range(count):
            start, size = spans[:, source, e].tolist()
            choices = order[start : start + size]
            of_source = torch.full_like(choices, source)
            assert torch.equal(choices // max(shape[1] * shape[2], 1), of_source)
            assert (ids.flatten()[choices.long()] == first + e).all()
    assert spans[1, :, :count].sum() == sizes.sum()


@pytest.mark.parametrize("rows", [1, 7, 26, 77, 78, 100])
@pytest.mark.parametrize("last_first", [False, True])
def test_windows_are_a_partition(backend, device, rows, last_first):
    """Each choice is in one window, and ELSEWHERE in the windows that are computed after that one."""
    ids = torch.randint(-1, 7, (3, 13, 2), device=device)
    order, (whole,), (total,), whole_spans = merged(ids, 7, 2, 4)
    same_order, ranks, sizes, spans = merged(ids, 7, 2, 4, rows, last_first)
    count = -(-78 // rows)
    assert torch.equal(same_order, order) and ranks.shape == (count, 39, 2) and sizes.shape == (count, 4)
    assert torch.equal(sizes.sum(0), total)
    for i, (part, rank, group_sizes) in enumerate(zip(order.split(rows), ranks, sizes, strict=True)):
        check_plan_values(len(part), group_sizes, part, rank)
        of = torch.where(whole < 0, -1, whole // rows)
        assert torch.equal(rank >= 0, of == i) and torch.equal((rank + i * rows)[of == i], whole[of == i])
        assert torch.equal(rank == ELSEWHERE.value, (of > i) if last_first else (of >= 0) & (of < i))
        assert rank.min() >= ELSEWHERE.value
    begin, end = whole_spans[0].clamp(max=rows), (whole_spans[0] + whole_spans[1]).clamp(max=rows)
    assert torch.equal(spans[:, :, :4], torch.stack([begin, end - begin])[:, :, :4])


def test_plans_of_some_rows(backend, device):
    """Plans with dropped choices and 64-bit numbers; strides; bad sizes."""
    ids = torch.tensor([[[0, -1], [2, 1]], [[-1, -1], [1, 1]]], device=device)
    plans = [sort_by_expert(part, 3) for part in ids]
    ranks = torch.stack([p[1].flatten() for p in plans]).long()
    sizes = torch.stack([p[2] for p in plans]).long()
    wide = [torch.stack([t, t - 9], 1).flatten(1)[:, : t.shape[1]] for t in (ranks, sizes)]
    order, (rank,), (group_sizes,), _ = merge_plans(*wide, 2, 1, 2, 8, False)
    assert group_sizes.tolist() == [3, 1] and order.tolist() == [3, 6, 7, 2, -1, -1, -1, -1]
    assert rank.tolist() == [[-1, -1], [3, 0], [-1, -1], [1, 2]]
    far = ranks.masked_fill(ranks < 0, -(2**32) + 1)
    assert torch.equal(merge_plans(far, sizes, 2, 1, 2, 8, False)[0], order)
    far = ranks.masked_fill(ranks < 0, 2**32 + 1)
    assert torch.equal(merge_plans(far, sizes, 2, 1, 2, 8, False)[0], order)
    for bad in ((ranks, sizes[:1], 2, 0, 3), (ranks, sizes, 3, 0, 3), (ranks, sizes, 2, 1, 3)):
        with pytest.raises(ValueError, match="do not fit"):
            merge_plans(*bad, 8, False)
    with pytest.raises(ValueError, match="rows"):
        merge_plans(ranks, sizes, 2, 0, 3, 0, False)
