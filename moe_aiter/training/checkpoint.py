"""Checkpoints that are whole or not there at all.

A checkpoint is a folder `step-N`: `model.safetensors`, `optimizer.safetensors` and `state.json`.  It is
written under another name beside its place, synced to the disk, and renamed, which is atomic; so a process
that dies at any moment leaves the last whole one untouched.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..files import sync
from .errors import UsageError, need, out_of_memory, summary

UNFINISHED = "unfinished-"
STEP = re.compile(r"step-(\d+)")


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, **state) -> Path:
    """Write `folder/step-N` and keep the newest two.  `state` is anything that JSON can hold."""
    draft = folder / f"{UNFINISHED}{step}-{os.getpid()}"
    draft.mkdir(parents=True)
    write_tensors(draft / "model.safetensors", model.state_dict())
    write_tensors(draft / "optimizer.safetensors", optimizer_tensors(model, optimizer))
    (draft / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
    for path in (*draft.iterdir(), draft):
        sync(path)
    final = folder / f"step-{step:08d}"
    if final.exists():
        discard(final)
    draft.rename(final)
    sync(folder)
    for old in checkpoints(folder)[:-2]:
        if old != final:  # later ones that could not be read may still be there
            discard(old)
    return final


def load_newest(folder: Path, model: nn.Module, optimizer: Optimizer) -> dict:
    """`load_checkpoint` of the newest in `folder`; if that is damaged say so, and take the one before."""
    path, older = newest_checkpoint(folder), checkpoints(folder)[:-1]
    while True:
        try:
            return load_checkpoint(path, model, optimizer)
        except UsageError as error:
            if not older:
                raise
            path = older.pop()
            print(f"moe-aiter train: warning: {error}; going back to {path.name}", file=sys.stderr)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> dict:
    """Restore model, optimizer and torch's random state in place; returns the state.json.

    Raises UsageError if the checkpoint is damaged, or of another model; what is restored then is undefined.
    """
    damages = (OSError, ValueError, TypeError, KeyError, RuntimeError, need("safetensors").SafetensorError)
    try:
        return restore(path, model, optimizer)
    except damages as error:
        if out_of_memory(error):
            raise
        raise UsageError(f"{path} is damaged, or of another model: {summary(error)}") from error


def restore(path: Path, model: nn.Module, optimizer: Optimizer) -> dict:
    safetensors = need("safetensors.torch")
    state = json.loads((path / "state.json").read_text())
    if state["step"] != int(STEP.fullmatch(path.name)[1]):
        raise ValueError(f"state.json has step {state['step']}")
    model.load_state_dict(safetensors.load_file(path / "model.safetensors"))
    tensors = safetensors.load_file(path / "optimizer.safetensors")
    torch.set_rng_state(tensors.pop("random_state"))
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            key: tensors[f"{name}/{key}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")
        }
    return state


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under `parameter/what`, and torch's random state."""
    tensors = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return tensors | {"random_state": torch.get_rng_state()}


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(STEP.fullmatch(path.name)[1]))


def newest_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint; what a killed process left half done is removed."""
    for leftover in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover)
    found = checkpoints(folder)
    if not found:
        raise UsageError(f"{folder} holds no checkpoint to resume from: start anew, with another --out")
    return found[-1]


def discard(path: Path) -> None:
    """Remove a checkpoint; under another name first, so that none is ever half removed."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        need("safetensors.torch").save_file(contiguous, path)
    except need("safetensors").SafetensorError as error:  # its OSError, such as that of a full disk
        raise UsageError(f"{path} cannot be written: {summary(error)}") from error
