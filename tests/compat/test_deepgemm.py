"""AITER's deepgemm and shuffle_weight: the guide's example, upstream's test shapes, what is refused."""

import random

import pytest
import torch

from moe_aiter.compat.aiter import deepgemm
from moe_aiter.compat.aiter.ops.shuffle import shuffle_weight, unshuffle_weight
from moe_aiter.config import interpret
from moe_aiter.op import use

from ..check import error

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
F16, BF16 = torch.float16, torch.bfloat16
EXPECT_M = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def quantized(x, dtype):
    """Upstream's pertoken_quant: 8-bit floats, and what multiplies each row back."""
    amax = x.abs().amax(-1, keepdim=True).float()
    scale = torch.where(amax > 0, amax / torch.finfo(dtype).max, 1.0)
    return (x.float() / scale).to(dtype), scale


def make(device, num_groups, expect_m, k, n, dtype, fp8=None):
    """Upstream's inputs: XQ, shuffled WQ, Y of zeros, masked_m, both scales; and what they stand for."""
    max_m = 256 if expect_m < 128 else 2 * expect_m
    x = torch.randn(num_groups, max_m, k, device=device).to(dtype)
    w = torch.randn(num_groups, n, k, device=device).to(dtype)
    counts = [int(expect_m * random.Random(g).uniform(0.7, 1.3)) for g in range(num_groups)]
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    y = torch.zeros(num_groups, max_m, n, dtype=dtype, device=device)
    scales = None, None
    if fp8:
        (x, x_scale), (w, w_scale) = quantized(x, fp8), quantized(w, fp8)
        scales = x_scale, w_scale
        meant = x.float() * x_scale, w.float() * w_scale
    return (x, shuffle_weight(w), y, masked_m, *scales), meant if fp8 else (x.float(), w.float())


def check(inputs, meant):
    """Y is what upstream's reference says, with zeros where there are no rows."""
    y, masked_m = inputs[2:4]
    rows = torch.arange(y.shape[1], device=y.device)[:, None] < masked_m[:, None, None]
    exact = torch.einsum("gmk,gnk->gmn", *meant) * rows
    assert deepgemm(*inputs) is y
    assert error(y, exact) <= 2 * error(exact.to(y.dtype), exact) + 1e-7
    assert (y.view(torch.int16)[~rows.expand_as(y)] == 0).all()


def test_the_guides_example(device):
    weight_q = torch.randn(4, 64, 96).to(device, F16)
    XQ = torch.randn(4, 20, 96).to(device, F16)
    Y = torch.zeros(4, 20, 64, dtype=F16, device=device)
    group_layout = torch.tensor([20, 0, 3, 11], dtype=torch.int32, device=device)

    import moe_aiter.compat.aiter  # noqa: F401
    from moe_aiter.compat.aiter import deepgemm
    from moe_aiter.compat.aiter.ops.shuffle import shuffle_weight

    # Weights must be pre-shuffled
    weight_shuffled = shuffle_weight(weight_q, layout=(16, 16))

    out = deepgemm(
        XQ,             # (num_groups, max_m, k) — input activations
        weight_shuffled, # (num_groups, n, k) — shuffled weights
        Y,              # (num_groups, max_m, n) — preallocated output
        group_layout,   # (num_groups,) int32 — active rows per group
        x_scale=None,   # per-token activation scale (for FP8)
        w_scale=None,   # per-group weight scale (for FP8)
    )  # fmt: skip
    assert out is Y
    masked_m = group_layout.tolist()
    for j in range(4):
        expected = (XQ[j, : masked_m[j], :].float() @ weight_q[j].T.float()).half()
        torch.testing.assert_close(Y[j, : masked_m[j], :], expected, rtol=2e-3, atol=2e-3)
        assert (Y[j, masked_m[j] :] == 0).all()


@pytest.mark.parametrize("fp8", [None, E4M3, FNUZ], ids=str)
@pytest.mark.parametrize("expect_m", [1, 16, 128])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.pairwise
def test_upstreams_shapes_made_small(expect_m, dtype, fp8):
    check(*make("cpu", 4, expect_m, 224, 128, dtype, fp8))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [None, E4M3, FNUZ], ids=str)
@pytest.mark.parametrize("expect_m", EXPECT_M)
def test_upstreams_shapes(expect_m, fp8, most_of_the_gpu):
    for dtype in (F16, BF16):
        check(*make("cuda", 16, expect_m, 7168, 4096, dtype, fp8))


