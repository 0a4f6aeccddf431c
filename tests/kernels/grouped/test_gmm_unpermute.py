"""Product and sum in one op, in any chunks of columns; and the rule that says how many."""

import itertools

import pytest
import torch
from check import assert_as_good_as_torch, error, few, with_gradients

from moe_aiter.bench.problem import SHAPES
from moe_aiter.config import interpret
from moe_aiter.kernels.base import tile
from moe_aiter.kernels.base.sources import by_source
from moe_aiter.kernels.experts.inputs import ExpertInputs, row_bytes
from moe_aiter.kernels.experts.mlp import by_layer, expert_mlp
from moe_aiter.kernels.grouped.gmm import column_slices, gmm_unpermute_add_op, gmm_unpermute_op
from moe_aiter.kernels.rows.merge import merge_plans
from moe_aiter.kernels.rows.permute import ELSEWHERE
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.routing.plan import RoutePlan

from ...references import gmm_unpermute_reference

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
MIB = 2**20
T, K, E, CHOICES = 23, 24, 4, 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_rows", [True, False], ids=["by rows", "by columns"])
@pytest.mark.parametrize("columns", [1, 16, 40, 77])
@pytest.mark.parametrize("blocks", [1, 2, 100])
@pytest.mark.pairwise
@pytest.mark.no_host
def test_chunks(backend, device, monkeypatch, blocks, columns, by_rows, dtype):
    monkeypatch.setattr(tile, "BLOCK", 16)
    order, rank, sizes = sort_by_expert(torch.randint(-1, E, (T, CHOICES), device=device), E)
    x = torch.randn(T * CHOICES, K).to(device, dtype)
    w = torch.randn(E, K, columns).to(device, dtype)
    w = w if by_rows else w.mT.contiguous().mT
    bias, s = torch.randn(E, columns).to(device, dtype), torch.rand(T, CHOICES).to(device)
    most = blocks * 16 * len(x) * x.element_size()
    for b, weights in ((None, None), (bias, s)):
        inputs = x, w, sizes, b, order, rank, weights, most
        assert_as_good_as_torch(gmm_unpermute_op, gmm_unpermute_reference, *inputs)


def windows(device, rows, last_first):
    """The plans of windows of so many rows, in the order in which they are computed."""
    _, rank, sizes = sort_by_expert(torch.randint(-1, E, (T, CHOICES), device=device), E)
    parts = rank.flatten()[None], sizes[None]
    order, ranks, sizes, _ = merge_plans(*parts, CHOICES, 0, E, rows, last_first)
    plans = [RoutePlan(*parts) for parts in zip(order.split(rows), ranks, sizes, strict=True)]
    return plans[::-1] if last_first else plans


def operands(device, dtype, columns):
    tensors = (T * CHOICES, K), (E, K, columns), (E, columns)
    return [torch.randn(shape).to(device, dtype) for shape in tensors], torch.rand(T, CHOICES).to(device)


def of_window(plan, x, w, bias, s):
    return x[: len(plan.order)], w, plan.group_sizes, bias, plan.order, plan.rank, s


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 40, 77])
@pytest.mark.parametrize("rows", [4, 7, 30])
@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.pairwise
@pytest.mark.no_host
def test_add(backend, device, monkeypatch, rows, columns, dtype, last_first):
    """A window is added where a row is ELSEWHERE, and written where none is; a token without rows in the
    window keeps its bits, NaN too."""
    monkeypatch.setattr(tile, "BLOCK", 16)
    plan = windows(device, rows, last_first)[1]
    (x, w, bias), s = operands(device, dtype, columns)
    before = torch.randn(T, columns).to(device, dtype)
    touched, added = (plan.rank >= 0).any(1), (plan.rank == ELSEWHERE.value).any(1)
    before[~touched | ~added] = torch.nan
    for b, weights in ((None, None), (bias, s)):
        inputs = of_window(plan, x, w, b, weights)
        out = before.clone()
        gmm_unpermute_add_op(out, *inputs, 0)
        exact = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
        there = before.nan_to_num()
        want = (there.double() + gmm_unpermute_reference(*exact))[touched]
        torchs = (there.float() + gmm_unpermute_reference(*inputs).float()).to(dtype)[touched]
        assert torch.equal(out[~touched].isnan(), torch.ones_like(out[~touched], dtype=torch.bool))
        # of a single sum torch's error may be far less than the rounding of rows and sum
        assert error(out[touched], want) <= 2 * error(torchs, want) + torch.finfo(dtype).eps


@pytest.mark.parametrize("rows", [1, 7, 30, 100])
def test_all_windows(device, rows):
    """The last window first, and the first window in a pass that adds to sums: the sums of all rows."""
    if device.type == "cpu" and not interpret:
        pytest.skip("only kernels run in passes")
    (x, w, bias), s = operands(device, torch.float32, 40)
    *plans, first = windows(device, rows, True)
    parts, total = x.split(rows), 0

    class Sources:
        def leaving(self, out):
            out.fill_(torch.nan)
            with by_source.set(None):
                for number, plan in enumerate(plans):
                    inputs = of_window(plan, parts[len(plans) - number], w, bias, s)
                    gmm_unpermute_add_op(out, *inputs, 0)
            starts = first.group_sizes.cumsum(0, dtype=torch.int32) - first.group_sizes
            yield first.group_sizes, starts, slice(None), out, True

    with by_source.set(Sources()):
        out = gmm_unpermute_op(*of_window(first, x, w, bias, s), 0)
    for plan, part in zip([first, *plans[::-1]], parts, strict=True):
        exact = (t.double() if t.is_floating_point() else t for t in of_window(plan, part, w, bias, s))
        total = total + gmm_unpermute_reference(*exact)
    assert error(out, total) < 1e-6


