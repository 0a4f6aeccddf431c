"""The dense product compiles for every target at every tile of its tables: see test_compile_targets.py."""

import dataclasses
import re

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.dense.gemm import ACTIVATIONS, WIDEST_STEP, bind_gemm
from moe_aiter.tuning.candidates import HOPPER_TILES, PORTABLE
from moe_aiter.tuning.table import load

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for, cubin_resources, disassembled
from test_compile_hopper import module
from test_compile_targets import ELSEWHERE, check, new

OPS = "gemm", "gemm_full"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch: sizes, how w lies, and the epilogue."""

    m: int = 4096
    n: int = 4096
    k: int = 4096
    batch: int = 1
    dtype: torch.dtype = BF16
    rows: bool = True  # w.mT is contiguous
    activation: str = ""
    bias: bool = False
    beta: float = 0.0
    alpha: float = 1.0
    save_z: bool = False
    out: torch.dtype | None = None

    def run(self, bind=bind_gemm):
        B, M, N, K = self.batch, self.m, self.n, self.k
        out = new(B, M, N, dtype=self.out or self.dtype)
        x = new(B, M, K, dtype=self.dtype)
        w = new(B, N, K, dtype=self.dtype).mT if self.rows else new(B, K, N, dtype=self.dtype)
        bias = new(N, dtype=self.dtype) if self.bias else None
        c = new(M, N, dtype=self.dtype).expand(B, M, N) if self.beta else None
        z = torch.empty_like(out) if self.save_z else out[:0]
        i = GemmInputs(x, w, bias, c, self.activation, self.alpha, self.beta, self.out, self.save_z)
        bind(i)((out, z), i)

    def run_on_hopper(self):
        self.run(module("gemm").bind_gemm)


EVERYTHING = Case(activation="gelu", bias=True, beta=0.5, alpha=2.0, save_z=True)
EPILOGUES = {"gemm": Case(bias=True), "gemm_full": EVERYTHING}
HOPPER_EPILOGUES = {  # where each needs the most registers
    "hopper_gemm": [Case(bias=True, alpha=2.0), Case()],
    "hopper_gemm_act": [
        Case(activation=name, alpha=a, save_z=True) for name in ACTIVATIONS for a in (1.0, 2.0)
    ],
    "hopper_gemm_full": [EVERYTHING, Case(beta=0.5)],
}
CASES = {
    "plain": Case(),
    "columns": Case(rows=False),
    "float16": Case(dtype=F16, bias=True),
    "float32": Case(dtype=F32, bias=True),
    "float32 out": Case(out=F32),
    "batched": Case(m=300, n=528, k=320, batch=7),
    "batched, odd": Case(m=300, n=520, k=328, batch=7),
    "everything": EVERYTHING,
    "few rows": Case(m=16, activation="silu", bias=True),
    "few rows, batched": Case(m=9, n=520, k=328, batch=7),
    "few rows, columns": Case(m=1, n=14336, rows=False),
    "split": Case(m=64, n=256, k=65536, beta=1.0, bias=True, activation="gelu", save_z=True),
    "odd": Case(m=333, n=331, k=77, bias=True),
    **{name: Case(activation=name) for name in ACTIVATIONS},
}
HOPPER_CASES = {
    **{
        name: case for name, case in CASES.items() if case.dtype != F32 and case.out is None and name != "odd"
    },
    "batched columns": Case(m=300, n=520, k=320, batch=7, rows=False),
    "everything, columns": dataclasses.replace(EVERYTHING, rows=False),
    **{f"{name}, kept": Case(activation=name, save_z=True) for name in ACTIVATIONS},
    **{f"{name}, kept, with bias": Case(activation=name, bias=True, save_z=True) for name in ACTIVATIONS},
}


def table_cases():
    for name, target in TARGETS.items():
        rows = load(tuning.table_name(target.gpu.backend, target.gpu.arch))
        for row in (row for row in rows if row.key.op in ("gemm", "gemm_full")):
            op, bits, most = row.key[:3]
            yield pytest.param(name, row, id=f"{name}-{op} {bits} {most or 'any'}")


def assert_matrix_instruction(target, launches, small):
    """`small`: the older one will do, the only one for tiles of less than 64 rows."""
    allowed = {target.matrix} | ({"mma.sync"} if small else set())
    products = [launch for launch in launches if launch.kernel == "gemm_kernel"]
    assert len(products) == 1 and any(name in products[0].assembly for name in allowed)


@pytest.mark.parametrize("target, row", list(table_cases()))
def test_table_row(target, row):
    """The configuration of a table row, at a shape that picks it."""
    op, bits, rows, n, k = row.key
    sizes = {"m": rows or 4096, "n": n or 4096, "k": k or 4096, "dtype": {16: BF16, 32: F32}[bits]}
    case = dataclasses.replace(EPILOGUES[op], **sizes)
    target = TARGETS[target]
    with compiling_for(target) as launches:
        assert tuning.lookup(op, case.dtype, case.m, case.n, case.k, 1) == row.config
        case.run()
    check(target, launches)
    if bits == 16:
        assert_matrix_instruction(target, launches, small=row.config.block_m < 64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_case(target, case):
    gpu = TARGETS[target]
    with compiling_for(gpu) as launches:
        CASES[case].run()
    check(gpu, launches, spills="odd" in case)
    if CASES[case].dtype != F32:
        assert_matrix_instruction(gpu, launches, small=CASES[case].m < 64 or case == "odd")


@pytest.mark.parametrize(
    "op, config", [pytest.param(op, c, id=f"{op}: {c}") for op in OPS for c in PORTABLE[op]]
)
def test_candidate(op, config):
    """Every tile that is worth trying, on the GPU that it is for."""
    with tuning.choose(lambda key: config), compiling_for(TARGETS["sm_90"]) as launches:
        dataclasses.replace(EPILOGUES[op], m=16 if config.block_m == 16 else 4096).run()
    check(TARGETS["sm_90"], launches)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", TARGETS)
def test_tiles_that_read_long_pieces_fit_every_target(target, op):
    tiles = [tile for tile in PORTABLE[op] if tile.block_k > 256]
    assert tiles and max(tile.block_k for tile in PORTABLE[op]) <= WIDEST_STEP
    for tile in tiles:
        with tuning.choose(lambda key, tile=tile: tile), compiling_for(TARGETS[target]) as launches:
            dataclasses.replace(EPILOGUES[op], m=16).run()
        check(TARGETS[target], launches)
        assert_matrix_instruction(TARGETS[target], launches, small=True)


@pytest.mark.parametrize("case", HOPPER_CASES)
def test_hopper_case(case):
    check_hopper(HOPPER_CASES[case].run_on_hopper)


@pytest.mark.parametrize(
    "op, tile", [pytest.param(op, t, id=f"{op}: {t}") for op in HOPPER_EPILOGUES for t in HOPPER_TILES[op]]
)
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_hopper_tile(op, tile, rows):
    with tuning.choose(lambda key: tile if key.op == op else None):
        for case in HOPPER_EPILOGUES[op]:
            check_hopper(dataclasses.replace(case, rows=rows).run_on_hopper)


def test_every_dense_tile_is_compiled():
    assert HOPPER_EPILOGUES.keys() == {op for op in HOPPER_TILES if op.startswith("hopper_gemm")}


def check_hopper(run):
    target = TARGETS["sm_90"]
    with compiling_for(target) as launches:
        run()
    check(target, launches)
    product, *rest = launches
    if product.kernel == "few_rows_kernel":
        assert [launch.kernel for launch in rest] in ([], ["finish_kernel"])
        check_few_rows(product)
    else:
        assert not rest and "wgmma.mma_async" in product.assembly and "setmaxnreg" in product.assembly


def check_few_rows(launch):
    """Shared memory is for the sum over warps alone; all loads of a step come before its products."""
    before, products, after = launch.assembly.partition("mma.sync.aligned.m16n8k16")
    assert products and "ld.global.L1::evict_first" in before and ".v4.b32" in before
    assert not re.search("(ld|st)[.]shared|shfl", before + after[: after.rindex("mma.sync")])
    code = re.findall(r"\b(LDG|HMMA)\b", disassembled(launch.compiled.asm["cubin"]))
    loads = code.index("HMMA")
    assert loads > 4 and "LDG" not in code[loads : code.count("HMMA") + loads]


@pytest.mark.parametrize("m", [2, 5, 16])
@pytest.mark.parametrize("tile", HOPPER_TILES["hopper_few_rows"], ids=str)
def test_few_rows(tile, m):
    cases = Case(m=m), dataclasses.replace(EVERYTHING, m=m, k=4104), Case(m=m - 1, n=256, k=65536, dtype=F16)
    with tuning.choose(lambda key: tile if key.op == "hopper_few_rows" else None):
        for case in cases:
            check_hopper(case.run_on_hopper)


@pytest.mark.parametrize("tile", HOPPER_TILES["hopper_few_rows"], ids=str)
def test_an_sm_has_room_for_the_programs_that_keep_it_busy(tile):
    with (
        tuning.choose(lambda key: tile if key.op == "hopper_few_rows" else None),
        compiling_for(TARGETS["sm_90"]) as launches,
    ):
        Case(m=16).run_on_hopper()
    registers = cubin_resources(launches[0].compiled.asm["cubin"])["REG"]
    at_once = module("gemm").programs_at_once(tile)
    assert at_once * tile.num_warps * 32 * (-(-registers // 8) * 8) <= 2**16
    assert at_once >= 1 and tile.num_warps * at_once >= 16


def test_few_columns_split_their_sums():
    with compiling_for(TARGETS["sm_90"], compile=False) as launches:
        Case(m=16, n=528, k=65536).run_on_hopper()
        Case(m=16, n=1000, k=65536).run_on_hopper()
        Case(m=17, n=528, k=65536).run_on_hopper()
        Case(m=16, n=528, k=65536, rows=False).run_on_hopper()
    kernels = [launch.kernel for launch in launches]
    assert kernels == ["few_rows_kernel", "finish_kernel", "few_rows_kernel", "gemm_kernel", "gemm_kernel"]


ONE_ROW = {
    "plain": Case(m=1),
    "float32": Case(m=1, dtype=F32),
    "eights": Case(m=1, k=4104),
    "odd": Case(m=1, n=1061, k=4097),
    "float32 out": Case(m=1, out=F32),
    "batched": Case(m=1, n=520, k=328, batch=7),
    "everything": dataclasses.replace(EVERYTHING, m=1),
    **{name: Case(m=1, activation=name, save_z=True) for name in ACTIVATIONS},
}


@pytest.mark.parametrize("case", ONE_ROW)
@pytest.mark.parametrize("target", TARGETS)
def test_one_row(target, case):
    """Nothing but its sum is in shared memory, and 16 bytes are loaded at a time."""
    gpu = TARGETS[target]
    with compiling_for(gpu) as launches:
        ONE_ROW[case].run()
    check(gpu, launches)
    (launch,) = launches
    assert launch.kernel == "one_row_kernel" and launch.shared_bytes <= 4096
    wide = re.search(r"(?:global|buffer)_load_dwordx4|ld[.]global\S*[.]v4[.]b32", launch.assembly)
    assert bool(wide) != (case == "odd")


@pytest.mark.parametrize("tile", PORTABLE["gemm_row"], ids=str)
def test_loads_of_one_row_come_before_its_sums(tile):
    """All of a step, in the machine code."""
    with tuning.choose(lambda key: tile), compiling_for(TARGETS["sm_90"]) as launches:
        Case(m=1).run_on_hopper()
        dataclasses.replace(EVERYTHING, m=1, k=4104).run_on_hopper()
    check(TARGETS["sm_90"], launches)
    for launch in launches:
        assert launch.kernel == "one_row_kernel"
        code = "".join({"LDG": "l", "FFMA": "f", "BRA": "|"}[name] for name in in_order(launch))
        step = next(part for part in code.split("|") if "l" in part)
        pieces = tile.block_n * tile.block_k // (32 * tile.num_warps * 8)
        assert step.count("l") > pieces and "f" not in step


def in_order(launch):
    return re.findall(r"\b(LDG|FFMA|BRA)\b", disassembled(launch.compiled.asm["cubin"]))


def test_every_kernel_has_a_case():
    with compiling_for(TARGETS["sm_90"], compile=False) as launches:
        for case in CASES.values():
            case.run()
    assert {launch.kernel for launch in launches} == {"gemm_kernel", "finish_kernel"} <= ELSEWHERE
