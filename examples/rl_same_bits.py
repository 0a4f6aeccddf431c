"""Train a policy by reinforcement learning, with the same bits in the engine and in training.

    python examples/rl_same_bits.py
    python examples/rl_same_bits.py --no-invariance

The engine samples token by token, with a cache of keys and values, in batches of other sizes than training.
With batch invariance, both compute the same log-probability of each token, bit for bit.  Then the importance
ratio exp(new - old) of each token is exactly 1 before the first update on a rollout.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_aiter import MoE, Route, enable_batch_invariance, gemm, patch_linear, record_routes

VOCABULARY, HIDDEN, HEADS, LAYERS, TOP_K, LENGTH = 32, 64, 4, 2, 2, 12
SEQUENCES = [1, 3, 28]  # of each batch of the engine; training has one batch of all sequences


def attention(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Return causal attention of q (B, heads, Sq, D) to k, v (B, heads, Sk, D), by products of moe_aiter.

    The last query is at the last key.  Keys are padded to `length`, the same in the engine and in training,
    because the number of keys decides the order of the sums.  torch's own attention is not batch invariant:
    it sums in another order for one query than for many.
    """
    assert k.shape[2] <= length  # the pad would cut keys off
    places = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
    k, v = (F.pad(t, (0, 0, 0, length - t.shape[2])) for t in (k, v))
    later = torch.arange(length, device=q.device) > places[:, None]
    scores = gemm(q, k.mT).float() * q.shape[-1] ** -0.5
    probabilities = scores.masked_fill(later, float("-inf")).softmax(-1)
    return gemm(probabilities.to(v.dtype), v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, 64, num_experts=16, top_k=TOP_K)

    def forward(self, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the keys and values so far, (2, B, heads, S, D)."""
        heads = self.qkv(F.rms_norm(x, (HIDDEN,))).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        cache = torch.stack([k, v]) if cache is None else torch.cat([cache, torch.stack([k, v])], 3)
        x = x + self.out(attention(q, *cache, length=LENGTH).transpose(1, 2).flatten(2))
        return x + self.moe(F.rms_norm(x, (HIDDEN,))), cache


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, caches: list[Tensor | None] | None = None) -> Tensor:
        """Return log p of each next token (B, S, VOCABULARY).

        `caches` has the keys and values of the tokens before; those of `tokens` are added.
        """
        caches = [None] * LAYERS if caches is None else caches
        before = 0 if caches[0] is None else caches[0].shape[3]
        places = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.places(places)
        for i, block in enumerate(self.blocks):
            x, caches[i] = block(x, caches[i])
        return self.head(F.rms_norm(x, (HIDDEN,))).float().log_softmax(-1)


def ids_of(routes: dict[str, list[Route]], sequences: int) -> Tensor:
    """Return the recorded expert ids of a batch, (sequences, tokens, layers, TOP_K)."""
    calls = ([r.expert_ids.view(sequences, -1, TOP_K) for r in layer] for layer in routes.values())
    return torch.stack([torch.cat(ids, 1) for ids in calls], 2)


@torch.no_grad()
def generate(policy: Policy, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one batch as an engine does; return tokens, their log-probabilities and the experts."""
    tokens = torch.zeros(sequences, 1, dtype=torch.long, device=policy.head.weight.device)
    old, caches = [], [None] * LAYERS
    with record_routes(policy) as routes:
        for _ in range(LENGTH - 1):
            log_p = policy(tokens[:, -1:], caches)[:, 0]
            sampled = log_p.exp().multinomial(1)
            tokens = torch.cat([tokens, sampled], 1)
            old.append(log_p.gather(1, sampled))
    return tokens, torch.cat(old, 1), ids_of(routes, sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="rollouts, with one update each [20]")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"], help="[float32]")
    off = "leave batch invariance off, and see the ratios"
    parser.add_argument("--no-invariance", action="store_true", help=off)
    args = parser.parse_args()

    enable_batch_invariance(not args.no_invariance)
    patch_linear()  # nn.Linear follows the switch too
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    policy = Policy().to(device, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(1, args.steps + 1):
        batches = [generate(policy, sequences) for sequences in SEQUENCES]
        tokens, old, experts = (torch.cat(parts) for parts in zip(*batches, strict=True))
        rewards = (tokens[:, 1:] % 2 == 0).float().mean(1, keepdim=True)  # the task: even tokens
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)

        with record_routes(policy) as routes:
            new = policy(tokens[:, :-1]).gather(2, tokens[:, 1:, None]).squeeze(2)
        ratio = (new - old).exp()
        mismatch = (ids_of(routes, len(tokens)) != experts).any(-1).float().mean()
        print(f"step {step}: reward {rewards.mean():.3f}, tokens with other experts {mismatch:.1%}")
        print(f"  ratio of a token: {ratio.min():.8f} to {ratio.max():.8f}")
        assert args.no_invariance or (ratio == 1).all()
        (-ratio * advantages).mean().backward()  # at a ratio of 1: REINFORCE
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