@pytest.mark.no_interpreter
def test_add_refuses():
    x, w, sizes = torch.randn(3, 4), torch.randn(2, 4, 5), torch.tensor([1, 2], dtype=torch.int32)
    order, rank = torch.arange(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)[:, None]
    said = r"out must be contiguous, torch.float32 and \(T, N\) = \(3, 5\)"
    for out in (torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(5, 3).mT):
        with pytest.raises(ValueError, match=said):
            gmm_unpermute_add_op(out, x, w, sizes, None, order, rank, None, 0)


@pytest.mark.parametrize(
    "columns, most, widths",
    [
        (1536, 10**9, [1536]),
        (1536, 1000, [768, 768]),
        (1536, 600, [512] * 3),
        (1536, 0, [256] * 6),
        (1300, 1100, [768, 532]),
        (300, 1, [256, 44]),
        (1, 0, [1]),
    ],
)
@pytest.mark.no_interpreter
def test_column_slices(columns, most, widths):
    slices = column_slices(columns, 1, most)
    assert [n.stop - n.start for n in slices] == widths
    ends = [0, *itertools.accumulate(widths)]
    assert [(n.start, n.stop) for n in slices] == list(itertools.pairwise(ends))


def problem(device, H=20, bias=True, dtype=torch.float32):
    shapes = (T, H), (E, 2 * 16, H), (E, 2 * 16), (E, H, 16), (E, H), (T, CHOICES)
    tensors = [(torch.randn(s) * s[-1] ** -0.5).to(device, dtype) for s in shapes]
    if not bias:
        tensors[2] = tensors[4] = None
    return tensors, sort_by_expert(torch.randint(-1, E, (T, CHOICES), device=device), E)


WIDTHS = [(1, True), (300, True), (520, False)]


@pytest.mark.parametrize("H, bias", few(WIDTHS, *WIDTHS[:2], several=True))
def test_the_experts_in_chunks(device, H, bias):
    tensors, plan = problem(device, H, bias)

    def run(chunks):
        def experts(*tensors):
            return by_layer(ExpertInputs(*tensors, *plan, "swiglu", False, True), chunks)

        return with_gradients(experts)(*tensors)

    whole = run(1)
    for chunks in (2, 9):
        for got, want in zip(run(chunks), whole, strict=True):
            assert error(got, want) < 1e-6


def test_chunks_may_be_asked_for(device):
    (x, gate_up, b1, down, b2, s), plan = problem(device, 300)
    biases = dict(gate_up_bias=b1, down_bias=b2)
    whole = expert_mlp(x, gate_up, down, s, plan, **biases)
    assert error(expert_mlp(x, gate_up, down, s, plan, **biases, row_chunks=2), whole) < 1e-6
    for bad, kind in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match="row_chunks must be"):
            expert_mlp(x, gate_up, down, s, plan, **biases, row_chunks=bad)


def large(name, trained=True, **options):
    """The inputs of a benchmark's shape, without memory."""
    shape = SHAPES[name]
    T, H, I, E, k = (  # noqa: E741
        shape.num_tokens, shape.hidden, shape.intermediate, shape.num_experts, shape.top_k,
    )  # fmt: skip

    def new(*size, dtype=torch.bfloat16):
        grad = trained and dtype.is_floating_point
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=grad)

    plan = new(T * k, dtype=torch.int32), new(T, k, dtype=torch.int32), new(E, dtype=torch.int32)
    tensors = new(T, H), new(E, 2 * I, H), None, new(E, H, I), None, new(T, k)
    return ExpertInputs(*tensors, *plan, "swiglu", False, trained)._replace(**options)


def chunks_of(i, limits):
    rows, H = i.order.shape[0], i.x.shape[1]
    return [column_slices(H, 2 * rows, limit) for limit in limits]


def peak(i):
    """MiB by the formulas of `row_bytes`, which it is to know and here are written out again."""
    y, dx = ((n[0].stop - n[0].start) * 2 * len(i.order) for n in chunks_of(i, row_bytes(i, None)))
    out, ddown, dgate_up = (2 * t.numel() for t in (i.x, i.down, i.gate_up))
    a = 2 * len(i.order) * i.down.shape[2]
    z = 2 * a
    late = out + z + ddown + out
    return max(out + z + a + y, out + z + ddown + a, late + dx, late + dgate_up) / MIB


@pytest.mark.parametrize(
    "name, chunks, mib", [("A", (1, 1), 4608), ("B", (2, 3), 648), ("C", (1, 1), 2432), ("D", (1, 1), 4736),
                          ("E", (1, 1), 928)],
)  # fmt: skip
@pytest.mark.no_interpreter
def test_the_rule(name, chunks, mib):
    i = large(name)
    assert tuple(map(len, chunks_of(i, row_bytes(i, None)))) == chunks
    assert peak(i) == mib


def test_the_rule_knows_what_costs_nothing():
    """Frozen weights and gradients that go elsewhere leave less for the rows; inference is not slowed."""
    frozen = large("A")
    frozen.gate_up.requires_grad_(False)
    main = large("A")
    main = main._replace(gate_up_main_grad=main.gate_up)
    for i in (frozen, main):
        assert [len(n) for n in chunks_of(i, row_bytes(i, None))] == [2, 4]
    inference = large("A", trained=False)
    assert [len(n) for n in chunks_of(inference, row_bytes(inference, None))] == [1, 1]
    assert [len(n) for n in chunks_of(inference, row_bytes(inference, 4))] == [4, 4]
