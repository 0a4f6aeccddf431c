"""Sums of 8-bit floats on Hopper: how many products the tensor core adds up before float32 does.

Every wgmma multiplies 32 numbers of each row; a chain of them begins where one does not add to what is there.
"""

import re

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.tuning import Config
from moe_aiter.tuning.candidates import PORTABLE
from moe_aiter.tuning.table import load

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import test_compile_masked as masked
import test_compile_scaled as scaled
from aot import TARGETS, compiling_for

SM90 = TARGETS["sm_90"]
PRODUCTS = 32  # of an instruction, for each number of the result
F8, F16, BF16 = torch.float8_e4m3fn, torch.float16, torch.bfloat16
MOST = 128 * 128  # numbers of a tile that registers hold twice, as it is and as the tensor core's sum
TILES = [  # of the tables, and what is tried beside them
    (op, tile)
    for op in ("scaled_fp8", "masked", "masked_few")
    for tile in dict.fromkeys([r.config for r in load("sm90") if r.key[:2] == (op, 8)] + [*PORTABLE[op]])
    if tile.block_m * tile.block_n <= MOST
]


def longest_sum(launch) -> int:
    """The most products that a tensor core adds up, 0 where none multiplies 8-bit floats."""
    chains, longest = {}, 0
    for line in launch.assembly.splitlines():
        if "wgmma.mma_async" in line and ".e4m3.e4m3" in line:
            acc, rest = re.search(r"\{(.*?)\},(.*);", line).groups()
            adds = rest.split(",")[-3].strip()  # to what is there: a predicate, 0 where it never does
            chains[acc] = PRODUCTS if adds == "0" else chains[acc] + PRODUCTS
            longest = max(longest, chains[acc])
    return longest


def compiled(run, tile=None, **named):
    with tuning.choose(lambda key: tile), compiling_for(SM90) as launches:
        run(**named)
    (launch,) = launches
    assert not launch.spilled() and launch.shared_bytes <= SM90.shared_bytes
    return launch


@pytest.mark.parametrize("op, tile", [pytest.param(*case, id="{} {}".format(*case)) for case in TILES])
def test_a_tile_sums_128_at_most(op, tile):
    if op == "scaled_fp8":
        runs = [lambda k=k: scaled.run(min(tile.block_m, 64), k=k, x=F8, out=F16) for k in (4096, 6544)]
    else:
        rows = tile.block_m if op == "masked_few" else 256
        runs = [lambda s=s: masked.run(rows, x=F8, shuffled=s) for s in (False, True)]
    for run in runs:
        assert 0 < longest_sum(compiled(run, tile)) <= 128


@pytest.mark.parametrize("m, n", [(16, 64), (64, 32), (128, 128)])
def test_a_longer_step_is_promoted_within(m, n):
    tile = Config(m, n, 256, 1, 8 if m == 128 else 4, 3)
    launch = compiled(scaled.run, tile, rows=m, x=F8)
    assert longest_sum(launch) == 128


def test_tiles_without_warpgroups_sum_in_float32():
    launch = compiled(scaled.run, Config(16, 32, 256, 1, 4, 3), rows=16, x=F8)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in launch.assembly
    assert not longest_sum(launch)


@pytest.mark.parametrize("out, most", [(F16, 128), (torch.float32, 128), (BF16, 256)], ids=str)
def test_hopper_sums_more_only_where_bfloat16_hides_it(out, most):
    for run in (scaled.run_on_hopper, lambda **named: scaled.run_on_hopper(k=2880, **named)):
        assert longest_sum(compiled(run, x=F8, out=out)) <= most
    assert longest_sum(compiled(scaled.run_on_hopper, x=F8, out=out)) == most
