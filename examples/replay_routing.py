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

from moe_aiter import MoE, Route, record_routes, replay_routes

VOCABULARY, HIDDEN, LAYERS, LENGTH, BATCH = 32, 64, 2, 12, 64
UPDATES = 4  # optimizer steps on each rollout


class Policy(nn.Module):
    """A small language model. Each token sees the mean of the tokens before it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(MoE(HIDDEN, 64, num_experts=16, top_k=2) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        x = self.embedding(tokens)
        count = torch.arange(1, tokens.shape[1] + 1, device=x.device, dtype=x.dtype)
        x = x + x.cumsum(1) / count[:, None]
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (HIDDEN,)))
        return self.head(x).float()


def log_probabilities(policy: Policy, tokens: Tensor) -> Tensor:
    """Return log p of each token after the first, (batch, length - 1)."""
    return policy(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def rollout(policy: Policy, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, list[Route]]]:
    """Sample with a copy of the policy; return tokens, their log-probabilities and the routes."""
    engine = copy.deepcopy(policy).to(dtype)
    tokens = torch.zeros(BATCH, 1, dtype=torch.long, device=policy.head.weight.device)
    for _ in range(LENGTH - 1):
        tokens = torch.cat([tokens, engine(tokens)[:, -1].softmax(-1).multinomial(1)], 1)
    with record_routes(engine) as routes:
        old = log_probabilities(engine, tokens)
    return tokens, old, routes


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
        tokens, old, routes = rollout(policy, getattr(torch, args.rollout_dtype))
        rewards = (tokens[:, 1:] % 2 == 0).float().mean(1, keepdim=True)  # the task: even tokens
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        with torch.no_grad():  # the same weights and tokens as in the rollout
            own = (log_probabilities(policy, tokens) - old).abs().max()
            with replay_routes(policy, routes) as replay:
                replayed = (log_probabilities(policy, tokens) - old).abs().max()
            other = max(layer.tokens for layer in replay.differences().values())
        print(f"step {step}: reward {rewards.mean():.3f}, tokens with other experts {other:.1%}")
        print(f"  largest difference of log-probabilities {own:.6f}, with replay {replayed:.6f}")
        for _ in range(UPDATES):
            # The router computes the weights of replayed experts, so it still has a gradient.
            with replay_routes(policy, routes):
                new = log_probabilities(policy, tokens)
            ratio = (new - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()  # PPO
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
