"""The Hopper kernels: as good as plain torch, and nothing written outside of their groups."""

import functools

import pytest
import torch
from check import assert_as_good_as_torch, fits, of_groups
from shapes import KINDS

from moe_aiter import tuning
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.experts.down import expert_down_grad_op, expert_down_grad_over_z_op
from moe_aiter.kernels.experts.mlp import expert_mlp
from moe_aiter.kernels.experts.up import expert_up_op, expert_z_op
from moe_aiter.kernels.grouped.gmm import gmm_op
from moe_aiter.kernels.grouped.tgmm import tgmm_into_op, tgmm_op
from moe_aiter.kernels.hopper import MAX_GROUPS, is_hopper
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use
from moe_aiter.tuning.candidates import HOPPER_TILES, candidates

from ...references import expert_down_grad_reference, expert_up_reference, gmm_reference, tgmm_reference

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.gpu
SIZES = {  # rows of each group; what is left of 1000 rows belongs to none
    "ragged": [129, 0, 1, 64, 63, 300, 128, 255, 0, 60],
    "some rows in no group": [100, 0, 5, 333],
    "one group": [1000],
    "no rows in a group": [0, 0, 0],
    "many": [7] * 140,
    "256": [0, 7] * 128,
    "more than are ranked": [3] * 300,
    "equals and one that is large": [40, 40, 600, 40, 40, 0, 40, 40],
}
ROWS, TOP_K = 1000, 4
DTYPES = (torch.bfloat16, torch.float16)
EXPERTS = {  # H, I
    "even": (512, 256),
    "tails": (192, 320),
    "narrow": (64, 64),
    "long": (1024, 128),
    "gpt-oss": (2880, 2880),
    "half of gpt-oss": (2880, 1440),
    "eights": (1000, 360),
    "least": (8, 8),
}


@pytest.fixture(autouse=True)
def hopper():
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    with use("hopper"):
        yield


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=CUDA).to(dtype)


def stored(layout, *shape, dtype=torch.bfloat16):
    """Weights (G, A, B), stored by rows or by columns."""
    g, a, b = shape
    return randn(g, a, b, dtype=dtype) if layout == "rows" else randn(g, b, a, dtype=dtype).mT