@pytest.mark.gpu
def test_more_than_2_31_elements(no_debug, most_of_the_gpu):
    """Weights, rows and results of 33 groups are each past 32 bits; the last group is like the first."""
    G, n = 33, 8192
    x, w = (torch.randn(1, n, n, device="cuda").to(E4M3).expand(G, -1, -1).contiguous() for _ in "xw")
    y = torch.zeros(G, n, n, dtype=BF16, device="cuda")
    sizes = torch.full((G,), 300, device="cuda")
    deepgemm(x, w, y, sizes, weight_shuffled=False)
    assert w.numel() > 2**31 and y.numel() > 2**31 and x.numel() > 2**31
    assert torch.equal(y[-1], y[0]) and y[0, :300].any() and not y[:, 300:].any()
    exact = x[0, :300].float() @ w[0].float().T
    assert error(y[-1, :300], exact) <= 2 * error(exact.to(BF16), exact)


def test_a_lone_scale_counts(device):
    (x, w, y, masked_m, x_scale, w_scale), _ = make(device, 2, 8, 64, 32, BF16, E4M3)
    y = y.float()
    plain = deepgemm(x, w, y.clone(), masked_m)
    for scales, times in [((x_scale, None), x_scale), ((None, w_scale), w_scale.mT)]:
        got = deepgemm(x, w, y.clone(), masked_m, *scales)
        torch.testing.assert_close(got, plain * times, rtol=1e-5, atol=1e-5)


def test_shuffled_is_the_contract_and_the_tag_is_not_needed(device):
    (x, w, y, masked_m, *_), _ = make(device, 2, 8, 64, 32, F16)
    plain = unshuffle_weight(w)
    expected = deepgemm(x, w, y.clone(), masked_m)
    for weight, said in [
        (torch.nn.Parameter(w), None),
        (w.clone(), None),
        (w.clone(), True),
        (w.mT.contiguous().mT, None),
        (plain, None),  # says that it is not
        (plain.clone(), False),
    ]:
        with torch.no_grad():
            assert torch.equal(deepgemm(x, weight, y.clone(), masked_m, weight_shuffled=said), expected)
    assert torch.equal(deepgemm(x, w, y.clone(), masked_m=masked_m), expected)
    assert not torch.equal(deepgemm(x, plain.clone(), y.clone(), masked_m), expected)


def test_it_compiles_without_graph_breaks(device):
    inputs, _ = make(device, 2, 8, 64, 32, F16)
    expected = deepgemm(*inputs).clone()
    compiled = torch.compile(deepgemm, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(inputs[0], inputs[1].clone(), torch.zeros_like(expected), inputs[3]), expected
    )


@pytest.mark.skipif(not interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.interpret
def test_the_kernel_reads_every_order():
    (x, w, y, masked_m, *scales), _ = make("cpu", 2, 8, 64, 32, F16, E4M3)
    with use("torch"):
        expected = deepgemm(x, w, y.clone(), masked_m, *scales)
    with use("triton"):
        for weight, said in [(w, True), (unshuffle_weight(w), False)]:
            got = deepgemm(x, weight, y.clone(), masked_m, *scales, weight_shuffled=said)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


X, W, Y = torch.zeros(2, 5, 32), torch.zeros(2, 16, 32), torch.zeros(2, 5, 16)
SIZES = torch.tensor([2, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (dict(group_layout=None), ValueError, "give either group_layout or masked_m"),
        (dict(masked_m=SIZES), ValueError, "give either group_layout or masked_m"),
        (dict(XQ=None), TypeError, "XQ must be a tensor, not NoneType"),
        (dict(WQ=[1.0]), TypeError, "WQ must be a tensor, not list"),
        (dict(WQ=W.half()), TypeError, "XQ is torch.float32 but WQ is torch.float16"),
        (dict(Y=Y[:, :4]), ValueError, r"Y must be \(G=2, M=5, N=16\), but it has shape \(2, 4, 16\)"),
        (dict(group_layout=SIZES + 3), ValueError, r"group_layout \[5, 6\] must not be negative nor more th"),
        (dict(group_layout=SIZES - 3), ValueError, r"group_layout \[-1, 0\] must not be negative"),
        (dict(x_scale=torch.ones(3)), ValueError, r"x_scale must be a number, \(2,\), .* shape \(3,\)"),
        (dict(XQ=X[..., :16], WQ=W[..., :16]), ValueError, "N=16 must be a multiple of 16 and K=16 of 32"),
    ],
)
def test_bad_input_is_named_and_nothing_written(change, kind, message):
    good = dict(XQ=X, WQ=W, Y=Y.clone().fill_(7), group_layout=SIZES)
    with pytest.raises(kind, match=message):
        deepgemm(**{**good, **change})
    assert (good["Y"] == 7).all()
