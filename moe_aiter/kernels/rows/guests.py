"""Copy experts' weights to the ranks that borrow them, and add up the gradients that come back.

    send_guests     places[b][g] = w[guests_of[b, g] - first]                 for each rank b and slot g
    add_guests      w[guests_of[b, g] - first] += places[b][g]                in the order of b
    clear_guests    slots = 0                                                 if a rank borrows any

where the expert is one of the E that this rank holds, from number `first` on; all other slots stay as they
are.  `guests_of` (R, G) is that of `lend_rows`.  Which experts travel is known on the GPU alone, so these are
kernels that read and write the memory of other GPUs, and no copies that the host begins.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import interpret
from ..base.check import wide
from ..base.launch import bind_kernel, jit_kernel, next_power_of_2, num_programs, tl

WARPS = 8
BYTES = 16384  # that a program copies at a time
UNITS = {size: dtype for dtype in (torch.uint8, torch.int16, torch.int32) for size in (dtype.itemsize,)}


class Places(NamedTuple):
    """One tensor on each rank, (G, n) with n numbers of each guest."""

    parts: Sequence[Tensor]  # as this rank sees them
    bases: Tensor  # (R,) int64: addresses of the memory that holds them, as this rank sees it
    offset: int = 0  # bytes from there to the parts


def places_in(t: Tensor) -> Places:
    """Return one tensor on each rank for `t` (R, G, n), all in this rank's memory."""
    size = t[0].numel() * t.element_size()
    return Places(t.unbind(), torch.arange(len(t), device=t.device) * size + t.data_ptr())


