"""ptgmm and nptgmm of 8-bit operands against float64: the numbers that they stand for, dequantised."""

import pytest
import torch
from torch import Tensor

from moe_aiter.config import interpret
from moe_aiter.kernels.base.fp8 import FP8
from moe_aiter.kernels.grouped.ptgmm import nptgmm, ptgmm
from moe_aiter.kernels.hopper import is_hopper
from moe_aiter.kernels.quantize.rows import quantize_rows
from moe_aiter.op import IMPLS, INPUTS, pick, use

from ...check import error, few
from ...shapes import GROUP_SIZES
from .test_gmm_8_bits import BF16, CUDA, E4M3, E5M2, SHORT, codes

LIMITS = {torch.float32: 3e-6, torch.float16: 6e-4, BF16: 2.5e-3}
OUTS = [torch.float32, torch.float16] if interpret else list(LIMITS)
every_variant = pytest.mark.parametrize("variant", [ptgmm, nptgmm])


def make(device, sizes, k=48, n=40, dtypes=(E4M3, E4M3), tail=3, groups=torch.int32):
    """x (M, K), y (M, N), the group sizes and scales: NaN for groups without rows."""
    M = sum(sizes) + tail
    x, y = codes(M, k, dtype=dtypes[0], device=device), codes(M, n, dtype=dtypes[1], device=device)
    scales = [torch.rand(len(sizes), size, device=device) + 0.5 for size in (k, n)]
    for scale in scales:
        scale[[size == 0 for size in sizes]] = float("nan")
    return x, y, torch.tensor(sizes, dtype=groups, device=device), *scales


def definition(x, y, sizes, x_scale, y_scale) -> Tensor:
    x, y = x.double(), y.double()
    out, start = x.new_zeros(len(sizes), x.shape[1], y.shape[1]), 0
    for g, size in enumerate(sizes.tolist()):
        if size:
            rows = slice(start, start + size)
            out[g] = (x[rows] * x_scale[g]).mT @ (y[rows] * y_scale[g])
        start += size
    return out


def limit(got: Tensor) -> float:
    return max(LIMITS[got.dtype], SHORT if got.is_cuda else 0)


def multiply(variant, x, y, sizes, x_scale, y_scale, **named) -> Tensor:
    named = {"trans_lhs": False} | named
    return variant(x.mT, y, sizes, lhs_scale=x_scale, rhs_scale=y_scale, **named)


@every_variant
@pytest.mark.parametrize("out", OUTS, ids=str)
@pytest.mark.parametrize("name", few(GROUP_SIZES, "ragged", "empty groups between"))
def test_definition(device, variant, name, out):
    inputs = make(device, GROUP_SIZES[name])
    exact = definition(*inputs)
    got = multiply(variant, *inputs, preferred_element_type=out)
    assert got.dtype == out and error(got, exact) < limit(got)
    assert not any(got[g].any() for g, size in enumerate(GROUP_SIZES[name]) if not size)
    into = torch.full_like(got, float("nan"))
    assert multiply(variant, *inputs, existing_out=into) is into and torch.equal(into, got)
    into = torch.randn_like(exact).to(out).mT.contiguous().mT
    exact += into.double()
    multiply(variant, *inputs, existing_out=into, accumulate=True)
    assert error(into, exact) < limit(got)


@pytest.mark.parametrize("k, n", [(1, 1), (127, 129), (300, 130), (0, 5)])
def test_sizes(device, k, n):
    inputs = make(device, [129, 0, 30], k, n, groups=torch.int64)
    got = multiply(ptgmm, *inputs, preferred_element_type=torch.float32)
    assert error(got, definition(*inputs)) < limit(got)


@pytest.mark.parametrize("dtypes", [(x, y) for x in FP8 for y in FP8], ids=str)
def test_formats(device, dtypes):
    inputs = make(device, [20, 11], dtypes=dtypes)
    got = multiply(ptgmm, *inputs, preferred_element_type=torch.float32)
    assert error(got, definition(*inputs)) < limit(got)


