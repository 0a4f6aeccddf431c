"""segment_gmm, its gradients and its `out`, on every backend that can run here."""

import pytest
import torch

from moe_aiter.config import interpret, settings
from moe_aiter.kernels.grouped import segment_gmm as file
from moe_aiter.kernels.grouped.segment_gmm import FP8, segment_gmm, segment_gmm_op
from moe_aiter.kernels.grouped.segments import segment_tgmm_op
from moe_aiter.op import use

from ...check import assert_as_good_as_torch, with_gradients
from ...references import gmm_reference, segment_gmm_reference, segment_tgmm_reference
from ...shapes import GROUP_SIZES, LAYOUTS, transposed

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
NUMBERS = [1, 0, 1, 2, -1, 2, 3, 1, 7, 0]  # of 3 weights: repeated, none, and out of range


def make(device, sizes, K=20, N=24, dtype=torch.float32, tail=0, weights=None):
    """x (M, K), w (W, K, N), y (M, N) and the lengths; W is the number of segments unless given."""
    M, W = sum(sizes) + tail, len(sizes) if weights is None else weights
    x, w, y = torch.randn(M, K), torch.randn(W, K, N) / max(K, 1) ** 0.5, torch.randn(M, N)
    return *(t.to(device, dtype) for t in (x, w, y)), torch.tensor(sizes, device=device)


def ends(lens):
    """The same segments by an indptr."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int()


def numbers(sizes, device):
    return torch.tensor((NUMBERS * len(sizes))[: len(sizes)], device=device)


def check(*inputs):
    assert_as_good_as_torch(with_gradients(segment_gmm_op), with_gradients(segment_gmm_reference), *inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
def test_each_segment_has_its_own_weight(device, sizes, dtype):
    x, w, _, lens = make(device, sizes, dtype=dtype, tail=3)
    check(x, w, lens, None, None)
    assert torch.equal(segment_gmm(x, w, lens), segment_gmm(x, w, indptr=ends(lens)))


@pytest.mark.parametrize("K", [20, 70])  # a walk over columns, and a sum
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
def test_segments_name_their_weights(device, sizes, K):
    x, w, _, lens = make(device, sizes, K, tail=3, weights=3)
    index = numbers(sizes, device)
    index = index.where(index < 3, -1)
    check(x, w, lens, None, index)
    check(x, transposed(w), None, ends(lens), index.int())


@pytest.mark.parametrize("K", [20, 70])
def test_weights_that_are_not_there_are_zeros(device, K, no_debug):
    sizes = [3] * 10
    x, w, _, lens = make(device, sizes, K, tail=3, weights=3)
    check(x, w, lens, None, numbers(sizes, device))
    check(x, transposed(w), None, ends(lens), numbers(sizes, device).int())


def test_debug_names_weights_that_are_not_there(device):
    assert settings.debug, "the tests run with MOE_AITER_DEBUG=1"
    x, w, y, lens = make(device, [4, 4], weights=3)
    index = torch.tensor([-1, 3], device=device)
    calls = (
        lambda: segment_gmm(x, w, lens, weight_indices=index),
        lambda: segment_gmm(x, w, indptr=ends(lens), weight_indices=index, out=torch.zeros_like(y)),
        lambda: segment_tgmm_op(x, y, lens, None, index.int(), 3, False),
    )
    for call in calls:
        with pytest.raises(ValueError, match="weight_indices holds 3 but there are 3 weights"):
            call()


@pytest.mark.parametrize("K", [20, 70])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(device, layout, K):
    x, w, y, lens = make(device, [5, 0, 37], K, weights=2)
    x, w, y = (layout(t) for t in (x, w, y))
    index = torch.tensor([1, 0, 1], device=device)
    few = 5e-7  # where all rows are one, few roundings average out
    assert_as_good_as_torch(segment_gmm_op, segment_gmm_reference, x, w, lens, None, index, floor=few)
    inputs = x, y, lens, None, index, 2, False
    assert_as_good_as_torch(segment_tgmm_op, segment_tgmm_reference, *inputs, floor=few)


@pytest.mark.parametrize("K, N", [(0, 8), (8, 0), (1, 8), (8, 1), (80, 1)])
def test_few_columns(device, K, N):
    x, w, y, lens = make(device, [3, 5], K, N)
    torch.testing.assert_close(segment_gmm(x, w, lens), gmm_reference(x, w, lens, None))
    expected = torch.stack([x[:3].T @ y[:3], x[3:].T @ y[3:]])
    torch.testing.assert_close(segment_tgmm_op(x, y, lens, None, None, 2, False), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_rest", [True, False])
def test_sums_in_parts(device, dtype, zero_rest, monkeypatch):
    """As for a LoRA's shrinking, where few tiles share a long sum."""
    monkeypatch.setattr(file, "PART_K", 16)
    x, w, _, lens = make(device, [7, 0, 20], 150, 16, dtype, tail=5)
    index = torch.tensor([2, 0, -1], device=device)
    if zero_rest:
        check(x, w, lens, None, index)
    else:
        out = torch.full((32, 16), 7.0, device=device, dtype=dtype)
        segment_gmm(x, w, lens, weight_indices=index, out=out)
        assert (out[27:] == 7).all()
        torch.testing.assert_close(out[:27], segment_gmm(x, w, lens, weight_indices=index)[:27])


