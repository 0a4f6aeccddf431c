"""Products that take the rows of one source after the other: those of the tokens of one rank at a time.

A product of tokens that arrive from other ranks begins with the rows of those that are there.  A product
whose sums leave begins with the rows of other ranks' tokens.  `moe_aiter.distributed` sets `by_source`.

The products are those of `expert_up`, `expert_down_grad` and `gmm_unpermute`.  Their launchers bind a kernel
for whole groups and one for passes, and loop over `arriving` or `leaving`.

In backward, tokens that were saved travel again, beside the products that do not read them.  Whatever unpacks
them waits for them, except inside of `late`: there a tensor without memory, on the device meta, stands for
the tokens until `arrived` waits for them.  So nothing can read them too early.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from ...private_api import Scoped
from .launch import bind_kernel

X = TypeVar("X", Tensor, Tensor | None)

by_source: Scoped[Any] = Scoped("by_source", None)  # an object with the two methods that are called here
travelling: Scoped[Any] = Scoped("travelling", None)  # an object with `waits` and `receive()`, see below


def bind_passes(kernel: Callable, grid: tuple, **constants) -> Callable:
    """Return `launch_for(starts)`, which returns the kernel bound for whole groups or for those of a pass."""
    whole, part = (bind_kernel(kernel, grid, **constants) for _ in range(2))
    return lambda starts: whole if starts is None else part


def arriving(group_sizes: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the sizes and the first rows (E,) of the groups in each pass; None: one begins where one ends.

    The rows of a pass have arrived, on the GPU, when it is yielded.
    """
    sources = by_source.get()
    if sources is not None:
        return sources.arriving()
    return iter([(group_sizes.contiguous(), None)])


def leaving(group_sizes: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor | None, slice, Tensor, bool]]:
    """Yield the same; which tokens' sums a pass computes; the tensor that it writes them to, and whether it
    adds to what the tensor holds for tokens with a rank of ELSEWHERE (rows/permute.py).

    The sums of a pass leave when the next pass is asked for.
    """
    sources = by_source.get()
    whole = group_sizes, None, slice(None), out, False
    return iter([whole]) if sources is None else sources.leaving(out)


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
