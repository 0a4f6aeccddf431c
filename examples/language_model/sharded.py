"""A model, its gradients and its checkpoints that several ranks share; one rank does not import this file."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from moe_aiter.cli import summary
from moe_aiter.distributed import (
    clip_grad_norm_,
    expert_mesh,
    parallelize,
    reduce_gradients,
    save_sharded,
)

from . import UsageError
from .presets import TrainConfig
from .ranks import Ranks


def share(model: nn.Module, config: TrainConfig, ranks: Ranks) -> DeviceMesh:
    """Share `model`, which is the same on all ranks, in place; return the mesh of the ranks."""
    ep = 1 if config.dense else config.ep or largest_ep(config, ranks)
    mesh = expert_mesh(torch.device(config.device).type, ep)
    if not config.dense:
        try:
            parallelize(model, mesh, fsdp=config.fsdp)
        except ValueError as error:
            raise UsageError(f"--ep {ep} with {ranks.size} processes: {summary(error)}") from error
    elif config.fsdp:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["efsdp"])
    return mesh


def largest_ep(config: TrainConfig, ranks: Ranks) -> int:
    """Return the most ranks of one machine that can share the experts evenly."""
    wholes = config.num_experts, ranks.launch.local_world, ranks.size
    return max(n for n in range(1, ranks.size + 1) if not any(whole % n for whole in wholes))


def clip_gradients(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> Tensor:
    """Make the gradients those of the global batch, clip them, and return their norm before that."""
    if not config.fsdp:
        reduce_gradients(model, mesh)
    return clip_grad_norm_(model.parameters(), config.clip)


def save_shards(path: Path, model: nn.Module, optimizer: Optimizer, finish: Callable[[Path], None]) -> None:
    try:
        save_sharded(path, model, optimizer, finish)
    except (OSError, RuntimeError, ValueError) as error:  # on all ranks
        raise UsageError(f"{path} cannot be written: {summary(error)}") from error


def distribute(model: nn.Module, optimizer: Optimizer, weights: dict, tensors: dict) -> None:
    """Load the weights and the optimizer's tensors of one rank's checkpoint into a model that ranks share."""
    moments = {}
    for name, tensor in tensors.items():
        parameter, slash, key = name.rpartition("/")
        if slash:
            moments.setdefault(parameter, {})[key] = tensor
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, weights, options=options)
    state = {"state": moments, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, state, options=options)
