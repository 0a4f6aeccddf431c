"""The layer of each family in plain torch, after its paper and configuration, to compare our MoE with.

The formula reads the original names of the checkpoint and config.json, and nothing that a conversion writes.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layers.moe import MoE
from .families import Family, first

FUNCTIONS = {"silu": F.silu, "swish": F.silu, "gelu": F.gelu, "relu": F.relu}
DRAWN, TOKENS = 64, 16  # tokens, and those of them whose choice of experts is clearest: rounding changes none


class Formula(NamedTuple):
    """A block of a checkpoint, computed in float32, an expert at a time."""

    family: Family
    fused: bool
    config: dict
    read: Callable[..., Tensor]  # a name in the block, and an index into the tensor

    def logits(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, E)."""
        router = self.family.router
        bias = self.read(f"{router}.bias").float() if self.family.name == "gpt_oss" else None
        return F.linear(x, self.read(f"{router}.weight").float(), bias)

    def routing_weights(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(T, E), 0 where an expert is not chosen; and by how much the choice is clear, (T,)."""
        config, renormalizes, top_k = (
            self.config,
            self.family.renormalizes,
            self.config["num_experts_per_tok"],
        )
        if self.family.name == "deepseek_v3":
            scores = logits.sigmoid()
            ids, margin = self.limited(scores, top_k)
        else:
            scores = logits.softmax(1)
            ids, margin = best(logits, top_k)
        weights = scores.gather(1, ids)
        if self.family.name == "gpt_oss":
            weights = logits.gather(1, ids).softmax(1)
        elif renormalizes is None or first(config, ("norm_topk_prob",), renormalizes):
            weights = weights / weights.sum(1, keepdim=True)
        if self.family.name == "deepseek_v3":
            weights = weights * first(config, ("routed_scaling_factor",), 2.5)
        return torch.zeros_like(logits).scatter(1, ids, weights), margin

    def limited(self, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The choice among the experts of the best groups: DeepSeek-AI 2024, arXiv 2412.19437, 2.1.2."""
        ranked = scores + self.read(f"{self.family.router}.e_score_correction_bias").float()
        groups, kept = first(self.config, ("n_group",), 8), first(self.config, ("topk_group",), 4)
        if kept >= groups:
            return best(ranked, top_k)
        sums = ranked.unflatten(1, (groups, -1)).topk(2).values.sum(-1)
        chosen, margin = best(sums, kept)
        allowed = torch.zeros_like(sums).scatter(1, chosen, 1).bool()
        allowed = allowed.repeat_interleave(ranked.shape[1] // groups, 1)
        ids, gap = best(ranked.masked_fill(~allowed, -math.inf), top_k)
        return ids, margin.minimum(gap)

    def output(self, x: Tensor, weights: Tensor) -> Tensor:
        """sum_e weights[t, e] * expert_e(x[t]) + shared(x[t]): (T, H)."""
        out, family = torch.zeros_like(x), self.family
        for e, column in enumerate(weights.T):
            rows = column.nonzero()[:, 0]
            if len(rows):
                out[rows] += column[rows, None] * self.expert(x[rows], e)
        if family.name == "deepseek_v3" and first(self.config, ("n_shared_experts",), 1):
            matrices = (self.read(f"shared_experts.{matrix}.weight") for matrix in family.matrices)
            out += mlp(self.config, x, *matrices)
        return out

    def expert(self, x: Tensor, e: int) -> Tensor:
        if self.family.name == "gpt_oss":
            return self.oai_expert(x, e)
        if self.fused:
            gate, up = self.read("experts.gate_up_proj", (e,)).chunk(2)
            return mlp(self.config, x, gate, up, self.read("experts.down_proj", (e,)))
        matrices = (self.read(f"experts.{e}.{matrix}.weight") for matrix in self.family.matrices)
        return mlp(self.config, x, *matrices)

    def oai_expert(self, x: Tensor, e: int) -> Tensor:
        """OpenAI 2025, arXiv 2508.10925."""
        gate_up, bias = (self.read(f"experts.gate_up_proj{end}", (e,)).float() for end in ("", "_bias"))
        down, down_bias = (self.read(f"experts.down_proj{end}", (e,)).float() for end in ("", "_bias"))
        z = x @ gate_up + bias
        gate, up = z[:, ::2].clamp(max=7), z[:, 1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate) @ down + down_bias


def mlp(config: dict, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    act = FUNCTIONS[first(config, ("hidden_act",), "silu")]
    return F.linear(act(F.linear(x, gate.float())) * F.linear(x, up.float()), down.float())


def best(ranked: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ids of the `count` highest, the lower id of two that are equal; and the gap to the next."""
    values, ids = ranked.sort(descending=True, stable=True)
    if count == ranked.shape[1]:
        return ids, torch.full_like(values[:, 0], math.inf)
    return ids[:, :count], values[:, count - 1] - values[:, count]


def difference(moe: MoE, formula: Formula) -> float:
    """The largest relative difference of an output of `moe` from the formula, over random tokens.

    16 tokens are routed by either side; then as many as it takes to visit every expert have their experts and
    weights given.
    """
    dtype, num_experts = moe.experts.down.dtype, moe.num_experts
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DRAWN, moe.hidden, generator=generator).to(dtype)
    visits = -(-num_experts // moe.top_k)
    ids = torch.arange(visits * moe.top_k).view(visits, moe.top_k) % num_experts
    drawn = torch.rand(ids.shape, generator=generator) + 0.5
    more = torch.randn(visits, moe.hidden, generator=generator).to(dtype)
    with torch.no_grad():
        weights, margin = formula.routing_weights(formula.logits(x.float()))
        clear = margin.sort(descending=True, stable=True).indices[:TOKENS]
        weights = torch.cat([weights[clear], torch.zeros(visits, num_experts).scatter_add(1, ids, drawn)])
        ours = torch.cat([moe(x[clear]), moe(more, expert_ids=ids, routing_weights=drawn)])
        theirs = formula.output(torch.cat([x[clear], more]).float(), weights)
    return relative(ours, theirs)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest over tokens (T, H) of |ours - theirs| / |theirs|, in the Euclidean norm; NaN if any is."""
    scale = theirs.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((ours.float() - theirs).norm(dim=1) / scale).max().item()


def tolerance(dtype: torch.dtype) -> float:
    """Of that, for weights of `dtype`: a few roundings, or in float32 the order of long sums."""
    return max(4 * torch.finfo(dtype).eps, 1e-5)
