"""Gradients of weights from 8-bit rows against their definition in float64; on Hopper against the same."""

import pytest
import torch
from torch import Tensor

from moe_aiter.kernels.grouped.tgmm import tgmm
from moe_aiter.kernels.grouped.tgmm_fp8 import (
    TgmmFp8Inputs,
    new_tgmm_fp8,
    quantize_y,
    tgmm_fp8_into_op,
    tgmm_fp8_op,
)
from moe_aiter.kernels.hopper import is_hopper
from moe_aiter.kernels.quantize.blocks import plan_row_blocks
from moe_aiter.kernels.quantize.rows import FORMATS, dequantize_rows, quantize_rows
from moe_aiter.op import IMPLS, pick, poison, use

from ...check import error

pytestmark = pytest.mark.no_interpreter
TOP_K = 2
ALL_BYTES = 2**40  # x in one slice
CUDA = torch.device("cuda", 0)
SIZES = {  # of the groups, and how many rows there are
    "even": ([256, 256], 512),
    "ragged": ([1, 0, 127, 128, 129, 0, 31], 420),
    "all in one": ([0, 0, 300], 300),
    "rows in no group": ([77, 0, 5], 90),
    "many": ([i * 37 % 90 for i in range(70)], 3200),
}
every_size = pytest.mark.parametrize("name", SIZES)
every_pair = pytest.mark.parametrize("formats", [(x, y) for x in FORMATS for y in FORMATS], ids=str)


