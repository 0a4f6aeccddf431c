"""The policy of examples/rl_same_bits.py, trained on two ranks, has the bits of an engine in one process."""

import copy

import pytest
import torch
from rl_same_bits import LENGTH, VOCABULARY, Policy

from moe_aiter import patch_linear
from moe_aiter.config import interpret
from moe_aiter.distributed import expert_mesh, parallelize
from moe_aiter.invariance import invariant

from .ranks import run

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

WORLD = 2


def one_rank(rank, world, folder):
    mesh = expert_mesh("cpu", ep=world)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        engine = Policy().to(dtype)
        trainer = parallelize(copy.deepcopy(engine), mesh)
        tokens = torch.randint(VOCABULARY, (world, 30, LENGTH))[rank]
        with invariant(), patch_linear():
            trained = trainer(tokens)
            with torch.no_grad():
                for some in ([0], [29, 3, 8]):
                    assert torch.equal(engine(tokens[some]), trained[some]), (dtype, some)
        trained.mean().backward()


@pytest.mark.ranks
def test_two_ranks_train(tmp_path):
    run(WORLD, one_rank, tmp_path)
