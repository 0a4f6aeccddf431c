"""Rows that take a weight's scales over, against `quantize_rows` of what a loop over groups multiplies."""

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels.quantize import layouts as module
from moe_aiter.kernels.quantize.layouts import quantize_folded
from moe_aiter.kernels.quantize.rows import FORMATS, LEAST, dequantize_rows, quantize_rows
from moe_aiter.op import use

from ...references import quantize_folded_reference
from ...shapes import LAYOUTS
from .test_quantize import every_dtype, every_format, same
from .test_row_blocks import SIZES

every_size = pytest.mark.parametrize("name", SIZES)


def draw(name, K=40, dtype=torch.float32, device="cpu"):
    """x, NaN where no group is, factors of very different sizes, group sizes, and what they multiply to."""
    sizes, rows = SIZES[name]
    x = torch.randn(rows, K).to(device, dtype)
    factor = torch.rand(len(sizes), K, device=device) * 2.0 ** torch.randint(-20, 3, (K,), device=device)
    product, start = torch.zeros(rows, K, device=device), 0
    for g, size in enumerate(sizes):
        end = min(start + max(size, 0), rows)
        product[start:end] = x[start:end].float() * factor[g]
        start = end
    x[start:] = float("nan")
    return x, factor, torch.tensor(sizes, device=device), product


@pytest.mark.no_interpreter
@every_size
@every_format
@every_dtype
@pytest.mark.pairwise
def test_definition(device, name, format, dtype):
    x, factor, group_sizes, product = draw(name, dtype=dtype, device=device)
    assert same(quantize_folded(x, factor, group_sizes, format), quantize_rows(product, format))


@pytest.mark.no_interpreter
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout):
    x, factor, group_sizes, _ = draw("ragged", device=device)
    x, factor = LAYOUTS[layout](x), LAYOUTS[layout](factor)
    got = quantize_folded(x, factor, group_sizes)
    assert got[0].is_contiguous()
    assert same(got, quantize_folded(x.contiguous(), factor.contiguous(), group_sizes))


@pytest.mark.no_interpreter
def test_what_is_zero_or_no_number_stays_in_its_row(device):
    """A factor is never 0, but LEAST where a weight's row is zeros: rows stay finite, and so do others."""
    x, factor, group_sizes, _product = draw("even", device=device)
    factor[0, :3], factor[1] = LEAST, LEAST
    x[3, 5], x[300, 1] = float("inf"), float("nan")
    x8, scale = quantize_folded(x, factor, group_sizes)
    back = dequantize_rows(x8, scale, torch.float32)
    assert scale.isnan().nonzero().flatten().tolist() == [3, 300]
    others = ~scale.isnan()
    assert back[others].isfinite().all() and back[others][:255, 3:].any() and (back[256:300] < 1e-35).all()


@pytest.mark.skipif(not interpret, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    "name, K",
    [("ragged", K) for K in (0, 1, 16, 40, 1300, 9000)]
    + [(name, K) for name in ("rows in no group", "more than there are", "negative") for K in (0, 40, 1300)],
)
def test_kernel_without_the_last_rounding(name, K, monkeypatch):
    monkeypatch.setattr(module, "native_fp8", FORMATS.values)
    x, factor, group_sizes, product = draw(name, K)
    _, scale = quantize_folded_reference(x, factor, group_sizes, "e4m3")
    out = tuple(torch.full(t.shape, 5.0) for t in (x, scale))
    for given in (x, x.mT.contiguous().mT):
        i = module.QuantizeFoldedInputs(given, factor, group_sizes, "e4m3")
        module.bind_quantize_folded(i)(out, i)
        assert same(out, (product * (1 / scale)[:, None], scale))


@pytest.mark.gpu
@every_format
@every_dtype
@pytest.mark.parametrize("K", [16, 300, 2048, 9000])
@every_size
@pytest.mark.pairwise
def test_kernel_is_the_reference(name, K, dtype, format):
    x, factor, group_sizes, _ = draw(name, K, dtype, "cuda")
    with use("triton"):
        got = quantize_folded(x, factor, group_sizes, format)
    with use("torch"):
        assert same(got, quantize_folded(x, factor, group_sizes, format))


def test_refuses():
    x, factor, group_sizes, _ = draw("even")
    with pytest.raises(ValueError, match=r"x is \(M, K=39\) but factor is \(G, K=40\)"):
        quantize_folded(x[:, :-1], factor, group_sizes)
    with pytest.raises(ValueError, match=r"factor is \(G=1, K\) but group_sizes is \(G=2,\)"):
        quantize_folded(x, factor[:1], group_sizes)
    with pytest.raises(TypeError, match=r"factor must be float32, not torch.float64"):
        quantize_folded(x, factor.double(), group_sizes)
    with pytest.raises(ValueError, match="unknown format 'e3m4'"):
        quantize_folded(x, factor, group_sizes, "e3m4")
