"""Write checkpoints atomically: a folder `step-N` is complete, or it does not exist.

A checkpoint has the files `model.safetensors`, `optimizer.safetensors` and `state.json`.  They are written to
a temporary folder in the same directory and synced to the disk; then the folder is renamed, which is atomic.
If the process dies at any moment, the previous checkpoint is still complete.

`state.json` holds the SHA-256 sums of the two other files and of its own content, which loading verifies.
Checkpoints of versions without these sums have only `step` and `fingerprint` there; they load with a warning.

Several ranks write shards of torch.distributed.checkpoint instead of the two files, and no random state,
which training does not use.  Any number of ranks loads either kind.
"""

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_aiter.cli import out_of_memory, summary
from moe_aiter.config import say
from moe_aiter.files import UNFINISHED, drafted_folder, is_name, opened, plain, read_json, remove, sync

from . import UsageError, need
from .ranks import ALONE, Ranks

STEP = re.compile(r"step-(\d+)")
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SUMS = "sha256"  # in state.json
MOMENTS = "step", "exp_avg", "exp_avg_sq"  # what AdamW keeps of a parameter
RANDOM = "random_state"
METADATA = ".metadata"  # of torch.distributed.checkpoint


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    fingerprint: str | None = None,
    ranks: Ranks = ALONE,
) -> Path:
    """Write `folder/step-N` and keep the newest two.  `fingerprint` is that of the text."""
    final = folder / f"step-{step:08d}"
    state = {"step": step, "fingerprint": fingerprint}
    with ranks.together():
        if ranks.first:
            checkpoints(folder)  # refuses links before a file is written
            if ranks.size > 1 and final.exists():
                discard(final)
    if ranks.size > 1:
        from .sharded import save_shards  # here, since one rank needs none of torch's imports for several

        save_shards(final, model, optimizer, lambda draft: write_state(draft, state))
    else:
        with drafted_folder(final) as draft:
            write_tensors(draft / MODEL, model.state_dict())
            write_tensors(draft / OPTIMIZER, optimizer_tensors(model, optimizer))
            write_state(draft, state)
            if final.exists():
                discard(final)
    for old in checkpoints(folder)[:-2] if ranks.first else ():
        if old != final:  # later ones that could not be read may still be there
            discard(old)
    return final


def write_state(draft: Path, state: dict) -> None:
    """Write the state.json of a checkpoint whose other files are written."""
    sums = {path.name: file_sum(path) for path in sorted(draft.iterdir())} | {STATE: state_sum(state)}
    (draft / STATE).write_text(json.dumps(state | {SUMS: sums}, indent=2) + "\n")
    sync(draft / STATE)


def load_newest(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks = ALONE) -> dict:
    """`load_checkpoint` of the newest in `folder`; if that is damaged say so, and take the one before."""
    found = []
    with ranks.together():
        if ranks.first:
            newest_checkpoint(folder)
            found = checkpoints(folder)
    found = ranks.broadcast(found)
    path = found.pop()
    while True:
        try:
            return load_checkpoint(path, model, optimizer, ranks)
        except UsageError as error:
            if not found:
                raise
            path = found.pop()
            if ranks.first:
                say(f"moe-aiter train: warning: {error}; going back to {path.name}", file=sys.stderr)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None, ranks: Ranks = ALONE) -> dict:
    """Restore model, optimizer and torch's random state in place; return the state.json.

    Without an optimizer, restore the model alone.

    Raises UsageError if the checkpoint is damaged, or of another model; what is restored then is undefined.
    """
    state, sharded = None, (path / METADATA).exists()
    with ranks.together(), damages_named(path):
        if not sharded:
            state, weights, tensors = read_tensors(path, model, optimizer)
        elif ranks.first:
            state = read_state(path)
    with ranks.together(), damages_named(path):
        if sharded:
            from moe_aiter.distributed import load_sharded

            load_sharded(path, model, optimizer)
        elif ranks.size > 1:
            from .sharded import distribute

            distribute(model, optimizer, weights, tensors)
        else:
            restore(model, optimizer, weights, tensors)
    return ranks.broadcast(state)


@contextlib.contextmanager
def damages_named(path: Path) -> Iterator[None]:
    """Make the errors of a damaged checkpoint, or one of another model, UsageErrors of one line."""
    damages = (OSError, ValueError, TypeError, KeyError, RuntimeError, need("safetensors").SafetensorError)
    try:
        yield
    except damages as error:
        if out_of_memory(error):
            raise
        raise UsageError(f"{path} is damaged, or of another model: {summary(error)}") from error


def read_tensors(path: Path, model: nn.Module, optimizer: Optimizer | None) -> tuple[dict, dict, dict]:
    """Return the state.json, the weights and the optimizer's tensors of an unsharded checkpoint, checked."""
    safetensors = need("safetensors.torch")
    state = read_state(path)
    weights = safetensors.load_file(plain(path / MODEL, path))
    check_tensors(MODEL, weights, model.state_dict())
    if optimizer is None:
        return state, weights, {}
    tensors = safetensors.load_file(plain(path / OPTIMIZER, path))
    check_tensors(OPTIMIZER, tensors, optimizer_like(model))
    for name in (f"{name}/{key}" for name, _ in model.named_parameters() for key in MOMENTS):
        least = {"step": 1, "exp_avg_sq": 0}.get(name.rpartition("/")[2])
        if least is not None and not (tensors[name] >= least).all():
            raise ValueError(f"{OPTIMIZER}: {name} has a value below {least}")
    return state, weights, tensors


