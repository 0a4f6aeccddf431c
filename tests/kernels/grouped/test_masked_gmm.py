"""masked_gmm and scaled_bmm, on every backend that can run here."""

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret, settings
from moe_aiter.kernels.base.fp8 import FP8
from moe_aiter.kernels.base.shuffle import shuffle_weight
from moe_aiter.kernels.grouped.masked_gmm import masked_gmm, scaled_bmm
from moe_aiter.op import use

from ...check import assert_as_good_as_torch
from ...references import masked_gmm_reference
from ...shapes import LAYOUTS, spread

E4M3, FNUZ, E5M2 = FP8
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# x, w, out; the interpreter multiplies bfloat16 wrongly, and cuts where it rounds to it
DTYPES = [(F16, F16, F16), (E4M3, E4M3, F16), (FNUZ, FNUZ, F16), (E4M3, E5M2, F16)]
DTYPES += [] if interpret else [(BF16, BF16, BF16), (E4M3, E4M3, BF16), (F32, F32, F32)]
SIZES = {
    "ragged": [5, 1, 9],
    "none and all": [0, 10, 10],
    "no rows": [0, 0, 0],
    "wide": [130, 0, 64],
    "one group": [7],
}


def make(device, sizes, N=48, K=64, dtypes=(F32, F32, F32), max_m=None):
    """out filled with NaN, x, w, the sizes as int32, and a scale for each row of x and of w."""
    G, M = len(sizes), max_m or max(*sizes, 10)
    out = torch.full((G, M, N), float("nan"), dtype=dtypes[2], device=device)
    x, w = torch.randn(G, M, K).to(device, dtypes[0]), torch.randn(G, N, K).to(device, dtypes[1])
    scales = torch.rand(G, M, device=device) + 0.5, torch.rand(G, N, device=device) + 0.5
    return out, x, w, torch.tensor(sizes, dtype=torch.int32, device=device), *scales


def result(fn):
    """fn(out, *inputs) as a function of the inputs, whose rows without a result are zeros."""

    def run(x, w, group_sizes, x_scale, w_scale, dtype):
        out = torch.zeros(*x.shape[:2], w.shape[1], dtype=dtype, device=x.device)
        dtype = torch.float64 if x.dtype == torch.float64 else dtype
        out = out.to(dtype)
        fn(out, x, w, group_sizes, x_scale, w_scale)
        return out

    return run


reference = result(lambda *inputs: masked_gmm_reference(*inputs, False))


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(t)[6:] for t in d))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.pairwise
def test_masked_gmm(device, sizes, dtypes, shuffled):
    def fn(out, x, w, *rest):
        masked_gmm(out, x, shuffle_weight(w) if shuffled else w, *rest, shuffled=shuffled)

    _, *inputs = make(device, sizes, dtypes=dtypes)
    assert_as_good_as_torch(result(fn), reference, *inputs, dtypes[2])
    assert_as_good_as_torch(result(fn), reference, *inputs[:3], None, None, dtypes[2])


@pytest.mark.parametrize("N, K", [(80, 96), (16, 32), (48, 160)])
@pytest.mark.parametrize("max_m", [10, 140])
def test_shuffled_weights_that_end_within_a_tile(device, N, K, max_m):
    def fn(out, x, w, *rest):
        with tuning.choose(lambda key: tuning.Config(16, 64, 64)):
            masked_gmm(out, x, shuffle_weight(w), *rest, shuffled=True)

    for dtypes in [(F16, F16, F16), (E4M3, E4M3, F16)]:
        _, *inputs = make(device, [3, 10, 0], N, K, dtypes, max_m)
        assert_as_good_as_torch(result(fn), reference, *inputs, F16)


