"""Cases for test_compile.py: portable products of few rows a group, whose weights are the left operand."""

import functools
import re

from aot import Case, with_tile
from compile_products import FULL, ODD, Shape, run_gmm, run_gmm_by_rows, run_up

from moe_aiter.tuning import Config
from moe_aiter.tuning.candidates import FEW_ROWS

SMALL = Config(16, 64, 64, 1, 4, 3)  # every GPU has room for it
SHORT = Shape(1024, 2048, 768)
GPT_OSS = Shape(1024, 5760, 2880)  # half a step of 128 more than whole ones
RUNS = {
    "up": lambda s: run_up(s, save_z=False),
    "up interleaved with bias": lambda s: run_up(s, "swiglu_oai", True, True),
    "up relu2": lambda s: run_up(s, "relu2"),
    "gmm with bias": lambda s: run_gmm(s, bias=True),
    "gmm by rows": run_gmm_by_rows,
}


def multiplies_weights_from_shared_memory(target, launches):
    """By instructions of warpgroups, after copies of 16 bytes, and with nothing in between."""
    for launch in launches:
        code = launch.assembly
        assert "wgmma.mma_async" in code and "mma.sync" not in code
        assert not re.search(r"wgmma\.mma_async[^{]*\{[^}]*\}, *\{", code), "an operand in registers"
        assert "cp.async.cg.shared.global" in code and "cp.async.ca" not in code


def cases():
    for name, run in RUNS.items():
        for size, s in (("short", SHORT), ("gpt-oss", GPT_OSS)):
            for tile in FEW_ROWS:
                case = Case(
                    with_tile(tile, functools.partial(run, s)),
                    ["sm_90"],
                    also=multiplies_weights_from_shared_memory,
                )
                yield f"few rows, {name}, {size}, {tile}", case
        for size, s in (("full", FULL), ("odd", ODD)):
            case = Case(with_tile(SMALL, functools.partial(run, s)), matrix="any")
            yield f"few rows, {name}, {size}", case


CASES = dict(cases())
