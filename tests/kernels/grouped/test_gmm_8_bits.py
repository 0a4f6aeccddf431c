"""gmm of 8-bit operands with scales against float64: the numbers that they stand for, dequantised."""

import pytest
import torch
from torch import Tensor

from moe_aiter.config import interpret
from moe_aiter.kernels.base.fp8 import FP8
from moe_aiter.kernels.grouped.gmm import as_fresh, gmm, scaled_gmm_into_op
from moe_aiter.kernels.hopper import is_hopper
from moe_aiter.op import IMPLS, INPUTS, pick, use

from ...check import error, few
from ...shapes import GROUP_SIZES

E4M3, E5M2, FNUZ, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.bfloat16
KINDS = ("rows", "blocks")
BLOCK = 128
# with scales of blocks, numbers are rounded before the product unless a kernel knows such scales
LIMITS = {torch.float32: 3e-6, torch.float16: 6e-4, BF16: 5e-3}
SHORT = 5e-4  # a tensor core keeps some 14 bits of a sum, or 11 of an operand
OUTS = [torch.float32, torch.float16] if interpret else list(LIMITS)
every_kind = pytest.mark.parametrize("kind", KINDS)
CUDA = torch.device("cuda", 0)


def rounded_up(size: int) -> int:
    return -(-size // BLOCK)


def codes(*shape: int, dtype: torch.dtype, device) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, device=device).to(dtype)
    return torch.randn(shape, device=device).mul(8).to(dtype)


def make(kind, device, sizes, k=48, n=40, dtypes=(E4M3, E4M3), tail=3, groups=torch.int32):
    """x (M, K), w (G, N, K), their scales and the group sizes; `tail` rows are in no group."""
    M, G = sum(sizes) + tail, len(sizes)
    x, w = codes(M, k, dtype=dtypes[0], device=device), codes(G, n, k, dtype=dtypes[1], device=device)
    across = rounded_up(k)
    shapes = {"rows": ((M,), (G, n)), "blocks": ((M, across), (G, rounded_up(n), across))}[kind]
    scales = [torch.rand(shape, device=device) + 0.5 for shape in shapes]
    return x, w, *scales, torch.tensor(sizes, dtype=groups, device=device)


def back(codes: Tensor, scale: Tensor) -> Tensor:
    """In float64."""
    scale = scale.double()
    if scale.dim() < codes.dim():
        return codes.double() * scale[..., None]
    for axis in (-1, -2):
        if scale.shape[axis] != codes.shape[axis]:
            scale = scale.repeat_interleave(BLOCK, axis).narrow(axis, 0, codes.shape[axis])
    return codes.double() * scale


def definition(x, w, x_scale, w_scale, sizes, bias=None) -> Tensor:
    x, w = back(x, x_scale), back(w, w_scale)
    out, start = x.new_zeros(len(x), w.shape[1]), 0
    for g, size in enumerate(sizes.tolist()):
        out[start : start + size] = x[start : start + size] @ w[g].mT + (0 if bias is None else bias[g])
        start += size
    return out


def limit(got: Tensor) -> float:
    return max(LIMITS[got.dtype], SHORT if got.is_cuda else 0)


def multiply(x, w, x_scale, w_scale, sizes, **named) -> Tensor:
    return gmm(x, w.mT, sizes, lhs_scale=x_scale, rhs_scale=w_scale, trans_rhs=False, **named)


@every_kind
@pytest.mark.parametrize("out", OUTS, ids=str)
@pytest.mark.parametrize("name", few(GROUP_SIZES, "ragged", "empty groups between"))
def test_definition(device, name, kind, out):
    inputs = make(kind, device, GROUP_SIZES[name])
    bias = torch.randn(len(inputs[1]), 40, device=device)
    for b in (None, bias):
        exact = definition(*inputs, b)
        got = multiply(*inputs, bias=b, preferred_element_type=out)
        assert got.dtype == out and error(got, exact) < limit(got)
        assert not got[sum(GROUP_SIZES[name]) :].any()
        into = torch.full_like(got, 7)
        assert multiply(*inputs, bias=b, existing_out=into) is into
        rows = sum(GROUP_SIZES[name])
        assert error(into[:rows], exact[:rows]) < limit(got) and (into[rows:] == 7).all()


