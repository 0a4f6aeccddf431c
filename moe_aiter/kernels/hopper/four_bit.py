"""Grouped matmul with weights of 4 bits on Hopper; see ../grouped/four_bit.py.

The consumers are those of `gmm`.  The producer loads packed words instead of weights, and writes the tile of
the weight in 16 bits into the ring.  For each block of a row of w it rounds the 16 numbers that the block can
hold, once, and keeps them in eight registers: four with the low bytes, four with the high bytes.  A number is
then looked up by `prmt`, which takes four bytes out of eight, so float32 is needed for 16 numbers of a block
only, and each number is rounded as `dequantized` rounds it.
"""

from collections.abc import Callable

import torch

from ... import tuning
from ..base.launch import bind_kernel, num_programs
from ..quantize.four_bit import CODES, FORMATS, bind_expand_scales
from .epilogue import Scales
from .gluon import (
    Number,
    aggregate,
    as_tile,
    beside_groups,
    block_g,
    fence_async_shared,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    ragged_descriptor,
    row_load,
    rows_arrive,
    shared_layout,
    tile_options,
)
from .gmm import gmm_consumer
from .pipeline import CONSUMERS, Gather, make_ring
from .schedule import Tiles, find_groups, make_queue

NUMBERS = gl.constexpr(8)  # of 4 bits in a word
ALIGNED = gl.constexpr(4)  # words in 16 bytes


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
def piece_layout(ROWS, PARTS, WORDS):
    """Give each thread a block's words of a row, and neighbouring threads neighbouring rows."""
    across = min(PARTS, 4)
    return gl.BlockedLayout([1, 1, WORDS], [32, 1, 1], [4 // across, across, 1], [2, 1, 0])


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
    """The second operand, weights of 4 bits, where `Weights` has a descriptor."""

    words_ptr: gl.tensor  # (G, rows, columns / 8) int32
    scale_ptr: gl.tensor  # (G, blocks, rows) float32
    shift_ptr: object  # the same, or None
    table_ptr: object  # (16,) float32 of NF4, or None
    N: Number
    K: Number
    lines: Number  # 16 bytes each, of a row of words, so that the compiler sees that rows are aligned
    blocks: Number  # of a row
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    LAYOUT: gl.constexpr  # as in Weights: rows (N, K) or columns (K, N)
    FORMAT: gl.constexpr

    @gluon.jit
    def view(self, b, FLAT: gl.constexpr):
        return b if self.LAYOUT == "columns" else b.permute((1, 0))

    @gluon.jit
    def load(self, group, tile_n, k):
        """The words of a tile (ROWS, PARTS, WORDS), and the scales and shifts of its parts (ROWS, PARTS).

        Rows and columns past the end are others', whose products are never stored.
        """
        ACROSS: gl.constexpr = self.LAYOUT == "columns"
        ROWS: gl.constexpr = self.BLOCK_K if ACROSS else self.BLOCK_N
        COLUMNS: gl.constexpr = self.BLOCK_N if ACROSS else self.BLOCK_K
        PART: gl.constexpr = min(block_of(self.FORMAT), 64)
        WORDS: gl.constexpr = PART // NUMBERS
        PARTS: gl.constexpr = COLUMNS // PART
        layout: gl.constexpr = piece_layout(ROWS, PARTS, WORDS)
        of_parts: gl.constexpr = gl.SliceLayout(2, layout)
        rows = self.K if ACROSS else self.N
        first_column = tile_n * self.BLOCK_N if ACROSS else k
        row = (k if ACROSS else tile_n * self.BLOCK_N) + gl.arange(0, ROWS, gl.SliceLayout(1, of_parts))
        column = first_column + PART * gl.arange(0, PARTS, gl.SliceLayout(0, of_parts))
        if ACROSS:
            column = gl.where(column < self.N, column, 0)
        else:
            row = gl.where(row < rows, row, 0)
        line = column // (NUMBERS * ALIGNED)
        at = gl.expand_dims(row, 1) * self.lines + gl.expand_dims(line, 0)
        word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
        word = gl.expand_dims(gl.expand_dims(word, 0), 0)
        base = self.words_ptr + group.to(gl.int64) * rows * self.lines * ALIGNED
        words = gl.load(base + (gl.expand_dims(at, 2) * ALIGNED + word))
        scales = gl.expand_dims(row, 1) + gl.expand_dims(column // block_of(self.FORMAT), 0) * rows
        first = group.to(gl.int64) * self.blocks * rows
        scale = gl.load(self.scale_ptr + first + scales)
        shift = scale
        if self.shift_ptr is not None:
            shift = gl.load(self.shift_ptr + first + scales)
        return words, scale, shift

    @gluon.jit
    def pair(self, j: gl.constexpr, scale, shift, DTYPE: gl.constexpr):
        """The numbers that the codes 2 j and 2 j + 1 stand for in each block, in a word."""
        if self.table_ptr is not None:
            first = gl.load(self.table_ptr + 2 * j) * scale
            second = gl.load(self.table_ptr + 2 * j + 1) * scale
        else:
            first, second = value_of(self.FORMAT, 2 * j) * scale, value_of(self.FORMAT, 2 * j + 1) * scale
        if self.shift_ptr is not None:
            first, second = first + shift, second + shift
        return gl.expand_dims(round_pair(first, second, DTYPE), 2)

    @gluon.jit
    def write(self, b, words, scale, shift):
        """Write the tile of the weight into a buffer of the ring."""
        DTYPE: gl.constexpr = b.dtype
        low, high = (), ()
        for j in gl.static_range(4):
            first, second = self.pair(2 * j, scale, shift, DTYPE), self.pair(2 * j + 1, scale, shift, DTYPE)
            low = low + (take_bytes(first, second, 0x6420),)
            high = high + (take_bytes(first, second, 0x7531),)
        code, upper = words & 0x77777777, ((words >> 1) & 0x44444444) | 0x32103210
        a0, a1 = self.numbers(low, high, code, upper)
        a2, a3 = self.numbers(low, high, code >> 16, upper >> 16)
        pairs = gl.join(gl.join(a0, a2), gl.join(a1, a3))
        ROWS: gl.constexpr = words.shape[0]
        WIDTH: gl.constexpr = words.shape[1] * words.shape[2] * 4
        shape: gl.constexpr = [ROWS, WIDTH]
        layout: gl.constexpr = gl.NVMMASharedLayout(b.layout.swizzle_byte_width, 32, 2)
        as_tile(b, shape, layout, gl.int32).store(gl.reshape(pairs, shape))

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
def unpack(x, weights, ring, tiles, groups, queue, BLOCK_M: gl.constexpr):
    """Fetch rows from where they are, and weights, one step ahead; see `gather` of the pipeline."""
    LANES: gl.constexpr = weights.BLOCK_K // x.VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, x.VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, weights.BLOCK_K, layout=gl.SliceLayout(0, layout))
    i = 0
    for n in range(tiles.mine()):
        group, row, end, tile_n = groups.find(tiles, n)
        queue.put(n, group, row, end, tile_n)
        offsets = x.sources(row + m, tiles.used(group, end))[:, None] + columns[None, :]
        depth = tiles.used(group, weights.K)
        expert = gl.minimum(group, tiles.G - 1)
        words, scale, shift = weights.load(expert, tile_n, 0)
        for k in range(0, depth, weights.BLOCK_K):
            ring.wait_empty(i)
            ready = ring.ready.index(i % ring.STAGES)
            row_load(ring.a.index(i % ring.STAGES), x.x_ptr + k + offsets)
            rows_arrive(ready, increment_count=False)
            ahead = weights.load(expert, tile_n, gl.minimum(k + weights.BLOCK_K, depth - weights.BLOCK_K))
            weights.write(ring.b.index(i % ring.STAGES), words, scale, shift)
            fence_async_shared()
            mbarrier.arrive(ready, count=1)
            words, scale, shift = ahead
            i += 1


@jit_kernel
def four_bit_gmm_kernel(
    x_ptr,  # (M, K), or (T, K)
    order_ptr,  # (M,) or None
    words_ptr,  # (G, rows, columns / 8) int32
    scale_ptr,  # (G, blocks, rows) float32
    shift_ptr,  # (G, blocks, rows) float32, or None
    table_ptr,  # (16,) float32, or None
    bias_ptr,  # (G, N) or None
    out_desc,  # (M, N), ragged
    group_sizes_ptr,  # (G,)
    M,
    G,
    N,
    K,
    x_stride,  # in units of 16 bytes
    lines,  # of a row of w, 16 bytes each
    blocks,  # of a row of w
    TOP_K: gl.constexpr,
    LAYOUT: gl.constexpr,
    FORMAT: gl.constexpr,
    SHARED: gl.constexpr,  # the layouts of a stage's operands
    BLOCK_G: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    STORES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    w_shape: gl.constexpr = [BLOCK_N, BLOCK_K] if LAYOUT == "rows" else [BLOCK_K, BLOCK_N]
    a = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], SHARED[0])
    b = gl.allocate_shared_memory(dtype, [STAGES] + w_shape, SHARED[1])
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, True, STAGES)
    queue = make_queue(CONSUMERS)
    weights = PackedWeights(words_ptr, scale_ptr, shift_ptr, table_ptr, N, K, lines, blocks,
                            BLOCK_N, BLOCK_K, LAYOUT, FORMAT)  # fmt: skip
    groups, rows = find_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
    tiles = Tiles(rows, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    scales = Scales(None, 0, 1, None, 0, 1, M)
    x = Gather(x_ptr, x_stride, order_ptr, TOP_K, 128 // dtype.primitive_bitwidth)
    gl.warp_specialize(
        [
            (gmm_consumer, (0, weights, ring, tiles, queue, scales, out, out_desc, bias_ptr,
                            BLOCK_M, STORES, True, 0)),
            (gmm_consumer, (1, weights, ring, tiles, queue, scales, out, out_desc, bias_ptr,
                            BLOCK_M, STORES, True, 0)),
            (unpack, (x, weights, ring, tiles, groups, queue, BLOCK_M)),
        ],
        [4, 4],
        [184, 136],
    )  # fmt: skip


# launcher


def bind_four_bit_gmm(i) -> Callable:
    (N, K), M, G = i.sizes, i.rows, i.packed.shape[0]
    c = tuning.lookup("hopper_four_bit", i.x.dtype, M, N, K, G)
    c = beside_groups(c, c.block_m * c.store_n, G)
    programs = num_programs(i.x)
    w_box = (c.block_n, c.block_k) if i.transpose else (c.block_k, c.block_n)
    shared = shared_layout(i.x.dtype, c.block_m, c.block_k), shared_layout(i.x.dtype, *w_box)
    kernel = bind_kernel(
        four_bit_gmm_kernel, (programs,), TOP_K=i.top_k, LAYOUT="rows" if i.transpose else "columns",
        FORMAT=i.format, SHARED=shared, STORES=c.block_n // c.store_n,
        BLOCK_G=block_g(G), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    expand = bind_expand_scales(i)
    numbers = M, G, N, K, i.x.stride(0) * i.x.itemsize // 16, i.packed.shape[2] // 16, i.scales.shape[2]

    def launch(out, i):
        words = i.packed.contiguous().view(torch.int32)
        order, bias = (None if t is None else t.contiguous() for t in (i.order, i.bias))
        out_desc = ragged_descriptor(out, c.block_m // 2, c.store_n)
        kernel(i.x, order, words, *expand(i), i.table, bias, out_desc, i.group_sizes.contiguous(), *numbers)

    return launch
