"""Grouped matmul with weights of 4 bits on Hopper; see ../grouped/four_bit.py.

Rows are gathered and multiplied as in other kernels here.  A further warpgroup, `unpack`, writes the tile of
the weight into the ring, in 16 bits; its codes and scales come by TMA, some stages ahead.

A block of a row of w holds 16 numbers at most.  `unpack` computes them in float32 and rounds them, once for
each block, and keeps them in eight registers: four with the low bytes and four with the high bytes.  Then it
looks each number up by `prmt`, which takes four bytes out of eight.
"""

from collections.abc import Callable

from ... import tuning
from ..base.launch import bind_kernel, num_programs
from ..quantize.four_bit import CODES, FORMATS, bind_expand_scales
from .epilogue import Scales
from .gluon import (
    PLAIN,
    Number,
    aggregate,
    as_tile,
    beside_groups,
    block_g,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    plain_descriptor,
    ragged_descriptor,
    shared_layout,
    tile_options,
    tma,
    tma_load,
)
from .gmm import gmm_consumer
from .pipeline import CONSUMERS, Gather, gather, make_barriers, make_ring
from .schedule import Tiles, find_groups, make_queue

WIDEST = gl.constexpr(128)  # columns of an instruction, for whose sum 16 warps have registers
NUMBERS = gl.constexpr(8)  # of 4 bits in a word


@gluon.constexpr_function
def block_of(format):
    return FORMATS[format].block


@gluon.constexpr_function
def is_high_first(format):
    return FORMATS[format].high_first


@gluon.constexpr_function
def value_of(format, code):
    return CODES[format][code]


