"""The scaled product compiles for every target at every tile of its tables: see test_compile_targets.py."""

import functools

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.base.fp8 import FP8, native_fp8
from moe_aiter.kernels.dense.scaled_gemm import MOST_K, launch_scaled_gemm, launch_scaled_gmm
from moe_aiter.tuning.candidates import HOPPER_TILES, PORTABLE
from moe_aiter.tuning.table import load

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for
from test_compile_hopper import GATED, check_tile, module, run_hopper_up
from test_compile_targets import check, ints, new

G, T, TOP_K = 16, 512, 4
INT8, F32, (E4M3, FNUZ, E5M2) = torch.int8, torch.float32, FP8
SCALED = [op for op in PORTABLE if op.startswith("scaled")]
MATRIX = {  # of 8 bits; 8-bit floats without a name here become float16
    ("sm_80", INT8): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    ("sm_90", INT8): "wgmma.mma_async.sync.aligned",
    ("sm_90", E4M3): "k32.f32.e4m3.e4m3",
    ("gfx942", INT8): "v_mfma_i32",
    ("gfx942", FNUZ): "fp8_fp8",
    ("gfx950", INT8): "v_mfma_i32",
    ("gfx950", E4M3): "f8f6f4",
}


def run(
    rows=1024, n=4096, k=4096, x=INT8, w=None, columns=True, beside=True, out=torch.bfloat16,
    launch=launch_scaled_gemm,
):  # fmt: skip
    """One launch.  `columns`: each column of w in a row; `beside`: with scales and a bias."""
    floats, w = {"dtype": torch.float32}, w or x
    weight = new(n, k, dtype=w).mT if columns else new(k, n, dtype=w)
    more = (new(rows, **floats), new(n, **floats), new(n)) if beside else (None, None, None)
    launch(new(rows, n, dtype=out), new(rows, k, dtype=x), weight, *more, out)


def run_groups(n=2048, k=4096, x=INT8, out=torch.bfloat16):
    floats, rows = {"dtype": torch.float32}, T * TOP_K
    more = new(T, **floats), new(G, n, **floats), new(G, n)
    weight, order = new(G, n, k, dtype=x).mT, ints(rows)
    launch_scaled_gmm(new(rows, n, dtype=out), new(T, k, dtype=x), weight, ints(G), *more, order, TOP_K, out)


def sizes_of(op, rows):
    """What looks up this op on the target at hand."""
    dtype = INT8 if op.endswith(("int8", "long")) else None
    if dtype is None:
        dtype = next(d for d in FP8 if (d in native_fp8()) != op.endswith("decode"))
    return {
        "rows": rows or 4096,
        "k": MOST_K // 1024 * 1024 + 1024 if op.endswith("long") else 4096,
        "x": dtype,
    }


def table_cases():
    for name, target in TARGETS.items():
        rows = load(tuning.table_name(target.gpu.backend, target.gpu.arch))
        for row in (row for row in rows if row.key.op in SCALED):
            yield pytest.param(
                name, row, id=f"{name}-{row.key.op} {row.key.rows or 'any'}x{row.key.n or 'any'}"
            )


@pytest.mark.parametrize("target, row", list(table_cases()))
def test_table_row(target, row):
    """The configuration of a table row, with each order of the weights, without spills."""
    with compiling_for(TARGETS[target]) as launches:
        sizes = {**sizes_of(row.key.op, row.key.rows), "n": row.key.n or 4096}
        config = tuning.lookup(row.key.op, sizes["x"], sizes["rows"], sizes["n"], sizes["k"], 1)
        assert config == row.config
        run(**sizes)
        run(**sizes, columns=False, out=torch.float32)
        with tuning.choose(lambda key: row.config):
            run_groups(x=sizes["x"])
    check(TARGETS[target], launches)
    for launch in launches:
        assert any(name in launch.assembly for name in (TARGETS[target].matrix, "mma.sync"))


