"""Which row tile belongs to which group.

Listed on the GPU for kernels whose programs read it a tile ahead, or found by a program's producer, which
tells its consumers.
"""

import torch
from torch import Tensor

from .._triton import jit_kernel, tl, triton
from ._gluon import Number, aggregate, gl, gluon, mbarrier

ZERO_ROWS = 64
SLOTS = gl.constexpr(2)  # tiles whose places are in shared memory
ALL_FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # every thread has each of four numbers


@jit_kernel
def schedule_kernel(
    group_sizes_ptr,  # (G,)
    schedule_ptr,  # the number of tiles, the G + 1 borders of the groups, and (group, row) of each tile
    out_ptr,  # (M, N), or None
    other_ptr,  # (M, other_N), or None
    M,
    G,
    N,
    other_N,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs 0..G-1 list a group's tiles; the others zero the rows past the last group."""
    p = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    size = tl.load(group_sizes_ptr + g, mask=g < G, other=0).to(tl.int64)
    size = tl.minimum(tl.maximum(size, 0), M)  # or the sum could overflow
    end = tl.cumsum(size, 0)
    start = tl.minimum(end - size, M)
    end = tl.minimum(end, M)
    if p < G:
        tiles = (end - start + BLOCK_M - 1) // BLOCK_M
        last_tile = tl.cumsum(tiles, 0)
        mine = g == p
        first = tl.sum(tl.where(mine, start, 0), 0)
        count = tl.sum(tl.where(mine, tiles, 0), 0)
        tile_ptr = schedule_ptr + G + 2 + 2 * tl.sum(tl.where(mine, last_tile - tiles, 0), 0)
        for i in range(0, count):
            tl.store(tile_ptr + 2 * i, p)
            tl.store(tile_ptr + 2 * i + 1, (first + i * BLOCK_M).to(tl.int32))
        tl.store(schedule_ptr + 2 + p, tl.sum(tl.where(mine, end, 0), 0).to(tl.int32))
        if p == 0:
            tl.store(schedule_ptr, tl.sum(tiles, 0).to(tl.int32))
            tl.store(schedule_ptr + 1, 0)
    else:
        m = (p - G).to(tl.int64) * ZERO_ROWS + tl.arange(0, ZERO_ROWS)
        rest = tl.maximum(tl.max(end, 0), 0)
        if (p - G + 1) * ZERO_ROWS > rest:
            mask = (m >= rest) & (m < M)
            if out_ptr is not None:
                zero_rows(out_ptr, m, mask, N, BLOCK_N)
            if other_ptr is not None:
                zero_rows(other_ptr, m, mask, other_N, BLOCK_N)


@triton.jit
def zero_rows(ptr, m, mask, N, BLOCK_N: tl.constexpr):
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        zeros = tl.zeros((m.shape[0], BLOCK_N), ptr.dtype.element_ty)
        tl.store(ptr + m[:, None] * N + n[None, :], zeros, mask=mask[:, None] & (n < N)[None, :])


def make_schedule(group_sizes: Tensor, rows: int, block_m: int, *outs: Tensor) -> Tensor:
    """Lists the row tiles of `block_m`; rows past the last group of `outs`, at most two, become zeros."""
    G, outs = group_sizes.shape[0], [x for x in outs if x.numel()]
    schedule = group_sizes.new_empty(G + 2 + 2 * (triton.cdiv(rows, block_m) + G), dtype=torch.int32)
    out, other = [*outs, None, None][:2]
    widths = [0 if x is None else x.shape[1] for x in (out, other)]
    grid = G + (triton.cdiv(rows, ZERO_ROWS) if outs else 0)
    schedule_kernel[(grid,)](
        group_sizes.contiguous(), schedule, out, other, rows, G, *widths,
        BLOCK_G=triton.next_power_of_2(G), BLOCK_M=block_m, ZERO_ROWS=ZERO_ROWS, BLOCK_N=128, num_warps=4,
    )  # fmt: skip
    return schedule


@aggregate
class Tiles:
    """The tiles of a grouped product, dealt to the programs in turn."""

    schedule_ptr: gl.tensor
    rows: Number  # row tiles
    columns: Number  # column tiles
    G: Number
    GROUP_M: gl.constexpr  # row tiles that walk the columns together
    PROGRAMS: gl.constexpr

    @gluon.jit
    def place(self, tile):
        """Tile number -> (row tile, column tile)."""
        if self.GROUP_M == 1:
            row, column = tile // self.columns, tile % self.columns
        else:
            width = self.GROUP_M * self.columns
            first = tile // width * self.GROUP_M
            height = gl.minimum(self.rows - first, self.GROUP_M)
            row, column = first + tile % width % height, tile % width // height
        return row, column

    @gluon.jit
    def peek(self, tile):
        """Group, first row and end row of a tile, which may lie past the last one."""
        last = self.rows * self.columns - 1
        row, _ = self.place(gl.maximum(gl.minimum(tile, last), 0))
        some = self.rows > 0
        tile_ptr = self.schedule_ptr + self.G + 2 + 2 * row
        group = gl.load(tile_ptr, mask=some, other=0)
        return group, gl.load(tile_ptr + 1, mask=some, other=0), gl.load(self.schedule_ptr + 2 + group)


@gluon.jit
def all_tiles(schedule_ptr, columns, G, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr):
    return Tiles(schedule_ptr, gl.load(schedule_ptr), columns, G, GROUP_M, PROGRAMS)


@aggregate
class Places:
    """Where the producer tells the consumers the group and the rows of a tile, which take it long to find."""

    values: gl.shared_memory_descriptor  # (SLOTS, 4): group, first row, end row
    there: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def put(self, n, group, first, end):
        """The n-th tile of this program."""
        slot, round = n % SLOTS, n // SLOTS
        i = gl.arange(0, 4, layout=ALL_FOUR)
        mbarrier.wait(self.empty.index(slot), (round & 1) ^ 1)
        self.values.index(slot).store(gl.where(i == 0, group, gl.where(i == 1, first, end)))
        mbarrier.arrive(self.there.index(slot), count=1)

    @gluon.jit
    def get(self, n):
        slot, round = n % SLOTS, n // SLOTS
        i = gl.arange(0, 4, layout=ALL_FOUR)
        mbarrier.wait(self.there.index(slot), round & 1)
        values = self.values.index(slot).load(ALL_FOUR)
        mbarrier.arrive(self.empty.index(slot), count=1)
        group, first = gl.sum(gl.where(i == 0, values, 0), 0), gl.sum(gl.where(i == 1, values, 0), 0)
        return group, first, gl.sum(gl.where(i == 2, values, 0), 0)


@gluon.jit
def make_places(READERS: gl.constexpr):
    values = gl.allocate_shared_memory(gl.int32, [SLOTS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    there = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Places(values, there, empty)
