"""tuned_gemm of shuffled weights, with scales, and of 8 bits."""

import pytest
import torch
import torch.nn.functional as F
from tuned import rows_for, tuned_files

from moe_aiter.config import interpret
from moe_aiter.kernels.base.shuffle import shuffle_weight
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
files = pytest.fixture(tuned_files)


# shuffled weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("told", [False, True])
def test_a_shuffled_weight_is_multiplied_as_what_it_stands_for(device, files, dtype, told):
    files("")
    x, w = torch.randn(2, 5, 64).to(device, dtype), torch.randn(32, 64).to(device, dtype)
    s = shuffle_weight(w)
    call = (lambda x, s: tuned_gemm(x, s.clone(), is_shuffled=True)) if told else tuned_gemm
    for _ in range(2):
        got, exact = call(x, s).double(), F.linear(x.double(), w.double())
        assert (got - exact).norm() <= 1e-2 * exact.norm()
    assert not torch.allclose(tuned_gemm(x, s, is_shuffled=False).float(), F.linear(x, w).float(), atol=0.1)


def test_a_shuffled_weight_that_changes_is_multiplied_as_it_is_now(device, files):
    files("")
    x, w = torch.randn(5, 64, device=device), torch.randn(32, 64, device=device)
    s = shuffle_weight(w)
    tuned_gemm(x, s, x.new_zeros(32))
    s.mul_(2)
    torch.testing.assert_close(tuned_gemm(x, s, x.new_zeros(32)), 2 * F.linear(x, w))


def test_gradients_of_a_shuffled_weight_lie_as_it_does(device, files):
    files("")
    x, w = torch.randn(5, 64, device=device, requires_grad=True), torch.randn(32, 64, device=device)
    s = shuffle_weight(w).requires_grad_()
    w.requires_grad_()
    dx, ds = torch.autograd.grad(tuned_gemm(x, s, is_shuffled=True).square().sum(), (x, s))
    want_x, want_w = torch.autograd.grad(F.linear(x, w).square().sum(), (x, w))
    torch.testing.assert_close(dx, want_x)
    torch.testing.assert_close(ds, shuffle_weight(want_w))


def test_a_shuffled_weight_has_rows_of_its_own(device, files, caplog):
    files(rows_for(device, "torch", M=5, shuffled=1) + rows_for(device, "triton", M=5))
    files.set_to("log_tuned_config", True)
    x, s = torch.randn(5, 32, device=device), shuffle_weight(torch.randn(16, 32, device=device))
    with caplog.at_level("INFO", "moe_aiter"):
        tuned_gemm(x, s)
    assert "shuffled" in caplog.messages[0] and "the row of M=5 says torch" in caplog.messages[0]


# scales


@pytest.mark.parametrize("x_scale", [None, 0.5, (1,), (), (5,), (5, 1)], ids=str)
@pytest.mark.parametrize("w_scale", [None, 2.0, (1,), (16,), (16, 1), (1, 16)], ids=str)
def test_scales(device, files, x_scale, w_scale):
    files("")
    x, w, b = (torch.randn(*s, device=device).half() for s in ((5, 32), (16, 32), (16,)))
    given = [torch.rand(s, device=device) + 0.5 if isinstance(s, tuple) else s for s in (x_scale, w_scale)]
    columns = [(-1, 1), (1, -1)]
    factors = [
        1.0 if s is None else s.reshape(c) if isinstance(s, torch.Tensor) else s
        for s, c in zip(given, columns, strict=True)
    ]
    exact = (x.double() @ w.double().mT) * factors[0] * factors[1] + b.double()
    got = tuned_gemm(x, w, b, x_scale=given[0], w_scale=given[1], out_scale=4.0)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), 4 * exact, rtol=2e-3, atol=1e-2)


def test_scales_of_rows_with_several_axes_and_their_gradients(files):
    files("")
    x, w = torch.randn(2, 3, 8).double(), torch.randn(4, 8).double()
    scales = [torch.rand(2, 3, 1).double(), torch.rand(4).double()]
    inputs = [t.requires_grad_() for t in (x, w, *scales)]

    def fn(x, w, a, b):
        return tuned_gemm(x, w, x_scale=a, w_scale=b)

    assert torch.autograd.gradcheck(fn, inputs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shuffled", [False, True])
def test_operands_of_8_bits(device, dtype, shuffled):
    x, w = (torch.randint(-9, 9, s, device=device).to(dtype) for s in ((2, 3, 64), (32, 64)))
    scales = torch.rand(2, 3, 1, device=device), torch.rand(32, device=device)
    b = torch.randn(32, device=device)
    exact = F.linear(x.double(), w.double()) * scales[0] * scales[1] + b
    given = shuffle_weight(w) if shuffled else w
    out = tuned_gemm(x, given, b, x_scale=scales[0], w_scale=scales[1], out_scale=2.0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), 2 * exact, rtol=1e-2, atol=1e-2)
    out = tuned_gemm(x, given, out_dtype=torch.float32)
    torch.testing.assert_close(out.double(), F.linear(x.double(), w.double()))


def test_a_scaled_product_is_as_strict_as_one_without_scales():
    x, w, meta = torch.randn(3, 5), torch.randn(4, 5), torch.ones(3, device="meta")
    for bias in (torch.ones(1), torch.ones(3, 4), torch.ones(7, 3, 4), torch.ones(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="bias must be floating"):
            tuned_gemm(x, w, bias, x_scale=2.0)
    with pytest.raises(ValueError, match="x is on cpu but x_scale is on meta"):
        tuned_gemm(x, w, x_scale=meta)
    with pytest.raises(TypeError, match="out_dtype must be a floating dtype"):
        tuned_gemm(x, w, x_scale=2.0, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="x must be"):
        tuned_gemm(torch.ones((), dtype=torch.int8), torch.ones(4, 5, dtype=torch.int8))
