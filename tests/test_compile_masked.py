"""The masked product compiles for every target at every tile of its tables: see test_compile_targets.py."""

import re

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.base.fp8 import FP8, native_fp8
from moe_aiter.kernels.grouped.masked_gmm import launch_masked_gmm
from moe_aiter.tuning.candidates import PORTABLE
from moe_aiter.tuning.table import load

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for
from test_compile_targets import check, ints, new

G = 16
E4M3, FNUZ, E5M2 = FP8
MATRIX = {  # of 8-bit floats; without a name here they become float16
    ("sm_90", E4M3): "wgmma.mma_async.sync.aligned.{}k32.f32.e4m3.e4m3",
    ("sm_100", E4M3): "tcgen05.mma.cta_group::1.kind::f8f6f4",
    ("gfx942", FNUZ): "v_mfma_f32_{}_fp8_fp8",
    ("gfx950", E4M3): "v_mfma_{}f8f6f4",
}


def run(rows=1024, n=4096, k=7168, x=E4M3, w=None, shuffled=False, columns=False, scaled=True, masked=True):
    """One launch.  `columns`: w with its columns in a row; `scaled`: by scales of each row."""
    floats = {"dtype": torch.float32}
    out = new(G, rows, n, dtype=torch.bfloat16 if x in FP8 else x)
    weight = new(G, k, n, dtype=w or x).mT if columns else new(G, n, k, dtype=w or x)
    scales = (new(G, rows, **floats), new(G, n, **floats)) if scaled else (None, None)
    sizes = ints(G) if masked else None
    launch_masked_gmm(out, new(G, rows, k, dtype=x), weight, sizes, *scales, shuffled)


def dtype_of(op, bits):
    """A dtype whose product looks up this op on the target at hand."""
    if bits != 8:
        return {16: torch.bfloat16, 32: torch.float32}[bits]
    native = native_fp8()
    return next(d for d in FP8 if (d in native) != op.endswith("decode"))


def table_cases():
    for name, target in TARGETS.items():
        rows = load(tuning.table_name(target.gpu.backend, target.gpu.arch))
        for row in (row for row in rows if row.key.op.startswith("masked")):
            op, bits, most = row.key[:3]
            yield pytest.param(name, row, id=f"{name}-{op} {bits} {most or 'any'}")


@pytest.mark.parametrize("target, row", list(table_cases()))
def test_table_row(target, row):
    """The configuration of a table row, in each order of the weights, without spills."""
    op, bits, rows = row.key[:3]
    rows = rows or (100 if "few" in op else 1024)
    with compiling_for(TARGETS[target]) as launches:
        dtype = dtype_of(op, bits)
        config = tuning.lookup(op, dtype, G * rows, 4096, 7168, G)
        assert config == row.config
        run(rows, x=dtype)
        run(rows, x=dtype, shuffled=True)
    check(TARGETS[target], launches)
    for launch in launches if bits != 32 else ():
        assert TARGETS[target].matrix in launch.assembly


CASES = {
    "mixed": lambda: run(w=E5M2),
    "mixed, few": lambda: run(16, x=E5M2, w=E4M3),
    "columns": lambda: run(columns=True, scaled=False, masked=False),
    "fnuz": lambda: run(x=FNUZ, scaled=False),
    "fnuz, few": lambda: run(16, x=FNUZ),
    "bfloat16 columns": lambda: run(x=torch.bfloat16, columns=True, masked=False),
    "odd, shuffled": lambda: run(1000, 336, 352, shuffled=True),
    "odd, shuffled, few": lambda: run(16, 336, 352, shuffled=True),
    "odd, shuffled bfloat16": lambda: run(100, 336, 352, x=torch.bfloat16, shuffled=True),
    "odd": lambda: run(1000, 331, 333),
    "odd, few": lambda: run(10, 331, 333, x=torch.float16),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_case(target, case):
    with compiling_for(TARGETS[target]) as launches:
        CASES[case]()
    check(TARGETS[target], launches, spills="odd" in case)
    assert TARGETS[target].matrix in launches[0].assembly


@pytest.mark.parametrize("target, dtype", MATRIX, ids=str)
@pytest.mark.parametrize("rows", [16, 100, 1024])
def test_native_products(target, dtype, rows):
    """8-bit floats are multiplied as they are, shuffled or not, and fetched 16 bytes at a time."""
    for shuffled in (False, True):
        with compiling_for(TARGETS[target]) as launches:
            run(rows, x=dtype, shuffled=shuffled)
        head, _, tail = MATRIX[target, dtype].partition("{}")
        text = launches[0].assembly
        assert any(tail in line for line in text.splitlines() if head in line)
        if target == "sm_90":
            assert "cp.async.cg.shared.global" in text and "cp.async.ca" not in text


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [16, 32, 100, 1024])
def test_shuffled_weights_are_read_in_their_order(dtype, rows):
    """Neighbouring threads copy neighbouring vectors, which become a left operand without another copy."""
    with compiling_for(TARGETS["sm_90"]) as launches:
        run(rows, x=dtype, shuffled=True)
    code, vector = launches[0].compiled.asm["ttgir"], 16 // dtype.itemsize
    copies = re.findall(
        r"async_copy_global_to_local .*contiguity = (\d+).* tensor<\d+x!tt.ptr<\w+>, (#\w+)>", code
    )
    assert copies and {int(contiguity) for contiguity, _ in copies} == {vector}
    for _, layout in copies:
        assert f"{layout} = #ttg.blocked<{{sizePerThread = [{vector}], threadsPerWarp = [32]" in code
    loop = code[code.index("scf.for") : code.index("scf.yield")]
    assert "ldmatrix" in launches[0].assembly and "local_store" not in loop and "local_alloc %" not in loop


@pytest.mark.parametrize("dtype", [FNUZ, torch.bfloat16], ids=str)
def test_few_rows_on_gfx942_need_no_shared_memory_for_shuffled_weights(dtype):
    with compiling_for(TARGETS["gfx942"]) as launches:
        run(16, x=dtype, shuffled=True)
    assert launches[0].shared_bytes == 4096  # a tile of x


@pytest.mark.parametrize("op", [op for op in PORTABLE if op.startswith("masked")])
def test_candidates(op):
    """Those that `moe-aiter bench deepgemm --tiles` tries; one that spills is slow, not wrong."""
    target = TARGETS["sm_90"]
    for config in PORTABLE[op]:
        with tuning.choose(lambda key, config=config: config), compiling_for(target) as launches:
            run(64 if "few" in op else 1024, x=dtype_of(op, 8))
        check(target, launches, spills=config.block_n == 256)
