"""Products that take the rows of one source of tokens after the other have the bits of those of all rows."""

import pytest
import torch
from check import error

from moe_aiter.config import interpret
from moe_aiter.kernels.base.sources import by_source
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import by_layer
from moe_aiter.kernels.grouped.gmm import GroupedIntoInputs, fill_gmm_into, gmm_into_op
from moe_aiter.kernels.rows.merge import merge_plans
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use
from moe_aiter.routing.plan import RoutePlan

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16]
TIERS = ["triton"] if interpret else ["triton", "hopper"]
SOURCES, K, E = 3, 2, 6
T, H, I = (12, 32, 32) if interpret else (24, 64, 64)  # noqa: E741  T: tokens of each source
tiers = pytest.mark.parametrize("tier", TIERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def kernels(device):
    if device.type == "cpu" and not interpret:
        pytest.skip("only kernels take rows in passes: they need a GPU or the interpreter")


class Sources:
    """All tokens are there.  The sums of each source are put together in `sums`, and other rows are NaN."""

    in_turn = True

    def __init__(self, spans):
        self.starts, self.sizes = spans[..., :E]
        self.passes = 0

    def arriving(self):
        for source in (1, 2, 0):
            self.passes += 1
            yield self.sizes[source], self.starts[source]

    def leaving(self, out):
        for source in (2, 0, 1):
            here = slice(source * T, (source + 1) * T)
            apart = torch.full_like(out[here], float("nan"))
            yield self.sizes[source], self.starts[source], here, apart, False
            self.passes += 1
            out[here] = apart


def routing(device, kind):
    """The plan of all sources' choices, and its spans.  Some choices are dropped, or all of the second
    source's, or those of no row of a window."""
    ids = torch.randint(-1, E, (SOURCES * T, K), device=device)
    ids = ids.masked_fill(ids == 2, 1)
    if kind == "a source without rows":
        ids[T : 2 * T] = -1
    alone = [sort_by_expert(part, E) for part in ids.chunk(SOURCES)]
    ranks, sizes = torch.stack([a[1].flatten() for a in alone]), torch.stack([a[2] for a in alone])
    rows = 2 * T if kind == "a window" else SOURCES * T * K
    order, ranks, sizes, spans = merge_plans(ranks, sizes, K, 0, E, rows, True)
    return RoutePlan(order[:rows], ranks[0], sizes[0]), spans[0]


@tiers
@dtypes
@pytest.mark.parametrize("kind", ["all", "a source without rows", "a window"])
@pytest.mark.parametrize("activation, bias, save_z", [("swiglu", True, True), ("gelu", False, False)])
def test_experts(device, tier, dtype, kind, activation, bias, save_z):
    if tier == "hopper" and dtype == torch.float32:
        pytest.skip("Hopper's kernels have 16 bits")
    (plan, spans), width = routing(device, kind), 2 * I if activation == "swiglu" else I
    sizes = [(SOURCES * T, H), (E, width, H), (E, width), (E, H, I), (E, H), (SOURCES * T, K)]
    tensors = [torch.randn(size).to(device, dtype).requires_grad_() for size in sizes]
    if not bias:
        tensors[2] = tensors[4] = None
    leaves, dout = [t for t in tensors if t is not None], torch.randn(SOURCES * T, H).to(device, dtype)

    def step(sources):
        inputs = ExpertInputs(*tensors, *plan, activation, False, save_z)
        with by_source.set(sources):
            out = by_layer(inputs)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

    with use(tier):
        sources = Sources(spans)
        for whole, in_passes in zip(step(None), step(sources), strict=True):
            # the interpreter multiplies by NumPy, whose rounding of a row depends on its place in a tile
            assert (
                error(in_passes, whole) < 4 * torch.finfo(dtype).eps if interpret else in_passes.equal(whole)
            )
    assert sources.passes >= 4 * SOURCES  # up, down and their gradients


@dtypes
def test_groups_that_lie_apart(device, dtype):
    """Rows between the groups of `gmm_into` stay as they are."""
    x, w, bias = (torch.randn(size).to(device, dtype) for size in ((50, 40), (4, 40, 24), (4, 24)))
    sizes, starts = (
        torch.tensor(n, dtype=torch.int32, device=device) for n in ([5, 0, 17, 9], [2, 9, 9, 30])
    )
    results = []
    for fill in (gmm_into_op, lambda *i: fill_gmm_into(GroupedIntoInputs(*i))):
        out = torch.full((50, 24), 777.0, device=device, dtype=dtype)
        fill(out, x, w, sizes, bias, [], 0, starts)
        results.append(out)
    assert error(*results) < 1e-2
    stay = torch.ones(50, dtype=torch.bool)
    stay[2:7] = stay[9:26] = stay[30:39] = False
    assert (results[0][stay] == 777).all()
