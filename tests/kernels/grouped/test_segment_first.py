"""segment_gmm where the first segment does not begin at row 0: forward and backward, on every backend."""

import itertools

import pytest
import torch

from moe_aiter import SegmentGEMMWrapper
from moe_aiter.config import interpret
from moe_aiter.kernels.grouped import segment_gmm as file
from moe_aiter.kernels.grouped.segment_gmm import segment_gmm, segment_gmm_op
from moe_aiter.kernels.grouped.segments import segment_tgmm_op

from ...check import assert_as_good_as_torch
from ...references import segment_gmm_reference
from ...shapes import transposed

ROWS = 41
BOUNDS = {
    "rows before": [3, 8, 8, 30],
    "a row before": [1, 2, 40, 41],
    "all rows before": [41, 41, 41, 41],
    "segments without rows": [7, 7, 7, 7],
    "past the end": [38, 40, 45, 50],
    "behind the end": [50, 51, 52, 60],
    "negative": [-4, 3, 6, 9],
    "decreasing": [2, 25, 14, 39],
}
DTYPE = torch.float32 if interpret else torch.bfloat16


def rows_of(indptr, rows):
    """[s, e) of each segment: the steps of `indptr` are clamped, and segments lie behind each other."""
    begin = min(max(indptr[0], 0), rows)
    for a, b in itertools.pairwise(indptr):
        end = min(begin + min(max(b - a, 0), rows), rows)
        yield begin, end
        begin = end


def by_loop(x, w, dout, indptr, numbers):
    """out, dx, dw, and which rows are in a segment."""
    out, dx, dw = dout.new_zeros(dout.shape), torch.zeros_like(x), torch.zeros_like(w)
    inside = torch.zeros(len(x), dtype=torch.bool)
    for i, (s, e) in zip(numbers, rows_of(indptr, len(x)), strict=True):
        inside[s:e] = True
        if 0 <= i < len(w):
            out[s:e], dx[s:e] = x[s:e] @ w[i], dout[s:e] @ w[i].T
            dw[i] += x[s:e].T @ dout[s:e]
    return out, dx, dw, inside


def make(rows, K, N, weights, indptr, device, dtype):
    """x, w and dout; rows of x and of dout in no segment are NaN."""
    x, w, dout = torch.randn(rows, K), torch.randn(weights, K, N) / K**0.5, torch.randn(rows, N)
    x, w, dout = (t.to(device, dtype) for t in (x, w, dout))
    inside = torch.zeros(rows, dtype=torch.bool, device=device)
    for s, e in rows_of(indptr, rows):
        inside[s:e] = True
    return x.masked_fill(~inside[:, None], float("nan")), w, dout.masked_fill(~inside[:, None], float("nan"))


def check(x, w, dout, indptr, index):
    """Values and gradients as of a loop in float64; exact zeros in the rows of no segment."""
    numbers = range(len(w)) if index is None else index.tolist()
    exact = by_loop(x.double().cpu(), w.double().cpu(), dout.double().cpu(), indptr, numbers)
    bounds = torch.tensor(indptr, device=x.device)
    leaves = x.clone().requires_grad_(), w.clone(memory_format=torch.preserve_format).requires_grad_()
    out = segment_gmm(*leaves, indptr=bounds, weight_indices=index)
    out.backward(dout)
    near = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[x.dtype]
    for name, got, want in zip(
        ("out", "dx", "dw"), (out, leaves[0].grad, leaves[1].grad), exact, strict=False
    ):
        error = (got.detach().double().cpu() - want).norm() / want.norm().clamp_min(1e-9)
        assert error < near, f"{name}: {error}"
    outside = ~exact[-1].to(x.device)
    assert not out[outside].any() and not leaves[0].grad[outside].any()
    kept = torch.full_like(out, 7.0).detach()
    segment_gmm(x, w, indptr=bounds, weight_indices=index, out=kept)
    assert (kept[outside] == 7).all() and torch.equal(kept[~outside], out[~outside])