@pytest.mark.parametrize("columns_first", [False, True])
def test_rows_in_parts(device, columns_first, monkeypatch):
    """As for the gradients of a few adapters."""
    monkeypatch.setattr("moe_aiter.kernels.grouped.segments.PART_ROWS", 12)
    x, _, y, lens = make(device, [7, 0, 30, 4], tail=5)
    index = torch.tensor([1, 0, 1, 0], device=device)
    assert_as_good_as_torch(
        segment_tgmm_op, segment_tgmm_reference, x, y, lens, None, index, 2, columns_first
    )


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("K, N", [(20, 300), (700, 20), (200, 200)])
def test_programs_that_walk(device, K, N, columns_first, monkeypatch):
    """As for the gradients of many adapters: along the wider axis, over tiles that need not divide it."""
    for name, least in {"MANY": 3, "FEW": 1}.items():
        monkeypatch.setattr(f"moe_aiter.kernels.grouped.segments.{name}", least)
    x, _, _, lens = make(device, [7, 0, 30, 4], K, tail=5)
    y = torch.randn(len(x), N, device=device)
    index = torch.tensor([1, 0, 1, -1], device=device)
    assert_as_good_as_torch(
        segment_tgmm_op, segment_tgmm_reference, x, y, lens, None, index, 3, columns_first
    )


@pytest.mark.parametrize("K", [20, 70])
def test_out_is_overwritten_in_segments_and_nowhere_else(device, K):
    x, w, _, lens = make(device, [6, 0, 30], K, tail=4)
    memory = torch.full((3, 40, 24), float("nan"), device=device)
    before = memory.clone()
    out = memory[1]
    assert segment_gmm(x, w, lens, out=out) is out
    torch.testing.assert_close(out[:36], segment_gmm(x, w, lens)[:36], rtol=0, atol=0)
    before[1, :36] = out[:36]
    assert torch.equal(memory.view(torch.int32), before.view(torch.int32)), "bit for bit"


def test_nothing_outside_a_segment_is_read(device):
    """A NaN in a segment's rows, or in a weight that nobody names, reaches no other."""
    for K in (20, 70):
        x, w, y, lens = make(device, [7, 5, 6], K, tail=4, weights=3)
        x[8], x[18:], w[2] = float("nan"), float("inf"), float("nan")
        index = torch.tensor([0, 1, -1], device=device)
        out = segment_gmm(x, w, lens, weight_indices=index)
        dw = segment_tgmm_op(x, y, lens, None, index, 3, False)
        assert out[8].isnan().all() and dw[1].isnan().all()
        assert out[torch.arange(22) != 8].isfinite().all() and dw[[0, 2]].isfinite().all()
        assert not out[12:].any() and not dw[2].any()


def test_bounds_that_do_not_fit_are_clamped(device, no_debug):
    x, w, _, _ = make(device, [5, 5, 5])
    for bad in ([9, -4, 2**40], [-1, 30, 5]):
        lens = torch.tensor(bad, device=device)
        out = segment_gmm(x, w, lens)
        ends = lens.clamp(0, 15).cumsum(0).clamp(max=15).tolist()
        for i, (s, e) in enumerate(zip([0, *ends], ends, strict=False)):
            torch.testing.assert_close(out[s:e], x[s:e] @ w[i])
    indptr = torch.tensor([0, 4, 2**40, 2**41], device=device)
    torch.testing.assert_close(segment_gmm(x, w, indptr=indptr)[4:], x[4:] @ w[1])


