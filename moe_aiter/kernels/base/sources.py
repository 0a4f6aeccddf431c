"""Products that take the rows of one source after the other: those of the tokens of one rank at a time.

A product of tokens that arrive from other ranks begins with the rows of those that are there.  A product
whose sums leave begins with the rows of other ranks' tokens.  `moe_aiter.distributed` sets `by_source`.

The products are those of `expert_up`, `expert_down_grad` and `gmm_unpermute`.  Their launchers bind a kernel
for whole groups and one for passes, and loop over `arriving` or `leaving`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ...private_api import Scoped
from .launch import bind_kernel

by_source: Scoped[Any] = Scoped("by_source", None)  # an object with the two methods that are called here


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
