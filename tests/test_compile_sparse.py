"""Products with sparse matrices compile for every target at every tile: see test_compile_targets.py."""

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.sparse.gemm import launch_sparse_matmul, launch_sparse_matmul_grad
from moe_aiter.kernels.sparse.pattern import count
from moe_aiter.tuning.candidates import PORTABLE
from moe_aiter.tuning.table import load

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for
from test_compile_targets import ELSEWHERE, check, ints, new

PRODUCTS = {"sparse_blocks_kernel", "sparse_blocks_grad_kernel"}
OTHERS = {"spread_entries_kernel", "gather_entries_kernel", "gather_entries_grad_kernel"}


def matrix(N, K, block, dtype, entries=None):
    """Values and lists of a matrix a tenth of whose blocks are there, or that has so many entries."""
    R, C = count((N, K), block)
    L = entries or R * C // 10 + 1
    values = new(L, dtype=dtype) if block == (1, 1) else new(L, *block, dtype=dtype)
    return values, ints(R + C + 2 + 4 * L)


def run(block, M=4096, N=4096, K=4096, dtype=torch.bfloat16, transposed=False, **named):
    values, lists = matrix(N, K, block, dtype, **named)
    x, out = new(M, K, dtype=dtype), new(M, N, dtype=dtype)
    x, out = (out, x) if transposed else (x, out)
    bias = None if transposed else new(N, dtype=dtype)
    launch_sparse_matmul(out, x, values, bias, lists, N, K, transposed)


def run_grad(block, M=4096, N=4096, K=4096, dtype=torch.bfloat16, **named):
    values, lists = matrix(N, K, block, dtype, **named)
    launch_sparse_matmul_grad(values, new(M, N, dtype=dtype), new(M, K, dtype=dtype), lists, *block)


def has_matrix_instruction(target, launches, small=False):
    """`small` if it may be the older one, the only one for tiles of less than 64 rows."""
    allowed = {target.matrix} | ({"mma.sync"} if small else set())
    return all(any(name in launch.assembly for name in allowed) for launch in launches)


def table_cases():
    for name, target in TARGETS.items():
        rows = load(tuning.table_name(target.gpu.backend, target.gpu.arch))
        for row in (row for row in rows if row.key.op.startswith("sparse_blocks")):
            op, bits, most, n, _ = row.key
            yield pytest.param(name, row, id=f"{name}-{op} {bits} {most or 'any'} {n or 'any'}")


@pytest.mark.parametrize("target, row", list(table_cases()))
def test_table_row(target, row):
    """The configuration of a table row, at blocks that pick it."""
    op, bits, rows, n, _ = row.key
    dtype, side = {16: torch.bfloat16, 32: torch.float32}[bits], n or 256
    with compiling_for(TARGETS[target]) as launches:
        if op == "sparse_blocks":
            assert tuning.lookup(op, dtype, rows or 4096, side, side, 1) == row.config
            run((side, side), rows or 4096, dtype=dtype)
            run((side, side), rows or 4096, dtype=dtype, transposed=True)
        else:
            assert tuning.lookup(op, dtype, side, side, 4096, 1) == row.config
            run_grad((side, side), dtype=dtype)
    assert {launch.kernel for launch in launches} <= PRODUCTS
    check(TARGETS[target], launches)
    assert bits == 32 or has_matrix_instruction(TARGETS[target], launches, row.config.block_m < 64)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = {  # what, and whether it may spill: masked loads of single elements
    "blocks of 32": (lambda: (run((32, 32)), run_grad((32, 32))), False),
    "blocks of 16": (lambda: (run((16, 16)), run_grad((16, 16))), False),
    "blocks of 128 x 64": (lambda: (run((128, 64)), run_grad((128, 64))), False),
    "blocks of 128 x 64, the other way": (lambda: run((128, 64), transposed=True), False),
    "blocks of 8 x 48": (lambda: (run((8, 48)), run_grad((8, 48))), True),
    "float16": (lambda: (run((64, 64), dtype=F16), run_grad((64, 64), dtype=F16)), False),
    "odd": (lambda: (run((64, 64), 1000, 331, 333), run_grad((64, 64), 1000, 331, 333)), True),
    "few rows": (lambda: (run((128, 128), 7), run((64, 64), 60), run_grad((64, 64), 7)), True),
    "few entries": (lambda: (run((1, 1), 16, entries=999), run_grad((1, 1), 16, entries=999)), False),
    "few entries, the other way": (lambda: run((1, 1), 16, entries=999, transposed=True), False),
    "few entries, float32": (lambda: run((1, 1), 16, dtype=F32, entries=9), False),
    "entries for few rows": (lambda: run((1, 1), 64, entries=99999), False),
    "entries for few rows, the other way": (lambda: run((1, 1), 16, transposed=True), False),
    "entries for one row": (lambda: (run((1, 1), 1), run_grad((1, 1), 1)), False),
    "entries for odd rows": (lambda: run((1, 1), 33, entries=9999), False),
    "entries for odd rows, float32": (lambda: run((1, 1), 33, dtype=F32, entries=99999), False),
    "entries": (lambda: run_grad((1, 1)), False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_case(target, case):
    launch, spills = CASES[case]
    with compiling_for(TARGETS[target]) as launches:
        launch()
    check(TARGETS[target], launches, spills=spills)
    products = [launch for launch in launches if launch.kernel in PRODUCTS]
    assert has_matrix_instruction(TARGETS[target], products, small=True)


@pytest.mark.parametrize("entries", [9999, 99999], ids=["read where they are", "turned"])
@pytest.mark.parametrize("target", TARGETS)
def test_entries_are_added_up_by_matrix_instructions(target, entries):
    with compiling_for(TARGETS[target]) as launches:
        run((1, 1), 16, entries=entries)
    assert [launch.kernel for launch in launches] == ["gather_entries_kernel"]
    assert has_matrix_instruction(TARGETS[target], launches, small=True)


@pytest.mark.parametrize("transposed", [False, True], ids=["A.T", "A"])
@pytest.mark.parametrize("side", [64, 128])
def test_blocks_are_copied_ahead(side, transposed):
    """16 bytes at a time, in all of the stages: what a block is looked up with does not take half of them."""
    with compiling_for(TARGETS["sm_90"]) as launches:
        run((side, side), transposed=transposed)
        config = tuning.lookup("sparse_blocks", BF16, 4096, side, side, 1)
    text = launches[0].assembly
    assert "cp.async.cg.shared.global" in text and "cp.async.ca" not in text
    tile = 2 * config.block_k * (config.block_m + config.block_n)
    assert launches[0].shared_bytes >= config.num_stages * tile


@pytest.mark.parametrize("op", ["sparse_blocks", "sparse_blocks_grad"])
@pytest.mark.parametrize("side", [32, 64, 128])
def test_candidates(op, side):
    for config in PORTABLE[op]:
        with tuning.choose(lambda key, c=config: c), compiling_for(TARGETS["sm_90"]) as launches:
            run((side, side)) if op == "sparse_blocks" else run_grad((side, side))
        check(TARGETS["sm_90"], launches)


def test_every_kernel_has_a_case():
    with compiling_for(TARGETS["sm_90"], compile=False) as launches:
        for launch, _ in CASES.values():
            launch()
    assert {launch.kernel for launch in launches} == PRODUCTS | OTHERS
    assert PRODUCTS | OTHERS <= ELSEWHERE
