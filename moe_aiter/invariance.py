"""Batch invariance: whether a token's bits may depend on the other tokens of its batch.

`batch_invariant()` is the question.  A kernel that sums in another order for another number of tokens asks
it when it is called.  The switch sets the answer for the process, `invariant` for a block, such as a forward
pass of a layer.  The backward pass of an op gets the answer of its forward pass.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from .config import settings
from .private_api import Scoped
from .torch_ops import NAMESPACE, TWIN

Function = Callable[..., Any]
Backward = TypeVar("Backward", bound=Function)
INVARIANT: Scoped[bool] = Scoped("batch_invariant", settings.batch_invariant)


def batch_invariant() -> bool:
    """Whether the bits of a token's results must depend on that token alone, in this thread."""
    return INVARIANT.get()


@contextlib.contextmanager
def invariant(on: bool = True) -> Iterator[None]:
    """Make the answer True inside the block if `on`; otherwise leave it as it is."""
    with contextlib.nullcontext() if not on or INVARIANT.get() else INVARIANT.set(True):
        yield


@contextlib.contextmanager
def summing_tokens() -> Iterator[None]:
    """Make the answer False inside the block, for the gradient of a weight, which no token has alone."""
    with INVARIANT.set(False) if INVARIANT.get() else contextlib.nullcontext():
        yield


# torch.compile
#
# A compiled graph calls ops when the forward pass that was traced is long over.  With batch invariance it has
# other ops, the twins, which run as if the switch were on.  torch also keeps compiled graphs on disk, by the
# ops of the forward pass: a backward pass for one answer must not be taken for the other.

MAKERS: dict[str, Callable[[], object]] = {}  # what registers the twin of an op, by the op's name
TWINS: dict[str, Any] = {}  # twins, by the same name


def keep_twin(
    name: str, register: Function, run: Function, fake: Function, backward: Function | None,
    save: Function | None,
) -> None:  # fmt: skip
    """Keep how to register an op's twin: by `register(its name, run, fake, backward, save)`."""

    def run_twin(i: Any) -> Any:
        with invariant():
            return run(i)

    def save_twin(ctx: Any, i: Any, output: Any) -> None:
        ctx.batch_invariant = True
        if save is not None:
            save(ctx, i, output)

    def make() -> None:
        register(name + TWIN, run_twin, fake, backward, None if backward is None else save_twin)
        TWINS[name] = getattr(getattr(torch.ops, NAMESPACE), name + TWIN).default

    if not name.endswith(TWIN):
        MAKERS[name] = make
        if INVARIANT.default:
            make_twins()


def make_twins() -> None:
    """Register the twins of all ops that are there."""
    while MAKERS:
        MAKERS.popitem()[1]()


def check_twins() -> None:
    """Raise RuntimeError if no twin is there, as in a process that has only unpickled a layer."""
    if not TWINS:
        raise RuntimeError("to compile an unpickled layer, set its batch_invariant = True once more")


def twin_of(name: str, op: Any) -> Any:
    """Return what a graph calls for an op: its twin where batch invariance is on and there is one."""
    return TWINS.get(name, op) if batch_invariant() else op


def refuse_batch(what: str) -> None:
    """Raise ValueError if the answer is True: `what` makes a token depend on other tokens, or on chance."""
    if batch_invariant():
        raise ValueError(f"batch invariance is on, but {what}")


def remembering(save: Function | None) -> Function:
    """Return `save(ctx, i, output)` that keeps the answer of a forward pass too."""

    def run(ctx: Any, i: Any, output: Any) -> None:
        ctx.batch_invariant = batch_invariant()
        if save is not None:
            save(ctx, i, output)

    return run


def as_remembered(backward: Backward) -> Backward:
    """Return `backward(ctx, *grads)`, run with the answer of its forward pass."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not ctx.batch_invariant:
            return backward(ctx, *grads)
        with invariant():
            return backward(ctx, *grads)

    return run  # type: ignore[return-value]  # the same arguments
