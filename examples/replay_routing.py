"""Replay the routing of rollouts in reinforcement learning, so that training uses the same experts.

    python examples/replay_routing.py
    python examples/replay_routing.py --rollout-dtype float32

An inference engine generates samples (the rollout), often in another precision, and training computes their
log-probabilities again. If a router chooses other experts the second time, the two log-probabilities of a
token differ. Training on the recorded experts avoids this difference (Ma et al. 2025, arXiv 2510.11370).
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_aiter import MoE

VOCABULARY, HIDDEN, LAYERS, LENGTH, BATCH = 32, 64, 2, 12, 64
UPDATES = 4  # optimizer steps on each rollout


class Policy(nn.Module):
    """A small language model. Each token sees the mean of the tokens before it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(MoE(HIDDEN, 64, num_experts=16, top_k=2) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits and expert ids (layers, batch, length, top_k). `recorded` are ids to use again."""
        x = self.embedding(tokens)
        count = torch.arange(1, tokens.shape[1] + 1, device=x.device, dtype=x.dtype)
        x = x + x.cumsum(1) / count[:, None]
        used = []
        for n, layer in enumerate(self.layers):
            # The router computes the weights of recorded experts, so it still has a gradient.
            ids = None if recorded is None else recorded[n]
            out, (routing, _) = layer(F.rms_norm(x, (HIDDEN,)), expert_ids=ids, return_routing=True)
            x = x + out
            used.append(routing.expert_ids.view(*tokens.shape, -1))
        return self.head(x).float(), torch.stack(used)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log p of each token after the first, (batch, length - 1)."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def rollout(policy: Policy, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Sample with a copy of the policy; return tokens, their log-probabilities and the expert ids."""
    engine = copy.deepcopy(policy).to(dtype)
    tokens = torch.zeros(BATCH, 1, dtype=torch.long, device=policy.head.weight.device)
    for _ in range(LENGTH - 1):
        logits, _ = engine(tokens)
        tokens = torch.cat([tokens, logits[:, -1].softmax(-1).multinomial(1)], 1)
    logits, expert_ids = engine(tokens)
    return tokens, log_probabilities(logits, tokens), expert_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="rollouts [20]")
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--rollout-dtype", default="bfloat16", choices=dtypes, help="[bfloat16]")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    policy = Policy().to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        tokens, old, expert_ids = rollout(policy, getattr(torch, args.rollout_dtype))
        rewards = (tokens[:, 1:] % 2 == 0).float().mean(1, keepdim=True)  # the task: even tokens
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        with torch.no_grad():  # the same weights and tokens as in the rollout
            logits, own_ids = policy(tokens)
            own = (log_probabilities(logits, tokens) - old).abs().max()
            replayed = (log_probabilities(policy(tokens, expert_ids)[0], tokens) - old).abs().max()
            other = (own_ids != expert_ids).any(-1).float().mean()
        print(f"step {step}: reward {rewards.mean():.3f}, tokens with other experts {other:.1%}")
        print(f"  largest difference of log-probabilities {own:.6f}, with replay {replayed:.6f}")
        for _ in range(UPDATES):
            new = log_probabilities(policy(tokens, expert_ids)[0], tokens)
            ratio = (new - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()  # PPO
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
