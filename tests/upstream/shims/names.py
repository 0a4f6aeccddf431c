"""Modules of our own making under other projects' import names."""

import importlib
import importlib.abc
import importlib.util
import sys
import types


def module(name: str, **members) -> types.ModuleType:
    """A module of this name, and of each name before a dot, with these members."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            sys.modules[path] = made = types.ModuleType(path)
            made.__path__ = []  # a package, so that more can lie in it
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], made)
    vars(sys.modules[name]).update(members)
    return sys.modules[name]


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import theirs.x.y` gives `ours.x.y`, the very same module."""

    def __init__(self, theirs: str, ours: str):
        self.theirs, self.ours = theirs, ours

    def find_spec(self, name, path=None, target=None):
        if name != self.theirs and not name.startswith(f"{self.theirs}."):
            return None
        real = self.ours + name[len(self.theirs) :]
        if importlib.util.find_spec(real) is None:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, made):
        real = importlib.import_module(self.ours + made.__name__[len(self.theirs) :])
        made.__dict__.update({n: v for n, v in vars(real).items() if not n.startswith("__")})
        made.__path__ = list(getattr(real, "__path__", []))
