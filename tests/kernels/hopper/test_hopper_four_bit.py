"""The Hopper product with weights of 4 bits: as good as plain torch with the dequantised weight."""

import functools

import pytest
import torch
from check import assert_as_good_as_torch, fits

from moe_aiter import tuning
from moe_aiter.kernels.grouped.four_bit import FourBitInputs, four_bit_gmm_op
from moe_aiter.kernels.quantize.four_bit import FORMATS, quantized
from moe_aiter.tuning.candidates import candidates

from ...references import gmm_reference
from .test_hopper import CUDA, DTYPES, ROWS, SIZES, TOP_K, group_sizes, hopper, randn  # noqa: F401

pytestmark = pytest.mark.gpu
WEIGHTS = {  # format, double quantisation, rows, columns
    "nf4": ("nf4", True, 576, 192),
    "nf4 with float32 absmax": ("nf4", False, 64, 1152),
    "mxfp4": ("mxfp4", True, 320, 576),
    "mxfp4, one step": ("mxfp4", True, 64, 64),
    "int4": ("int4", True, 192, 640),
}
weights = pytest.mark.parametrize("kind", WEIGHTS.values(), ids=WEIGHTS)


def make_weight(kind, groups, dtype):
    format, double, rows, columns = kind
    return quantized(randn(groups, rows, columns, dtype=dtype) / columns**0.5, format, double)


def inputs(w, transpose, x, sizes, bias=None, order=None, top_k=1):
    return FourBitInputs(x, w.packed, *w.parts, transpose, sizes, bias, order, top_k)


def check(w, transpose, x, sizes, bias=None, order=None, top_k=1):
    assert fits("four_bit_gmm", *inputs(w, transpose, x, sizes, bias, order, top_k))
    full = w.dequantize()

    def product(x, bias):
        return four_bit_gmm_op(*inputs(w, transpose, x, sizes, bias, order, top_k))

    def reference(x, bias):
        x = x if order is None else x[order.clamp(min=0).long() // top_k]
        return gmm_reference(x, (full.mT if transpose else full).to(x.dtype), sizes, bias)

    assert_as_good_as_torch(product, reference, x, bias)


@weights
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.pairwise
def test_product(kind, sizes, dtype, transpose):
    sizes = group_sizes(sizes)
    w = make_weight(kind, len(sizes), dtype)
    N, K = w.shape[1:] if transpose else (w.shape[2], w.shape[1])
    check(w, transpose, randn(ROWS, K, dtype=dtype), sizes)
    check(w, transpose, randn(ROWS, K, dtype=dtype), sizes, randn(len(sizes), N, dtype=dtype))


@weights
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.pairwise
def test_gathers_rows(kind, sizes):
    sizes = group_sizes(sizes)
    w = make_weight(kind, len(sizes), torch.bfloat16)
    order = torch.randperm(ROWS, device=CUDA, dtype=torch.int32)
    order[int(sizes.sum()) :] = -1  # rows in no group
    check(w, True, randn(ROWS // TOP_K, w.shape[2]), sizes, None, order, TOP_K)


@pytest.mark.parametrize("tile", candidates("hopper_four_bit"), ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("transpose", [True, False])
def test_every_tile(tile, format, transpose):
    sizes = group_sizes("ragged")
    w = make_weight((format, True, 576, 640), len(sizes), torch.bfloat16)
    with tuning.choose(lambda key: tile):
        check(w, transpose, randn(ROWS, 640 if transpose else 576), sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("transpose", [True, False])
def test_every_code_is_exact(format, dtype, transpose):
    """Products with rows of the identity: the numbers of the weight themselves."""
    w = make_weight((format, True, 128, 128), 2, dtype)
    w.packed.copy_(torch.randint(256, w.packed.shape, dtype=torch.uint8))
    eye = torch.eye(128, device=CUDA, dtype=dtype).repeat(2, 1)
    got = four_bit_gmm_op(*inputs(w, transpose, eye, torch.tensor([128, 128], device=CUDA)))
    full = w.dequantize()
    assert torch.equal(got, (full.mT if transpose else full).flatten(0, 1))


@pytest.mark.parametrize("transpose", [True, False])
def test_two_runs_give_the_same_bits(transpose):
    sizes = group_sizes("ragged")
    w = make_weight(("nf4", True, 2048, 2048), len(sizes), torch.bfloat16)
    product = functools.partial(four_bit_gmm_op, *inputs(w, transpose, randn(ROWS, 2048), sizes))
    expected = product()
    assert all(torch.equal(product(), expected) for _ in range(20))


def test_what_does_not_fit():
    sizes, w = group_sizes("ragged"), make_weight(("mxfp4", True, 40, 96), 10, torch.bfloat16)
    assert not fits("four_bit_gmm", *inputs(w, True, randn(ROWS, 96), sizes))  # a part of a step
    assert not fits("four_bit_gmm", *inputs(w, False, randn(ROWS, 40), sizes))
    w = make_weight(("mxfp4", True, 64, 64), 10, torch.bfloat16)
    assert not fits("four_bit_gmm", *inputs(w, True, randn(ROWS, 128)[:, 1:65], sizes))
    assert not fits("four_bit_gmm", *inputs(w, True, randn(8, 64), sizes))  # few rows