@every_kind
@pytest.mark.parametrize("k, n", [(1, 1), (127, 129), (128, 128), (300, 130), (0, 5)])
def test_sizes(device, kind, k, n):
    """Blocks at the end are smaller; of no columns the sum is 0."""
    inputs = make(kind, device, [9, 0, 30], k, n, groups=torch.int64)
    got = multiply(*inputs, preferred_element_type=torch.float32)
    assert error(got, definition(*inputs)) < limit(got)


@every_kind
@pytest.mark.parametrize("dtypes", [(x, w) for x in FP8 for w in FP8], ids=str)
def test_formats(device, kind, dtypes):
    inputs = make(kind, device, [20, 11], dtypes=dtypes)
    got = multiply(*inputs, preferred_element_type=torch.float32)
    assert error(got, definition(*inputs)) < limit(got)


def test_integers(device):
    inputs = make("rows", device, [20, 11], dtypes=(torch.int8, torch.int8))
    got = multiply(*inputs, preferred_element_type=torch.float32)
    assert error(got, definition(*inputs)) < limit(got)
    inputs = make("blocks", device, [20, 11], dtypes=(torch.int8, torch.int8))
    with pytest.raises(TypeError, match="of blocks are for 8-bit floats, but lhs is"):
        multiply(*inputs)


@every_kind
def test_layouts(device, kind):
    """Both layouts of rhs, scales of any strides, and the result of whole groups without rows."""
    x, w, x_scale, w_scale, sizes = make(kind, device, [20, 11])
    expected = multiply(x, w, x_scale, w_scale, sizes)
    assert expected.dtype == BF16
    scales = {"lhs_scale": x_scale, "rhs_scale": w_scale.mT.contiguous().mT}
    assert torch.equal(gmm(x, w, sizes, trans_rhs=True, **scales), expected)
    turned = w.mT.contiguous()
    other = gmm(x.mT.contiguous().mT, turned, sizes, trans_rhs=False, **scales)
    assert error(other, expected) < limit(other)  # a GPU may use another kernel
    assert not multiply(x, w, x_scale, w_scale, torch.zeros_like(sizes)).any()
    empty = multiply(x[:0], w, x_scale[:0], w_scale, torch.zeros_like(sizes))
    assert empty.shape == (0, 40)


def test_the_weight_of_the_gradient(device):
    """Blocks of a weight are blocks of the transposed weight, whose scales turn as well."""
    dout, w, *scales, sizes = make("blocks", device, [20, 11], k=144, n=300)  # w (G, N, K)
    how = {"lhs_scale": scales[0], "trans_rhs": False, "preferred_element_type": torch.float32}
    got = gmm(dout, w.mT.contiguous(), sizes, rhs_scale=scales[1].mT.contiguous().mT, **how)
    assert error(got, definition(dout, w, *scales, sizes)) < limit(got)


@every_kind
@pytest.mark.no_interpreter
def test_compiled(device, kind):
    x, w, x_scale, w_scale, sizes = make(kind, device, [20, 11])
    out = torch.full((len(x), 40), 7.0, device=device)

    def both(x, w, x_scale, w_scale, out):
        fresh = multiply(x, w, x_scale, w_scale, sizes)
        return fresh, multiply(x, w, x_scale, w_scale, sizes, existing_out=out)

    expected = both(x, w, x_scale, w_scale, out.clone())
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(x, w, x_scale, w_scale, out)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and torch.equal(out, got[1])


