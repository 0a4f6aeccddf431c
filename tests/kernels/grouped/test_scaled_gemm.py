"""scaled_gemm and scaled_gmm, on every backend that can run here."""

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.base import fp8, tile
from moe_aiter.kernels.base.fp8 import FP8
from moe_aiter.kernels.grouped.scaled_gemm import MOST_K, scaled_gemm, scaled_gmm
from moe_aiter.kernels.hopper import is_hopper
from moe_aiter.op import use

from ...references import scaled_gmm_reference
from ...shapes import GROUP_SIZES, LAYOUTS, spread

INT8, (E4M3, FNUZ, E5M2) = torch.int8, FP8
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KINDS = [(INT8, INT8), (E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (FNUZ, FNUZ), (FNUZ, E4M3)]
KINDS = [*KINDS[:3:2], KINDS[5]] if interpret else KINDS  # it is slow
OUT = [F16, F32] if interpret else [F16, BF16, F32]
SIZES = {  # M, K, N
    "even": (64, 64, 64),
    "no multiple of any block": (37, 23, 51),
    "one row": (1, 48, 80),
    "one column": (33, 40, 1),
    "one to sum over": (5, 1, 8),
    "tall": (140, 96, 16),
}

every_kind = pytest.mark.parametrize("kinds", KINDS, ids=lambda k: "-".join(str(t)[6:] for t in k))


def draw(device, *shape, dtype):
    """Numbers whose products and sums float32 holds exactly: all of int8, or small integers."""
    if dtype == INT8:
        return torch.randint(-128, 128, shape, dtype=INT8).to(device)
    return torch.randint(-4, 5, shape).float().to(device, dtype)


def make(device, M, K, N, kinds, out=F32):
    """x, w (K, N) with K in a row, and powers of two as scales, so that nothing but the result is rounded."""
    x, w = draw(device, M, K, dtype=kinds[0]), draw(device, N, K, dtype=kinds[1]).mT
    scales = (2.0 ** torch.randint(-3, 2, (n,), device=device).float() for n in (M, N))
    return x, w, *scales, torch.randint(-9, 9, (N,), device=device).to(out)


def exact(x, w, x_scale=None, w_scale=None, bias=None):
    y = x.double() @ w.double()
    y = y if x_scale is None else y * x_scale.double().reshape(-1, 1)
    y = y if w_scale is None else y * w_scale.double().reshape(1, -1)
    return y if bias is None else y + bias.double()


@every_kind
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("out", OUT, ids=str)
@pytest.mark.pairwise
def test_the_product_rounded_once(device, size, kinds, out):
    inputs = make(device, *size, kinds, out)
    for given in (inputs, inputs[:4], inputs[:3], inputs[:2], (*inputs[:2], None, None, inputs[4])):
        got = scaled_gemm(*given, out_dtype=out)
        assert got.dtype == out and torch.equal(got, exact(*given).float().to(out))


@pytest.mark.parametrize("K", [MOST_K, MOST_K + 1, 2 * MOST_K + 77])
def test_no_sum_of_int8_overflows(device, K):
    x = torch.full((3, K), -128, dtype=INT8, device=device)
    w = torch.full((K, 2), -128, dtype=INT8, device=device)
    x[1], w[0, 1] = 127, 5
    with tuning.choose(lambda key: tuning.Config(16, 32, 4096) if interpret else None):
        got = scaled_gemm(x, w, out_dtype=F32)
    assert torch.equal(got, exact(x, w).float())


def test_a_sum_beyond_float16_is_infinite_and_not_its_largest_number(device):
    x = torch.full((2, 64), 127, dtype=INT8, device=device)
    got = scaled_gemm(x, x[:1].mT, torch.tensor([1.0, -1.0], device=device), out_dtype=F16)
    assert got.flatten().tolist() == [float("inf"), -float("inf")]
    x8 = torch.full((1, 64), 448.0, device=device).to(E4M3)
    assert scaled_gemm(x8, x8.mT, out_dtype=F16).item() == float("inf")
    assert scaled_gemm(x8, x8.mT, 2.0**-8, out_dtype=F16).item() == 448 * 448 * 64 / 256


def test_what_is_not_a_number_stays_in_its_row_or_column(device):
    x, w, x_scale, w_scale, bias = make(device, 20, 32, 24, (INT8, INT8))
    x_scale[3], w_scale[5], bias[7] = float("nan"), float("inf"), float("nan")
    got, clean = (
        scaled_gemm(x, w, x_scale, w_scale, bias, out_dtype=F32),
        torch.ones(20, 24, dtype=torch.bool),
    )
    clean[3], clean[:, 5], clean[:, 7] = False, False, False
    assert got[3].isnan().all() and got[:, 7].isnan().all() and got[clean].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kinds", KINDS[:2], ids=["int8", "fp8"])
@pytest.mark.parametrize("M", [10, 140])
@pytest.mark.pairwise
def test_strides(device, layout, kinds, M):
    x, w, *beside = make(device, M, 40, 24, kinds)

    if layout is spread:  # NaN has no int8
        x, w = (t[:, ::2] for t in (x.repeat_interleave(2, 1), w.repeat_interleave(2, 1)))
        beside = [spread(t) for t in beside]
    else:
        x, w = (layout(t.view(INT8)).view(t.dtype) for t in (x, w))  # torch copies few of the 8-bit floats
    for a, b in ((x, w), (x, w.mT.mT), (x, w.mT.view(INT8).contiguous().view(w.dtype).mT)):
        assert torch.equal(scaled_gemm(a, b, *beside, out_dtype=F32), exact(a, b, *beside).float())


@pytest.mark.parametrize("M, N", [(6, 4), (1, 4), (6, 1), (4, 4)])
def test_scales_of_every_shape(device, M, N):
    x, w, x_scale, w_scale, bias = make(device, M, 16, N, (INT8, INT8))
    one, expected = torch.tensor(0.5, device=device), exact(x, w, x_scale, w_scale, bias).float()
    for a in (x_scale, x_scale[:, None]):
        for b in (w_scale, w_scale[:, None], w_scale[None]):
            assert torch.equal(scaled_gemm(x, w, a, b, bias, out_dtype=F32), expected)
    for a in (0.5, one, one.view(1), one.view(1, 1), one.view(1, 1, 1)):
        half = exact(x, w).float() * 0.5
        assert torch.equal(scaled_gemm(x, w, a, out_dtype=F32), half)
        assert torch.equal(scaled_gemm(x, w, None, a, out_dtype=F32), half)
    assert torch.equal(scaled_gemm(x, w, -2, 3, out_dtype=F32), exact(x, w).float() * -6)


@pytest.mark.parametrize("kinds", KINDS[:2], ids=["int8", "fp8"])
@pytest.mark.parametrize("M, K, N", [(0, 4, 3), (4, 4, 0), (0, 0, 0), (4, 0, 3)])
def test_nothing_to_do(device, M, K, N, kinds):
    inputs = make(device, M, K, N, kinds)
    assert torch.equal(scaled_gemm(*inputs, out_dtype=F32), exact(*inputs).float())


def test_a_cpu_without_exact_int8_is_not_asked(monkeypatch):
    x, w, *_ = make("cpu", 33, 40, 24, (INT8, INT8))
    monkeypatch.setattr(fp8, "has_exact_int8", lambda: False)
    monkeypatch.delattr(torch, "_int_mm")
    with use("torch"):
        assert torch.equal(scaled_gemm(x, w, out_dtype=F32), exact(x, w).float())


@pytest.mark.parametrize("kinds", KINDS[:2], ids=["int8", "fp8"])
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.pairwise
def test_groups(device, sizes, kinds, gathered):
    G, M, K, N, top_k = len(sizes), sum(sizes) + 4 - sum(sizes) % 2, 40, 24, 2
    order = torch.randperm(M, device=device) if gathered else None
    x, _, x_scale, *_ = make(device, M // 2 if gathered else M, K, N, kinds)
    w = torch.stack([draw(device, N, K, dtype=kinds[1]).view(INT8) for _ in sizes]).view(kinds[1]).mT
    w_scale = 2.0 ** torch.randint(-2, 2, (G, N), device=device).float()
    bias, counts = torch.randn(G, N, device=device).half(), torch.tensor(sizes, device=device)
    x_scale[-1] = float("nan")  # of a row that may be past the last group
    got = scaled_gmm(x, w, counts, x_scale, w_scale, bias, order=order, top_k=top_k, out_dtype=F16)
    rows = torch.arange(M, device=device) if order is None else order // top_k
    start, expected = 0, torch.zeros(M, N, dtype=F16, device=device)
    for g, size in enumerate(sizes):
        r = rows[start : start + size]
        part = x.view(torch.uint8)[r].view(x.dtype), w[g], x_scale[r], w_scale[g], bias[g]
        expected[start : start + size] = exact(*part).float().half()
        start += size
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert (got[start:] == 0).all()
    plain = scaled_gmm(x, w, counts.int(), order=order, top_k=top_k, out_dtype=F32)
    assert (plain[start:] == 0).all() and plain.isfinite().all()


@pytest.mark.parametrize("kinds", KINDS[:2], ids=["int8", "fp8"])
def test_compile(device, kinds):
    compiled = torch.compile(scaled_gemm, fullgraph=True, backend="aot_eager", dynamic=True)
    for M in (20, 33):
        inputs = make(device, M, 32, 24, kinds)
        assert torch.equal(compiled(*inputs, out_dtype=F32), scaled_gemm(*inputs, out_dtype=F32))
        assert torch.equal(
            compiled(*inputs[:2], 0.5, out_dtype=F32), scaled_gemm(*inputs[:2], 0.5, out_dtype=F32)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS[:2], ids=["int8", "fp8"])
def test_a_graph_replays_with_other_numbers(no_debug, kinds):
    inputs = make("cuda", 130, 256, 64, kinds)
    scaled_gemm(*inputs, out_dtype=F16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_gemm(*inputs, out_dtype=F16)
    for t, other in zip(inputs, make("cuda", 130, 256, 64, kinds), strict=True):
        t.copy_(other)
    graph.replay()
    assert torch.equal(out, exact(*inputs).float().half())


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("M", [1, 16, 64, 128, 500, 1000])
@pytest.mark.parametrize("N, K", [(512, 1024), (304, 4096), (1280, 2192)])
@pytest.mark.pairwise
def test_tiles_of_the_gpu(M, N, K, kinds):
    inputs = make("cuda", M, K, N, kinds, BF16)
    for given in (inputs, inputs[:4], (inputs[0], inputs[1].view(INT8).contiguous().view(kinds[1]))):
        for out in OUT:
            got = scaled_gemm(*given, out_dtype=out)
            assert torch.equal(got, exact(*given).float().to(out))
            assert torch.equal(got, scaled_gemm(*given, out_dtype=out))


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS[:5], ids=lambda k: "-".join(str(t)[6:] for t in k))
@pytest.mark.parametrize("M", [128, 300, 1500])
@pytest.mark.parametrize("N, K", [(16, 16), (304, 4096), (1296, 2192)])
def test_hopper(M, N, K, kinds):
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("no Hopper GPU")
    inputs = make("cuda", M, K, N, kinds, BF16)
    with use("hopper"):
        for given in (inputs, inputs[:4], inputs[:2], (*inputs[:2], None, None, inputs[4])):
            for out in OUT:
                assert torch.equal(scaled_gemm(*given, out_dtype=out), exact(*given).float().to(out))


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS[:5], ids=lambda k: "-".join(str(t)[6:] for t in k))
@pytest.mark.parametrize("gathered", [False, True])
def test_groups_on_hopper(kinds, gathered):
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("no Hopper GPU")
    sizes, K, N = [130, 0, 1, 300, 64], 272, 328
    G, M, top_k = len(sizes), sum(sizes) + 5, 2
    order = torch.randperm(M, device="cuda") if gathered else None
    x, _, x_scale, *_ = make("cuda", M // 2 if gathered else M, K, N, kinds)
    w = torch.stack([draw("cuda", N, K, dtype=kinds[1]).view(INT8) for _ in sizes]).view(kinds[1]).mT
    w_scale = 2.0 ** torch.randint(-2, 2, (G, N), device="cuda").float()
    bias = torch.randint(-9, 9, (G, N), device="cuda").half()
    inputs = x, w, torch.tensor(sizes, device="cuda"), x_scale, w_scale, bias
    with use("hopper"):
        got = scaled_gmm(*inputs, order=order, top_k=top_k, out_dtype=F16)
    with use("triton"):
        assert torch.equal(got, scaled_gmm(*inputs, order=order, top_k=top_k, out_dtype=F16))
    assert (got[sum(sizes) :] == 0).all()


def test_triton_is_what_ran(device):
    if device.type == "cpu" and not interpret:
        pytest.skip("the CPU runs the reference")
    inputs = make(device, 5, 16, 8, (INT8, INT8))
    with use("triton"):
        assert torch.equal(scaled_gemm(*inputs, out_dtype=F32), exact(*inputs).float())


X, W = torch.zeros(5, 32, dtype=INT8), torch.zeros(32, 16, dtype=INT8)
BAD = {
    "x is a vector": (dict(x=X[0]), ValueError, r"x must be \(M, K\), but it has shape \(32,\)"),
    "w is a list": (dict(w=[1]), TypeError, "w must be a tensor, not list"),
    "inner sizes": (dict(w=W[:8]), ValueError, r"x is \(M, K=32\) but w is \(K=8, N\)"),
    "w of (N, K)": (dict(w=W.mT, w_scale=torch.ones(16)), ValueError, r"w is \(K=16, N\)"),
    "16 bits": (dict(x=X.half()), TypeError, "x must be int8 or 8-bit floats, not torch.float16"),
    "unsigned": (dict(w=W.to(torch.uint8)), TypeError, "x is torch.int8 but w is torch.uint8"),
    "mixed": (dict(w=W.to(E4M3)), TypeError, "x is torch.int8 but w is torch.float8_e4m3fn"),
    "float64": (dict(out_dtype=torch.float64), TypeError, "out_dtype must be .* not torch.float64"),
    "no dtype": (dict(out_dtype=None), TypeError, "out_dtype must be float16, bfloat16 or float32, not None"),
    "x_scale shape": (dict(x_scale=torch.ones(4)), ValueError, r"x_scale .*\(5,\), \(5, 1\), .*\(4,\)"),
    "x_scale as a row": (dict(x_scale=torch.ones(1, 5)), ValueError, r"x_scale .* has shape \(1, 5\)"),
    "w_scale shape": (dict(w_scale=torch.ones(5)), ValueError, r"w_scale .*\(16,\), \(16, 1\), \(1, 16\)"),
    "scale dtype": (dict(x_scale=torch.ones(5).half()), TypeError, "x_scale must be float32, not"),
    "scale kind": (dict(x_scale="1"), TypeError, "x_scale must be a tensor, not str"),
    "bias shape": (dict(bias=torch.ones(1, 16)), ValueError, r"bias must be \(16,\), but .* \(1, 16\)"),
    "bias dtype": (dict(bias=torch.ones(16).int()), TypeError, "bias must be floating, not torch.int32"),
    "device": (dict(w=W.to("meta")), ValueError, "x is on cpu but w is on meta"),
    "device of a scale": (dict(w_scale=torch.ones(16, device="meta")), ValueError, "but w_scale is on meta"),
    "a gradient": (dict(bias=torch.ones(16).requires_grad_()), RuntimeError, "product has no gradient"),
}  # fmt: skip


@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
@pytest.mark.no_interpreter
def test_bad_input_is_named(change, kind, message):
    with pytest.raises(kind, match=message):
        scaled_gemm(**{**dict(x=X, w=W, out_dtype=F32), **change})


GROUPED = dict(x=X, w=W[None].expand(2, 32, 16), group_sizes=torch.tensor([2, 3]), out_dtype=F32)
BAD_GROUPS = {
    "w is a matrix": (dict(w=W), ValueError, r"w must be \(G, K, N\)"),
    "inner sizes": (dict(x=X[:, :8]), ValueError, r"x is \(M, K=8\) but w is \(G, K=32, N\)"),
    "groups": (
        dict(group_sizes=torch.tensor([5])),
        ValueError,
        r"w is \(G=2, K, N\) but group_sizes is \(G=1,\)",
    ),
    "w_scale": (dict(w_scale=torch.ones(16)), ValueError, r"w_scale must be \(2, 16\)"),
    "x_scale": (dict(x_scale=torch.ones(4)), ValueError, r"x_scale must be \(5,\)"),
    "sizes past M": (dict(group_sizes=torch.tensor([2, 4])), ValueError, r"group_sizes \[2, 4\] must not"),
    "order": (dict(order=torch.arange(9)), ValueError, r"x is \(T=5, K\) for top_k=1, 5 rows, but order is"),
}


@pytest.mark.parametrize("change, kind, message", BAD_GROUPS.values(), ids=BAD_GROUPS)
@pytest.mark.no_interpreter
def test_bad_groups_are_named(change, kind, message):
    with pytest.raises(kind, match=message):
        scaled_gmm(**{**GROUPED, **change})


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (1, 2), (3, 2), (17, 1), (1, 17), (40, 1), (0, 1)])
@pytest.mark.parametrize("M, N", [(1, 1), (1, 20), (20, 1), (20, 20)])
@pytest.mark.pairwise
def test_any_strides_of_int8(device, M, N, strides):
    memory = torch.randint(-128, 128, (2000,), dtype=torch.int8, device=device)
    x, w = memory.as_strided((M, 16), strides), memory.as_strided((16, N), strides)
    for left, right in ((x, w), (x, w.contiguous()), (x.contiguous(), w)):
        out = scaled_gemm(left, right, out_dtype=torch.float32)
        assert torch.equal(out.double(), left.double() @ right.double())


