"""What the expert loop is made of, besides arithmetic: blocks, scratch, weight gradients, an order."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._groups import sum_dtype

BLOCK_ROWS = 1024  # what is in work at a time stays in cache; products of fewer rows are slower
FEW_ROWS, SMALL_STEP, STEP = 128, 4, 16  # of the sizes of products


class Block(NamedTuple):
    """Rows [first, last) of one expert, all of them or a part; at least one."""

    number: int  # in the order of the rows
    expert: int
    first: int
    last: int
    starts: bool  # the first block of its expert
    ends: bool  # the last one
    z_first: int  # its rows of z are [z_first, z_last), padded as for products
    z_last: int


def blocks(group_sizes: list[int], rows: int, dtype: torch.dtype) -> list[list[Block]]:
    """For each expert, its rows in even blocks of at most BLOCK_ROWS.

    Sizes that are negative or sum to more than `rows` are clamped.
    """
    experts, number, start, z_first = [], 0, 0, 0
    for expert, size in enumerate(group_sizes):
        size = min(max(size, 0), rows - start)
        parts, mine = -(-size // BLOCK_ROWS), []
        for part in range(parts):
            first, last = (start + size * p // parts for p in (part, part + 1))
            z_last = z_first + padded(last - first, dtype)
            mine.append(Block(number, expert, first, last, part == 0, part == parts - 1, z_first, z_last))
            number, z_first = number + 1, z_last
        experts.append(mine)
        start += size
    return experts


def padded(rows: int, dtype: torch.dtype) -> int:
    """How many rows a product over `rows` rows gets.

    oneDNN, which multiplies 16-bit floats, compiles code for each size that it meets, half a millisecond for
    each of a layer's products.  Experts have other numbers of rows in every step, so the sizes must be few.
    """
    step = 1 if dtype.itemsize != 2 else SMALL_STEP if rows < FEW_ROWS else STEP
    return -(-rows // step) * step


def num_z_rows(rows: int, num_experts: int, dtype: torch.dtype) -> int:
    """The most rows that z may have, with the padding of each block; known without the group sizes."""
    if dtype.itemsize != 2:
        return rows
    blocks = min(rows, num_experts) + rows // BLOCK_ROWS
    return rows + (SMALL_STEP - 1) * blocks + (STEP - SMALL_STEP) * min(blocks, rows // FEW_ROWS)


class Scratch:
    """Buffers for the rows of one block, made at first use and reused by every block of a worker."""

    def __init__(self, like: Tensor, rows: int, view: Callable):
        self.like, self.view, self.buffers, self.returned = like, view, {}, {}
        self.rows = padded(min(rows, BLOCK_ROWS), like.dtype)

    def take(self, name: str, rows: int, columns: int, clear: bool = False) -> tuple:
        """A buffer's first rows, padded for products, and without padding as the steps see them.

        The padding holds anything, unless it is cleared: then it adds nothing to a sum over rows.
        """
        if name not in self.buffers:
            if self.returned.get(name):
                self.buffers[name] = self.returned[name].pop()
            else:
                buffer = self.like.new_empty(self.rows, columns)
                self.buffers[name] = buffer, self.view(buffer)
        buffer, view = self.buffers[name]
        end = padded(rows, buffer.dtype)
        if clear and end > rows:
            view[rows:end] = 0
        return buffer[:end], view[:rows]

    def lend(self, name: str) -> Callable[[], None]:
        """Leave the buffer alone until the function returned is called, in any thread."""
        buffer, returned = self.buffers.pop(name), self.returned.setdefault(name, [])
        return lambda: returned.append(buffer)


class WeightGradient:
    """Sums left.T @ right over an expert's blocks, into a fresh gradient or onto a main gradient."""

    def __init__(self, grads: tuple[Tensor, ...], onto_main: bool):
        self.grads, self.onto_main = grads, onto_main
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
        # rounded once, after the last block
        if self.total is None:
            self.total = grad.new_empty(grad.shape, dtype=sum_dtype(grad))
        if block.starts:
            self.total.copy_(self.product)
        else:
            self.total.add_(self.product)
        if block.ends:
            grad.copy_(self.total)


class InOrder:
    """Runs jobs in the order of their numbers 0, 1, ..., whatever the order they come in, one at a time.

    Nobody waits: a job runs in the thread that brings it or in that which brought the one before.
    """

    def __init__(self):
        self.lock, self.jobs, self.next, self.running = threading.Lock(), {}, 0, False

    def add(self, number: int, job: Callable[[], None]) -> None:
        with self.lock:
            self.jobs[number] = job
            if self.running:
                return
            self.running = True
        while True:
            with self.lock:
                job = self.jobs.pop(self.next, None)
                if job is None:
                    self.running = False
                    return
                self.next += 1
            job()
