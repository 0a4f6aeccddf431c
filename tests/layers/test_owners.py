"""Parameters with numbers in their own forward pass alone, as with ZeRO-3, offloading and FSDP2 of parts."""

import copy

import pytest
import torch
from check import error, gather_and_release
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_aiter import LoRAExperts, LoRALinear, MoE
from moe_aiter.config import interpret

from ..distributed.ranks import run, whole

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

H, T = 12, 10
IDS = torch.randint(4, (T, 2), generator=torch.Generator().manual_seed(0))


class WithExperts(nn.Module):
    """LoRAExperts on a routing of its own."""

    def __init__(self):
        super().__init__()
        self.moe = MoE(H, 8, 4, 2, bias=True)
        self.moe.experts = LoRAExperts(self.moe.experts, rank=2)

    def forward(self, x):
        return self.moe(x)


class Fixed(nn.Module):
    """Given ids, with the router's weights; a shared expert and a latent space beside."""

    def __init__(self):
        super().__init__()
        options = {"shared_intermediate": 8, "shared_gate": True, "latent": 6, "selection_bias": True}
        self.moe = MoE(H, 8, 4, 2, bias=True, **options)

    def forward(self, x):
        return self.moe(x, expert_ids=IDS) + self.moe(x)


MODELS = {
    "MoE": Fixed,
    "LoRAExperts": WithExperts,
    "LoRALinear": lambda: LoRALinear(nn.Linear(H, H), rank=2),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]()
    for key, p in model.named_parameters():
        if key.endswith(".B"):
            nn.init.normal_(p)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_parameters_without_numbers(name):
    """Nothing that a layer computes needs another module's parameter outside of that module's call."""
    model, x = build(name), torch.randn(T, H)
    with torch.no_grad():
        want = model(x)
        gather_and_release(model)
        assert torch.equal(model(x), want)


@pytest.mark.parametrize("name", MODELS)
def test_offloaded_by_accelerate(name):
    accelerate = pytest.importorskip("accelerate")
    model, x = build(name), torch.randn(T, H)
    with torch.no_grad():
        want = model(x)
        accelerate.cpu_offload(model, execution_device="cpu")
        assert all(p.is_meta for p in model.parameters())
        assert torch.equal(model(x), want)


def parts_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]


def shard_parts(rank, world, folder):
    """Each module with parameters is a unit of its own: results and gradients are those of one process."""
    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(world, T, H, generator=torch.Generator().manual_seed(2))
    for name in MODELS:
        alone = build(name)
        model = copy.deepcopy(alone)
        for part in parts_of(model):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        outs = [alone(part) for part in x]
        torch.stack(outs).square().mean().backward()
        out = model(x[rank])
        out.square().mean().backward()
        torch.testing.assert_close(out, outs[rank])
        for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            if q.grad is not None:
                assert error(whole(p.grad), q.grad) < 1e-5, f"{name}: {key}"


def test_parts_sharded_by_fsdp(tmp_path):
    run(2, shard_parts, tmp_path)


def test_dora_says_that_it_needs_the_weight():
    layer = LoRALinear(nn.Linear(H, H), rank=2, dora=True)
    layer.base.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="shard or offload the LoRALinear as one module"):
        layer(torch.randn(T, H))
