"""Batch invariance: whether a token's bits may depend on the other tokens of its batch.

`batch_invariant()` is the question.  A kernel that sums in another order for another number of tokens asks
it when it is called.  The switch sets the answer for the process, `invariant` for a block, such as a forward
pass of a layer.  The backward pass of an op gets the answer of its forward pass.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .config import settings
from .private_api import Scoped

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