def restore(model: nn.Module, optimizer: Optimizer | None, weights: dict, tensors: dict) -> None:
    model.load_state_dict(weights)
    if optimizer is None:
        return
    torch.set_rng_state(tensors[RANDOM])
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {key: tensors[f"{name}/{key}"].to(parameter.device) for key in MOMENTS}


def read_state(path: Path) -> dict:
    """The state.json of a checkpoint, without its checksums, which are verified."""
    state = read_json(path / STATE, path)
    check_state(state)
    if state["step"] != step_of(path):
        raise ValueError(f"{STATE} has step {state['step']}")
    sums = state.pop(SUMS, None)
    sharded = (path / METADATA).exists()
    if sums is None and not sharded:  # all versions that shard write them
        note = "was saved without checksums, so damage of its numbers may go unnoticed"
        say(f"moe-aiter train: warning: {path} {note}", file=sys.stderr)
        return state
    if sums is None:
        raise ValueError(f"{STATE} has no {SUMS}")
    names = sorted({*sums, METADATA} - {STATE}) if sharded else (MODEL, OPTIMIZER)
    found = {name: file_sum(path / name) for name in names} | {STATE: state_sum(state)}
    if wrong := [name for name in found if found[name] != sums.get(name)]:
        raise ValueError(f"the SHA-256 of {', '.join(wrong)} is not the one in {STATE}")
    return state


def check_state(state) -> None:
    """Raise ValueError unless these are fields of a state.json, each of its type."""
    if not isinstance(state, dict) or type(state.get("step")) is not int:
        raise ValueError(f"{STATE} has no step, a whole number")
    if not isinstance(state.get("fingerprint"), str | None):
        raise ValueError(
            f"{STATE}: fingerprint is a {type(state['fingerprint']).__name__}; it should be a text"
        )
    sums = state.get(SUMS, {})
    if not isinstance(sums, dict) or not all(is_name(n) and isinstance(s, str) for n, s in sums.items()):
        raise ValueError(f"{STATE}: {SUMS} are not those of files in this folder")
    if extra := sorted(state.keys() - {"step", "fingerprint", SUMS}):
        raise ValueError(f"{STATE} has an unknown key, {extra[0]!r}")


def file_sum(path: Path) -> str:
    found = hashlib.sha256()
    with opened(path, "rb", path.parent) as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


def state_sum(state: dict) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def check_tensors(file: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ValueError unless names, dtypes and shapes are those of `expected`, and all values finite."""
    for problem, names in {
        "lacks": expected.keys() - found.keys(),
        "has an unknown tensor": found.keys() - expected.keys(),
    }.items():
        if names:
            raise ValueError(f"{file} {problem} {min(names)}")
    for name, like in expected.items():
        tensor = found[name]
        if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (tensor, like)]
            raise ValueError(f"{file}: {name} is {kinds[0]}; it should be {kinds[1]}")
        if not tensor.isfinite().all():
            raise ValueError(f"{file}: {name} has a value that is not finite")


def optimizer_like(model: nn.Module) -> dict[str, Tensor]:
    """Tensors as `optimizer_tensors` has them after a step of AdamW, of any values."""
    one = torch.ones((), dtype=torch.float32)
    like = {
        f"{name}/{key}": one if key == "step" else parameter
        for name, parameter in model.named_parameters()
        for key in MOMENTS
    }
    return like | {RANDOM: torch.get_rng_state()}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under `parameter/what`, and torch's random state."""
    tensors = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return tensors | {RANDOM: torch.get_rng_state()}


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first.

    Raises UsageError if one of these folders is a link: training removes old checkpoints of the run alone.
    """
    found = [path for path in folder.glob("step-*") if STEP.fullmatch(path.name)]
    for path in (folder, *found):
        if path.is_symlink():
            raise UsageError(f"{path} is a link; a run keeps its checkpoints in folders of its own")
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(STEP.fullmatch(path.name)[1])


def newest_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint; what a killed process left half done is removed."""
    found = checkpoints(folder)
    for leftover in folder.glob(f"{UNFINISHED}*"):
        remove(leftover)  # a link too: its target stays
    if not found:
        raise UsageError(f"{folder} holds no checkpoint to resume from: start anew, with another --out")
    return found[-1]


def discard(path: Path) -> None:
    """Remove a checkpoint; under another name first, so that none is ever half removed."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    path.rename(doomed)
    remove(doomed)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        need("safetensors.torch").save_file(contiguous, path)
    except need("safetensors").SafetensorError as error:  # its OSError, such as that of a full disk
        raise UsageError(f"{path} cannot be written: {summary(error)}") from error
