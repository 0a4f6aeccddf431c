"""Sharded checkpoints, by torch.distributed.checkpoint: saved on some ranks, loaded on any number."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from ..files import UNFINISHED, draft_of, need, remove, sync
from ..kernels.base.check import checked

# by parameter, not by group: a group has the parameters of one mesh, and other ranks have other meshes
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@checked
def save_sharded(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write the folder `path`: each rank its own shards of the model's and the optimizer's state.

    All ranks must call it.  The folder is complete or absent: files go to a draft beside it, which is renamed
    at the end.  Before that, the first rank calls `finish` with the draft, to add files of its own.
    Raises FileExistsError, on each rank, if `path` exists.
    """
    path = Path(path)
    draft = path.with_name(f"{UNFINISHED}{path.name}")
    barrier()
    if path.exists():
        raise FileExistsError(f"{path} exists")
    barrier()
    if is_first() and draft.exists():
        remove(draft)
    barrier()
    dcp.save(state_of(model, optimizer), checkpoint_id=draft)
    barrier()
    if is_first():
        if finish is not None:
            finish(draft)
        for part in (*draft.iterdir(), draft):
            sync(part)
        draft.rename(path)
        sync(path.parent)
    barrier()


@checked
def load_sharded(path: str | os.PathLike, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load what `save_sharded` wrote into `model` and `optimizer`, on any number of ranks and any mesh.

    All ranks must call it.  Raises FileNotFoundError if `path` is no such folder, and torch's
    CheckpointException for another model, or if files of it are missing.
    """
    if not (Path(path) / ".metadata").exists():
        raise FileNotFoundError(f"path is {path}, but there is no sharded checkpoint")
    state = state_of(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, which is no mistake
        dcp.load(state, checkpoint_id=Path(path))
    optimizers = () if optimizer is None else optimizer
    moments = state.get("optimizer", {})
    set_state_dict(
        model, optimizers, model_state_dict=state["model"], optim_state_dict=moments, options=OPTIONS
    )


def state_of(model: nn.Module, optimizer: Optimizer | None) -> dict:
    weights, moments = get_state_dict(model, () if optimizer is None else optimizer, options=OPTIONS)
    return {"model": weights} | ({} if optimizer is None else {"optimizer": moments})


@checked
def export_safetensors(path: str | os.PathLike, model: nn.Module) -> None:
    """Write the whole model to one .safetensors file, under its state_dict's names, as one process would.

    All ranks must call it; the first one writes, and has the whole model in its memory meanwhile.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if is_first():
        draft = draft_of(Path(path))
        try:
            save_file = need("safetensors.torch", "train").save_file
            save_file({name: weight.contiguous() for name, weight in weights.items()}, draft)
            sync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    barrier()


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
