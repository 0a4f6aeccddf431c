"""Read the metadata of sharded checkpoints, which torch.distributed.checkpoint pickles, without running it.

A pickle is a program, which can call any function of any module.  `unpickled` follows the instructions that
torch's metadata consists of, and calls nothing: of an object it keeps the class's name, the arguments and the
state, as a `Record`.  `read_metadata` builds torch's objects from these, each field checked.
"""

import math
import pickletools
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..files import is_name, opened, plain

METADATA = ".metadata"
MOST_DIMS = 64  # of a tensor of torch
OF_TORCH = "torch.distributed.checkpoint.metadata."
CLASSES = BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
PATHS = "PurePosixPath", "PosixPath", "PureWindowsPath", "WindowsPath", "Path"  # where it was saved
NAMES = {
    *(f"{OF_TORCH}{kind.__name__}" for kind in (*CLASSES, TensorProperties, TensorStorageMetadata)),
    f"{OF_TORCH}_MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "builtins.getattr",  # of an enum's member, in Python 3.11
    *DTYPES,
    *(f"{module}.{path}" for module in ("pathlib", "pathlib._local") for path in PATHS),
}
T = TypeVar("T")


class Name(str):
    """The full name of a class or a function."""


class Record:
    """What a pickle says of an object: the name of its class, the arguments and the state."""

    def __init__(self, name: Name, args: tuple[Any, ...]):
        self.name, self.args = name, args
        self.state: Any = None


class Place(NamedTuple):
    """Where a tensor's part is: bytes of a file in the folder.  torch's reader knows these fields."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of the checkpoint in `folder`.

    Raises OSError for a file that cannot be read or is none, such as a pipe or a link out of the folder, and
    ValueError for a pickle that names anything but torch's metadata, and for fields that are not those.
    """
    path = folder / METADATA
    with opened(path, "rb", folder) as file:
        data = file.read()
    try:
        root = fields(unpickled(data), "Metadata")
        chunks: set[int] = set()
        stored = kind(dict, root["state_dict_metadata"])
        tensors = {kind(str, k): storage(v, chunks) for k, v in stored.items()}
        places = {index(k): place_in_file(v) for k, v in kind(dict, root["storage_data"]).items()}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is not the metadata of a sharded checkpoint: {error}") from error
    names = {found.relative_path for found in places.values()}
    sizes = {name: Path(plain(folder / name, folder)).stat().st_size for name in names}
    for of, found in places.items():
        if found.offset + found.length > sizes[found.relative_path]:
            raise ValueError(f"{folder / found.relative_path} ends before {of.fqn!r}: it is cut off")
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


# the instructions

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}


