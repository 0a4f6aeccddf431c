"""gmm, tgmm and group_sum, on every backend that can run here."""

import pytest
import torch
from check import few

from moe_aiter import tuning
from moe_aiter.config import interpret, settings
from moe_aiter.kernels.grouped import tgmm as tgmm_module
from moe_aiter.kernels.grouped.gmm import gmm, gmm_op
from moe_aiter.kernels.grouped.tgmm import tgmm, tgmm_accumulate
from moe_aiter.kernels.rows.sums import group_sum
from moe_aiter.op import invalidate_decisions, use

from ...check import assert_as_good_as_torch, with_gradients
from ...references import gmm_reference, group_sum_reference, tgmm_reference
from ...shapes import GROUP_SIZES, LAYOUTS, MATRICES, transposed

TRITON = interpret or torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]


def make(device, sizes, K=20, N=24, dtype=torch.float32, tail=0):
    """x (M, K), w (G, K, N), y (M, N) and the group sizes, with `tail` rows past the last group."""
    M, G = sum(sizes) + tail, len(sizes)
    x, w, y = torch.randn(M, K), torch.randn(G, K, N) / max(K, 1) ** 0.5, torch.randn(M, N)
    return *(t.to(device, dtype) for t in (x, w, y)), torch.tensor(sizes, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
def test_gmm(device, sizes, dtype):
    x, w, _, group_sizes = make(device, sizes, dtype=dtype, tail=3)
    bias = torch.randn(len(sizes), w.shape[2]).to(device, dtype)
    assert_as_good_as_torch(with_gradients(gmm_op), with_gradients(gmm_reference), x, w, group_sizes, bias)
    assert_as_good_as_torch(gmm_op, gmm_reference, x, w, group_sizes, None)


@pytest.mark.parametrize("shape", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shapes_and_layouts(device, shape, layout):
    x, w, y, group_sizes = make(device, [5, 0, 37], *shape)
    bias = torch.randn(3, w.shape[2], device=device)
    x, w, y, bias = (layout(t) for t in (x, w, y, bias))
    few = 5e-7  # where all rows are one, or there is one column, few roundings average out
    assert_as_good_as_torch(gmm_op, gmm_reference, x, w, group_sizes, bias, floor=few)
    assert_as_good_as_torch(plain_tgmm, tgmm_reference, x, y, group_sizes, None, 1, False, floor=few)
    assert_as_good_as_torch(group_sum, group_sum_reference, y, group_sizes, None, 1, None, floor=few)


def plain_tgmm(x, y, group_sizes, order, top_k, columns_first):
    return tgmm(x, y, group_sizes, order, top_k)


@pytest.fixture(params=["first", "as it loads"])
def gathers(request, monkeypatch):
    """Rows are gathered before the product, or by the product."""
    monkeypatch.setattr(tgmm_module, "gathers_first", lambda *_: request.param == "first")
    invalidate_decisions()
    yield
    invalidate_decisions()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.pairwise
def test_tgmm_gathers(device, sizes, dtype, columns_first, gathers):
    top_k = 2 if sum(sizes) % 2 == 0 else 1
    M = sum(sizes)
    tokens = torch.randn(M // top_k, 40).to(device, dtype)
    order = torch.randperm(M, device=device, dtype=torch.int32)
    _, _, y, group_sizes = make(device, sizes, dtype=dtype)
    args = tokens, y, group_sizes, order, top_k, columns_first
    assert_as_good_as_torch(torch.ops.moe_aiter.tgmm, tgmm_reference, *args)
    scale = torch.rand(M, device=device)
    assert_as_good_as_torch(group_sum, group_sum_reference, tokens, group_sizes, order, top_k, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.pairwise
def test_tgmm_gathers_slices_of_columns(device, columns_first, dtype, gathers):
    """Wide rows are gathered in several slices, the last of which is narrower."""
    tokens = torch.randn(16, 600).to(device, dtype)
    order = torch.randperm(32, device=device, dtype=torch.int32)
    _, _, y, group_sizes = make(device, [9, 0, 20, 3], dtype=dtype)
    args = tokens, y, group_sizes, order, 2
    assert_as_good_as_torch(torch.ops.moe_aiter.tgmm, tgmm_reference, *args, columns_first)
    G, K, N = 4, 600, y.shape[1]
    exact = tgmm_reference(tokens.double(), y.double(), *args[2:], False)
    for of_y in (False, True):
        out = torch.ones(G, N, K, device=device).mT if columns_first else torch.ones(G, K, N, device=device)
        rows = y.double() if of_y else tokens.double()[order.long() // 2]
        sums = torch.full((G, rows.shape[1]), float("nan"), device=device)
        torch.ops.moe_aiter.tgmm_into(out, *args, True, sums, of_y)
        torch.testing.assert_close(out.double(), 1 + exact, rtol=1e-4, atol=1e-4)
        expected = torch.stack([part.sum(0) for part in rows.split(group_sizes.tolist())])
        torch.testing.assert_close(sums.double(), expected, rtol=1e-4, atol=1e-4)


def test_columns_far_apart(device):
    """Of operands and results by columns, more than 2**31 numbers apart; their memory is hardly touched."""
    sizes, far = torch.tensor([5, 3], device=device), 2**26

    def by_columns(rows: torch.Tensor) -> torch.Tensor:
        columns = rows.shape[1]
        out = torch.empty(columns * far, dtype=rows.dtype, device=device).as_strided((8, columns), (1, far))
        return out.copy_(rows)

    x, w, y, _ = make(device, [5, 3], 40, 24, torch.float16)
    with tuning.choose(lambda key: tuning.Config(16, 64, 64, 1, 4, 2)):
        for lhs, rhs in ((by_columns(x), y), (y, by_columns(x))):
            assert_as_good_as_torch(plain_tgmm, tgmm_reference, lhs, rhs, sizes, None, 1, False)
        assert_as_good_as_torch(gmm_op, gmm_reference, by_columns(x), w, sizes, None)
        out = by_columns(torch.zeros(8, 40, device=device, dtype=torch.float16))
        gmm(y, w.mT, sizes, existing_out=out)
        assert_as_good_as_torch(lambda *_: out.contiguous(), gmm_reference, y, w.mT, sizes, None)


def test_an_order_that_nobody_wrote_to_its_end(device, no_debug, gathers):
    """Rows of no group are not counted, so that their numbers may be any."""
    order = torch.tensor([3, 1, 0, 2, 2**28, -(2**28)], dtype=torch.int32, device=device)
    x, _, y, sizes = make(device, [2, 2], tail=2)
    if TRITON:
        with use("triton"):
            got = torch.ops.moe_aiter.tgmm(x, y, sizes, order, 1, False)
        exact = tgmm_reference(x.double(), y.double(), sizes, order.clamp(0, 5), 1, False)
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(32, 94), (32, 65), (65, 32), (48, 65), (64, 127), (3, 257)], ids=str)
def test_few_rows_of_odd_widths(dtype, widths, columns_first):
    """Products of fewer rows than a step takes, whose operands are not loaded 16 bytes at a time."""
    x, _, y, group_sizes = make("cuda", [1, 5, 0, 2], *widths, dtype=dtype)
    for order in (None, torch.randperm(8, device="cuda", dtype=torch.int32)):
        args = x, y, group_sizes, order, 1, columns_first
        with use("triton"):
            assert_as_good_as_torch(torch.ops.moe_aiter.tgmm, tgmm_reference, *args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K, N", [(1, 54), (54, 1), (1, 1), (3, 5)])
def test_axes_of_one_number_in_torch(K, N, dtype):
    """A stride of such an axis can be any number, which cuBLAS may refuse."""
    x, w, y, group_sizes = make("cuda", [1, 5, 0, 2], K, N, dtype=dtype)
    order = torch.arange(8, device="cuda", dtype=torch.int32)
    with use("torch"):
        for by_columns in (False, True):
            rhs = w.mT.contiguous().mT if by_columns else w
            assert_as_good_as_torch(gmm_op, gmm_reference, x, rhs, group_sizes, None)
            args = x, y, group_sizes, order, 1, by_columns
            assert_as_good_as_torch(torch.ops.moe_aiter.tgmm, tgmm_reference, *args)
        out = torch.ones(4, K, N, device="cuda", dtype=dtype)
        tgmm_accumulate(out, x, y, group_sizes)
        assert out.isfinite().all()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_accumulation_rounds_once(device, out_dtype):
    x, _, y, group_sizes = make(device, [9, 0, 30], dtype=DTYPES[-1])
    before = torch.randn(3, 20, 24, device=device).to(out_dtype)
    out = transposed(before.clone())
    tgmm_accumulate(out, x, y, group_sizes)
    exact = before.double() + tgmm_reference(x.double(), y.double(), group_sizes, None, 1, False)
    torch.testing.assert_close(
        out.double(), exact.to(out_dtype).double(), rtol=2 * torch.finfo(out_dtype).eps, atol=1e-5
    )
    assert torch.equal(out[1], before[1]), "a group without rows adds nothing"


@pytest.mark.parametrize(
    "sizes", [[50, 0, 20], [-4, 30, 5], [0, 0, 99], [2**30, 2**30, 2**30], [2**62, 2**62, 2**62]], ids=str
)
def test_sizes_that_do_not_add_up_are_clamped(device, sizes, no_debug):
    x, w, y, _ = make(device, [40])
    w, group_sizes = w.expand(3, -1, -1), torch.tensor(sizes, device=device)
    ends = group_sizes.clamp(0, 40).cumsum(0).clamp(max=40).tolist()
    covered = (torch.arange(40, device=device) < ends[-1])[:, None]
    torch.testing.assert_close(gmm(x, w, group_sizes), (x @ w[0]) * covered, rtol=1e-4, atol=1e-4)
    starts = [0, *ends[:-1]]
    expected = torch.stack([x[s:e].T @ y[s:e] for s, e in zip(starts, ends, strict=True)])
    torch.testing.assert_close(tgmm(x, y, group_sizes), expected, rtol=1e-4, atol=1e-4)


def test_debug_names_sizes_that_do_not_add_up(device):
    assert settings.debug, "the tests run with MOE_AITER_DEBUG=1"
    x, w, _, _ = make(device, [4, 4])
    for sizes in ([4, 5], [9, -1]):
        with pytest.raises(
            ValueError, match=r"group_sizes \[.*\] must not be negative nor sum to more than 8 rows"
        ):
            gmm(x, w, torch.tensor(sizes, device=device))


@pytest.mark.parametrize("K, N", [(0, 8), (8, 0)])
def test_no_columns(device, K, N):
    x, w, y, group_sizes = make(device, [3, 5], K, N)
    assert torch.equal(gmm(x, w, group_sizes), x.new_zeros(8, N))
    assert torch.equal(tgmm(x, y, group_sizes), x.new_zeros(2, K, N))


def test_nothing_outside_a_group_is_read(device):
    """A NaN in one group's rows reaches that group's results and no other's; past the end it reaches none."""
    x, w, y, group_sizes = make(device, [7, 5, 6], tail=4)
    x[8], x[18:] = float("nan"), float("nan")
    out, dw = gmm(x, w, group_sizes), tgmm(x, y, group_sizes)
    assert out[8].isnan().all() and dw[1].isnan().all()
    assert not out[torch.arange(22) != 8].isnan().any() and not dw[[0, 2]].isnan().any()
    assert torch.equal(out[18:], torch.zeros_like(out[18:]))


SOME = [(352, 2056), (64, 256), (72, 264), (40, 200), (7, 259)]


@pytest.mark.skipif(not TRITON, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2], ids=str)
@pytest.mark.parametrize("rows_last", [False, True])
@pytest.mark.parametrize("K, N", few(SOME, *SOME[1:], several=True), ids=str)
def test_programs_that_take_many_tiles(K, N, rows_last, dtype):
    """With large tiles and short sums, one loop has all the steps of a program's tiles, on a GPU.

    The last column tile begins earlier; groups end anywhere; what lies beside a group's rows is not read.
    """
    sizes = [300, 0, 1, 129, 0, 255, 128] * (1 if interpret else 3)
    device = "cpu" if interpret else "cuda"
    if not interpret and torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 224 * 1024:
        pytest.skip("the tile needs 224 KiB of shared memory")
    x, w, _, group_sizes = make(device, sizes, K, N, dtype, tail=200)
    w = transposed(w) if rows_last else w
    x[sum(sizes) :] = float("nan")
    large = tuning.choose(lambda key: tuning.Config(128, 256, 64, 8, 8, 4) if key.op == "gmm" else None)
    expected = gmm_reference(x.double(), w.double(), group_sizes, None)
    end = sum(sizes)
    with large, use("triton"):
        runs = [[gmm_op(x, w, group_sizes, None, None, (), n) for _ in range(2)] for n in (0, 5)]
    for out, again in runs:
        error = (out[:end].double() - expected[:end]).norm() / expected[:end].norm()
        assert error < torch.finfo(dtype).eps / 2
        assert torch.equal(out, again) and not out[end:].any()


def test_two_runs_give_the_same_bits(device):
    x, w, y, group_sizes = make(device, [33, 0, 70, 1], 64, 48)
    for fn in (
        lambda: gmm(x, w, group_sizes),
        lambda: tgmm(x, y, group_sizes),
        lambda: group_sum(y, group_sizes),
    ):
        assert torch.equal(fn(), fn())


def test_gradcheck():
    x, w, _, group_sizes = make("cpu", [3, 0, 4], 5, 6, torch.float64, tail=1)
    bias = torch.randn(3, 6, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (x, w, bias)]
    assert torch.autograd.gradcheck(lambda x, w, bias: gmm(x, w, group_sizes, bias=bias), inputs)
    assert torch.autograd.gradcheck(
        lambda x, w: gmm(x, w.mT, group_sizes), [x, transposed(w.detach()).mT.requires_grad_()]
    )


def test_weight_gradients_have_the_layout_of_the_weight(device):
    x, w, y, group_sizes = make(device, [3, 0, 4])
    for weight in (w, transposed(w)):
        weight = weight.detach().requires_grad_()
        gmm(x, weight, group_sizes).backward(y)
        assert weight.grad.stride() == weight.stride()


def test_frozen_inputs_cost_nothing(device, monkeypatch):
    x, w, y, group_sizes = make(device, [3, 0, 4])
    calls = []
    monkeypatch.setattr("moe_aiter.kernels.grouped.gmm.weight_gradient", lambda *a: calls.append("dw"))
    gmm(x.requires_grad_(), w, group_sizes).backward(y)
    assert calls == [] and w.grad is None and x.grad is not None


def test_compiles_without_graph_breaks(device):
    compiled = torch.compile(gmm, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in ([3, 0, 4], [10, 2, 1]):
        x, w, y, group_sizes = make(device, sizes)
        x.requires_grad_()
        expected, got = (torch.autograd.grad(fn(x, w, group_sizes), x, y) for fn in (gmm, compiled))
        torch.testing.assert_close(got, expected)


@pytest.mark.skipif(not TRITON, reason="needs a GPU or TRITON_INTERPRET=1")
def test_triton_is_what_ran(device):
    if device.type == "cpu" and not interpret:
        pytest.skip("the CPU runs the reference")
    x, w, _y, group_sizes = make(device, [3, 0, 14])
    with use("triton"):
        torch.testing.assert_close(
            gmm(x, w, group_sizes), gmm_reference(x, w, group_sizes, None), rtol=1e-4, atol=1e-4
        )
    with use("triton"), pytest.raises(LookupError, match=r"gmm: no triton backend for torch.float64"):
        gmm(x.double(), w.double(), group_sizes)


BAD = {
    "x is not a matrix": (
        dict(lhs=torch.zeros(2, 3, 4)),
        ValueError,
        r"lhs must be \(M, K\), but it has shape \(2, 3, 4\)",
    ),
    "inner sizes": (
        dict(rhs=torch.zeros(2, 32, 6)),
        ValueError,
        r"lhs is \(M, K=4\) but rhs is \(G, K=32, N\)",
    ),
    "number of groups": (
        dict(group_sizes=torch.ones(3, dtype=torch.int32)),
        ValueError,
        r"group_sizes is \(3,\) but rhs is \(G=2",
    ),
    "dtypes": (
        dict(rhs=torch.zeros(2, 4, 6, dtype=torch.float16)),
        TypeError,
        "lhs is torch.float32 but rhs is torch.float16",
    ),
    "integers": (dict(lhs=torch.zeros(5, 4, dtype=torch.int32)), TypeError, "lhs must be float16"),
    "float sizes": (
        dict(group_sizes=torch.ones(2)),
        TypeError,
        "group_sizes must be int32 or int64, not torch.float32",
    ),
    "bias shape": (dict(bias=torch.zeros(6)), ValueError, r"bias must be floating \(G=2, N=6\)"),
    "bias dtype": (dict(bias=torch.zeros(2, 6).to(torch.float8_e4m3fn)), ValueError, "bias must be floating"),
    "device": (dict(rhs=torch.zeros(2, 4, 6, device="meta")), ValueError, "lhs is on cpu but rhs is on meta"),
    "not a tensor": (dict(lhs=[[1.0]]), TypeError, "lhs must be a tensor, not list"),
    "sizes are a list": (dict(group_sizes=[2, 3]), TypeError, "group_sizes must be a tensor, not list"),
    "bias is a list": (dict(bias=[1.0]), TypeError, "bias must be a tensor or None, not list"),
}


@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
@pytest.mark.no_interpreter
def test_bad_input_is_named(change, kind, message):
    good = dict(
        lhs=torch.zeros(5, 4),
        rhs=torch.zeros(2, 4, 6),
        group_sizes=torch.tensor([2, 3], dtype=torch.int32),
        bias=None,
    )
    with pytest.raises(kind, match=message):
        gmm(**{**good, **change})


def test_bad_outputs_are_named():
    x, y, sizes = torch.zeros(5, 4), torch.zeros(5, 3), torch.tensor([2, 3])
    with pytest.raises(ValueError, match="out is expanded: its elements must not share memory"):
        tgmm_accumulate(torch.zeros(1, 4, 3).expand(2, -1, -1), x, y, sizes)
    with pytest.raises(ValueError, match="out has strides that overlap: its elements must not share memory"):
        tgmm_accumulate(torch.zeros(60).as_strided((2, 4, 3), (11, 3, 1)), x, y, sizes)
    with pytest.raises(ValueError, match="existing_out has strides that overlap"):
        gmm(x, torch.zeros(2, 4, 3), sizes, existing_out=torch.zeros(20).as_strided((5, 3), (1, 1)))
    with pytest.raises(ValueError, match=r"out must be floating \(G, K, N\) = \(2, 4, 3\)"):
        tgmm_accumulate(torch.zeros(2, 3, 4), x, y, sizes)


def test_bad_rows_are_named():
    x, y, sizes = torch.zeros(5, 4), torch.zeros(6, 3), torch.tensor([2, 3])
    with pytest.raises(TypeError, match="scale must be a tensor or None, not list"):
        group_sum(x, sizes, scale=[1.0] * 5)
    with pytest.raises(ValueError, match=r"x is \(5, K\) but it takes 6 rows"):
        tgmm(x, y, sizes)
    with pytest.raises(ValueError, match=r"order is \(4,\) but there are 6 rows"):
        tgmm(x, y, sizes, torch.arange(4), 1)
    with pytest.raises(ValueError, match=r"x is \(T=2, K\) for top_k=2, 4 rows, but order is \(5,\)"):
        tgmm(x[:2], y[:5], sizes, torch.arange(5), 2)
    for out in (torch.zeros(2, 4, 4), torch.zeros(2, 4, 3).to(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="out must be floating"):
            tgmm_accumulate(out, x, y[:5], sizes)


def test_tgmm_says_that_it_has_no_gradient(device):
    x, _, y, group_sizes = make(device, [3, 0, 4])
    with pytest.raises(RuntimeError, match="tgmm has no gradient"):
        tgmm(x.requires_grad_(), y, group_sizes).sum().backward()
