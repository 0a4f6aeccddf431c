"""Plans made by hand: some contradict themselves, and some are laid out as `sort_by_expert` never does it."""

import functools

import pytest
import torch

from moe_aiter.kernels.experts.down import expert_down_grad_op
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import by_layer, expert_mlp
from moe_aiter.kernels.grouped.tgmm import tgmm, tgmm_accumulate
from moe_aiter.kernels.rows.permute import permute, row_dots, unpermute
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.kernels.rows.sums import group_sum

T, H, CHANNELS, E = 6, 4, 3, 3


def experts(fn, plan, x=None):
    """The experts' output for a plan of top_k 2, by `fn`: expert_mlp or by_layer."""
    width = 2 * CHANNELS
    generator = torch.Generator().manual_seed(0)
    sizes = (T, H), (E, width, H), (E, H, CHANNELS), (T, 2)
    tensors = [torch.randn(size, generator=generator).to(plan[0].device) for size in sizes]
    x, gate_up, down, weights = tensors if x is None else (x, *tensors[1:])
    if fn is expert_mlp:
        return expert_mlp(x, gate_up, down, weights, plan)
    return by_layer(ExpertInputs(x, gate_up, None, down, None, weights, *plan, "swiglu", False, True))


def rows(plan, n=2 * T):
    return torch.ones(n, H, device=plan[0].device)


OPS = {  # name -> what runs with a plan (order, rank, group_sizes)
    "expert_mlp": functools.partial(experts, expert_mlp),
    "by layer": functools.partial(experts, by_layer),
    "permute": lambda plan: permute(rows(plan, T), *plan[:2]),
    "unpermute": lambda plan: unpermute(rows(plan), *plan[:2]),
    "row_dots": lambda plan: row_dots(rows(plan), rows(plan, T), *plan[:2]),
    "tgmm": lambda plan: tgmm(rows(plan, T), rows(plan), plan[2], plan[0], 2),
    "tgmm_accumulate": lambda plan: tgmm_accumulate(
        torch.zeros(E, H, H, device=plan[0].device), rows(plan, T), rows(plan), plan[2], plan[0], 2
    ),
    "group_sum": lambda plan: group_sum(rows(plan, T), plan[2], plan[0], 2),
}
WHOLE, MOVES, SUMS = ["expert_mlp", "by layer"], ["permute", "unpermute", "row_dots"], list(OPS)[5:]


def make_plan(device="cpu", dtype=torch.int32):
    """Three choices of twelve are dropped: order, rank and group_sizes [4, 5, 0]."""
    ids = torch.tensor([[0, 1], [1, -1], [0, 0], [-1, 1], [1, 0], [1, -1]], device=device)
    return [t.to(dtype) for t in sort_by_expert(ids, E)]


BAD = {  # name -> which part, its first element then, which ops see it, the message
    "a size is negative": (2, -1, WHOLE + SUMS, r"group_sizes \[-1, 5, 0\] must not be negative"),
    "sizes sum to too much": (2, 8, WHOLE + SUMS, "nor sum to more than 12 rows"),
    "a dropped row is counted": (2, 5, WHOLE + SUMS, r"order drops a row that group_sizes \[5, 5, 0\] count"),
    "order is past the end": (0, 12, list(OPS), "order holds 12 but there are 12 choices"),
    "rank is past the end": (1, 12, WHOLE + MOVES, "rank holds 12 but there are 12 rows"),
    "a row twice": (1, 1, WHOLE + MOVES, "rank is not the inverse of order"),
    "a choice without a row": (1, -1, WHOLE + MOVES, "rank is not the inverse of order"),
}


@pytest.mark.parametrize("part, value, ops, message", BAD.values(), ids=BAD)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_debug_refuses_a_plan_that_contradicts_itself(device, part, value, ops, message, dtype):
    good, bad = make_plan(device, dtype), make_plan(device, dtype)
    bad[part].view(-1)[0] = value
    for op in ops:
        OPS[op](good)
        with pytest.raises(ValueError, match=message):
            OPS[op](bad)


@pytest.mark.parametrize("value", [2**32, 2**32 + 1, 2**40, 2**31], ids=str)
@pytest.mark.parametrize("op", WHOLE[:1] + MOVES)
@pytest.mark.no_interpreter
def test_an_index_is_not_wrapped(op, value, backend, device, no_debug):
    """As int32 they would be 0, 1 and negative."""
    if device.type != "cpu" or backend == "triton":
        pytest.skip(
            "a GPU trusts a plan, which only MOE_AITER_DEBUG=1 checks; torch's own kernels stop there"
        )
    for part in {"expert_mlp": [0], "permute": [0]}.get(op, [1]):
        plan = make_plan(device, torch.int64)
        plan[part].view(-1)[0] = value
        with pytest.raises((ValueError, IndexError)):
            OPS[op](plan)


@pytest.mark.parametrize("value", [-(2**32) + 1, -(2**40)], ids=str)
@pytest.mark.parametrize("op", MOVES)
def test_a_very_negative_index_means_a_dropped_choice(op, value, backend, device, no_debug):
    good, bad = make_plan(device, torch.int64), make_plan(device, torch.int64)
    for plan, index in ((good, -1), (bad, value)):
        plan[0][-1] = index
        plan[1][plan[1] < 0] = index
    assert torch.equal(OPS[op](bad), OPS[op](good))


@pytest.mark.parametrize("op", OPS)
def test_a_plan_with_strides(op, device):
    plan = make_plan(device)
    order, rank, sizes = (torch.stack([t, t - 1], -1)[..., 0] for t in plan)
    strided = order, rank.mT.contiguous().mT, sizes
    assert not any(t.is_contiguous() for t in strided)
    torch.testing.assert_close(OPS[op](strided), OPS[op](plan))


def behind_nan(*size, device):
    """Random numbers that have NaN in front of them in memory."""
    memory = torch.randn(size[0] + 1, *size[1:])
    memory[0] = float("nan")
    return memory.to(device)[1:]


def test_nothing_in_front_of_a_buffer_is_read(device, no_debug):
    """Of a dropped row that a group counts.  With top_k=1, order -1 is token -1."""
    order = torch.tensor([2, -1, 0, -1], dtype=torch.int32, device=device)
    rank = torch.tensor([[2], [-1], [0], [-1]], dtype=torch.int32, device=device)
    sizes = torch.tensor([2, 2], dtype=torch.int32, device=device)
    tokens, y = behind_nan(4, 8, device=device), torch.ones(4, 8, device=device)
    assert tgmm(tokens, y, sizes, order, 1).isfinite().all()
    many = torch.full((300,), -1, dtype=torch.int32, device=device)  # whole blocks, which have no mask
    assert tgmm(behind_nan(300, 8, device=device), y[:1].expand(300, 8), sizes * 75, many, 1).isfinite().all()
    scale = behind_nan(4, device=device)
    assert group_sum(tokens, sizes, order, 1, scale).isfinite().all()
    z, down, weights = torch.ones(4, 6, device=device), torch.ones(2, 8, 3, device=device), scale[:, None]
    for out in expert_down_grad_op(tokens, z, down, weights, order, rank, sizes, "swiglu", False, True):
        assert out.isfinite().all()