def unpickled(data: bytes) -> Any:
    """Return what a pickle of protocol 2 to 5 holds, with a `Record` for each object."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for instruction, arg, _ in pickletools.genops(data):
        follow(instruction.name, arg, stack, marks, memo)
    return stack.pop()


def follow(instruction: str, arg: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    def cut(count: int | None = None) -> list[Any]:
        first = marks.pop() if count is None else len(stack) - count
        found = stack[first:]
        del stack[first:]
        return found

    match instruction:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case _ if instruction in CONSTANTS:
            stack.append(CONSTANTS[instruction])
        case _ if instruction in EMPTY:
            stack.append(EMPTY[instruction]())
        case _ if instruction in VALUES:
            stack.append(arg)
        case "MARK":
            marks.append(len(stack))
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINPUT" | "LONG_BINPUT":
            memo[arg] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[arg])
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(cut(int(instruction[-1]))))
        case "TUPLE":
            stack.append(tuple(cut()))
        case "APPEND" | "APPENDS":
            items = cut(1 if instruction == "APPEND" else None)
            kind(list, stack[-1]).extend(items)
        case "SETITEM" | "SETITEMS":
            items = cut(2 if instruction == "SETITEM" else None)
            keys = [key if type(key) is Record else kind(str, key) for key in items[::2]]
            kind(dict, stack[-1]).update(zip(keys, items[1::2], strict=True))
        case "GLOBAL":
            stack.append(known_name(*arg.split(" ", 1)))
        case "STACK_GLOBAL":
            stack.append(known_name(*cut(2)))
        case "NEWOBJ" | "REDUCE":
            name, args = cut(2)
            stack.append(Record(kind(Name, name), kind(tuple, args)))
        case "BUILD":
            (state,) = cut(1)
            kind(Record, stack[-1]).state = state
        case _:
            raise ValueError(f"its pickle has the instruction {instruction}")


def known_name(module: object, name: object) -> Name:
    full = Name(f"{kind(str, module)}.{kind(str, name)}")
    if full not in NAMES:
        raise ValueError(f"its pickle names {full!r:.200}, which is not run")
    return full


# the fields


def kind(wanted: type[T], value: object) -> T:
    if type(value) is not wanted or not isinstance(value, wanted):
        raise TypeError(f"there is a {type(value).__name__}, where a {wanted.__name__} should be")
    return value


def named(name: str, value: object) -> Record:
    """The value, which must be an object of this class."""
    record = kind(Record, value)
    if record.name.rpartition(".")[2] != name:
        raise ValueError(f"there is a {record.name}, where a {name} should be")
    return record


def fields(record: object, name: str) -> dict[Any, Any]:
    """The fields of an object of this class."""
    return kind(dict, named(name, record).state)


def count(value: object) -> int:
    if not 0 <= (number := kind(int, value)) < 2**63:
        raise ValueError("there is a negative or a huge number")
    return number


def size(record: object) -> torch.Size:
    (numbers,) = named("Size", record).args
    if len(numbers) > MOST_DIMS:
        raise ValueError(f"a tensor has {len(numbers)} dimensions")
    return torch.Size(map(count, kind(tuple, numbers)))


def storage(record: object, seen: set[int]) -> TensorStorageMetadata | BytesStorageMetadata:
    """What is saved under a key.  `seen` has the lists of chunks of other tensors: none may be shared."""
    if kind(Record, record).name == f"{OF_TORCH}BytesStorageMetadata":
        return BytesStorageMetadata()
    found = fields(record, "TensorStorageMetadata")
    whole, parts = size(found["size"]), kind(list, found["chunks"])
    if id(parts) in seen:
        raise ValueError("two tensors have one list of chunks")
    seen.add(id(parts))
    of_parts = [fields(part, "ChunkStorageMetadata") for part in parts]
    chunks = [ChunkStorageMetadata(size(part["offsets"]), size(part["sizes"])) for part in of_parts]
    for chunk in chunks:
        ends = [o + n <= most for o, n, most in zip(chunk.offsets, chunk.sizes, whole, strict=True)]
        if not all(ends):
            raise ValueError("a chunk is not within its tensor")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(whole):
        raise ValueError("the chunks of a tensor do not make it up")
    if chunks_overlap(chunks):
        raise ValueError("two chunks of a tensor overlap")
    dtype, *_ = kind(tuple, named("TensorProperties", found["properties"]).state)
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[kind(Name, dtype)]), whole, chunks)


def chunks_overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two chunks have an element in common.  They are sorted along the dimension that is cut most."""
    if len(chunks) < 2:
        return False
    starts = list(zip(*(chunk.offsets for chunk in chunks), strict=True))
    most = max(range(len(starts)), key=lambda dim: len(set(starts[dim])))
    chunks = sorted((c for c in chunks if math.prod(c.sizes)), key=lambda c: int(c.offsets[most]))
    for i, a in enumerate(chunks):
        end = a.offsets[most] + a.sizes[most]
        for b in chunks[i + 1 :]:
            if b.offsets[most] >= end:
                break
            sides = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
            if all(o < p + m and p < o + n for o, n, p, m in sides):
                return True
    return False


def index(record: object) -> MetadataIndex:
    found = fields(record, "MetadataIndex")
    offset, number = found.get("offset"), found.get("index")
    return MetadataIndex(
        kind(str, found["fqn"]),
        None if offset is None else size(offset),
        None if number is None else count(number),
    )


def place_in_file(record: object) -> Place:
    found = fields(record, "_StorageInfo")
    name = found["relative_path"]
    if not is_name(name):
        raise ValueError("a part is in a file out of the folder")
    if found.get("transform_descriptors"):
        raise ValueError("a part is compressed")
    return Place(name, count(found["offset"]), count(found["length"]))
