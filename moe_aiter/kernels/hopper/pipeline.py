"""A product's tiles on one SM: one warpgroup fetches the operands, two multiply half of the rows each.

The operands go round in a ring of stages (`Ring`).  A stage is ready once all of it has arrived, and empty
again once both consumers have used it.

`Handoff` passes a finished sum to a further warpgroup, which does the rest of the work on that tile while the
consumers multiply the next tile.
"""

from .gluon import (
    Number,
    aggregate,
    as_tile,
    gl,
    gluon,
    mbarrier,
    row_load,
    rows_arrive,
    tma,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# ring of stages

CONSUMERS = gl.constexpr(2)
VECTOR = gl.constexpr(8)  # 16-bit elements in 16 bytes, which a thread copies at a time
PRODUCER_THREADS = gl.constexpr(128)


@aggregate
class Ring:
    """STAGES buffers of both operands, and a barrier for each state of each."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def wait_ready(self, i):
        mbarrier.wait(self.ready.index(i % self.STAGES), i // self.STAGES & 1)

    @gluon.jit
    def wait_empty(self, i):
        mbarrier.wait(self.empty.index(i % self.STAGES), (i // self.STAGES & 1) ^ 1)

    @gluon.jit
    def release(self, i, pred=True):
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1, pred=pred)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which waits for so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_ring(a, b, GATHERS: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr = CONSUMERS):
    """A ring of these buffers.  Where it GATHERS, the producer's threads tell when their rows are there."""
    ready = make_barriers(STAGES, 1 + PRODUCER_THREADS if GATHERS else 1)
    return Ring(a, b, ready, make_barriers(STAGES, READERS), STAGES)


@aggregate
class Gather:
    """The first operand of a product: its row r is row order[r] // TOP_K of x, or row r without an order."""

    x_ptr: gl.tensor  # (T, K)
    stride: Number  # of rows, in units of 16 bytes, so that the compiler sees that rows are aligned
    order_ptr: object  # (M,) or None
    TOP_K: gl.constexpr
    VECTOR: gl.constexpr  # elements in 16 bytes

    @gluon.jit
    def sources(self, m, end):
        """The offsets of the rows m, of which those below `end` exist."""
        if self.order_ptr is None:
            row = gl.where(m < end, m, 0)
        else:
            row = gl.maximum(gl.load(self.order_ptr + m, mask=m < end, other=0), 0) // self.TOP_K
        return row * self.stride * self.VECTOR


@gluon.constexpr_function
def by_columns(layout):
    """Whether the columns of weights of this LAYOUT lie side by side."""
    return layout in ("columns", "gate_up_columns")


@gluon.jit
def allocate_weights(
    STAGES: gl.constexpr, desc, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr
):
    """Allocate the tiles of a ring's second operand; `desc` and the rest as in `Weights`."""
    SHAPE: gl.constexpr = [BLOCK_K, BLOCK_N] if by_columns(LAYOUT) else [BLOCK_N, BLOCK_K]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + SHAPE, layout)


