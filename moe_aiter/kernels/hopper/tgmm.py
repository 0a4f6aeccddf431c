"""Transposed grouped matmul on Hopper, the gradients of weights: of 16-bit rows and of 8-bit rows.

`tgmm` has the meaning of ../grouped/tgmm.py, `tgmm_fp8` that of ../grouped/tgmm_fp8.py; ../quantize/blocks.py
makes the operands of the latter.  Its stage is one row block: the tensor core sums the block, and float32
adds that sum times the scales of the block, one for each row of the result.  So one instruction both promotes
and scales a sum.  Scales of whole groups multiply the sum of all blocks, by rows and by columns.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ... import tuning
from ..base.fp8 import ROW_BLOCK
from ..base.launch import bind_kernel, num_programs
from ..rows.sums import bind_bias_grad, bind_sum_groups
from .epilogue import Scales
from .gluon import (
    Number,
    aggregate,
    as_tile,
    bind_descriptor,
    block_g,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    ragged,
    ragged_descriptor,
    row_load,
    rows_arrive,
    shared_layout,
    store_wait,
    tile_options,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from .pipeline import CONSUMERS, VECTOR, blocks, make_ring
from .schedule import Tiles, clamped_sizes, make_queue, warp_layout

# tgmm: kernel

MAX_RANKED = 256  # groups; to rank more would take longer than it saves


@aggregate
class Rows:
    """The rows of both operands, summed over group by group: x by TMA, or gathered."""

    x_desc: object  # (M, K), ragged, or None
    x_ptr: object  # (T, K), or None
    x_stride: Number  # in units of 16 bytes, as in Gather
    order_ptr: object  # (M,), or None
    y_desc: tma.tensor_descriptor  # (M, N), ragged
    group_sizes_ptr: gl.tensor
    M: Number
    G: Number
    K: Number  # a multiple of 8
    ranks: object  # (BLOCK_G,) in shared memory, the position of each group by size, or None
    TOP_K: gl.constexpr
    BLOCK_G: gl.constexpr
    FIRST: gl.constexpr  # group of the result; groups before it have rows alone

    @gluon.jit
    def choices(self, m, end):
        """Return the choice of each row of m, of which those below `end` exist."""
        return gl.load(self.order_ptr + m, mask=m < end, other=0)

    @gluon.jit
    def offsets(self, choice):
        """Return the offsets of the choices' rows of x."""
        return gl.maximum(choice, 0) // self.TOP_K * self.x_stride * VECTOR

    @gluon.jit
    def at_position(self, position):
        """The group at a position, its first row and end row, clamped as by `group_rows` in base/tile.py."""
        layout: gl.constexpr = warp_layout(self.BLOCK_G)
        g = gl.arange(0, self.BLOCK_G, layout=layout)
        size = clamped_sizes(self.group_sizes_ptr, g, self.M, self.G)
        group = position + self.FIRST
        if self.ranks is not None:
            group = gl.sum(gl.where(self.ranks.load(layout) == position, g, 0), 0)
        first = gl.minimum(gl.sum(gl.where(g < group, size, 0), 0), self.M)
        end = gl.minimum(gl.sum(gl.where(g <= group, size, 0), 0), self.M)
        return group, first.to(gl.int32), end.to(gl.int32)


@gluon.jit
def sizes_from(group_sizes_ptr, g, M, G, FIRST: gl.constexpr):
    size = clamped_sizes(group_sizes_ptr, g, M, G)
    if FIRST > 0:
        size = gl.where(g < FIRST, 0, size)
    return size


