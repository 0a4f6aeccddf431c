"""The counting sort: a permutation by expert, stable, with dropped choices left out."""

import pytest
import torch

from moe_aiter.kernels.rows import sort
from moe_aiter.kernels.rows.sort import sort_by_expert

SHAPES = {  # T, k, E
    "mixtral": (50, 2, 8),
    "qwen3": (21, 8, 128),
    "top 1": (200, 1, 4),
    "one expert": (40, 3, 1),
    "one choice": (1, 1, 5),
    "more experts than choices": (4, 2, 300),
    "odd": (67, 5, 33),
    "no tokens": (0, 2, 4),
    "no tokens, many experts": (0, 2, 1025),
    "several chunks": (300, 5, 40),
    "many experts": (9, 2, 1025),
    "more than a program counts": (1100, 4, 9),
}


def random_ids(num_tokens, top_k, num_experts, dtype=torch.int64):
    """Experts with repeats, some choices dropped."""
    return torch.randint(-2, num_experts, (num_tokens, top_k)).clamp(min=-1).to(dtype)


def expected(ids, num_experts):
    """By the definition, in Python."""
    flat = ids.flatten().tolist()
    order = [i for e in range(num_experts) for i, expert in enumerate(flat) if expert == e]
    rank = [order.index(i) if i in set(order) else -1 for i in range(len(flat))]
    order += [-1] * (len(flat) - len(order))
    sizes = [flat.count(e) for e in range(num_experts)]
    result = torch.tensor(order), torch.tensor(rank).view(ids.shape), torch.tensor(sizes)
    return tuple(t.int() for t in result)


def assert_sorted(ids, num_experts):
    for got, want in zip(sort_by_expert(ids, num_experts), expected(ids, num_experts), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_by_definition(backend, device, shape, dtype):
    assert_sorted(random_ids(*shape, dtype).to(device), shape[2])


def test_all_choices_dropped(backend, device):
    assert_sorted(torch.full((9, 2), -1, device=device), 3)


def test_every_choice_on_one_expert(backend, device):
    assert_sorted(torch.full((90, 2), 2, device=device), 4)


def test_any_strides(backend, device):
    ids = random_ids(30, 4, 6).to(device)
    assert_sorted(ids.t().contiguous().t(), 6)
    assert_sorted(ids[::3, ::2], 6)
    assert_sorted(ids[:1].expand(30, 4), 6)
    assert_sorted(ids[:, :1].expand(30, 4), 6)


def test_what_millions_of_rows_do(backend, device, monkeypatch):
    """A scan of several chunks, at a small size."""
    monkeypatch.setattr(sort, "SCAN_BLOCK", 4)
    assert_sorted(random_ids(1050, 4, 70).to(device), 70)


def test_against_torch(backend, device):
    """More experts than one step looks at."""
    top_k, num_experts = 8, 160
    ids = torch.randint(-1, num_experts, (600, top_k))
    order, rank, group_sizes = (t.cpu().long() for t in sort_by_expert(ids.to(device), num_experts))
    kept = int((ids >= 0).sum())
    by_expert = ids.flatten().where(ids.flatten() >= 0, num_experts).sort(stable=True)
    assert torch.equal(order[:kept], by_expert.indices[:kept]) and (order[kept:] == -1).all()
    assert torch.equal(rank.flatten()[order[:kept]], torch.arange(kept))
    assert ((rank >= 0) == (ids >= 0)).all()
    assert torch.equal(group_sizes, ids[ids >= 0].bincount(minlength=num_experts))


def test_an_id_past_the_end(backend, device, no_debug):
    """Dropped where to look would be to wait; else an error, as in debug mode."""
    ids = torch.tensor([[0, 7], [2, 1]], device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="expert_ids holds 7 but num_experts is 3"):
            sort_by_expert(ids, 3)
        return
    order, rank, group_sizes = sort_by_expert(ids, 3)
    assert (order.tolist(), rank.tolist(), group_sizes.tolist()) == (
        [0, 3, 2, -1],
        [[0, -1], [2, 1]],
        [1, 1, 1],
    )


def test_an_id_past_the_end_in_debug_mode(device):
    with pytest.raises(ValueError, match="expert_ids holds 7 but num_experts is 3"):
        sort_by_expert(torch.tensor([[0, 7]], device=device), 3)


def test_errors():
    ids = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expert_ids must be \(T, k\)"):
        sort_by_expert(ids.flatten(), 3)
    with pytest.raises(TypeError, match=r"expert_ids must be int32 or int64, not torch.float32"):
        sort_by_expert(ids.float(), 3)
    with pytest.raises(ValueError, match="num_experts must be at least 1, not 0"):
        sort_by_expert(ids, 0)
    with pytest.raises(ValueError, match="k=0"):
        sort_by_expert(ids[:, :0], 3)


def test_choices_that_int32_cannot_number(device):
    """Nothing of that size is allocated: the ids are one number in memory, or none."""
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    meta = ids.to("meta")
    for t in (ids, meta):
        with pytest.raises(ValueError, match=r"expert_ids is \(T=1073741824, k=2\): 2147483648 choices"):
            sort_by_expert(t.expand(2**30, 2), 4)
    order, *_ = sort_by_expert(meta.expand(2**31 - 1, 1), 4)
    assert order.shape == (2**31 - 1,)