def test_a_number_of_numpy_is_a_scale():
    x, w = torch.ones(3, 4, dtype=torch.int8), torch.ones(4, 2, dtype=torch.int8)
    want = scaled_gemm(x, w, 2.0, out_dtype=torch.float32)
    assert torch.equal(scaled_gemm(x, w, torch.tensor(2.0).numpy()[()], out_dtype=torch.float32), want)


@pytest.mark.skipif(not (interpret or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("M, G", [(1, 8), (4, 16), (8, 4), (8, 32)])
@pytest.mark.parametrize("dies", [1, 8])
def test_fewer_rows_than_groups(M, G, dies, device, monkeypatch):
    """Each tile of the result is some program's, however programs walk."""
    monkeypatch.setattr(tile, "num_dies", lambda: dies)
    x = torch.randint(1, 9, (M, 32), dtype=torch.int8, device=device)
    w = torch.randint(1, 9, (G, 512, 32), dtype=torch.int8, device=device).mT
    sizes = torch.bincount(torch.randint(0, G, (M,), device=device), minlength=G).int()
    with tuning.choose(lambda key: tuning.Config(16, 64, 32, 8, 4, 2)), use("triton"):
        out = scaled_gmm(x, w, sizes, out_dtype=torch.float32)
    expected = scaled_gmm_reference(x, w, sizes, None, None, None, None, 1, torch.float32)
    assert torch.equal(out, expected)
