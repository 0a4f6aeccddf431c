"""The gradient that starts the experts' backward pass, on Hopper; see ../expert_down.py.

The consumers leave dout times the weights, rounded to 16 bits, to a warpgroup that fetches z by TMA and
writes dz and s * a while they multiply the next tile.
"""

import torch

from ... import tuning
from .._parts import sum_parts
from ..activations import get_activation
from ._gluon import (
    aggregate,
    as_tile,
    descriptor,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    ragged,
    ragged_descriptor,
    shared_layout,
    tma,
    tma_load,
)  # fmt: skip
from ._handoff import LINE, STRIP, Rows, line_layout, make_handoff
from ._launch import num_programs, tile_options
from ._pipeline import (
    CONSUMERS,
    VECTOR,
    Gather,
    Weights,
    blocks,
    gather,
    join_pairs,
    make_ring,
    multiply,
    split_pairs,
)
from ._schedule import all_tiles, make_schedule
from .activations import kernel_functions

SLOTS = gl.constexpr(2)  # blocks of z in shared memory


@gluon.jit
def grad_consumer(WHO: gl.constexpr, weights, ring, tiles, handoff, BLOCK_M: gl.constexpr):
    i = 0
    for tile in range(gl.program_id(0), tiles.rows * tiles.columns, tiles.PROGRAMS):
        # 512 threads leave the compiler too few registers for an instruction of 256 columns
        acc, i = multiply(WHO, weights, ring, i, BLOCK_M, None, 128)
        handoff.put(tile // tiles.PROGRAMS, WHO, blocks(acc, handoff.BLOCKS))


@aggregate
class Grads:
    """Where z and the routing weights come from, and dz, s * a and ds go."""

    z_desc: tma.tensor_descriptor  # (M, parts * N), ragged
    z: gl.shared_memory_descriptor  # for each slot a strip of gates and one of ups, or one of both
    arrived: gl.shared_memory_descriptor  # a barrier for each slot
    dz: Rows
    a: Rows
    choices: gl.tensor  # (M,)
    s_ptr: gl.tensor  # (T * TOP_K,) float32
    ds_ptr: gl.tensor  # (column tiles, M) float32: the part of each column tile
    M: gl.tensor
    N: gl.tensor
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
            column = block * LINE + p * self.N
            to = self.z.index(self.PIECES * slot + p)
            tma_load(self.z_desc, ragged(row, end, column), bar, to, pred=pred)

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
        """Whose rows a strip has."""
        m = gl.arange(0, STRIP, layout=gl.SliceLayout(1, line_layout(self.WIDTH)))
        return gl.load(self.choices + row + m, mask=m < end - row, other=0)

    @gluon.jit
    def weight(self, choice):
        return gl.load(self.s_ptr + gl.maximum(choice, 0))

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
def strip_place(tiles, i, STRIPS: gl.constexpr):
    """First row, end row and column tile of the i-th strip that this program finishes."""
    tile = gl.program_id(0) + i // STRIPS * tiles.PROGRAMS
    _, row, end = tiles.peek(tile)
    _, tile_n = tiles.place(tile)
    return row + i % STRIPS * STRIP, end, tile_n


@gluon.jit
def grad_finisher(tiles, handoff, grads):
    BLOCKS: gl.constexpr = handoff.BLOCKS
    STRIPS: gl.constexpr = CONSUMERS * handoff.STRIPS  # of a tile
    layout: gl.constexpr = line_layout(grads.WIDTH)
    # the routing weights are read a strip ahead, and whose they are two
    row, end, tile_n = strip_place(tiles, 0, STRIPS)
    next_row, next_end, next_n = strip_place(tiles, 1, STRIPS)
    s = grads.weight(grads.choice(row, end))
    choice = grads.choice(next_row, next_end)
    c = 0
    some = tiles.rows * tiles.columns > gl.program_id(0)
    for slot in gl.static_range(SLOTS):
        grads.fetch(slot, row, end, tile_n * BLOCKS + slot, some)
    my_tiles = gl.cdiv(tiles.rows * tiles.columns - gl.program_id(0), tiles.PROGRAMS)
    for i in range(0, my_tiles * STRIPS):
        later_row, later_end, later_n = strip_place(tiles, i + 2, STRIPS)
        next_s = grads.weight(choice)
        choice = grads.choice(later_row, later_end)
        ds = gl.zeros((STRIP,), gl.float32, layout=gl.SliceLayout(1, layout))
        for j in range(BLOCKS):
            gate, up = grads.get(c)
            here = j + SLOTS < BLOCKS
            block = gl.where(here, tile_n, next_n - 1) * BLOCKS + j + SLOTS
            more = here | (i + 1 < my_tiles * STRIPS)
            grads.fetch(c + SLOTS, gl.where(here, row, next_row), gl.where(here, end, next_end), block, more)
            c += 1
            u = handoff.get(i // STRIPS, i % STRIPS, j, layout)
            ds += grads.block(u, gate, up, s, row, end, (tile_n * BLOCKS + j) * grads.WIDTH)
        grads.put_ds(ds, row, end, tile_n)
        s = next_s
        row, end, tile_n = next_row, next_end, next_n
        next_row, next_end, next_n = later_row, later_end, later_n


@jit_kernel
def down_grad_kernel(
    dout_ptr,  # (T, K)
    order_ptr,  # (M,)
    w_desc,  # the weights of G experts, (K, N)
    z_desc,  # (M, parts * N), ragged
    dz_ptr,  # (M, parts * N)
    a_ptr,  # (M, N)
    s_ptr,  # (T * TOP_K,) float32
    ds_ptr,  # (column tiles, M) float32
    schedule_ptr,
    M,
    G,
    N,  # in units of 8
    K,
    dout_stride,  # in units of 16 bytes
    ACTIVATION: gl.constexpr,
    UP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    WRITE_A: gl.constexpr,
    TOP_K: gl.constexpr,
    A_LAYOUT: gl.constexpr,
    TILE: gl.constexpr,
    Z_TILE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    N *= VECTOR  # the compiler sees that it is a multiple
    PARTS: gl.constexpr = 1 if UP is None else 2
    WIDTH: gl.constexpr = LINE // 2 if INTERLEAVED else LINE
    a = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], A_LAYOUT)
    b = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    ring = make_ring(a, b, True, STAGES)
    handoff = make_handoff(w_desc.dtype, [BLOCK_M, BLOCK_N], WIDTH, TILE)
    weights = Weights(w_desc, N, K, BLOCK_N, BLOCK_K, "columns", None)
    tiles = all_tiles(schedule_ptr, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    PIECES: gl.constexpr = 1 if INTERLEAVED else PARTS
    z = gl.allocate_shared_memory(w_desc.dtype, [SLOTS * PIECES] + z_desc.block_type.shape, z_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(i), count=1)
    dz, out = Rows(dz_ptr, PARTS * N), Rows(a_ptr, N)
    grads = Grads(
        z_desc,
        z,
        arrived,
        dz,
        out,
        order_ptr,
        s_ptr,
        ds_ptr,
        M,
        N,
        ACTIVATION,
        UP,
        INTERLEAVED,
        WRITE_A,
        PIECES,
        Z_TILE,
        WIDTH,
    )
    # longer rows take the warps that gather them more registers, of 512 for a thread of each warpgroup
    REGISTERS: gl.constexpr = [160, 152, 40] if BLOCK_K == 32 else [160, 136, 56]
    gl.warp_specialize(
        [
            (grad_consumer, (0, weights, ring, tiles, handoff, BLOCK_M)),
            (grad_consumer, (1, weights, ring, tiles, handoff, BLOCK_M)),
            (grad_finisher, (tiles, handoff, grads)),
            (gather, (Gather(dout_ptr, dout_stride, order_ptr, TOP_K), weights, ring, tiles, BLOCK_M, False)),
        ],
        [4, 4, 4],
        REGISTERS,
    )


# launcher


def launch_down_grad(
    out, dout, z, down, routing_weights, order, rank, group_sizes, activation, interleaved, need_a
) -> None:
    dz, a, ds = out
    (E, K, N), R, act = down.shape, order.shape[0], get_activation(activation)
    c = tuning.lookup("hopper_down_grad", dout.dtype, R, N, K, E)
    schedule = make_schedule(group_sizes, R, c.block_m, dz, a)
    parts = torch.empty(-(-N // c.block_n), R, dtype=torch.float32, device=dout.device)
    programs = num_programs(dout)
    down_grad_kernel[(programs,)](
        dout, order.contiguous(), descriptor(down.view(E * K, N), c.block_k, c.block_n),
        ragged_descriptor(z, STRIP.value, LINE.value), dz,
        a if need_a else dz, routing_weights.float().contiguous(), parts, schedule,
        R, E, N // 8, K, dout.stride(0) // 8,
        **kernel_functions(act), INTERLEAVED=interleaved, WRITE_A=need_a, TOP_K=rank.shape[1],
        A_LAYOUT=shared_layout(dout.dtype, c.block_m, c.block_k),
        TILE=shared_layout(dout.dtype, c.block_m // 2, LINE.value // (2 if interleaved else 1)),
        Z_TILE=shared_layout(dout.dtype, STRIP.value, LINE.value), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    sum_parts(parts, rank, ds)