@pytest.mark.parametrize("K", [20, 70])
@pytest.mark.parametrize(
    "indptr", [[0, 10, 4, 12], [0, 9, 2, 9], [0, -3, 5, 4], [2, 5, 4, 9], [0, 2**40, 3, 6]], ids=str
)
def test_no_row_belongs_to_two_segments(device, indptr, K, no_debug):
    """An indptr that decreases means what the lengths between its elements mean."""
    x, w, y, _ = make(device, [5, 5, 5], K, tail=3)
    first = indptr[0]
    indptr = torch.tensor(indptr, device=device)
    lens = indptr.diff()
    sizes = lens.clamp(0, 18)
    assert first or torch.equal(segment_gmm(x, w, indptr=indptr), segment_gmm(x, w, lens))
    ends = (first + sizes.cumsum(0)).clamp(max=18).tolist()
    for i, (s, e) in enumerate(zip([first, *ends], ends, strict=False)):
        torch.testing.assert_close(segment_gmm(x, w, indptr=indptr)[s:e], x[s:e] @ w[i])
        dw = segment_tgmm_op(x, y, None, indptr, None, 3, False)
        torch.testing.assert_close(dw[i], x[s:e].T @ y[s:e], rtol=1e-4, atol=1e-4)
    out = torch.full((18, 24), 7.0, device=device)
    segment_gmm(x, w, indptr=indptr, out=out)
    assert (out[ends[-1] :] == 7).all() and (out[:first] == 7).all() and (out[first : ends[-1]] != 7).all()


def test_debug_names_segments_that_do_not_fit(device):
    assert settings.debug, "the tests run with MOE_AITER_DEBUG=1"
    x, w, _, _ = make(device, [4, 4])
    for sizes in ([4, 5], [9, -1]):
        with pytest.raises(ValueError, match=r"must not be negative nor sum to more than 8 rows"):
            segment_gmm(x, w, torch.tensor(sizes, device=device))


def test_two_runs_give_the_same_bits(device):
    x, w, y, lens = make(device, [33, 0, 40, 1], 70, 48, weights=2)
    index = torch.tensor([1, 0, 1, 1], device=device)
    for fn in (
        lambda: segment_gmm(x, w, lens, weight_indices=index),
        lambda: segment_tgmm_op(x, y, lens, None, index, 2, True),
    ):
        assert torch.equal(fn(), fn())


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.no_interpreter
def test_float8_is_multiplied_as_it_is(dtype):
    x, w, _, lens = make("cpu", [3, 0, 4], dtype=dtype)
    with use("torch"):
        out = segment_gmm(x, w, lens)
    expected = gmm_reference(x.float(), w.float(), lens, None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_gradcheck():
    x, w, _, lens = make("cpu", [3, 0, 4, 2], 5, 6, torch.float64, tail=1, weights=2)
    for index in ([1, 0, 1, 0], [1, -1, 1, 1]):
        index = torch.tensor(index)
        inputs = x.requires_grad_(), w.requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, w, index=index: segment_gmm(x, w.mT.mT, lens, weight_indices=index), inputs
        )
    assert torch.autograd.gradcheck(lambda x, w: segment_gmm(x, w, indptr=torch.tensor([0, 4, 9])), [x, w])


def test_weight_gradients_have_the_layout_of_the_weight(device):
    x, w, y, lens = make(device, [3, 0, 4], weights=2)
    for weight in (w, transposed(w)):
        weight = weight.detach().requires_grad_()
        segment_gmm(x, weight, lens, weight_indices=torch.tensor([1, 0, 1], device=device)).backward(y)
        assert weight.grad.stride() == weight.stride()


def test_frozen_weights_cost_nothing(device, monkeypatch):
    x, w, y, lens = make(device, [3, 0, 4])
    calls = []
    monkeypatch.setattr(file, "segment_weight_gradient", lambda *a: calls.append("dw"))
    segment_gmm(x.requires_grad_(), w, lens).backward(y)
    assert calls == [] and w.grad is None and x.grad is not None


def test_compiles_without_graph_breaks(device):
    def fn(x, w, lens):
        return segment_gmm(x, w, lens, weight_indices=lens % 3)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in ([3, 0, 4], [10, 2, 1]):
        x, w, y, lens = make(device, sizes)
        x.requires_grad_()
        expected, got = (torch.autograd.grad(f(x, w, lens), x, y) for f in (fn, compiled))
        torch.testing.assert_close(got, expected)


