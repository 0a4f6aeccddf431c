"""Experts lent for one call: a rank with many rows has other ranks compute some of them.

    lend_rows            from the numbers of rows, the same on all ranks: who computes which rows
    Guests.lend          weights of lent experts travel to guest slots of the borrowers
    merge_plans          guests' rows come behind those of own experts, in the same windows
    Guests.gradients     in backward, gradients of guests' weights, in float32
    Guests.add_to        they travel home, and are added to its own in the order of the borrowers

Kernels of `Experts` take the guests' weights as a second tensor (kernels/base/lent.py).  Where there are no
such kernels, `apart` divides the windows, and guests' rows are computed in a pass of their own.

Numbers of rows are known on the GPU alone, so all of this always runs; without a loan no weight travels.
"""

import functools
import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.base.check import sum_dtype, wide
from ..kernels.quantize.four_bit import FourBit
from ..kernels.rows.guests import add_guests
from ..routing.plan import RoutePlan
from .loans import least_rows, rates_of, useful_guests
from .transport import SendHome, Transport, aligned

log = logging.getLogger("moe_aiter")

AUTO = "auto"
BY_EXPERT = "packed", "scales", "offset"  # the parts of a plain weight of 4 bits that each expert has
Build = Callable[[Sequence[Tensor]], tuple[Any, ...]]  # weights of their tensors


class Lending(NamedTuple):
    """How much ranks lend each other: see `lend_rows`."""

    guests: int  # G, slots of a rank
    block: int
    least: int


def lending_for(weights: Sequence[Any], guests: int) -> Lending:
    """Return which loans pay, of experts with these weights."""
    parts, _ = split(weights)
    numbers = sum(math.prod(w.shape[1:]) for w in weights if w is not None)
    rates = rates_of(parts[0].device.type)
    return Lending(guests, rates.block, least_rows(sum(map(bytes_of, parts)), numbers, rates))


def auto_guests(weights: Sequence[Any], rows: int, others: int) -> int:
    """Return how many guests a rank can use, with so many rows of a balanced load and experts of others."""
    return useful_guests(rows, lending_for(weights, 1).least, others, sum(guest_bytes(weights, 1)))


def log_loans(shares: Tensor, each: int) -> None:
    """Say how many rows each rank would compute without loans, and computes with them; this synchronises."""
    rows, totals = shares[:, 1] - shares[:, 0], shares[:, 1].amax(0)
    before = [int(part.sum()) for part in totals.split(each)]
    log.info(
        "experts lent for a call: ranks have %s rows, and %s without loans", rows.sum(1).tolist(), before
    )


def guest_bytes(weights: Sequence[Any], guests: int) -> tuple[int, int]:
    """Return the bytes of so many guests' weights, and of the gradients of those that are trained."""
    trained = [w for w in weights if w is not None and w.requires_grad]
    sizes = [bytes_of(t) for t in split(weights)[0]], [w[0].numel() * sum_dtype(w).itemsize for w in trained]
    of_weights, of_gradients = (sum(aligned(guests * size) for size in part) for part in sizes)
    return of_weights, of_gradients


def way_of_lending(weights: Sequence[Any], guests: int | str) -> str:
    """Return what ranks must agree on: a borrower takes the numbers of an expert as its own ones lie."""
    way = f"guests={guests!r}"
    if guests and weights:
        for t in split(weights)[0]:
            strides, sizes = strides_of(t), tuple(t.shape[1:])
            order = [stride for stride, size in zip(strides, sizes, strict=True) if size != 1]
            way += f", {t.dtype} of {sizes} with strides {order}"
    return way


def bytes_of(t: Tensor) -> int:
    """Return the bytes of each expert of `t` (E, ...)."""
    return t[0].numel() * t.element_size()


