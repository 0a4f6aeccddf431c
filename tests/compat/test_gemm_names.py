"""AITER's dense products mean what its page says, and what torch makes of them."""

import pytest
import torch
import torch.nn.functional as F

from moe_aiter.compat import aiter

EXAMPLE = """
import torch
import moe_aiter.compat.aiter as aiter
x = torch.randn(1024, 512, device='cuda', dtype=torch.float16)
weight = torch.randn(2048, 512, device='cuda', dtype=torch.float16)
bias = torch.randn(2048, device='cuda', dtype=torch.float16)

# Fused: y = x @ weight.T + bias
output = aiter.gemm_bias(x, weight, bias, transpose_weight=True)
"""


def close(got, expected):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture
def xwb(device):
    """x (7, 24), weight (10, 24) and bias (10,)."""
    return [torch.randn(size, device=device) for size in ((7, 24), (10, 24), (10,))]


def test_the_example_of_the_page(device):
    names = {}
    exec(EXAMPLE.replace("'cuda'", repr(str(device))), names)
    x, weight, bias, output = (names[n] for n in ("x", "weight", "bias", "output"))
    assert output.shape == (1024, 2048) and output.dtype == torch.float16
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert (output - exact).norm() < 1e-3 * exact.norm()


def test_gemm_bias(xwb):
    x, weight, bias = xwb
    close(aiter.gemm_bias(x, weight, bias), F.linear(x, weight, bias))
    close(aiter.gemm_bias(x, weight.T.contiguous(), bias, transpose_weight=False), F.linear(x, weight, bias))
    close(aiter.gemm_bias(x.expand(2, 3, 7, 24), weight, bias), F.linear(x.expand(2, 3, 7, 24), weight, bias))
    square = torch.randn(24, 24, device=x.device)
    close(aiter.gemm_bias(x, square, x.new_zeros(24)), x @ square.T)  # (n, k), whatever fits


@pytest.mark.parametrize("with_bias", [True, False])
def test_activations(xwb, with_bias):
    x, weight, bias = xwb
    bias = bias if with_bias else None
    y = F.linear(x, weight, bias)
    close(aiter.gemm_gelu(x, weight, bias), F.gelu(y))
    close(aiter.gemm_gelu(x, weight, bias, approximate="tanh"), F.gelu(y, approximate="tanh"))
    close(aiter.gemm_relu(x, weight, bias), F.relu(y))
    close(aiter.gemm_relu(x, weight.T, bias, transpose_weight=False), F.relu(y))
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', not 'erf'"):
        aiter.gemm_gelu(x, weight, approximate="erf")


def test_cutlass_gemm(xwb):
    x, weight, bias = xwb
    b, c = weight.T, torch.randn(7, 10, device=x.device)
    close(aiter.cutlass_gemm(x, b), x @ b)
    before = c.clone()
    for added in (c, bias, c[:, :1]):
        close(aiter.cutlass_gemm(x, b, 2.0, -0.5, added), torch.addmm(added, x, b, alpha=2.0, beta=-0.5))
    assert torch.equal(c, before)
    close(aiter.cutlass_gemm(x, b, c=torch.full_like(c, float("nan"))), x @ b)
    with pytest.raises(ValueError, match=r"beta is 1.0 but c is None"):
        aiter.cutlass_gemm(x, b, beta=1.0)


def test_batched_gemm(device):
    a, b = torch.randn(3, 7, 24, device=device), torch.randn(3, 24, 10, device=device)
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            stored = a.mT.contiguous() if transpose_a else a, b.mT.contiguous() if transpose_b else b
            close(aiter.batched_gemm(*stored, transpose_a, transpose_b), a @ b)
    with pytest.raises(ValueError, match=r"a is \(batch=2, m, k\) but b is \(batch=3, k, n\)"):
        aiter.batched_gemm(a[:2], b)
    with pytest.raises(ValueError, match=r"b must be \(batch, k, n\)"):
        aiter.batched_gemm(a, b[0])


