"""A tile on its way to a warpgroup that finishes it while the consumers multiply the next."""

from ._gluon import Number, aggregate, as_tile, gl, gluon, mbarrier
from ._pipeline import CONSUMERS, make_barriers

STRIP = gl.constexpr(32)  # rows that are finished at a time, as registers allow
LINE = gl.constexpr(64)  # columns of a line of memory


@aggregate
class Handoff:
    """A tile in shared memory, rounded to 16 bits: the half of each consumer, in blocks of columns."""

    tile: gl.shared_memory_descriptor  # (CONSUMERS * BLOCKS, BLOCK_M // 2, columns of a block)
    full: gl.shared_memory_descriptor  # a barrier for each consumer, as is empty
    empty: gl.shared_memory_descriptor
    BLOCKS: gl.constexpr
    STRIPS: gl.constexpr  # of a consumer

    @gluon.jit
    def put(self, n, WHO: gl.constexpr, parts):
        """Hand over the blocks of a consumer's half of the program's n-th tile."""
        mbarrier.wait(self.empty.index(WHO), n & 1 ^ 1)
        for j in gl.static_range(self.BLOCKS):
            self.tile.index(WHO * self.BLOCKS + j).store(parts[j].to(self.tile.dtype))
        mbarrier.arrive(self.full.index(WHO), count=1)

    @gluon.jit
    def get(self, n, strip, j, LAYOUT: gl.constexpr):
        """Block j of a strip of the n-th tile, whose last block gives the consumer's half back."""
        COUNT: gl.constexpr = self.tile.shape[0] * self.STRIPS
        SHAPE: gl.constexpr = [COUNT, STRIP, self.tile.shape[2]]
        SAME: gl.constexpr = self.tile.layout  # of the strips too, since it repeats every 8 rows
        who, within = strip // self.STRIPS, strip % self.STRIPS
        mbarrier.wait(self.full.index(who), n & 1)
        at = (who * self.BLOCKS + j) * self.STRIPS + within
        out = as_tile(self.tile, SHAPE, SAME).index(at).load(LAYOUT)
        last = (within == self.STRIPS - 1) & (j == self.BLOCKS - 1)
        mbarrier.arrive(self.empty.index(who), count=1, pred=last)
        return out


@gluon.jit
def make_handoff(dtype: gl.constexpr, shape: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """For tiles of `shape`, in blocks of COLUMNS, each in the shared memory's LAYOUT."""
    ROWS: gl.constexpr = shape[0] // CONSUMERS
    BLOCKS: gl.constexpr = shape[1] // COLUMNS
    tile = gl.allocate_shared_memory(dtype, [CONSUMERS * BLOCKS, ROWS, COLUMNS], LAYOUT)
    full, empty = make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1)
    return Handoff(tile, full, empty, BLOCKS, ROWS // STRIP)


@gluon.constexpr_function
def line_layout(COLUMNS):
    """Four warps, of which eight lanes read or write a row of COLUMNS side by side."""
    return gl.BlockedLayout([1, COLUMNS // 8], [4, 8], [4, 1], [1, 0])


@aggregate
class Rows:
    """A tensor (M, width) that is written in strips of rows, which end where a group ends."""

    ptr: gl.tensor
    width: Number

    @gluon.jit
    def store(self, x, row, end, column, limit):
        """Write x at (row, column), of which what lies before row `end` and column `limit` is there."""
        m = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))[:, None]
        n = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
        ptrs = self.ptr + (row.to(gl.int64) * self.width + column) + (m * self.width + n)
        mask = (m < end - row) & (n < limit - column)
        gl.store(ptrs, x.to(self.ptr.dtype.element_ty), mask=mask)
