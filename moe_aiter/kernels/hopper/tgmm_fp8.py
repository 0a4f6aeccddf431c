"""Gradients of weights from 8-bit rows on Hopper: see ../tgmm_fp8.py, and ../token_chunks.py for operands.

A stage is one chunk of rows: the tensor core sums it, and float32 adds that sum times the scales of the
chunk, one for each row of the result, so that to promote sums and to scale them is one instruction.
"""

from ... import tuning
from .._triton import num_programs
from ._gluon import (
    Number,
    aggregate,
    descriptor,
    gl,
    gluon,
    jit_kernel,
    mbarrier,
    store_wait,
    tma,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)  # fmt: skip
from ._launch import tile_options
from ._pipeline import CONSUMERS, blocks, make_ring
from ._schedule import Tiles, make_places
from .tgmm import Output, Strides, deal


@aggregate
class Chunks:
    """Both operands by columns, chunk after chunk, and where those of each group are."""

    a_desc: tma.tensor_descriptor  # (C * M, CHUNK)
    b_desc: tma.tensor_descriptor  # (C * N, CHUNK)
    scale_ptr: gl.tensor  # (C, M) float32, of a
    places_ptr: gl.tensor  # (G, 3): group, first chunk, end
    M: Number
    N: Number

    @gluon.jit
    def of_place(self, place):
        ptr = self.places_ptr + 3 * place
        return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2)

    @gluon.jit
    def scales(self, chunk, m, end):
        """Those of the rows m of the result in a chunk, if it lies before `end`."""
        return gl.load(self.scale_ptr + chunk * self.M + m, mask=(m < self.M) & (chunk < end), other=0.0)


