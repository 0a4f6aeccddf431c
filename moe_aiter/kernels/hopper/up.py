"""The up-projection of the experts on Hopper; see ../experts/up.py."""

from collections.abc import Callable

import torch

from ... import tuning
from ..base.activations import get_activation
from ..base.launch import num_programs
from ..base.sources import arriving, bind_passes, launch_passes
from .epilogue import Scales, group_scales, kernel_functions, multiply_blocks, narrowed, span_of
from .gluon import (
    Number,
    aggregate,
    beside_groups,
    bind_descriptor,
    block_g,
    fence_async_shared,
    gl,
    gluon,
    jit_kernel,
    kind_of,
    ragged,
    ragged_descriptor,
    store_wait,
    tile_options,
    tma,
    tma_store,
    weights_descriptor,
    weights_layout,
)
from .pipeline import (
    CONSUMERS,
    LINE,
    Gather,
    Weights,
    add_bias,
    allocate_weights,
    blocks,
    gather,
    join_pairs,
    make_ring,
)
from .schedule import Tiles, find_groups, make_queue


@aggregate
class UpStore:
    """The destination of a consumer's z and a: ragged rows, through buffers for a block of channels."""

    z_desc: tma.tensor_descriptor  # (M, width), in pieces where the buffers are
    a_desc: tma.tensor_descriptor  # (M, N)
    z: gl.shared_memory_descriptor  # for each consumer a buffer, or one for gates and one for ups
    a: gl.shared_memory_descriptor  # one for each consumer
    bias_ptr: object  # (G, width) or None
    N: Number
    ACTIVATION: gl.constexpr
    UP: gl.constexpr  # h, or None where there is no gate
    INTERLEAVED: gl.constexpr
    WRITE_Z: gl.constexpr
    WRITE_A: gl.constexpr

    @gluon.jit
    def block(self, gate, up, scales, CONSUMER: gl.constexpr, group, row, end, column):
        """Write z and a for the channels from `column` on; `up` is unused where there is no gate."""
        GATED: gl.constexpr = self.UP is not None
        WHOLE: gl.constexpr = not GATED or self.INTERLEAVED  # one block of z, not one of gates and one of ups
        PROJECTIONS: gl.constexpr = 2 if GATED else 1
        STEP: gl.constexpr = 2 if self.INTERLEAVED else 1
        base = group * (PROJECTIONS * self.N)
        gate = scales.apply(gate, group, row, end, column, self.N)
        gate = add_bias(gate, self.bias_ptr, base, column, self.N, STEP)
        if self.WRITE_A:
            a = self.ACTIVATION(gate)[0]
        if GATED:
            offset = 1 if self.INTERLEAVED else self.N
            up = scales.apply(up, group, row, end, column, self.N, offset)
            up = add_bias(up, self.bias_ptr, base + offset, column, self.N, STEP)
            if self.WRITE_A:
                a *= self.UP(up)[0]
        store_wait(pendings=0)
        if self.WRITE_A:
            if scales.w_ptr is not None:  # changes no row of the group: without it, Triton 3.9 spills
                a = gl.where(row < end, a, 0.0)
            put(a, self.a.index(CONSUMER))
        if self.WRITE_Z:
            if WHOLE:
                put(join_pairs(gate, up) if GATED else gate, self.z.index(CONSUMER))
            else:
                put(gate, self.z.index(2 * CONSUMER))
                put(up, self.z.index(2 * CONSUMER + 1))
        fence_async_shared()
        if self.WRITE_A:
            tma_store(self.a_desc, ragged(row, end, column), self.a.index(CONSUMER))
        if self.WRITE_Z:
            if WHOLE:
                tma_store(self.z_desc, ragged(row, end, STEP * column), self.z.index(CONSUMER))
            else:
                tma_store(self.z_desc, ragged(row, end, column, 0), self.z.index(2 * CONSUMER))
                tma_store(self.z_desc, ragged(row, end, column, 1), self.z.index(2 * CONSUMER + 1))


@gluon.jit
def put(x, buffer):
    buffer.store(x.to(buffer.dtype).reshape(buffer.shape))


@gluon.constexpr_function
def gate_block(j, together):
    """The place of the j-th block of gates where so many come before as many ups, in turn."""
    return j % together + j // together * 2 * together


