"""A byte-level decoder-only transformer whose MLPs are MoE layers.

RMSNorm: Zhang and Sennrich 2019, arXiv 1910.07467.  Rotary positions: Su et al. 2021, arXiv 2104.09864.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_aiter import MoE

from .presets import TrainConfig

VOCAB = 256
FREEZING = 1e-6  # logits divided by less could be infinite; from here on the likeliest byte is taken


class Transformer(nn.Module):
    """Bytes (B, S) int64 -> logits (B, S, 256), and the routing of each MoE layer (none in a dense model)."""

    def __init__(self, config: TrainConfig):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCAB, bias=False)
        self.turns = config.sequence, config.hidden // config.heads
        set_turns(self)
        self.register_load_state_dict_post_hook(set_turns)
        self.initialise(config.seed)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list]:
        length = tokens.shape[1]
        turn = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)  # (B, S, H)
        routings = []
        for block in self.blocks:
            x, routing = block(x, turn)
            routings += [] if routing is None else [routing]
        return self.head(self.norm(x)), routings

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        set_turns(self)
        return self

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights of variance 1 / fan-in, divided by the branches where a residual branch ends."""
        generator = torch.Generator().manual_seed(seed)
        branches = 2 * len(self.blocks)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = weight.shape[-1] ** -0.5
            if name.endswith(("out.weight", "down.weight", "experts.down")):
                std *= branches**-0.5
            weight.normal_(std=std, generator=generator)


def set_turns(model: Transformer, *_) -> None:
    """Compute the buffers that no state dict has, where the weights are; a hook, too."""
    for name, t in zip(("cos", "sin"), rotary(*model.turns), strict=True):
        model.register_buffer(name, t.to(model.embedding.weight.device), persistent=False)


class Block(nn.Module):
    def __init__(self, config: TrainConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.mlp_norm = nn.RMSNorm(config.hidden)
        if config.dense:
            self.mlp = DenseMLP(config.hidden, config.active_intermediate)
        else:
            self.mlp = MoE(
                config.hidden, config.intermediate, config.num_experts, config.top_k,
                shared_intermediate=config.shared_intermediate,
                fp8=None if config.fp8 == "none" else config.fp8,
            )  # fmt: skip

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple | None]:
        x = x + self.attention(self.attention_norm(x), turn)
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, MoE):
            out, routing = self.mlp(normed, return_routing=True)
        else:
            out, routing = self.mlp(normed), None
        return x + out, routing


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, hidden = x.shape
        qk, v = self.qkv(x).split([2 * hidden, hidden], -1)
        qk = rotate(qk.reshape(batch, length, 2 * self.heads, -1), turn).transpose(1, 2)
        q, k = qk.chunk(2, 1)  # (B, heads, S, D) each
        v = v.view(batch, length, self.heads, -1).transpose(1, 2)
        return self.out(attend(q, k, v).transpose(1, 2).reshape(batch, length, hidden))


class DenseMLP(nn.Module):
    """The gated MLP that the experts of one token add up to: SwiGLU, Shazeer 2020, arXiv 2002.05202."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)  # (B, S, I) each
        return self.down(F.silu(gate) * up)


def rotary(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (length, 1, width) of the angles by which the channels of a head turn."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channels j and j + D/2 of x (B, S, heads, D), as a pair, by the angle of their position."""
    cos, sin = (t.to(x.dtype) for t in turn)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v, each (B, heads, S, D)."""
    if q.is_cuda or q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # on a CPU, torch's fused kernel takes twice as long as plain matmuls for a few hundred bfloat16 positions
    future = torch.full((q.shape[-2], q.shape[-2]), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + future
    return scores.softmax(-1, dtype=q.dtype) @ v


def active_params(model: Transformer, config: TrainConfig) -> int:
    """Parameters that one token meets: of the experts only top_k of num_experts, all of the rest."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return total - experts + experts * config.top_k // config.num_experts


def flops_per_token(model: Transformer, config: TrainConfig) -> int:
    """Floating-point operations of one training step, per token.

    Two for each active weight forward and four backward, and those of attention; the embedding multiplies
    nothing.  Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B, with half of its attention term:
    scores that lie in the future are not counted.
    """
    weights = active_params(model, config) - model.embedding.weight.numel()
    return 6 * weights + 6 * config.layers * config.hidden * config.sequence


@torch.no_grad()
def generate(model: Transformer, length: int, temperature: float, seed: int, prompt: bytes = b"\0") -> bytes:
    """Continue `prompt` by `length` bytes.  Byte 0 starts a file, so the default is text from nothing."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)  # (1, S)
    for _ in range(length):
        logits, _ = model(tokens[:, -len(model.cos) :])
        last = logits[0, -1].float().cpu()  # (256,)
        if temperature > FREEZING:
            choice = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
        else:
            choice = last.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, choice.to(device)[None]], 1)
    return bytes(tokens[0, len(prompt) :].tolist())


def readable(text: bytes) -> str:
    """For a terminal: where a new file begins a new line does, and nothing unprintable is left."""
    decoded = text.replace(b"\0", b"\n").decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
