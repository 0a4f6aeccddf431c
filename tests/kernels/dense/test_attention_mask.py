"""Masks become biases in one launch, and only the rows of queries without keys become zeros."""

import pytest
import torch

from moe_aiter.kernels.dense.attention_mask import lowest, mask_bias, zero_rows
from moe_aiter.op import use

pytestmark = pytest.mark.no_host
SHAPES = [(2, 1, 1, 37), (2, 3, 5, 64), (1, 1, 7, 2100), (3, 1, 4, 1), (2, 1, 3, 0), (0, 1, 3, 5)]
DTYPES = [torch.float16, torch.float32, torch.bfloat16, torch.float64]


def masks(shape, device):
    mask = torch.rand(shape, device=device) > 0.6
    mask[:, :, ::2] = mask[:, :, ::2] & (torch.rand(*shape[:2], 1, 1, device=device) > 0.5)
    last = torch.rand(*shape[:3], 2 * shape[3], device=device)[..., ::2] > 0.5
    return mask, torch.zeros_like(mask), mask[:1, :1, :1].expand(shape), last


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_hides_what_the_mask_does_and_never_all(backend, device, shape, dtype):
    for mask in masks(shape, device):
        with use(backend):
            bias, alive = mask_bias(mask, dtype)
        assert bias.dtype == dtype and bias.shape == mask.shape and bias.stride(2) % 16 == 0
        assert torch.equal(alive, mask.any(3, keepdim=True))
        assert torch.equal(bias, torch.where(mask | ~alive, 0.0, lowest(dtype)).to(dtype))


@pytest.mark.parametrize("axes", [(2, 1, 1), (2, 3, 1), (1, 1, 150), (2, 3, 150), (2, 1, 150)], ids=str)
@pytest.mark.parametrize("columns", [1, 40])
def test_rows_that_see_nothing_become_zeros(backend, device, axes, columns):
    alive = torch.rand(*axes, 1, device=device) > 0.5
    for heads_last in (False, True):
        out = torch.randn(2, 3, 150, columns, device=device)
        out = out.transpose(1, 2).contiguous().transpose(1, 2) if heads_last else out
        out[0, 0, 0] = torch.nan
        expected = torch.where(alive, out, 0)
        version = out._version
        with use(backend):
            zero_rows(out, alive)
        torch.testing.assert_close(out, expected, equal_nan=True, rtol=0, atol=0)
        assert out._version > version


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="mask must be bool"):
        mask_bias(torch.ones(1, 1, 1, 1), torch.float32)
    with pytest.raises(ValueError, match=r"mask must be \(B, H, Sq, Sk\)"):
        mask_bias(torch.ones(1, 1, dtype=torch.bool), torch.float32)
    with pytest.raises(ValueError, match=r"out is \(2, 3, 4, 5\) but alive is \(3, 1, 1, 1\)"):
        zero_rows(torch.ones(2, 3, 4, 5), torch.ones(3, 1, 1, 1, dtype=torch.bool))
    with pytest.raises(TypeError, match="alive must be bool"):
        zero_rows(torch.ones(2, 3, 4, 5), torch.ones(2, 1, 1, 1))