@gluon.jit
def up_consumer(
    CONSUMER: gl.constexpr, weights, ring, tiles, queue, scales, store,
    BLOCK_M: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = store.a_desc.block_type.shape[3]
    GATED: gl.constexpr = store.UP is not None
    CHANNEL_BLOCKS: gl.constexpr = weights.BLOCK_N // (2 * WIDTH if GATED else WIDTH)
    IN_TURN: gl.constexpr = GATED and weights.LAYOUT == "columns"  # each gate beside its up
    COUNT: gl.constexpr = 2 * CHANNEL_BLOCKS if GATED and not IN_TURN else CHANNEL_BLOCKS
    # the blocks of gates that come before their ups
    TOGETHER: gl.constexpr = LINE // WIDTH if weights.LAYOUT == "gate_up_columns" else CHANNEL_BLOCKS
    WIDE: gl.constexpr = 2 if SPAN > 0 and weights.BLOCK_N > 128 else 1
    i = 0
    for n in range(tiles.mine()):
        group, first, end, tile_n = queue.get(n)
        row = first + CONSUMER * (BLOCK_M // 2)
        place, depth = (group, row, end, tile_n), weights.K
        wide, i = multiply_blocks(CONSUMER, weights, ring, i, depth, scales, place, BLOCK_M, WIDE, SPAN)
        accs = blocks(wide[0], COUNT // WIDE)
        if WIDE == 2:
            accs = accs + blocks(wide[1], COUNT // 2)
        for j in gl.static_range(CHANNEL_BLOCKS):
            column = (tile_n * CHANNEL_BLOCKS + j) * WIDTH
            if IN_TURN:
                gate, up = gl.split(gl.reshape(accs[j], (BLOCK_M // 2, WIDTH, 2)))
            else:
                gate = accs[gate_block(j, TOGETHER)]
                up = accs[gate_block(j, TOGETHER) + TOGETHER] if GATED else gate
            store.block(gate, up, scales, CONSUMER, group, row, end, column)
    store_wait(pendings=0)


@jit_kernel
def expert_up_kernel(
    x_ptr,  # (T, K)
    order_ptr,  # (M,)
    w_desc,  # the weights of `own` experts, as LAYOUT says
    guests_desc,  # those of the other groups, or None
    bias_ptr,  # (G, width) or None
    z_desc,  # (M, width), ragged
    a_desc,  # (M, N), ragged
    group_sizes_ptr,
    starts_ptr,  # (G,) or None: see `group_ends`
    x_scale_ptr,  # (M,) float32 or None
    w_scale_ptr,  # (G, width) float32 or None
    counts,  # M, G, and own of the G
    N,  # in units of 8
    K,  # in units of 8
    x_stride,  # in units of 16 bytes
    ACTIVATION: gl.constexpr, UP: gl.constexpr, INTERLEAVED: gl.constexpr,
    WEIGHTS: gl.constexpr,  # their LAYOUT, and whether K is a whole number of blocks
    WRITES: gl.constexpr,  # whether z, and whether a
    TOP_K: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    SUMS: gl.constexpr,  # stages that the tensor core sums, or 0: all; and whether scales are of blocks
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    SPAN: gl.constexpr = SUMS[0]
    GATED: gl.constexpr = UP is not None
    M, G, own = counts
    N, K = 8 * N, 8 * K  # the compiler sees that they are multiples
    LAYOUT: gl.constexpr = WEIGHTS[0]
    EVEN_K: gl.constexpr = WEIGHTS[1]
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    a = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], A_LAYOUT)
    b = allocate_weights(STAGES, w_desc, BLOCK_N, BLOCK_K, LAYOUT)
    PIECES: gl.constexpr = 2 if GATED and not INTERLEAVED else 1
    z_shape: gl.constexpr = [CONSUMERS * PIECES] + z_desc.block_type.shape
    z_out = gl.allocate_shared_memory(z_desc.dtype, z_shape, z_desc.layout)
    a_out = gl.allocate_shared_memory(a_desc.dtype, [CONSUMERS] + a_desc.block_type.shape, a_desc.layout)
    ring = make_ring(a, b, True, STAGES)
    queue = make_queue(CONSUMERS)
    weights = Weights(w_desc, guests_desc, own, N, K, BLOCK_N, BLOCK_K, LAYOUT)
    CHANNELS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    groups, rows = find_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, False, False, starts_ptr)
    tiles = Tiles(rows, gl.cdiv(N, CHANNELS), G, GROUP_M, PROGRAMS)
    WRITE_Z: gl.constexpr = WRITES[0]
    WRITE_A: gl.constexpr = WRITES[1]
    store = UpStore(z_desc, a_desc, z_out, a_out, bias_ptr, N, ACTIVATION, UP, INTERLEAVED, WRITE_Z, WRITE_A)
    x = Gather(x_ptr, x_stride, order_ptr, TOP_K, 128 // dtype.primitive_bitwidth)
    PROJECTIONS: gl.constexpr = 2 if GATED else 1
    w_group = group_scales(PROJECTIONS * N, K, SUMS[1])
    scales = Scales(x_scale_ptr, 0, 1, w_scale_ptr, w_group, 2 if INTERLEAVED else 1, M, SUMS[1])
    gl.warp_specialize(
        [
            (up_consumer, (0, weights, ring, tiles, queue, scales, store, BLOCK_M, SPAN)),
            (up_consumer, (1, weights, ring, tiles, queue, scales, store, BLOCK_M, SPAN)),
            (gather, (x, weights, ring, tiles, groups, queue, BLOCK_M, True, EVEN_K)),
        ],
        [4, 4],
        [224, 56] if SPAN > 0 else [224, 64],
    )


# launcher


def bind_expert_up(
    i, write_a: bool = True, dtype: torch.dtype | None = None, blocks: bool = False
) -> Callable:
    """Bind `expert_up`; x and gate_up may have 8 bits: then `dtype` is that of z and a, and `launch` is given
    the scales, float32, of the rows (R,) and of the weights (E, width), or of `blocks` of both."""
    (own, width, K), R, act = i.gate_up.shape, i.order.shape[0], get_activation(i.activation)
    E = i.group_sizes.shape[0]
    N, write_z, interleaved = width // act.projections, i.save_z, i.interleaved
    op = f"hopper_up{'' if act.gated else '_plain'}{kind_of(i.x)}"
    c = tuning.lookup(op, i.x.dtype, R, width, K, E)
    c = narrowed(c) if blocks else c
    c = beside_groups(c, c.block_m * c.store_n * (act.projections + 1), E, i.x.itemsize)
    programs, layout = num_programs(i.x), weights_layout(i.gate_up.mT)
    paired = act.gated and (layout == "rows" or not interleaved)  # gates and ups apart in a box
    columns = c.block_n // 2 if paired else c.block_n
    launch_for = bind_passes(
        expert_up_kernel, (programs,),
        **kernel_functions(act), INTERLEAVED=interleaved, WRITES=(write_z, write_a),
        WEIGHTS=(f"gate_up_{layout}" if paired else layout, K % c.block_k == 0),
        TOP_K=i.rank.shape[1], BLOCK_G=block_g(E),
        SUMS=(span_of(i.x, c, dtype or i.x.dtype, blocks), blocks), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    sizes = (R, E, own), N // 8, K // 8, i.x.stride(0) * i.x.itemsize // 16
    a_box, z_box = (c.block_m // 2, c.store_n), (c.block_m // 2, c.store_n * (1 + interleaved))
    pieces = 2 if act.gated and not interleaved else 1

    def boxes(w):
        if paired:
            w = w.view(-1, N, 2, K).transpose(1, 2) if interleaved else w.view(-1, 2, N, K)
        return weights_descriptor(w.mT, columns, c.block_k)

    own_boxes, guest_boxes = bind_descriptor(boxes), bind_descriptor(boxes)
    a_boxes = bind_descriptor(ragged_descriptor, *a_box)
    z_boxes = bind_descriptor(ragged_descriptor, *z_box, pieces=pieces)

    def launch(out, i, scales=(None, None)):
        z, a = out
        # without an a, a shape of which nothing is written
        a_desc = a_boxes(a if write_a else z)
        z_desc = z_boxes(z) if write_z else a_desc
        order, bias = i.order.contiguous(), None if i.bias is None else i.bias.contiguous()
        tensors = i.x, order, own_boxes(i.gate_up), guest_boxes(i.guests), bias, z_desc, a_desc
        launch_passes(
            launch_for(starts)(*tensors, group_sizes, starts, *scales, *sizes)
            for group_sizes, starts in arriving(i.group_sizes)
        )

    return launch
