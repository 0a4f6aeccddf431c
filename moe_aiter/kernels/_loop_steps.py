"""What the expert loop computes between and around its matrix products, for one block of rows.

A block's `choices` (n,) int32 are its part of `order`: choice c is token c // k and has weight c of (T, k).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._groups import wide
from ._host import array, ext, num_threads, use_huge_pages
from .activations import Activation
from .glu import glu_backward_reference

CACHED = 2**20  # bytes of a weight that are worth asking for early: about a core's second cache
SMALL = 2**21  # multiplications: less in one product, and workers would mostly wait for Python


def linear(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ w.T + bias, for a `w` (N, K)"""
    if bias is None:
        torch.mm(x, w.mT, out=out)
    else:
        torch.addmm(bias, x, w.mT, out=out)


class TorchSteps:
    """In torch, for every dtype: the arithmetic is float32, or float64 for float64."""

    view = staticmethod(torch.Tensor.detach)  # what the other methods take for a tensor

    def __init__(self, routing_weights: Tensor, act: Activation, interleaved: bool):
        self.weights, self.top_k = wide(routing_weights).flatten(), routing_weights.shape[1]
        self.act, self.interleaved = act, interleaved

    def prepare(self, *fresh: Tensor) -> None:
        """Called with outputs that nothing has touched yet"""

    def num_workers(self, rows: list[int], multiplications: int) -> int:
        """How many workers should take tasks of these many rows, with this much to multiply for each row"""
        return 1

    def for_each(self, n: int, workers: int, task: Callable[[int, int], None]) -> None:
        """task(i, worker) for i = 0..n-1, begun in this order"""
        for i in range(n):
            task(i, 0)

    def gather(self, x, choices, out) -> None:
        """out[r] = x[token of r]"""
        torch.index_select(x, 0, choices // self.top_k, out=out)

    def accumulate(self, rows, choices, weighted: bool, out) -> None:
        """out[token of r] += rows[r], or weight of r times that; `out` is wide"""
        rows = wide(rows) * self.weights[choices, None] if weighted else wide(rows)
        out.index_add_(0, choices // self.top_k, rows.to(out.dtype))

    def column_sum(self, rows, choices, weighted: bool, out) -> None:
        """out += the sum of the rows, or of weight times row; `out` is wide"""
        out += (wide(rows) * self.weights[choices, None] if weighted else wide(rows)).sum(0)

    def glu(self, z, out, upcoming: list[Tensor]) -> None:
        """out = f(z); the tensors `upcoming` will be read soon"""
        out.copy_(self.act(wide(z), self.interleaved))

    def glu_backward(self, da, z, choices, out: tuple) -> None:
        """dz, weight * activation, and for each choice <da, activation>; `da` is before the weight"""
        dz, weighted, dweights = out
        da, z, weights = wide(da), wide(z), self.weights[choices, None]
        a = self.act(z, self.interleaved)
        dz.copy_(glu_backward_reference(da * weights, z, self.act.name, self.interleaved))
        weighted.copy_(a * weights)
        dweights[choices] = (da * a).sum(1).to(dweights.dtype)


class HostSteps:
    """The same in C++, for float32 and bfloat16."""

    view = staticmethod(array)
    prepare = staticmethod(use_huge_pages)

    def __init__(self, routing_weights: Tensor, act: Activation, interleaved: bool):
        self.weights, self.top_k = array(routing_weights.float().flatten()), routing_weights.shape[1]
        self.act, self.threads = (act.base, act.gated, interleaved), num_threads()

    def num_workers(self, rows: list[int], multiplications: int) -> int:
        """A worker is a thread, and all that it does is done in that thread.

        So nobody waits for anybody, where a product that threads share ends when the last of them is done.
        Tasks that are few or uneven, and so leave workers idle, or small are shared, one after the other.
        """
        uneven = 2 * max(rows, default=0) * self.threads > sum(rows)
        small = sum(rows) * multiplications < len(rows) * SMALL
        return 1 if uneven or small else self.threads

    def for_each(self, n: int, workers: int, task: Callable[[int, int], None]) -> None:
        if workers == 1:
            return TorchSteps.for_each(self, n, 1, task)
        self.threads = 1

        def run(i: int, worker: int) -> None:
            with torch.inference_mode():  # the thread knows nothing of what the caller has switched off
                task(i, worker)

        return ext.for_each(n, workers, run)

    def gather(self, x, choices, out) -> None:
        ext.gather(x, choices, None, out, self.top_k, self.threads)

    def accumulate(self, rows, choices, weighted: bool, out) -> None:
        ext.accumulate(rows, choices, self.weights if weighted else None, out, self.top_k, self.threads)

    def column_sum(self, rows, choices, weighted: bool, out) -> None:
        ext.column_sums(rows, choices, self.weights if weighted else None, out, self.threads)

    def glu(self, z, out, upcoming: list[Tensor]) -> None:
        memory = [(x.data_ptr(), x.nbytes) for x in upcoming if x.nbytes <= CACHED and x.is_contiguous()]
        ext.glu(z, out, *self.act, self.threads, memory)

    def glu_backward(self, da, z, choices, out: tuple) -> None:
        ext.weighted_glu_backward(da, z, choices, self.weights, *out, *self.act, self.threads)
