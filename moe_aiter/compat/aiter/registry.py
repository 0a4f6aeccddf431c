"""Register functions by name: `register_kernel`, `get_kernel`, `list_kernels`."""

from collections.abc import Callable
from typing import TypeVar, overload

Kernel = TypeVar("Kernel", bound=Callable)
KERNELS: dict[str, Callable] = {}


@overload
def register_kernel(fn: Kernel, /) -> Kernel: ...
@overload
def register_kernel(*, name: str) -> Callable[[Kernel], Kernel]: ...
def register_kernel(fn: Callable | None = None, /, *, name: str | None = None) -> Callable:
    """Record a function by its own name, `@register_kernel`, or another, `@register_kernel(name="x")`.

    Returns the function itself, so that its gradient stays its own.  A name that is there already stands for
    the new function from then on, as when a cell of a notebook runs again.  Raises TypeError for what cannot
    be called or a name that is not a str, ValueError without a name.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if fn is None:
        return lambda fn: register_kernel(fn, name=name)
    if not callable(fn):
        raise TypeError(f"a kernel is a function, not {type(fn).__name__}")
    name = getattr(fn, "__name__", None) if name is None else name
    if not name:
        raise ValueError(f"{fn!r} has no name; give one by register_kernel(name=...)")
    KERNELS[name] = fn
    return fn


def list_kernels() -> list[str]:
    """The names of what is registered, sorted."""
    return sorted(KERNELS)


def get_kernel(name: str) -> Callable:
    """What is registered by this name.  Raises ValueError, with the names that are there, for another."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if name not in KERNELS:
        raise ValueError(f"name: unknown kernel {name!r}; known: {', '.join(list_kernels()) or 'none'}")
    return KERNELS[name]
