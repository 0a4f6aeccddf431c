"""Plans of several sources, joined: the plan of all their choices, for some of the experts."""

import pytest
import torch

from moe_aiter.kernels.base.check import check_plan_values
from moe_aiter.kernels.rows.lend import lend_rows
from moe_aiter.kernels.rows.merge import MergeInputs, merge_plans, merge_reference
from moe_aiter.kernels.rows.permute import ELSEWHERE
from moe_aiter.kernels.rows.sort import sort_by_expert


def plans_of(ids, num_experts):
    """The ranks and the group sizes of the plans of ids (S, T, k)."""
    plans = [sort_by_expert(part, num_experts) for part in ids]
    return torch.stack([p[1].flatten() for p in plans]), torch.stack([p[2] for p in plans])


def merged(ids, num_experts, first, count, rows=10**6, last_first=False):
    """Join the plans of ids (S, T, k)."""
    return merge_plans(*plans_of(ids, num_experts), ids.shape[2], first, count, rows, last_first)


@pytest.mark.parametrize("shape", [(2, 0, 2), (1, 1, 1), (3, 13, 3), (2, 400, 2)], ids=str)
@pytest.mark.parametrize("first, count", [(0, 7), (0, 3), (3, 4), (6, 1)])
def test_merge(backend, device, shape, first, count):
    ids = torch.randint(-1, 7, shape, device=device)
    ids = ids.masked_fill(ids == 4, 5)  # an expert without rows
    order, (rank,), (sizes,), (spans,) = merged(ids, 7, first, count)
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
    order, (whole,), (total,), ((begins, rows_of),) = merged(ids, 7, 2, 4)
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
        begin, end = ((n - i * rows).clamp(0, rows) for n in (begins, begins + rows_of))
        assert torch.equal(spans[i, ..., :4], torch.stack([begin, end - begin])[..., :4])


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


def joined(*inputs):
    """What `merge_plans` returns, which is what the reference says; spans without their last columns."""
    i = MergeInputs(*inputs)
    (*got, spans), (*want, right) = merge_plans(*inputs), merge_reference(i)
    for ours, reference in zip((*got, spans[..., : i.groups]), (*want, right[..., : i.groups]), strict=True):
        assert torch.equal(ours.long(), reference.long())
    return *got, spans[..., : i.groups]


def check_call(call, choices, last_first, sources, rows):
    """A call computes these choices of each group in this order, in windows of so many rows."""
    order, ranks, group_sizes, spans = call
    whole, (windows, tokens, top_k) = torch.cat(choices), ranks.shape
    count, ranks = len(whole), ranks.view(windows, -1)
    assert torch.equal(order[:count], whole) and (order[count:] == -1).all()
    assert group_sizes.sum(0).tolist() == [len(group) for group in choices]
    earlier = torch.zeros_like(ranks[0], dtype=torch.bool)
    computed = list(zip(order.split(rows), ranks, group_sizes, strict=True))
    for part, rank, sizes in computed[::-1] if last_first else computed:
        check_plan_values(len(part), sizes, part, rank.view(tokens, top_k))
        assert torch.equal(rank == ELSEWHERE.value, earlier)
        earlier |= rank >= 0
    for source in range(sources):
        for n, group in enumerate(choices):
            pairs = zip(order.split(rows), spans[:, :, source, n].tolist(), strict=True)
            of_source = group[group // (tokens * top_k // sources) == source]
            assert torch.equal(
                torch.cat([part[begin : begin + size] for part, (begin, size) in pairs]), of_source
            )


@pytest.mark.parametrize("ranks, experts", [(2, 5), (3, 12), (4, 16)], ids=str)
@pytest.mark.parametrize("guests", [1, 2, 9])
@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("rows", [29, 10**6])
@pytest.mark.pairwise
def test_lent_experts(backend, device, ranks, experts, guests, last_first, rows):
    """All ranks together compute each choice once, in the order of the expert; guests' rows come last."""
    each, tokens = -(-experts // ranks), 40
    ids = (torch.rand(ranks, tokens, 2).pow(3) * (experts + 1)).long().to(device) - 1
    plans = plans_of(ids, experts)
    shares, guests_of = lend_rows(plans[1], each, guests, 4, 4)
    assert (guests_of >= 0).any()
    of_expert = [(ids.flatten() == n).nonzero().flatten().int() for n in range(experts)]
    missing = [choices.clone() for choices in of_expert]
    for r in range(ranks):
        first, count = r * each, min(each, experts - r * each)
        own, borrowed = range(first, first + count), guests_of[r][guests_of[r] >= 0].tolist()
        parts = [of[begin:end] for of, begin, end in zip(of_expert, *shares[r].tolist(), strict=True)]
        groups = [parts[n] for n in (*own, *borrowed)] + [of_expert[0][:0]] * (guests - len(borrowed))
        call = joined(*plans, 2, first, count, rows, last_first, shares[r], guests)
        check_call(call, groups, last_first, ranks, rows)
        joined(*plans, 2, first, count, 7, last_first, shares[r], guests)
        for n in (*own, *borrowed):
            missing[n] = missing[n][~torch.isin(missing[n], parts[n])]
    assert not any(map(len, missing))


def test_guests_without_a_slot(backend, device):
    """Experts past the slots are dropped, and slots without an expert have no rows."""
    ids = torch.tensor([[[0, 1], [2, 3], [3, 3]]], device=device)
    call = *plans_of(ids, 4), 2, 0, 1
    shares = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 3]], device=device)
    order, ranks, sizes, spans = joined(*call, 8, False, shares, 2)
    assert order.tolist() == [0, 1, 2, -1, -1, -1] and sizes.tolist() == [[1, 1, 1]]
    order, ranks, sizes, spans = joined(*call, 3, True, shares, 5)
    assert order.tolist() == [0, 1, 2, 4, 5, -1]
    assert sizes.tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 2, 0, 0]]
    gone = ELSEWHERE.value
    assert ranks.tolist() == [[[0, 1], [2, -1], [gone, gone]], [[-1, -1], [-1, -1], [0, 1]]]
    assert spans[:, 1, 0].tolist() == sizes.tolist()
    assert spans[:, 0, 0].tolist() == [[0, 1, 2, 3, 3, 3], [0, 0, 0, 0, 2, 2]]


@pytest.mark.parametrize("guests", [0, 2])
def test_shares_are_cut_to_what_there_is(backend, device, guests):
    """Numbers that no plan has, of a rank that failed: nothing is written outside of the outputs."""
    ids = torch.randint(-1, 7, (2, 50, 3), device=device)
    for bounds in ((-5, 2**20), (-(2**31), 2**31 - 1), (9, 3), (2**31 - 1, -1)):
        shares = torch.tensor(bounds, device=device).view(2, 1).expand(2, 7).contiguous()
        joined(*plans_of(ids, 7), 3, 2, 2, 60, False, shares, guests)


def test_bad_shares(device):
    plans = plans_of(torch.zeros(2, 4, 2, dtype=torch.int64, device=device), 4)
    shares = torch.zeros(2, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"shares is \(3, 4\) but must be \(2, 4\)"):
        merge_plans(*plans, 2, 0, 2, 8, False, shares[[0, 1, 0]], 0)
    with pytest.raises(ValueError, match="guests=1 needs shares"):
        merge_plans(*plans, 2, 0, 2, 8, False, None, 1)
    with pytest.raises(ValueError, match="guests must be at least 0"):
        merge_plans(*plans, 2, 0, 2, 8, False, shares, -1)
