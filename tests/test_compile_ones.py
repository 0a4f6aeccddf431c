"""Every kernel compiles where integer arguments are 1: Triton makes such an argument a constant.

A constant has no `.to`, for example, so such a kernel fails only at sizes and strides of 1.
"""

import functools
import importlib
import pkgutil

import pytest
import torch

import moe_aiter.kernels
from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.dense.attention_mask import launch_mask_bias, launch_zero_rows
from moe_aiter.kernels.quantize import blocks, layouts, rows
from moe_aiter.kernels.quantize.rows import launch_quantize_rows
from moe_aiter.tuning.candidates import HOPPER_TILES

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import test_compile_gemm
import test_compile_hopper
import test_compile_masked
import test_compile_scaled
import test_compile_segments
import test_compile_sparse
import test_compile_targets
from aot import TARGETS, compiling_for, front_end_only
from test_compile_targets import ints, new
from triton.runtime.jit import JITFunction

from moe_aiter.kernels.base.launch import Remembering

F32, E4M3 = torch.float32, torch.float8_e4m3fn
SM90 = TARGETS["sm_90"]


def run_attention():
    mask, alive = new(4, 1, 64, 64, dtype=torch.bool), new(4, 1, 64, 1, dtype=torch.uint8)
    launch_mask_bias((new(4, 1, 64, 64), alive), mask, torch.bfloat16)
    launch_zero_rows(new(4, 8, 64, 64), alive.view(torch.bool))


def run_quantize(k=4096):
    x, out = new(4, 256, k), (new(4, 256, k, dtype=E4M3), new(4, 256, dtype=F32))
    launch_quantize_rows(out, x, "e4m3")
    rows.launch_quantize_rows_and_amax((*out, new(4, k, dtype=F32)), x, "e4m3")
    columns = new(4, k, 256, dtype=E4M3), new(4, k, dtype=F32)
    rows.launch_quantize_by_amax(columns, x.mT, columns[1], "e4m3")
    layouts.launch_quantize_transposed(columns[0], x, out[1], "e4m3")
    layouts.launch_transpose_rows8(columns[0], out[0])
    inputs = new(256, k), new(4, k, dtype=F32), ints(4), "e4m3"
    layouts.launch_quantize_folded(layouts.new_quantize_folded(*inputs), *inputs)


def run_chunks():
    sizes, order = ints(4), ints(256)
    plan = blocks.new_plan_chunks(sizes, 256)
    blocks.launch_plan_chunks(plan, sizes, 256)
    inputs = new(64, 128, dtype=E4M3), order, 4, plan[1]
    blocks.launch_transpose_chunks(blocks.new_transpose_chunks(*inputs), *inputs)
    inputs = new(256, 128), new(64, dtype=F32), order, 4, plan[1], "e4m3"
    blocks.launch_quantize_chunks(blocks.new_quantize_chunks(*inputs), *inputs)


def cases():
    plain = test_compile_hopper, test_compile_masked, test_compile_scaled, test_compile_segments
    for file in (test_compile_targets, *plain):
        yield from file.CASES.values()
    yield from (launch for launch, _ in test_compile_sparse.CASES.values())
    yield from (case.run for case in test_compile_gemm.CASES.values())
    yield from (case.run for case in test_compile_gemm.ONE_ROW.values())
    yield from (case.run_on_hopper for case in test_compile_gemm.HOPPER_CASES.values())
    yield from (run_attention, run_quantize, run_chunks)


def kernels():
    """Every function of the package that is launched, by file and name."""
    prefix = "moe_aiter.kernels."
    for info in pkgutil.walk_packages(moe_aiter.kernels.__path__, prefix):
        for name, f in vars(importlib.import_module(info.name)).items():
            launched = isinstance(f, Remembering) or isinstance(f, JITFunction) and name.endswith("_kernel")
            if launched and f.__module__ == info.name:
                yield f"{info.name.removeprefix(prefix)}.{name}", f


KERNELS = dict(kernels())


def small_tile(key):
    """A tile that compiles faster than the usual one, of the kernels that take longest."""
    if key.op in HOPPER_TILES:
        return min(HOPPER_TILES[key.op], key=lambda c: (c.block_m * c.block_n * c.block_k, c.store_n))
    return tuning.Config(64, 64, 32) if key.op in test_compile_targets.TUNED else None


def choices(launch):
    """What decides which branches of a kernel are compiled: what is there, and constants that are no size."""
    named = {**dict(zip(launch.fn.arg_names, launch.args, strict=False)), **launch.options}
    return {(name, v if v is None or isinstance(v, (bool, str)) else type(v)) for name, v in named.items()}


@functools.cache
def launches():
    """Of each kernel a few launches with every choice, the one with the most arguments first."""
    with tuning.choose(small_tile), compiling_for(SM90, compile=False) as found:
        for case in cases():
            case()
    chosen = {}
    for launch in sorted(found, key=lambda launch: sum(a is None for a in launch.args)):
        those = chosen.setdefault(launch.fn, [])
        if choices(launch) - set().union(*map(choices, those)):
            those.append(launch)
    return chosen


def with_ones(args):
    if isinstance(args, tuple):
        return tuple(map(with_ones, args))
    return 1 if type(args) is int else args


def one_in_turn(args):
    """The arguments with one integer after the other, in tuples too, replaced by 1."""
    for i, a in enumerate(args):
        others = one_in_turn(a) if isinstance(a, tuple) else [1] if type(a) is int and a != 1 else []
        for other in others:
            yield (*args[:i], other, *args[i + 1 :])


def compile_with(launch, args):
    return launch.fn.run(*args, grid=(1,), warmup=True, **launch.options)


def test_every_kernel_is_launched():
    missing = [name for name, fn in KERNELS.items() if fn not in launches()]
    assert KERNELS and not missing


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_integer_may_be_1(kernel):
    launch, *_ = launches()[KERNELS[kernel]]
    with compiling_for(SM90), front_end_only():
        for args in one_in_turn(launch.args):
            compile_with(launch, args)


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_integers_may_be_1(kernel):
    """With every choice; one launch is compiled to the end."""
    chosen = launches()[KERNELS[kernel]]
    with compiling_for(SM90), front_end_only():
        for launch in chosen[1:]:
            compile_with(launch, with_ones(launch.args))
    with compiling_for(SM90) as compiled:
        compile_with(chosen[0], with_ones(chosen[0].args))
    assert compiled[0].assembly
