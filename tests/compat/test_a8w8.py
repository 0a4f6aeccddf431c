"""AITER's gemm_a8w8 and int8_gemm: the example, upstream's shapes, a fresh reference, what is refused."""

import pytest
import torch

from moe_aiter.compat import aiter
from moe_aiter.compat.aiter.ops.gemm_op_a8w8 import gemm_a8w8, int8_gemm

from ..check import error

INT8, E4M3, F16, BF16 = torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16
M = (1, 32, 64, 128, 192, 256, 320, 512, 1024, 2048, 4096, 8192, 16384)
NK = [(1280, 8192), (8192, 1024)]
MORE = [(m, 3072, 768) for m in (32, 4096, 8192)] + [(m, 7424, 8192) for m in (16, 48, 4096, 5120)]
SKINNY = [
    *[(2, 320, 32768), (2, 640, 32768), (2, 1280, 32768), (2, 320, 33792), (2, 320, 65536), (1, 4, 1264)],
    *[(1, 12, 8720), (1, 17, 6192), (1, 40, 9024), (2, 27, 4544), (2, 28, 6544), (2, 57, 1952), (2, 60, 96)],
]


def quantized(x, dtype):
    """Upstream's quantiser: each row's largest magnitude over the dtype's, and 1 for a row of zeros."""
    most = torch.iinfo(dtype).max if dtype == INT8 else torch.finfo(dtype).max
    scale = x.abs().amax(-1, keepdim=True) / most
    scale = scale.masked_fill(scale == 0, 1)
    y = x / scale
    return (y.round() if dtype == INT8 else y).to(dtype), scale


def check(device, m, n, k, kind, dtype, with_bias, pad=0):
    x, x_scale = quantized(torch.randn(m, k, device=device), kind)
    w, w_scale = quantized(torch.randn(n, k, device=device), kind)
    if pad:  # rows that lie further apart
        x = torch.empty(m, k + pad, dtype=kind, device=device)[:, :k].copy_(x)
    bias = 10 * torch.rand(1, n, device=device, dtype=BF16) if with_bias else None
    got = gemm_a8w8(x, w, x_scale, w_scale, bias, dtype)
    exact = (x.double() @ w.double().T) * x_scale.double() * w_scale.double().T
    exact = exact + bias.double() if with_bias else exact
    assert got.dtype == dtype and error(got, exact) <= 2 * error(exact.to(dtype), exact) + 1e-6
    for scale in (w_scale.T, w_scale[:, 0]):
        assert torch.equal(gemm_a8w8(x, w, x_scale[:, 0], scale, bias, dtype), got)


@pytest.mark.parametrize("kind", [INT8, E4M3], ids=["int8", "fp8"])
@pytest.mark.parametrize("m, n, k", [(1, 128, 512), (33, 80, 96), *SKINNY[-3:]])
def test_small_shapes(device, m, n, k, kind):
    for dtype in (BF16, F16):
        check(device, m, n, k, kind, dtype, with_bias=kind == INT8, pad=128)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [INT8, E4M3], ids=["int8", "fp8"])
@pytest.mark.parametrize("m, n, k", [(m, *nk) for m in M for nk in NK] + MORE + SKINNY)
def test_every_shape_of_upstream(m, n, k, kind):
    for dtype in (BF16, F16):
        check("cuda", m, n, k, kind, dtype, with_bias=kind == INT8, pad=128 if m % 32 else 0)


def test_the_example_of_the_page(device):
    x = torch.randint(-127, 127, (1024, 512), device=device, dtype=INT8)
    w = torch.randint(-127, 127, (2048, 512), device=device, dtype=INT8)
    for _ in range(5):  # the scales are drawn freely, and large ones make float16 infinite
        x_scale, w_scale = torch.randn(1, device=device), torch.randn(1, device=device)
        output = aiter.int8_gemm(x, w, x_scale, w_scale)
        exact = (x.double() @ w.double().T).float() * x_scale * w_scale
        assert output.shape == (1024, 2048) and torch.equal(output, exact.half())


def test_the_doors():
    assert aiter.gemm_a8w8 is gemm_a8w8 and aiter.int8_gemm is int8_gemm
    x, w = torch.ones(2, 8, dtype=INT8), torch.ones(3, 8, dtype=INT8)
    assert gemm_a8w8(x, w, 0.5, 2, splitK=4).tolist() == [[8.0] * 3] * 2
    assert gemm_a8w8(x, w, 0.5, 2).dtype == BF16 and int8_gemm(x, w, 0.5, 2).dtype == F16
    assert int8_gemm(x, w, 0.5, 2, output_dtype=torch.float32).dtype == torch.float32


X, W = torch.zeros(5, 32, dtype=INT8), torch.zeros(16, 32, dtype=INT8)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (dict(input=X.half()), TypeError, "input must be int8, not torch.float16"),
        (dict(weight=W.to(E4M3)), TypeError, "weight must be int8, not torch.float8_e4m3fn"),
        (dict(input=[1]), TypeError, "input must be a tensor, not list"),
        (dict(weight=W.mT), ValueError, r"input is \(M, K=32\) but weight is \(N, K=16\)"),
        (dict(weight_scale=torch.ones(5)), ValueError, r"weight_scale must be .*has shape \(5,\)"),
        (
            dict(output_dtype=INT8),
            TypeError,
            "output_dtype must be float16, bfloat16 or float32, not torch.int8",
        ),
    ],
)
def test_bad_input_is_named(change, kind, message):
    with pytest.raises(kind, match=message):
        int8_gemm(**{**dict(input=X, weight=W, input_scale=1.0, weight_scale=1.0), **change})


@pytest.mark.parametrize("splitK, kind", [(-1, ValueError), ("4", TypeError)])
def test_a_split_is_a_number(splitK, kind):
    with pytest.raises(kind, match="splitK must be"):
        gemm_a8w8(X, W, 1.0, 1.0, splitK=splitK)
