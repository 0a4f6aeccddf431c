"""Projections with low-rank adapters, and what they are made of."""

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients

from moe_aiter.config import interpret
from moe_aiter.kernels.experts.adapted import (
    adapted_down,
    adapted_low,
    adapted_up,
    add_low_rank,
    add_low_rank_op,
)
from moe_aiter.kernels.quantize.four_bit import quantized
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.kernels.rows.sums import weigh_rows_op

from ...references import (
    adapted_down_reference,
    adapted_low_reference,
    adapted_up_reference,
    add_low_rank_reference,
    weigh_rows_reference,
)

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.no_host
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
T, H, N, E, CHOICES = 23, 24, 40, 5, 3
SHAPES = {  # rank, bias, order of the weight's memory
    "rank 3": (3, False, False),
    "rank 16, bias, transposed": (16, True, True),
    "rank 70": (70, False, False),
    "no adapter": (None, True, False),
}
shapes = pytest.mark.parametrize("rank, bias, transposed", SHAPES.values(), ids=SHAPES)


def plan(device):
    """Dropped choices, and an expert without rows."""
    ids = torch.randint(-1, E, (T, CHOICES), generator=torch.Generator().manual_seed(3))
    return sort_by_expert(ids.masked_fill(ids == 2, 1).to(device), E)


def new(*shape, device, dtype, scale=1.0):
    return (scale * torch.randn(shape)).to(device, dtype)


def problem(device, dtype, rows, width, out, rank, bias, transposed):
    """x or a, w, bias, low, b."""
    where = {"device": device, "dtype": dtype}
    w = new(E, width, out, **where, scale=width**-0.5)
    w = w.mT if transposed else w.mT.contiguous()
    biases = new(E, out, **where) if bias else None
    if rank is None:
        return new(rows, width, **where), w, biases, None, None
    low, b = new(T * CHOICES, rank, **where), new(E, out, rank, **where, scale=rank**-0.5)
    return new(rows, width, **where), w, biases, low, b


@dtypes
@shapes
def test_up(backend, device, dtype, rank, bias, transposed):
    inputs, (order, rank_of, sizes) = problem(device, dtype, T, H, N, rank, bias, transposed), plan(device)
    n = int(sizes.sum())  # rows of no expert are not written
    ops = (with_gradients(lambda *i, fn=fn: fn(*i)[:n]) for fn in (adapted_up, adapted_up_reference))
    assert_as_good_as_torch(*ops, *inputs, order, rank_of, sizes)


@dtypes
@shapes
def test_down(backend, device, dtype, rank, bias, transposed):
    inputs = problem(device, dtype, T * CHOICES, N, H, rank, bias, transposed)
    order, rank, sizes = plan(device)
    s = torch.rand(T, CHOICES).to(device)
    ops = with_gradients(adapted_down), with_gradients(adapted_down_reference)
    assert_as_good_as_torch(*ops, *inputs, s, order, rank, sizes)


def by_adapter(device, adapters=3):
    """A plan with the rows of each expert by adapter, the lengths of these segments, and their pairs."""
    ids = torch.randint(-1, E * (adapters + 1), (T, CHOICES), generator=torch.Generator().manual_seed(5))
    order, rank, lens = sort_by_expert(ids.masked_fill(ids == 2, 1).to(device), E * (adapters + 1))
    numbers = torch.arange(E * adapters).view(E, adapters)
    numbers = torch.cat([numbers, torch.full((E, 1), -1)], 1).flatten().int().to(device)
    return (order, rank, lens.view(E, -1).sum(1, dtype=torch.int32)), lens, numbers


@dtypes
@pytest.mark.parametrize("rank", [3, 16, 70])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.pairwise
def test_several_adapters(backend, device, dtype, rank, transposed):
    """The products of each of three adapters an expert, and of rows without one."""
    (order, ranks, sizes), lens, numbers = by_adapter(device)
    where = {"device": device, "dtype": dtype}
    x, w, _, low, _ = problem(device, dtype, T, H, N, rank, False, transposed)
    a, b = new(3 * E, rank, H, **where, scale=H**-0.5), new(3 * E, N, rank, **where, scale=rank**-0.5)
    n = int(sizes.sum())
    ops = (with_gradients(lambda *i, fn=fn: fn(*i)[:n]) for fn in (adapted_low, adapted_low_reference))
    assert_as_good_as_torch(*ops, x, a, order, ranks, lens, numbers)
    rest = None, None, None, None, "", lens, numbers
    ops = (with_gradients(lambda *i, fn=fn: fn(*i)[:n]) for fn in (adapted_up, adapted_up_reference))
    assert_as_good_as_torch(*ops, x, w, None, low, b, order, ranks, sizes, *rest)
    inputs = new(T * CHOICES, N, **where), new(E, H, N, **where, scale=N**-0.5), new(E, H, **where), low
    b, s = new(3 * E, H, rank, **where, scale=rank**-0.5), torch.rand(T, CHOICES).to(device)
    ops = with_gradients(adapted_down), with_gradients(adapted_down_reference)
    assert_as_good_as_torch(*ops, *inputs, b, s, order, ranks, sizes, *rest)


FOUR_BITS = pytest.mark.parametrize("format, width", [("nf4", 64), ("mxfp4", 96), ("int4", 128)])


def of_four_bits(format, width, out, device):
    w = torch.randn(E, out, width, generator=torch.Generator().manual_seed(4)) / width**0.5
    return quantized(w.to(device), format)


