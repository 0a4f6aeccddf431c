"""ScatterMoE: `mlp.MLP`, two grouped products with an activation between them."""

import types

import torch
from names import module
from torch import nn

from moe_aiter import grouped_gemm


class ParallelExperts(nn.Module):
    def __init__(self, num_experts, input_size, output_size, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size))
        self.bias = nn.Parameter(torch.zeros(num_experts, output_size)) if bias else None
        nn.init.normal_(self.weight, std=0.02)


class MLP(nn.Module):
    def __init__(self, input_size, hidden_size, num_experts, top_k, bias=False, activation=None):
        super().__init__()
        self.experts = ParallelExperts(num_experts, input_size, hidden_size, bias)
        self.output_experts = ParallelExperts(num_experts, hidden_size, input_size, bias)
        self.top_k, self.activation = min(top_k, num_experts), activation

    def forward(self, x, expert_p, expert_idxs):
        tokens = x.reshape(-1, x.shape[-1])
        up, down = self.experts, self.output_experts
        each = {"bias": up.bias, "reduce": "none"}
        h = self.activation(grouped_gemm(tokens, up.weight.mT, expert_idxs, **each))
        summed = {"bias": down.bias, "reduce": "sum", "routing_weights": expert_p}
        return grouped_gemm(h, down.weight.mT, expert_idxs, **summed).view(x.shape)


def install(checkout):
    ops = types.SimpleNamespace(ALLOW_TF32=False)
    module("scattermoe.kernels", ops=ops)
    module("scattermoe.mlp", MLP=MLP)
    module("scattermoe.parallel_experts", ParallelExperts=ParallelExperts)
