"""The pieces of the expert loop: its blocks of rows, scratch, products, and what lies between these.

A block's `choices` (n,) int32 are its part of `order`: choice c belongs to token c // k and has weight c of (T, k).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._groups import sum_dtype, wide
from ._host import array, ext, num_threads
from .activations import Activation
from .glu import glu_backward_reference

BLOCK_ROWS = 512


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
        end = start + min(max(size, 0), rows - start)
        parts = max(1, -(-(end - start) // BLOCK_ROWS))
        borders = [start + (end - start) * part // parts for part in range(parts + 1)]
        for first, last in zip(borders, borders[1:], strict=False):
            yield Block(expert, first, last, first == start, last == end)
        start = end


class Scratch:
    """Buffers for the rows of one block, made at first use and reused by every block."""

    def __init__(self, like: Tensor, rows: int):
        self.like, self.rows, self.buffers = like, min(rows, BLOCK_ROWS), {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = self.like.new_empty(self.rows, columns)
        return self.buffers[name][:rows]


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

    def __init__(self, routing_weights: Tensor, act: Activation, interleaved: bool):
        self.weights, self.top_k = wide(routing_weights).flatten(), routing_weights.shape[1]
        self.act, self.interleaved = act, interleaved

    def gather(self, x: Tensor, choices: Tensor, out: Tensor) -> None:
        """out[r] = x[token of r]"""
        torch.index_select(x, 0, choices // self.top_k, out=out)

    def accumulate(self, rows: Tensor, choices: Tensor, weighted: bool, out: Tensor) -> None:
        """out[token of r] += rows[r], or weight of r times that; `out` is wide"""
        rows = wide(rows) * self.weights[choices, None] if weighted else wide(rows)
        out.index_add_(0, choices // self.top_k, rows.to(out.dtype))

    def column_sum(self, rows: Tensor, choices: Tensor, weighted: bool, out: Tensor) -> None:
        """out += the sum of the rows, or of weight times row; `out` is wide"""
        out += (wide(rows) * self.weights[choices, None] if weighted else wide(rows)).sum(0)

    def glu(self, z: Tensor, out: Tensor) -> None:
        out.copy_(self.act(wide(z), self.interleaved))

    def glu_backward(
        self, da: Tensor, z: Tensor, choices: Tensor, out: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """dz, weight * activation, and for each choice <da, activation>; `da` is before the weight"""
        dz, weighted, dweights = out
        da, z, weights = wide(da), wide(z), self.weights[choices, None]
        a = self.act(z, self.interleaved)
        dz.copy_(glu_backward_reference(da * weights, z, self.act.name, self.interleaved))
        weighted.copy_(a * weights)
        dweights[choices] = (da * a).sum(1).to(dweights.dtype)


class HostSteps:
    """The same in C++, for float32 and bfloat16."""

    def __init__(self, routing_weights: Tensor, act: Activation, interleaved: bool):
        self.weights, self.top_k = array(routing_weights.float()).reshape(-1), routing_weights.shape[1]
        self.act, self.threads = (act.base, act.gated, interleaved), num_threads()

    def gather(self, x: Tensor, choices: Tensor, out: Tensor) -> None:
        ext.gather(array(x), array(choices), None, array(out), self.top_k, self.threads)

    def accumulate(self, rows: Tensor, choices: Tensor, weighted: bool, out: Tensor) -> None:
        weights = self.weights if weighted else None
        ext.accumulate(array(rows), array(choices), weights, array(out), self.top_k, self.threads)

    def column_sum(self, rows: Tensor, choices: Tensor, weighted: bool, out: Tensor) -> None:
        weights = self.weights if weighted else None
        ext.column_sums(array(rows), array(choices), weights, array(out), self.threads)

    def glu(self, z: Tensor, out: Tensor) -> None:
        ext.glu(array(z), array(out), *self.act, self.threads)

    def glu_backward(
        self, da: Tensor, z: Tensor, choices: Tensor, out: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        inputs = (array(da), array(z), array(choices), self.weights)
        ext.weighted_glu_backward(*inputs, *map(array, out), *self.act, self.threads)
