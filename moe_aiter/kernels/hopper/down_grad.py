"""The gradient that starts the experts' backward pass, on Hopper; see ../expert_down.py.

A consumer's part of z arrives by TMA while the product runs; dz is written over it in shared memory.
"""

import torch

from ... import tuning
from .._parts import sum_parts
from ..activations import get_activation
from ._gluon import (
    aggregate,
    as_tile,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    ragged,
    ragged_descriptor,
    shared_layout,
    store_wait,
    tma,
    tma_load,
    tma_store,
)  # fmt: skip
from ._launch import num_programs, tile_options
from ._pipeline import (
    CONSUMERS,
    Gather,
    Weights,
    blocks,
    gather,
    join_pairs,
    make_ring,
    multiply,
    pairs_layout,
    split_pairs,
)
from ._schedule import all_tiles, make_schedule
from .activations import kernel_functions

AHEAD = gl.constexpr(2)  # blocks of z in shared memory


@aggregate
class GradStore:
    """Where a consumer's z comes from, and dz and s * a go."""

    z_desc: tma.tensor_descriptor  # (M, parts * N)
    dz_desc: tma.tensor_descriptor  # (M, parts * N)
    a_desc: tma.tensor_descriptor  # (M, N)
    z: gl.shared_memory_descriptor  # for each consumer AHEAD times PIECES buffers
    a: gl.shared_memory_descriptor  # one buffer for each consumer
    arrived: gl.shared_memory_descriptor  # a barrier for each buffer of z
    N: gl.tensor
    ACTIVATION: gl.constexpr
    UP: gl.constexpr  # h, or None where there is no gate
    PIECES: gl.constexpr  # tiles of a block of z: gates and ups, or one
    STEP: gl.constexpr  # from a channel's column of z to the next one's: 2 if interleaved
    WRITE_A: gl.constexpr
    TILE: gl.constexpr  # the layout of a buffer as a tile

    @gluon.jit
    def fetch(self, SLOT: gl.constexpr, row, end, channel):
        """Ask for the block of z whose channels begin at `channel`."""
        bar = self.arrived.index(SLOT)
        mbarrier.expect(bar, self.PIECES * self.z_desc.block_type.nbytes)
        for p in gl.static_range(self.PIECES):
            to = self.z.index(self.PIECES * SLOT + p)
            tma_load(self.z_desc, ragged(row, end, self.STEP * channel + p * self.N), bar, to)

    @gluon.jit
    def tile(self, INDEX: gl.constexpr):
        shape: gl.constexpr = [self.z_desc.block_type.shape[2], self.z_desc.block_type.shape[3]]
        return as_tile(self.z.index(INDEX), shape, self.TILE)

    @gluon.jit
    def block(self, u, ds, s, WHO: gl.constexpr, SLOT: gl.constexpr, phase, row, end, channel):
        """Write dz and s * f(z) for the channels from `channel` on; ds + <u, f(z)> of each row."""
        layout: gl.constexpr = u.type.layout
        tile, last_tile = self.tile(self.PIECES * SLOT), self.tile(self.PIECES * SLOT + self.PIECES - 1)
        mbarrier.wait(self.arrived.index(SLOT), phase)
        if self.STEP == 2:
            gate, up = split_pairs(tile.load(pairs_layout(u.shape[0], u.shape[1])), layout)
        else:
            gate = tile.load(layout)
        a, slope = self.ACTIVATION(gate.to(gl.float32))
        du = u * s[:, None]
        dz = du * slope
        if self.UP is not None:
            if self.STEP == 1:  # not before, to spare registers
                up = last_tile.load(layout)
            up, up_slope = self.UP(up.to(gl.float32))
            dup = du * a * up_slope
            a *= up
            dz *= up
            if self.STEP == 2:
                dz = join_pairs(dz, dup)
            else:
                last_tile.store(dup.to(self.z_desc.dtype))
        tile.store(dz.to(self.z_desc.dtype))
        if self.WRITE_A:
            buffer = self.a.index(WHO)
            buffer.store((a * s[:, None]).to(self.a_desc.dtype).reshape(self.a_desc.block_type.shape))
        fence_async_shared()
        if channel < self.N:
            for p in gl.static_range(self.PIECES):
                at = ragged(row, end, self.STEP * channel + p * self.N)
                tma_store(self.dz_desc, at, self.z.index(self.PIECES * SLOT + p))
            if self.WRITE_A:
                tma_store(self.a_desc, ragged(row, end, channel), self.a.index(WHO))
            ds += gl.sum(u * a, axis=1)
        return ds


