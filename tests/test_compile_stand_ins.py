"""A portable kernel that stands in for Hopper's has the same operations, as their assembly shows."""

import collections
import re

import pytest
from aot import TARGETS, compiling_for, disassembled, with_tile
from compile_hopper import run_hopper_up
from compile_products import Shape, run_up
from shapes import CAPPED, LIMITED

from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.activations import ACTIVATIONS
from moe_aiter.tuning import Config

OPERATION = re.compile(r"\b(FMUL|FADD|FFMA|MUFU\.EX2|MUFU\.RCP|FMNMX\S*)\b([^;]*);")
REGISTER = re.compile(r"\bU?R\d+|\bRZ|\.reuse|\bU?P[\dT]+|c\[.*?\]\[.*?\]|[ ,!|@]+")
TILE = Config(64, 128, 64, 8, 4, 4)


def operations(run, elements):
    """How often each operation on float32 occurs for an element: (name, constants) -> times."""
    with compiling_for(TARGETS["sm_90"]) as launches:
        run()
    (launch,) = (launch for launch in launches if launch.kernel == "expert_up_kernel")
    found = OPERATION.findall(disassembled(launch.compiled.asm["cubin"]))
    counts = collections.Counter((name, REGISTER.sub(" ", rest).strip()) for name, rest in found)
    return {operation: n // elements for operation, n in counts.items() if n >= elements}


@pytest.mark.parametrize(
    "activation",
    ["swiglu_oai", *(pytest.param(a, marks=pytest.mark.full) for a in (*ACTIVATIONS, LIMITED, CAPPED))],
)
def test_the_same_operations(activation, monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    few = with_tile(TILE, lambda: run_up(Shape(1024, 2048, 768), activation, bias=True))
    # channels of a thread; Hopper's kernel has its code once for each consumer
    mine, theirs = operations(few, 32), operations(lambda: run_hopper_up(activation, bias=True), 128)
    assert mine == theirs and ("FADD", "") in mine
