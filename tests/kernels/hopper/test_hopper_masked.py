"""The masked product on Hopper: right inside, every bit as it was outside, and only where it fits."""

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.kernels.base.fp8 import as_rows
from moe_aiter.kernels.base.shuffle import shuffle_weight
from moe_aiter.kernels.grouped.masked_gmm import masked_gmm
from moe_aiter.kernels.hopper import MAX_GROUPS, is_hopper
from moe_aiter.op import use
from moe_aiter.tuning.candidates import candidates

from ...check import fits

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = [(BF16, BF16, BF16), (F16, F16, F16), (E4M3, E4M3, BF16), (E4M3, E4M3, F16), (E4M3, E4M3, F32)]
DTYPES += [(E4M3, E5M2, BF16), (E5M2, E4M3, F16), (E5M2, E5M2, BF16)]
SIZES = {  # most rows of a group, and the rows of each
    "ragged": (300, [129, 0, 1, 256, 64, 63, 300, 65]),
    "one tile": (128, [128, 1, 127, 64, 65]),
    "odd": (131, [131, 130, 3, 129]),
    "one group": (1024, [1000]),
    "large": (1024, [1024, 0, 0, 700, 5]),
    "none": (256, [0, 0, 0]),
    "all": (200, None),
}


@pytest.fixture(autouse=True)
def hopper():
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    with use("hopper"):
        yield


def make(max_m, sizes, N, K, dtypes=(E4M3, E4M3, BF16), scaled=True):
    """out of random bits, and the inputs; rows that are not there are NaN."""
    G = 3 if sizes is None else len(sizes)
    rows = torch.full((G,), max_m) if sizes is None else torch.tensor(sizes)
    x = torch.randn(G, max_m, K, device=CUDA)
    x[torch.arange(max_m) >= rows[:, None]] = float("nan")
    w = torch.randn(G, N, K, device=CUDA).to(dtypes[1])
    size = G, max_m, N * dtypes[2].itemsize
    out = torch.randint(256, size, dtype=torch.uint8, device=CUDA).view(dtypes[2])
    scales = (torch.rand(G, n, device=CUDA) + 0.5 if scaled else None for n in (max_m, N))
    return out, x.to(dtypes[0]), w, None if sizes is None else rows.to(CUDA, torch.int32), *scales


def check(out, x, w, sizes, x_scale=None, w_scale=None):
    """Run it, and compare with float64 inside, and with what was there outside."""
    G, M = x.shape[:2]
    of_x, of_w = as_rows("x_scale", x_scale, x, M), as_rows("w_scale", w_scale, x, w.shape[1])
    assert fits("masked_gmm", out, x, w, sizes, of_x, of_w, False)
    before = out.clone()
    assert masked_gmm(out, x, w, sizes, x_scale, w_scale) is out
    rows = torch.full((G,), M, device=CUDA) if sizes is None else sizes.clamp(0, M)
    inside = torch.arange(M, device=CUDA) < rows[:, None]
    assert torch.equal(out[~inside].view(torch.uint8), before[~inside].view(torch.uint8))
    scales = [1.0 if s is None else s.double() for s in (of_x, of_w)]
    scales = [s[:, :, None] if isinstance(s, torch.Tensor) else s for s in scales]
    x, w = x.double() * scales[0], w.double() * scales[1]
    error = (out.double() - x @ w.mT).abs()[inside]
    terms = (x.abs() @ w.abs().mT)[inside]
    # the tensor core keeps some 14 bits of a sum of 8-bit products; then comes one rounding
    bound = 2**-11 * terms + torch.finfo(out.dtype).eps * (x @ w.mT).abs()[inside] + 1e-6
    assert (error <= bound).all(), (error - bound).max()


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(t)[6:] for t in d))
@pytest.mark.parametrize("N, K", [(8, 16), (72, 128), (520, 272), (264, 1040), (1032, 400), (256, 2880)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.pairwise
def test_products(sizes, N, K, dtypes):
    check(*make(*SIZES[sizes], N, K, dtypes))
    check(*make(*SIZES[sizes], N, K, dtypes, scaled=False))


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2], DTYPES[4]], ids=str)
@pytest.mark.parametrize("number", range(6))
def test_every_tile(number, dtypes):
    """In any walk, with more tiles than there are SMs."""

    def choice(key):
        found = candidates(key.op)
        return found[number % len(found)]

    runs = make(512, [512, 0, 300, 1, 511, 128, 400], 1416, 656, dtypes)
    with tuning.choose(choice):
        check(*runs)
        check(*runs[:4])


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
@pytest.mark.parametrize("K", [144, 272, 400])
def test_parts_of_larger_tensors(K, dtypes):
    """Beside K, between the groups and around the result nothing is read that counts, and nothing written."""
    out, x, w, sizes, *scales = make(150, [150, 0, 129, 30], 136, 512, dtypes)
    whole = torch.full((4, 200, 512), float("nan"), device=CUDA)
    whole[:, :150, :K] = x[:, :, :K].float()
    more = torch.full((4, 144, 512), float("nan"), device=CUDA)
    more[:, 1:137, :K] = w[:, :, :K].float()
    x, w = whole.to(dtypes[0])[:, :150, :K], more.to(dtypes[1])[:, 1:137, :K]
    around = torch.full((4, 170, 256), 7.0, device=CUDA, dtype=dtypes[2])
    part = around[:, 5:155, 8:144]
    part.copy_(out)
    check(part, x, w, sizes, *scales)
    part.fill_(7)
    assert (around == 7).all()


