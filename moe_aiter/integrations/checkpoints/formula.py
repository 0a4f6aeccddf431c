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
from .family import Family, first

FUNCTIONS = {"silu": F.silu, "swish": F.silu, "gelu": F.gelu, "relu": F.relu}
FUNCTIONS["relu2"] = lambda x: x.relu().square()
SCORES = {"sigmoid": torch.sigmoid, "sqrt_softplus": lambda z: F.softplus(z).sqrt()}
FUNCTIONS["gelu_pytorch_tanh"] = lambda x: F.gelu(x, approximate="tanh")
DRAWN, TOKENS = 64, 16  # tokens, and those of them whose choice of experts is clearest: rounding changes none


class Formula(NamedTuple):
    """A block of a checkpoint, computed in float32, an expert at a time."""

    family: Family
    fused: bool
    config: dict
    read: Callable[..., Tensor]  # a name in the block, and an index into the tensor

    def logits(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, E)."""
        router = self.family.routers[self.fused]
        bias = self.read(f"{router}.bias").float() if self.family.name == "gpt_oss" else None
        return F.linear(x, self.read(f"{router}.weight").float(), bias)

    def routing_weights(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(T, E), 0 where an expert is not chosen; and by how much the choice is clear, (T,)."""
        family, config = self.family, self.config
        top_k, score = first(config, family.top_k), family.score_of(config)
        scores = SCORES[score](logits) if score in SCORES else logits.softmax(1)
        limits = family.corrects(config) or family.group_limit(config)
        ids, margin = self.limited(scores, top_k) if limits else best(logits, top_k)
        weights = scores.gather(1, ids)
        if score == "topk_softmax":
            weights = logits.gather(1, ids).softmax(1)
        elif family.renormalizes is None or first(config, ("norm_topk_prob",), family.renormalizes):
            weights = weights / (weights.sum(1, keepdim=True) + family.added)
        if family.scale is not None:
            weights = weights * first(config, (family.scale_key,), family.scale)
        return torch.zeros_like(logits).scatter(1, ids, weights), margin

    def limited(self, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The choice among the experts of the best groups: DeepSeek-AI 2024, arXiv 2412.19437, 2.1.2.

        DeepSeek-V2 ranks a group by its highest score: arXiv 2405.04434, 2.2.2.
        """
        ranked, limit = scores, self.family.group_limit(self.config)
        if self.family.corrects(self.config):
            ranked = scores + self.read(self.family.correction[self.fused]).float().view(-1)
        if limit is None:
            return best(ranked, top_k)
        groups, count = limit.num_groups, 1 if limit.score == "max" else 2
        sums = ranked.unflatten(1, (groups, -1)).topk(count).values.sum(-1)
        chosen, margin = best(sums, limit.top_groups)
        allowed = torch.zeros_like(sums).scatter(1, chosen, 1).bool()
        allowed = allowed.repeat_interleave(ranked.shape[1] // groups, 1)
        ids, gap = best(ranked.masked_fill(~allowed, -math.inf), top_k)
        return ids, margin.minimum(gap)

    def output(self, x: Tensor, weights: Tensor) -> Tensor:
        """sum_e weights[t, e] * expert_e(x[t]) + shared(x[t]): (T, H)."""
        latent = self.family.latent if self.config.get("moe_latent_size") else None
        to, back = (self.read(f"{name}.weight").float() for name in latent or ()) if latent else (None, None)
        inner = F.linear(x, to) if latent else x  # NVIDIA 2025, Nemotron 3
        out = torch.zeros_like(inner)
        for e, column in enumerate(weights.T):
            rows = column.nonzero()[:, 0]
            if len(rows):
                out[rows] += column[rows, None] * self.expert(inner[rows], e)
        out = F.linear(out, back) if latent else out
        shared = self.family.shared
        if shared is None or not first(self.config, (shared.size,), shared.default):
            return out
        matrices = self.family.shared_matrices(self.fused)
        both = self.mlp(x, *(self.read(f"{shared.name}.{matrix}.weight") for matrix in matrices))
        if shared.gate:  # Qwen Team 2024, arXiv 2407.10671
            both = both * F.linear(x, self.read(f"{shared.gate}.weight").float()).sigmoid()
        return out + both

    def expert(self, x: Tensor, e: int) -> Tensor:
        if self.family.zero_experts and e >= first(self.config, self.family.num_experts):
            return x  # Meituan 2025, arXiv 2509.01322
        if self.family.name == "gpt_oss":
            return self.oai_expert(x, e)
        if stacked := self.family.stacked_of(self.fused):
            *ups, down = (self.read(name, (e,)) for name in stacked)
            if self.family.transposed and not self.fused:
                ups, down = [ups[0].mT], down.mT
            if len(ups) == 1:
                ups = ups[0].chunk(len(self.family.matrices) - 1)
            return self.mlp(x, *ups, down)
        return self.mlp(x, *(self.read(f"experts.{e}.{matrix}.weight") for matrix in self.family.matrices))

    def mlp(self, x: Tensor, *weights: Tensor) -> Tensor:
        limit = first(self.config, ("swiglu_limit",), self.family.limit) if self.family.limit else math.inf
        return mlp(self.config, x, *weights, act=self.family.act, limit=limit)

    def oai_expert(self, x: Tensor, e: int) -> Tensor:
        """OpenAI 2025, arXiv 2508.10925."""
        gate_up, bias = (self.read(f"experts.gate_up_proj{end}", (e,)).float() for end in ("", "_bias"))
        down, down_bias = (self.read(f"experts.down_proj{end}", (e,)).float() for end in ("", "_bias"))
        z = x @ gate_up + bias
        limit, alpha = first(self.config, ("swiglu_limit",), 7), first(self.config, ("swiglu_alpha",), 1.702)
        gate, up = z[:, ::2].clamp(max=limit), z[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate) @ down + down_bias


def mlp(
    config: dict, x: Tensor, *weights: Tensor, act: str = "hidden_act", limit: float = math.inf
) -> Tensor:
    """Multiply by the weights of the gate, if there is one, of up and of down.

    `limit` bounds the gate from above and up on both sides: DeepSeek-AI 2026, DeepSeek-V4.
    """
    *gate, up, down = weights
    function = FUNCTIONS[first(config, (act,), "silu" if gate else "relu2")]
    hidden = F.linear(x, up.float()).clamp(-limit, limit)
    hidden = function(F.linear(x, gate[0].float()).clamp(max=limit)) * hidden if gate else function(hidden)
    return F.linear(hidden, down.float())


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
    dtype, num_experts = moe.experts.down.dtype, moe.num_routed
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
    """Return the tolerance for weights of `dtype`: a few roundings, or in float32 the order of long sums."""
    return max(4 * torch.finfo(dtype).eps, 1e-5)
