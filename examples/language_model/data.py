"""Training text: find files, split them into training and validation, and cut batches of bytes.

Byte 0, which no text contains, precedes each file; sampling starts from it.
"""

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from moe_aiter.files import opened

from . import UsageError

STDLIB_SKIPPED = {  # tests, programs, tables and installed packages: not the library's own prose
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data",
    "encodings", "ensurepip", "lib-dynload",
}  # fmt: skip
NEVER_TEXT = {"__pycache__", "node_modules"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    train: Tensor  # (N,) uint8
    val: Tensor  # (N',) uint8
    files: int
    fingerprint: str  # of training and validation: a resumed run must read the same text

    def to(self, device: torch.device) -> "Corpus":
        return dataclasses.replace(self, train=self.train.to(device), val=self.val.to(device))


def load_corpus(paths: tuple[str, ...], val_fraction: float, sequence: int) -> Corpus:
    """Read text from `paths` (the standard library's source if there are none) and split it by file.

    A file's side depends on its relative path alone.  If one side stays empty, as with a single file, the
    joined text is cut instead, and its end is the validation part.  Raises UsageError when a side is shorter
    than one sequence and the byte after it.
    """
    files = find_text(paths) if paths else find_stdlib()
    texts = {name: b"\0" + read_bytes(path) for name, path in files.items()}
    train = b"".join(text for name, text in texts.items() if not held_out(name, val_fraction))
    val = b"".join(text for name, text in texts.items() if held_out(name, val_fraction))
    if not train or not val:
        joined = train + val
        cut = round(len(joined) * (1 - val_fraction))
        train, val = joined[:cut], joined[cut:]
    for part, text in (("training", train), ("validation", val)):
        if len(text) <= sequence:
            raise UsageError(
                f"the {part} text has {len(text)} bytes but a sequence needs {sequence + 1}: "
                f"give more text (--data), or shorten the sequence (--sequence)"
            )
    fingerprint = hashlib.sha256(train + val).hexdigest()
    return Corpus(to_tensor(train), to_tensor(val), len(files), fingerprint)


def to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def held_out(name: str, val_fraction: float) -> bool:
    """Whether the file of this relative path is for validation; the same on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def find_stdlib() -> dict[str, Path]:
    """The source files of the standard library, relative path -> path, in the order of the relative paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {path.relative_to(root): path for path in root.rglob("*.py")}
    found = {name: path for name, path in found.items() if not STDLIB_SKIPPED & set(name.parts)}
    if not found:
        raise UsageError(f"this Python has no source files under {root}: give your own text with --data PATH")
    return {name.as_posix(): found[name] for name in sorted(found, key=Path.as_posix)}


def find_text(paths: tuple[str, ...]) -> dict[str, Path]:
    """The text files at and below `paths`, without hidden ones, relative path -> path, in order."""
    found = {}
    for root in map(Path, paths):
        if not root.exists():
            raise UsageError(f"--data {root}: no such file or folder")
        texts = 0
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            name = path.relative_to(root.parent)
            hidden = any(part.startswith(".") or part in NEVER_TEXT for part in name.parts[1:])
            if path.is_file() and not hidden and is_text(path):
                texts += 1
                other = found.setdefault(name.as_posix(), path)
                if not path.samefile(other):
                    raise UsageError(f"--data: {other} and {path} are both named {name}; rename one")
        if not texts:
            raise UsageError(f"--data {root}: no text file there (text is UTF-8 without zero bytes)")
    return found


def read_bytes(path: Path) -> bytes:
    with opened(path, "rb") as file:
        return file.read()


def is_text(path: Path) -> bool:
    data = read_bytes(path)
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return bool(data) and b"\0" not in data


ALL = slice(None)


def train_batch(
    text: Tensor, batch: int, sequence: int, seed: int, step: int, rows: slice = ALL
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (batch, sequence) int64 of one step; they depend on the seed and the step alone.

    `rows` selects the sequences of one of several processes.
    """
    # hashed, because torch's generator on the CPU looks at 32 bits of its seed only
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    starts = torch.randint(len(text) - sequence, (batch,), generator=generator)
    return windows(text, starts[rows], sequence)


def val_batch(
    text: Tensor, batch: int, sequence: int, index: int, count: int, rows: slice = ALL
) -> tuple[Tensor, Tensor]:
    """Batch `index` of `count` batches whose windows are spread evenly over the text; `rows` as above."""
    starts = torch.linspace(0, len(text) - sequence - 1, batch * count).long()
    return windows(text, starts[index::count][rows], sequence)


def windows(text: Tensor, starts: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    if text.is_cuda:
        starts = starts.pin_memory().to(text.device, non_blocking=True)
    span = torch.arange(sequence + 1, device=text.device)
    rows = text[starts[:, None] + span].long()  # (batch, sequence + 1)
    return rows[:, :-1], rows[:, 1:]