def group_sizes(name):
    return torch.tensor(SIZES[name], dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("K, N", [(64, 8), (512, 256), (576, 520), (128, 1032), (8, 8), (1000, 360)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.pairwise
def test_gmm(sizes, K, N, layout, dtype):
    sizes = group_sizes(sizes)
    w = stored(layout, len(sizes), N, K, dtype=dtype).mT
    x, bias = randn(ROWS, K, dtype=dtype), randn(len(sizes), N, dtype=dtype)
    assert fits("gmm", x, w, sizes, bias)
    assert_as_good_as_torch(gmm_op, gmm_reference, x, w, sizes, None)
    assert_as_good_as_torch(gmm_op, gmm_reference, x, w, sizes, bias)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("n", [slice(0, 256), slice(256, 512), slice(512, 520)], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_gmm_of_some_columns(sizes, n, layout):
    """The same bits as in the whole product: the weights are a view of larger ones."""
    sizes = group_sizes(sizes)
    w = randn(len(sizes), 520, 192).mT if layout == "rows" else randn(len(sizes), 192, 520)
    x, bias = randn(ROWS, 192), randn(len(sizes), 520)
    assert fits("gmm", x, w[:, :, n], sizes, bias[:, n])
    whole = gmm_op(x, w, sizes, bias)
    assert torch.equal(gmm_op(x, w[:, :, n], sizes, bias[:, n]), whole[:, n])


VIEWS = {  # of weights (G, 64, 128) or of their transposes
    "one, any stride": lambda: randn(64, 128, 1).permute(2, 0, 1),
    "the first of several": lambda: randn(3, 64, 128)[:1],
    "one of a longer row": lambda: randn(64 * 128 + 4).as_strided((1, 64, 128), (4, 128, 1)),
    "each second": lambda: randn(9, 64, 128)[::2],
    "some rows and columns": lambda: randn(5, 80, 160)[:, 8:72, 16:144],
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_weights(view, turned):
    w = VIEWS[view]().mT if turned else VIEWS[view]()
    G, A, B = w.shape
    order, rank, sizes = sort_by_expert(torch.randint(0, G, (250, TOP_K), device=CUDA), G)
    plan, act, s = (order, rank, sizes), KINDS[0], torch.rand(250, TOP_K, device=CUDA)
    up = randn(250, B), w, None, *plan, *act, True, 0, None
    grads = randn(250, A), randn(1000, 2 * B), w, s, *plan, *act, True
    for op, kernel, reference, inputs in (
        ("gmm", gmm_op, gmm_reference, (randn(1000, A), w, sizes, None)),
        ("expert_up", expert_up_op, expert_up_reference, up),
        ("expert_down_grad", expert_down_grad_op, rounded(expert_down_grad_reference), grads),
    ):
        assert fits(op, *inputs)
        assert_as_good_as_torch(kernel, reference, *inputs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [MAX_GROUPS - 1, MAX_GROUPS])
def test_gmm_of_most_groups(groups, bias):
    sizes = torch.randint(0, 4, (groups,), device=CUDA)
    x, w, b = randn(3 * groups, 64), randn(groups, 64, 128), randn(groups, 128) if bias else None
    assert fits("gmm", x, w, sizes, b)
    assert not fits("gmm", x, w.repeat(2, 1, 1), sizes.repeat(2), b)
    assert_as_good_as_torch(gmm_op, gmm_reference, x, w, sizes, b)


@pytest.mark.parametrize(
    "sizes", [[500, 0, 900], [-4, 300, 5], [0, 0, 1001], [2**30] * 3, [2**62] * 3], ids=str
)
def test_sizes_that_do_not_add_up_are_clamped(sizes, no_debug):
    x, w, bias = randn(ROWS, 128), randn(3, 128, 320), randn(3, 320)
    clamped, left = [], ROWS
    for size in sizes:
        clamped.append(min(max(size, 0), left))
        left -= clamped[-1]
    out = gmm_op(x, w, torch.tensor(sizes, device=CUDA), bias)
    assert torch.equal(out, gmm_op(x, w, torch.tensor(clamped, dtype=torch.int32, device=CUDA), bias))
    assert not out[ROWS - left :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("K, N", [(64, 8), (512, 256), (200, 520)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.pairwise
def test_tgmm(sizes, K, N, gather, columns_first, dtype):
    sizes, y = group_sizes(sizes), randn(ROWS, N, dtype=dtype)
    order = torch.randperm(ROWS, device=CUDA).int() if gather else None
    top_k = TOP_K if gather else 1
    x = randn(ROWS // top_k, K, dtype=dtype)
    inputs = x, y, sizes, order, top_k, columns_first
    assert fits("tgmm", *inputs)
    assert_as_good_as_torch(tgmm_op, tgmm_reference, *inputs)


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K, N", [(64, 8), (256, 520)])
def test_tgmm_accumulates(K, N, dtype, columns_first):
    sizes, y, order = group_sizes("ragged"), randn(ROWS, N), torch.randperm(ROWS, device=CUDA).int()
    x, before = (
        randn(ROWS // TOP_K, K),
        randn(len(sizes), *((N, K) if columns_first else (K, N)), dtype=dtype),
    )

    def add(before, x, y):
        out = before.clone()
        tgmm_into_op(out.mT if columns_first else out, x, y, sizes, order, TOP_K)
        return out

    def reference(before, x, y):
        return before + tgmm_reference(x, y, sizes, order, TOP_K, columns_first).to(before.dtype)

    assert_as_good_as_torch(add, reference, before, x, y)


def test_a_token_that_nobody_sums_may_hold_anything():
    """Rows past a group's end are zeros in shared memory, whatever row 0 holds."""
    sizes, order = group_sizes("ragged"), torch.arange(ROWS, device=CUDA).int()
    x, y = randn(ROWS, 128), randn(ROWS, 128)
    x[0], y[-1] = float("nan"), float("inf")
    sizes[-1] -= 1
    out = tgmm_op(x, y, sizes, order, 1, False)
    assert out[0].isnan().all() and out[1:].isfinite().all()


def plan(ids):
    return dict(zip(("order", "rank", "sizes"), sort_by_expert(ids, 9), strict=True))


def some_ids(T=250):
    """Choices that leave an expert out and drop some."""
    ids = torch.randint(-1, 8, (T, TOP_K), device=CUDA)
    return torch.where(ids == 3, 2, ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", EXPERTS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.pairwise
def test_expert_up(layout, shape, kind, dtype):
    (H, I), p = EXPERTS[shape], plan(some_ids())  # noqa: E741
    parts = get_activation(kind[0]).projections
    x, w, bias = (
        randn(250, H, dtype=dtype),
        stored(layout, 9, parts * I, H, dtype=dtype) * H**-0.5,
        randn(9, parts * I, dtype=dtype),
    )
    for b, save_z in ((None, True), (bias, True), (bias, False)):
        inputs = x, w, b, p["order"], p["rank"], p["sizes"], *kind, save_z, 0, None
        assert fits("expert_up", *inputs)
        ops = (of_groups(op, p["sizes"]) for op in (expert_up_op, expert_up_reference))
        assert_as_good_as_torch(*ops, *inputs)
        if save_z:
            n = int(p["sizes"].sum())
            assert torch.equal(expert_z_op(*inputs[:8])[:n], expert_up_op(*inputs)[0][:n])


def rounded(reference):
    """The reference with dz and s * a in the dtype of z, as the op stores them."""

    def run(dout, z, *rest):
        dz, a, ds = reference(dout, z, *rest)
        return dz.to(z.dtype), a.to(z.dtype), ds

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", EXPERTS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.pairwise
def test_expert_down_grad(layout, shape, kind, dtype):
    (H, I), p = EXPERTS[shape], plan(some_ids())  # noqa: E741
    parts = get_activation(kind[0]).projections
    dout, z, w = (
        randn(250, H, dtype=dtype),
        3 * randn(1000, parts * I, dtype=dtype),  # some beyond the limits of swiglu_oai
        stored(layout, 9, H, I, dtype=dtype) * H**-0.5,
    )
    s = torch.rand(250, TOP_K, device=CUDA)
    for need_a in (True, False):
        inputs = dout, z, w, s, p["order"], p["rank"], p["sizes"], *kind, need_a
        assert fits("expert_down_grad", *inputs)
        ours = of_groups(expert_down_grad_op, p["sizes"])
        reference = of_groups(rounded(expert_down_grad_reference), p["sizes"])
        assert_as_good_as_torch(ours, reference, *inputs)
        over = z.clone()
        over_z = of_groups(lambda *given: (given[1], *expert_down_grad_over_z_op(*given)), p["sizes"])
        assert all(map(torch.equal, ours(*inputs), over_z(dout, over, *inputs[2:])))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_nothing_of_other_experts_is_read(layout, kind):
    """Widths that are no whole number of blocks, beside experts without rows whose weights are NaN."""
    p, parts = (
        plan(2 * torch.randint(0, 4, (250, TOP_K), device=CUDA) + 1),
        get_activation(kind[0]).projections,
    )
    H, I = 72, 200  # noqa: E741
    up, down = stored(layout, 9, parts * I, H), stored(layout, 9, H, I)
    up[::2] = down[::2] = float("nan")
    sizes, order, rank, s = p["sizes"], p["order"], p["rank"], torch.rand(250, TOP_K, device=CUDA)
    for op, inputs in (
        (expert_up_op, (randn(250, H), up, None, order, rank, sizes, *kind, True, 0, None)),
        (
            expert_down_grad_op,
            (randn(250, H), randn(1000, parts * I), down, s, order, rank, sizes, *kind, True),
        ),
        (gmm_op, (randn(1000, H), up.mT, sizes, None)),
        (gmm_op, (randn(1000, I), down.mT, sizes, None)),
        (gmm_op, (randn(1000, parts * I), up, sizes, None)),
    ):
        outs = op(*inputs)
        for out in outs if isinstance(outs, tuple) else (outs,):
            assert out.isfinite().all()


@pytest.mark.parametrize("dropped", ["some", "all"])
@pytest.mark.parametrize(
    "kind, experts", [(k, 9) for k in KINDS] + [(KINDS[0], e) for e in (1, 256, 300, MAX_GROUPS)], ids=str
)
def test_rows_in_no_group_are_not_written(kind, experts, dropped):
    """They keep the NaN of fresh memory, whatever the bias, z and the first choice's weight hold."""
    ids = torch.randint(-1, experts if dropped == "some" else 0, (250, TOP_K), device=CUDA)
    ids[0, 0] = -1
    order, rank, sizes = sort_by_expert(ids, experts)
    n, parts = int(sizes.sum()), get_activation(kind[0]).projections
    x, dout, s = randn(250, 64), randn(250, 64), torch.rand(250, TOP_K, device=CUDA)
    w, bias = randn(experts, parts * 320, 64) / 8, randn(experts, parts * 320)
    down = randn(experts, 64, 320) / 8

    inputs = x, w, bias, order, rank, sizes, *kind, True, 0, None
    assert fits("expert_up", *inputs)
    ours, reference = (of_groups(op, sizes) for op in (expert_up_op, expert_up_reference))
    assert_as_good_as_torch(ours, reference, *inputs)
    z, a = expert_up_op(*inputs)
    assert z[n:].isnan().all() and a[n:].isnan().all()

    s[0, 0] = z[n:] = float("nan")
    inputs = dout, z, down, s, order, rank, sizes, *kind, True
    assert fits("expert_down_grad", *inputs)
    dz, a, ds = expert_down_grad_op(*inputs)
    assert dz[n:].isnan().all() and a[n:].isnan().all() and not ds[rank < 0].any()
    assert dz[:n].isfinite().all() and a[:n].isfinite().all() and ds.isfinite().all()


def step(
    ids, kind=("swiglu", False), dtype=torch.bfloat16, H=256, I=192, seed=0, layout="rows", **options  # noqa: E741
):  # fmt: skip
    """Output and gradients of the experts for these choices."""
    torch.manual_seed(seed)
    x, gate_up, down = (
        randn(len(ids), H, dtype=dtype),
        stored(layout, 9, 2 * I, H, dtype=dtype) / 16,
        stored(layout, 9, H, I, dtype=dtype) / 14,
    )
    s = torch.rand(ids.shape, device=CUDA)
    biases = randn(9, 2 * I, dtype=dtype), randn(9, H, dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, s, *biases)]
    act = dict(zip(("activation", "interleaved", "gate_up_bias", "down_bias"), (*kind, *biases), strict=True))
    out = expert_mlp(*leaves[:4], sort_by_expert(ids, 9), **act, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, randn(*out.shape, dtype=dtype))


@pytest.mark.parametrize("kind", [("swiglu", False), ("swiglu", True), ("swiglu_oai", True)], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("H, I", [(256, 192), (1000, 360)])
def test_the_whole_step_agrees_with_the_portable_tier(H, I, layout, kind):  # noqa: E741
    ids = some_ids(777)
    ours = step(ids, kind, H=H, I=I, layout=layout)
    with use("triton"):
        theirs = step(ids, kind, H=H, I=I, layout=layout)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2 * b.float().abs().max().item())


def test_chunks_of_rows_give_the_same_bits():
    ids = some_ids(777)
    whole = step(ids, H=832, row_chunks=1)
    for chunks in (2, 4):
        parts = step(ids, H=832, row_chunks=chunks)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("H, I", [(256, 192), (1000, 360)])
def test_two_runs_give_the_same_bits(H, I, layout):  # noqa: E741
    ids = some_ids(3000)
    first = step(ids, H=H, I=I, layout=layout)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, step(ids, H=H, I=I, layout=layout), strict=True))


@pytest.mark.parametrize("tile", range(max(map(len, HOPPER_TILES.values()))))
def test_the_walk_changes_no_bits(tile):
    """Of any tile, with more tiles than there are SMs."""

    def choice(key, walk):
        found = candidates(key.op)
        return found[(2 * tile + walk) % len(found)] if key.op in HOPPER_TILES else None

    ids, runs = some_ids(3000), []
    for walk in (0, 1):
        with tuning.choose(functools.partial(choice, walk=walk)):
            runs.append(step(ids, H=832))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    "op, case",
    [
        ("gmm", "K=70"),
        ("gmm", "strided"),
        ("gmm", "one weight"),
        ("gmm", "one row"),
        ("tgmm", "N=12"),
        ("gmm", "float32"),
    ],
)
def test_what_does_not_fit_runs_on_the_portable_tier(op, case):
    sizes, K, N = group_sizes("ragged"), 70 if case == "K=70" else 128, 12 if case == "N=12" else 64
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    x, y = randn(ROWS, K, dtype=dtype), randn(ROWS, N, dtype=dtype)
    x = randn(K, ROWS, dtype=dtype).T if case == "strided" else x
    x = x[:1].expand(x.shape) if case == "one row" else x
    w = randn(len(sizes), K, N, dtype=dtype)
    w = w[:1].expand(w.shape) if case == "one weight" else w
    fn, reference, inputs = {
        "gmm": (gmm_op, gmm_reference, (x, w, sizes, None)),
        "tgmm": (tgmm_op, tgmm_reference, (x, y, sizes, None, 1, False)),
    }[op]
    with pytest.raises(LookupError):
        fn(*inputs)
    with use("auto"):
        assert_as_good_as_torch(fn, reference, *inputs)


def test_a_group_alone_writes_only_its_own_rows():
    """The other groups lose their rows to the tail, which becomes zeros: no tile reaches beyond its group."""
    sizes = group_sizes("ragged")
    x, w = randn(ROWS, 128), randn(len(sizes), 128, 256)
    whole = gmm_op(x, w, sizes, None)
    for g, (end, n) in enumerate(zip(sizes.cumsum(0).tolist(), sizes.tolist(), strict=True)):
        alone = torch.zeros_like(sizes)
        alone[g] = n
        out = gmm_op(x[end - n :].contiguous(), w, alone, None)
        assert torch.equal(out[:n], whole[end - n : end]) and not out[n:].any()