CASES = {
    "mixed": lambda: run(x=E4M3, w=E5M2),
    "mixed, few": lambda: run(16, x=E5M2, w=E4M3),
    "fnuz": lambda: run(x=FNUZ, beside=False),
    "without scales": lambda: run(beside=False, out=torch.float16),
    "odd": lambda: run(1000, 331, 333),
    "odd, few": lambda: run(10, 331, 333, columns=False),
    "odd, 8-bit floats": lambda: run(1000, 331, 333, x=E4M3, columns=False),
    "odd groups": lambda: run_groups(331, 333),
    "odd and long": lambda: run(10, 331, MOST_K + 5),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_case(target, case):
    with compiling_for(TARGETS[target]) as launches:
        CASES[case]()
    check(TARGETS[target], launches, spills="odd" in case)
    assert any(name in launches[0].assembly for name in (TARGETS[target].matrix, "mma.sync"))


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("target, dtype", MATRIX, ids=str)
def test_8_bits_are_multiplied_as_they_are(target, dtype, rows):
    with compiling_for(TARGETS[target]) as launches:
        run(rows, x=dtype)
    assert MATRIX[target, dtype] in launches[0].assembly


@pytest.mark.parametrize("rows", [64, 512, 4096])
def test_hopper_multiplies_int8_in_warpgroups(rows):
    with compiling_for(TARGETS["sm_90"]) as launches:
        run(rows)
    lines = [line for line in launches[0].assembly.splitlines() if "wgmma.mma_async" in line]
    assert lines and all("s32.s8.s8" in line for line in lines)
    assert "cp.async.cg.shared.global" in launches[0].assembly


@pytest.mark.parametrize("op", SCALED)
def test_candidates(op):
    """Those that are tried on a Hopper GPU; one that spills is slow, not wrong."""
    target = TARGETS["sm_90"]
    for config in PORTABLE[op]:
        with tuning.choose(lambda key, config=config: config), compiling_for(target) as launches:
            run(**sizes_of(op, 1024))
        check(target, launches)


def run_on_hopper(**named):
    run(launch=module("gmm").launch_scaled_gemm, **named)


def run_groups_on_hopper(x, order):
    more = new(T, dtype=F32), new(G, 2048, dtype=F32), new(G, 2048)
    operands = new(T, 4096, dtype=x), new(G, 2048, 4096, dtype=x).mT, ints(G)
    rows = T * TOP_K if order else T
    plan = ints(rows) if order else None, TOP_K if order else 1
    module("gmm").launch_scaled_gmm(new(rows, 2048), *operands, *more, *plan, torch.bfloat16)


ON_HOPPER = {  # each kernel where it needs the most registers
    "hopper_masked_int8": [
        functools.partial(run_on_hopper, k=k, beside=beside, out=out)
        for k in (2880, 4096)
        for beside in (True, False)
        for out in (torch.bfloat16, F32)
    ],
    "hopper_masked_fp8": [functools.partial(run_on_hopper, x=E4M3, w=E5M2, k=k) for k in (2880, 4096)],
    "hopper_masked_fp8_plain": [functools.partial(run_on_hopper, x=E4M3, out=F32)],
    "hopper_up_int8": [
        functools.partial(run_hopper_up, a, i, bias=True, fp8=INT8) for a in GATED for i in (False, True)
    ],
    "hopper_up_plain_int8": [functools.partial(run_hopper_up, "gelu", bias=True, fp8=INT8)],
    "hopper_gmm_int8": [functools.partial(run_groups_on_hopper, INT8, order) for order in (True, False)],
    "hopper_gmm_fp8": [functools.partial(run_groups_on_hopper, E4M3, order) for order in (True, False)],
}


@pytest.mark.parametrize(
    "op, tile", [pytest.param(op, t, id=f"{op}: {t}") for op in ON_HOPPER for t in HOPPER_TILES[op]]
)
def test_tile_on_hopper(op, tile):
    for launch in ON_HOPPER[op]:
        check_tile(op, tile, launch)


def test_every_tile_of_int8_is_compiled():
    assert {op for op in HOPPER_TILES if op.endswith("int8")} <= ON_HOPPER.keys()
