"""Products of segments compile for every target: see test_compile_targets.py."""

import dataclasses

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.experts.adapted import launch_add_low_rank
from moe_aiter.kernels.grouped.segment_gmm import launch_segment_gmm, launch_segment_tgmm
from moe_aiter.tuning.table import load

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for
from test_compile_targets import BF16, ELSEWHERE, ODD, E, Shape, check, ints, new

FP8 = torch.float8_e4m3fn, torch.float8_e5m2
PRODUCTS = {"segment_gmm_kernel", "segment_expand_kernel", "segment_tgmm_kernel"}


def run_segment_gmm(s, dtype=None, indices=True, segments=E):
    """With lengths and indices, or neither."""
    dtype = s.dtype if dtype is None else dtype
    x, w = new(s.rows, s.k, dtype=dtype), new(E, s.n, s.k, dtype=dtype).mT
    plan = (ints(segments), None, ints(segments)) if indices else (None, ints(segments + 1), None)
    launch_segment_gmm(s.new(s.rows, s.n), x, w, *plan)


def run_segment_expand(s, **kwargs):
    run_segment_gmm(dataclasses.replace(s, k=min(s.k, 64)), **kwargs)


def run_segment_tgmm(s, columns_first=False, weights=E):
    out = s.new(weights, s.n, s.k) if columns_first else s.new(weights, s.k, s.n)
    plan = ints(2 * E), None, ints(2 * E)
    launch_segment_tgmm(out, s.new(s.rows, s.k), s.new(s.rows, s.n), *plan, weights, columns_first)


def run_add_low_rank(s):
    launch_add_low_rank(s.new(s.rows, s.n), s.new(s.rows, s.k), s.new(E, s.n, s.k).mT, ints(E))


TUNED = {
    "segment_gmm": run_segment_gmm,
    "segment_expand": run_segment_expand,
    "segment_tgmm": run_segment_tgmm,
}
CASES = {
    "to a rank": lambda: run_segment_gmm(Shape(4096, 16, 4096), segments=64),
    "from a rank": lambda: run_segment_gmm(Shape(4096, 4096, 16), segments=64),
    "added, from a rank": lambda: run_add_low_rank(Shape(k=16)),
    "decode": lambda: run_segment_gmm(Shape(256, 64, 4096), indices=False, segments=256),
    "decode back": lambda: run_segment_gmm(Shape(256, 4096, 64), indices=False, segments=256),
    "dense": lambda: run_segment_gmm(Shape(8000, 4096, 4096), segments=8),
    "odd": lambda: run_segment_gmm(ODD),
    "odd, short": lambda: run_segment_gmm(dataclasses.replace(ODD, k=21)),
    "tgmm columns first": lambda: run_segment_tgmm(Shape(4096, 4096, 16), columns_first=True),
    "tgmm odd": lambda: run_segment_tgmm(ODD),
    "tgmm in parts": lambda: run_segment_tgmm(Shape(16384, 16, 4096), weights=1),
    **{str(dtype): lambda dtype=dtype: run_segment_gmm(BF16, dtype) for dtype in FP8},
    **{f"short {dtype}": lambda dtype=dtype: run_segment_expand(BF16, dtype=dtype) for dtype in FP8},
}


def table_cases():
    for name, target in TARGETS.items():
        rows = load(tuning.table_name(target.gpu.backend, target.gpu.arch))
        for row in (row for row in rows if row.key.op in TUNED):
            op, bits, most = row.key[:3]
            yield pytest.param(name, row, id=f"{name}-{op} {bits} {most or 'any'}")


def assert_matrix_instruction(target, launches, small):
    """In each product; `small` if it may be the older one, the only one for tiles of less than 64 rows."""
    allowed = {target.matrix} | ({"mma.sync"} if small else set())
    products = [launch for launch in launches if launch.kernel in PRODUCTS]
    assert products and all(any(name in launch.assembly for name in allowed) for launch in products)


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
    if bits == 16:
        assert_matrix_instruction(target, launches, small=row.config.block_m < 64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_case(target, case):
    if "e4m3" in case and target == "sm_80":
        pytest.skip("Triton has no float8_e4m3fn there, and the reference runs")
    target = TARGETS[target]
    with compiling_for(target) as launches:
        CASES[case]()
    check(target, launches, spills="odd" in case)
    assert_matrix_instruction(target, launches, small=True)


def test_every_kernel_has_a_case():
    with compiling_for(TARGETS["sm_90"], compile=False) as launches:
        for case in CASES.values():
            case()
    assert {launch.kernel for launch in launches} == {*PRODUCTS, "add_parts_kernel"} <= ELSEWHERE
