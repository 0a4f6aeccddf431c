"""A byte-level language model with MoE layers: `moe-aiter train`, `sample` and `report`."""

from types import ModuleType

from moe_aiter import files
from moe_aiter.config import SettingError


class UsageError(SettingError):
    """A mistake that the user can mend: the command line prints its message, without a traceback."""


def need(module: str, extra: str = "train") -> ModuleType:
    """Import a module that only training and its plots need, or say how to install it."""
    return files.need(module, extra, UsageError)
