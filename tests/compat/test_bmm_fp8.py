"""FlashInfer's bmm_fp8: upstream's shapes, both layouts of B, poisoned outputs, what is refused."""

import itertools

import pytest
import torch

from moe_aiter.compat import flashinfer
from moe_aiter.compat.flashinfer.gemm import bmm_fp8

from ..check import error

E4M3, E5M2, F16, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16
SMOKE = [  # (b, m, n, k), A, B, out: upstream's curated set
    ((16, 48, 80, 256), E4M3, E4M3, BF16),
    ((1, 128, 10304, 2688), E4M3, E4M3, F16),
    ((16, 1, 64, 2688), E5M2, E4M3, BF16),
    ((1, 48, 80, 64), E4M3, E5M2, F16),
    ((16, 128, 80, 256), E4M3, E4M3, BF16),
    ((1, 1, 10304, 256), E4M3, E4M3, BF16),
    ((16, 48, 80, 64), E5M2, E5M2, BF16),
]
KINDS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]


def to_float8(x, dtype):
    """Upstream's quantiser: 8-bit floats of the whole range, and the reciprocal of the scale."""
    scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-12)
    return (x * scale).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype), 1 / scale.float()


def make(device, size, a_dtype, b_dtype):
    b, m, n, k = size
    A, A_scale = to_float8(torch.randn(b, m, k, device=device), a_dtype)
    B, B_scale = to_float8(torch.randn(b, n, k, device=device), b_dtype)
    return A, B.mT, A_scale, B_scale


def check(device, size, a_dtype, b_dtype, dtype):
    A, B, A_scale, B_scale = inputs = make(device, size, a_dtype, b_dtype)
    exact = (A.float() @ B.float()) * A_scale * B_scale
    out = torch.full(exact.shape, float("nan"), dtype=dtype, device=device)
    assert bmm_fp8(*inputs, dtype, out) is out
    assert error(out, exact) <= 2 * error(exact.to(dtype), exact) + 1e-7
    again = bmm_fp8(*inputs, dtype)
    assert again.dtype == dtype and torch.equal(again, out)
    row_major = B.view(torch.uint8).contiguous().view(b_dtype)
    got = bmm_fp8(A, row_major, A_scale, B_scale, dtype)
    assert error(got, exact) <= 2 * error(exact.to(dtype), exact) + 1e-7


@pytest.mark.parametrize("size, a_dtype, b_dtype, dtype", SMOKE, ids=str)
def test_upstreams_smoke_set(device, size, a_dtype, b_dtype, dtype):
    check(device, size, a_dtype, b_dtype, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 256, 2688])
@pytest.mark.parametrize("n", [64, 80, 10304])
def test_upstreams_grid(n, k):
    for b, m, kinds, dtype in itertools.product((1, 16), (1, 48, 128), KINDS, (BF16, F16)):
        check("cuda", (b, m, n, k), *kinds, dtype)


def test_scales_that_are_one_number(device):
    A, B, *_ = make(device, (2, 5, 16, 32), E4M3, E4M3)
    expected = bmm_fp8(A, B, 0.5, 3, F16)
    half, three = torch.tensor(0.5, device=device), torch.tensor([3.0], device=device)
    for scales in ((half, three), (half.view(1, 1, 1), 3.0)):
        assert torch.equal(bmm_fp8(A, B, *scales, F16), expected)


def test_the_doors():
    assert flashinfer.bmm_fp8 is bmm_fp8
    A, B, *scales = make("cpu", (1, 2, 16, 16), E4M3, E4M3)
    for backend in ("cudnn", "cublas", "cutlass", "auto"):
        assert bmm_fp8(A, B, *scales, F16, backend=backend).shape == (1, 2, 16)


A, B, ONE = torch.zeros(2, 5, 32).to(E4M3), torch.zeros(2, 16, 32).to(E4M3).mT, torch.tensor(1.0)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (dict(A=A.half()), TypeError, "A must be a tensor of 8-bit floats, not torch.float16"),
        (dict(B=B.view(torch.int8)), TypeError, "B must be a tensor of 8-bit floats, not torch.int8"),
        (dict(A=[1.0]), TypeError, "A must be a tensor of 8-bit floats, not list"),
        (dict(A=A[0]), ValueError, r"A must be \(b, m, k\), but it has shape \(5, 32\)"),
        (dict(B=B[0]), ValueError, r"B must be \(b, k, n\), but it has shape \(32, 16\)"),
        (dict(B=B[:, :16]), ValueError, r"A is \(b, m, k=32\) but B is \(b, k=16, n\)"),
        (dict(B=B[:1]), ValueError, r"A is \(b=2, m, k\) but B is \(b=1, k, n\)"),
        (dict(B=B.to("meta")), ValueError, "A is on cpu but B is on meta"),
        (
            dict(out=torch.zeros(2, 5, 16, dtype=F16, device="meta")),
            ValueError,
            "A is on cpu but out is on meta",
        ),
        (dict(A_scale=torch.ones(2)), ValueError, r"A_scale must be one float32 number, .*float32 \(2,\)"),
        (
            dict(B_scale=ONE.half()),
            ValueError,
            r"B_scale must be one float32 number, but it is torch.float16",
        ),
        (dict(B_scale=ONE.to("meta")), ValueError, "A is on cpu but B_scale is on meta"),
        (dict(A_scale=None), ValueError, "A_scale must be one float32 number, not NoneType"),
        (dict(dtype=torch.float32), ValueError, "dtype must be float16 or bfloat16, not torch.float32"),
        (dict(dtype=BF16), ValueError, "dtype is torch.bfloat16 but out is torch.float16"),
        (dict(out=[1.0]), TypeError, "out must be a tensor, not list"),
        (dict(out=torch.zeros(2, 5, 8, dtype=F16)), ValueError, r"out must be \(G=2, M=5, N=16\)"),
        (dict(backend="cuda"), ValueError, "unknown backend 'cuda'; known: cublas, cudnn"),
    ],
)
def test_bad_input_is_named_and_nothing_written(change, kind, message):
    out = torch.full((2, 5, 16), 7.0, dtype=F16)
    good = dict(A=A, B=B, A_scale=ONE, B_scale=ONE, dtype=F16, out=out)
    with pytest.raises(kind, match=message):
        bmm_fp8(**{**good, **change})
    assert (out == 7).all()


def test_what_would_need_a_gradient_is_refused_by_its_name(device):
    A, B = (torch.ones(2, 16, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones(1, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="a batched product has no gradient"):
        bmm_fp8(A, B, scale, 1.0, torch.bfloat16)
