"""Folders of safetensors files: read one tensor at a time, written one piece of a tensor at a time.

A safetensors file starts with 8 bytes for the length of its header.  The header is JSON with the dtype, shape
and position of each tensor; then come the tensors' bytes.  The header is written before the first tensor is
read, so no file has to fit in memory.
"""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import printable
from ...files import is_name, plain
from ...files import need as need_extra
from ...files import read_json as parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
SHOWN = 50  # problems of a message


class CheckpointError(ValueError):
    """A checkpoint that is refused: `problems` lists every reason, the message the first 50, by line."""

    def __init__(self, what: str, problems: list[str]):
        self.problems = problems = list(map(printable, problems))
        what = printable(what)
        lines = [f"{what}: {len(problems)} problems", *problems[:SHOWN]]
        if len(problems) == 1:
            lines = [f"{what}: {problems[0]}"]
        if len(problems) > SHOWN:
            lines.append(f"and {len(problems) - SHOWN} more")
        super().__init__("\n  ".join(lines))


need = functools.partial(need_extra, extra="convert")  # of modules that only conversions need


class Spec(NamedTuple):
    """The description of a tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype] * math.prod(self.shape)


class Checkpoint:
    """A folder with config.json and the safetensors files of a model.

    Files are opened one at a time and mapped, never read whole.  Raises CheckpointError if a file is missing
    or damaged, or holds other tensors than the index says, or is a link out of the folder.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.opened: tuple[str, object] = ("", None)
        self.file_of: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        problems = []
        for name, keys in self.files().items():
            try:
                problems += self.register(name, keys)
            except (OSError, UnicodeError, need("safetensors").SafetensorError) as error:
                problems.append(f"{name} is missing or damaged: {error}")
        if problems:
            raise CheckpointError(f"{folder}", problems)

    def files(self) -> dict[str, set[str] | None]:
        """The files, and what the index says that each holds."""
        if (self.folder / INDEX).exists():
            files: dict[str, set[str] | None] = {}
            weight_map = read_json_object(self.folder / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(is_name(file) for file in weight_map.values()):
                raise CheckpointError(f"{self.folder / INDEX}", ["it has no weight_map of names to files"])
            for key, file in weight_map.items():
                files.setdefault(file, set()).add(key)
            return dict(sorted(files.items()))
        if not (self.folder / SINGLE).exists():
            raise CheckpointError(f"{self.folder}", [f"there is neither {SINGLE} nor {INDEX}"])
        return {SINGLE: None}

    def register(self, file: str, keys: set[str] | None) -> list[str]:
        problems = []
        opened = self.open(file)
        found = set(opened.keys())
        for key in sorted(found):
            part = opened.get_slice(key)
            self.file_of[key], self.specs[key] = file, Spec(part.get_dtype(), tuple(part.get_shape()))
            if self.specs[key].dtype not in BYTES:
                problems.append(f"{key} is {self.specs[key].dtype}, a dtype that is not known here")
        if keys is not None:
            problems += [f"{key} is not in {file}, where the index has it" for key in sorted(keys - found)]
            problems += [f"{key} is in {file}, but not in the index" for key in sorted(found - keys)]
        return problems

    def open(self, file: str):
        if self.opened[0] != file:
            self.close()  # before the next, so that one is mapped
            self.opened = file, need("safetensors").safe_open(plain(self.folder / file), framework="pt")
        return self.opened[1]

    def close(self) -> None:
        self.opened = "", None

    def read(self, key: str, place: tuple = ()) -> Tensor:
        """A tensor, or the part of it at `place`, an index; it may be a view of the mapped file."""
        opened = self.open(self.file_of[key])
        return opened.get_slice(key)[place] if place else opened.get_tensor(key)

    def other_files(self) -> tuple[list[Path], list[Path]]:
        """Return the files beside the weights: the tokenizer's and others, and weights of no use here."""
        listed = {*self.file_of.values(), INDEX, "config.json"}
        files = [p for p in sorted(self.folder.iterdir()) if p.is_file() and p.name not in listed]
        weights = [p for p in files if p.name.endswith(WEIGHTS)]
        return [p for p in files if p not in weights], weights


def refuse_links(folder: Path) -> None:
    """Raise CheckpointError if a file in `folder` is a link to a place outside of the checkpoint.

    Such a link in a folder from an unknown author would copy a file of this machine into the new checkpoint.
    A link may lead into the folder itself.  In a snapshot of Hugging Face's cache,
    `models--NAME/snapshots/REVISION`, a link may lead to anything in `models--NAME`, where the cache keeps
    the files that its snapshots link to.
    """
    root = Path(os.path.realpath(folder))
    repository = root.parent.parent
    if root.parent.name == "snapshots" and repository.name.startswith("models--"):
        root = repository
    targets = {p.name: Path(os.path.realpath(p)) for p in sorted(folder.iterdir()) if p.is_symlink()}
    outside = {name: to for name, to in targets.items() if not (to.is_relative_to(root) or to.is_dir())}
    if outside:
        problems = [f"{name} is a link out of the folder, to {to}" for name, to in outside.items()]
        raise CheckpointError(f"{folder}", problems)


class NewTensor(NamedTuple):
    """A tensor to write: its pieces are made one after the other, in the order of its memory."""

    name: str
    spec: Spec
    pieces: tuple[Callable[[], Tensor], ...]


def write_checkpoint(
    folder: Path, outputs: Iterable[NewTensor], config: dict, limit: int, advance: Callable[[int], None]
) -> list[str]:
    """Write config.json, and `outputs` in files of at most `limit` bytes of tensors, or of a single tensor.

    Returns the files' names.  `advance` is told of each number of bytes.
    """
    shards = split_shards(sorted(outputs, key=natural), limit)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [SINGLE] if len(shards) == 1 else names
    weight_map = {}
    for name, shard in zip(names, shards, strict=True):
        write_shard(folder / name, shard, advance)
        weight_map |= {output.name: name for output in shard}
    if len(shards) > 1:
        specs = [output.spec for shard in shards for output in shard]
        total = {"total_parameters": sum(math.prod(spec.shape) for spec in specs)}
        total["total_size"] = sum(spec.bytes for spec in specs)
        write_json(folder / INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
    write_json(folder / "config.json", config)
    return names


def natural(output: NewTensor) -> list:
    """Layer 2 before layer 10."""
    fields = re.split(r"([0-9]{1,18})", output.name)  # every second one is a number
    return [(0, int(p), "") if i % 2 else (1, 0, p) for i, p in enumerate(fields)]


def split_shards(outputs: list[NewTensor], limit: int) -> list[list[NewTensor]]:
    shards, size = [[]], 0
    for output in outputs:
        if shards[-1] and size + output.spec.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.spec.bytes
    return shards


def write_shard(path: Path, outputs: list[NewTensor], advance: Callable[[int], None]) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    outputs = sorted(outputs, key=lambda output: -BYTES[output.spec.dtype])  # then all of them are aligned
    for name, spec, _ in outputs:
        offsets = [end, end := end + spec.bytes]
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, spec, pieces in outputs:
            written = sum(write_piece(file, make(), advance) for make in pieces)
            if written != spec.bytes:
                raise AssertionError(f"{name} is {spec.bytes} bytes, but {written} were written")


def write_piece(file, tensor: Tensor, advance: Callable[[int], None]) -> int:
    # one number may have any stride and is contiguous all the same
    row = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    file.write(memoryview(row.view(torch.uint8).numpy()))
    advance(tensor.nbytes)
    return tensor.nbytes


def check_target(target: str | Path, shard_bytes: int, progress: Callable | None) -> Path:
    """The folder to write, which must not be there, or be empty."""
    target = Path(os.path.realpath(target))  # a link's own place could not be taken by a folder
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, not {shard_bytes}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function, not {type(progress).__name__}")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}", ["it is a file; a checkpoint needs a folder"])
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}", ["the folder is not empty: choose a new or empty one"])
    return target


def read_config(folder: Path) -> dict:
    """The config.json of a checkpoint's folder, none of whose files may be a link out of it."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}", ["there is no such folder"])
    refuse_links(folder)
    return read_json_object(folder / "config.json")


def read_json_object(path: Path) -> dict:
    try:
        found = parse_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent}", [f"there is no {path.name}"]) from error
    except OSError as error:
        raise CheckpointError(f"{path}", [f"{error.strerror}"]) from error
    except ValueError as error:
        raise CheckpointError(f"{path}", [f"it is not JSON: {error}"]) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}", ["it is not a JSON object"])
    return found


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
