"""The schedule of tiles: the group, the rows and the columns of each tile of a program.

Each program lists the groups in shared memory before it starts.  Its producer finds each tile's group there,
which takes long, and passes the result to the other warpgroups by a queue.
"""

from .gluon import Number, aggregate, as_tile, gl, gluon, mbarrier
from .pipeline import make_barriers

CHUNK = gl.constexpr(64)  # groups that are looked at at a time, as a producer's registers allow
SLOTS = gl.constexpr(4)  # tiles in a queue
ALL_FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # every thread has each of four numbers
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def warp_layout(COUNT):
    """Each of four warps has all of COUNT elements, so that a sum needs no other warp."""
    return gl.BlockedLayout([max(COUNT // 32, 1)], [32], [4], [0])


@aggregate
class Tiles:
    """The tiles of a grouped product, dealt to the programs in turn."""

    rows: Number  # row tiles
    columns: Number  # column tiles
    G: Number
    GROUP_M: gl.constexpr  # row tiles that walk the columns together
    PROGRAMS: gl.constexpr

    @gluon.jit
    def mine(self):
        """Return the number of tiles of this program."""
        return gl.cdiv(self.rows * self.columns - gl.program_id(0), self.PROGRAMS)

    @gluon.jit
    def used(self, group, n):
        """Return n, or 0 for rows in no group or without a weight: there is nothing to read or to sum."""
        return gl.where(group < self.G, n, 0)

    @gluon.jit
    def weight_of(self, group, numbers_ptr, W, FIRST: gl.constexpr = False):
        """The weight of a group, its own number or what numbers_ptr (G,) says, and the group for consumers.

        That is G + 1 where the number is none of W: as for the rows in no group there is nothing to sum over.
        Where group 0 is FIRST, the rows before the others, these are numbered from 0 on, and it becomes G.
        """
        if FIRST:
            number = (group - 1).to(gl.int64)
            if numbers_ptr is not None:
                at = gl.minimum(gl.maximum(group - 1, 0), gl.maximum(self.G - 2, 0))
                number = gl.load(numbers_ptr + at, mask=self.G > 1, other=-1).to(gl.int64)
            there = (number >= 0) & (number < W)
            weighted = gl.where(there, group, self.G + 1)
            out = number.to(gl.int32), gl.where((group == 0) | (group == self.G), self.G, weighted)
        elif numbers_ptr is not None:
            number = gl.load(numbers_ptr + gl.minimum(group, self.G - 1)).to(gl.int64)
            there = (number >= 0) & (number < W) | (group == self.G)
            out = number.to(gl.int32), gl.where(there, group, self.G + 1)
        else:
            out = group, group
        return out

    @gluon.jit
    def position(self, tile):
        """Tile number -> (row tile, column tile)."""
        if self.GROUP_M == 1:
            row, column = tile // self.columns, tile % self.columns
        else:
            width = self.GROUP_M * self.columns
            first = tile // width * self.GROUP_M
            height = gl.minimum(self.rows - first, self.GROUP_M)
            row, column = first + tile % width % height, tile % width // height
        return row, column


@aggregate
class Groups:
    """The groups, by number; group G stands for the rows past the last group, where these have tiles.

    Each begins where the last one ends, or `apart` rows after it began, or at the row that `starts_ptr` has.
    """

    ends: gl.shared_memory_descriptor  # (chunks, up to CHUNK): the row where each ends
    tiles: gl.shared_memory_descriptor  # the same of the row tiles up to its last
    M: Number
    G: Number
    BLOCK_M: gl.constexpr
    apart: object  # or None
    starts_ptr: object  # (G,) or None

    @gluon.jit
    def of_tile(self, row_tile):
        """The group of a row tile, its first row and end row."""
        layout: gl.constexpr = warp_layout(self.ends.shape[1])
        group, row, end, first = 0, 0, self.M, 0
        for c in range(self.ends.shape[0]):
            tiles, ends = self.tiles.index(c).load(layout), self.ends.index(c).load(layout)
            before = tiles <= row_tile
            group += gl.sum(before.to(gl.int32), 0)
            row = gl.maximum(row, gl.max(gl.where(before, ends, 0), 0))
            end = gl.minimum(end, gl.min(gl.where(before, self.M, ends), 0))
            first = gl.maximum(first, gl.max(gl.where(before, tiles, 0), 0))
        if self.apart is not None:
            row = group * self.apart
        if self.starts_ptr is not None:
            row = gl.load(self.starts_ptr + gl.minimum(group, self.G - 1))
        # behind group G - 1 the lists repeat what they say of it
        return gl.minimum(group, self.G), row + (row_tile - first) * self.BLOCK_M, end

    @gluon.jit
    def find(self, tiles, n):
        """Group, first row, end row and column tile of the program's n-th tile, or of the last there is.

        Without any tile it is group G, if no rows have one."""
        tile = gl.minimum(gl.program_id(0) + n * tiles.PROGRAMS, tiles.rows * tiles.columns - 1)
        tile = gl.maximum(tile, 0)
        row_tile, column = tiles.position(tile)
        group, row, end = self.of_tile(row_tile)
        return group, row, end, column


@gluon.jit
def clamped_sizes(group_sizes_ptr, g, M, G):
    size = gl.load(group_sizes_ptr + g, mask=g < G, other=0).to(gl.int64)
    return gl.minimum(gl.maximum(size, 0), M)  # or the sum could overflow


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def group_ends(
    group_sizes_ptr, M, G, BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr,
    INDPTR: gl.constexpr = False, REST: gl.constexpr = True, starts_ptr=None,
):  # fmt: skip
    """Return each group's end row and its row tiles up to the last, and the number of row tiles, with
    those of the REST of the M rows.  With starts_ptr (G,) groups begin there, in ascending order."""
    g = gl.arange(0, BLOCK_G, layout=warp_layout(BLOCK_G))
    if INDPTR:
        before = gl.load(group_sizes_ptr + g - 1, mask=(g > 0) & (g < G), other=0).to(gl.int64)
        size = gl.load(group_sizes_ptr + g, mask=g < G, other=0).to(gl.int64) - before
        size = gl.minimum(gl.maximum(size, 0), M)
    else:
        size = clamped_sizes(group_sizes_ptr, g, M, G)
    if starts_ptr is not None:
        end = gl.load(starts_ptr + g, mask=g < G, other=M).to(gl.int64) + size
    else:
        end = gl.associative_scan(size, 0, add)
    start = gl.minimum(end - size, M).to(gl.int32)
    end = gl.minimum(end, M).to(gl.int32)
    tiles = gl.associative_scan(gl.cdiv(end - start, BLOCK_M), 0, add)
    rows = gl.max(tiles, 0)
    if REST:
        rows += gl.cdiv(M - gl.max(end, 0), BLOCK_M)
    return end, tiles, rows


@gluon.jit
def find_groups(
    group_sizes_ptr, M, G, BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr,
    INDPTR: gl.constexpr = False, REST: gl.constexpr = True, starts_ptr=None,
):  # fmt: skip
    """The groups, listed in shared memory, and the number of row tiles; see `group_ends`.

    With INDPTR the sizes are the rows where groups end: group 0 has the rows before the first segment.
    """
    end, tiles, rows = group_ends(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, INDPTR, REST, starts_ptr)
    return list_groups(end, tiles, M, G, BLOCK_G, BLOCK_M, None, starts_ptr), rows


@gluon.jit
def find_masked_groups(group_sizes_ptr, M, G, BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr):
    """Do as `find_groups` for groups that lie M rows apart, and have M rows if there are no sizes."""
    g = gl.arange(0, BLOCK_G, layout=warp_layout(BLOCK_G))
    if group_sizes_ptr is not None:
        size = clamped_sizes(group_sizes_ptr, g, M, G).to(gl.int32)
    else:
        size = gl.where(g < G, M, 0)
    end = gl.where(g < G, g * M + size, G * M)
    tiles = gl.associative_scan(gl.cdiv(size, BLOCK_M), 0, add)
    return list_groups(end, tiles, G * M, G, BLOCK_G, BLOCK_M, M), gl.max(tiles, 0)


@gluon.jit
def list_groups(end, tiles, M, G, BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr, apart, starts_ptr=None):
    WIDTH: gl.constexpr = min(BLOCK_G, CHUNK)
    shape: gl.constexpr = [BLOCK_G // WIDTH, WIDTH]
    ends_list = gl.allocate_shared_memory(gl.int32, shape, FLAT)
    tiles_list = gl.allocate_shared_memory(gl.int32, shape, FLAT)
    as_tile(ends_list, [BLOCK_G], FLAT).store(end)
    as_tile(tiles_list, [BLOCK_G], FLAT).store(tiles)
    return Groups(ends_list, tiles_list, M, G, BLOCK_M, apart, starts_ptr)


@aggregate
class TileQueue:
    """The queue in shared memory by which the producer tells the other warpgroups each tile."""

    values: gl.shared_memory_descriptor  # (SLOTS, 4): group, or G + 1 without weight; rows; column tile
    full: gl.shared_memory_descriptor  # a barrier for each slot, as is empty
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def put(self, n, group, first, end, column):
        """Put the n-th tile of this program into the queue, as soon as there is room."""
        slot, round = n % SLOTS, n // SLOTS
        i = gl.arange(0, 4, layout=ALL_FOUR)
        mbarrier.wait(self.empty.index(slot), (round & 1) ^ 1)
        rows = gl.where(i == 1, first, end)
        self.values.index(slot).store(gl.where(i == 0, group, gl.where(i == 3, column, rows)))
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def look(self, n):
        """Wait for the n-th tile, and leave it in the queue until every reader has released it."""
        slot, round = n % SLOTS, n // SLOTS
        i = gl.arange(0, 4, layout=ALL_FOUR)
        mbarrier.wait(self.full.index(slot), round & 1)
        values = self.values.index(slot).load(ALL_FOUR)
        group, first = gl.sum(gl.where(i == 0, values, 0), 0), gl.sum(gl.where(i == 1, values, 0), 0)
        end, column = gl.sum(gl.where(i == 2, values, 0), 0), gl.sum(gl.where(i == 3, values, 0), 0)
        return group, first, end, column

    @gluon.jit
    def release(self, n, pred=True):
        mbarrier.arrive(self.empty.index(n % SLOTS), count=1, pred=pred)

    @gluon.jit
    def get(self, n):
        """Wait for the n-th tile, and release it."""
        group, first, end, column = self.look(n)
        self.release(n)
        return group, first, end, column


@gluon.jit
def make_queue(READERS: gl.constexpr):
    values = gl.allocate_shared_memory(gl.int32, [SLOTS, 4], FLAT)
    return TileQueue(values, make_barriers(SLOTS, 1), make_barriers(SLOTS, READERS))