def with_weight(w, fn, reference):
    """`fn` with this weight of 4 bits as its second argument, and `reference` with what it stands for."""
    packed = with_gradients(lambda x, *rest: fn(x, w.packed, *rest, *w.parts))

    def whole(x, *rest):
        return reference(
            x, w.dequantize().to(x.dtype), *rest
        )  # rounded as the product rounds it, in float64 too

    return packed, with_gradients(whole)


@dtypes
@FOUR_BITS
@pytest.mark.parametrize("rank, bias", [(3, True), (16, False), (None, True)])
def test_four_bits(backend, device, dtype, format, width, rank, bias):
    """Output and all gradients, against the product with the dequantised weight."""
    order, ranks, sizes = plan(device)
    x, _, *rest = problem(device, dtype, T, width, N, rank, bias, False)
    w = of_four_bits(format, width, N, device).to(dtype)
    assert_as_good_as_torch(*with_weight(w, adapted_up, adapted_up_reference), x, *rest, order, ranks, sizes)
    a, _, *rest = problem(device, dtype, T * CHOICES, width, H, rank, bias, False)
    w = of_four_bits(format, width, H, device).to(dtype)
    s = torch.rand(T, CHOICES).to(device)
    assert_as_good_as_torch(
        *with_weight(w, adapted_down, adapted_down_reference), a, *rest, s, order, ranks, sizes
    )


@dtypes
@pytest.mark.parametrize("rank", [1, 16, 64, 65])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.pairwise
def test_add_low_rank(backend, device, dtype, rank, strided):
    rows = T * CHOICES
    out = new(rows, 2 * N if strided else N, device=device, dtype=dtype)
    out = out[:, ::2] if strided else out
    x, w = new(rows, rank, device=device, dtype=dtype), new(E, N, rank, device=device, dtype=dtype).mT
    sizes = plan(device)[2]

    def by(add):
        def run(out, x, w):
            out = out.clone(memory_format=torch.preserve_format)
            add(out, x, w, sizes)
            return out

        return run

    assert_as_good_as_torch(by(add_low_rank_op), by(add_low_rank_reference), out, x, w)
    rest = int(sizes.sum())
    assert rest < rows and torch.equal(by(add_low_rank_op)(out, x, w)[rest:], out[rest:])


@dtypes
@pytest.mark.parametrize("columns", [1, 40, 1100])
def test_weigh_rows(backend, device, dtype, columns):
    order, rank, _ = plan(device)
    x, y = (new(T * CHOICES, columns, device=device, dtype=dtype) for _ in range(2))
    s = torch.rand(T, CHOICES).to(device).masked_fill(rank < 0, float("nan"))  # of what nobody chose
    inputs = x, y.T.contiguous().T, s, order, rank
    assert_as_good_as_torch(weigh_rows_op, weigh_rows_reference, *inputs)


def test_no_tokens(device):
    order, rank, sizes = sort_by_expert(torch.zeros(0, 2, dtype=torch.int64, device=device), E)

    def leaf(*shape):
        return torch.randn(shape, device=device).requires_grad_()

    up = leaf(0, H), leaf(E, N, H), None, leaf(0, 3), leaf(E, N, 3)
    down = leaf(0, N), leaf(E, H, N), leaf(E, H), leaf(0, 3), leaf(E, H, 3), leaf(0, 2)
    for op, inputs, shape in ((adapted_up, up, (0, N)), (adapted_down, down, (0, H))):
        out = op(*inputs, order, rank, sizes)
        assert out.shape == shape
        out.sum().backward()
        assert all(t.grad is not None and not t.grad.any() for t in inputs if t is not None)


@pytest.mark.no_interpreter
@pytest.mark.parametrize("rank", [None, 2])
def test_gradcheck(rank):
    order, ranks, sizes = sort_by_expert(torch.tensor([[0, 2], [-1, 0], [2, 2]]), 3)

    def leaves(*shapes):
        return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    factors = leaves((6, rank), (3, 5, rank)) if rank else [None, None]
    up = *leaves((3, 4), (3, 5, 4), (3, 5)), *factors
    assert torch.autograd.gradcheck(lambda *t: adapted_up(*t, order, ranks, sizes), up)
    down = *leaves((6, 4), (3, 5, 4), (3, 5)), *factors, *leaves((3, 2))
    assert torch.autograd.gradcheck(lambda *t: adapted_down(*t, order, ranks, sizes), down)


def test_mistakes(device):
    x, w, _, low, b = problem(device, torch.float32, T, H, N, 3, False, False)
    routing = plan(device)
    for inputs, message in (
        ((x, w, None, low, None), "low and b go together"),
        ((x, w[..., 1:], None, low, b), "x is .T, H=24. but w is .E, N, H=23."),
        ((x, w, None, low, b[..., 1:]), "low is .R, r=3. but b is .E, N, r=2."),
        ((x, w, None, low[1:], b), "low is .R=68, r. but order is .R=69"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted_up(*inputs, *routing)
    with pytest.raises(TypeError, match=r"x is torch.float32 but low is torch.float64"):
        adapted_up(x, w, None, low.double(), b, *routing)
    with pytest.raises(ValueError, match="lens and weight_indices go together, with low and b"):
        adapted_up(x, w, None, low, b, *routing, None, None, None, None, "", routing[2], None)
    out = new(len(low), N, device=device, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"w is .G, r, N=40. but out is .M, N=39."):
        add_low_rank(out[:, 1:], low, b.mT, routing[2])
    with pytest.raises(ValueError, match="shares memory"):
        add_low_rank(out, out[:, :3], b.mT, routing[2])
