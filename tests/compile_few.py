"""Cases for test_compile.py: the layer's kernels for few tokens."""

import functools
import itertools
import re

import torch
from aot import Case, new
from shapes import CAPPED

from moe_aiter.invariance import invariant
from moe_aiter.kernels.base.activations import ACTIVATIONS
from moe_aiter.kernels.experts import few
from moe_aiter.kernels.experts.tiers import meta_experts
from moe_aiter.kernels.rows.route import bind_route, new_route
from moe_aiter.kernels.rows.route_few import (
    RouteFewInputs,
    bind_few_logits,
    bind_route_few,
    bind_split_logits,
    new_route_few,
)
from moe_aiter.routing.router import LogitsInputs

F32 = torch.float32
SHAPES = {  # T, H, I, E, k
    "C": (1, 2048, 768, 128, 8),
    "gpt-oss": (4, 2880, 2880, 32, 4),
    "odd": (3, 333, 77, 60, 5),
}
SAME_BITS = {**SHAPES, "odd": (3, 328, 72, 60, 5), "one choice": (1, 5120, 8192, 16, 1)}
SAME_BITS["22 choices"] = 1, 1024, 512, 512, 22


def run_experts(shape, activation="swiglu", same_bits=False, **how):
    i = meta_experts(shape, activation, **how)
    with invariant(same_bits):
        few.bind_few(i)(i.x.new_empty(i.x.shape), i)


def run_route(T, E, top_k, sigmoid, renormalize, bias=False, same_bits=False):
    selection_bias = new(E, dtype=F32) if bias else None
    i = RouteFewInputs(new(T, E, dtype=F32), selection_bias, top_k, sigmoid, renormalize, 1.0)
    with invariant(same_bits):
        bind_route_few(i)(new_route_few(i), i)
        if not bias:
            bind_route(many := i.route())(new_route(many), many)


def run_logits(T, H, E, dtype=torch.bfloat16, bias=False):
    i = LogitsInputs(new(T, H), new(E, H, dtype=dtype), new(E) if bias else None)
    bind_few_logits(i)(new(T, E, dtype=F32), i)


def run_split(T, H, E, unit=1):
    i = LogitsInputs(new(T, H * unit)[:, ::unit], new(E, H, dtype=F32), None)
    bind_split_logits(i)(new(T, E, dtype=F32), i)


def reads_16_bytes(target, launches):
    """Weights, several such loads one after the other, and no number one by one but of tokens and biases."""
    for launch in launches if target.startswith("sm") else ():
        wide = re.findall(r"ld\.global\S*\.v4\.b32", launch.assembly)
        assert len(wide) >= 2, launch.kernel


def multiplies_16_bytes(target, launches):
    for launch in launches:
        assert "mma.sync" in launch.assembly and "cp.async.cg" in launch.assembly, launch.kernel


def cases():
    for activation, transposed in itertools.product([*ACTIVATIONS, CAPPED], (False, True)):
        run = functools.partial(run_experts, SHAPES["C"], activation, transposed=transposed)
        yield f"few tokens, {activation}, transposed {transposed}", Case(run, also=reads_16_bytes)
    for (shape, sizes), bias in itertools.product(SAME_BITS.items(), (False, True)):
        run = functools.partial(run_experts, sizes, same_bits=True, bias=bias)
        yield f"few tokens, same bits, {shape}, bias {bias}", Case(run, ["sm_90"], also=multiplies_16_bytes)
    how = {"activation": "swiglu_oai", "interleaved": True, "bias": True}
    for shape, transposed in itertools.product(SHAPES, (False, True)):
        for dtype in (torch.bfloat16, torch.float16, F32):
            run = functools.partial(run_experts, SHAPES[shape], **how, transposed=transposed, dtype=dtype)
            yield f"few tokens, {shape}, {dtype}, transposed {transposed}", Case(run)
    for sizes in ((1, 128, 8), (8, 512, 8), (8, 1024, 16), (3, 60, 5), (1, 1, 1)):
        for how in ((False, True), (False, False), (True, True), (True, False, True)):
            for same_bits in (False, True):
                run = functools.partial(run_route, *sizes, *how, same_bits=same_bits)
                yield f"route few {sizes} {how}, same bits {same_bits}", Case(run)
    for sizes in ((1, 2048, 128), (8, 2880, 32), (3, 333, 60)):
        yield f"logits of few {sizes}", Case(functools.partial(run_logits, *sizes, F32, True))
    for sizes in ((1, 2048, 128), (200, 2880, 32), (3, 333, 60), (2, 64, 8, 3)):
        run = functools.partial(run_split, *sizes)
        yield f"logits by parts {sizes}", Case(run, ["sm_80", "sm_90"])


CASES = dict(cases())