def test_scales_of_every_shape():
    out, x, w, sizes, x_scale, w_scale = make(140, [140, 1, 64], 200, 320)
    number, by_group = torch.tensor(1.5, device=CUDA), torch.tensor([0.5, 2.0, 3.0], device=CUDA)
    wide = torch.rand(400, 3, device=CUDA)  # strided both ways
    every = (
        None,
        1.5,
        number,
        by_group,
        by_group.view(3, 1, 1),
        x_scale,
        x_scale[:, :, None],
        wide.T[:, :140],
    )
    for scale in every:
        check(out, x, w, sizes, scale, w_scale)
        check(out, x, w, sizes, scale, None)
    for scale in (1.5, by_group, w_scale[:, :, None], wide.T[:, ::2]):
        check(out, x, w, sizes, x_scale, scale)
        check(out, x, w, sizes, None, scale)


@pytest.mark.parametrize("sizes", [[-5, 2**31 - 1, 7], [2**40, 0, -(2**40)]], ids=str)
def test_sizes_are_clamped(sizes, no_debug):
    out, x, w, *_ = make(160, [160] * 3, 64, 128)
    check(out, x, w, torch.tensor(sizes, device=CUDA))


@pytest.mark.parametrize("groups", [255, MAX_GROUPS])
def test_many_groups(groups):
    sizes = torch.randint(0, 129, (groups,)).tolist()
    check(*make(128, sizes, 64, 144))
    out, *inputs = make(128, [1] * (MAX_GROUPS + 1), 8, 16)
    assert not fits("masked_gmm", out, *inputs, False)


def test_float32_adds_what_the_tensor_core_would_lose():
    """Sums of 256 products, not of all."""
    out, x, w, *_ = make(128, None, 256, 16384, (E4M3, E4M3, F32))
    masked_gmm(out, x, w)
    exact = x.double() @ w.double().mT
    assert (out - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
def test_a_graph_replays_with_other_sizes(dtypes, no_debug):
    out, x, w, sizes, *scales = make(256, [256] * 3, 264, 512, dtypes)
    masked_gmm(out, x, w, sizes, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        masked_gmm(out, x, w, sizes, *scales)
    for new in ([256, 1, 0], [0, 0, 0], [5, 200, 256]):
        sizes.copy_(torch.tensor(new))
        out.fill_(7)
        graph.replay()
        expected = masked_gmm(torch.full_like(out, 7), x, w, sizes, *scales)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
def test_two_runs_give_the_same_bits(dtypes):
    out, *inputs = make(1024, [1024, 3, 800, 0, 777], 1032, 1040, dtypes)
    first = masked_gmm(torch.zeros_like(out), *inputs)
    for _ in range(5):
        assert torch.equal(masked_gmm(torch.zeros_like(out), *inputs), first)


CHANGES = {
    "few rows": lambda out, x, w: (out[:, :127], x[:, :127], w),
    "K": lambda out, x, w: (out, x[:, :, :200], w[:, :, :200]),
    "N": lambda out, x, w: (out[:, :, :100], x, w[:, :100]),
    "transposed w": lambda out, x, w: (out, x, w.float().mT.contiguous().to(w.dtype).mT),
    "transposed out": lambda out, x, w: (out.mT.contiguous().mT, x, w),
    "rows between groups": lambda out, x, w: (out.transpose(0, 1).contiguous().transpose(0, 1), x, w),
    "address": lambda out, x, w: (out, x.new_zeros(x.numel() + 8)[8:].view(x.shape), w),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_runs_on_the_portable_kernel(change):
    out, x, w, *_ = make(136, [136] * 3, 128, 256)
    out, x, w = CHANGES[change](out, x, w)
    with pytest.raises(LookupError):
        masked_gmm(out, x, w)
    with use("auto"):
        expected = x.double() @ w.double().mT
        torch.testing.assert_close(masked_gmm(out, x, w).double(), expected, rtol=1e-2, atol=5e-2)


def test_shuffled_weights_run_on_the_portable_kernel():
    out, x, w, *_ = make(136, [136] * 3, 128, 256)
    with pytest.raises(LookupError):
        masked_gmm(out, x, shuffle_weight(w), shuffled=True)
    with use("auto"):
        masked_gmm(out, x, shuffle_weight(w), shuffled=True)
    torch.testing.assert_close(out, masked_gmm(torch.empty_like(out), x, w), rtol=1e-2, atol=5e-2)