def split(weights: Sequence[Any]) -> tuple[list[Tensor], Build]:
    """Return the tensors of these weights, each of (E, ...), and what makes such weights of other tensors."""
    parts: list[Tensor] = []
    kinds: list[Callable[[Iterator[Tensor]], Any]] = []
    for w in weights:
        if isinstance(w, FourBit):
            w = w.plain()
            names = [name for name in BY_EXPERT if getattr(w, name) is not None]
            parts += [getattr(w, name) for name in names]
            kinds.append(functools.partial(four_bit, names, w.table, w.format, w.dtype))
        else:
            parts += [] if w is None else [w]
            kinds.append(nothing if w is None else next)

    def build(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        rest = iter(tensors)
        return tuple(kind(rest) for kind in kinds)

    return parts, build


def nothing(rest: Iterator[Tensor]) -> None:
    """Make a weight that is None."""


def four_bit(
    names: Sequence[str], table: Tensor | None, format: str, dtype: torch.dtype, rest: Iterator[Tensor]
) -> FourBit:
    """Make a weight of 4 bits."""
    parts: dict[str, Any] = dict.fromkeys(BY_EXPERT) | {name: next(rest) for name in names}
    return FourBit(**parts, nested=None, table=table, format=format, dtype=dtype)


def rows_of(w: Tensor) -> Tensor:
    """Return (E, n): the numbers of each expert as they lie in memory, a copy where they lie apart."""
    if not is_dense(w):
        w = w.contiguous()
    return w.as_strided((len(w), w[0].numel()), (w.stride(0), 1), w.storage_offset())


def as_experts(t: Tensor, w: Tensor) -> Tensor:
    """Return `t` (G, n) as experts (G, ...) that lie in memory as those of `w` do in `rows_of`."""
    if not is_dense(w):
        return t.view(len(t), *w.shape[1:])
    return t.as_strided((len(t), *w.shape[1:]), (t.stride(0), *w.stride()[1:]), t.storage_offset())


def strides_of(w: Tensor) -> Sequence[int]:
    """Return the strides of a guest of such experts, as `as_experts` makes them."""
    return w.stride()[1:] if is_dense(w) else torch.empty(w.shape[1:], device="meta").stride()


def with_strides(w: Tensor, strides: Sequence[int]) -> Tensor:
    """Return experts that lie so, of those that a hook for saved tensors may have returned in other ways."""
    if strides_of(w) == strides:
        return w
    return w.new_empty_strided(w.shape, (w[0].numel(), *strides)).copy_(w)


def is_dense(w: Tensor) -> bool:
    """Whether the numbers of an expert lie together, in any order of its axes."""
    pairs = zip(w.stride()[1:], w.shape[1:], strict=True)
    axes = sorted((stride, size) for stride, size in pairs if size != 1)
    strides = itertools.accumulate((size for _, size in axes), operator.mul, initial=1)
    return all(stride == expected for (stride, _), expected in zip(axes, strides, strict=False))


def apart(plans: Sequence[RoutePlan], own: int, most: int) -> list[RoutePlan]:
    """Return the plans of the windows' first groups, so many `own` ones, and then one of all guests, which
    have `most` rows at most."""
    orders, ranks, sizes = zip(*plans, strict=True)
    order, rows, found = torch.cat(orders), len(orders[0]), []
    ends = [size[:own].sum() for size in sizes]
    row = torch.arange(len(order), dtype=order.dtype, device=order.device)
    first, place = sum(ends, ends[0].new_zeros(())), torch.full_like(ranks[0], -1)
    for n, (part, rank, size, end) in enumerate(zip(orders, ranks, sizes, ends, strict=True)):
        here = row[: len(part)] < end
        found.append(RoutePlan(part.where(here, -1), rank.where(rank < end, -1), size[:own]))
        place = torch.where(rank >= end, rank + (n * rows - first), place)  # among the guests' rows
    at = row[:most] + first
    lent = order[at.clamp(max=len(order) - 1).long()].where(at < len(order), -1)
    return [*found, RoutePlan(lent, place.to(ranks[0].dtype), sum(size[own:] for size in sizes))]


class Guests:
    """The experts that this rank borrows for one call, and those of its own that it lends.

    guests_of     who borrows what, (R, G) of `lend_rows`
    own, build    what `split` returns for the weights of this rank's experts
    dtype         to which gate_up and down, the first two, are cast once they are here; autograd, if it cast
                  them for kernels that take both tensors, would keep the results for backward.  Then biases
                  become wide, so that their gradients are not rounded on the way home
    """

    dtype: torch.dtype | None = None

    def __init__(
        self, transport: Transport, first: int, each: int, guests_of: Tensor, own: list[Tensor], build: Build
    ):
        self.transport, self.first, self.each = transport, first, each
        self.guests_of, self.own, self.build = guests_of, own, build
        self.arrive: Callable[[], list[Tensor]] = list
        self.send_home: SendHome = list

    def lend(self) -> None:
        """Begin to send the weights."""
        rows = list(map(rows_of, self.own))
        self.arrive = self.transport.lend(rows, self.guests_of, self.first, self.each)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the guests' weights, (G, ...) each, once they are here."""
        parts = list(map(as_experts, self.arrive(), self.own))
        if self.dtype is not None:
            parts = [*(t.to(self.dtype) for t in parts[:2]), *map(wide, parts[2:])]
        return parts

    def weights(self) -> tuple[Any, ...]:
        """Return the guests' weights, once they are here."""
        return self.build(self.tensors())

    def gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return zeros, to which the gradients of those weights that need one are added."""
        weights = self.build(self.own)
        trained = [w if need else None for w, need in zip(weights, needed, strict=True)]
        sizes = [(w[0].numel(), sum_dtype(w)) for w in trained if w is not None]
        zeros, self.send_home = self.transport.gradients(self.guests_of, sizes)
        rest = iter(zeros)
        return [None if w is None else as_experts(next(rest), w) for w in trained]

    def add_to(self, targets: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        """Send the guests' gradients home, and add those of this rank's experts to `targets` (E, ...).

        Through symmetric memory, all ranks have passed a barrier since they computed them.
        """
        own, totals = [], []
        for to, guest in zip(targets, gradients, strict=True):
            if guest is not None:
                assert to is not None  # autograd sends zeros where no row was computed
                alike = is_dense(to) and to.stride()[1:] == guest.stride()[1:]
                own.append(to)
                totals.append(to if alike else as_experts(guest.new_zeros(len(to), guest[0].numel()), guest))
        add_guests(list(map(rows_of, totals)), self.send_home(), self.guests_of, self.first)
        for to, total in zip(own, totals, strict=True):
            if total is not to:
                to += total
