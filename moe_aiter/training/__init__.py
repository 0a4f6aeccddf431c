"""A byte-level language model and its training: `moe-aiter train`, `plot` and `report`.

This file has the errors of users, disks and memory, each with a message of one line.
"""

from types import ModuleType

import torch

from .. import files

NO_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")


class UsageError(ValueError):
    """A mistake that the user can mend: the command line prints its message, without a traceback."""


def need(module: str, extra: str = "train") -> ModuleType:
    """Import a module that only training and its plots need, or say how to install it."""
    return files.need(module, extra, UsageError)


def summary(error: BaseException) -> str:
    """One line of an error: its kind if that says more, and the last line of its text, the most precise."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error).strip().rpartition("\n")[2].strip()
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"


def out_of_memory(error: BaseException) -> bool:
    """torch has a type for a full GPU, but on a CPU the text alone tells."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
