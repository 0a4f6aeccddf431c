"""Cases for test_compile.py: what a step of Muon computes."""

import functools
import re

import torch
from aot import Case, new

from moe_aiter.kernels.dense.muon import (
    DirectionInputs,
    UpdateInputs,
    bind_momentum,
    bind_update,
    new_direction,
)
from moe_aiter.kernels.dense.symmetric import SymmetricInputs, bind_symmetric
from moe_aiter.optim import matrices_of

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ODD = ("sm_100",)  # where the addresses of single numbers spill
WIDE = "sm_89", "sm_120", "sm_90", "sm_100"  # and those of float32's


def run_symmetric(dtype=F16, n=1024, k=4096, columns=False, gram=True, added=False):
    x = new(8, k, n, dtype=dtype).mT if columns else new(8, n, k, dtype=dtype)
    w = x.mT if gram else new(8, k, n, dtype=dtype)
    i = SymmetricInputs(x, w, new(8, n, n, dtype=dtype) if added else None, 2.0, -4.7, 3.4)
    bind_symmetric(i)(new(8, n, n, dtype=dtype), i)


def run_step(halves=None, weight=BF16, gradient=BF16, momentum=True, nesterov=True, shape=(8, 2048, 768)):
    p, g, m = (matrices_of(new(*shape, dtype=dtype), halves) for dtype in (weight, gradient, gradient))
    i = DirectionInputs(g, m if momentum else None, 0.95, nesterov, 5, F16)
    x = new_direction(i)
    bind_momentum(i)(x, i)
    i = UpdateInputs(p, x, new(dtype=F32), 0.1, 2.0)
    bind_update(i)(p, i)


def in_units_of_16_bytes(target, launches):
    for launch in launches:
        assert not launch.narrow_loads, launch.kernel
        if target == "sm_90":
            assert re.search(r"st\.global\.v4\.b32", launch.assembly) or launch.kernel == "momentum_kernel"
            assert re.search(r"ld\.global\.v4\.b32|cp\.async\.bulk\.tensor", launch.assembly), launch.kernel


SYMMETRIC = {
    "gram": {},
    "gram of columns": {"columns": True},
    "of bfloat16": {"dtype": BF16},
    "polynomial": {"k": 1024, "gram": False, "added": True},
    "of two": {"k": 1024, "gram": False},
}
STEPS = {
    "plain": {},
    "rows": {"halves": "rows"},
    "interleaved": {"halves": "interleaved"},
    "transposed": {"halves": "transposed"},
    "float32": {"weight": F32, "gradient": F32, "nesterov": False},
    "mixed": {"weight": BF16, "gradient": F32},
    "without momentum": {"momentum": False},
}


def cases():
    for name, how in SYMMETRIC.items():
        run = functools.partial(run_symmetric, **how)
        yield f"symmetric {name}", Case(run, matrix="own", also=in_units_of_16_bytes)
    yield "symmetric odd", Case(functools.partial(run_symmetric, n=1003, k=401, added=True), spills=ODD)
    yield "symmetric float32", Case(functools.partial(run_symmetric, dtype=F32, added=True), spills=WIDE)
    for name, how in STEPS.items():
        yield f"Muon {name}", Case(functools.partial(run_step, **how), also=in_units_of_16_bytes)
    yield "Muon odd", Case(functools.partial(run_step, shape=(3, 61, 47)))


CASES = dict(cases())
