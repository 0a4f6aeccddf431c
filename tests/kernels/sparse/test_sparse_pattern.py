"""Patterns: from a mask or a matrix, with values of their own."""

import pytest
import torch

from moe_aiter.kernels.sparse.gemm import sparse_gemm
from moe_aiter.kernels.sparse.pattern import SparsePattern, regroup

SHAPES = [((8, 12), (4, 3)), ((7, 10), (4, 4)), ((5, 6), (1, 1)), ((0, 4), (2, 2))]


def matrix(shape, block, device="cpu"):
    """With about half of its blocks."""
    rows, columns = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    mask = (torch.rand(rows, columns) < 0.5).to(device)
    whole = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    return mask, torch.where(whole, torch.randn(shape, device=device), 0.0)


@pytest.mark.parametrize("shape, block", SHAPES)
@pytest.mark.no_interpreter
def test_there_and_back(device, shape, block):
    mask, w = matrix(shape, block, device)
    for pattern in (SparsePattern.from_mask(mask, block, shape), SparsePattern.from_dense(w, block)):
        values = pattern.take(w)
        assert pattern.num_blocks == len(values) == mask.sum()
        assert torch.equal(pattern.to_dense(values), w)


@pytest.mark.parametrize("shape, block", SHAPES)
@pytest.mark.parametrize("other", [(1, 1), (2, 5), (64, 64)])
@pytest.mark.no_interpreter
def test_regrouped(shape, block, other):
    _, w = matrix(shape, block)
    pattern = SparsePattern.from_dense(w, (1, 1))
    found = regroup(pattern, other)
    assert torch.equal(found.pattern.to_dense(found.values(pattern.take(w))), w)
    assert found.pattern.num_blocks == SparsePattern.from_dense(w, other).num_blocks


@pytest.mark.parametrize("block", [(4, 2), (1, 1)])
def test_of_sparse_tensors_and_back(device, block):
    """Without a copy of the values; also where columns are not in order."""
    _, w = matrix((8, 12), block, device)
    sparse = w.to_sparse_csr() if block == (1, 1) else w.to_sparse_bsr(block)
    pattern = SparsePattern.from_sparse(sparse)
    assert torch.equal(pattern.to_dense(sparse.values()), w)
    again = pattern.to_sparse(sparse.values())
    assert again.layout == sparse.layout and torch.equal(again.to_dense(), w)
    assert again.values().data_ptr() == sparse.values().data_ptr()
    start, col = torch.tensor([0, 2, 2], device=device), torch.tensor([1, 0], device=device)
    turned = torch.sparse_csr_tensor(
        start, col, torch.tensor([1.0, 2], device=device), (2, 2), check_invariants=False
    )
    pattern = SparsePattern.from_sparse(turned)
    assert torch.equal(pattern.to_dense(turned.values()), turned.to_dense())


@pytest.mark.parametrize("block", [(4, 2), (1, 1)])
def test_gradients_of_sparse_tensors(block, monkeypatch):
    """Those of sparse_gemm are taken as they are, others are looked up."""
    _, w = matrix((8, 12), block)
    pattern = SparsePattern.from_dense(w.double(), block)
    values, x = pattern.take(w.double()).requires_grad_(), torch.randn(3, 12).double()
    exact = torch.autograd.grad((x @ pattern.to_dense(values).T).square().sum(), values)
    for product in (sparse_gemm, lambda x, sparse: x @ sparse.to_dense().T):
        out = product(x, pattern.to_sparse(values))
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), values), exact)
    monkeypatch.delattr(SparsePattern, "take")
    out = sparse_gemm(x, pattern.to_sparse(values))
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), values), exact)
    run = lambda values: sparse_gemm(x, pattern.to_sparse(values))  # noqa: E731
    assert torch.autograd.gradcheck(run, values)


@pytest.mark.parametrize(
    "words, make",
    [
        ("w must be CSR or BSR", lambda: SparsePattern.from_sparse(torch.eye(4).to_sparse_csc())),
        ("w must be CSR or BSR", lambda: SparsePattern.from_sparse(torch.eye(4))),
        (r"w must be \(N, K\)", lambda: SparsePattern.from_sparse(torch.ones(2, 4, 4).to_sparse_csr())),
        (
            r"values are \(3, 2, 2\) but the pattern has 2 blocks of \(2, 2\)",
            lambda: SparsePattern.from_mask(torch.eye(2), 2).to_sparse(torch.ones(3, 2, 2)),
        ),
        (
            r"torch needs whole blocks of \(2, 2\)",
            lambda: SparsePattern.from_mask(torch.eye(2), 2, (3, 4)).to_sparse(torch.ones(2, 2, 2)),
        ),
    ],
)
@pytest.mark.no_interpreter
def test_what_is_no_such_tensor(words, make):
    with pytest.raises(ValueError, match=words):
        make()


def test_gradients_of_dense_matrices():
    _, w = matrix((7, 10), (4, 4))
    w = w.double().requires_grad_()
    pattern = SparsePattern.from_dense(w, 4)
    assert torch.autograd.gradcheck(pattern.take, w)
    assert torch.autograd.gradcheck(pattern.to_dense, pattern.take(w).detach().requires_grad_())


@pytest.mark.parametrize(
    "error, words, arguments",
    [
        (ValueError, r"mask must be \(R, C\)", (torch.ones(3), 4)),
        (ValueError, r"mask is \(2, 3\) but shape is \(8, 13\)", (torch.ones(2, 3), 4, (8, 13))),
        (ValueError, "blocksize must be at least 1, not 0", (torch.ones(2, 3), 0)),
        (ValueError, "a number or two", (torch.ones(2, 3), (1, 2, 3))),
        (TypeError, "blocksize must be an int", (torch.ones(2, 3), (4, 2.0))),
        (TypeError, "mask must be a tensor", ([[1]], 4)),
    ],
)
@pytest.mark.no_interpreter
def test_bad_masks(error, words, arguments):
    with pytest.raises(error, match=words):
        SparsePattern.from_mask(*arguments)


def test_a_matrix_of_another_shape_has_no_such_values():
    pattern = SparsePattern.from_mask(torch.ones(2, 2), 4)
    with pytest.raises(ValueError, match=r"w is \(8, 9\) but the pattern is of \(8, 8\)"):
        pattern.take(torch.ones(8, 9))


def test_to_another_device(device):
    pattern = SparsePattern.from_mask(torch.eye(3), 2).to(device)
    assert pattern.lists.device == device and pattern.to("cpu").num_blocks == 3


def test_its_text_is_short():
    text = repr(SparsePattern.from_mask(torch.eye(30), 2))
    assert text == "SparsePattern(shape=(60, 60), blocksize=(2, 2))"


@pytest.mark.no_interpreter
def test_the_former_name_of_indices():
    pattern = SparsePattern.from_mask(torch.eye(3), 2)
    with pytest.deprecated_call(match="now called indices"):
        row, col = pattern.places()
    assert torch.equal(row, pattern.indices()[0]) and torch.equal(col, pattern.indices()[1])
