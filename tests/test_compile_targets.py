"""Every kernel compiles for every target, without a GPU: no spills, matrix instructions, in shared memory."""

import dataclasses
import pathlib
from collections.abc import Callable

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.base.tile import PERSISTENT
from moe_aiter.kernels.experts.down import launch_expert_down_grad
from moe_aiter.kernels.experts.glu import launch_glu, launch_glu_backward
from moe_aiter.kernels.experts.up import launch_expert_up
from moe_aiter.kernels.grouped.gmm import launch_gmm, launch_gmm_into
from moe_aiter.kernels.grouped.tgmm import launch_tgmm, launch_tgmm_into
from moe_aiter.kernels.rows.permute import launch_permute, launch_row_dots, launch_unpermute
from moe_aiter.kernels.rows.route import launch_route, launch_route_backward
from moe_aiter.kernels.rows.sort import launch_sort
from moe_aiter.kernels.rows.sums import launch_group_sum, launch_weigh_rows
from moe_aiter.kernels.rows.topk import launch_topk
from moe_aiter.tuning.table import load

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for, kernels_launched_by

KERNELS = pathlib.Path(__file__).parent.parent / "moe_aiter" / "kernels"
E, TOP_K = 128, 8


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape, dtype=torch.int32):
    return new(*shape, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Shape:
    """R rows, N columns and K to sum over, in E groups."""

    rows: int = 1024 * E
    n: int = 4096
    k: int = 4096
    dtype: torch.dtype = torch.bfloat16

    def new(self, *shape):
        return new(*shape, dtype=self.dtype)

    @property
    def plan(self):
        """order, rank and group_sizes."""
        return ints(self.rows), ints(self.rows // TOP_K, TOP_K), ints(E)


# The launchers whose tile comes from a table, at a shape that picks its row.


def run_gmm(s, bias=False):
    launch_gmm(
        s.new(s.rows, s.n),
        s.new(s.rows, s.k),
        s.new(E, s.n, s.k).mT,
        ints(E),
        s.new(E, s.n) if bias else None,
    )


def run_gmm_by_rows(s):
    launch_gmm(s.new(s.rows, s.n), s.new(s.rows, s.k), s.new(E, s.k, s.n), ints(E), None)


def run_gmm_into(s, dtype=torch.float32, tile=(), programs=PERSISTENT):
    out, bias = new(s.rows, s.n, dtype=dtype), s.new(E, s.n)
    operands = s.new(s.rows, s.k), s.new(E, s.k, s.n), ints(E, dtype=torch.int64)
    launch_gmm_into(out, *operands, bias, tile, programs)


def run_tgmm_into(s, dtype=torch.float32, accumulate=False, of_y=False, tile=(), programs=PERSISTENT):
    """As ptgmm runs it on a (K, M) lhs, with the gradient of a bias."""
    out, sums = new(E, s.k, s.n, dtype=dtype), new(E, s.n if of_y else s.k, dtype=torch.float32)
    operands = s.new(s.k, s.rows).mT, s.new(s.rows, s.n), ints(E, dtype=torch.int64), None, 1
    launch_tgmm_into(out, *operands, accumulate, sums, of_y, tile, programs)


def run_tgmm(s):
    launch_tgmm(s.new(E, s.k, s.n), s.new(s.rows, s.k), s.new(s.rows, s.n), ints(E), None, 1, False)


def run_tgmm_gather(s, columns_first=False):
    out = s.new(E, s.n, s.k) if columns_first else s.new(E, s.k, s.n)
    x, y = s.new(s.rows // TOP_K, s.k), s.new(s.rows, s.n)
    launch_tgmm(out, x, y, ints(E), ints(s.rows), TOP_K, columns_first)


def run_tgmm_accumulate(s):
    out, x, y = new(E, s.k, s.n, dtype=torch.float32), s.new(s.rows, s.k), s.new(s.rows, s.n)
    launch_tgmm_into(out, x, y, ints(E), None, 1)


def run_up(s, activation="swiglu", interleaved=False, bias=False, save_z=True, save_a=True):
    width = s.n // get_activation(activation).parts
    z, a = s.new(s.rows, s.n), s.new(s.rows, width) if save_a else None
    x, w, b = s.new(s.rows // TOP_K, s.k), s.new(E, s.n, s.k), s.new(E, s.n) if bias else None
    launch_expert_up((z, a), x, w, b, *s.plan, activation, interleaved, save_z, None)


def run_down_grad(s, activation="swiglu", interleaved=False, need_a=True):
    parts = get_activation(activation).parts
    order, rank, group_sizes = s.plan
    z, dz = s.new(s.rows, parts * s.n), s.new(s.rows, parts * s.n)
    ds, weights = new(*rank.shape, dtype=torch.float32), new(*rank.shape, dtype=torch.float32)
    launch_expert_down_grad(
        (dz, s.new(s.rows, s.n), ds), s.new(s.rows // TOP_K, s.k), z, s.new(E, s.k, s.n),
        weights, order, rank, group_sizes, activation, interleaved, need_a,
    )  # fmt: skip


TUNED = {
    "gmm": run_gmm,
    "tgmm": run_tgmm,
    "tgmm_gather": run_tgmm_gather,
    "up": run_up,
    "down_grad": run_down_grad,
}
ELSEWHERE = {  # in the files beside this one
    *("gemm_kernel", "one_row_kernel", "finish_kernel", "mask_bias_kernel", "transpose_chunks_kernel"),
    *("masked_gmm_kernel", "segment_gmm_kernel", "segment_expand_kernel", "segment_tgmm_kernel"),
    *("quantize_rows_kernel", "quantize_rows_and_amax_kernel", "quantize_columns_kernel", "add_parts_kernel"),
    *("quantize_folded_kernel", "quantize_transposed_kernel", "transpose_rows8_kernel", "scaled_gemm_kernel"),
    *("sparse_blocks_kernel", "sparse_blocks_grad_kernel", "spread_entries_kernel", "plan_chunks_kernel"),
    *("gather_entries_kernel", "gather_entries_grad_kernel", "quantize_chunks_kernel", "zero_rows_kernel"),
}
MATRIX_KERNELS = {"gmm_kernel", "tgmm_kernel", "expert_up_kernel", "expert_down_grad_kernel"}

# The others, and the variants of these.  Name -> a function that calls a launcher.


def run_sort(dtype, num_experts=E):
    out = ints(4096 * 8), ints(4096, 8), ints(num_experts)
    launch_sort(out, ints(4096, 8, dtype=dtype), num_experts)


def run_topk(num_experts, k):
    scores = new(4096, num_experts, dtype=torch.float32)
    launch_topk((new(4096, k, dtype=torch.float32), ints(4096, k, dtype=torch.int64)), scores, k)


def routed(num_experts, k):
    """scores, weights and expert_ids of 4096 tokens."""
    floats = (new(4096, n, dtype=torch.float32) for n in (num_experts, k))
    return *floats, ints(4096, k, dtype=torch.int64)


def run_route(num_experts, k, sigmoid, renormalize, need_scores=True, given=False):
    logits = new(4096, num_experts, dtype=torch.float32)
    scores, *rest = routed(num_experts, k)
    out = scores if need_scores else scores[:0], *rest
    ids = new(4096, k, dtype=torch.int16) if given else None
    launch_route(out, logits, k, sigmoid, renormalize, 1.0, need_scores, ids)


def run_route_backward(num_experts, k, sigmoid, renormalize, of_scores=True, of_weights=True):
    scores, weights, ids = routed(num_experts, k)
    grads = weights if of_weights else None, scores if of_scores else None
    saved = weights, ids, scores if sigmoid or not renormalize else None
    launch_route_backward(new(*scores.shape), *saved, *grads, num_experts, sigmoid, renormalize, 1.0)


def run_permute(dtype, weighted):
    x, weights = new(4096, 2048, dtype=dtype), new(4096, 8, dtype=torch.float32) if weighted else None
    launch_permute(new(4096 * 8, 2048, dtype=dtype), x, ints(4096 * 8), ints(4096, 8), weights)


def run_unpermute(dtype, weighted):
    rows, weights = new(4096 * 8, 2048, dtype=dtype), new(4096, 8, dtype=torch.float32) if weighted else None
    launch_unpermute(new(4096, 4096, dtype=dtype)[:, 2048:], rows, ints(4096 * 8), ints(4096, 8), weights)


def run_row_dots(dtype):
    rows, x = new(4096 * 8, 2048, dtype=dtype), new(4096, 2048, dtype=dtype)
    launch_row_dots(new(4096, 8, dtype=torch.float32), rows, x, ints(4096 * 8), ints(4096, 8))


def run_weigh_rows(dtype):
    x, s = new(4096 * 8, 2048, dtype=dtype), new(4096, 8, dtype=torch.float32)
    launch_weigh_rows((x, s), x, x, s, ints(4096 * 8), ints(4096, 8))


def run_glu(activation, dtype=torch.bfloat16):
    launch_glu(new(4096, 1024, dtype=dtype), new(4096, 2048, dtype=dtype), activation, False)


def run_glu_backward(activation, dtype=torch.bfloat16):
    z, dout = new(4096, 2048, dtype=dtype), new(4096, 1024, dtype=dtype)
    launch_glu_backward(new(4096, 2048, dtype=dtype), dout, z, activation, False)


def run_group_sum(scaled):
    order, scale = (ints(4096 * 8), new(4096, 8, dtype=torch.float32)) if scaled else (None, None)
    launch_group_sum(
        new(E, 2048, dtype=torch.float32), new(4096, 2048), ints(E), order, TOP_K if scaled else 1, scale
    )


BF16 = Shape()
ROUTERS = [(8, 2), (64, 16), (256, 16), (512, 16)]
ODD = Shape(rows=1000, n=2 * 331, k=333)  # masked loads of single elements: may spill, must compile
CASES: dict[str, Callable[[], None]] = {
    "sort int32": lambda: run_sort(torch.int32),
    "sort int64": lambda: run_sort(torch.int64),
    "sort by one expert": lambda: run_sort(torch.int64, 1),
    "sort by many experts": lambda: run_sort(torch.int64, 4096),
    "topk 8 of 128": lambda: run_topk(128, 8),
    "topk 2 of 8": lambda: run_topk(8, 2),
    "route softmax": lambda: run_route(128, 8, False, False),
    "route without scores": lambda: run_route(128, 8, False, True, need_scores=False),
    "route sigmoid": lambda: run_route(128, 8, True, True),
    "route given": lambda: run_route(128, 8, False, True, given=True),
    "route backward": lambda: run_route_backward(128, 8, False, True, of_scores=False),
    "route backward of the scores": lambda: run_route_backward(128, 8, True, True, of_weights=False),
    "route backward of the weights": lambda: run_route_backward(128, 8, True, True, of_scores=False),
    "route backward softmax": lambda: run_route_backward(128, 8, False, False),
    "route backward sigmoid": lambda: run_route_backward(128, 8, True, True),
    **{f"route {k} of {e}": lambda e=e, k=k: run_route(e, k, False, True) for e, k in ROUTERS},
    **{
        f"route backward {k} of {e}": lambda e=e, k=k: run_route_backward(e, k, True, True)
        for e, k in ROUTERS
    },
    "permute": lambda: run_permute(torch.bfloat16, False),
    "permute weighted float32": lambda: run_permute(torch.float32, True),
    "unpermute": lambda: run_unpermute(torch.bfloat16, False),
    "unpermute weighted": lambda: run_unpermute(torch.bfloat16, True),
    "row_dots": lambda: run_row_dots(torch.bfloat16),
    "weigh_rows": lambda: run_weigh_rows(torch.bfloat16),
    "glu swiglu": lambda: run_glu("swiglu"),
    "glu geglu backward": lambda: run_glu_backward("geglu"),
    "group_sum": lambda: run_group_sum(False),
    "group_sum scaled": lambda: run_group_sum(True),
    "gmm by rows": lambda: run_gmm_by_rows(BF16),
    "gmm with bias": lambda: run_gmm(BF16, bias=True),
    "gmm odd": lambda: run_gmm(ODD),
    "gmm walking": lambda: run_gmm_into(BF16, torch.bfloat16),
    "gmm into float32": lambda: run_gmm_into(BF16, programs=0),
    "gmm into odd": lambda: run_gmm_into(ODD),
    "ptgmm": lambda: run_tgmm_into(BF16, torch.bfloat16),
    "ptgmm accumulate": lambda: run_tgmm_into(BF16, accumulate=True),
    "ptgmm with sums of rhs": lambda: run_tgmm_into(BF16, of_y=True),
    "nptgmm odd": lambda: run_tgmm_into(ODD, accumulate=True, of_y=True, programs=0),
    "tgmm gather odd": lambda: run_tgmm_gather(dataclasses.replace(ODD, k=20, n=24)),
    "tgmm columns first": lambda: run_tgmm_gather(BF16, columns_first=True),
    "tgmm accumulate": lambda: run_tgmm_accumulate(BF16),
    "up interleaved with bias": lambda: run_up(BF16, interleaved=True, bias=True),
    "up swiglu_oai": lambda: run_up(BF16, activation="swiglu_oai", interleaved=True, bias=True),
    "up without a": lambda: run_up(BF16, save_a=False),
    "up relu2 without z": lambda: run_up(BF16, activation="relu2", save_z=False),
    "up to a rank": lambda: run_up(Shape(n=16), activation="relu", save_a=False),
    "gmm from a rank": lambda: run_gmm(Shape(k=16)),
    "up geglu odd": lambda: run_up(ODD, activation="geglu"),
    "down_grad interleaved": lambda: run_down_grad(BF16, interleaved=True),
    "down_grad swiglu_oai": lambda: run_down_grad(BF16, activation="swiglu_oai", interleaved=True),
    "down_grad relu2 frozen": lambda: run_down_grad(BF16, activation="relu2", need_a=False),
    "down_grad geglu odd": lambda: run_down_grad(ODD, activation="geglu"),
}


# a float32 result, or sums beside a product, at tiles chosen for neither: some bytes, outside of the loop
FEW_SPILLS = {("sm_100", "gmm into float32"), ("sm_100", "ptgmm with sums of rhs")}


def table_cases():
    """(target, table row) of every row of every table."""
    for name, target in TARGETS.items():
        rows = load(tuning.table_name(target.gpu.backend, target.gpu.arch))
        for i, row in enumerate(row for row in rows if row.key.op in TUNED):
            size = f"rows={row.key.rows} n={row.key.n} k={row.key.k}".replace("None", "any")
            yield pytest.param(name, row, id=f"{name}-{i} {row.key.op} {row.key.bits} {size}")


def check(target, launches, spills=False):
    """No spills unless `spills`, and no more shared memory than there is."""
    assert launches
    for launch in launches:
        assert spills or not launch.spilled(), f"{launch.kernel}: {launch.spilled()}"
        assert launch.shared_bytes <= target.shared_bytes, f"{launch.kernel}: {launch.shared_bytes} bytes"


def has_matrix_instruction(target, launches):
    return all(target.matrix in launch.assembly for launch in launches if launch.kernel in MATRIX_KERNELS)


@pytest.mark.parametrize("target, row", list(table_cases()))
def test_table_row(target, row):
    """The configuration of a table row, at a shape that picks it."""
    target = TARGETS[target]
    op, bits, rows, n, k = row.key
    dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
    shape = Shape((rows or 1024) * E, n or 4096, k or 4096, dtype)
    with compiling_for(target) as launches:
        assert tuning.lookup(op, dtype, shape.rows, shape.n, shape.k, E) == row.config
        TUNED[op](shape)
    check(target, launches)
    assert bits != 16 or has_matrix_instruction(target, launches)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_case(target, case):
    few = (target, case) in FEW_SPILLS
    target = TARGETS[target]
    with compiling_for(target) as launches:
        CASES[case]()
    check(target, launches, spills=few or "odd" in case)
    assert has_matrix_instruction(target, launches)


AITER = {  # of its files for gfx942 and gfx950, in the order of tuning.aiter_json.TILE
    "gfx942 gmm": (run_gmm_into, (256, 256, 64, 1, 8, 1), False),
    "gfx950 gmm": (run_gmm_into, (256, 256, 64, 4, 4, 2), False),
    "gfx942 ptgmm": (run_tgmm_into, (256, 256, 64, 1, 8, 1), False),
    "gfx942 ptgmm, accumulate": (run_tgmm_into, (128, 128, 64, 1, 8, 1), True),
}


@pytest.mark.parametrize("case", AITER)
def test_configurations_of_aiter(case):
    run, tile, accumulate = AITER[case]
    target = TARGETS[case.split()[0]]
    options = {"accumulate": True} if accumulate else {}
    with compiling_for(target) as launches:
        run(BF16, torch.bfloat16, tile=(*tile, 2, 16, 2), programs=304, **options)
    check(target, launches, spills=True)
    assert has_matrix_instruction(target, launches)


def test_every_kernel_has_a_case():
    written = kernels_launched_by(p for p in KERNELS.rglob("*.py") if p.parent.name != "hopper")
    with compiling_for(TARGETS["sm_90"], compile=False) as launches:
        for case in CASES.values():
            case()
    compiled = {launch.kernel for launch in launches}
    assert written <= compiled | ELSEWHERE
    assert compiled >= MATRIX_KERNELS
