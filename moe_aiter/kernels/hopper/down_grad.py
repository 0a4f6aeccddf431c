"""The gradient that starts the experts' backward pass, on Hopper; see ../experts/down.py.

The consumers leave dout times the weights, rounded to 16 bits, to a warpgroup that fetches z by TMA and
writes dz and s * a while they multiply the next tile.
"""

import dataclasses
from collections.abc import Callable

import torch

from ... import tuning
from ..base.activations import get_activation
from ..base.launch import num_programs
from ..base.sources import arriving, bind_passes
from ..rows.sums import bind_add_partial_sums
from .epilogue import Scales, group_scales, kernel_functions, multiply_blocks, span_of
from .gluon import (
    Number,
    aggregate,
    as_tile,
    beside_groups,
    bind_descriptor,
    block_g,
    gl,
    gluon,
    jit_kernel,
    kind_of,
    mbarrier,
    ragged,
    ragged_descriptor,
    tile_options,
    tma,
    tma_load,
    weights_descriptor,
    weights_layout,
)
from .pipeline import (
    CONSUMERS,
    LINE,
    STRIP,
    Gather,
    Rows,
    Weights,
    allocate_weights,
    blocks,
    gather,
    join_pairs,
    line_layout,
    make_barriers,
    make_handoff,
    make_ring,
    split_pairs,
)
from .schedule import Tiles, find_groups, make_queue

SLOTS = gl.constexpr(2)  # blocks of z in shared memory