def test_quantised_by_columns(device):
    """As the documentation has it: columns of all rows, and their scales for every group."""
    x, dout = torch.randn(100, 48, device=device), torch.randn(100, 40, device=device)
    sizes = torch.tensor([30, 0, 60], device=device)
    (x8, x_scale), (dout8, scale) = quantize_rows(x.mT), quantize_rows(dout.mT, "e5m2")
    scales = {"lhs_scale": x_scale.expand(3, -1), "rhs_scale": scale.expand(3, -1)}
    got = ptgmm(x8, dout8.mT, sizes, **scales)
    assert got.dtype == BF16 and not got[1].any()
    assert error(got, definition(x8.mT, dout8.mT, sizes, *scales.values())) < LIMITS[BF16]
    exact = torch.stack([x[s:e].double().mT @ dout[s:e].double() for s, e in ((0, 30), (30, 30), (30, 90))])
    assert error(got, exact) < 0.06


@pytest.mark.no_interpreter
def test_compiled(device):
    x, y, sizes, *scales = make(device, [20, 11])

    def product(x, y, *scales):
        return multiply(ptgmm, x, y, sizes, *scales)

    got = torch.compile(product, fullgraph=True, backend="aot_eager")(x, y, *scales)
    assert torch.equal(got, product(x, y, *scales))


@every_variant
def test_refuses(device, variant):
    x, y, sizes, x_scale, y_scale = make(device, [20, 11])
    scales = {"lhs_scale": x_scale, "rhs_scale": y_scale}

    def refused(error, words, lhs=x.mT, rhs=y, **named):
        with pytest.raises(error, match=words):
            variant(lhs, rhs, sizes, trans_lhs=False, **scales | named)

    for name in scales:
        refused(ValueError, f"have lhs_scale and rhs_scale, but {name} is missing", **{name: None})
        refused(TypeError, f"{name} must be float32", **{name: scales[name].half()})
        refused(ValueError, f"{name} must be .* but it has shape", **{name: scales[name][:-1]})
        refused(RuntimeError, "has no gradient", **{name: scales[name].clone().requires_grad_()})
    refused(TypeError, "lhs_scale is for operands of 8 bits, but lhs is torch.float16", lhs=x.mT.half())
    refused(TypeError, "rhs must be of 8-bit floats, not torch.int8", rhs=y.view(torch.int8))
    refused(TypeError, "preferred_element_type must be", preferred_element_type=E4M3)
    refused(ValueError, "take no bias_grad", bias_grad=torch.zeros(2, 48, device=device))
    refused(ValueError, "take no config", config={"BLOCK_SIZE_M": 64})
    refused(ValueError, "existing_out must be floating", existing_out=torch.zeros(3, 4, 5, device=device))


# on Hopper


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("k, n", [(512, 384), (208, 48), (1040, 656)])
@pytest.mark.parametrize("sizes", [[256, 256], [1, 0, 127, 128, 129, 0, 31], [0, 0, 300]], ids=str)
def test_hopper(dtypes, k, n, sizes):
    """By Hopper's kernel: any layout of the operands and of the result, which may be added to."""
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    x, y, *rest = make(CUDA, sizes, k, n, dtypes, tail=4)
    exact = definition(x, y, *rest)
    for dtype in (BF16, torch.float32):
        for turned in (False, True):
            x, y = (t.mT.contiguous().mT for t in (x, y)) if turned else (x, y)
            onto = torch.randn_like(exact).to(dtype)
            onto = onto.mT.contiguous().mT if turned else onto
            expected = exact + onto.double()
            i = INPUTS["scaled_tgmm_into"](onto, x, y, *rest, True)
            assert pick("scaled_tgmm_into", i) is IMPLS["scaled_tgmm_into"]["hopper"]
            multiply(ptgmm, x, y, *rest, existing_out=onto, accumulate=True)
            assert error(onto, expected) < limit(onto)
            multiply(ptgmm, x, y, *rest, existing_out=onto.fill_(float("nan")))
            for g, size in enumerate(sizes):
                assert error(onto[g], exact[g]) < 2.5e-3 if size else not onto[g].any()


@pytest.mark.gpu
def test_captured(no_debug):
    """A graph follows the group sizes."""
    inputs = _, _, sizes, *_ = make(CUDA, [100, 20, 60], 256, 384)
    multiply(ptgmm, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = multiply(ptgmm, *inputs)
    for other in ([0, 160, 0], [53, 54, 53], [0, 0, 0]):
        sizes.copy_(torch.tensor(other))
        graph.replay()
        with use("torch"):
            assert error(got, multiply(ptgmm, *inputs)) < 2 * LIMITS[BF16]  # both are rounded
