"""A model whose experts the ranks of each host share: torchrun starts this file on several hosts."""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

from moe_aiter import MoE
from moe_aiter.distributed import clip_grad_norm_, expert_mesh, parallelize, parameter_groups

E, T, H, STEPS = 8, 24, 32, 3  # T tokens of each rank
GUESTS = 0, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(H), MoE(H, 16, E, 2, selection_bias=True)
        self.moe.router.selection_bias.copy_(torch.linspace(2, 0, E))  # most tokens go to the first rank

    def forward(self, x):
        return x + self.moe(self.norm(x))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(H, H), Block(), Block())


def tokens_of(step: int, ranks: int, tokens: int = T) -> torch.Tensor:
    return torch.randn(ranks, tokens, H, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def train(model: nn.Module, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the loss of each step."""
    optimizer, losses = torch.optim.AdamW(parameter_groups(model), 1e-2), []
    for x in tokens:
        losses.append(loss_of(model, x))
        losses[-1].backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def alone(ranks: int) -> list[float]:
    """Return the losses of one process that has the tokens of all ranks."""
    found = train(build(), [tokens_of(step, ranks).flatten(0, 1) for step in range(STEPS)])
    return [loss.item() for loss in found]


def shared(model: nn.Module, rank: int, ranks: int) -> list[float]:
    """Return the losses of ranks that each have their part of the tokens."""
    losses = torch.stack(train(model, [tokens_of(step, ranks)[rank] for step in range(STEPS)]))
    dist.all_reduce(losses)
    return (losses / ranks).tolist()


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    mesh, host = expert_mesh("cpu", ep=local), int(os.environ["GROUP_RANK"])
    group = dist.get_process_group_ranks(mesh["ep"].get_group())
    assert group == list(range(host * local, (host + 1) * local)), f"host {host} has not all of {group}"
    losses = [shared(parallelize(build(), mesh, guests=guests), rank, ranks) for guests in GUESTS]
    pathlib.Path(f"losses-{rank}.json").write_text(json.dumps(losses))  # gloo prints into what ranks print
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort it while the interpreter ends


if __name__ == "__main__":
    main()