@pytest.mark.parametrize(
    "x, y",
    [
        ((5,), (5,)), ((5,), (5, 4)), ((3, 5), (5,)), ((3, 5), (5, 4)), ((5,), (2, 5, 4)), ((2, 3, 5), (5,)),
        ((2, 3, 5), (5, 4)), ((3, 5), (2, 5, 4)), ((2, 1, 3, 5), (6, 5, 4)), ((2, 3, 5), (2, 1, 5, 4)),
        ((0, 5), (5, 4)), ((3, 0), (0, 4)), ((0, 3, 5), (0, 5, 4)), ((10, 10), (10, 10)),
    ],
    ids=str,
)  # fmt: skip
def test_matmul_is_that_of_torch(device, x, y):
    x, y = torch.randn(x, device=device), torch.randn(y, device=device)
    inputs = [t.requires_grad_() for t in (x, y)]
    expected = torch.matmul(*inputs)
    got = aiter.matmul(*inputs)
    close(got, expected)
    dout = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True
    ):
        close(ours, theirs)


def test_matmul_has_no_scalars():
    with pytest.raises(ValueError, match=r"x and y must have an axis, but they are \(\) and \(3,\)"):
        aiter.matmul(torch.ones(()), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_linear_is_that_of_torch(xwb, dtype):
    x, weight, bias = (t.to(dtype) for t in xwb)
    for given in (x, x[0], x.expand(2, 3, 7, 24)):
        exact = F.linear(given.double(), weight.double(), bias.double())
        got = aiter.linear(given, weight, bias)
        assert got.shape == exact.shape and got.dtype == dtype
        assert (got - exact).norm() <= 2 * (
            F.linear(given, weight, bias) - exact
        ).norm() + 1e-6 * exact.norm()
    assert aiter.linear(x, weight[0]).shape == (7,)


def test_the_switches_count(xwb):
    """Steps instead of a fused product, and float32 computed as another dtype."""
    x, weight, bias = xwb
    expected = F.gelu(F.linear(x, weight, bias))
    aiter.enable_fusion(False)
    try:
        close(aiter.gemm_gelu(x, weight, bias), expected)
        close(aiter.gemm_bias(x, weight, bias), F.linear(x, weight, bias))
    finally:
        aiter.enable_fusion(True)
    aiter.set_default_precision("BF16")
    try:
        got = aiter.gemm_gelu(x, weight, bias)
    finally:
        aiter.set_default_precision(None)
    assert got.dtype == torch.float32 and 1e-4 < (got - expected).norm() / expected.norm() < 2e-2


def test_a_mistake_is_named_as_the_caller_names_it():
    x, weight, bias = torch.randn(7, 24), torch.randn(24, 10), torch.randn(10)
    for call in (aiter.gemm_bias, aiter.gemm_gelu, aiter.gemm_relu):
        with pytest.raises(ValueError, match=r"weight is \(n, k=10\) with transpose_weight=True"):
            call(x, weight, bias)
        with pytest.raises(
            ValueError, match=r"input is \(..., k=24\) but weight is \(k=10, n\) with trans.*False"
        ):
            call(x, weight.T, bias, transpose_weight=False)
        with pytest.raises(TypeError, match=r"input is torch.float32 but weight is torch.float16"):
            call(x, weight.T.half(), bias)
    with pytest.raises(ValueError, match=r"input is \(..., k=24\) but weight is \(n, k=10\)$"):
        aiter.linear(x, weight)
    with pytest.raises(ValueError, match=r"input must be \(..., k\), but it has no axis"):
        aiter.linear(torch.tensor(1.0), weight)
    with pytest.raises(ValueError, match=r"a is \(m, k=24\) but b is \(k=10, n\)"):
        aiter.cutlass_gemm(x, weight.T)
    with pytest.raises(ValueError, match=r"a is \(batch, m, k=24\) but b is \(batch, n, k=10\)"):
        aiter.batched_gemm(x[None], weight[None], transpose_b=True)
    for y, shape in ((x, r"\(k=7, n\)"), (bias, r"\(k=10\)"), (x[None], r"\(..., k=7, n\)")):
        with pytest.raises(ValueError, match=rf"x is \(..., k=24\) but y is {shape}"):
            aiter.matmul(x, y)
    with pytest.raises(TypeError, match=r"x is torch.float32 but y is torch.float64"):
        aiter.matmul(x, weight.double())


def test_steps_keep_the_dtype_and_the_bias_of_one_product(xwb):
    x, weight, bias = xwb
    aiter.enable_fusion(False)
    try:
        assert aiter.gemm_bias(x.half(), weight.half(), bias).dtype == torch.float16
        for wrong in (bias[:1], bias.expand(7, -1)):
            with pytest.raises(ValueError, match="bias"):
                aiter.gemm_bias(x, weight, wrong)
    finally:
        aiter.enable_fusion(True)