BAD = {
    "no bounds": (dict(lens=None), ValueError, "either lens or indptr must be given"),
    "both": (dict(indptr=torch.tensor([0, 2, 5])), ValueError, "and not both"),
    "x is not a matrix": (dict(x=torch.zeros(2, 3, 4)), ValueError, r"x must be \(M, K\)"),
    "inner sizes": (dict(w=torch.zeros(2, 32, 6)), ValueError, r"x is \(M, K=4\) but w is \(W, K=32, N\)"),
    "weights": (dict(w=torch.zeros(3, 4, 6)), ValueError, "there are 2 segments but 3 weights and no"),
    "indices": (dict(weight_indices=torch.zeros(3, dtype=torch.int64)), ValueError, r"indices is \(3,\)"),
    "dtypes": (dict(w=torch.zeros(2, 4, 6).half()), TypeError, "x is torch.float32 but w is torch.float16"),
    "integers": (dict(x=torch.zeros(5, 4, dtype=torch.int32)), TypeError, "x must be float16"),
    "float lens": (dict(lens=torch.ones(2)), TypeError, "lens must be int32 or int64"),
    "empty indptr": (dict(lens=None, indptr=torch.zeros(0, dtype=torch.int64)), ValueError, "it is empty"),
    "device": (dict(w=torch.zeros(2, 4, 6, device="meta")), ValueError, "x is on cpu but w is on meta"),
    "lens are a list": (dict(lens=[2, 3]), TypeError, "lens must be a tensor or None, not list"),
    "out shape": (dict(out=torch.zeros(5, 7)), ValueError, r"out must be contiguous \(M, N\) = \(5, 6\)"),
    "out strides": (dict(out=torch.zeros(6, 5).mT), ValueError, r"contiguous .* with the strides \(1, 5\)"),
    "out dtype": (dict(out=torch.zeros(5, 6).half()), TypeError, "torch.float32 but out is torch.float16"),
    "out and gradient": (
        dict(out=torch.zeros(5, 6), x=torch.zeros(5, 4, requires_grad=True)), RuntimeError, "has no gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
@pytest.mark.no_interpreter
def test_bad_input_is_named_and_nothing_is_launched(change, kind, message, monkeypatch):
    monkeypatch.setattr("moe_aiter.op.pick", lambda *_: pytest.fail("launched"))
    good = dict(x=torch.zeros(5, 4), w=torch.zeros(2, 4, 6), lens=torch.tensor([2, 3]))
    with pytest.raises(kind, match=message):
        segment_gmm(**{**good, **change})
    if "out" in change:
        assert not change["out"].any()


@pytest.mark.gpu
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("weights", [3, 1])
@pytest.mark.parametrize("sizes", [[200, 0, 56, 192], [1000, 3000], [128] * 5], ids=str)
def test_dense_segments_that_share_weights(sizes, weights, column_major, no_debug):
    """On a Hopper GPU the grouped product's kernel, with the numbers of weights; else the portable one."""
    device = torch.device("cuda")
    x, w, y, lens = make(device, sizes, 256, 384, torch.bfloat16, tail=100, weights=weights)
    w = transposed(w) if column_major else w
    index = torch.tensor((NUMBERS * 2)[: len(sizes)], device=device)
    for i, rows in enumerate(x[: sum(sizes)].split(sizes)):  # nothing is multiplied there, not even by 0
        rows[:, ::7] = rows[:, ::7] if 0 <= NUMBERS[i] < weights else float("inf")
    inputs = x, w, lens, None, index
    assert_as_good_as_torch(segment_gmm_op, segment_gmm_reference, *inputs)
    assert not segment_gmm(x, w, lens, weight_indices=index)[-100:].any()
    out = torch.full_like(y, 7.0)
    segment_gmm(x, w, indptr=ends(lens), weight_indices=index, out=out)
    assert (out[-100:] == 7).all()
    assert torch.equal(out[:-100], segment_gmm(x, w, lens, weight_indices=index)[:-100])


@pytest.mark.gpu
@pytest.mark.parametrize("K, N", [(4096, 16), (16, 4096), (4096, 64), (512, 512)])
def test_a_graph_follows_the_lengths(K, N, no_debug):
    device = torch.device("cuda")
    x, w, _, lens = make(device, [64, 0, 30, 100], K, N, torch.float16)
    index = torch.tensor([2, 0, 1, 3], device=device)
    out = segment_gmm(x, w, lens, weight_indices=index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = segment_gmm(x, w, lens, weight_indices=index)
    lens.copy_(torch.tensor([0, 150, 44, 0]))
    index.copy_(torch.tensor([1, 1, -1, 0]))
    graph.replay()
    assert_as_good_as_torch(lambda *_: out, segment_gmm_reference, x, w, lens, None, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_products_go_straight_into_their_place(dtype, monkeypatch):
    """No tensor of theirs is made: concatenated, they took twice as long."""
    x, w = torch.randn(12, 8, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype)
    segments = torch.tensor([5, 0, 4]), None, torch.tensor([2, 0, -1])
    monkeypatch.setattr(torch, "cat", None)
    with use("torch"):
        got = segment_gmm(x, w, segments[0], weight_indices=segments[2])
    monkeypatch.undo()
    torch.testing.assert_close(got, segment_gmm_reference(x, w, *segments))
    assert not got[5:].any()
