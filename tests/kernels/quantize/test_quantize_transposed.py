"""A weight's 8-bit rows in the other order: the bytes of `quantize_rows`, transposed."""

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels.quantize import layouts as module
from moe_aiter.kernels.quantize.layouts import quantize_transposed, transpose_rows8
from moe_aiter.kernels.quantize.rows import FORMATS, quantize_rows
from moe_aiter.op import use

from ...shapes import LAYOUTS
from .test_quantize import DTYPES, draw, every_dtype, every_format, odd

SHAPES = [(1, 1, 3), (2, 3, 40), (3, 200, 132), (2, 65, 70), (0, 8, 8), (2, 0, 8)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def bits(x):
    """Those of a NaN differ."""
    return x.float().nan_to_num(-1, 9e9)


@every_format
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.no_interpreter
@pytest.mark.pairwise
def test_the_bytes_of_the_rows(device, layout, dtype, format):
    w = LAYOUTS[layout](odd(draw(3, 37, 48, dtype=dtype, device=device)))
    x8, scale = quantize_rows(w, format)
    for got in (quantize_transposed(w, scale, format), transpose_rows8(x8)):
        assert got.dtype == FORMATS[format] and got.is_contiguous()
        assert torch.equal(bits(got), bits(x8.mT))


@every_shape
def test_bytes_move(device, shape):
    """All 256 of them, whatever they stand for."""
    x8 = torch.randint(256, shape, dtype=torch.uint8, device=device).view(FORMATS["e4m3"])
    assert torch.equal(transpose_rows8(x8).view(torch.uint8), x8.view(torch.uint8).mT)
    assert torch.equal(transpose_rows8(x8.mT).view(torch.uint8), x8.view(torch.uint8))


def test_bytes_may_begin_anywhere(device):
    memory = torch.arange(129, dtype=torch.uint8, device=device)
    of_one_axis = memory[:64].view(8, 8, 1).permute(2, 0, 1)  # the first, whose stride then means nothing
    for x8 in (memory[1:].view(2, 8, 8), of_one_axis):
        assert torch.equal(transpose_rows8(x8.view(FORMATS["e4m3"])).view(torch.uint8), x8.mT)


@pytest.mark.skipif(not interpret, reason="needs Triton's interpreter")
@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 130, 70)], ids=str)
def test_kernel_without_the_last_rounding(shape, monkeypatch):
    monkeypatch.setattr(module, "native_fp8", FORMATS.values)
    x, scale = torch.randn(shape), torch.rand(shape[:2]) + 0.1
    for given in (x, x.mT.contiguous().mT):
        out = torch.full(x.mT.shape, 5.0)
        i = module.QuantizeTransposedInputs(given, scale, "e4m3")
        module.bind_quantize_transposed(i)(out, i)
        assert torch.equal(out, (x * (1 / scale)[..., None]).mT)


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 200, 132), (2, 65, 70), (2, 2048, 4096)], ids=str)
def test_kernels_are_the_reference(shape, dtype, format):
    w = draw(*shape, dtype=dtype, device="cuda")
    x8, scale = quantize_rows(w, format)
    for given in (w, w.mT.contiguous().mT):
        found = []
        for backend in ("triton", "torch"):
            with use(backend):
                found += [quantize_transposed(given, scale, format), transpose_rows8(x8)]
        assert all(torch.equal(t.view(torch.uint8), x8.mT.contiguous().view(torch.uint8)) for t in found)


def test_refuses():
    w = torch.randn(2, 5, 8)
    for scale in (torch.ones(2, 8), torch.ones(2, 5, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"scale must be \(2, 5\) in float32, not "):
            quantize_transposed(w, scale)
    with pytest.raises(ValueError, match="unknown format 'e3m4'; known: e4m3, e5m2"):
        quantize_transposed(w, torch.ones(2, 5), "e3m4")
    with pytest.raises(TypeError, match=r"x8 must be of 8-bit floats, not torch.float32"):
        transpose_rows8(w)
