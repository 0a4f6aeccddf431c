"""Batch invariance of shared experts on all GPUs of this machine: the bits of one GPU."""

import math

import pytest
import torch

from moe_aiter import LoRAExperts, make_plan, quantize, use
from moe_aiter.distributed import guests
from moe_aiter.distributed.loans import GPU
from moe_aiter.invariance import invariant

from .ranks import gathered, ranks_on_gpus, run
from .test_on_gpus import E, build, draw, mine, share, step

pytestmark = pytest.mark.gpu
KINDS = {
    "bfloat16": build,
    "biases": lambda: build(bias=True, activation="gelu"),
    "recompute": lambda: build(recompute="z"),
    "float32": lambda: build(torch.float32),
    **{f"fp8 {recipe}": lambda recipe=recipe: build(fp8=recipe) for recipe in ("e4m3", "e4m3_all", "block")},
    "4 bits": lambda: quantize(build(), "nf4"),
    "lora": lambda: LoRAExperts(build(), rank=8).cuda(),
}
WAYS = {}, {"rows": 0.5}, {"guests": 4}, {"rows": 0.5, "guests": 4, "max_tokens": 600}


def check_kind(rank, world, kind, backend):
    experts, dtype = KINDS[kind](), torch.float32 if kind == "float32" else torch.bfloat16
    given = draw(world, dtype=dtype, skew=1.0)
    x, ids, s, dout = mine(rank, world, given)
    with use(backend), invariant():
        alone = step(experts, experts, *given)
        for transport in ("collective", "symmetric"):
            for way in WAYS:
                shared = share(experts, world, transport=transport, **way)
                got = step(shared, shared, x, ids, s, dout)
                with torch.no_grad():
                    got["alone"] = shared(x, s, make_plan(ids, E))
                for name in ("out", "dx", "ds", "alone"):
                    want = alone["out" if name == "alone" else name]
                    assert torch.equal(gathered(got[name]), want), (kind, backend, transport, way, name)


def everything(rank, world, folder):
    guests.rates_of = lambda kind: GPU._replace(link=math.inf)  # so that experts of few rows are lent too
    for kind in KINDS:
        check_kind(rank, world, kind, "auto")
    for kind in ("bfloat16", "biases", "lora"):
        check_kind(rank, world, kind, "triton")


@pytest.mark.skipif(ranks_on_gpus() < 2, reason="it needs two GPUs, or ranks that share one")
def test_bits_of_one_gpu(tmp_path):
    run(ranks_on_gpus(), everything, tmp_path, "nccl")
