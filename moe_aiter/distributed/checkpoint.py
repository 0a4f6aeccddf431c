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

    All ranks must call it, and `path` must be on a disk that all ranks see.  The folder is complete or
    absent: files go to a draft beside it, which is renamed at the end.  Before that, the first rank calls
    `finish` with the draft, to add files of its own.
    Raises FileExistsError, on each rank, if `path` exists.
    """
    path = Path(path)
    draft = path.with_name(f"{UNFINISHED}{path.name}")

    def begin() -> None:
        if os.path.lexists(path):
            raise FileExistsError(f"path {path} exists: choose another one, or remove it")
        if draft.exists():
            remove(draft)

    def end() -> None:
        if finish is not None:
            finish(draft)
        for part in (*draft.iterdir(), draft):
            sync(part)
        draft.rename(path)
        sync(path.parent)

    on_first_rank(begin)
    state = state_of(model, optimizer)
    without_names(state)
    dcp.save(state, checkpoint_id=draft)
    on_first_rank(end)


@checked
def load_sharded(path: str | os.PathLike, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load what `save_sharded` wrote into `model` and `optimizer`, on any number of ranks and any mesh.

    All ranks must call it.  Tensors that the model does not have are left out.
    Raises FileNotFoundError if `path` is no such folder, and torch's CheckpointException if it lacks a tensor
    of the model, or if files are damaged; the model may be partly loaded then.
    """

    def check() -> None:
        if not (Path(path) / ".metadata").exists():
            raise FileNotFoundError(f"path {path} is no folder that save_sharded has written")

    on_first_rank(check)
    state = state_of(model, optimizer)
    names = without_names(state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, which is no mistake
        dcp.load(state, checkpoint_id=Path(path))
    optimizers = () if optimizer is None else optimizer
    moments = state.get("optimizer", {}) | names
    set_state_dict(
        model, optimizers, model_state_dict=state["model"], optim_state_dict=moments, options=OPTIONS
    )


def state_of(model: nn.Module, optimizer: Optimizer | None) -> dict:
    # torch makes the state of an optimizer without one by a step with lr=0, whose hooks may change buffers
    steps = optimizer is not None and not optimizer.state
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if steps else []
    weights, moments = get_state_dict(model, () if optimizer is None else optimizer, options=OPTIONS)
    for buffer, before in buffers:
        buffer.copy_(before)
    return {"model": weights} | ({} if optimizer is None else {"optimizer": moments})


def without_names(state: dict) -> dict:
    """Take the names of a group's parameters out of `state`, which has them once for each parameter."""
    moments = state.get("optimizer", {})
    return {key: moments.pop(key) for key in list(moments) if key.endswith(".param_names")}


@checked
def export_safetensors(path: str | os.PathLike, model: nn.Module) -> None:
    """Write the whole model to one .safetensors file, under its state_dict's names, as one process would.

    All ranks must call it; the first one writes, and has the whole model in its memory meanwhile.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)

    def write() -> None:
        safetensors, torch_files = need("safetensors", "train"), need("safetensors.torch", "train")
        tensors = {name: weight.contiguous() for name, weight in weights.items()}
        memory = [t.untyped_storage().data_ptr() for t in tensors.values()]
        # the format has no tied weights
        tied = {name for i, name in enumerate(tensors) if memory[i] in memory[:i]}
        draft = draft_of(Path(path))
        try:
            torch_files.save_file({n: t.clone() if n in tied else t for n, t in tensors.items()}, draft)
            sync(draft)
            draft.replace(path)
        except safetensors.SafetensorError as error:  # its OSError, such as that of a full disk
            raise OSError(f"path {path} cannot be written: {error}") from error
        finally:
            draft.unlink(missing_ok=True)

    on_first_rank(write)


def on_first_rank(fn: Callable[[], None]) -> None:
    """Call `fn` on the first rank while the others wait; an error there is raised on all ranks."""
    errors: list = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            fn()
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, ImportError) as error:
            errors = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(errors)
    if errors[0] is not None:
        raise errors[0]
