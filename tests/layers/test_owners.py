"""Parameters with numbers in their own forward pass alone, as with ZeRO-3, offloading and FSDP2 of parts."""

import copy

import pytest
import torch
from check import error, gather_and_release
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_aiter import LoRAExperts, LoRALinear, MoE, fuse_qkv, quantize
from moe_aiter.config import interpret

from ..distributed.ranks import run, whole

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)

H, T = 12, 300  # more rows than `FEW_ROWS`
IDS = torch.randint(4, (T, 2), generator=torch.Generator().manual_seed(0))


def with_experts(**lora) -> MoE:
    moe = MoE(H, 8, 4, 2, bias=True)
    moe.experts = LoRAExperts(moe.experts, rank=2, **lora)
    return moe


class Rows(nn.Module):
    """A LoRALinear with an adapter for each row, and with segments of rows."""

    def __init__(self, bias: bool, **lora):
        super().__init__()
        self.linear = LoRALinear(nn.Linear(H, H, bias), 3, rank=2, **lora)

    def forward(self, x):
        ids, lens = torch.arange(T) % 4 - 1, torch.tensor([T // 3, T - T // 3])
        return self.linear(x, ids) + self.linear(x, torch.tensor([2, 0]), lens)


class Fused(nn.Module):
    """Projections of one weight, each by itself and all at once."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = fuse_qkv(*(nn.Linear(H, H) for _ in range(3)))

    def forward(self, x):
        return self.q(x) + 2 * self.k(x) + 3 * self.v(x) + sum(self.q.fused(x))


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
    "LoRAExperts": with_experts,
    "DoRA": lambda: with_experts(dora=True),
    "LoRALinear": lambda: LoRALinear(nn.Linear(H, H), rank=2),
    "LoRALinear, rows": lambda: Rows(True),
    "LoRALinear, DoRA": lambda: Rows(True, dora=True),
    "LoRALinear, DoRA without bias": lambda: Rows(False, dora=True),
    "fused": Fused,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]()
    for key, p in model.named_parameters():
        if key.endswith((".B", ".magnitude")):
            nn.init.normal_(p)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_parameters_without_numbers(name):
    """Nothing that a layer computes needs another module's parameter outside of that module's call."""
    model, x = build(name), torch.randn(T, H)
    with torch.no_grad():
        want = model(x)
        text = str(model)
        gather_and_release(model)
        assert torch.equal(model(x), want) and str(model) == text


@pytest.mark.parametrize("name", [name for name in MODELS if name != "fused"])  # whose names accelerate lacks
def test_offloaded_by_accelerate(name):
    accelerate = pytest.importorskip("accelerate")
    model, x = build(name), torch.randn(T, H)
    with torch.no_grad():
        want = model(x)
        accelerate.cpu_offload(model, execution_device="cpu")
        assert all(p.is_meta for p in model.parameters())
        assert torch.equal(model(x), want)


@pytest.mark.parametrize("adapted", [False, True])
def test_four_bits_offloaded_by_accelerate(adapted):
    """The weights are buffers of modules of their own."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(1)
    model, x = quantize(MoE(64, 64, 4, 2), "nf4"), torch.randn(T, 64)
    if adapted:
        model.experts = LoRAExperts(model.experts, rank=2, dora=True)
    with torch.no_grad():
        want = model(x)
        accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert torch.equal(model(x), want)


HIDDEN = {"meta": lambda model: model.to("meta"), "released": gather_and_release}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("name", ["LoRALinear", "LoRAExperts"])
def test_adapters_without_numbers_are_neither_merged_nor_copied(name, hide):
    """What is written to such a tensor is lost."""
    model = build(name)
    layer = getattr(model, "experts", model)
    state = layer.peft_state_dict()
    hide(model)
    for call in (layer.merge, layer.peft_state_dict, lambda: layer.load_peft_state_dict(state)):
        with pytest.raises(ValueError, match="the weights have no numbers now"):
            call()
    layer = build(name)
    layer = getattr(layer, "experts", layer)
    layer.merge()
    hide(layer)
    with pytest.raises(ValueError, match="the weights have no numbers now"):
        layer.unmerge()
    assert layer.original is not None


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


@pytest.mark.ranks
def test_parts_sharded_by_fsdp(tmp_path):
    run(2, shard_parts, tmp_path)


def test_dora_says_that_it_needs_the_weight():
    class Other(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T

    layer = LoRALinear(Other(H, H), rank=2, dora=True)
    layer.base.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"this Other, .* offload the LoRALinear as one module"):
        layer(torch.randn(T, H))
