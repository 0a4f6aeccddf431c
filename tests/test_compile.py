"""Every kernel compiles for every target, without a GPU: no spills, matrix instructions, in shared memory.

`compile_*.py` have the cases.  `--cases all` compiles all of them; otherwise a few in which each kernel
occurs for each target, and each dtype, check and constant but numbers for NVIDIA's GPUs and for AMD's.
"""

import re

import pytest
import torch
from check import launcher

from moe_aiter.config import interpret
from moe_aiter.kernels.dense.gemm import WIDEST_STEP
from moe_aiter.kernels.quantize.rows import FORMATS, bind_quantize_rows
from moe_aiter.tuning.candidates import HOPPER_TILES, PORTABLE

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import compile_few as few
import compile_few_rows as few_rows
import compile_hopper as hopper
import compile_invariant as invariant
import compile_lent as lent
import compile_muon as muon
import compile_products as products
import compile_rows as rows
from aot import FEW_TARGETS, KERNELS, PRODUCTS, TARGETS, compiling_for, disassembled, new
from compile_products import Dense
from pairwise import covering

TABLE = {
    **rows.CASES,
    **products.CASES,
    **products.TUNED_CASES,
    **few.CASES,
    **few_rows.CASES,
    **hopper.CASES,
    **lent.CASES,
    **muon.CASES,
    **invariant.CASES,
    **hopper.TUNED_CASES,
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--cases") == "all"
        metafunc.parametrize("target, case", cases(TARGETS) if whole else few_cases())


def cases(targets):
    return [(target, name) for target in targets for name, case in TABLE.items() if target in case.targets]


def few_cases():
    by_maker = {}
    for target, name in cases(FEW_TARGETS):
        by_maker.setdefault(TARGETS[target].gpu.backend, []).append((target, name))
    chosen = []
    for found in by_maker.values():
        choices, costs = zip(*(TABLE[name].choices(target) for target, name in found), strict=True)
        chosen += [found[i] for i in covering(choices, costs)]
    return chosen


def test_case(target, case):
    TABLE[case].check(target)


def test_every_row_of_a_table_is_found():
    for name, case in products.TUNED_CASES.items():
        if name.startswith("row "):
            case.choices(*case.targets)  # which asserts it


def test_every_kernel_has_a_case():
    launched = set()
    for case in TABLE.values():
        for target in {"sm_90"} & set(case.targets):
            launched |= {fn for fn, _ in case.choices(target)[0]}
    assert KERNELS and not [name for name, fn in KERNELS.items() if fn not in launched]


def test_few_cases_ask_for_matrix_instructions():
    def asks(found):
        choices = [choice for target, name in found for choice in TABLE[name].choices(target)[0]]
        return {fn.__name__ for fn, choice in choices if choice == ("sm_90", "matrix")}

    portable = {name.rpartition(".")[2] for name in KERNELS if not name.startswith("hopper.")}
    assert PRODUCTS & portable <= asks([case for case in few_cases() if case[0] == "sm_90"])


def test_every_tile_has_a_case():
    assert HOPPER_TILES.keys() == {*hopper.TUNED, *hopper.DENSE_TUNED, "hopper_few_rows"}
    long = [max(tile.block_k for tile in PORTABLE[op]) for op in products.EPILOGUES]
    assert 256 < min(long) <= max(long) <= WIDEST_STEP


def test_the_reference_quantizes_where_no_kernel_does():
    x = new(16, 32)
    with compiling_for(TARGETS["sm_80"]) as launches:
        out = new(16, 32, dtype=FORMATS["e4m3"]), new(16, dtype=torch.float32)
        launcher("quantize_rows", bind_quantize_rows)(out, x, "e4m3")
    assert not launches


def test_few_columns_split_their_sums():
    with compiling_for(TARGETS["sm_90"], compile=False) as launches:
        for m, n, by_rows in ((16, 528, True), (16, 1000, True), (17, 528, True), (16, 528, False)):
            hopper.on_hopper(Dense(m=m, n=n, k=65536, rows=by_rows))()
    kernels = [launch.kernel for launch in launches]
    assert kernels == ["few_rows_kernel", "finish_kernel", "few_rows_kernel", "gemm_kernel", "gemm_kernel"]


@pytest.mark.parametrize("run", [hopper.run_hopper_up, hopper.run_hopper_down_grad])
def test_rows_that_a_tile_lacks_are_not_read(run):
    """All programs would read one row in their place, from one part of the L2 cache."""
    with compiling_for(TARGETS["sm_90"]) as launches:
        run()
    code = disassembled(launches[0].compiled.asm["cubin"])
    copies = [line for line in code.splitlines() if "LDGSTS.E" in line]
    assert copies and all(re.search(r", !?P[0-6] ;", line) for line in copies)
