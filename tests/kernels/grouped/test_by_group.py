"""The products of groups by torch, which a CPU runs: rounded once, and each written where it belongs."""

import pytest
import torch

from moe_aiter.kernels.grouped.gmm import gmm
from moe_aiter.kernels.grouped.ptgmm import ptgmm
from moe_aiter.kernels.grouped.segment_gmm import segment_gmm
from moe_aiter.kernels.grouped.tgmm import tgmm_accumulate
from moe_aiter.op import use

from ...check import error

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def by_torch():
    with use("torch"):
        yield


def make(dtype, K=64, N=96):
    sizes = torch.tensor([100, 0, 150, 40])
    x, w, y = torch.randn(300, K), torch.randn(4, K, N) / K**0.5, torch.randn(300, N)
    return *(t.to(dtype) for t in (x, w, y)), sizes


def pieces(sizes, *tensors):
    return zip(*(t.split([*sizes.tolist(), len(t) - int(sizes.sum())])[:-1] for t in tensors), strict=True)


def assert_rounded_once(got, exact):
    assert error(got, exact) <= 1.01 * error(exact.to(got.dtype), exact) + 1e-6


@pytest.mark.parametrize("rows", [1, 11, 31, 33])
def test_nan_behind_a_row_of_an_operand_stays_there(rows):
    """On CPUs with AMX torch 2.13 multiplies it by zero."""
    x, dout = torch.randn(48, 49).bfloat16().T, torch.randn(49, 17).bfloat16()
    sizes, w = torch.tensor([3, rows]), torch.randn(2, 48, 17).bfloat16().requires_grad_()
    exact = torch.stack([a.double().T @ b.double() for a, b in pieces(sizes, x, dout)])
    x[3 + rows :] = float("nan")
    for product in (gmm(x, w, sizes), segment_gmm(x, w, lens=sizes)):
        (dw,) = torch.autograd.grad(product, w, dout)
        assert_rounded_once(dw, exact)
    assert gmm(x.T[:, :rows], dout[None, :rows], torch.tensor([48])).isfinite().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias_dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.no_interpreter
@pytest.mark.pairwise
def test_a_bias_is_added_before_the_rounding(dtype, bias_dtype, out_dtype):
    x, w, _, sizes = make(dtype)
    bias = torch.randn(4, 96).to(bias_dtype)
    exact = [
        r.double() @ m.double() + b for (r,), m, b in zip(pieces(sizes, x), w, bias.double(), strict=True)
    ]
    out = gmm(x, w, sizes, bias=bias, preferred_element_type=out_dtype)
    assert_rounded_once(out[:290], torch.cat(exact))
    assert not out[290:].any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("out_dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.no_interpreter
def test_what_is_there_is_added_before_the_rounding(dtype, out_dtype):
    x, _, y, sizes = make(dtype)
    out = torch.randn(4, 64, 96).to(out_dtype)
    exact = torch.stack([a.double().T @ b.double() for a, b in pieces(sizes, x, y)]) + out.double()
    ptgmm(x.T, y, sizes, existing_out=out, accumulate=True)
    assert_rounded_once(out, exact)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_no_result_is_gathered_from_copies(dtype, monkeypatch):
    x, w, y, sizes = make(dtype)
    expected = gmm(x, w, sizes), ptgmm(x.T, y, sizes)
    for name in ("cat", "stack"):
        monkeypatch.setattr(torch, name, lambda *_: pytest.fail("another copy of the result"))
    assert torch.equal(gmm(x, w, sizes), expected[0])
    assert torch.equal(ptgmm(x.T, y, sizes), expected[1])
    given = torch.full_like(y, 7.0)
    gmm(x, w, sizes, existing_out=given)
    assert torch.equal(given[:290], expected[0][:290]) and (given[290:] == 7).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_main_gradient_is_summed_where_it_is(dtype, monkeypatch):
    """Not in another tensor as large."""
    x, _, y, sizes = make(dtype)
    out, written, add = torch.zeros(4, 64, 96), [], torch.addmm

    def noted(plus, a, b, *, out):
        written.append((plus.data_ptr(), out.data_ptr()))
        return add(plus, a, b, out=out)

    monkeypatch.setattr(torch, "addmm", noted)
    tgmm_accumulate(out, x, y, sizes)
    assert written == [(out[g].data_ptr(), out[g].data_ptr()) for g in (0, 2, 3)]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_products_of_many_at_once_by_vmap(dtype):
    x, w, y, sizes = make(dtype)
    xs = torch.stack([x, x.flip(0)])

    def both(x):
        return gmm(x, w, sizes), ptgmm(x.T, y, sizes)

    for i, got in enumerate(zip(*torch.func.vmap(both)(xs), strict=True)):
        for one, alone in zip(got, both(xs[i]), strict=True):
            torch.testing.assert_close(one, alone)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_written_in_place_is_not_recorded(out_dtype):
    x, _, y, sizes = make(torch.bfloat16)
    out, expected = torch.zeros(2, 4, 64, 96, dtype=out_dtype)
    tgmm_accumulate(expected, x, y, sizes)
    tgmm_accumulate(out, x.requires_grad_(), y.requires_grad_(), sizes)
    assert torch.equal(out, expected) and not out.requires_grad
