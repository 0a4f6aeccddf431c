"""The plan's identities, and that permute and unpermute take one."""

import pytest
import torch

from moe_aiter.routing.plan import make_plan, permute, unpermute

SHAPES = {  # T, k, E
    "some": (19, 3, 7),
    "top 1": (8, 1, 4),
    "one expert": (5, 2, 1),
    "one token": (1, 4, 9),
    "no tokens": (0, 2, 3),
    "idle experts": (3, 2, 40),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def ids(request, device):
    num_tokens, top_k, num_experts = request.param
    drawn = torch.randint(num_experts, (num_tokens, top_k), generator=torch.Generator().manual_seed(0))
    return drawn.to(device), num_experts


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.pairwise
def test_identities(ids, dropping, dtype):
    expert_ids, num_experts = ids
    expert_ids = expert_ids.to(dtype)
    if dropping:
        expert_ids[::2, 0] = -1
    order, rank, group_sizes = make_plan(expert_ids, num_experts)
    flat = expert_ids.flatten().tolist()
    by_expert = sorted((e, i) for i, e in enumerate(flat) if e >= 0)
    dropped = len(flat) - len(by_expert)
    assert {t.dtype for t in (order, rank, group_sizes)} == {torch.int32}
    assert order.tolist() == [i for _, i in by_expert] + [-1] * dropped
    assert group_sizes.tolist() == [flat.count(e) for e in range(num_experts)]
    for row, i in enumerate(order.tolist()[: len(by_expert)]):
        assert rank.flatten()[i] == row
    assert (rank == -1).sum() == dropped


def test_there_and_back(ids, device):
    expert_ids, num_experts = ids
    plan = make_plan(expert_ids, num_experts)
    x = torch.randn(len(expert_ids), 5, generator=torch.Generator().manual_seed(1)).to(device)
    weights = torch.full(expert_ids.shape, 1 / expert_ids.shape[1], device=device)
    torch.testing.assert_close(unpermute(permute(x, plan), plan, weights), x)
    torch.testing.assert_close(unpermute(permute(x, plan, weights), plan), x)
    torch.testing.assert_close(unpermute(permute(x, tuple(plan)), tuple(plan), weights), x)


def test_rows_go_to_their_experts(device):
    plan = make_plan(torch.tensor([[2, 0], [-1, 2]], device=device), 3)
    x = torch.tensor([[1.0], [10.0]], device=device)
    weights = torch.tensor([[0.5, 2.0], [7.0, 3.0]], device=device)
    assert permute(x, plan).tolist() == [[1], [1], [10], [0]]
    assert permute(x, plan, weights).tolist() == [[2], [0.5], [30], [0]]
    rows = torch.tensor([[1.0], [2.0], [4.0], [float("nan")]], device=device)
    assert unpermute(rows, plan).tolist() == [[3], [4]]
    assert unpermute(rows, plan, weights).tolist() == [[3], [12]]


def test_gradients_flow_to_rows_and_weights(device):
    plan = make_plan(torch.tensor([[2, 0], [-1, 2]], device=device), 3)
    x = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    rows = torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.rand(2, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: permute(x, plan, w), (x, weights))
    assert torch.autograd.gradcheck(lambda r, w: unpermute(r, plan, w), (rows, weights))


@pytest.mark.parametrize(
    "expert_ids, num_experts, error",
    [
        (torch.zeros(4, dtype=torch.int64), 3, ValueError),
        (torch.zeros(4, 2), 3, TypeError),
        (torch.zeros(4, 2, dtype=torch.int64), 0, ValueError),
    ],
)
def test_errors(expert_ids, num_experts, error):
    with pytest.raises(error):
        make_plan(expert_ids, num_experts)


@pytest.mark.parametrize("plan, error", [(torch.zeros(4), TypeError), ((), ValueError), (None, TypeError)])
@pytest.mark.parametrize("fn", [permute, unpermute])
def test_what_is_no_plan_is_refused(fn, plan, error):
    with pytest.raises(error, match="plan must be order, rank and group_sizes"):
        fn(torch.zeros(4, 2), plan)