@pytest.mark.parametrize("K", [20, 70, 130], ids=["short", "one sum", "a sum in parts"])
@pytest.mark.parametrize("indptr", BOUNDS.values(), ids=BOUNDS)
def test_segments_begin_where_indptr_says(device, indptr, K, no_debug, monkeypatch):
    if interpret and (indptr != BOUNDS["rows before"] if K > 20 else indptr[0] in (1, 7, 50)):
        pytest.skip("the interpreter is slow: one sum, and sums in parts, have one case")
    if K == 130:  # the least that is shared among programs
        monkeypatch.setattr(file, "PART_K", 16)
    index = None if K == 70 else torch.tensor([1, -1 if K == 20 else 0, 1], device=device)
    inputs = make(ROWS, K, 24, 3 if index is None else 2, indptr, device, torch.float32)
    check(*inputs, indptr, index)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("indptr", [[5, 20, 20, 39], [0, 5, 20, 39]], ids=str)
def test_wide_weights_with_a_segment_each(device, indptr, column_major):
    x, w, dout = make(ROWS, 128, 128, 3, indptr, device, DTYPE)
    check(x, transposed(w) if column_major else w, dout, indptr, None)


def test_the_transposed_product_begins_there_too(device):
    x, _w, y = make(ROWS, 20, 24, 2, [3, 8, 8, 30], device, torch.float32)
    bounds, index = torch.tensor([3, 8, 8, 30], device=device), torch.tensor([1, 0, 1], device=device)
    for columns_first in (False, True):
        dw = segment_tgmm_op(x, y, None, bounds, index, 2, columns_first)
        dw = dw.mT if columns_first else dw
        torch.testing.assert_close(dw[1], x[3:30].T @ y[3:30], rtol=1e-4, atol=1e-4)
        assert not dw[0].any()


def test_an_indptr_of_one_element_has_no_segments(device):
    x, w, _ = make(9, 20, 24, 0, [4], device, torch.float32)
    assert not segment_gmm(x, w, indptr=torch.tensor([4], device=device)).any()


def test_debug_names_an_indptr_out_of_range(device):
    x, w = torch.zeros(8, 20, device=device), torch.zeros(2, 20, 24, device=device)
    segment_gmm(x, w, indptr=torch.tensor([1, 4, 8], device=device))
    for bad in ([-1, 4, 8], [1, 4, 9]):
        with pytest.raises(ValueError, match=r"indptr must lie in \[0, 8\], but it is from"):
            segment_gmm(x, w, indptr=torch.tensor(bad, device=device))


@pytest.mark.parametrize("column_major", [False, True])
def test_the_wrapper_leaves_the_rows_before_alone(device, column_major):
    x, w, _ = make(ROWS, 20, 24, 2, [3, 8, 30], device, torch.float32)
    wrapper = SegmentGEMMWrapper(torch.empty(0, dtype=torch.uint8, device=device))
    weights = w.mT.contiguous() if column_major else w
    bounds = torch.tensor([3, 8, 30], device=device)
    out = wrapper.run(x, weights, 2, column_major, seg_indptr=bounds)
    torch.testing.assert_close(out[3:8], x[3:8] @ w[0])
    torch.testing.assert_close(out[8:30], x[8:30] @ w[1])
    assert not out[:3].any() and not out[30:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [3, 5])
@pytest.mark.parametrize("bounds", [[200, 400, 400, 500, 1000, 1100], [0, 9, 300, 301, 640, 1200]], ids=str)
def test_dense_segments(bounds, weights, no_debug):
    """On a Hopper GPU the grouped product's kernel, which reads the indptr itself; 3 of 3 weights is none."""
    device = torch.device("cuda")
    index = None if weights == 5 else torch.tensor([2, 0, -1, 2, 3], device=device)
    x, w, dout = make(1200, 256, 384, weights, bounds, device, torch.bfloat16)
    check(x, w, dout, bounds, index)
    check(x, transposed(w), dout, bounds, index)
    inputs = x.nan_to_num(), w, None, torch.tensor(bounds, device=device), index
    assert_as_good_as_torch(segment_gmm_op, segment_gmm_reference, *inputs)