@gluon.constexpr_function
def part_layout(PARTS, WORDS):
    """Give each thread whole parts, a part's words of a row, and neighbouring threads neighbouring rows."""
    across = min(PARTS, 4)
    return gl.BlockedLayout([1, 1, WORDS], [32, 1, 1], [4 // across, across, 1], [2, 1, 0])


@gluon.constexpr_function
def flat_layout(PARTS, WORDS):
    """Do as `part_layout` for rows whose parts are not distinguished."""
    across = min(PARTS, 4)
    return gl.BlockedLayout([1, WORDS], [32, 1], [4 // across, across], [1, 0])


@gluon.constexpr_function
def as_words(layout):
    """The layout of a buffer seen as words."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, 32, 2)


@gluon.jit
def take_bytes(low, high, selector):
    """Four of the eight bytes of two words; each half byte of the selector is the number of a byte."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def round_pair(first, second, DTYPE: gl.constexpr):
    """Two float32 numbers, rounded to DTYPE, in a word."""
    NAME: gl.constexpr = "bf16x2" if gl.bfloat16 == DTYPE else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,f,f", [first, second], gl.int32, is_pure=True, pack=1
    )


@aggregate
class PackedWeights:
    """The second operand, weights of 4 bits, where `Weights` has those of 16."""

    codes_desc: tma.tensor_descriptor  # (G * rows, columns / 2) uint8
    scale_desc: tma.tensor_descriptor  # (G * blocks, rows) float32
    shift_desc: object  # the same, or None
    table_ptr: object  # (16,) float32 of NF4, or None
    codes: gl.shared_memory_descriptor  # a buffer for each stage, as are the next two
    scale: gl.shared_memory_descriptor
    shift: gl.shared_memory_descriptor
    arrived: gl.shared_memory_descriptor  # a barrier for each stage
    N: Number
    K: Number
    blocks: Number  # of a row
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    LAYOUT: gl.constexpr  # as in Weights: rows (N, K) or columns (K, N)
    FORMAT: gl.constexpr

    @gluon.jit
    def view(self, b):
        return b if self.LAYOUT == "columns" else b.permute((1, 0))

    @gluon.jit
    def start(self, ring, i, group, tile_n, k):
        """Nothing: `unpack` fetches codes, and tells when the weights of a stage are there."""

    @gluon.jit
    def fetch(self, i, group, tile_n, k):
        """Have a tile's codes, scales and shifts copied to the buffers of stage i."""
        stage = i % self.codes.shape[0]
        if self.LAYOUT == "columns":
            rows, row, column = self.K, k, tile_n * self.BLOCK_N
        else:
            rows, row, column = self.N, tile_n * self.BLOCK_N, k
        arrived = self.arrived.index(stage)
        SHIFTS: gl.constexpr = 1 if self.shift_desc is None else 2
        scale_bytes: gl.constexpr = self.scale_desc.block_type.nbytes
        mbarrier.expect(arrived, self.codes_desc.block_type.nbytes + SHIFTS * scale_bytes)
        tma_load(self.codes_desc, [group * rows + row, column // 2], arrived, self.codes.index(stage))
        at = [group * self.blocks + column // block_of(self.FORMAT), row]
        tma_load(self.scale_desc, at, arrived, self.scale.index(stage))
        if self.shift_desc is not None:
            tma_load(self.shift_desc, at, arrived, self.shift.index(stage))

    @gluon.jit
    def load(self, i):
        """The codes of stage i as words (ROWS, PARTS, WORDS), and scales and shifts (ROWS, PARTS)."""
        ROWS: gl.constexpr = self.codes.shape[1]
        COLUMNS: gl.constexpr = 2 * self.codes.shape[2]
        PARTS: gl.constexpr = self.scale.shape[1]
        WORDS: gl.constexpr = COLUMNS // PARTS // NUMBERS
        layout: gl.constexpr = part_layout(PARTS, WORDS)
        stage = i % self.codes.shape[0]
        mbarrier.wait(self.arrived.index(stage), i // self.codes.shape[0] & 1)
        wide: gl.constexpr = as_words(self.codes.layout)
        buffer = as_tile(self.codes.index(stage), [ROWS, PARTS * WORDS], wide, gl.int32)
        words = buffer.load(flat_layout(PARTS, WORDS))
        words = gl.convert_layout(gl.reshape(words, [ROWS, PARTS, WORDS]), layout, assert_trivial=True)
        shape: gl.constexpr = [PARTS, ROWS]
        of_parts: gl.constexpr = gl.SliceLayout(2, layout)
        scale = as_tile(self.scale.index(stage), shape, PLAIN).permute((1, 0)).load(of_parts)
        shift = scale
        if self.shift_desc is not None:
            shift = as_tile(self.shift.index(stage), shape, PLAIN).permute((1, 0)).load(of_parts)
        return words, scale, shift

    @gluon.jit
    def pair(self, code: gl.constexpr, scale, shift, DTYPE: gl.constexpr):
        """The numbers that a code and the next stand for in each block, in a word."""
        if self.table_ptr is not None:  # of NF4
            first, second = gl.load(self.table_ptr + code) * scale, gl.load(self.table_ptr + code + 1) * scale
        else:
            first, second = value_of(self.FORMAT, code) * scale, value_of(self.FORMAT, code + 1) * scale
        if self.shift_desc is not None:
            first, second = first + shift, second + shift
        return gl.expand_dims(round_pair(first, second, DTYPE), 2)

    @gluon.jit
    def tables(self, scale, shift, DTYPE: gl.constexpr):
        """The low and the high bytes of the 16 numbers of each block, four in a word."""
        low, high = (), ()
        for j in gl.static_range(4):
            first, second = (self.pair(4 * j, scale, shift, DTYPE), self.pair(4 * j + 2, scale, shift, DTYPE))
            low = low + (take_bytes(first, second, 0x6420),)
            high = high + (take_bytes(first, second, 0x7531),)
        return low, high

    @gluon.jit
    def write(self, b, words, low, high):
        """Write the tile of the weight into a buffer of the ring."""
        code, upper = words & 0x77777777, ((words >> 1) & 0x44444444) | 0x32103210
        a0, a1 = self.numbers(low, high, code, upper)
        a2, a3 = self.numbers(low, high, code >> 16, upper >> 16)
        pairs = gl.join(gl.join(a0, a2), gl.join(a1, a3))
        shape: gl.constexpr = [words.shape[0], words.shape[1] * words.shape[2] * 4]
        as_tile(b, shape, as_words(b.layout), gl.int32).store(gl.reshape(pairs, shape))

    @gluon.jit
    def numbers(self, low, high, code, upper):
        """The numbers of four codes as two words; `upper` says which of the codes have their fourth bit."""
        below = take_bytes(take_bytes(low[0], low[1], code), take_bytes(low[2], low[3], code), upper)
        above = take_bytes(take_bytes(high[0], high[1], code), take_bytes(high[2], high[3], code), upper)
        if is_high_first(self.FORMAT):
            out = take_bytes(below, above, 0x4051), take_bytes(below, above, 0x6273)
        else:
            out = take_bytes(below, above, 0x5140), take_bytes(below, above, 0x7362)
        return out


@gluon.jit
def unpack(weights, ring, tiles, queue):
    """Write the weights of each stage, whose codes are fetched as many stages ahead as the ring has."""
    i = 0
    for n in range(tiles.mine()):
        group, _row, _end, tile_n = queue.get(n)
        steps = tiles.used(group, weights.K) // weights.BLOCK_K
        for s in range(gl.minimum(ring.STAGES, steps)):
            weights.fetch(i + s, group, tile_n, s * weights.BLOCK_K)
        for s in range(steps):
            words, scale, shift = weights.load(i)
            low, high = weights.tables(scale, shift, ring.b.dtype)
            ring.wait_empty(i)
            weights.write(ring.b.index(i % ring.STAGES), words, low, high)
            fence_async_shared()
            mbarrier.arrive(ring.ready.index(i % ring.STAGES), count=1)
            if s + ring.STAGES < steps:
                weights.fetch(i + ring.STAGES, group, tile_n, (s + ring.STAGES) * weights.BLOCK_K)
            i += 1


@jit_kernel
def four_bit_gmm_kernel(
    x_ptr,  # (M, K), or (T, K)
    order_ptr,  # (M,) or None
    codes_desc,  # (G * rows, columns / 2) uint8
    scale_desc,  # (G * blocks, rows) float32
    shift_desc,  # the same, or None
    table_ptr,  # (16,) float32, or None
    bias_ptr,  # (G, N) or None
    out_desc,  # (M, N), ragged
    group_sizes_ptr,  # (G,)
    M, G, N, K,
    x_stride,  # in units of 16 bytes
    blocks,  # of a row of w
    TOP_K: gl.constexpr, LAYOUT: gl.constexpr, FORMAT: gl.constexpr,
    SHARED: gl.constexpr,  # the layouts of a stage's operands
    BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, STORES: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    w_shape: gl.constexpr = [BLOCK_N, BLOCK_K] if LAYOUT == "rows" else [BLOCK_K, BLOCK_N]
    a = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], SHARED[0])
    b = gl.allocate_shared_memory(dtype, [STAGES] + w_shape, SHARED[1])
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, True, STAGES)
    queue = make_queue(CONSUMERS + 1)
    codes = gl.allocate_shared_memory(gl.uint8, [STAGES] + codes_desc.block_type.shape, codes_desc.layout)
    scale_shape: gl.constexpr = [STAGES] + scale_desc.block_type.shape
    scale = gl.allocate_shared_memory(gl.float32, scale_shape, scale_desc.layout)
    shift = scale
    if shift_desc is not None:
        shift = gl.allocate_shared_memory(gl.float32, scale_shape, scale_desc.layout)
    arrived = make_barriers(STAGES, 1)
    weights = PackedWeights(codes_desc, scale_desc, shift_desc, table_ptr, codes, scale, shift, arrived,
                            N, K, blocks, BLOCK_N, BLOCK_K, LAYOUT, FORMAT)  # fmt: skip
    groups, rows = find_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
    tiles = Tiles(rows, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    scales = Scales(None, 0, 1, None, 0, 1, M, False)
    x = Gather(x_ptr, x_stride, order_ptr, TOP_K, 128 // dtype.primitive_bitwidth)
    gl.warp_specialize(
        [
            (gmm_consumer, (0, weights, ring, tiles, queue, scales, out, out_desc, bias_ptr,
                            BLOCK_M, STORES, True, 0, WIDEST)),
            (gmm_consumer, (1, weights, ring, tiles, queue, scales, out, out_desc, bias_ptr,
                            BLOCK_M, STORES, True, 0, WIDEST)),
            (gather, (x, weights, ring, tiles, groups, queue, BLOCK_M, False)),
            (unpack, (weights, ring, tiles, queue)),
        ],
        [4, 4, 4],
        [160, 48, 136],
    )  # fmt: skip


# launcher


def bind_four_bit_gmm(i) -> Callable:
    (N, K), M, G, block = i.sizes, i.rows, i.packed.shape[0], FORMATS[i.format].block
    c = tuning.lookup("hopper_four_bit", i.x.dtype, M, N, K, G)
    rows, columns = w_box = (c.block_n, c.block_k) if i.transpose else (c.block_k, c.block_n)
    parts, scales = max(columns // block, 1), 2 if i.format == "int4" else 1
    packed_bytes = c.num_stages * rows * (columns // 2 + 4 * parts * scales)
    c = beside_groups(c, c.block_m * c.store_n + packed_bytes // 2, G)
    programs = num_programs(i.x)
    shared = shared_layout(i.x.dtype, c.block_m, c.block_k), shared_layout(i.x.dtype, *w_box)
    kernel = bind_kernel(
        four_bit_gmm_kernel, (programs,), TOP_K=i.top_k, LAYOUT="rows" if i.transpose else "columns",
        FORMAT=i.format, SHARED=shared, STORES=c.block_n // c.store_n,
        BLOCK_G=block_g(G), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    expand = bind_expand_scales(i)
    numbers = M, G, N, K, i.x.stride(0) * i.x.itemsize // 16, i.scales.shape[2]

    def launch(out, i):
        codes = descriptor(i.packed.contiguous().flatten(0, 1), rows, columns // 2)
        scale, shift = (t if t is None else plain_descriptor(t.flatten(0, 1), parts, rows) for t in expand(i))
        order, bias = (None if t is None else t.contiguous() for t in (i.order, i.bias))
        out_desc = ragged_descriptor(out, c.block_m // 2, c.store_n)
        sizes = i.group_sizes.contiguous()
        kernel(i.x, order, codes, scale, shift, i.table, bias, out_desc, sizes, *numbers)

    return launch
