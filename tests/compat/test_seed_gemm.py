"""The examples of AITER's page on GEMM, but for the import and the device.  The rest is in test_aiter.py."""

import pytest
import torch
import torch.nn.functional as F

import moe_aiter.compat.aiter as aiter

from .seeds import near

F16 = torch.float16


@pytest.fixture
def fused(device):
    """The operands of the example of gemm_bias."""
    x = torch.randn(1024, 512, device=device, dtype=F16)
    weight = torch.randn(2048, 512, device=device, dtype=F16)
    bias = torch.randn(2048, device=device, dtype=F16)
    return x, weight, bias


def test_gemm_bias(fused):
    x, weight, bias = fused
    # Fused: y = x @ weight.T + bias
    output = aiter.gemm_bias(x, weight, bias, transpose_weight=True)
    exact = x.double() @ weight.double().T + bias.double()
    near(output, exact)
    near(aiter.gemm_bias(x, weight.T.contiguous(), bias, transpose_weight=False), exact)


@pytest.mark.parametrize("name, activation", [("gemm_gelu", F.gelu), ("gemm_relu", F.relu)])
def test_gemm_with_an_activation(name, activation, fused):
    x, weight, bias = fused
    exact = x.double() @ weight.double().T
    near(getattr(aiter, name)(x, weight), activation(exact))
    near(getattr(aiter, name)(x, weight, bias), activation(exact + bias.double()))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_batched_gemm(transpose_a, transpose_b, device):
    a = torch.randn(8, 64, 96, device=device, dtype=F16)  # (batch, m, k)
    b = torch.randn(8, 96, 32, device=device, dtype=F16)  # (batch, k, n)
    exact = torch.bmm(a.double(), b.double())
    a, b = a.mT.contiguous() if transpose_a else a, b.mT.contiguous() if transpose_b else b
    near(aiter.batched_gemm(a, b, transpose_a, transpose_b), exact)
    near(aiter.batched_gemm(a=a, b=b, transpose_a=transpose_a, transpose_b=transpose_b), exact)


def test_cutlass_gemm(device):
    a, b, c = (torch.randn(128, 128, device=device, dtype=F16) for _ in range(3))
    before = c.clone()
    near(aiter.cutlass_gemm(a, b), a.double() @ b.double())
    near(aiter.cutlass_gemm(a, b, alpha=0.5, beta=2.0, c=c), 0.5 * (a.double() @ b.double()) + 2 * c.double())
    assert torch.equal(c, before)


@pytest.mark.parametrize("pattern", ["csr", "coo", "block"])
def test_sparse_gemm(pattern, device):
    x = torch.randn(40, 64, device=device)
    weight = torch.randn(32, 64, device=device) * (torch.rand(32, 64, device=device) < 0.2)
    exact = x.double() @ weight.double().T
    sparse = {
        "csr": weight.to_sparse_csr(),
        "coo": weight.to_sparse_coo(),
        "block": weight.to_sparse_bsr((16, 16)),
    }[pattern]
    near(aiter.sparse_gemm(x, sparse, pattern), exact)
    near(aiter.sparse_gemm(x, weight, sparsity_pattern=pattern), exact)


def test_int8_gemm(device):
    # Quantized matrices (simulated)
    x_int8 = torch.randint(-127, 127, (1024, 512), device=device, dtype=torch.int8)
    w_int8 = torch.randint(-127, 127, (2048, 512), device=device, dtype=torch.int8)
    # Scales for dequantization
    x_scale = torch.randn(1, device=device, dtype=torch.float32)
    w_scale = torch.randn(1, device=device, dtype=torch.float32)
    # INT8 GEMM with automatic dequantization
    output = aiter.int8_gemm(x_int8, w_int8, x_scale, w_scale)
    # float16 holds no more than 65504: what is larger is infinite, with these scales a part of the result
    exact = (x_int8.double() @ w_int8.double().T).float() * x_scale * w_scale
    assert output.dtype == F16
    torch.testing.assert_close(output, exact.half(), rtol=1e-3, atol=1e-2)
    wide = aiter.int8_gemm(x_int8, w_int8, x_scale, w_scale, output_dtype=torch.float32)
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-4)