def draw(name, dtype, device="cpu", k=48, n=32):
    """Tokens and columns of very different sizes."""
    sizes, rows = SIZES[name]
    x = torch.randn(rows // TOP_K, k) * torch.logspace(-3, 3, rows // TOP_K)[:, None]
    y = torch.randn(rows, n) * torch.logspace(-3, 1, n)
    order = torch.randperm(rows, dtype=torch.int32)
    order[sum(sizes) :] = -1
    numbers = (t.to(device, dtype) for t in (x, y))
    return *numbers, torch.tensor(sizes, device=device), order.to(device), TOP_K


def definition(x, y, group_sizes, order, top_k, x_format, y_format) -> Tensor:
    """In float64, from the 8-bit floats and the scales: 128 rows at a time."""
    x8, scale = quantize_rows(x, x_format)
    out, start = torch.zeros(len(group_sizes), x.shape[1], y.shape[1], dtype=torch.float64), 0
    out = out.to(x.device)
    for g, size in enumerate(group_sizes.tolist()):
        for first in range(start, start + size, 128):
            rows = slice(first, min(first + 128, start + size))
            token = order[rows].long() // top_k
            wide = torch.promote_types(y.dtype, torch.float32)
            folded = (y[rows].to(wide) * scale[token][:, None]).T
            y8 = dequantize_rows(*quantize_rows(folded, y_format), torch.float64)
            out[g] += x8.double()[token].T @ y8.T
        start += size
    return out


def quantised(x, y, group_sizes, order, top_k, formats=("e4m3", "e4m3"), x_bytes=ALL_BYTES) -> tuple:
    """The op's inputs."""
    x8, scale = quantize_rows(x, formats[0])
    y8 = quantize_y(plan_row_blocks(group_sizes, len(y)), order, top_k, formats[1], scale, y)
    return x8, scale, *y8, group_sizes, order, top_k, x_bytes


@every_pair
@every_size
def test_definition(name, formats):
    inputs = draw(name, torch.float64)
    exact = definition(*inputs, *formats)
    inputs = quantised(*inputs, formats)
    for columns_first in (False, True):
        got = tgmm_fp8_op(*inputs, columns_first)
        assert error(got.mT if columns_first else got, exact) < 1e-12
    onto = torch.randn(exact.shape, dtype=torch.float64)
    total = onto.clone()
    tgmm_fp8_into_op(total, *inputs)
    assert error(total - onto, exact) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(device, dtype):
    """Scales and their inverses lie far apart, and yet nothing leaves the range of a dtype; empty groups
    are exact zeros, and it is as near to the product of what is not quantised as 8 bits can be."""
    x, y, *plan = draw("ragged", dtype, device)
    x, y = (x.clamp(-100, 100), y * 1e-2) if dtype == torch.float16 else (x, y)
    got = tgmm_fp8_op(*quantised(x, y, *plan), False)
    sizes = plan[0].tolist()
    assert got.dtype == dtype and not any(got[g].any() for g, size in enumerate(sizes) if not size)
    assert error(got, definition(x, y, *plan, "e4m3", "e4m3")) < {4: 1e-5, 2: 6e-3}[dtype.itemsize]
    assert 1e-3 < error(got, tgmm(x.double(), y.double(), *plan)) < 0.06


def test_refuses(device):
    inputs = draw("even", torch.float32, device)
    x8, factor, *rest = quantised(*inputs)
    with pytest.raises(ValueError, match="unknown format 'e3m4'"):
        quantised(*inputs, ("e4m3", "e3m4"))
    with pytest.raises(TypeError, match=r"x8 must be of 8-bit floats, not torch.float32"):
        tgmm_fp8_op(inputs[0], factor, *rest, False)
    with pytest.raises(TypeError, match=r"y8 must be of 8-bit floats, not torch.uint8"):
        tgmm_fp8_op(x8, factor, rest[0].view(torch.uint8), *rest[1:], False)
    for other in (factor[:-1], factor.double()):
        with pytest.raises(ValueError, match=r"factor must be \(256,\) in float32, not \(25[56],\) in torch"):
            tgmm_fp8_op(x8, other, *rest, False)
    with pytest.raises(ValueError, match="out must be floating"):
        tgmm_fp8_into_op(torch.zeros(2, 3, 4, device=device), x8, factor, *rest)


# on Hopper


def on_hopper(*inputs) -> Tensor:
    """By the kernel, into poisoned memory, twice."""
    i = TgmmFp8Inputs(*inputs)
    impl = pick("tgmm_fp8", i)
    assert impl is IMPLS["tgmm_fp8"]["hopper"]
    outs = [new_tgmm_fp8(i) for _ in range(2)]
    poison(tuple(outs))
    for out in outs:
        impl(i)(out, i)
    assert torch.equal(*outs)
    return outs[0]


@pytest.fixture
def hopper():
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")


@pytest.mark.gpu
@every_pair
@pytest.mark.parametrize("k, n", [(512, 384), (208, 48), (1040, 656)])
@every_size
def test_hopper(hopper, name, k, n, formats):
    inputs = draw(name, torch.bfloat16, CUDA, k, n)
    exact = definition(*inputs, *formats)
    for columns_first in (False, True):
        got = on_hopper(*quantised(*inputs, formats), columns_first)
        assert torch.equal(got, on_hopper(*quantised(*inputs, formats, x_bytes=0), columns_first))
        got = got.mT if columns_first else got
        for g, size in enumerate(inputs[2].tolist()):
            assert error(got[g], exact[g]) < 2.5e-3 if size else not got[g].any()


@pytest.mark.gpu
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_size
def test_hopper_accumulates(hopper, name, dtype, columns_first):
    inputs = draw(name, torch.bfloat16, CUDA, 512, 384)
    exact = definition(*inputs, "e4m3", "e5m2")
    inputs = quantised(*inputs, ("e4m3", "e5m2"), x_bytes=0)
    out = torch.randn_like(exact.mT.contiguous() if columns_first else exact).to(dtype)
    out = out.mT if columns_first else out
    exact += out.double()
    tgmm_fp8_into_op(out, *inputs)
    assert error(out, exact) < (4e-4 if dtype == torch.float32 else 2.5e-3)


@pytest.mark.gpu
def test_hopper_captured(hopper, no_debug):
    """A graph follows the routing, whatever it becomes."""
    x, y, sizes, order, top_k = draw("ragged", torch.bfloat16, CUDA, 256, 128)
    inputs = x, y, (sizes := sizes.int()), order, top_k
    tgmm_fp8_op(*quantised(*inputs), False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tgmm_fp8_op(*quantised(*inputs), False)
    for other in ([60] * 7, [0, 0, 420, 0, 0, 0, 0], [3, 200, 1, 0, 0, 150, 0], [0] * 7):
        sizes.copy_(torch.tensor(other))
        order.copy_(torch.randperm(len(order)))
        graph.replay()
        with use("torch"):
            expected = tgmm_fp8_op(*quantised(*inputs), False)
        assert error(out, expected) < 6e-3