@every_kind
def test_refuses(device, kind):
    x, w, x_scale, w_scale, sizes = make(kind, device, [20, 11])
    scales = {"lhs_scale": x_scale, "rhs_scale": w_scale}

    def refused(error, words, *operands, **named):
        lhs, rhs = operands or (x, w.mT)
        with pytest.raises(error, match=words):
            gmm(lhs, rhs, sizes, trans_rhs=False, **scales | named)

    for name in scales:
        refused(ValueError, f"have lhs_scale and rhs_scale, but {name} is missing", **{name: None})
        refused(TypeError, f"{name} must be float32", **{name: scales[name].half()})
        refused(ValueError, f"{name} must be .* but it has shape", **{name: scales[name][:-1]})
        refused(TypeError, f"{name} must be a tensor, not float", **{name: 0.5})
        refused(RuntimeError, "has no gradient", **{name: scales[name].clone().requires_grad_()})
    refused(ValueError, "lhs_scale and rhs_scale must be", lhs_scale=x_scale[:, None, None])
    refused(TypeError, "lhs_scale is for operands of 8 bits, but lhs is torch.float16", x.half(), w.mT)
    refused(TypeError, "lhs_scale is for operands of 8 bits, but rhs is torch.float16", x, w.half().mT)
    refused(TypeError, "lhs_scale is for operands of 8 bits, but lhs is torch.bool", x.bool(), w.mT)
    refused(ValueError, r"lhs is \(M, K=47\) but rhs is", x[:, 1:], w.mT)
    refused(TypeError, "preferred_element_type must be float16", preferred_element_type=torch.float64)
    refused(TypeError, "existing_out must be float16", existing_out=x.new_empty(31, 7, dtype=torch.float64))
    refused(ValueError, "take no config", config={"BLOCK_SIZE_M": 64})
    refused(ValueError, "take no grid_dim", grid_dim=4)
    refused(ValueError, "existing_out must be floating", existing_out=torch.zeros(3, 4, device=device))
    refused(ValueError, "bias must be", bias=torch.zeros(3, 4, device=device))


@pytest.mark.parametrize("large", [1e3, 1e9])
def test_scales_that_float16_cannot_hold(device, large):
    """A float16 result needs no more than that it fits itself."""
    x, w = (torch.ones(shape, device=device).to(E4M3) for shape in ((5, 256), (2, 16, 256)))
    scales = torch.full((5, 2), large / 100, device=device), torch.full((2, 1, 2), 1 / large, device=device)
    sizes = torch.tensor([3, 2], device=device)
    how = dict(zip(("lhs_scale", "rhs_scale"), scales, strict=True), preferred_element_type=torch.float16)
    torch.testing.assert_close(gmm(x, w.mT, sizes, **how), torch.full((5, 16), 2.56, device=device).half())


def test_autocast_rounds_no_bias(device):
    x, w, x_scale, w_scale, sizes = make("rows", device, [20, 11])
    how = {"lhs_scale": x_scale, "rhs_scale": w_scale, "preferred_element_type": torch.float32}
    bias = torch.full((2, w.shape[1]), 1.0009765625, device=device)
    want = gmm(x, w.mT, sizes, bias=bias, **how)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(gmm(x, w.mT, sizes, bias=bias, **how), want)


# on Hopper


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("k, n", [(1024, 384), (2896, 720), (144, 136)])
@pytest.mark.parametrize("sizes", [[256, 256], [1, 0, 127, 128, 129, 0, 31], [0, 0, 300]], ids=str)
def test_hopper(kind, dtypes, k, n, sizes):
    """By Hopper's kernel, as near as the rounding of the result; `existing_out` keeps its other rows."""
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    inputs = x, w, x_scale, w_scale, group_sizes = make(kind, CUDA, sizes, k, n, dtypes)
    exact, rows, out = definition(*inputs), sum(sizes), torch.full((len(x), n), 7.0, dtype=BF16, device=CUDA)
    i = INPUTS["scaled_gmm_into"](out, x, w.mT, group_sizes, x_scale, w_scale, None)
    op, fresh = as_fresh(i)
    assert pick("scaled_gmm_into", i) is IMPLS["scaled_gmm_into"]["hopper"]
    assert pick(op, fresh) is IMPLS[op]["hopper"]
    got = multiply(*inputs)
    scaled_gmm_into_op(*i)
    assert error(got, exact) < 2.5e-3 and not got[rows:].any()
    assert torch.equal(out[:rows], got[:rows]) and (out[rows:] == 7).all()
    turned = gmm(x, w.mT.contiguous(), group_sizes, lhs_scale=x_scale, rhs_scale=w_scale, trans_rhs=False)
    assert torch.equal(turned, got)


@pytest.mark.gpu
@every_kind
def test_captured(kind, no_debug):
    """A graph follows the group sizes."""
    inputs = *_, sizes = make(kind, CUDA, [100, 0, 60], 256, 384)
    multiply(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = multiply(*inputs)
    for other in ([0, 160, 0], [53, 54, 53], [0, 0, 0]):
        sizes.copy_(torch.tensor(other))
        graph.replay()
        with use("torch"):
            assert error(got, multiply(*inputs)) < LIMITS[BF16]