@gluon.jit
def chunk_producer(chunks, ring, places, tiles):
    BLOCK_M: gl.constexpr = ring.a.shape[1]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    per_group = tiles.rows * tiles.columns
    count = tiles.G * per_group
    i = 0
    for turn in range(gl.program_id(0), count, tiles.PROGRAMS):
        tile = deal(turn, count, tiles.PROGRAMS)
        tile_m, tile_n = tiles.place(tile % per_group)
        group, first, end = chunks.of_place(tile // per_group)
        places.put(turn // tiles.PROGRAMS, group, first, end, tile_n)
        for chunk in range(first, end):
            ring.wait_empty(i)
            ready = ring.ready.index(i % ring.STAGES)
            mbarrier.expect(ready, chunks.a_desc.block_type.nbytes + chunks.b_desc.block_type.nbytes)
            # past the last column lie others, whose sums nobody stores
            a, b = chunk * chunks.M + tile_m * BLOCK_M, chunk * chunks.N + tile_n * BLOCK_N
            tma_load(chunks.a_desc, [a, 0], ready, ring.a.index(i % ring.STAGES))
            tma_load(chunks.b_desc, [b, 0], ready, ring.b.index(i % ring.STAGES))
            i += 1


@gluon.jit
def add_chunk(sums, ring, i, scale, WHO: gl.constexpr):
    """Add the product of the chunk in stage i, times the scales of its rows, to blocks of columns."""
    HALF: gl.constexpr = ring.a.shape[1] // 2
    WIDTH: gl.constexpr = sums[0].shape[1]
    layout: gl.constexpr = sums[0].type.layout
    zeros = gl.zeros((HALF, WIDTH), gl.float32, layout=layout)
    ring.wait_ready(i)
    a = ring.a.index(i % ring.STAGES).slice(WHO * HALF, HALF, 0)
    out = ()
    for j in gl.static_range(len(sums)):
        b = ring.b.index(i % ring.STAGES).slice(j * WIDTH, WIDTH, 0).permute((1, 0))
        part = warpgroup_mma(a, b, warpgroup_mma_init(zeros), use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        if j == len(sums) - 1:
            ring.release(i)
        out = out + (sums[j] + part * scale[:, None],)
    return out


@gluon.jit
def chunk_consumer(
    WHO: gl.constexpr, chunks, ring, places, tiles, out, WIDTH: gl.constexpr, STORE_N: gl.constexpr
):
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
        tile_m, _ = tiles.place(deal(turn, count, tiles.PROGRAMS) % per_group)
        group, first, end, tile_n = places.get(turn // tiles.PROGRAMS)
        m = tile_m * BLOCK_M + WHO * HALF
        rows = m + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        zeros = gl.zeros((HALF, WIDTH), gl.float32, layout=layout)
        sums = ()
        for _ in gl.static_range(BLOCK_N // WIDTH):
            sums = sums + (zeros,)
        next_scale = chunks.scales(first, rows, end)
        for chunk in range(first, end):
            scale, next_scale = next_scale, chunks.scales(chunk + 1, rows, end)  # a chunk ahead
            sums = add_chunk(sums, ring, i, scale, WHO)
            i += 1
        SPLIT: gl.constexpr = WIDTH // STORE_N
        for j in gl.static_range(BLOCK_N // WIDTH):
            parts = blocks(sums[j], SPLIT)
            for s in gl.static_range(SPLIT):
                n = tile_n * BLOCK_N + (j * SPLIT + s) * STORE_N
                out.put(parts[s], WHO, group, m, n, TURN=j * SPLIT + s)
    store_wait(pendings=0)


@jit_kernel
def tgmm_fp8_kernel(
    a_desc,  # (C * M, CHUNK)
    b_desc,  # (C * N, CHUNK)
    scale_ptr,  # (C, M) float32, of a
    places_ptr,  # (G, 3)
    out_desc,  # (G, M, N), or (G, N, M) where columns come first; not used to accumulate
    out_ptr,  # (G, M, N)
    G,
    M,
    N,
    out_strides,  # g, m, n
    COLUMNS_FIRST: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,  # a chunk
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
    STORE_N: gl.constexpr,
    BUFFERS: gl.constexpr,  # of a consumer, that one is filled while another is stored
    PROGRAMS: gl.constexpr,
):
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    buffers = a
    if not ACCUMULATE:
        buffers = gl.allocate_shared_memory(
            out_desc.dtype, [BUFFERS * CONSUMERS] + out_desc.block_type.shape, out_desc.layout
        )
    ring = make_ring(a, b, False, STAGES)
    places = make_places(CONSUMERS)
    chunks = Chunks(a_desc, b_desc, scale_ptr, places_ptr, M, N)
    strides = Strides(out_strides[0], out_strides[1], out_strides[2])
    out = Output(out_desc, buffers, out_ptr, strides, M, N, COLUMNS_FIRST, ACCUMULATE)
    tiles = Tiles(gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    gl.warp_specialize(
        [
            (chunk_consumer, (0, chunks, ring, places, tiles, out, WIDTH, STORE_N)),
            (chunk_consumer, (1, chunks, ring, places, tiles, out, WIDTH, STORE_N)),
            (chunk_producer, (chunks, ring, places, tiles)),
        ],
        [4, 4],
        [232, 40],
    )


# launcher


def launch_tgmm_fp8(out, x8, y8, y_scale, places, accumulate: bool) -> None:
    """out[g] (M, N) = the sum over a group's rows of y outer x, of which y8 (C, M, CHUNK) has the scales
    y_scale (C, M) and x8 (C, N, CHUNK) none; added to what is there, if asked."""
    (G, M, N), chunk = out.shape, y8.shape[2]
    op = "hopper_tgmm_accumulate_fp8" if accumulate else "hopper_tgmm_fp8"
    c = tuning.lookup(op, y8.dtype, y8.shape[0] * chunk, N, M, G)
    half, width = c.block_m // 2, c.store_n
    columns_first = out.stride(2) != 1
    stored = out.mT if columns_first else out
    a_desc = descriptor(y8.view(-1, chunk), c.block_m, c.block_k)
    out_desc = (
        a_desc if accumulate else descriptor(stored, 1, *((width, half) if columns_first else (half, width)))
    )
    programs = num_programs(y8)
    tgmm_fp8_kernel[(programs,)](
        a_desc, descriptor(x8.view(-1, chunk), c.block_n, c.block_k), y_scale, places, out_desc, out,
        G, M, N, out.stride(), COLUMNS_FIRST=columns_first and not accumulate, ACCUMULATE=accumulate,
        WIDTH=min(c.block_n, 128), STORE_N=width, BUFFERS=1 if c.block_n // width % 2 else 2,
        PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
