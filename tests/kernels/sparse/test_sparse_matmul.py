"""Products with blocks and with single entries, and their gradients, on every backend that can run here."""

import pytest
import torch

from moe_aiter.config import interpret, settings
from moe_aiter.kernels.sparse import gemm as file
from moe_aiter.kernels.sparse import kernels
from moe_aiter.kernels.sparse.gemm import (
    fill_sparse_matmul,
    fill_sparse_matmul_grad,
    sparse_matmul_grad_op,
    sparse_matmul_op,
)
from moe_aiter.kernels.sparse.kernels import SparseGradInputs, SparseInputs
from moe_aiter.kernels.sparse.pattern import SparsePattern
from moe_aiter.op import invalidate_decisions

from ...check import assert_as_good_as_torch, with_gradients
from ...references import sparse_matmul_grad_reference, sparse_matmul_reference
from ...shapes import spread, transposed

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
MATRICES = {  # N, K, blocksize, M
    "blocks of 16 x 32": (64, 96, (16, 32), 50),
    "tall blocks that reach past the end": (37, 70, (32, 16), 33),
    "blocks that are no power of two": (100, 120, (40, 24), 20),
    "blocks larger than a tile": (128, 256, (64, 128), 17),
    "blocks of one column": (48, 12, (16, 1), 5),
    "no rows": (64, 64, (16, 16), 0),
    "one row": (64, 64, (64, 64), 1),
    "entries": (37, 70, (1, 1), 33),
    "entries of a wide matrix": (5, 300, (1, 1), 300),
    "entries and no rows": (37, 70, (1, 1), 0),
    "nothing to sum over": (16, 0, (16, 16), 4),
}
DENSITIES = [0.4, 0.0, 1.0]


WAYS = {"spread": (False, 0), "gathered": (True, 2**60), "gathered from columns": (True, 0)}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def few(request, monkeypatch):
    """Entries among zeros, and where that costs more, from x as it is or from a copy."""
    gathered, pieces = request.param
    monkeypatch.setattr(kernels, "costs_less", lambda *sizes, **named: gathered)
    monkeypatch.setattr(kernels, "PIECES", pieces)
    invalidate_decisions()  # what is bound has read both
    yield
    invalidate_decisions()