@jit_kernel
def guests_kernel(
    a_ptr,  # (E, n)
    bases_ptr,  # (R,)
    b_ptr, b_bases_ptr,  # the same of another tensor, which other programs take; or None
    guests_ptr,  # (R, G)
    sizes,  # of both tensors: n, the distance of its experts, and the offset of its places
    first, E,
    ADD: tl.constexpr,  # what places hold to the tensor; otherwise copy the tensor there
    UNIT: tl.constexpr,  # divides all n and distances; 16: tensors begin at multiples of 16 bytes, too
    SLOTS: tl.constexpr, G: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, distance, offset, b_n, b_distance, b_offset = sizes
    if b_ptr is not None:
        other = tl.program_id(1) == 1
        n, distance = tl.where(other, b_n, n), tl.where(other, b_distance, distance)
        offset = tl.where(other, b_offset, offset)
        a_ptr = tl.where(other, b_ptr.to(tl.int64), a_ptr.to(tl.int64)).to(a_ptr.dtype)
        bases_ptr = tl.where(other, b_bases_ptr.to(tl.int64), bases_ptr.to(tl.int64)).to(bases_ptr.dtype)
    n, distance = n // UNIT * UNIT, distance // UNIT * UNIT  # the compiler sees that they are multiples
    if UNIT == 16:
        a_ptr = tl.multiple_of(a_ptr, 16)
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    WIDE: tl.constexpr = DTYPE if not ADD or tl.float64 == DTYPE else tl.float32
    begin, step, i = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK, tl.arange(0, ROOM)
    experts = tl.load(guests_ptr + i, mask=i < SLOTS, other=-1)
    for slot in range(SLOTS):  # a number is added by one program alone, which takes the ranks in their order
        expert = tl.sum(tl.where(i == slot, experts, 0), 0) - first
        if (expert >= 0) & (expert < E):
            base = tl.load(bases_ptr + slot // G) + offset
            place = tl.multiple_of(base.to(tl.pointer_type(WIDE)), 16)
            place += (slot % G) * (tl.zeros((), tl.int64) + n)
            own = a_ptr + expert.to(tl.int64) * distance
            for at in range(begin, n, step):
                columns = at + tl.arange(0, BLOCK)
                x = tl.load(own + columns, mask=columns < n)
                if ADD:
                    x = x.to(WIDE) + tl.load(place + columns, mask=columns < n)
                    tl.store(own + columns, x.to(DTYPE), mask=columns < n)
                else:
                    tl.store(place + columns, x, mask=columns < n)


@jit_kernel
def clear_kernel(to_ptr, guests_ptr, n, G: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, ROOM)
    if tl.max(tl.load(guests_ptr + i, mask=i < G, other=-1), 0) >= 0:
        for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
            columns = at + tl.arange(0, BLOCK)
            tl.store(to_ptr + columns, tl.zeros((BLOCK,), tl.int32), mask=columns < n)


@functools.lru_cache(1024)
def bound_copy(kernel: Callable, grid: tuple, itemsize: int, constants: tuple, *key) -> Callable:
    """Return a kernel bound for arguments that are alike; `key` is what else makes them so."""
    return bind_kernel(kernel, grid, **dict(constants), BLOCK=BYTES // itemsize, num_warps=WARPS)


def launch(
    parts: Sequence[Tensor], places: Sequence[Places], guests_of: Tensor, first: int, add: bool
) -> None:
    """Launch the kernel for two tensors at a time, where these have one dtype."""
    if not parts:
        return
    (w, *rest), (R, G) = parts, guests_of.shape
    both = parts[: 1 + (len(rest) > 0 and rest[0].dtype == w.dtype)]
    sizes = [n for t, at in zip(both, places, strict=False) for n in (t.shape[1], t.stride(0), at.offset)]
    aligned = all(t.data_ptr() % 16 == t.shape[1] % 16 == t.stride(0) % 16 == 0 for t in both)
    constants = ("ADD", add), ("UNIT", 16 if aligned else 1), ("SLOTS", R * G), ("G", G)
    constants += (("ROOM", next_power_of_2(R * G)),)
    numbers = (*sizes, *(0,) * (6 - len(sizes))), first, len(w)
    key = w.dtype, tuple(t.data_ptr() % 16 == 0 for t in both), w.device, numbers
    run = bound_copy(guests_kernel, (num_programs(w), len(both)), w.element_size(), constants, *key)
    other = (rest[0], places[1].bases) if len(both) > 1 else (None, None)
    run(w, places[0].bases, *other, guests_of, *numbers)
    launch(parts[len(both) :], places[len(both) :], guests_of, first, add)


def lent(guests_of: Tensor, first: int, num_experts: int) -> list[tuple[int, int, int]]:
    """Return rank, slot and local number of each expert that this rank has lent; this synchronises."""
    slots = [(b, g, e - first) for b, row in enumerate(guests_of.tolist()) for g, e in enumerate(row)]
    return [(b, g, e) for b, g, e in slots if 0 <= e < num_experts]


def send_guests(parts: Sequence[Tensor], places: Sequence[Places], guests_of: Tensor, first: int) -> None:
    """Copy experts of each tensor, (E, n) with contiguous rows, to the slots of ranks that borrow them."""
    if not guests_of.is_cpu or interpret:
        return launch([*map(in_units, parts)], places, guests_of, first, False)
    for w, at in zip(parts, places, strict=True):
        for b, g, e in lent(guests_of, first, len(w)):
            at.parts[b][g] = w[e]


def add_guests(parts: Sequence[Tensor], places: Sequence[Places], guests_of: Tensor, first: int) -> None:
    """Add what the slots of other ranks hold of the experts of each tensor, (E, n) with contiguous rows."""
    if not guests_of.is_cpu or interpret:
        return launch(parts, places, guests_of, first, True)
    for w, at in zip(parts, places, strict=True):
        for b, g, e in lent(guests_of, first, len(w)):
            w[e] = wide(w[e]) + at.parts[b][g]


def clear_guests(slots: Sequence[Tensor], guests: Tensor) -> None:
    """Write zeros to the slots (G, n), which lie one after the other, if there are any `guests` (G,)."""
    if not slots:
        return
    first, last = slots[0], slots[-1]
    if first.is_cpu and not interpret:
        for t in slots:
            t.zero_()
        return
    bytes_of_all = last.data_ptr() + last.nbytes - first.data_ptr()
    whole, G = first.view(torch.int32).flatten(), len(guests)
    n = bytes_of_all // whole.element_size()
    constants = ("G", G), ("ROOM", next_power_of_2(G))
    key = guests.data_ptr() % 16 == 0, first.device, n
    bound_copy(clear_kernel, (num_programs(first),), 4, constants, *key)(whole, guests, n)


def in_units(w: Tensor) -> Tensor:
    """Return the same memory as integers, as large as its rows allow."""
    size = next(size for size in (4, 2, 1) if rows_in(w, size))
    return w.view(UNITS[size]) if size != w.element_size() or w.dtype != UNITS[size] else w


def rows_in(w: Tensor, size: int) -> bool:
    """Whether rows of `w` begin at, and have, a multiple of so many bytes."""
    begins = w.data_ptr(), w.stride(0) * w.element_size(), w.shape[1] * w.element_size()
    return all(number % size == 0 for number in begins)