@gluon.jit
def rank_groups(ranks, group_sizes_ptr, M, G, BLOCK_G: gl.constexpr, FIRST: gl.constexpr):
    """The position of each group, sorted by falling size; equal groups keep their order.

    Returns how many groups have rows.  Groups before FIRST count as without rows.
    """
    STEP: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, STEP], [32, 1], [4, 1], [1, 0])
    g = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(1, layout))
    other = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
    size = sizes_from(group_sizes_ptr, g, M, G, FIRST)[:, None]
    rank = gl.zeros((BLOCK_G,), gl.int32, layout=gl.SliceLayout(1, layout))
    for first in range(0, BLOCK_G, STEP):
        rival = sizes_from(group_sizes_ptr, first + other, M, G, FIRST)[None, :]
        ahead = (rival > size) | ((rival == size) & ((first + other)[None, :] < g[:, None]))
        rank += gl.sum(ahead.to(gl.int32), 1)
    ranks.store(rank)
    return gl.sum(gl.sum((size > 0).to(gl.int32), 1), 0)


@gluon.jit
def deal(tile, count, PROGRAMS: gl.constexpr):
    """The tile that a program takes in its turn: every second round goes backwards through the programs.

    Tiles get shorter from round to round, so otherwise the first program would have the longest of each.
    """
    first = tile // PROGRAMS * PROGRAMS
    back = (tile // PROGRAMS % 2 == 1) & (first + PROGRAMS <= count)
    return gl.where(back, 2 * first + PROGRAMS - 1 - tile, tile)


@aggregate
class Strides:
    g: Number
    k: Number
    n: Number


@aggregate
class Output:
    """The destination of a tile of out (G, K, N): written by TMA through a buffer, or added in place."""

    desc: tma.tensor_descriptor  # (G, K, N), or (G, N, K) where columns come first
    buffers: gl.shared_memory_descriptor  # as many for each consumer, which it fills in turn
    ptr: gl.tensor
    strides: Strides
    K: Number
    N: Number
    COLUMNS_FIRST: gl.constexpr
    ACCUMULATE: gl.constexpr

    @gluon.jit
    def put(self, x, CONSUMER: gl.constexpr, group, k, n, TURN: gl.constexpr = 0):
        """Write the block x whose first element is (k, n) of the group, block TURN of a tile."""
        if self.ACCUMULATE:
            rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
            columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
            at = self.strides
            base = self.ptr + group.to(gl.int64) * at.g + k.to(gl.int64) * at.k + n.to(gl.int64) * at.n
            ptrs = base + (rows * at.k)[:, None] + (columns * at.n)[None, :]
            mask = (rows < self.K - k)[:, None] & (columns < self.N - n)[None, :]
            x += gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
            gl.store(ptrs, x.to(self.ptr.dtype.element_ty), mask=mask)
        else:
            COUNT: gl.constexpr = self.buffers.shape[0] // CONSUMERS
            store_wait(pendings=COUNT - 1)
            buffer = self.buffers.index(CONSUMER * COUNT + TURN % COUNT)
            x = x.to(self.desc.dtype)
            if self.COLUMNS_FIRST:
                flat: gl.constexpr = [x.shape[1], x.shape[0]]
                buffer.reshape(flat).permute((1, 0)).store(x)
                fence_async_shared()
                tma_store(self.desc, [group, n, k], buffer)
            else:
                buffer.store(x.reshape(self.desc.block_type.shape))
                fence_async_shared()
                tma_store(self.desc, [group, k, n], buffer)


@gluon.jit
def tgmm_producer(
    rows, ring, queue, tiles, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr
):
    per_group = tiles.rows * tiles.columns
    count = tiles.G * per_group
    i = 0
    for turn in range(gl.program_id(0), count, tiles.PROGRAMS):
        tile = deal(turn, count, tiles.PROGRAMS)
        tile_k, tile_n = tiles.position(tile % per_group)
        group, first, end = rows.at_position(tile // per_group)
        queue.put(turn // tiles.PROGRAMS, group - rows.FIRST, first, end, tile_n)
        k, n = tile_k * BLOCK_M, tile_n * BLOCK_N
        if rows.x_desc is None:
            i = gather_rows(rows, ring, i, first, end, k, n, BLOCK_M, BLOCK_K)
        else:
            for row in range(first, end, BLOCK_K):
                ring.wait_empty(i)
                ready = ring.ready.index(i % ring.STAGES)
                mbarrier.expect(ready, rows.x_desc.block_type.nbytes + rows.y_desc.block_type.nbytes)
                tma_load(rows.x_desc, ragged(row, end, k), ready, ring.a.index(i % ring.STAGES))
                tma_load(rows.y_desc, ragged(row, end, n), ready, ring.b.index(i % ring.STAGES))
                i += 1


@gluon.jit
def gather_rows(rows, ring, i, first, end, k, n, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """Fetch the columns from k on of the rows of x that are chosen, and from n on of y; the next stage."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # 16 bytes for each thread
    m = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout))
    columns = k + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    # a step ahead, and as loaded: what is made of them here would wait for them here
    next_choice = rows.choices(first + m, end)
    for row in range(first, end, BLOCK_K):
        source = rows.offsets(next_choice)
        next_choice = rows.choices(row + BLOCK_K + m, end)
        ring.wait_empty(i)
        ready = ring.ready.index(i % ring.STAGES)
        mbarrier.expect(ready, rows.y_desc.block_type.nbytes)
        tma_load(rows.y_desc, ragged(row, end, n), ready, ring.b.index(i % ring.STAGES))
        # past the end zeros, as TMA gives: another row's infinity times zero would be NaN
        mask = (row + m < end)[:, None] & (columns < rows.K)[None, :]
        row_load(ring.a.index(i % ring.STAGES), rows.x_ptr + source[:, None] + columns[None, :], mask=mask)
        rows_arrive(ready, increment_count=False)
        i += 1
    return i


@gluon.jit
def tgmm_consumer(
    CONSUMER: gl.constexpr, ring, queue, tiles, out,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STORES: gl.constexpr, A_LAYOUT: gl.constexpr, B_LAYOUT: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    per_group = tiles.rows * tiles.columns
    count = tiles.G * per_group
    i = 0
    for turn in range(gl.program_id(0), count, tiles.PROGRAMS):
        tile = deal(turn, count, tiles.PROGRAMS)
        tile_k, _ = tiles.position(tile % per_group)
        group, first, end, tile_n = queue.get(turn // tiles.PROGRAMS)
        acc = warpgroup_mma_init(gl.zeros((HALF, BLOCK_N), gl.float32, layout=layout))
        for row in range(first, end, BLOCK_K):
            ring.wait_ready(i)
            a = as_tile(ring.a.index(i % ring.STAGES), [BLOCK_K, BLOCK_M], A_LAYOUT)
            b = as_tile(ring.b.index(i % ring.STAGES), [BLOCK_K, BLOCK_N], B_LAYOUT)
            acc = warpgroup_mma(a.slice(CONSUMER * HALF, HALF, 1).permute((1, 0)), b, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            ring.release(i + ring.STAGES - 1, pred=row > first)
            i += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        ring.release(i + ring.STAGES - 1, pred=end > first)
        accs = blocks(total, STORES)
        for j in gl.static_range(STORES):
            column = tile_n * BLOCK_N + j * (BLOCK_N // STORES)
            out.put(accs[j], CONSUMER, group, tile_k * BLOCK_M + CONSUMER * HALF, column)
    store_wait(pendings=0)


@jit_kernel
def tgmm_kernel(
    x_desc,  # (M, K), ragged, or None: then
    x_ptr,  # (T, K) read at order // TOP_K
    order_ptr,  # (M,), or None
    y_desc,  # (M, N), ragged
    out_desc,  # (G, K, N), or (G, N, K) where columns come first
    out_ptr,  # (G, K, N)
    group_sizes_ptr, M, G,
    K,  # in units of 8
    N,
    x_stride,  # in units of 16 bytes
    out_strides,  # g, k, n
    COLUMNS_FIRST: gl.constexpr, ACCUMULATE: gl.constexpr, TOP_K: gl.constexpr, BLOCK_G: gl.constexpr,
    FIRST: gl.constexpr,  # groups before the result's, which have rows alone
    RANKED: gl.constexpr, A_LAYOUT: gl.constexpr, B_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    STORES: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    K *= VECTOR  # the compiler sees that it is a multiple
    if x_desc is None:
        a = gl.allocate_shared_memory(y_desc.dtype, [STAGES, BLOCK_K, BLOCK_M], A_LAYOUT)
    else:
        a = gl.allocate_shared_memory(y_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    b = gl.allocate_shared_memory(y_desc.dtype, [STAGES] + y_desc.block_type.shape, y_desc.layout)
    ring = make_ring(a, b, x_desc is None, STAGES)
    buffers = gl.allocate_shared_memory(
        y_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout
    )
    queue = make_queue(CONSUMERS)
    ranks, written = None, G - FIRST
    if RANKED:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        ranks = gl.allocate_shared_memory(gl.int32, [BLOCK_G], flat)
        with_rows = rank_groups(ranks, group_sizes_ptr, M, G, BLOCK_G, FIRST)
        if ACCUMULATE:
            written = with_rows
    rows = Rows(
        x_desc, x_ptr, x_stride, order_ptr, y_desc, group_sizes_ptr, M, G, K, ranks, TOP_K, BLOCK_G, FIRST
    )  # fmt: skip
    strides = Strides(out_strides[0], out_strides[1], out_strides[2])
    out = Output(out_desc, buffers, out_ptr, strides, K, N, COLUMNS_FIRST, ACCUMULATE)
    tiles = Tiles(gl.cdiv(K, BLOCK_M), gl.cdiv(N, BLOCK_N), written, GROUP_M, PROGRAMS)
    gl.warp_specialize(
        [
            (
                tgmm_consumer,
                (0, ring, queue, tiles, out, BLOCK_M, BLOCK_N, BLOCK_K, STORES, A_LAYOUT, B_LAYOUT),
            ),
            (
                tgmm_consumer,
                (1, ring, queue, tiles, out, BLOCK_M, BLOCK_N, BLOCK_K, STORES, A_LAYOUT, B_LAYOUT),
            ),
            (tgmm_producer, (rows, ring, queue, tiles, BLOCK_M, BLOCK_N, BLOCK_K)),
        ],
        [4, 4],
        [216, 72],
    )


# tgmm: launcher


def bind_tgmm(i) -> Callable:
    K, N = i.x.shape[1], i.y.shape[1]
    strides = (N * K, 1, K) if i.columns_first else (K * N, N, 1)
    product = bind_outer_product(i.x, i.y, i.group_sizes, i.order, i.top_k, strides)
    return lambda out, i: product(out, i.x, i.y, i.group_sizes, i.order)


def bind_tgmm_sums(i) -> Callable:
    (M, N), K, G = i.y.shape, i.x.shape[1], i.group_sizes.shape[0]
    strides = (N * K, 1, K) if i.columns_first else (K * N, N, 1)
    product = bind_outer_product(i.x, i.y, i.group_sizes, None, 1, strides)
    add = bind_sum_groups(M, N, G, 1, i.y.stride(), (N, 1))

    def launch(outs, i):
        product(outs[0], i.x, i.y, i.group_sizes, None)
        add(outs[1], i.y, i.group_sizes, None, None)

    return launch


def bind_tgmm_into(i) -> Callable:
    strides = i.existing_out.stride()
    flags = {"accumulate": i.accumulate, "programs": i.programs, "first": i.first}
    product = bind_outer_product(i.x, i.y, i.group_sizes, i.order, i.top_k, strides, **flags)
    add = None if i.bias_grad is None else bind_bias_grad(i)  # the consumers have no registers left for it

    def launch(out, i):
        product(out if strides[2] == 1 else out.mT, i.x, i.y, i.group_sizes, i.order)
        if add is not None:
            add(out, i)

    return launch


def bind_outer_product(
    x: Tensor, y: Tensor, group_sizes: Tensor, order: Tensor | None, top_k: int, out_strides: Sequence[int],
    *, accumulate: bool = False, programs: int = 0, first: int = 0,
) -> Callable[..., None]:  # fmt: skip
    """Return `product(out, x, y, group_sizes, order)`, where `out_strides` are those of (G, K, N), and `out`
    is (G, N, K) if the columns come first."""
    (M, N), K, G = y.shape, x.shape[1], group_sizes.shape[0]
    # a tile of out[g] (K, N), and block_k rows at a time; what is added to takes registers as well
    op = "hopper_tgmm_accumulate" if accumulate else "hopper_tgmm"
    c = tuning.lookup(op, x.dtype, M, N, K, G)
    half, width, columns_first = c.block_m // 2, c.store_n, out_strides[2] != 1
    box = (width, half) if columns_first else (half, width)
    programs, gathered = programs if programs > 0 else num_programs(x), order is not None
    kernel = bind_kernel(
        tgmm_kernel, (programs,),
        COLUMNS_FIRST=columns_first and not accumulate, ACCUMULATE=accumulate, TOP_K=top_k,
        BLOCK_G=block_g(G), FIRST=first, RANKED=G <= MAX_RANKED,
        A_LAYOUT=shared_layout(x.dtype, c.block_k, c.block_m),
        B_LAYOUT=shared_layout(x.dtype, c.block_k, c.block_n),
        STORES=c.block_n // c.store_n, PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    numbers = M, G, K // VECTOR.value, N, x.stride(0) // VECTOR.value, out_strides
    x_boxes, y_boxes = (bind_descriptor(ragged_descriptor, c.block_k, n) for n in (c.block_m, c.block_n))
    out_boxes = bind_descriptor(descriptor, 1, *box)

    def product(out, x, y, group_sizes, order):
        y_desc = y_boxes(y)
        kernel(
            None if gathered else x_boxes(x), x if gathered else None,
            order.contiguous() if gathered else None, y_desc,
            y_desc if accumulate else out_boxes(out), out, group_sizes.contiguous(), *numbers,
        )  # fmt: skip

    return product


# tgmm_fp8: kernel


@aggregate
class Operands:
    """Both operands by columns, one row block after the other, and the row blocks of each group."""

    a_desc: tma.tensor_descriptor  # (C * M, ROW_BLOCK)
    b_desc: tma.tensor_descriptor  # (C * N, ROW_BLOCK)
    scale_ptr: object  # (C, M) float32, of a, or None
    positions_ptr: gl.tensor  # (G, 3): group, first row block, end
    M: Number
    N: Number

    @gluon.jit
    def at_position(self, position):
        ptr = self.positions_ptr + 3 * position
        return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2)

    @gluon.jit
    def scales(self, block, m, end):
        """The scales of the rows m of the result in a row block; zeros for a block from `end` on."""
        return gl.load(self.scale_ptr + block * self.M + m, mask=(m < self.M) & (block < end), other=0.0)


@gluon.jit
def row_block_producer(operands, ring, queue, tiles):
    BLOCK_M: gl.constexpr = ring.a.shape[1]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    per_group = tiles.rows * tiles.columns
    count = tiles.G * per_group
    i = 0
    for turn in range(gl.program_id(0), count, tiles.PROGRAMS):
        tile = deal(turn, count, tiles.PROGRAMS)
        tile_m, tile_n = tiles.position(tile % per_group)
        group, first, end = operands.at_position(tile // per_group)
        queue.put(turn // tiles.PROGRAMS, group, first, end, tile_n)
        for block in range(first, end):
            ring.wait_empty(i)
            ready = ring.ready.index(i % ring.STAGES)
            mbarrier.expect(ready, operands.a_desc.block_type.nbytes + operands.b_desc.block_type.nbytes)
            # past the last column lie others, whose sums are not stored
            a, b = block * operands.M + tile_m * BLOCK_M, block * operands.N + tile_n * BLOCK_N
            tma_load(operands.a_desc, [a, 0], ready, ring.a.index(i % ring.STAGES))
            tma_load(operands.b_desc, [b, 0], ready, ring.b.index(i % ring.STAGES))
            i += 1


@gluon.jit
def add_row_block(sums, ring, i, scale, CONSUMER: gl.constexpr):
    """Add the product of the row block in stage i, times the scales of its rows if there are any, to blocks
    of columns."""
    HALF: gl.constexpr = ring.a.shape[1] // 2
    WIDTH: gl.constexpr = sums[0].shape[1]
    layout: gl.constexpr = sums[0].type.layout
    zeros = gl.zeros((HALF, WIDTH), gl.float32, layout=layout)
    ring.wait_ready(i)
    a = ring.a.index(i % ring.STAGES).slice(CONSUMER * HALF, HALF, 0)
    out = ()
    for j in gl.static_range(len(sums)):
        b = ring.b.index(i % ring.STAGES).slice(j * WIDTH, WIDTH, 0).permute((1, 0))
        part = warpgroup_mma(a, b, warpgroup_mma_init(zeros), use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        if j == len(sums) - 1:
            ring.release(i)
        if scale is not None:
            part *= scale[:, None]
        out = out + (sums[j] + part,)
    return out


@gluon.jit
def row_block_consumer(
    CONSUMER: gl.constexpr, operands, group_scales, ring, queue, tiles, out,
    WIDTH: gl.constexpr, STORE_N: gl.constexpr,
):  # fmt: skip
    """This consumer's half of the rows of each tile; registers hold one sum of WIDTH columns of the tensor
    core's beside the whole in float32."""
    BLOCK_M: gl.constexpr = ring.a.shape[1]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    HALF: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    per_group = tiles.rows * tiles.columns
    count = tiles.G * per_group
    i = 0
    for turn in range(gl.program_id(0), count, tiles.PROGRAMS):
        tile_m, _ = tiles.position(deal(turn, count, tiles.PROGRAMS) % per_group)
        group, first, end, tile_n = queue.get(turn // tiles.PROGRAMS)
        m = tile_m * BLOCK_M + CONSUMER * HALF
        rows = m + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        zeros = gl.zeros((HALF, WIDTH), gl.float32, layout=layout)
        sums = ()
        for _ in gl.static_range(BLOCK_N // WIDTH):
            sums = sums + (zeros,)
        if operands.scale_ptr is not None:
            next_scale = operands.scales(first, rows, end)
        for block in range(first, end):
            if operands.scale_ptr is None:
                sums = add_row_block(sums, ring, i, None, CONSUMER)
            else:
                scale, next_scale = next_scale, operands.scales(block + 1, rows, end)  # a block ahead
                sums = add_row_block(sums, ring, i, scale, CONSUMER)
            i += 1
        # a group without rows may have any scales
        scaled_m, scaled_n = gl.where(first < end, operands.M, 0), gl.where(first < end, operands.N, 0)
        SPLIT: gl.constexpr = WIDTH // STORE_N
        for j in gl.static_range(BLOCK_N // WIDTH):
            accs = blocks(sums[j], SPLIT)
            for s in gl.static_range(SPLIT):
                n = tile_n * BLOCK_N + (j * SPLIT + s) * STORE_N
                part = group_scales.apply(accs[s], group, m, scaled_m, n, scaled_n)
                out.put(part, CONSUMER, group, m, n, TURN=j * SPLIT + s)
    store_wait(pendings=0)


@jit_kernel
def tgmm_fp8_kernel(
    a_desc,  # (C * M, ROW_BLOCK)
    b_desc,  # (C * N, ROW_BLOCK)
    scale_ptr,  # (C, M) float32, of a, or None
    row_scale_ptr,  # (G, M) float32, of the groups' columns of a, or None
    column_scale_ptr,  # (G, N) float32, of the groups' columns of b, or None
    positions_ptr,  # (G, 3)
    out_desc,  # (G, M, N), or (G, N, M) where columns come first; not used to accumulate
    out_ptr,  # (G, M, N)
    G, M, N,
    out_strides,  # g, m, n
    COLUMNS_FIRST: gl.constexpr, ACCUMULATE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,  # a row block
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, STORE_N: gl.constexpr,
    BUFFERS: gl.constexpr,  # of a consumer, that one is filled while another is stored
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    buffers = a
    if not ACCUMULATE:
        buffers = gl.allocate_shared_memory(
            out_desc.dtype, [BUFFERS * CONSUMERS] + out_desc.block_type.shape, out_desc.layout
        )
    ring = make_ring(a, b, False, STAGES)
    queue = make_queue(CONSUMERS)
    operands = Operands(a_desc, b_desc, scale_ptr, positions_ptr, M, N)
    strides = Strides(out_strides[0], out_strides[1], out_strides[2])
    out = Output(out_desc, buffers, out_ptr, strides, M, N, COLUMNS_FIRST, ACCUMULATE)
    group_scales = Scales(row_scale_ptr, M, 1, column_scale_ptr, N, 1, M, False)
    tiles = Tiles(gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    gl.warp_specialize(
        [
            (row_block_consumer, (0, operands, group_scales, ring, queue, tiles, out, WIDTH, STORE_N)),
            (row_block_consumer, (1, operands, group_scales, ring, queue, tiles, out, WIDTH, STORE_N)),
            (row_block_producer, (operands, ring, queue, tiles)),
        ],
        [4, 4],
        [232, 40],
    )


# tgmm_fp8: launcher


def bind_tgmm_fp8(
    y8: Tensor, sizes: tuple[int, ...], out_strides: Sequence[int], accumulate: bool
) -> Callable[..., None]:
    """Return `product(out, x8, y8, y_scale, positions, group_scales)`, with out[g] (M, N) = y.T @ x over a
    group's rows.

    y8 (C, M, ROW_BLOCK) has the scales y_scale (C, M); x8 (C, N, ROW_BLOCK) has no scales, and may be a slice
    of the N columns, with `out` that of the result.  In the place of y_scale, `group_scales` are those of y
    (G, M) and of x (G, N).  All scales are contiguous.  With `accumulate` the sum is added to `out`.

    `sizes` are C, G, M and N.  `out_strides` are those of (G, M, N), and `out` is (G, N, M) if the columns
    come first.
    """
    C, G, M, N = sizes
    op = "hopper_tgmm_accumulate_fp8" if accumulate else "hopper_tgmm_fp8"
    c = tuning.lookup(op, y8.dtype, C * ROW_BLOCK, N, M, G)
    half, width, columns_first = c.block_m // 2, c.store_n, out_strides[2] != 1
    box = (width, half) if columns_first else (half, width)
    programs = num_programs(y8)
    kernel = bind_kernel(
        tgmm_fp8_kernel, (programs,), COLUMNS_FIRST=columns_first and not accumulate, ACCUMULATE=accumulate,
        WIDTH=min(c.block_n, 128), STORE_N=width, BUFFERS=1 if c.block_n // width % 2 else 2,
        PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip

    def product(out, x8, y8, y_scale, positions, group_scales=(None, None)):
        a_desc = descriptor(y8.view(-1, ROW_BLOCK), c.block_m, c.block_k)
        b_desc = descriptor(x8.view(-1, ROW_BLOCK), c.block_n, c.block_k)
        out_desc = a_desc if accumulate else descriptor(out, 1, *box)
        scales = y_scale, *group_scales
        kernel(a_desc, b_desc, *scales, positions, out_desc, out, G, M, x8.shape[1], out_strides)

    return product
