"""The MoE of prime-rl 0.8.0 (commit 559b4477): a loop over experts, or its fused kernel's function."""

import torch
import torch.nn.functional as F
from torch import nn


class GroupedExperts(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, num_experts: int):
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) / 8)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) / 8)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) / 8)


class _FusedMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2, w3, selected_experts_indices, top_scores, num_experts, mxfp8):
        raise ModuleNotFoundError("the kernel is in another package, prime-kernels")


class MoE(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int):
        super().__init__()
        self.experts = GroupedExperts(dim, hidden_dim, num_experts)
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.top_k = top_k
        self.score_before_experts = False
        self.fused_kernel = None

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        top_scores, ids = F.softmax(self.gate(x).float(), dim=1).topk(self.top_k)
        e = self.experts
        if self.fused_kernel:
            mxfp8 = self.fused_kernel == "mxfp8"
            return _FusedMoE.apply(x, e.w1, e.w2, e.w3, ids, top_scores, e.num_experts, mxfp8).view(shape)
        out = torch.zeros_like(x)
        for i, (w1, w2, w3) in enumerate(zip(e.w1, e.w2, e.w3, strict=True)):
            token, choice = torch.where(ids == i)
            h = F.silu(x[token] @ w1.T) * (x[token] @ w3.T)
            out = out.index_add(0, token, (h @ w2.T * top_scores[token, choice, None]).to(x.dtype))
        return out.view(shape)
