"""permute, unpermute and row_dots, which are each other's gradients."""

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients

from moe_aiter.kernels.rows.permute import permute, row_dots, unpermute
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.kernels.rows.sums import weigh_rows_op
from moe_aiter.op import use

from ...references import permute_reference, row_dots_reference, unpermute_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {  # T, k, E, H
    "small": (13, 2, 4, 24),
    "odd": (7, 3, 5, 37),
    "one column": (6, 2, 3, 1),
    "one token": (1, 4, 8, 64),
    "wider than a block": (3, 2, 4, 1100),
    "more choices than are unrolled": (5, 19, 30, 40),
}


def make(device, T, k, E, H, dtype=torch.float32, dropped=True):
    """x (T, H), rows (R, H), weights (T, k), and a plan with dropped choices."""
    ids = torch.randint(-1 if dropped else 0, E, (T, k))
    order, rank, _ = sort_by_expert(ids.to(device), E)
    x, rows, weights = torch.randn(T, H), torch.randn(T * k, H), torch.rand(T, k)
    return x.to(device, dtype), rows.to(device, dtype), weights.to(device), order, rank


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.pairwise
def test_values_and_gradients(backend, device, shape, dtype, weighted):
    x, rows, weights, order, rank = make(device, *shape, dtype)
    weights = weights if weighted else None
    for fn, reference, first in (
        (permute, permute_reference, x),
        (unpermute, unpermute_reference, rows),
    ):
        inputs = first, order, rank, weights
        assert_as_good_as_torch(with_gradients(fn), with_gradients(reference), *inputs)
    inputs = rows, x, order, rank
    assert_as_good_as_torch(with_gradients(row_dots), with_gradients(row_dots_reference), *inputs, slack=3)


