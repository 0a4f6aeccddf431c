"""Rows as 8-bit floats: how far off they are, and what becomes of zeros, infinities and NaN."""

import pytest
import torch

from moe_aiter.backend import use
from moe_aiter.config import interpret
from moe_aiter.kernels.quantize import FORMATS, LEAST, dequantize_rows, quantize_rows

from ..shapes import LAYOUTS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = DTYPES[:2] if interpret else DTYPES
HALF_STEP = {"e4m3": 2**-4, "e5m2": 2**-3}  # of a number that is not subnormal, relative
SMALLEST = {"e4m3": 2**-9, "e5m2": 2**-16}

every_format = pytest.mark.parametrize("format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape, dtype, device):
    """Rows of very different sizes."""
    size = torch.rand(*shape[:-1], 1) * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1))
    return (torch.randn(shape) * size).to(device, dtype)


@every_format
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (13, 40), (5, 300), (3, 7, 24), (2, 65, 33)], ids=str)
def test_error(device, shape, dtype, format):
    x = draw(*shape, dtype=dtype, device=device)
    x8, scale = quantize_rows(x, format)
    assert x8.dtype == FORMATS[format] and scale.shape == shape[:-1] and scale.dtype == torch.float32
    exact = x.double()
    off = (dequantize_rows(x8, scale, torch.float64) - exact).abs()
    allowed = HALF_STEP[format] * exact.abs() + 0.51 * SMALLEST[format] * scale[..., None]
    assert (off <= allowed * (1 + 1e-6)).all()
    largest = torch.finfo(FORMATS[format]).max
    assert (x8.float().abs().amax(-1) == largest).all()  # all of the range is used


@every_format
def test_rows_that_are_not_numbers(device, format):
    x = torch.randn(6, 20, device=device)
    x[1], x[2, 3], x[3, 4] = 0, float("inf"), float("nan")
    x[4] = 1e-44  # below what a scale can be
    x8, scale = quantize_rows(x, format)
    back = dequantize_rows(x8, scale, torch.float32)
    assert back[1].eq(0).all() and scale[1] == scale[4] == LEAST
    assert back[2:4].isnan().all()
    assert back[[0, 4, 5]].isfinite().all() and back[4].abs().max() <= 2e-44


@every_format
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout, format):
    x = LAYOUTS[layout](torch.randn(37, 48, device=device))
    for given in (x, x.mT, x[None], torch.stack([x, x + 1]).mT):
        x8, scale = quantize_rows(given, format)
        expected = quantize_rows(given.contiguous(), format)
        assert x8.is_contiguous()
        assert torch.equal(x8.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scale, expected[1])


@pytest.mark.gpu
@every_format
@every_dtype
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(1, 16), (37, 256), (64, 9000), (3, 200, 130), (2, 2304, 96)], ids=str)
def test_kernel_is_reference(shape, columns, dtype, format):
    x = draw(*shape, dtype=dtype, device="cuda")
    x[..., 0, :] = 0
    x = x.mT if columns else x
    with use("triton"):
        x8, scale = quantize_rows(x, format)
    with use("torch"):
        expected, expected_scale = quantize_rows(x, format)
    assert torch.equal(x8.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


def test_refuses():
    with pytest.raises(ValueError, match="unknown format 'e3m4'; known: e4m3, e5m2"):
        quantize_rows(torch.randn(2, 3), "e3m4")
    with pytest.raises(TypeError, match="not torch.int32"):
        quantize_rows(torch.ones(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\(M, K\) or \(G, M, K\)"):
        quantize_rows(torch.randn(3))
