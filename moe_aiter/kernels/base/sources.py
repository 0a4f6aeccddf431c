"""Products that take the rows of one source after the other: those of the tokens of one rank at a time.

A product of tokens that arrive from other ranks begins with the rows of those that are there.  A product
whose sums leave begins with the rows of other ranks' tokens.  `moe_aiter.distributed` sets `by_source`.

The products are those of `expert_up`, `expert_down_grad` and `gmm_unpermute`.  Their launchers bind a kernel
for whole groups and one for passes, and loop over `arriving` or `leaving`.  Inside of `in_turn`, the sums of
a source follow its up-projection at once, so that they leave while the tokens of the next source arrive.

In backward, tokens that were saved travel again, beside the products that do not read them.  Whatever unpacks
them waits for them, except inside of `late`: there a tensor without memory, on the device meta, stands for
the tokens until `arrived` waits for them.  So nothing can read them too early.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from ...private_api import Scoped, dispatch_modes
from .launch import bind_kernel

X = TypeVar("X", Tensor, Tensor | None)
Bind = TypeVar("Bind", bound=Callable)
Arriving = tuple[Tensor, Tensor | None]
Leaving = tuple[Tensor, Tensor | None, slice, Tensor, bool]

by_source: Scoped[Any] = Scoped("by_source", None)  # an object with what is used of `sources` here
travelling: Scoped[Any] = Scoped("travelling", None)  # an object with `waits` and `receive()`, see below


def bind_passes(kernel: Callable, grid: tuple, **constants) -> Callable:
    """Return `launch_for(starts)`, which returns the kernel bound for whole groups or for those of a pass."""
    whole, part = (bind_kernel(kernel, grid, **constants) for _ in range(2))
    return lambda starts: whole if starts is None else part


def arriving(group_sizes: Tensor) -> Iterator[Arriving]:
    """Yield the sizes and the first rows (E,) of the groups in each pass; None: one begins where one ends.

    The rows of a pass have arrived, on the GPU, when it is yielded.
    """
    sources = by_source.get()
    if sources is not None:
        return sources.arriving()
    return iter([(group_sizes.contiguous(), None)])


def leaving(group_sizes: Tensor, out: Tensor) -> Iterator[Leaving]:
    """Yield the same; which tokens' sums a pass computes; the tensor that it writes them to, and whether it
    adds to what the tensor holds for tokens with a rank of ELSEWHERE (rows/permute.py).

    The sums of a pass leave when the next pass is asked for.
    """
    sources = by_source.get()
    whole = group_sizes, None, slice(None), out, False
    return iter([whole]) if sources is None else sources.leaving(out)


def takes_passes(bind: Bind) -> Bind:
    """Mark an implementation of `expert_up` or `expert_down` that takes the rows of each source in turn."""
    bind.takes_passes = True  # type: ignore[attr-defined]
    return bind


class Turns:
    """Sources of which `expert_down` launches the passes of `expert_up`, all but the first.

    Sources leave in the order in which they arrive, but the first to arrive is the last to leave.
    """

    def __init__(self, sources: Any):
        self.sources = sources
        self.ups: Iterator[None] = iter(())

    def arriving(self) -> Iterator[Arriving]:
        return self.sources.arriving()

    def leaving(self, out: Tensor) -> Iterator[Leaving]:
        ups = itertools.chain(self.ups, itertools.repeat(None))
        for _, groups in zip(ups, self.sources.leaving(out), strict=False):
            yield groups


def in_turn(impls: Callable[[], Iterable[Callable]]) -> contextlib.AbstractContextManager[None]:
    """Let `expert_down`, which follows `expert_up` inside the block, launch most of the latter's passes.

    Nothing between the two may read z or a.  `impls` returns the implementations that will run: unless they
    are marked by `takes_passes`, and where a mode sees each op's result, `expert_up` launches all.
    """
    sources = by_source.get()
    if sources is None or dispatch_modes():
        return contextlib.nullcontext()
    if not all(hasattr(impl, "takes_passes") for impl in impls()):
        return contextlib.nullcontext()
    return by_source.set(Turns(sources))


def launch_passes(ups: Iterator[None]) -> None:
    """Launch each pass of `expert_up`, or inside of `in_turn` the first one."""
    turns = by_source.get()
    if isinstance(turns, Turns):
        next(ups)
        turns.ups = ups
    else:
        for _ in ups:
            pass


def late() -> contextlib.AbstractContextManager[None]:
    """Do not wait for saved tokens that are unpacked inside the block: whoever reads them calls `arrived`."""
    source = travelling.get()
    return contextlib.nullcontext() if source is None else without_wait(source)


@contextlib.contextmanager
def without_wait(source: Any) -> Iterator[None]:
    source.waits = False
    try:
        yield
    finally:
        source.waits = True


def arrived(x: X) -> X:
    """Return the tokens that `x` stands for, after a wait for them on the GPU; another `x` as it is."""
    source = travelling.get()
    return x if source is None or x is None or not x.is_meta else source.receive()
