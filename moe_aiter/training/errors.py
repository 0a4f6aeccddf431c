"""What a user can do wrong, said in one line."""

import importlib
from types import ModuleType


class UsageError(ValueError):
    """A mistake that the user can mend: the command line prints its message, without a traceback."""


def need(module: str) -> ModuleType:
    """Import a module that only training needs, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(f"training needs {package}: pip install moe-aiter[train]") from error