@pytest.mark.parametrize("N, K", [(1, 1), (37, 23), (80, 257), (300, 16)])
@pytest.mark.parametrize("max_m", [10, 140])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.pairwise
def test_shapes_and_layouts(device, N, K, max_m, layout):
    dtype = F16 if device.type == "cpu" and interpret else E4M3
    _, *inputs = make(device, [3, 10, 0], N, K, (dtype, dtype, F16), max_m)
    x, w, sizes, *scales = (t if t.dtype == torch.int32 else layout_of(layout, t) for t in inputs)
    assert_as_good_as_torch(result(masked_gmm), reference, x, w, sizes, *scales, F16)


def layout_of(layout, x):
    """The layout of 8-bit floats by way of bytes: torch copies few of them."""
    return (
        layout(x.view(torch.uint8)).view(x.dtype) if x.itemsize == 1 and layout is not spread else layout(x)
    )


@pytest.mark.parametrize("max_m", [20, 140])
@pytest.mark.parametrize("sizes", [[3, 0, 20], [-5, 2**31 - 1, 7], [-(2**32) + 3, 2**32, 7]], ids=str)
def test_what_is_outside_keeps_every_bit_and_is_not_read(device, max_m, sizes, no_debug):
    out, x, w, *_ = make(device, [0, 0, 0], dtypes=(F16, F16, F16), max_m=max_m)
    poison = torch.randint(-(2**15), 2**15, out.shape, dtype=torch.int16, device=device)
    whole = spread(poison.view(F16))  # what lies between its rows counts as well
    group_sizes = torch.tensor(sizes, device=device)
    inside = torch.arange(max_m, device=device) < group_sizes[:, None]  # (G, M)
    x[~inside] = float("nan")
    assert masked_gmm(whole, x, w, group_sizes) is whole
    assert torch.equal(whole.view(torch.int16)[~inside], poison[~inside])
    expected = x.float() @ w.float().mT
    torch.testing.assert_close(whole[inside].float(), expected[inside], rtol=2e-3, atol=2e-3)
    base = whole._base if whole._base is not None else whole
    between = torch.ones_like(base, dtype=torch.bool)
    between[::2, ::2, ::2] = False
    assert base[between].isnan().all()


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("max_m", [16, 256])
def test_every_code_of_8_bits_is_exact(device, dtype, max_m):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    x = torch.zeros(256 // max_m, max_m, 32, dtype=torch.uint8, device=device).view(dtype)
    x.view(torch.uint8)[:, :, 5] = codes.view(torch.uint8).view(-1, max_m)
    w = torch.zeros(len(x), 16, 32, device=device)
    w[:, :, 5] = 1
    out = masked_gmm(torch.empty(len(x), max_m, 16, device=device), x, w.to(dtype))
    expected = codes.float()[:, None].expand(256, 16)
    torch.testing.assert_close(out.view(256, 16), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [False, True])
def test_scaled_bmm(device, columns):
    _, x, w, _, x_scale, w_scale = make(device, [10, 10], 48, 64, (E4M3, E5M2, F16))
    w = w.mT  # (G, K, N), K in a row
    w = w.view(torch.uint8).contiguous().view(E5M2) if columns else w
    scales = x_scale[:, :, None] * w_scale[:, None]
    expected, terms = x.float() @ w.float() * scales, x.float().abs() @ w.float().abs() * scales
    for dtype in (F16, F32):
        got = scaled_bmm(x, w, x_scale, w_scale[:, :, None], out_dtype=dtype)
        assert got.dtype == dtype
        # a sum of 8-bit products has 14 bits on Hopper, so what cancels is as far off as its terms are large
        assert ((got - expected).abs() <= 2**-14 * terms + 1e-3 * expected.abs()).all()
    out = torch.full_like(got, float("nan"))
    assert scaled_bmm(x, w, x_scale, w_scale, out=out) is out and torch.equal(out, got)
    with pytest.raises(ValueError, match=r"out is torch.float32 but out_dtype is torch.float16"):
        scaled_bmm(x, w, out_dtype=F16, out=out)


def test_scales_of_every_shape(device):
    out, x, w, sizes, x_scale, w_scale = make(device, [4, 10])
    plain = masked_gmm(torch.zeros_like(out), x, w, sizes)
    number, by_group = torch.tensor(1.5, device=device), torch.tensor([0.5, 2.0], device=device)
    for scale, rows, times in [
        (1.5, None, 1.5),
        (number, None, 1.5),
        (number.view(1, 1, 1), None, 1.5),
        (by_group, None, by_group[:, None, None]),
        (by_group.view(2, 1, 1), None, by_group[:, None, None]),
        (x_scale, w_scale, x_scale[:, :, None] * w_scale[:, None]),
        (x_scale[:, :, None], w_scale[:, :, None], x_scale[:, :, None] * w_scale[:, None]),
        (None, w_scale, w_scale[:, None]),
    ]:
        got = masked_gmm(torch.zeros_like(out), x, w, sizes, scale, rows)
        torch.testing.assert_close(got, plain * times, rtol=1e-5, atol=1e-5)
        if rows is None:
            swapped = masked_gmm(torch.zeros_like(out), x, w, sizes, None, scale)
            torch.testing.assert_close(swapped, plain * times, rtol=1e-5, atol=1e-5)


def test_nothing_to_do(device):
    out, x, w, sizes, *_scales = make(device, [4, 10])
    for o, a, b, s in [
        (out[:0], x[:0], w[:0], sizes[:0]),
        (out[:, :0], x[:, :0], w, sizes),
        (out[:, :, :0], x, w[:, :0], sizes),
    ]:
        masked_gmm(o, a, b, None if s is sizes and not a.shape[1] else s.clamp(max=a.shape[1]))
    masked_gmm(out, x[:, :, :0], w[:, :, :0], sizes)
    assert (out[0, :4] == 0).all() and out[0, 4:].isnan().all() and (out[1] == 0).all()


def test_opcheck_and_compile(device):
    out, x, w, sizes, *scales = make(device, [3, 0, 4])
    torch.library.opcheck(torch.ops.moe_aiter.masked_gmm.default, (out, x, w, sizes, *scales, False))
    compiled = torch.compile(masked_gmm, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in ([3, 0, 4], [10, 2, 1]):
        out, *inputs = make(device, sizes)
        expected = masked_gmm(out.clone(), *inputs)
        torch.testing.assert_close(compiled(out, *inputs), expected, equal_nan=True)


def test_a_gradient_is_refused_not_forgotten(device):
    out, x, w, sizes, *_ = make(device, [3, 0, 4])
    with pytest.raises(RuntimeError, match=r"no gradient: call it under torch.no_grad()"):
        masked_gmm(out, x, w.requires_grad_(), sizes)
    with torch.no_grad():
        assert not masked_gmm(out, x, w, sizes).requires_grad


def test_two_runs_give_the_same_bits(device):
    out, *inputs = make(device, [33, 0, 140], dtypes=(E4M3, E4M3, F16))
    first, second = (masked_gmm(torch.zeros_like(out), *inputs) for _ in range(2))
    assert torch.equal(first, second)


def test_triton_is_what_ran(device):
    if device.type == "cpu" and not interpret:
        pytest.skip("the CPU runs the reference")
    out, *inputs = make(device, [3, 0, 4])
    with use("triton"):
        masked_gmm(out, *inputs)
    with use("triton"), pytest.raises(LookupError, match=r"masked_gmm: no triton backend for torch.float64"):
        masked_gmm(out.double(), inputs[0].double(), inputs[1].double())


@pytest.mark.gpu
def test_a_graph_replays_with_other_sizes(no_debug):
    out, *inputs = make("cuda", [3, 0, 4], dtypes=(E4M3, E4M3, F16))
    masked_gmm(out, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        masked_gmm(out, *inputs)
    for sizes in ([10, 1, 0], [0, 0, 10]):
        inputs[2].copy_(torch.tensor(sizes))
        out.fill_(float("nan"))
        graph.replay()
        expected = masked_gmm(torch.full_like(out, float("nan")), *inputs)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


X, W, S, OUT = torch.zeros(2, 5, 32), torch.zeros(2, 16, 32), torch.tensor([2, 3]), torch.zeros(2, 5, 16)
BAD = {
    "x is a matrix": (dict(x=X[0]), ValueError, r"x must be \(G, M, K\), but it has shape \(5, 32\)"),
    "w is a list": (dict(w=[1.0]), TypeError, "w must be a tensor, not list"),
    "inner sizes": (dict(w=W[:, :, :8]), ValueError, r"x is \(G, M, K=32\) but w is \(G, N, K=8\)"),
    "groups": (dict(w=W[:1]), ValueError, r"x is \(G=2, M, K\) but w is \(G=1, N, K\)"),
    "out shape": (dict(out=OUT.mT), ValueError, r"out must be \(G=2, M=5, N=16\), but it has shape \(2, 16"),
    "out dtype": (dict(out=OUT.half()), TypeError, "x is torch.float32 but out is torch.float16"),
    "out is expanded": (dict(out=OUT[:1].expand(2, 5, 16)), ValueError, "out is expanded"),
    "out overlaps": (
        dict(out=torch.zeros(200).as_strided(OUT.shape, (16, 16, 1))),
        ValueError,
        "out has str",
    ),
    "8 and 16 bits": (dict(x=X.to(E4M3)), TypeError, "x is torch.float8_e4m3fn but w is torch.float32"),
    "16 and 8 bits": (dict(w=W.to(E4M3)), TypeError, "x is torch.float32 but w is torch.float8_e4m3fn"),
    "8 bits out": (
        dict(x=X.to(E4M3), w=W.to(E4M3), out=OUT.to(E4M3)),
        TypeError,
        "out must be float16, bfloat16 or float32 for torch.float8_e4m3fn, not torch.float8_e4m3fn",
    ),
    "integers": (
        dict(x=X.int()),
        TypeError,
        "x must be float16, bfloat16, float32 or float64, not torch.int",
    ),
    "sizes shape": (dict(group_sizes=S[:1]), ValueError, r"x is \(G=2, M, K\) but group_sizes is \(G=1,\)"),
    "sizes dtype": (
        dict(group_sizes=S.float()),
        TypeError,
        "group_sizes must be int32 or int64, not torch.fl",
    ),
    "sizes past M": (dict(group_sizes=S + 3), ValueError, r"group_sizes \[5, 6\] must not be negative nor"),
    "x_scale kind": (dict(x_scale="1"), TypeError, "x_scale must be a tensor, not str"),
    "x_scale shape": (
        dict(x_scale=X[:, :4, 0]),
        ValueError,
        r"x_scale must be a number, \(2,\), .* \(2, 4\)",
    ),
    "w_scale dtype": (
        dict(w_scale=W[:, :, 0].half()),
        TypeError,
        "w_scale must be float32, not torch.float16",
    ),
    "device": (dict(w=W.to("meta")), ValueError, "x is on cpu but w is on meta"),
    "shuffled N": (
        dict(w=W[:, :15], out=OUT[:, :, :15], shuffled=True),
        ValueError,
        r"N=15 must be a multiple of 16 and K=32 of 32 for the layout \(16, 16\)",
    ),
}


@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
@pytest.mark.no_interpreter
def test_bad_input_is_named_and_nothing_written(change, kind, message):
    assert settings.debug, "the tests run with MOE_AITER_DEBUG=1"
    good = dict(out=OUT.clone().fill_(7), x=X, w=W, group_sizes=S)
    with pytest.raises(kind, match=message):
        masked_gmm(**{**good, **change})
    assert (good["out"] == 7).all()


def test_an_axis_of_one_element_has_any_stride():
    out = torch.zeros_like(OUT[:1]).expand(2, 5, 16)[:1]
    torch.testing.assert_close(masked_gmm(out, X[:1], W[:1]), X[:1] @ W[:1].mT)
