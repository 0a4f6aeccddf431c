"""A user's file: `make lint` checks it with `mypy --strict`, as if moe_aiter were installed."""

import torch

import moe_aiter
from moe_aiter import (
    LoRAExperts,
    MoE,
    Monitor,
    aux_loss,
    balance_step,
    gmm,
    keep_fp8_weights,
    make_plan,
    pack_routes,
    permute,
    record_routes,
    register_kernel,
    replay_routes,
    route,
    set_aux_loss,
    set_loss_scale,
    unpermute,
    use,
)
from moe_aiter.compat.aiter import AITERLinear
from moe_aiter.compat.aiter.tuned_gemm import gemm_a16w16

moe = MoE(hidden=256, intermediate=128, num_experts=16, top_k=2, dtype=torch.float32)
x = torch.randn(8 * 64, 256)
y: torch.Tensor = moe(x)
experts = LoRAExperts(moe.experts, rank=4)
print(moe_aiter.__version__.split("."), gemm_a16w16.__name__, AITERLinear.__name__)
with keep_fp8_weights(), use("torch"), Monitor(moe) as monitor:
    for name, layer in monitor.read().items():
        print(name, layer.dead_experts + 1)
with record_routes(moe, weights=True) as routes:
    moe(x)
with replay_routes(moe, routes) as replay:
    moe(x)
print(pack_routes([routes["MoE"][0].expert_ids[:, None]]).shape, replay.differences()["MoE"].choices + 1)
balance_step(moe)
set_loss_scale(moe, 1.0)
set_aux_loss(moe, "return")
loss: torch.Tensor = moe(x).mean() + aux_loss(moe)

routing = route(x @ moe.router.weight.T, top_k=2)
plan = make_plan(routing.expert_ids, num_experts=16)
rows: torch.Tensor = gmm(permute(x, plan), moe.experts.gate_up.mT, plan.group_sizes)
print(unpermute(rows, plan, routing.routing_weights).shape)


@register_kernel(op="gmm", backend="torch")
def product(out: torch.Tensor, *inputs: object) -> None: ...