def make(device, N, K, block, M, *, density=0.4, dtype=torch.float32, turned=False):
    """The inputs of the op, with a first row and a first column of blocks that are empty."""
    mask = torch.rand(-(-N // block[0]), -(-K // block[1])) < density
    if density < 1:
        mask[:1], mask[:, :1] = False, False
    pattern = SparsePattern.from_mask(mask.to(device), block, (N, K))
    x, bias = torch.randn(M, N if turned else K), torch.randn(K if turned else N)
    values = torch.randn((pattern.num_blocks, *block) if block != (1, 1) else (pattern.num_blocks,))
    x, values, bias = (t.to(device, dtype) for t in (x, values, bias))
    return x, values, bias, pattern.lists, N, K, turned


def check(*inputs):
    run, reference = with_gradients(sparse_matmul_op), with_gradients(sparse_matmul_reference)
    assert_as_good_as_torch(run, reference, *inputs)


@pytest.mark.parametrize("turned", [False, True], ids=["A.T", "A"])
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
@pytest.mark.pairwise
def test_products_and_gradients(device, matrix, density, turned, few):
    check(*make(device, *matrix, density=density, turned=turned))


@pytest.mark.parametrize("M", [1, 20])
@pytest.mark.parametrize("turned", [False, True], ids=["A.T", "A"])
@pytest.mark.pairwise
def test_one_row_has_nearly_all_entries(device, turned, M, few):
    """And so has one column, of which the result has one number."""
    mask = torch.eye(40, 333).roll(7, 1)
    mask[21], mask[:, 100] = 1, 1
    pattern = SparsePattern.from_mask(mask.to(device), 1)
    values, x = torch.randn(pattern.num_blocks), torch.randn(M, 40 if turned else 333)
    check(x.to(device), values.to(device), None, pattern.lists, *pattern.shape, turned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matrix", ["blocks of 16 x 32", "blocks larger than a tile", "entries"])
@pytest.mark.pairwise
def test_dtypes(device, matrix, dtype, few):
    inputs = make(device, *MATRICES[matrix], dtype=dtype)
    check(*inputs)
    check(*inputs[:2], None, *inputs[3:])


@pytest.mark.parametrize("layout", [transposed, spread], ids=["transposed", "spread"])
@pytest.mark.parametrize("matrix", ["blocks of 16 x 32", "entries"])
@pytest.mark.pairwise
def test_strides(device, matrix, layout, few):
    x, values, bias, *rest = make(device, *MATRICES[matrix])
    apart = spread(bias[None])[0]
    values = layout(values) if values.dim() == 3 else spread(values[None])[0]
    assert_as_good_as_torch(sparse_matmul_op, sparse_matmul_reference, layout(x), values, apart, *rest)
    dout = torch.ones(1, 1, device=device).expand(x.shape[0], rest[1])
    sides = (dout, layout(x), rest[0], *(values.shape[1:] or (1, 1)))
    assert_as_good_as_torch(sparse_matmul_grad_op, sparse_matmul_grad_reference, *sides)


def test_nothing_is_read_past_the_end(device):
    """Blocks that reach past the end of the matrix may hold anything there."""
    x, values, bias, lists, N, K, turned = make(device, 40, 40, (32, 32), 8, density=1.0)
    clean = sparse_matmul_op(x, values, bias, lists, N, K, turned)
    values = values.unflatten(0, (2, 2)).clone()
    values[1, :, 8:], values[:, 1, :, 8:] = float("nan"), float("nan")
    assert torch.equal(sparse_matmul_op(x, values.flatten(0, 1), bias, lists, N, K, turned), clean)


@pytest.mark.parametrize("matrix", ["blocks of 16 x 32", "tall blocks that reach past the end", "entries"])
def test_the_same_bits_twice(device, matrix, few):
    inputs = make(device, *MATRICES[matrix])
    run = with_gradients(sparse_matmul_op)
    assert all(torch.equal(a, b) for a, b in zip(run(*inputs), run(*inputs), strict=True))


@pytest.mark.parametrize(
    "M, side, L, gathered",
    [
        (4096, 4096, 2**24 // 1000, False),
        (4096, 4096, 2**24 // 10, False),
        (16, 4096, 2**24 // 1000, True),
        (64, 4096, 2**24 // 100, True),
        (256, 4096, 2**24 // 10, False),
        (4096, 2**20, 2**24, True),  # for which no memory would do
    ],
)
@pytest.mark.no_interpreter
def test_entries_are_gathered_where_zeros_cost_more(M, side, L, gathered):
    costs_less = kernels.costs_less
    assert costs_less(M, 2 * side, side**2, L, results=M * side) == gathered


@pytest.mark.parametrize("M, L, copied", [(1, 2**30, False), (16, 2**14, False), (16, 2**17, True)])
def test_x_is_turned_where_many_of_its_numbers_are_read(M, L, copied):
    x = torch.randn(M, 8)
    columns = kernels.columns_of(x, L)
    assert torch.equal(columns, x)
    assert (columns.data_ptr() != x.data_ptr()) == copied == (columns.stride(0) == 1)


@pytest.mark.parametrize("turned", [False, True], ids=["A.T", "A"])
@pytest.mark.parametrize("matrix", ["blocks of 16 x 32", "blocks larger than a tile", "entries"])
@pytest.mark.no_interpreter
def test_by_torch(matrix, turned, monkeypatch):
    """By the blocks or the entries, and not as a dense matrix, which is the reference."""
    inputs = make("cpu", *MATRICES[matrix], turned=turned)
    exact = sparse_matmul_reference(*inputs)
    x, values, _, lists, *_ = inputs
    sides = (x, exact) if turned else (exact, x)
    block = values.shape[1:] or (1, 1)
    exact_grad = sparse_matmul_grad_reference(*sides, lists, *block)
    monkeypatch.setattr(file, "LARGE", 16)
    monkeypatch.setattr(file, "FEW", 1)
    for name in ("sparse_matmul_reference", "sparse_matmul_grad_reference"):
        monkeypatch.delattr(file, name)
    for bias in (inputs[2], None):
        out = torch.full_like(exact, float("nan"))
        fill_sparse_matmul(out, SparseInputs(x, values, bias, *inputs[3:]))
        torch.testing.assert_close(
            out, exact if bias is not None else exact - inputs[2], atol=1e-4, rtol=1e-4
        )
    grad = torch.full_like(values, float("nan"))
    fill_sparse_matmul_grad(grad, SparseGradInputs(*sides, lists, *block))
    torch.testing.assert_close(grad, exact_grad)


@pytest.mark.parametrize("block", [(4, 2), (1, 1)])
def test_gradcheck(block):
    inputs = make("cpu", 8, 6, block, 3, density=0.7, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in inputs[:3]]
    run = lambda *leaves: sparse_matmul_op(*leaves, *inputs[3:])  # noqa: E731
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def bad(**changes):
    names = "x", "values", "bias", "lists", "rows", "columns", "transposed"
    inputs = dict(zip(names, make("cpu", 32, 48, (16, 16), 5), strict=True))
    return sparse_matmul_op(*(inputs | changes).values())


@pytest.mark.parametrize(
    "error, words, changes",
    [
        (ValueError, r"x is \(M, K=40\) but the matrix is \(N, 48\)", {"x": torch.ones(5, 40)}),
        (ValueError, "x must be", {"x": torch.ones(48)}),
        (ValueError, "values must be", {"values": torch.ones(2, 16)}),
        (ValueError, "values must be", {"values": torch.ones(2, 1, 1)}),
        (ValueError, "blocks of values but the pattern has", {"values": torch.ones(99, 16, 16)}),
        (ValueError, r"bias is \(7,\)", {"bias": torch.ones(7)}),
        (ValueError, "lists have 8 numbers", {"lists": torch.ones(8, dtype=torch.int32)}),
        (ValueError, "one contiguous int32", {"lists": torch.ones(9)}),
        (TypeError, "values is torch.float16", {"values": torch.ones(2, 16, 16).half()}),
        (TypeError, "bias is torch.float64", {"bias": torch.ones(32).double()}),
    ],
)
@pytest.mark.no_interpreter
def test_bad_input(error, words, changes):
    with pytest.raises(error, match=words):
        bad(**changes)


@pytest.mark.skipif(not settings.debug, reason="values are checked with MOE_AITER_DEBUG=1 only")
@pytest.mark.parametrize("number", [-1, 99])
@pytest.mark.parametrize("index", [0, 6, -1])
@pytest.mark.no_interpreter
def test_bad_lists(index, number):
    lists = make("cpu", 32, 48, (16, 16), 5)[3].clone()
    lists[index] = number
    with pytest.raises(ValueError, match="the pattern's"):
        bad(lists=lists)
