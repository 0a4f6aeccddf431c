"""8-bit floats with a scale for each block, against `quantize_rows` of each block as one row."""

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels.quantize import scale_blocks as module
from moe_aiter.kernels.quantize.rows import FORMATS, quantize_rows
from moe_aiter.kernels.quantize.scale_blocks import dequantize, quantize_blocks
from moe_aiter.op import use

from ...references import quantize_blocks_reference
from ...shapes import LAYOUTS
from .test_quantize import draw, every_dtype, every_format, same

SHAPES = [(1, 1), (130, 300), (0, 40), (5, 0), (3, 128, 256), (2, 129, 257)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
either = pytest.mark.parametrize("square", [False, True], ids=["rows", "square"])


@every_shape
@either
@every_format
@every_dtype
@pytest.mark.no_interpreter
@pytest.mark.pairwise
def test_definition(device, shape, square, format, dtype):
    x = draw(*shape, dtype=dtype, device=device)
    x8, scale = quantize_blocks(x, square, format)
    rows = 128 if square else 1
    assert x8.shape == x.shape and x8.dtype == FORMATS[format] and x8.is_contiguous()
    assert scale.shape == (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // 128))
    back = dequantize(x8, scale, torch.float32)
    for i, j in [(i, j) for i in range(scale.shape[-2]) for j in range(scale.shape[-1])]:
        at = ..., slice(i * rows, (i + 1) * rows), slice(j * 128, (j + 1) * 128)
        block = x[at].flatten(-2)
        row8, row_scale = quantize_rows(block if block.dim() == 2 else block[None], format)
        row8, row_scale = (t if block.dim() == 2 else t[0] for t in (row8, row_scale))
        assert same((x8[at].flatten(-2), scale[..., i, j]), (row8, row_scale))
        assert torch.equal(back[at].flatten(-2), row8.float() * row_scale[..., None])


@pytest.mark.no_interpreter
@pytest.mark.parametrize("layout", LAYOUTS)
@either
def test_strides(device, layout, square):
    x = LAYOUTS[layout](draw(3, 130, 200, dtype=torch.float32, device=device))
    assert same(quantize_blocks(x, square), quantize_blocks(x.contiguous(), square))


@pytest.mark.no_interpreter
def test_the_transpose_has_the_same_numbers(device):
    x = draw(2, 200, 300, dtype=torch.float32, device=device)
    (x8, scale), (t8, t_scale) = quantize_blocks(x, True), quantize_blocks(x.mT, True)
    assert same((t8.float().mT, t_scale.mT), (x8.float(), scale))


@pytest.mark.no_interpreter
@either
def test_what_is_no_number_stays_in_its_block(device, square):
    x = torch.ones(256, 256, device=device)
    x[3, 130], x[200, 5] = float("inf"), float("nan")
    x[:128, :128] = 0
    back = dequantize(*quantize_blocks(x, square), torch.float32)
    wrong = torch.zeros(256, 256, dtype=torch.bool, device=device)
    for row, first, column in ((3, 0, 128), (200, 128, 0)):
        wrong[slice(first, first + 128) if square else row, column : column + 128] = True
    assert torch.equal(back.isnan(), wrong)
    assert torch.equal(back[~wrong], x[~wrong])


@pytest.mark.skipif(not interpret, reason="needs Triton's interpreter")
@either
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_kernel_without_the_last_rounding(shape, square, monkeypatch):
    monkeypatch.setattr(module, "native_fp8", FORMATS.values)
    x = draw(*shape, dtype=torch.float32, device="cpu")
    _, scale = quantize_blocks_reference(x, square, "e4m3")
    each = scale.repeat_interleave(128, -1)[..., : shape[-1]]
    each = each.repeat_interleave(128, -2)[..., : shape[-2], :] if square else each
    for given in (x, x.mT.contiguous().mT):
        out = tuple(torch.full(t.shape, 5.0) for t in (x, scale))
        i = module.QuantizeBlocksInputs(given, square, "e4m3")
        module.bind_quantize_blocks(i)(out, i)
        assert same(out, (x * (1 / each), scale))


@pytest.mark.gpu
@every_format
@every_dtype
@every_shape
@either
@pytest.mark.pairwise
def test_kernel_is_the_reference(shape, square, dtype, format):
    x = draw(*shape, dtype=dtype, device="cuda")
    for given in (x, x.mT):
        with use("triton"):
            got = quantize_blocks(given, square, format)
        with use("torch"):
            assert same(got, quantize_blocks(given, square, format))


def test_refuses():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"x must be \(M, K\) or \(G, M, K\), but it has shape \(8,\)"):
        quantize_blocks(x[0], False)
    with pytest.raises(ValueError, match="unknown format 'int8'"):
        quantize_blocks(x, True, "int8")
    with pytest.raises(TypeError, match=r"x must be float16, bfloat16, float32 or float64, not torch.int64"):
        quantize_blocks(x.long(), True)
