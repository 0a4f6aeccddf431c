"""What conversions and training both need of a disk, and of packages that not everybody installs."""

import importlib
import os
from pathlib import Path
from types import ModuleType


def need(module: str, extra: str, error: type[Exception] = ImportError) -> ModuleType:
    """Import a module of that extra, or raise `error`, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        package = module.partition(".")[0]
        raise error(f"{package} is missing: pip install '.[{extra}]' in the source tree") from missing


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