@gluon.jit
def grad_consumer(
    WHO: gl.constexpr,
    weights,
    ring,
    tiles,
    store,
    choices,
    s_ptr,
    ds_ptr,
    M,
    BLOCK_M: gl.constexpr,
    COUNT: gl.constexpr,
):
    HALF: gl.constexpr = BLOCK_M // 2
    WIDTH: gl.constexpr = weights.BLOCK_N // COUNT
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    i = 0
    fetched = 0  # blocks of z, in each slot
    next_group, next_row, next_end = tiles.peek(gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.rows * tiles.columns, tiles.PROGRAMS):
        _, tile_n = tiles.place(tile)
        row, end = next_row + WHO * HALF, next_end
        next_group, next_row, next_end = tiles.peek(tile + tiles.PROGRAMS)
        first = tile_n * weights.BLOCK_N
        store_wait(pendings=0)
        for j in gl.static_range(AHEAD):
            store.fetch(WHO * AHEAD + j, row, end, first + j * WIDTH)
        acc, i = multiply(WHO, weights, ring, i, BLOCK_M, None)
        parts = blocks(acc, COUNT)
        m = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        choice = gl.maximum(gl.load(choices + m, mask=m < end, other=0), 0)
        s = gl.load(s_ptr + choice, mask=m < end, other=0.0)
        ds = gl.zeros((HALF,), gl.float32, layout=gl.SliceLayout(1, layout))
        for j in gl.static_range(COUNT):
            if j > 0:
                store_wait(pendings=0)
                if j - 1 + AHEAD < COUNT:
                    store.fetch(WHO * AHEAD + (j - 1) % AHEAD, row, end, first + (j - 1 + AHEAD) * WIDTH)
            phase = fetched + j // AHEAD & 1
            ds = store.block(
                parts[j], ds, s, WHO, WHO * AHEAD + j % AHEAD, phase, row, end, first + j * WIDTH
            )
        fetched += COUNT // AHEAD
        gl.store(ds_ptr + tile_n.to(gl.int64) * M + m, ds, mask=m < end)
    store_wait(pendings=0)


@jit_kernel
def down_grad_kernel(
    dout_ptr,  # (T, K)
    order_ptr,  # (M,)
    w_desc,  # the weights of G experts, (K, N)
    z_desc,  # (M, parts * N), ragged
    dz_desc,  # (M, parts * N), ragged
    a_desc,  # (M, N), ragged
    s_ptr,  # (T * TOP_K,) float32
    ds_ptr,  # (column tiles, M) float32: the part of each column tile
    schedule_ptr,
    M,
    G,
    N,
    K,
    dout_stride,  # in units of 16 bytes
    ACTIVATION: gl.constexpr,
    UP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    WRITE_A: gl.constexpr,
    TOP_K: gl.constexpr,
    A_LAYOUT: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    a = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], A_LAYOUT)
    b = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    ring = make_ring(a, b, True, STAGES)
    SLOTS: gl.constexpr = CONSUMERS * AHEAD
    STEP: gl.constexpr = 2 if INTERLEAVED else 1
    GATED: gl.constexpr = UP is not None
    PIECES: gl.constexpr = 2 if GATED and not INTERLEAVED else 1
    z = gl.allocate_shared_memory(w_desc.dtype, [PIECES * SLOTS] + z_desc.block_type.shape, z_desc.layout)
    sa = gl.allocate_shared_memory(w_desc.dtype, [CONSUMERS] + a_desc.block_type.shape, a_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(i), count=1)
    store = GradStore(z_desc, dz_desc, a_desc, z, sa, arrived, N, ACTIVATION, UP, PIECES, STEP, WRITE_A, TILE)
    weights = Weights(w_desc, N, K, BLOCK_N, BLOCK_K, "columns", None)
    tiles = all_tiles(schedule_ptr, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    COUNT: gl.constexpr = STEP * BLOCK_N // z_desc.block_type.shape[3]
    gl.warp_specialize(
        [
            (grad_consumer, (0, weights, ring, tiles, store, order_ptr, s_ptr, ds_ptr, M, BLOCK_M, COUNT)),
            (grad_consumer, (1, weights, ring, tiles, store, order_ptr, s_ptr, ds_ptr, M, BLOCK_M, COUNT)),
            (gather, (Gather(dout_ptr, dout_stride, order_ptr, TOP_K), weights, ring, tiles, BLOCK_M, False)),
        ],
        [4, 4],
        [232, 40],
    )


# launcher


def tuned_as(base: str, interleaved: bool, need_a: bool) -> str:
    """The name in the tables: where registers allow less than usual, tiles are smaller or stored in parts."""
    kind = ""
    if base == "gelu" or (base == "silu_oai" and not interleaved):
        kind = "_long"
    elif base == "silu_oai" and need_a:
        kind = "_oai"
    return f"hopper_down_grad{kind}{'' if need_a else '_frozen'}"


def launch_down_grad(
    out, dout, z, down, routing_weights, order, rank, group_sizes, activation, interleaved, need_a
) -> None:
    dz, a, ds = out
    (E, K, N), R, act = down.shape, order.shape[0], get_activation(activation)
    c = tuning.lookup(tuned_as(act.base, interleaved, need_a), dout.dtype, R, N, K, E)
    schedule = make_schedule(group_sizes, R, c.block_m, dz, a)
    parts = torch.empty(-(-N // c.block_n), R, dtype=torch.float32, device=dout.device)
    programs = num_programs(dout)
    z_width = 2 * c.store_n if interleaved else c.store_n
    z_desc, dz_desc = (ragged_descriptor(t, c.block_m // 2, z_width) for t in (z, dz))
    down_grad_kernel[(programs,)](
        dout, order.contiguous(), descriptor(down.view(E * K, N), c.block_k, c.block_n), z_desc, dz_desc,
        ragged_descriptor(a, c.block_m // 2, c.store_n) if need_a else dz_desc,
        routing_weights.float().contiguous(), parts, schedule, R, E, N, K, dout.stride(0) // 8,
        **kernel_functions(act), INTERLEAVED=interleaved, WRITE_A=need_a, TOP_K=rank.shape[1],
        A_LAYOUT=shared_layout(dout.dtype, c.block_m, c.block_k),
        TILE=shared_layout(dout.dtype, c.block_m // 2, z_width), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    sum_parts(parts, rank, ds)
