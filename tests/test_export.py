"""torch.export with dynamic sizes: an exported program is saved, loaded and run at other sizes."""

import io

import pytest
import torch
from torch import nn
from torch.export import Dim, export, load, save

from moe_aiter import (
    Capacity,
    ExpertChoice,
    Experts,
    GroupLimit,
    MoE,
    OptimizedMoELayer,
    Router,
    Sinkhorn,
    TokenRounding,
    TopP,
    ZeroCompute,
    gmm,
    make_plan,
    permute,
    unpermute,
)
from moe_aiter.layers.lora import LoRAExperts

H, E = 16, 8
COEFS = {f"{loss}_coef": 0.1 for loss in ("load_balance", "sequence_balance", "global_balance", "z_loss")}
SIZES = (1, 7, 64, 129, 0)


class WithLoRA(nn.Module):
    def __init__(self, **lora):
        super().__init__()
        self.moe = MoE(H, 8, E, 2)
        self.moe.experts = LoRAExperts(self.moe.experts, rank=3, **lora)

    def forward(self, x):
        return self.moe(x)


class Given(nn.Module):
    """`OptimizedMoELayer` behind a router."""

    def __init__(self):
        super().__init__()
        self.router = Router(H, E, 2)
        self.layer = OptimizedMoELayer(H, E, 8)

    def forward(self, x):
        routing = self.router(x)
        return self.layer(x, routing.expert_ids, routing.routing_weights)


class Steps(nn.Module):
    """A layer of permute, gmm and unpermute."""

    def __init__(self):
        super().__init__()
        self.router, self.weight = Router(H, E, 2), nn.Parameter(torch.randn(E, H, H))

    def forward(self, x):
        routing = self.router(x)
        plan = make_plan(routing.expert_ids, E)
        rows = gmm(permute(x, plan), self.weight, plan.group_sizes)
        return unpermute(rows, plan, routing.routing_weights)


class OfExperts(nn.Module):
    def __init__(self, **kind):
        super().__init__()
        self.router, self.experts = Router(H, E, 2), Experts(E, H, 8, **kind)

    def forward(self, x):
        routing = self.router(x)
        return self.experts(x, routing.routing_weights, make_plan(routing.expert_ids, E))


def layers(**kinds):
    return nn.Sequential(*(MoE(H, 8, E, kind.pop("top_k", 2), **kind) for kind in kinds.values()))


def of_layers():
    shared = {"shared_intermediate": 4, "shared_gate": True, "score": "sigmoid", "selection_bias": True}
    kinds = layers(losses=COEFS | {"bias": True}, shared=shared, one={"top_k": 1})
    return nn.Sequential(
        *kinds, OfExperts(recompute="z", row_chunks=2), Given(), Steps(), WithLoRA(dora=True)
    )


def of_choices():
    choices = (GroupLimit(4, 2), TopP(0.5), Sinkhorn(2), ExpertChoice(4), TokenRounding(4))
    capacity = {"capacity": Capacity(1.1, drop="probability")}
    newest = {"zero_compute": ZeroCompute(2), "latent": 4}
    return layers(capacity=capacity, newest=newest, **{str(choice): {"choice": choice} for choice in choices})


MODULES = {"layers": of_layers, "choices": of_choices}


def exported(module, args, dims, **kwargs):
    """What is left of `module` after it was exported, saved and loaded."""
    program = export(module, args, kwargs, dynamic_shapes=dims, strict=False)
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    return load(file).module()


def grads(module, out):
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)


@pytest.mark.parametrize("kind", MODULES)
def test_inference(kind):
    module = MODULES[kind]().eval()
    with torch.no_grad():
        program = exported(module, (torch.randn(5, H),), ({0: Dim.DYNAMIC},))
        for size in SIZES:
            x = torch.randn(size, H)
            torch.testing.assert_close(program(x), module(x))


@pytest.mark.parametrize("kind", MODULES)
def test_training(kind):
    module = MODULES[kind]().train()
    program = exported(module, (torch.randn(5, H),), ({0: Dim.DYNAMIC},))
    for size in SIZES:
        x = torch.randn(size, H)
        expected, out = module(x), program(x)
        torch.testing.assert_close(out, expected)
        for mine, theirs in zip(grads(program, out), grads(module, expected), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_two_dynamic_axes_and_a_mask():
    module = MoE(H, 8, E, 2, **COEFS).train()
    dims = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "mask": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    x, mask = torch.randn(3, 5, H), torch.rand(3, 5) > 0.3
    program = exported(module, (x,), dims, mask=mask)
    for batch, length in ((2, 7), (4, 64), (1, 1), (0, 3)):
        x, mask = torch.randn(batch, length, H), torch.rand(batch, length) > 0.3
        expected, out = module(x, mask=mask), program(x, mask=mask)
        torch.testing.assert_close(out, expected)
        for mine, theirs in zip(grads(program, out), grads(module, expected), strict=True):
            torch.testing.assert_close(mine, theirs)
