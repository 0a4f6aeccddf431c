"""Patterns: from a mask or a matrix, with values of their own."""

import pytest
import torch

from moe_aiter.kernels.sparse_pattern import SparsePattern, regroup

SHAPES = [((8, 12), (4, 3)), ((7, 10), (4, 4)), ((5, 6), (1, 1)), ((0, 4), (2, 2))]


def matrix(shape, block, device="cpu"):
    """With about half of its blocks."""
    rows, columns = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    mask = (torch.rand(rows, columns) < 0.5).to(device)
    whole = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    return mask, torch.where(whole, torch.randn(shape, device=device), 0.0)


@pytest.mark.parametrize("shape, block", SHAPES)
def test_there_and_back(device, shape, block):
    mask, w = matrix(shape, block, device)
    for pattern in (SparsePattern.from_mask(mask, block, shape), SparsePattern.from_dense(w, block)):
        values = pattern.take(w)
        assert pattern.num_blocks == len(values) == mask.sum()
        assert torch.equal(pattern.to_dense(values), w)


@pytest.mark.parametrize("shape, block", SHAPES)
@pytest.mark.parametrize("other", [(1, 1), (2, 5), (64, 64)])
def test_regrouped(shape, block, other):
    _, w = matrix(shape, block)
    pattern = SparsePattern.from_dense(w, (1, 1))
    found = regroup(pattern, other)
    assert torch.equal(found.pattern.to_dense(found.values(pattern.take(w))), w)
    assert found.pattern.num_blocks == SparsePattern.from_dense(w, other).num_blocks


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