@aggregate
class Weights:
    """The second operand, the weights of G groups (N, K), and where the boxes of its descriptor lie.

    LAYOUT            tensor          box
    rows              (G, N, K)       (1, BLOCK_N, BLOCK_K)
    columns           (G, K, N)       (1, BLOCK_K, BLOCK_N)
    gate_up_rows      (G, 2, N, K)    (1, 2, BLOCK_N // 2, BLOCK_K): gate and up of the same channels
    gate_up_columns   (G, 2, K, N)    (1, 2, BLOCK_K, BLOCK_N // 2): the same; LINE gates and LINE ups in turn

    TMA clips a box where its matrix ends, and fills the rest with zeros.  With `guests`, groups from `own` on
    have the matrices of another tensor, of the same kind: see ../base/lent.py.
    """

    desc: tma.tensor_descriptor
    guests: object  # a descriptor, or None
    own: Number
    N: Number
    K: Number
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    LAYOUT: gl.constexpr

    @gluon.jit
    def load(self, ring, i, group, tile_n, k):
        BOX: gl.constexpr = self.desc.block_type.shape
        BOX_LAYOUT: gl.constexpr = self.desc.layout
        ready = ring.ready.index(i % ring.STAGES)
        to = as_tile(ring.b.index(i % ring.STAGES), BOX, BOX_LAYOUT)
        if self.guests is None:
            tma_load(self.desc, self.place(group, tile_n, k), ready, to)
        else:
            lent = group >= self.own
            tma_load(self.desc, self.place(group, tile_n, k), ready, to, pred=group < self.own)
            tma_load(self.guests, self.place(group - self.own, tile_n, k), ready, to, pred=lent)

    @gluon.jit
    def place(self, matrix, tile_n, k):
        """Return where the box of a tile begins."""
        if self.LAYOUT == "rows":
            at = [matrix, tile_n * self.BLOCK_N, k]
        elif self.LAYOUT == "columns":
            at = [matrix, k, tile_n * self.BLOCK_N]
        elif self.LAYOUT == "gate_up_rows":
            at = [matrix, 0, tile_n * (self.BLOCK_N // 2), k]
        else:
            at = [matrix, 0, k, tile_n * (self.BLOCK_N // 2)]
        return at

    @gluon.jit
    def start(self, ring, i, group, tile_n, k):
        """Do as `load`, for stages of which TMA copies nothing else."""
        mbarrier.expect(ring.ready.index(i % ring.STAGES), self.desc.block_type.nbytes)
        self.load(ring, i, group, tile_n, k)

    @gluon.jit
    def view(self, b):
        """A tile as (BLOCK_K, BLOCK_N)."""
        return b if by_columns(self.LAYOUT) else b.permute((1, 0))


@gluon.jit
def produce(
    x_desc, weights, numbers_ptr, W, ring, tiles, groups, queue, gap=None, FIRST: gl.constexpr = False
):  # fmt: skip
    """Fetch contiguous rows and weights, tile after tile.

    In x, groups lie `gap` rows farther apart than `groups` says.  FIRST as in `Tiles.weight_of`.
    """
    i = 0
    for n in range(tiles.mine()):
        group, row, end, tile_n = groups.find(tiles, n)
        weight, group = tiles.weight_of(group, numbers_ptr, W, FIRST)
        queue.put(n, group, row, end, tile_n)
        if gap is not None:
            row += group * gap
        for k in range(0, tiles.used(group, weights.K), weights.BLOCK_K):
            ring.wait_empty(i)
            ready = ring.ready.index(i % ring.STAGES)
            mbarrier.expect(ready, x_desc.block_type.nbytes + weights.desc.block_type.nbytes)
            tma_load(x_desc, [row, k], ready, ring.a.index(i % ring.STAGES))
            weights.load(ring, i, weight, tile_n, k)
            i += 1


@gluon.jit
def gather(
    x, weights, ring, tiles, groups, queue,
    BLOCK_M: gl.constexpr, EARLY: gl.constexpr, EVEN_K: gl.constexpr = True,
):  # fmt: skip
    """Fetch rows from where they are, and weights, tile after tile.

    EARLY reads indices a tile ahead.  EVEN_K: whether K is a whole number of blocks.
    """
    # 16 bytes for each thread, and as much as there is of a row side by side
    LANES: gl.constexpr = weights.BLOCK_K // x.VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, x.VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, weights.BLOCK_K, layout=gl.SliceLayout(0, layout))
    i = 0
    if EARLY:
        next_group, next_row, next_end, next_n = groups.find(tiles, 0)
        source = x.sources(next_row + m, tiles.used(next_group, next_end))
    for n in range(tiles.mine()):
        if EARLY:
            group, row, end, tile_n = next_group, next_row, next_end, next_n
            queue.put(n, group, row, end, tile_n)
            offsets = source[:, None] + columns[None, :]
            next_group, next_row, next_end, next_n = groups.find(tiles, n + 1)
            source = x.sources(next_row + m, tiles.used(next_group, next_end))
        else:
            group, row, end, tile_n = groups.find(tiles, n)
            queue.put(n, group, row, end, tile_n)
            offsets = x.sources(row + m, tiles.used(group, end))[:, None] + columns[None, :]
        # other rows are not read: if all programs read one row in their place, that row is a bottleneck
        there = (row + m < end)[:, None]
        for k in range(0, tiles.used(group, weights.K), weights.BLOCK_K):
            ring.wait_empty(i)
            ready = ring.ready.index(i % ring.STAGES)
            weights.start(ring, i, group, tile_n, k)
            left = (weights.K - k) // x.VECTOR * x.VECTOR  # the same, and the compiler sees whole vectors
            mask = there if EVEN_K else there & (columns < left)[None, :]
            row_load(ring.a.index(i % ring.STAGES), x.x_ptr + (k + offsets), mask=mask)
            rows_arrive(ready, increment_count=False)
            i += 1


@gluon.jit
def multiply(
    CONSUMER: gl.constexpr, weights, ring, i, depth,
    BLOCK_M: gl.constexpr, WIDEST: gl.constexpr = 256, last=None,
):  # fmt: skip
    """This consumer's half of a tile, (BLOCK_M // 2, BLOCK_N) float32, and the number of the next stage.
    The sums of int8 are int32.

    It is summed over `depth`, which may be 0.  An instruction computes at most WIDEST columns.  The barrier
    `last` is told when the last of them is on its way.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    DTYPE: gl.constexpr = ring.b.dtype
    INTEGERS: gl.constexpr = DTYPE.is_int()
    # Triton knows no wider instruction for int8 that divides a tile
    WIDTH: gl.constexpr = min(weights.BLOCK_N, 128 if INTEGERS else WIDEST)
    SUM: gl.constexpr = gl.int32 if INTEGERS else gl.float32
    DEPTH: gl.constexpr = 256 // DTYPE.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    acc = warpgroup_mma_init(gl.zeros((HALF, weights.BLOCK_N), SUM, layout=layout))
    first = i
    for k in range(0, depth, weights.BLOCK_K):
        ring.wait_ready(i)
        a = ring.a.index(i % ring.STAGES).slice(CONSUMER * HALF, HALF, 0)
        b = weights.view(ring.b.index(i % ring.STAGES))
        acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        ring.release(i + ring.STAGES - 1, pred=i > first)
        i += 1
    if last is not None:
        mbarrier.arrive(last, count=1)
    out = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    ring.release(i + ring.STAGES - 1, pred=depth > 0)
    return out, i


@gluon.jit
def halves(x):
    """The left and the right half of an accumulator's columns, which no thread has to send anywhere."""
    HALF: gl.constexpr = x.shape[1] // 2
    WIDTH: gl.constexpr = min(HALF, x.type.layout.instr_shape[1])
    INSTRUCTION: gl.constexpr = [16, WIDTH, x.type.layout.instr_shape[2]]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], INSTRUCTION)
    left, right = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1)))
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def blocks(x, COUNT: gl.constexpr):
    """An accumulator's columns as COUNT tensors."""
    if COUNT == 1:
        out = (x,)
    else:
        left, right = halves(x)
        out = blocks(left, COUNT // 2) + blocks(right, COUNT // 2)
    return out


@gluon.jit
def join_pairs(gate, up):
    """gate 0, up 0, gate 1, up 1, ... of each row, which no thread has to send anywhere."""
    return gl.reshape(gl.join(gate, up), (gate.shape[0], 2 * gate.shape[1]))


@gluon.jit
def split_pairs(x, LAYOUT: gl.constexpr):
    """The inverse; LAYOUT has half of each thread's elements in a row."""
    gate, up = gl.split(gl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return (
        gl.convert_layout(gate, LAYOUT, assert_trivial=True),
        gl.convert_layout(up, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def add_bias(x, bias_ptr, base, first, N, STEP: gl.constexpr = 1):
    """x plus the elements first, first + 1, ... of the N that lie STEP apart in a bias from `base` on."""
    if bias_ptr is not None:
        n = first + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
        x += gl.load(bias_ptr + base + STEP * n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    return x


# handoff of a tile


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
    def put(self, n, CONSUMER: gl.constexpr, accs):
        """Hand over the blocks of a consumer's half of the program's n-th tile."""
        mbarrier.wait(self.empty.index(CONSUMER), n & 1 ^ 1)
        for j in gl.static_range(self.BLOCKS):
            self.tile.index(CONSUMER * self.BLOCKS + j).store(accs[j].to(self.tile.dtype))
        mbarrier.arrive(self.full.index(CONSUMER), count=1)

    @gluon.jit
    def get(self, n, strip, j, LAYOUT: gl.constexpr):
        """Block j of a strip of the n-th tile, whose last block gives the consumer's half back."""
        COUNT: gl.constexpr = self.tile.shape[0] * self.STRIPS
        SHAPE: gl.constexpr = [COUNT, STRIP, self.tile.shape[2]]
        SAME: gl.constexpr = self.tile.layout  # of the strips too, since it repeats every 8 rows
        consumer, within = strip // self.STRIPS, strip % self.STRIPS
        mbarrier.wait(self.full.index(consumer), n & 1)
        at = (consumer * self.BLOCKS + j) * self.STRIPS + within
        out = as_tile(self.tile, SHAPE, SAME).index(at).load(LAYOUT)
        last = (within == self.STRIPS - 1) & (j == self.BLOCKS - 1)
        mbarrier.arrive(self.empty.index(consumer), count=1, pred=last)
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
