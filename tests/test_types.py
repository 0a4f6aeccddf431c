"""Public functions and methods are annotated, so that a user's type checker knows them."""

import inspect

import pytest

import moe_aiter
import moe_aiter.compat.aiter
import moe_aiter.compat.flashinfer

MODULES = [moe_aiter, moe_aiter.compat.aiter, moe_aiter.compat.flashinfer]
PUBLIC = {f"{m.__name__}.{name}": getattr(m, name) for m in MODULES for name in m.__all__}
SPECIAL = {"__init__", "__call__", "__enter__", "__exit__"}


def functions(thing) -> list:
    """The function itself, or the class's own public methods."""
    if not inspect.isclass(thing):
        return [thing] if inspect.isfunction(thing) else []
    own = [cls for cls in thing.__mro__ if cls.__module__.startswith("moe_aiter")]
    members = {name: f for cls in reversed(own) for name, f in vars(cls).items()}
    named = [f for name, f in members.items() if not name.startswith("_") or name in SPECIAL]
    return [getattr(f, "__func__", f) for f in named if inspect.isfunction(getattr(f, "__func__", f))]


@pytest.mark.parametrize("name", PUBLIC)
def test_annotated(name):
    for f in functions(PUBLIC[name]):
        parameters = inspect.signature(f).parameters.values()
        bare = [p.name for p in parameters if p.annotation is p.empty and p.name not in ("self", "cls")]
        assert not bare, f"{f.__qualname__} has no annotation for {', '.join(bare)}"
        assert f.__name__ == "__init__" or "return" in f.__annotations__, (
            f"{f.__qualname__} has no return annotation"
        )
