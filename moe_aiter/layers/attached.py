"""Put attributes and hooks on the modules of a model, and take them off again in reverse order."""

import contextlib
from collections.abc import Collection
from typing import Any

from ..private_api import WRAPPERS


class Attachment(contextlib.ExitStack):
    """Attributes and hooks of modules; `close`, or the end of a `with` block, takes them off.

    A copy, by copy.deepcopy or pickle, has none to take off: they are on the modules of the original.
    """

    def __reduce__(self) -> tuple[type["Attachment"], tuple[()]]:
        return Attachment, ()

    def put(self, owner: object, name: str, value: Any) -> None:
        """Give an object an attribute of its own.  In the end it has the one from before, or none."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(vars(owner).pop, name, None)
        setattr(owner, name, value)

    def hook(self, handle: Any) -> None:
        """Remove a hook in the end, whose handle torch has returned."""
        self.callback(handle.remove)


class NotCopied:
    """An attribute of modules that copy.deepcopy and pickle replace by None."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def plain_name(name: str, wrappers: Collection[str] = WRAPPERS) -> str:
    """The name of a module without torch's wrappers."""
    return ".".join(part for part in name.split(".") if part not in wrappers)