def test_permute_by_definition(backend, device):
    x, _, weights, order, rank = make(device, 9, 3, 4, 8)
    out = permute(x, order, rank, weights)
    for r, choice in enumerate(order.tolist()):
        expected = torch.zeros(8, device=device) if choice < 0 else weights.flatten()[choice] * x[choice // 3]
        assert torch.equal(out[r], expected)


def test_unpermute_undoes_permute(backend, device):
    x, _, weights, order, rank = make(device, 11, 4, 6, 20, dropped=False)
    assert torch.equal(unpermute(permute(x, order, rank), order, rank, torch.full_like(weights, 0.25)), x)


def test_the_sum_is_rounded_once(backend, device):
    """1 + 2^-9 four times over: bfloat16 additions would lose every one of them."""
    rows = torch.tensor(
        [[1.0], [2.0**-9], [2.0**-9], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16, device=device
    )
    order = torch.arange(5, dtype=torch.int32, device=device)
    assert unpermute(rows, order, order[None]).item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_of_a_dropped_choice_gets_in(backend, device, dtype):
    """Neither the NaN in its weight nor that in the rows that nobody owns."""
    x, rows, weights, order, rank = make(device, 12, 3, 4, 10, dtype)
    dropped = rank < 0
    assert dropped.any()
    weights[dropped] = float("nan")
    rows[order < 0] = float("nan")
    assert torch.equal(permute(x, order, rank, weights)[order < 0], torch.zeros_like(rows[order < 0]))
    assert unpermute(rows, order, rank, weights).isfinite().all()
    assert (row_dots(rows, x, order, rank)[dropped] == 0).all()


def test_every_choice_dropped(backend, device):
    x, rows, weights, order, rank = make(device, 5, 2, 3, 6)
    order, rank = torch.full_like(order, -1), torch.full_like(rank, -1)
    assert (permute(x, order, rank) == 0).all()
    assert (unpermute(rows, order, rank, weights) == 0).all()
    assert (row_dots(rows, x, order, rank) == 0).all()


def test_no_tokens(backend, device):
    x, rows, weights, order, rank = make(device, 0, 2, 3, 6)
    assert permute(x, order, rank, weights).shape == (0, 6)
    assert unpermute(rows, order, rank, weights).shape == (0, 6)
    assert row_dots(rows, x, order, rank).shape == (0, 2)


def test_any_strides_and_indices(backend, device):
    x, rows, weights, order, rank = make(device, 10, 4, 5, 12)
    want = (
        permute(x, order, rank, weights),
        unpermute(rows, order, rank, weights),
        row_dots(rows, x, order, rank),
    )
    x, rows, weights = (t.t().contiguous().t() for t in (x, rows, weights))
    order, rank = torch.stack([order, order], 1)[:, 0].long(), rank.long().t().contiguous().t()
    got = (
        permute(x, order, rank, weights),
        unpermute(rows, order, rank, weights),
        row_dots(rows, x, order, rank),
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    same = rows[:1].expand(40, 12)
    torch.testing.assert_close(unpermute(same, order, rank), unpermute(same.contiguous(), order, rank))


def test_a_gradient_of_stride_0(backend, device):
    x, _rows, _weights, order, rank = make(device, 10, 4, 5, 12)
    x.requires_grad_()
    permute(x, order, rank).sum().backward()
    torch.testing.assert_close(x.grad, (rank >= 0).sum(1, keepdim=True).expand(10, 12).float())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_another_dtype(backend, device, kind):
    _x, rows, weights, order, rank = make(device, 8, 2, 3, 9)
    weights = weights.to(kind).requires_grad_()
    unpermute(rows, order, rank, weights).sum().backward()
    assert weights.grad.dtype == kind
    want = rows[rank.long()].sum(2).masked_fill(rank < 0, 0)
    torch.testing.assert_close(weights.grad, want.to(kind), rtol=1e-2, atol=1e-2)


def test_determinism(backend, device):
    x, rows, weights, order, rank = make(device, 40, 8, 16, 130)
    for fn, first in ((unpermute, rows), (permute, x)):
        assert torch.equal(fn(first, order, rank, weights), fn(first, order, rank, weights))


def test_gradcheck():
    ids = torch.randint(-1, 4, (5, 3))
    order, rank, _ = sort_by_expert(ids, 4)
    options = dict(dtype=torch.float64, requires_grad=True)
    x, rows, weights = (
        torch.randn(5, 4, **options),
        torch.randn(15, 4, **options),
        torch.rand(5, 3, **options),
    )
    with use("torch"):
        for fn, inputs in (
            (permute, (x, order, rank, None)),
            (permute, (x, order, rank, weights)),
            (unpermute, (rows, order, rank, weights)),
            (row_dots, (rows, x, order, rank)),
        ):
            assert torch.autograd.gradcheck(fn, inputs)
            assert torch.autograd.gradgradcheck(fn, inputs)


def test_fewer_rows_than_choices(backend, device):
    """The last rows of a plan: a choice whose row is not among them adds nothing."""
    x, rows, weights, order, rank = make(device, 6, 2, 3, 8)
    some, there = order[7:], rank.where(rank >= 7, 7 - 1) - 7  # -1 before the first of these rows
    whole = permute(x, order, rank, weights)
    assert torch.equal(permute(x, some, there, weights), whole[7:])
    kept = rows.clone()
    kept[:7] = 0
    assert torch.equal(unpermute(rows[7:], some, there, weights), unpermute(kept, order, rank, weights))
    assert torch.equal(row_dots(rows[7:], x, some, there), row_dots(kept, x, order, rank))


@pytest.mark.no_host
def test_fewer_weighted_rows_than_choices(backend, device):
    _, rows, weights, order, rank = make(device, 6, 2, 3, 8)
    some, there = order[7:], rank.where(rank >= 7, 7 - 1) - 7
    kept = rows.clone()
    kept[:7] = 0
    scaled, dots = weigh_rows_op(rows[7:], rows[7:], weights, some, there)
    want, want_dots = weigh_rows_op(kept, kept, weights, order, rank)
    assert torch.equal(scaled, want[7:])
    torch.testing.assert_close(dots, want_dots)


def test_errors():
    x, rows, weights, order, rank = make("cpu", 6, 2, 3, 8)
    with pytest.raises(ValueError, match=r"x is \(T=5, H\) but rank is \(T=6, k\)"):
        permute(x[:5], order, rank)
    with pytest.raises(ValueError, match=r"x is \(R=11, H\) but order is \(R=12,\)"):
        unpermute(rows[:11], order, rank)
    with pytest.raises(ValueError, match=r"order is \(R=13,\) but rank \(T, k\) holds 12 choices"):
        permute(x, torch.cat([order, order[:1]]), rank)
    with pytest.raises(ValueError, match=r"rows is \(R, H=7\) but x is \(T, H=8\)"):
        row_dots(rows[:, :7], x, order, rank)
    with pytest.raises(ValueError, match=r"rank is \(T, k=2\) but routing_weights is \(T, k=1\)"):
        unpermute(rows, order, rank, weights[:, :1])
    with pytest.raises(TypeError, match="order must be int32 or int64"):
        permute(x, order.float(), rank)
    with pytest.raises(TypeError, match="x must be float16"):
        permute(x.int(), order, rank)
    with pytest.raises(TypeError, match=r"rows is torch.float16 but x is torch.float32"):
        row_dots(rows.half(), x, order, rank)
    with pytest.raises(ValueError, match=r"x must be \(T, H\)"):
        permute(x[0], order, rank)


def test_an_index_past_the_end_in_debug_mode():
    x, rows, _, order, rank = make("cpu", 6, 2, 3, 8)
    with pytest.raises(ValueError, match="order holds 12 but there are 12 choices"):
        permute(x, order.index_fill(0, torch.tensor(3), 12), rank)
    with pytest.raises(ValueError, match="rank holds 99 but there are 12 rows"):
        unpermute(rows, order, rank.index_fill(0, torch.tensor(3), 99))
