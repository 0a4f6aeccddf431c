"""DoRA's norms |W + c B A| where the sum cancels, and in blocks."""

import pytest
import torch

from moe_aiter.layers import lora
from moe_aiter.layers.lora import LoRAFactors


def cancelling(dtype, count=3, out=17, width=40, share=0.999):
    """Factors of full rank with c B A = -share * W, and W."""
    weight = torch.randn(count, out, width, dtype=torch.float32)
    factors = LoRAFactors(weight.to(dtype), count, rank=width, alpha=2 * width, dora=True)
    with torch.no_grad():
        factors.A.copy_(torch.eye(width))
        factors.B.copy_(-share * weight / factors.scaling)
    return factors, weight.to(dtype)


def true_norms(factors, weight):
    full = weight.double() + factors.scaling * (factors.B.double() @ factors.A.double())
    return full.norm(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 100, 2**25])
@pytest.mark.parametrize("width", [1, 40])
@pytest.mark.pairwise
def test_norms_where_the_sum_cancels(monkeypatch, dtype, block, width):
    monkeypatch.setattr(lora, "NORM_BLOCK", block)
    factors, weight = cancelling(dtype, width=width)
    norms = factors.norms(weight)
    # W and c B A are exact in float32, so their difference has the rounding of one sum of size |W|
    torch.testing.assert_close(norms.double(), true_norms(factors, weight), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_growth_of_an_adapter_that_begins_to_train(dtype):
    """m / |W + c B A| is close to 1: in bfloat16 the quotient itself rounds to 1 or 1.0078."""
    weight = torch.randn(3, 17, 40).to(dtype)
    factors = LoRAFactors(weight, 3, rank=4, dora=True)
    with torch.no_grad():
        factors.B.normal_(0, 0.02)
        factors.magnitude.copy_(true_norms(factors, weight))
        factors.magnitude.mul_(1 + 4 * torch.finfo(dtype).eps)
    growth, norms = factors.growth(weight), factors.norms(weight).to(dtype)
    expected = factors.magnitude.double() / norms.double() - 1
    torch.testing.assert_close(growth.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    growth.sum().backward()
    assert torch.equal(factors.magnitude.grad, 1 / norms)


def test_one_weight_of_several_adapters():
    factors, weight = cancelling(torch.float32)
    norms = factors.norms(weight[0])
    torch.testing.assert_close(norms.double(), true_norms(factors, weight[:1]), rtol=1e-3, atol=1e-6)


def test_norms_under_autocast():
    factors, weight = cancelling(torch.float32)
    expected = factors.norms(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(factors.norms(weight), expected)


def test_norms_of_no_rows():
    weight = torch.randn(2, 0, 4)
    assert LoRAFactors(weight, 2, rank=2, dora=True).norms(weight).shape == (2, 0)
