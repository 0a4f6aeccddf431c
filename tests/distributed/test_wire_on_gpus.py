"""Shared experts with `fp8=` on all GPUs of this machine, over NCCL: tokens that travel in 8 bits."""

import contextlib
import math

import pytest
import torch
from check import error

from moe_aiter import make_plan
from moe_aiter.config import settings
from moe_aiter.distributed import guests
from moe_aiter.distributed.loans import GPU
from moe_aiter.kernels.experts.fp8 import RECIPES

from .ranks import all_bits, captured, of_all_ranks, ranks_on_gpus, run
from .test_on_gpus import (
    E,
    T,
    build,
    check_graph,
    check_no_synchronisation,
    check_transports,
    draw,
    mine,
    share,
    step,
)

pytestmark = pytest.mark.gpu


def check_bits(rank, world, transport, recipe, dtype):
    """Those of tokens that are quantised on arrival, and the values of one GPU."""
    ways = [{"rows": float(world)}, {"rows": 0.5}, {"max_tokens": T + 3}, {"guests": E // world}]
    for options in ({}, {"bias": True}, {"recompute": "z"}):
        experts, given = build(dtype, fp8=recipe, **options), draw(world, dtype=dtype, skew=1.0)
        alone, (x, ids, s, dout) = step(experts, experts, *given), mine(rank, world, given)
        for way in ways if world > 1 else ways[:-1]:
            steps, forward = [], []
            for bits in (contextlib.nullcontext, all_bits):
                with bits():
                    shared = share(experts, world, transport=transport, **way)
                    steps.append(of_all_ranks(step(shared, shared, x, ids, s, dout)))
                    with torch.no_grad():
                        forward.append(shared(x, s, make_plan(ids, E)))
            what = transport, recipe, dtype, options, way
            assert torch.equal(*forward), what
            for name, value in steps[0].items():
                assert torch.equal(value, steps[1][name]), (*what, name)
                assert error(value, alone[name]) < 0.02, (*what, name)


def everything(rank, world, folder):
    guests.rates_of = lambda kind: GPU._replace(link=math.inf)  # so that experts of few rows are lent too
    for transport in ("collective", "symmetric") if world > 1 else ("collective",):
        for recipe in RECIPES:
            check_bits(rank, world, transport, recipe, torch.bfloat16)
        check_bits(rank, world, transport, "e5m2_all", torch.float16)
    for fp8 in ("e4m3", "e5m2_all", "block"):
        check_transports(rank, world, fp8=fp8)
    object.__setattr__(settings, "debug", False)  # whose checks of values synchronise
    for transport in captured():
        for fp8 in ("e4m3_all", "block"):
            check_no_synchronisation(rank, world, fp8, transport=transport)
            check_graph(rank, world, fp8, transport=transport)
            check_graph(rank, world, fp8, transport=transport, rows=0.5)


def test_wire_on_gpus(tmp_path):
    run(ranks_on_gpus(), everything, tmp_path, "nccl")
