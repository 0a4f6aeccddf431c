"""Liger: `LigerFusedMoEFunction.apply` is `expert_mlp`."""

import torch
from names import module

from moe_aiter import expert_mlp, make_plan

NOT_APPLICABLE = {
    "routing_metadata": "Liger's own tables of tiles, which moe_aiter does not make",
}


class LigerFusedMoEFunction:
    @staticmethod
    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        plan = make_plan(top_k_index, len(gate_up_proj))
        return expert_mlp(x, gate_up_proj, down_proj, top_k_weights, plan)


def install(checkout):
    module("liger_kernel.ops", LigerFusedMoEFunction=LigerFusedMoEFunction)
    module("liger_kernel.ops.fused_moe", compute_routing_metadata=None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module("liger_kernel.utils", infer_device=lambda: device)
