"""Products with weights of 4 bits, against the product with the dequantised weight."""

import functools

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels.grouped.four_bit import four_bit_gmm_op
from moe_aiter.kernels.quantize.four_bit import FORMATS, quantized

from ...check import assert_as_good_as_torch
from ...references import gmm_reference
from ...shapes import GROUP_SIZES

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = {
    "nf4": ("nf4", True, 192),
    "nf4 with float32 absmax": ("nf4", False, 64),
    "mxfp4": ("mxfp4", True, 96),
    "int4": ("int4", True, 256),
}
weights = pytest.mark.parametrize("kind", WEIGHTS.values(), ids=WEIGHTS)


def make_weight(kind, groups, rows, device):
    format, double, columns = kind
    w = torch.randn(groups, rows, columns, generator=torch.Generator().manual_seed(3)) / columns**0.5
    return quantized(w.to(device), format, double)


def product(w, transpose, x, group_sizes, bias, order=None, top_k=1):
    return four_bit_gmm_op(x, w.packed, *w.parts, transpose, group_sizes, bias, order, top_k)


def dequantized_product(w, transpose, dtype, x, group_sizes, bias, order=None, top_k=1):
    """In the dtype of x, with the weight as the product of `dtype` rounds it."""
    full = w.to(dtype).dequantize().to(x.dtype)
    x = x if order is None else x[order.clamp(min=0).long() // top_k]
    return gmm_reference(x, full.mT if transpose else full, group_sizes, bias)


def check(w, transpose, x, *rest):
    reference = functools.partial(dequantized_product, w, transpose, x.dtype)
    # a GPU's kernel adds up float32 products one after the other, which torch does as a tree
    slack = 4.0 if x.dtype == torch.float32 and x.is_cuda else 2.0
    assert_as_good_as_torch(functools.partial(product, w, transpose), reference, x, *rest, slack=slack)


@weights
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.pairwise
def test_product(device, kind, dtype, sizes, transpose):
    w = make_weight(kind, len(sizes), 40, device)
    K, N = (w.shape[2], 40) if transpose else (40, w.shape[2])
    x, bias = torch.randn(sum(sizes) + 3, K), torch.randn(len(sizes), N)
    group_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
    check(w, transpose, x.to(device, dtype), group_sizes, bias.to(device, dtype))
    check(w, transpose, x.to(device, dtype)[:, :1].expand(-1, K), group_sizes, None)


@weights
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_rows(device, kind, dtype):
    w, tokens = make_weight(kind, 3, 24, device), 11
    x = torch.randn(tokens, w.shape[2]).to(device, dtype)
    order = torch.randperm(2 * tokens, device=device, dtype=torch.int32)
    order[-2:] = -1
    check(w, True, x, torch.tensor([7, 0, 13], device=device), None, order, 2)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_and_scale_is_exact(device, format):
    """Products with rows of the identity: the numbers of the weight themselves."""
    w = make_weight((format, True, 128), 2, 24, device)
    w.packed.copy_(torch.randint(256, w.packed.shape, dtype=torch.uint8))
    if format == "mxfp4":
        w.scales[:, :4] = torch.tensor([0, 1, 126, 252], device=device)[:, None]
    eye = torch.eye(128, device=device).repeat(2, 1)
    got = product(w, True, eye, torch.tensor([128, 128], device=device), None)
    expected = w.to(torch.float32).dequantize().mT.flatten(0, 1)
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("transpose", [True, False])
def test_the_scale_255_of_mxfp4_is_a_nan(device, transpose):
    """OCP's E8M0 has no infinity.  The products with this block are NaN, and no others."""
    w = make_weight(("mxfp4", True, 64), 2, 32, device)
    w.scales[1, 5, 1], w.packed[1, 5, 16:] = 255, 0x11
    x = torch.rand(7, 64 if transpose else 32, device=device)  # positive: no infinity less another
    out = product(w, transpose, x, torch.tensor([3, 4], device=device), None)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[(slice(3, None), 5) if transpose else (slice(3, None), slice(32, 64))] = True
    assert torch.equal(out.isnan(), expected) and not out.isinf().any()


def test_errors(device):
    w = make_weight(("nf4", True, 64), 2, 8, device)
    x, sizes = torch.randn(4, 64, device=device), torch.tensor([2, 2], device=device)
    with pytest.raises(ValueError, match=r"x is \(M, K=64\) but the weight needs \(M, K=8\)"):
        product(w, False, x, sizes, None)
    with pytest.raises(ValueError, match="unknown format 'fp4'"):
        four_bit_gmm_op(x, w.packed, *w.parts[:-1], "fp4", True, sizes, None, None, 1)
    with pytest.raises(ValueError, match=r"nested is \(1,\), but must be None with mxfp4"):
        scales = w.scales.repeat(1, 1, 2)
        four_bit_gmm_op(x, w.packed, scales, w.nested, None, None, "mxfp4", True, sizes, None, None, 1)
    with pytest.raises(TypeError, match="scales of int4 must be"):
        zeros = torch.zeros(2, 8, 1, dtype=torch.uint8, device=device)
        wide = w.packed.repeat(1, 1, 2)
        scales = torch.ones(2, 8, 1, device=device)
        four_bit_gmm_op(x, wide, scales, None, zeros, None, "int4", True, sizes, None, None, 1)
    with pytest.raises(ValueError, match="nf4 needs rows of a multiple of 64 numbers"):
        quantized(torch.randn(1, 2, 32), "nf4")


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_weight_of_which_nothing_is_left_is_refused(format, sign):
    """The smallest numbers are 2 ** -24 and 2 ** -128, and ties become 0; some experts alone may be dead."""
    least = {"int4": 2.0**-24, "mxfp4": 2.0**-128}[format]
    w = torch.zeros(2, 3, 128)
    assert not quantized(w, format).dequantize().any()
    w[:, 1, 7] = sign * least / 2
    with pytest.raises(ValueError, match=f"w is up to .*e-.*, all of which {format} rounds to 0: use nf4"):
        quantized(w, format)
    assert not quantized(w, format, whole=False).dequantize().any()
    assert quantized(w, "nf4", whole=False).dequantize()[1, 1, 7] == sign * least / 2
    w[0, 2, 9] = sign * least
    assert torch.equal(quantized(w, format).dequantize(), w * (w.abs() == least))


def test_zeros_and_small_numbers_as_documented():
    """docs/four_bit.md says what is lost."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 64, 256, generator=generator) * torch.logspace(-4, 0, 64)[:, None]
    w[:, ::3] = 0
    for format in ("nf4", "mxfp4", "int4"):
        assert not quantized(w, format).dequantize()[:, ::3].any()
    single, double = (quantized(w, "nf4", whole).plain().scales.flatten() for whole in (False, True))
    rest = single - single.mean()
    groups = torch.nn.functional.pad(rest, (0, -len(rest) % 256)).view(-1, 256).abs().amax(1)
    assert ((double - single).abs() <= 0.0071 * groups.repeat_interleave(256)[: len(rest)]).all()
    for span, error in ((1e-4, 0.1), (1e-6, 0.18), (2e-7, 0.45), (5e-8, 1.0)):
        small = torch.randn(1, 128, 128, generator=generator)
        small *= span / (small.amax(-1, keepdim=True) - small.amin(-1, keepdim=True))
        found = quantized(torch.cat([small, torch.ones_like(small)]), "int4").dequantize()[:1]
        assert ((found - small).norm() / small.norm()).item() == pytest.approx(error, rel=0.05)
