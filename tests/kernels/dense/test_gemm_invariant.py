"""Dense products with batch invariance: a row has the same bits whatever rows are beside it."""

import functools

import pytest
import torch
import torch.nn.functional as F

from moe_aiter import gemm, scaled_gemm, tuning
from moe_aiter.config import interpret
from moe_aiter.invariance import invariant
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base import fixed_rows
from moe_aiter.kernels.base.choice import should_use_scaled
from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.dense.gemm import FEW_ROWS, FEW_TILES, multiply_linear, tile_of
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm
from moe_aiter.kernels.grouped.scaled_gemm import ScaledInputs
from moe_aiter.op import IMPLS, ORDER, BackendError, pick, use
from moe_aiter.routing.router import router_logits

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 3, 7, 17] if interpret else [1, 2, 3, 7, 8, 31, 32, 100, 256, 1000, 1024]
MANY = 40 if interpret else 1500
SHAPES = [(40, 24), (33, 7)] if interpret else [(96, 80), (33, 7), (2048, 8), (64, 1), (1024, 128)]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x):
    return x.detach().contiguous().view(BITS[x.itemsize])


def differing(fn, *inputs, sizes=SIZES):
    """Numbers of rows with which a result of fn(*inputs) has other bits than among all rows."""
    expected, found = fn(*inputs), []
    for size in sizes:
        rows = torch.randperm(len(inputs[0]), device=inputs[0].device)[:size]
        results = fn(*(t[rows] for t in inputs))
        pairs = zip(results, expected, strict=True)
        if not all(torch.equal(bits(got), bits(of_all)[rows]) for got, of_all in pairs):
            found.append(size)
    return found


def product(w, bias, options, x, dout):
    x = x.detach().requires_grad_()
    out = gemm(x, w, bias, **options)
    return out, *torch.autograd.grad(out, [x], dout.to(out.dtype))


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float64], ids=str)
def test_a_forced_tier_multiplies_in_place_of_torch_what_it_does_not_take(device, backend, dtype):
    """Triton's kernel has float32 sums."""
    x, w = (torch.randn(*s, dtype=dtype, device=device).requires_grad_() for s in ((MANY, 24), (7, 24)))
    with use(backend), invariant():
        out, own = multiply_linear(x, w), multiply_linear(x[:3], w)
        got = torch.autograd.grad(out.sum(), [x, w])
    exact = F.linear(x, w)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(got, torch.autograd.grad(exact.sum(), [x, w]))
    assert device.type == "cuda" or torch.equal(out[:3], own)
    with use(backend), pytest.raises(BackendError, match=r"no triton backend for torch.float64"):
        gemm(x, w.mT)


