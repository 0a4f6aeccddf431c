"""`keep_fp8_weights` and FSDP2, which fills a weight's memory anew and leaves its version as it was."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_aiter import MoE, keep_fp8_weights


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train(around_step, around_all, reshard):
    """Two steps of three micro-batches; the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MoE(64, 32, num_experts=4, top_k=2, fp8="e4m3") for _ in range(2)))
    mesh = init_device_mesh("cpu", (1,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with around_all():
        for batch in torch.randn(2, 3, 20, 64):
            with around_step():
                for i, x in enumerate(batch):
                    model.set_reshard_after_backward(reshard or i == 2)
                    model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.to_local() for p in model.parameters()]


@pytest.mark.parametrize("reshard", [True, False])
def test_the_same_weights(one_rank, reshard):
    """A step inside the block too: what is gathered then has the version of before, maybe the address."""
    nothing = contextlib.nullcontext
    want = train(nothing, nothing, reshard)
    for around in ((keep_fp8_weights, nothing), (nothing, keep_fp8_weights)):
        assert all(map(torch.equal, train(*around, reshard), want))
