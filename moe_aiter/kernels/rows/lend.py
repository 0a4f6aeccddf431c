"""Plan which experts ranks lend each other for one call, so that all compute about as many rows.

A rank computes at most cap = ceil(rows of all / ranks) rows, as far as loans can bring that about.  Loans are
chosen one by one.  The rank with the most rows above cap lends its expert with the most rows left.  The rank
with the most rows below cap that has a free slot borrows the expert, and computes the last rows that are
left.  The home, which is the rank that holds the expert, keeps the first rows.

The plan depends on the numbers of rows alone, so that all ranks that know these make the same plan.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import binds, copy_into, define_op
from ..base.check import Index, check_fields, check_sizes
from ..base.launch import bind_kernel, jit_kernel, next_power_of_2, tl
from .merge import limited

MOST = 2**31 - 1  # rows of an expert
UNROLL = 8  # sources


class LendInputs(NamedTuple):
    """The inputs of the op `lend_rows`: the shares (R, 2, N) and the guests (R, G) of R ranks.

    Rank r computes the rows from shares[r, 0, n] to shares[r, 1, n] of expert n, in the order of the expert's
    rows, sources one after the other; both are 0 where the rank has none.  guests[r] are the experts that the
    rank borrows, in ascending order, and then -1 for each free slot.
    """

    group_sizes: Annotated[Index, "R, N"]  # rows of each expert; each rank is a source
    each: int  # rank r holds the experts from r * each to (r + 1) * each - 1, the last rank perhaps fewer
    guests: int  # G, slots of a rank
    block: int  # a loan is a multiple of so many rows
    least: int  # rows of a loan

    @property
    def need(self) -> int:
        """The rows of the smallest loan: `least`, rounded up to blocks."""
        return max(-(-self.least // self.block), 1) * self.block

    @property
    def most(self) -> int:
        """The rows of an expert that a source may have: more are taken for so many."""
        return MOST // len(self.group_sizes)


# reference


def lend_reference(i: LendInputs) -> tuple[Tensor, Tensor]:
    ranks, experts = i.group_sizes.shape
    left = i.group_sizes.clamp(0, i.most).sum(0).tolist()  # rows that are at home
    homes = [range(r * i.each, min((r + 1) * i.each, experts)) for r in range(ranks)]
    loads = [sum(left[n] for n in home) for home in homes]
    cap = -(-sum(loads) // ranks)
    surplus, deficit = ([max(sign * (load - cap), 0) for load in loads] for sign in (1, -1))
    shares = torch.zeros(ranks, 2, experts, dtype=torch.int64)
    lent: list[list[int]] = [[] for _ in homes]
    while max(surplus) >= i.need and max(deficit) >= i.need:  # of equal ones the first
        h, b = surplus.index(max(surplus)), deficit.index(max(deficit))
        n = max(homes[h], key=left.__getitem__)
        rows = min(surplus[h], deficit[b], left[n]) // i.block * i.block
        if rows < i.need:
            surplus[h] = 0
            continue
        shares[b, :, n] = torch.tensor([left[n] - rows, left[n]])
        lent[b].append(n)
        left[n] -= rows
        surplus[h] -= rows
        deficit[b] = deficit[b] - rows if len(lent[b]) < i.guests else 0
    for r, home in enumerate(homes):
        shares[r, 1, home.start : home.stop] = torch.tensor(left[home.start : home.stop])
    guests = [sorted(borrowed) + [-1] * (i.guests - len(borrowed)) for borrowed in lent]
    return shares, torch.tensor(guests)


# kernel


@jit_kernel
def lend_kernel(
    sizes_ptr,  # (R, N)
    shares_ptr,  # (R, 2, N)
    guests_ptr,  # (R, G)
    R, N, each, G, block, need, most, sizes_stride,
    BLOCK_R: tl.constexpr,  # at least R
    BLOCK_EACH: tl.constexpr,  # at least each
    BLOCK_G: tl.constexpr,  # at least G
    UNROLL: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK_R * BLOCK_EACH)  # of an expert, so that those of a rank are a row
    home = i // BLOCK_EACH
    n = home * each + i % BLOCK_EACH
    there = (i % BLOCK_EACH < each) & (n < N)
    left = tl.zeros((BLOCK_R * BLOCK_EACH,), tl.int32)
    for first in range(0, R, UNROLL):
        for s in tl.static_range(UNROLL):  # whose loads overlap
            row = sizes_ptr + (first + s) * sizes_stride
            left += limited(tl.load(row + n, mask=there & (first + s < R), other=0), 0, most)
    for r in range(2 * R):
        tl.store(shares_ptr + r * N + n, tl.zeros_like(n), mask=there)
    tl.debug_barrier()  # what follows writes to the same memory

    r, g = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_G)
    load = tl.sum(tl.reshape(left.to(tl.int64), (BLOCK_R, BLOCK_EACH)), 1)
    cap = (tl.sum(load, 0) + R - 1) // R
    surplus, deficit = tl.maximum(load - cap, 0), tl.where(r < R, tl.maximum(cap - load, 0), 0)
    used = tl.zeros((BLOCK_R,), tl.int32)
    lent = tl.full((BLOCK_R, BLOCK_G), N, tl.int32)
    above, h = tl.max(surplus, 0, return_indices=True)
    below, b = tl.max(deficit, 0, return_indices=True)
    while (above >= need) & (below >= need):
        last, place = tl.max(tl.where(home == h, left, -1), 0, return_indices=True)
        rows = (tl.minimum(tl.minimum(above, below), last) // block * block).to(tl.int32)
        rows = tl.where(rows < need, 0, rows)
        e = h * each + place % BLOCK_EACH
        tl.store(shares_ptr + 2 * b * N + e, last - rows, mask=rows > 0)
        tl.store(shares_ptr + (2 * b + 1) * N + e, last, mask=rows > 0)
        lends = (r == b) & (rows > 0)
        lent = tl.where(lends[:, None] & (g[None, :] == used[:, None]), e, lent)
        used += lends.to(tl.int32)
        left -= tl.where(i == place, rows, 0)
        surplus -= tl.where(r == h, tl.where(rows > 0, rows, above), 0)
        deficit = tl.where(lends, tl.where(used < G, deficit - rows, 0), deficit)
        above, h = tl.max(surplus, 0, return_indices=True)
        below, b = tl.max(deficit, 0, return_indices=True)
    tl.store(shares_ptr + (2 * home + 1) * N + n, left, mask=there)
    slot = tl.zeros((BLOCK_R, BLOCK_G), tl.int32)
    for s in range(tl.max(used, 0)):  # sorted by counting those before
        other = tl.sum(tl.where(g[None, :] == s, lent, 0), 1)
        slot += (other[:, None] < lent).to(tl.int32)
    there = (r < R)[:, None] & (g < G)[None, :]
    taken = g[None, :] < used[:, None]
    to = guests_ptr + r[:, None] * G
    tl.store(to + slot, lent, mask=there & taken)
    tl.store(to + g[None, :], tl.zeros_like(lent) - 1, mask=there & (taken == 0))


# launcher


def new_lend(i: LendInputs) -> tuple[Tensor, Tensor]:
    check_fields(i)
    check_sizes(each=i.each, guests=i.guests, block=i.block, least=i.least)
    ranks, experts = i.group_sizes.shape
    if not 0 < experts <= ranks * i.each:
        raise ValueError(f"group_sizes is ({ranks}, {experts}), but {ranks} ranks hold {i.each} experts each")
    shares = i.group_sizes.new_empty(ranks, 2, experts, dtype=torch.int32)
    return shares, shares.new_empty(ranks, i.guests)


@binds
def bind_lend(i: LendInputs) -> Callable:
    (R, N), G = i.group_sizes.shape, i.guests
    blocks = {"BLOCK_R": R, "BLOCK_EACH": i.each, "BLOCK_G": G}
    blocks = {name: next_power_of_2(size) for name, size in blocks.items()}
    kernel = bind_kernel(lend_kernel, (1,), **blocks, UNROLL=UNROLL)
    numbers = R, N, i.each, G, i.block, i.need, i.most, i.group_sizes.stride(0)
    return lambda out, i: kernel(i.group_sizes, *out, *numbers)


bind_lend.fits = lambda i: i.group_sizes.stride(-1) == 1


# op


lend_rows = define_op(
    "lend_rows", LendInputs, outputs=2, new=new_lend, reference=lend_reference,
    host=lambda out, i: copy_into(out, lend_reference(i)), triton=bind_lend,
)  # fmt: skip
