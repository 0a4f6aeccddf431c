"""Grouped matmul on Hopper; see ../gmm.py."""

from torch import Tensor

from ... import tuning
from ._gluon import (
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    jit_kernel,
    ragged,
    ragged_descriptor,
    store_wait,
    tma_store,
)  # fmt: skip
from ._launch import num_programs, tile_options
from ._pipeline import CONSUMERS, Weights, add_bias, blocks, make_ring, multiply, produce
from ._schedule import all_tiles, make_schedule


@jit_kernel
def gmm_kernel(
    x_desc,  # (M, K)
    w_desc,  # W weights (N, K), that many rows apart
    group_rows,
    numbers_ptr,  # (G,) the weight of each group, or None
    bias_ptr,  # (G, N) or None
    out_desc,  # (M, N), ragged
    schedule_ptr,
    G,
    W,
    N,
    K,
    LAYOUT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    STORES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    b = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    out = gl.allocate_shared_memory(x_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, False, STAGES)
    weights = Weights(w_desc, N, K, BLOCK_N, BLOCK_K, LAYOUT, group_rows)
    tiles = all_tiles(schedule_ptr, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    gl.warp_specialize(
        [
            (gmm_consumer, (0, weights, ring, tiles, out, out_desc, bias_ptr, BLOCK_M, STORES)),
            (gmm_consumer, (1, weights, ring, tiles, out, out_desc, bias_ptr, BLOCK_M, STORES)),
            (produce, (x_desc, weights, numbers_ptr, W, ring, tiles)),
        ],
        [4, 4],
        [232, 40],
    )


@gluon.jit
def gmm_consumer(
    WHO: gl.constexpr,
    weights,
    ring,
    tiles,
    out,  # buffers for a block of columns
    out_desc,
    bias_ptr,
    BLOCK_M: gl.constexpr,
    STORES: gl.constexpr,
):
    HALF: gl.constexpr = BLOCK_M // 2
    WIDTH: gl.constexpr = weights.BLOCK_N // STORES
    i = 0
    next_group, next_row, next_end = tiles.peek(gl.program_id(0))
    for tile in range(gl.program_id(0), tiles.rows * tiles.columns, tiles.PROGRAMS):
        _, tile_n = tiles.place(tile)
        group, row, end = next_group, next_row, next_end
        next_group, next_row, next_end = tiles.peek(tile + tiles.PROGRAMS)
        acc, i = multiply(WHO, weights, ring, i, BLOCK_M, None)
        parts = blocks(acc, STORES)
        for j in gl.static_range(STORES):
            column = tile_n * weights.BLOCK_N + j * WIDTH
            part = add_bias(parts[j], bias_ptr, group * weights.N, column, weights.N)
            store_wait(pendings=0)
            out.index(WHO).store(part.to(out_desc.dtype).reshape(out_desc.block_type.shape))
            fence_async_shared()
            tma_store(out_desc, ragged(row + WHO * HALF, end, column), out.index(WHO))
    store_wait(pendings=0)


# launcher


def launch_gmm(
    out: Tensor,
    x: Tensor,
    w: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None,
    numbers: Tensor | None = None,
    zero_rest: bool = True,
) -> None:
    """With `numbers` (G,), group g has the matrix numbers[g] of w (W, K, N), or of zeros where there is none.

    Rows past the groups become zeros, or without `zero_rest` stay as they are.
    """
    (M, K), (W, _, N), G = x.shape, w.shape, group_sizes.shape[0]
    rows = w.stride(2) != 1
    matrices = w.mT if rows else w
    row = matrices.stride(1)
    group_rows = matrices.stride(0) // row if W > 1 else matrices.shape[1]  # before the first nothing lies
    height = (W - 1) * group_rows + matrices.shape[1]
    flat = matrices.as_strided((height, matrices.shape[2]), (row, 1))
    c = tuning.lookup("hopper_gmm", x.dtype, M, N, K, G)
    schedule = make_schedule(group_sizes, M, c.block_m, *([out] if zero_rest else []))
    programs = num_programs(x)
    gmm_kernel[(programs,)](
        descriptor(x, c.block_m, c.block_k),
        descriptor(flat, *((c.block_n, c.block_k) if rows else (c.block_k, c.block_n))),
        group_rows,
        None if numbers is None else numbers.contiguous(),
        None if bias is None else bias.contiguous(),
        ragged_descriptor(out, c.block_m // 2, c.store_n),
        schedule, G, W, N, K,
        LAYOUT="rows" if rows else "columns", STORES=c.block_n // c.store_n,
        PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
