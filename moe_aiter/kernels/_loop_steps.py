"""The pieces of the expert loop: its blocks of rows, scratch, products, and what lies between these.

A block's `choices` (n,) int32 are its part of `order`: choice c is token c // k and has weight c of (T, k).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._groups import sum_dtype, wide
from ._host import array, ext, num_threads, use_huge_pages
from .activations import Activation
from .glu import glu_backward_reference

BLOCK_ROWS = 1024


class Block(NamedTuple):
    """Rows [first, last) of one expert, all of them or a part."""

    expert: int
    first: int
    last: int
    starts: bool  # the first block of its expert
    ends: bool  # the last one


def blocks(group_sizes: Tensor, rows: int) -> Iterator[Block]:
    """Each expert's rows in even blocks of at most BLOCK_ROWS; one block of none for an expert without rows.

    Sizes that are negative or sum to more than `rows` are clamped.
    """
    start = 0
    for expert, size in enumerate(group_sizes.tolist()):
        size = min(max(size, 0), rows - start)
        parts = max(1, -(-size // BLOCK_ROWS))
        last = start
        for part in range(1, parts + 1):
            first, last = last, start + size * part // parts
            yield Block(expert, first, last, part == 1, part == parts)
        start = last


def padded(rows: int, dtype: torch.dtype) -> int:
    """How many rows a product over `rows` rows gets.

    oneDNN, which multiplies 16-bit floats, compiles code for each size that it meets, half a millisecond for
    each of a layer's products.  Experts have other numbers of rows in every step, so the sizes must be few.
    """
    step = 1 if dtype.itemsize != 2 else 4 if rows < 128 else 16
    return -(-rows // step) * step


class Scratch:
    """Buffers for the rows of one block, made at first use and reused by every block."""

    def __init__(self, like: Tensor, rows: int, view: Callable):
        self.like, self.view, self.buffers = like, view, {}
        self.rows = padded(min(rows, BLOCK_ROWS), like.dtype)

    def take(self, name: str, rows: int, columns: int, clear: bool = False) -> tuple:
        """A buffer's first rows, padded for products, and without padding as the steps see them.

        The padding holds anything, unless it is cleared: then it adds nothing to a sum over rows.
        """
        if name not in self.buffers:
            buffer = self.like.new_empty(self.rows, columns)
            self.buffers[name] = buffer, self.view(buffer)
        buffer, view = self.buffers[name]
        end = padded(rows, buffer.dtype)
        if clear and end > rows:
            view[rows:end] = 0
        return buffer[:end], view[:rows]


class WeightGradient:
    """Sums left.T @ right over an expert's blocks, into a fresh gradient or onto a `main_grad`."""

    def __init__(self, grad: Tensor, main_grad: Tensor | None):
        self.onto_main = main_grad is not None
        self.grads = (main_grad if self.onto_main else grad).unbind(0)
        self.product = self.total = None

    def add(self, block: Block, left: Tensor, right: Tensor) -> None:
        grad = self.grads[block.expert]
        fresh = block.starts and not self.onto_main
        if grad.dtype == left.dtype and (grad.dtype == sum_dtype(grad) or (fresh and block.ends)):
            torch.addmm(grad, left.mT, right, beta=0 if fresh else 1, out=grad)
            return
        if self.product is None:
            self.product = left.new_empty(grad.shape)
        torch.mm(left.mT, right, out=self.product)
        if self.onto_main:
            grad.add_(self.product)
            return
        if self.total is None:
            self.total = grad.new_empty(grad.shape, dtype=sum_dtype(grad))
        if block.starts:
            self.total.copy_(self.product)
        else:
            self.total.add_(self.product)
        if block.ends:
            grad.copy_(self.total)

    def clear(self, block: Block) -> None:
        """The gradient of an expert without rows."""
        if not self.onto_main:
            self.grads[block.expert].zero_()


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

    def glu(self, z, out) -> None:
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

    def gather(self, x, choices, out) -> None:
        ext.gather(x, choices, None, out, self.top_k, self.threads)

    def accumulate(self, rows, choices, weighted: bool, out) -> None:
        ext.accumulate(rows, choices, self.weights if weighted else None, out, self.top_k, self.threads)

    def column_sum(self, rows, choices, weighted: bool, out) -> None:
        ext.column_sums(rows, choices, self.weights if weighted else None, out, self.threads)

    def glu(self, z, out) -> None:
        ext.glu(z, out, *self.act, self.threads)

    def glu_backward(self, da, z, choices, out: tuple) -> None:
        ext.weighted_glu_backward(da, z, choices, self.weights, *out, *self.act, self.threads)
