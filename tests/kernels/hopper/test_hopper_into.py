"""The Hopper kernels write into tensors that are there, and into nothing else."""

import pytest
import torch

from moe_aiter.kernels.grouped.gmm import gmm_into_op, gmm_op
from moe_aiter.kernels.grouped.tgmm import tgmm_into_op, tgmm_op, tgmm_sums_op
from moe_aiter.kernels.hopper import is_hopper
from moe_aiter.op import use

from ...check import fits
from ...references import group_sum_reference

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.gpu
ROWS = 1000
SIZES = [[129, 0, 1, 64, 63, 300, 128, 255, 0, 60], [100, 0, 5, 333], [1000], [0, 0, 0]]


@pytest.fixture(autouse=True)
def hopper():
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    with use("hopper"):
        yield


def randn(*shape):
    return torch.randn(shape, device=CUDA).bfloat16()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_in_tensors_that_are_there(sizes):
    """Rows past the last group, and what lies around the result, keep what they hold."""
    sizes = torch.tensor(sizes, device=CUDA)
    x, y = randn(ROWS, 192), randn(ROWS, 256)
    w, end = randn(len(sizes), 192, 256), int(sizes.sum())
    buffer = torch.full((ROWS + 2, 512), 777.0, device=CUDA, dtype=x.dtype)
    out = buffer[1:-1, 128:384]
    gmm_into_op(out, x, w, sizes, None)
    assert fits("gmm_into", out, x, w, sizes, None)
    assert torch.equal(out[:end], gmm_op(x, w, sizes, None)[:end]) and (out[end:] == 777).all()
    out[:] = 777
    assert (buffer == 777).all()
    expected, sums = tgmm_sums_op(x, y, sizes, False)
    exact = group_sum_reference(y.double(), sizes, None, 1, None)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(expected, tgmm_op(x, y, sizes, None, 1, False))
    for columns_first in (False, True):
        shape = (len(sizes), 256, 192) if columns_first else (len(sizes), 192, 256)
        dw, of_x = (
            torch.full(shape, 777.0, device=CUDA, dtype=x.dtype),
            torch.empty(len(sizes), 192, device=CUDA),
        )
        dw = dw.mT if columns_first else dw
        for programs in (-1, 0, 7):
            tgmm_into_op(dw, x, y, sizes, None, 1, False, of_x, False, (), programs)
            assert torch.equal(dw, expected)
        exact = group_sum_reference(x.double(), sizes, None, 1, None)
        torch.testing.assert_close(of_x.double(), exact, rtol=1e-5, atol=1e-4)
    some = gmm_op(x, w, sizes, None, None, (), 50)
    assert torch.equal(some, gmm_op(x, w, sizes, None)), "as many programs as the caller says"