EPILOGUES = [{}, {"activation": "gelu"}, {"activation": "silu", "out_dtype": torch.float32}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", EPILOGUES, ids=["plain", "gelu", "silu, float32"])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("K, N", SHAPES)
@pytest.mark.pairwise
def test_rows_and_their_gradients(device, K, N, by_rows, options, dtype):
    torch.manual_seed(0)
    x, dout, bias = torch.randn(MANY, K), torch.randn(MANY, N), torch.randn(N)
    w = torch.randn(N, K).T if by_rows else torch.randn(K, N)
    x, dout, w, bias = (t.to(device, dtype) for t in (x, dout, w, bias))
    with invariant():
        assert differing(functools.partial(product, w, bias, options), x, dout) == []


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K, N", [(2048, 1536), (4096, 128), (2880, 5760)])
@pytest.mark.gpu
def test_a_forced_kernel(backend, dtype, K, N):
    x, w = torch.randn(8192, K), torch.randn(N, K).T
    x, w = x.to("cuda", dtype), w.to("cuda", dtype)
    with invariant(), use(backend):
        assert differing(lambda x: (gemm(x, w),), x, sizes=[1, 2, 7, 16, 17, 100, 1000, 4096]) == []


@pytest.mark.no_interpreter
def test_tuned_products_and_eight_bits(device):
    x, weight = torch.randn(MANY, 64, device=device), torch.randn(48, 64, device=device)
    w8, half = weight.to(torch.float8_e4m3fn).mT, weight.bfloat16()
    with invariant():
        assert differing(lambda x: (tuned_gemm(x.bfloat16(), half),), x) == []
        x8 = x.to(torch.float8_e4m3fn)
        assert differing(lambda x: (scaled_gemm(x, w8, out_dtype=torch.float32),), x8) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.no_interpreter
def test_batches_and_what_is_added(dtype):
    x, w, c = torch.randn(3, 50, 40), torch.randn(3, 40, 24), torch.randn(3, 50, 24)
    x, w, c = (t.to(dtype) for t in (x, w, c))
    with invariant():
        whole = gemm(x, w, c=c, beta=0.5, alpha=2.0)
        for m in (1, 7, 33):
            part = gemm(x[:, :m], w, c=c[:, :m], beta=0.5, alpha=2.0)
            assert torch.equal(part, whole[:, :m])


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.no_interpreter
def test_row_by_row(monkeypatch, onednn, dtype):
    """What oneDNN does not compute is computed one row at a time."""
    monkeypatch.setattr(fixed_rows, "ONEDNN", onednn and fixed_rows.ONEDNN)
    x, w = torch.randn(100, 96).to(dtype), torch.randn(96, 9).to(dtype)
    with invariant():
        assert differing(lambda x: (gemm(x, w),), x, sizes=[1, 2, 7, 33]) == []
        assert torch.allclose(gemm(x, w), x @ w, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("x_dtype, dtype", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("experts", [8, 32, 128])
@pytest.mark.gpu
def test_logits_of_a_router(experts, x_dtype, dtype):
    x, dlogits = torch.randn(32768, 2880).to("cuda", x_dtype), torch.randn(32768, experts, device="cuda")
    weight = torch.randn(experts, 2880).to("cuda", dtype)

    def logits(x, dlogits):
        x = x.detach().requires_grad_()
        out = router_logits(x, weight, None)
        return out, *torch.autograd.grad(out, [x], dlogits)

    with invariant():
        assert differing(logits, x, dlogits, sizes=[*SIZES, 4096, 8192]) == []


# who computes it


@pytest.fixture
def on_hopper(monkeypatch):
    """An H200; meta tensors stand for what lies there."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setitem(ORDER, "meta", ("hopper", "triton", "torch"))


def inputs(M, N, K, dtype=torch.bfloat16):
    x, weight = (torch.empty(1, n, K, dtype=dtype, device="meta") for n in (M, N))
    return GemmInputs(x, weight.mT, None, None, "", 1.0, 0.0, None, False)


@pytest.mark.parametrize("N, K", [(128, 2048), (1536, 2048), (4096, 14336), (50257, 4096)])
@pytest.mark.parametrize("names", [("sm80",), ("h200", "sm90"), ("sm100",), ("gfx942",), ("gfx950",)])
@pytest.mark.no_interpreter
def test_tiles_add_up_in_one_order(on_hopper, names, N, K):
    for dtype in (torch.bfloat16, torch.float32):
        with tuning.tables_of(names), invariant():
            every = [inputs(M, N, K, dtype) for M in (1, 8, 16, 100, 1024, 32768)]
            tiles = [tile_of("gemm", i) for i in every]
            assert {pick("gemm", i) for i in every} == {IMPLS["gemm"]["triton"]}
        few = {*FEW_ROWS.values()}  # by instructions that give the bits of those for 64 rows
        if names[-1] in ("sm80", "sm90") and dtype.itemsize == 2:
            assert few.issuperset(tiles[:3]) and {FEW_TILES, tiles[-1]}.issuperset(tiles[3:])
        else:
            assert len(set(tiles)) == 1


@pytest.mark.no_interpreter
def test_scaled_products_have_one_kernel():
    for M in (1, 100, 8192):
        x, weight = (torch.empty(n, 2048, dtype=torch.float8_e4m3fn, device="meta") for n in (M, 4096))
        i = ScaledInputs(x, weight.mT, None, None, None, torch.bfloat16)
        with invariant():
            assert should_use_scaled("triton")(i) and not should_use_scaled("hopper")(i)


# torch's functions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.no_interpreter
def test_each_number(dtype):
    """Every number of every tensor is as it would be alone, in a vector that is full."""
    x = torch.randn(40000).to(dtype)
    x[::7] *= 20
    with invariant():
        for fn in (torch.sigmoid, torch.nn.functional.softplus, torch.nn.functional.gelu):
            whole = fixed_rows.each_number(fn, x)
            for n in (1, 3, 63, 64, 65, 1000):
                assert torch.equal(fixed_rows.each_number(fn, x[5 : 5 + n]), whole[5 : 5 + n])
            assert torch.allclose(whole, fn(x))
