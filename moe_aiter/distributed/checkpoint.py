"""Sharded checkpoints, by torch.distributed.checkpoint: saved on some ranks, loaded on any number."""

import contextlib
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..config import printable
from ..files import UNFINISHED, AnyPath, draft_of, need, opened, remove, sync
from ..kernels.base.check import checked
from ..layers.experts import local_part
from ..layers.four_bit import FourBitWeight
from ..layers.loading import Loading
from ..private_api import WRAPPERS, own_buffers, own_modules, own_parameters
from .metadata import METADATA, read_metadata

# by parameter, not by group: a group has the parameters of one mesh, and other ranks have other meshes
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
T = TypeVar("T")
WEIGHTS, MOMENTS = "model.", "optimizer."  # how the keys of a model's and an optimizer's state begin


@checked
def save_sharded(
    path: AnyPath, model: nn.Module, optimizer: Optimizer | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:  # fmt: skip
    """Write the folder `path`: each rank its own shards of the model's and the optimizer's state.

    All ranks must call it, and `path` must be on a disk that all ranks see.  The folder is complete or
    absent: files go to a draft beside it, which is renamed at the end.  Before that, the first rank calls
    `finish` with the draft, to add files of its own.
    Raises FileExistsError, on each rank, if `path` exists; OSError or RuntimeError if it cannot be written.
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
    fresh = optimizer is not None and not optimizer.state
    state = state_dicts(model, optimizer)
    if optimizer is not None:
        state["optimizer"] = {k: v for k, v in state["optimizer"].items() if is_saved(k, fresh)}
        if fresh:
            optimizer.state.clear()
    with plain_words():
        dcp.save(state, checkpoint_id=draft)
    on_first_rank(end)


@checked
def load_sharded(path: AnyPath, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load what `save_sharded` wrote into `model` and `optimizer`, on any number of ranks and any mesh.

    All ranks must call it.  Modules that the model does not have are left out, and buffers that a module does
    not save any more.  A parameter without state in the files, such as one that never had a gradient, has
    none afterwards.  Settings that the files lack, such as the learning rate of a parameter that was frozen,
    are those of its group.  State of the optimizer that has no place any more is left out, with a UserWarning
    that names it.

    Nothing is run: the metadata may name torch's own classes only, and shards are read with weights_only=True
    from plain files in the folder.
    Raises FileNotFoundError if `path` is no such folder; ValueError or OSError if its metadata is damaged, or
    names files that are cut off, missing, no plain ones or out of the folder, or if it has no state of an
    optimizer, or a tensor for which a module of the model has no place, or weights of another format; those
    or RuntimeError if it lacks a tensor of the model, or if shards are damaged.  Model and optimizer may be
    partly loaded then.
    """
    path = Path(path)

    def read() -> Metadata:
        if not (path / METADATA).exists():
            raise FileNotFoundError(f"path {path} is no folder that save_sharded has written")
        return read_metadata(path)

    metadata = on_first_rank(read)
    fitted = fit(model, metadata)
    if optimizer is None:
        state = state_dicts(model, None)
        read_into(state, fitted, path, metadata)
        set_model_state_dict(model, state["model"], options=OPTIONS)
        return
    saved = {key.removeprefix(MOMENTS) for key in metadata.state_dict_metadata if key.startswith(MOMENTS)}
    if not saved:
        raise ValueError(f"path {path} has no state of an optimizer: load the model alone")
    with complete_state(optimizer):
        state = state_dicts(model, optimizer)
        moments = state["optimizer"]
        with kept_buffers(model):
            # by parameter and by group
            named: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        warn_of_rest(path, saved - moments.keys())
        there = {start for key in saved for start in starts(key)}
        unsaved = {f"state.{name}" for name in named["state"]} - there
        missing = {k for k in moments.keys() - saved if is_setting(k) or not unsaved.isdisjoint(starts(k))}
        state["optimizer"] = {key: value for key, value in moments.items() if key not in missing}
        read_into(state, fitted, path, metadata)
        moments |= state["optimizer"]
        for group in named["param_groups"]:
            share_settings(moments, group, saved)
        with kept_buffers(model):
            weights = state["model"]
            set_state_dict(
                model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=OPTIONS
            )
        for group, names in zip(optimizer.param_groups, named["param_groups"], strict=True):
            for parameter, name in zip(group["params"], names["params"], strict=True):
                if f"state.{name}" in unsaved or not optimizer.state.get(parameter):
                    optimizer.state.pop(parameter, None)


class Saved(NamedTuple):
    """What the metadata says of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class Fitted(NamedTuple):
    """A model that has made room for what is saved."""

    modules: dict[str, nn.Module]  # by the names of states, each with a dot behind it
    saved: dict[str, Saved]
    problems: list[str]
    shared: dict[str, dict[str, Tensor]]  # NF4's scales that ranks share: the form that is saved


def fit(model: nn.Module, metadata: Metadata) -> Fitted:
    """Make room for what is saved: torch reads into what is there, before it calls load_state_dict."""
    saved = {
        key.removeprefix(WEIGHTS): Saved(tensor.size, tensor.properties.dtype)
        for key, tensor in metadata.state_dict_metadata.items()
        if key.startswith(WEIGHTS) and isinstance(tensor, TensorStorageMetadata)
    }
    fitted = Fitted(dict(by_saved_name(model)), saved, [], {})
    for start, module in fitted.modules.items():
        if isinstance(module, FourBitWeight) and module.is_shared and module.has_other_scales(saved, start):
            fitted.shared[start] = module.room_for_scales(double=True)
        elif isinstance(module, Loading):
            fitted.problems.extend(module.fit(saved, start))
    return fitted


def by_saved_name(module: nn.Module, start: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by the names of states, which leave out torch's wrappers, before what they wrap."""
    yield start, module
    for name, child in own_modules(module).items():
        if child is not None:
            wraps = name in WRAPPERS or isinstance(module, DistributedDataParallel)
            yield from by_saved_name(child, start if wraps else f"{start}{name}.")


def without_place(fitted: Fitted, weights: dict[str, Any]) -> Iterator[str]:
    """Yield why tensors have no place in modules that are there, and that have tensors at all."""
    for key in sorted(fitted.saved.keys() - weights.keys()):
        path, _, name = key.rpartition(".")
        module = fitted.modules.get(f"{path}." if path else "")
        if module is None or not any(True for _ in chain(module.parameters(), module.buffers())):
            continue
        if (own_parameters(module) | own_buffers(module)).get(name) is None:
            kind = type(module).__name__
            yield (
                f"{key} is saved, but the model's {kind} has no place for it: make the model with the "
                "options of the one that was saved"
            )


def read_into(state: dict[str, Any], fitted: Fitted, path: Path, metadata: Metadata) -> None:
    """Read what `state` has, in place."""
    own = state["model"]
    parts = {f"{start}{name}": t for start, of in fitted.shared.items() for name, t in of.items()}
    state["model"] = own | parts
    problems = [*fitted.problems, *without_place(fitted, state["model"])]
    with plain_words():
        dcp.load(state, storage_reader=Reader(path, metadata), planner=Planner(problems))
    state["model"] = {key: own[key] if key in parts else t for key, t in state["model"].items() if key in own}
    for start, of in fitted.shared.items():
        module = fitted.modules[start]
        assert isinstance(module, FourBitWeight)
        local_part(own[f"{start}scales"]).copy_(module.own_scales(**of))
        own[f"{start}table"].copy_(of["table"][: len(own[f"{start}table"])])


@contextlib.contextmanager
def plain_words() -> Iterator[None]:
    """Raise the error of the first rank that has one, in one line, on all ranks; one process is no mistake.

    torch raises a BaseException with the tracebacks of all ranks, and warns of one process.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except dcp.CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        line, _, more = str(error).strip().partition("\n")
        if isinstance(error, (OSError, ValueError, RuntimeError, MemoryError)) and not more:
            raise error from None
        raise ValueError(f"{type(error).__name__}: {line}") from None


class PlainFiles(FileSystem):
    """Opens plain files alone, in the folder itself."""

    @contextlib.contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[IO[Any]]:  # type: ignore[override]  # torch says IOBase
        with opened(path, mode, within=Path(path).parent) as stream:
            yield stream


class Reader(FileSystemReader):
    """torch's reader of shards, with metadata that is read already."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self.metadata, self.fs = metadata, PlainFiles()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:  # torch's text advises to run the file
            named = re.search(r"GLOBAL (\S{1,200})", str(error))
            what = f"names {named[1]!r}, which is not run" if named else "is no tensor or number"
            raise ValueError(f"what a shard of {self.path} holds {what}") from None


class Planner(DefaultLoadPlanner):
    """torch's planner, but what is no tensor is numbers, texts and lists of them: torch's unpickles all.

    `problems` of this rank are raised on all ranks, before anything is read.
    """

    def __init__(self, problems: list[str]):
        super().__init__()
        self.problems = problems

    def create_local_plan(self) -> LoadPlan:
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if self.problems[1:] else ""
            raise ValueError(self.problems[0] + more)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        found, own = torch.load(value, weights_only=True), self.state_dict[name]
        if isinstance(found, (int, float)) != isinstance(own, (int, float)):
            kinds = [type(item).__name__ for item in (found, own)]
            raise ValueError(f"{name} is a {kinds[0]}; it should be a {kinds[1]}")
        safe = io.BytesIO()
        torch.save(found, safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


@contextlib.contextmanager
def complete_state(optimizer: Optimizer) -> Iterator[None]:
    """Let torch make the state of all parameters inside the block, unless all have theirs.

    torch makes none where a parameter has a gradient or the optimizer has state, and none for frozen ones.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    frozen = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
    gradients = [p.grad for p in parameters]
    if not all(optimizer.state.get(p) for p in parameters):
        optimizer.state.clear()
    for p in parameters:
        p.grad = None
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Keep the values of buffers: the step by which torch makes an optimizer's state has hooks."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, values in before:
        buffer.copy_(values)


def starts(key: str) -> Iterator[str]:
    """Yield a, a.b and so on of a.b.c: a parameter's name has dots, and the state behind it may have some."""
    return (key[:i] for i, letter in enumerate(key) if letter == ".")


def is_saved(key: str, fresh: bool) -> bool:
    """Whether this of an optimizer is saved.  Each parameter would have the names of all in its group.

    The state of a fresh one is that of a step with lr=0, by which torch learns its form: it is not counted.
    """
    return not key.endswith(".param_names") and (is_setting(key) or not fresh)


def is_setting(key: str) -> bool:
    return key.startswith("param_groups.")


def warn_of_rest(path: Path, keys: set[str]) -> None:
    rest = sorted(key for key in keys if not is_setting(key))
    if rest and is_first_rank():
        text = f"{path} has state that the optimizer has no place for, and that is left out: {rest[0]}"
        more = f" and {len(rest) - 1} more" if rest[1:] else ""
        warnings.warn(printable(text + more), stacklevel=4)


def share_settings(moments: dict[str, Any], group: dict[str, Any], saved: set[str]) -> None:
    """Give the parameters of a group whose settings are not saved those of one whose settings are."""
    for setting in group.keys() - {"params"}:
        keys = [f"param_groups.{name}.{setting}" for name in group["params"]]
        if there := [key for key in keys if key in saved]:
            moments |= {key: moments[there[0]] for key in keys if key not in saved}


def state_dicts(model: nn.Module, optimizer: Optimizer | None) -> dict[str, dict[str, Any]]:
    with kept_buffers(model):
        weights, moments = get_state_dict(model, () if optimizer is None else optimizer, options=OPTIONS)
    return {"model": weights} | ({} if optimizer is None else {"optimizer": moments})


@checked
def export_safetensors(path: AnyPath, model: nn.Module) -> None:
    """Write the whole model to one .safetensors file, under its state_dict's names, as one process would.

    All ranks must call it; the first one writes, and has the whole model in its memory meanwhile.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)

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


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(fn: Callable[[], T]) -> T:
    """Return what `fn` returns on the first rank, while the others wait; its error is raised on all ranks."""
    found: list[Any] = [None, None]
    if is_first_rank():
        try:
            found = [fn(), None]
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, ImportError) as failed:
            found = [None, failed]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    value: T = found[0]
    if found[1] is not None:
        raise found[1]
    return value