@gluon.jit
def grad_consumer(
    CONSUMER: gl.constexpr, weights, ring, tiles, queue, scales, handoff,
    BLOCK_M: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    i = 0
    for n in range(tiles.mine()):
        group, first, end, tile_n = queue.get(n)
        depth, row = tiles.used(group, weights.K), first + CONSUMER * (BLOCK_M // 2)
        # 512 threads leave the compiler too few registers for an instruction of 256 columns
        place = group, row, end, tile_n
        accs, i = multiply_blocks(CONSUMER, weights, ring, i, depth, scales, place, BLOCK_M, 1, SPAN, 128)
        end, limit = gl.where(depth > 0, end, row), tiles.used(group, weights.N)
        acc = scales.apply(accs[0], group, row, end, tile_n * weights.BLOCK_N, limit)
        handoff.put(n, CONSUMER, blocks(acc, handoff.BLOCKS))


@aggregate
class Grads:
    """The sources of z and the routing weights, and the destinations of dz, s * a and ds."""

    z_desc: tma.tensor_descriptor  # (M, width), ragged
    z: gl.shared_memory_descriptor  # for each slot a strip of gates and one of ups, or one of both
    arrived: gl.shared_memory_descriptor  # a barrier for each slot
    dz: Rows
    a: Rows
    choices: gl.tensor  # (M,)
    s_ptr: gl.tensor  # (T * TOP_K,) float32
    ds_ptr: gl.tensor  # (column tiles, M) float32: the part of each column tile
    M: Number
    N: Number
    ACTIVATION: gl.constexpr
    UP: gl.constexpr  # h, or None where there is no gate
    INTERLEAVED: gl.constexpr
    WRITE_A: gl.constexpr
    PIECES: gl.constexpr  # strips of a block of z
    TILE: gl.constexpr  # the layout of a strip in shared memory
    WIDTH: gl.constexpr  # channels of a block

    @gluon.jit
    def fetch(self, c, row, end, block, pred):
        """Ask for z of a block of columns, this program's c-th."""
        slot = c % SLOTS
        bar = self.arrived.index(slot)
        mbarrier.expect(bar, self.PIECES * self.z_desc.block_type.nbytes, pred=pred)
        for p in gl.static_range(self.PIECES):
            at = ragged(row, end, block * LINE, p if self.PIECES > 1 else None)
            tma_load(self.z_desc, at, bar, self.z.index(self.PIECES * slot + p), pred=pred)

    @gluon.jit
    def get(self, c):
        """Gates and ups of the c-th block: the same twice where they take turns or there is no gate."""
        slot = c % SLOTS
        mbarrier.wait(self.arrived.index(slot), c // SLOTS & 1)
        gate = self.strip(self.PIECES * slot)
        return gate, self.strip(self.PIECES * slot + self.PIECES - 1)

    @gluon.jit
    def strip(self, index):
        SHAPE: gl.constexpr = [STRIP, LINE]
        return as_tile(self.z.index(index), SHAPE, self.TILE).load(line_layout(LINE))

    @gluon.jit
    def choice(self, row, end):
        """Return the choice of each row of a strip, or -1 for rows from `end` on."""
        m = gl.arange(0, STRIP, layout=gl.SliceLayout(1, line_layout(self.WIDTH)))
        return gl.load(self.choices + row + m, mask=m < end - row, other=-1)

    @gluon.jit
    def weight(self, choice):
        return gl.load(self.s_ptr + choice, mask=choice >= 0, other=0.0)

    @gluon.jit
    def block(self, u, gate, up, s, row, end, channel):
        """Write dz and s * f(z) of a block; <u, f(z)> of each row."""
        if self.INTERLEAVED:
            gate, up = split_pairs(gate, line_layout(self.WIDTH))
        u = u.to(gl.float32)
        a, slope = self.ACTIVATION(gate.to(gl.float32))
        du = u * s[:, None]
        dz = du * slope
        if self.UP is not None:
            up, up_slope = self.UP(up.to(gl.float32))
            dup = du * a * up_slope
            a *= up
            dz *= up
        if self.INTERLEAVED:
            dz = gl.convert_layout(join_pairs(dz, dup), line_layout(LINE), assert_trivial=True)
            self.dz.store(dz, row, end, 2 * channel, 2 * self.N)
        else:
            self.dz.store(dz, row, end, channel, self.N)
            if self.UP is not None:
                self.dz.store(dup, row, end, self.N + channel, 2 * self.N)
        if self.WRITE_A:
            self.a.store(a * s[:, None], row, end, channel, self.N)
        return gl.sum(u * a, axis=1)

    @gluon.jit
    def put_ds(self, ds, row, end, tile_n):
        m = gl.arange(0, STRIP, layout=gl.SliceLayout(1, line_layout(self.WIDTH)))
        gl.store(self.ds_ptr + tile_n.to(gl.int64) * self.M + row + m, ds, mask=m < end - row)


@gluon.jit
def strip_place(tiles, queue, i, STRIPS: gl.constexpr):
    """First row, end row, end of what there is to read, and column tile of this program's i-th strip.

    Past the last one it is a strip of the last tile.
    """
    n = gl.minimum(i // STRIPS, tiles.mine() - 1)
    group, row, end, tile_n = queue.look(n)
    queue.release(n, pred=i == n * STRIPS + STRIPS - 1)
    row += i % STRIPS * STRIP
    return row, end, gl.where(group < tiles.G, end, row), tile_n


@gluon.jit
def grad_finisher(tiles, queue, handoff, grads):
    if tiles.mine() > 0:
        finish(tiles, queue, handoff, grads)


@gluon.jit
def finish(tiles, queue, handoff, grads):
    BLOCKS: gl.constexpr = handoff.BLOCKS
    STRIPS: gl.constexpr = CONSUMERS * handoff.STRIPS  # of a tile
    layout: gl.constexpr = line_layout(grads.WIDTH)
    # the routing weights are read one strip ahead, and the choices that they belong to two strips ahead
    row, end, live, tile_n = strip_place(tiles, queue, 0, STRIPS)
    next_row, next_end, next_live, next_n = strip_place(tiles, queue, 1, STRIPS)
    s = grads.weight(grads.choice(row, live))
    choice = grads.choice(next_row, next_live)
    c = 0
    for slot in gl.static_range(SLOTS):
        grads.fetch(slot, row, live, tile_n * BLOCKS + slot, True)
    strips = tiles.mine() * STRIPS
    for i in range(0, strips):
        later_row, later_end, later_live, later_n = strip_place(tiles, queue, i + 2, STRIPS)
        next_s = grads.weight(choice)
        choice = grads.choice(later_row, later_live)
        ds = gl.zeros((STRIP,), gl.float32, layout=gl.SliceLayout(1, layout))
        for j in range(BLOCKS):
            u = handoff.get(i // STRIPS, i % STRIPS, j, layout)
            gate, up = grads.get(c)
            here = j + SLOTS < BLOCKS
            block = gl.where(here, tile_n, next_n - 1) * BLOCKS + j + SLOTS
            more = here | (i + 1 < strips)
            grads.fetch(
                c + SLOTS, gl.where(here, row, next_row), gl.where(here, live, next_live), block, more
            )
            c += 1
            ds += grads.block(u, gate, up, s, row, end, (tile_n * BLOCKS + j) * grads.WIDTH)
        grads.put_ds(ds, row, end, tile_n)
        s = next_s
        row, end, live, tile_n = next_row, next_end, next_live, next_n
        next_row, next_end, next_live, next_n = later_row, later_end, later_live, later_n


@jit_kernel
def down_grad_kernel(
    dout_ptr,  # (T, K)
    order_ptr,  # (M,)
    w_desc,  # the weights of `own` experts, as LAYOUT says
    guests_desc,  # those of the other groups, or None
    z_desc,  # (M, width), ragged, in pieces where gates come before ups
    dz_ptr,  # (M, width)
    a_ptr,  # (M, N) or None
    s_ptr,  # (T * TOP_K,) float32
    ds_ptr,  # (column tiles, M) float32
    group_sizes_ptr,
    starts_ptr,  # (G,) or None: see `group_ends`
    dout_scale_ptr,  # (M,) float32, or None
    w_scale_ptr,  # (G, N) float32, or None
    counts,  # M, G, and own of the G
    N,  # in units of 8
    K,  # in units of 8
    dout_stride,  # in units of 16 bytes
    ACTIVATION: gl.constexpr, UP: gl.constexpr, INTERLEAVED: gl.constexpr, TOP_K: gl.constexpr,
    WEIGHTS: gl.constexpr,  # their LAYOUT, rows or columns, and whether K is a whole number of blocks
    BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    SUMS: gl.constexpr,  # stages that the tensor core sums, or 0: all; and whether scales are of blocks
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    SPAN: gl.constexpr = SUMS[0]
    M, G, own = counts
    N, K = 8 * N, 8 * K  # the compiler sees that they are multiples
    PROJECTIONS: gl.constexpr = 1 if UP is None else 2
    WIDTH: gl.constexpr = LINE // 2 if INTERLEAVED else LINE
    LAYOUT: gl.constexpr = WEIGHTS[0]
    EVEN_K: gl.constexpr = WEIGHTS[1]
    dtype: gl.constexpr = dout_ptr.dtype.element_ty
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M // 2, WIDTH], z_desc.dtype)
    Z_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STRIP, LINE], z_desc.dtype)
    a = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], A_LAYOUT)
    b = allocate_weights(STAGES, w_desc, BLOCK_N, BLOCK_K, LAYOUT)
    ring = make_ring(a, b, True, STAGES)
    handoff = make_handoff(z_desc.dtype, [BLOCK_M, BLOCK_N], WIDTH, TILE)
    queue = make_queue(CONSUMERS + 1)  # and the finisher
    weights = Weights(w_desc, guests_desc, own, N, K, BLOCK_N, BLOCK_K, LAYOUT)
    groups, rows = find_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, False, False, starts_ptr)
    tiles = Tiles(rows, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    PIECES: gl.constexpr = 1 if INTERLEAVED else PROJECTIONS
    z = gl.allocate_shared_memory(z_desc.dtype, [SLOTS * PIECES] + z_desc.block_type.shape, z_desc.layout)
    arrived = make_barriers(SLOTS, 1)
    WRITE_A: gl.constexpr = a_ptr is not None
    dz, out = Rows(dz_ptr, PROJECTIONS * N), Rows(a_ptr if WRITE_A else dz_ptr, N)
    grads = Grads(
        z_desc, z, arrived, dz, out, order_ptr, s_ptr, ds_ptr, M, N, ACTIVATION, UP, INTERLEAVED, WRITE_A,
        PIECES, Z_TILE, WIDTH,
    )  # fmt: skip
    scales = Scales(dout_scale_ptr, 0, 1, w_scale_ptr, group_scales(N, K, SUMS[1]), 1, M, SUMS[1])
    VECTOR: gl.constexpr = 128 // dtype.primitive_bitwidth
    dout = Gather(dout_ptr, dout_stride, order_ptr, TOP_K, VECTOR)
    # longer rows take the warps that gather them more registers, of 512 for a thread of each warpgroup
    LONG: gl.constexpr = [152, 136, 72] if SPAN > 0 else [160, 128, 64]
    REGISTERS: gl.constexpr = [160, 152, 40] if BLOCK_K == 32 else LONG
    gl.warp_specialize(
        [
            (grad_consumer, (0, weights, ring, tiles, queue, scales, handoff, BLOCK_M, SPAN)),
            (grad_consumer, (1, weights, ring, tiles, queue, scales, handoff, BLOCK_M, SPAN)),
            (grad_finisher, (tiles, queue, handoff, grads)),
            (gather, (dout, weights, ring, tiles, groups, queue, BLOCK_M, False, EVEN_K)),
        ],
        [4, 4, 4],
        REGISTERS,
    )


# launcher


def bind_down_grad(i, blocks: bool = False) -> Callable:
    """Bind `expert_down_grad`.  dout and down may have 8 bits, the latter K-major: then `launch` is given the
    scales, float32, of the rows (R,) and of the weights (E, I), or of `blocks` of both."""
    (own, K, N), R, act = i.down.shape, i.order.shape[0], get_activation(i.activation)
    E, need_a = i.group_sizes.shape[0], i.need_a
    c = tuning.lookup(f"hopper_down_grad{kind_of(i.dout)}", i.dout.dtype, R, N, K, E)
    pieces = 1 if i.interleaved else act.projections
    buffers = c.block_m * c.block_n + SLOTS.value * pieces * STRIP.value * LINE.value
    c = beside_groups(c, buffers, E, i.dout.itemsize)
    if c.num_stages < 3 and c.block_k == 64:  # too few to hide what they wait for: stages of half the size
        c = beside_groups(dataclasses.replace(c, block_k=32, num_stages=6), buffers, E, i.dout.itemsize)
    programs, tiles_n = num_programs(i.dout), -(-N // c.block_n)
    launch_for = bind_passes(
        down_grad_kernel, (programs,),
        **kernel_functions(act), INTERLEAVED=i.interleaved, TOP_K=i.rank.shape[1],
        WEIGHTS=(weights_layout(i.down), K % c.block_k == 0), BLOCK_G=block_g(E),
        SUMS=(span_of(i.dout, c, i.z.dtype, blocks), blocks), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    sizes = (R, E, own), N // 8, K // 8, i.dout.stride(0) * i.dout.itemsize // 16
    sum_columns = bind_add_partial_sums(tiles_n, R, i.rank.numel())
    own_boxes, guest_boxes = (bind_descriptor(weights_descriptor, c.block_n, c.block_k) for _ in range(2))
    z_boxes = bind_descriptor(ragged_descriptor, STRIP.value, LINE.value, pieces=pieces)

    def launch(out, i, scales=(None, None)):
        dz, a, ds = out
        partial_sums = torch.empty(tiles_n, R, dtype=torch.float32, device=dz.device)
        w, guests, z_desc = own_boxes(i.down), guest_boxes(i.guests), z_boxes(i.z)
        s = i.routing_weights.float().contiguous()
        tensors = i.dout, i.order.contiguous(), w, guests, z_desc, dz, a if need_a else None, s, partial_sums
        for group_sizes, starts in arriving(i.group_sizes):
            launch_for(starts)(*tensors, group_sizes, starts, *scales, *sizes)
        sum_columns(partial_sums, i.rank, ds)

    return launch
