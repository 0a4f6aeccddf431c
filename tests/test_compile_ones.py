"""Every kernel compiles where integer arguments are 1: Triton makes such an argument a constant.

A constant has no `.to`, for example, so such a kernel fails only at sizes and strides of 1.
"""

import functools

import pytest

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.tuning.candidates import HOPPER_TILES

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import compile_few
import compile_hopper
import compile_muon
import compile_products
import compile_rows
from aot import KERNELS, TARGETS, compiling_for, front_end_only

SM90 = TARGETS["sm_90"]
MODULES = compile_few, compile_muon, compile_rows, compile_products, compile_hopper
CASES = {name: case for module in MODULES for name, case in module.CASES.items()}


def small_tile(key):
    """A tile that compiles faster than the usual one, of the kernels that take longest."""
    if key.op in HOPPER_TILES:
        return min(HOPPER_TILES[key.op], key=lambda c: (c.block_m * c.block_n * c.block_k, c.store_n))
    return tuning.Config(64, 64, 32) if key.op in compile_products.TUNED else None


def choices(launch):
    """What decides which branches of a kernel are compiled: what is there, and constants that are no size."""
    named = {**dict(zip(launch.fn.arg_names, launch.args, strict=False)), **launch.options}
    return {(name, v if v is None or isinstance(v, (bool, str)) else type(v)) for name, v in named.items()}


@functools.cache
def launches():
    """Of each kernel a few launches with every choice, the one with the most arguments first."""
    with tuning.choose(small_tile), compiling_for(SM90, compile=False) as found:
        for case in CASES.values():
            if "sm_90" in case.targets:
                case.run()
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


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_integer_may_be_1(kernel):
    launch, *_ = launches()[KERNELS[kernel]]
    with compiling_for(SM90), front_end_only():
        for args in one_in_turn(launch.args):
            compile_with(launch, args)


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_integers_may_be_1(kernel):
    """With every choice."""
    with compiling_for(SM90), front_end_only():
        for launch in launches()[KERNELS[kernel]]:
            compile_with(launch, with_ones(launch.args))


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
def test_machine_code_where_all_integers_are_1(kernel):
    launch, *_ = launches()[KERNELS[kernel]]
    with compiling_for(SM90) as compiled:
        compile_with(launch, with_ones(launch.args))
    assert compiled[0].assembly
