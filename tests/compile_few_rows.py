"""Cases for test_compile.py: portable products of few rows a group, whose weights are the left operand, and
the tiles that `moe_aiter/tuning/cost.py` chooses."""

import dataclasses
import functools
import re
import unittest.mock

from aot import TARGETS, Case, with_tile
from compile_products import FULL, ODD, TUNED, E, Shape, run_gmm, run_up, small
from shapes import CAPPED

from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.activations import ACTIVATIONS
from moe_aiter.tuning import Config, table_name
from moe_aiter.tuning.candidates import FEW_ROWS, OF_EXPERTS
from moe_aiter.tuning.table import Key, find_tile

SMALL = Config(16, 64, 64, 1, 4, 3)  # every GPU has room for it
SHORT = Shape(1024, 2048, 768)
GPT_OSS = Shape(1024, 5760, 2880)  # half a step of 128 more than whole ones
RUNS = {
    "up": lambda s: run_up(s, save_z=False),
    "up interleaved with bias": lambda s: run_up(s, "swiglu_oai", True, True),
    "up relu2": lambda s: run_up(s, "relu2"),
    "gmm with bias": lambda s: run_gmm(s, bias=True),
    "gmm by rows": lambda s: run_gmm(dataclasses.replace(s, transposed=True)),
}


def multiplies_weights_from_shared_memory(target, launches):
    """By instructions of warpgroups, after copies of 16 bytes, and with nothing in between."""
    for launch in launches:
        code = launch.assembly
        assert "wgmma.mma_async" in code and "mma.sync" not in code
        assert not re.search(r"wgmma\.mma_async[^{]*\{[^}]*\}, *\{", code), "an operand in registers"
        assert "cp.async.cg.shared.global" in code and "cp.async.ca" not in code


def stand_in(run):
    """`run` where Hopper's kernel would take more rows: see `hopper.stands_in`."""

    def launch():
        with unittest.mock.patch.object(hopper, "is_hopper", lambda device: True):
            run()

    return launch


def cases():
    for activation in (*ACTIVATIONS, CAPPED):
        run = functools.partial(run_up, GPT_OSS, activation, bias=True, save_z=False)
        for tile in FEW_ROWS[:1] + FEW_ROWS[6:7]:
            yield f"in Hopper's place, {activation}, {tile}", Case(stand_in(with_tile(tile, run)), ["sm_90"])
    for tile in FEW_ROWS:
        run = functools.partial(run_gmm, GPT_OSS, bias=True)
        yield f"in Hopper's place, gmm, {tile}", Case(stand_in(with_tile(tile, run)), ["sm_90"])
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


def cost_cases():
    """On each target what is chosen for few and for many rows, short and long."""
    for target, gpu in TARGETS.items():
        names = (table_name(gpu.gpu.backend, gpu.gpu.arch),)
        for op in OF_EXPERTS:
            keys = [Key(op, 16, rows, size, size) for rows in (8, 64, 1024) for size in (256, 4096)]
            for tile, key in {find_tile(names, key): key for key in keys}.items():
                run = functools.partial(TUNED[op], Shape(key.rows * E, key.n, key.k))
                yield f"{op} {tile} on {target}", Case(run, [target], matrix=small(tile))


CASES = dict(cases()) | dict(cost_cases())
