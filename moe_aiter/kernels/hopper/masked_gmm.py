"""Masked grouped matmul on Hopper; see ../masked_gmm.py."""

from torch import Tensor

from ... import tuning
from .._triton import num_programs
from ._fp8 import Scales, multiply_parts, span_of
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
from ._launch import beside_groups, block_g, flatten, kind_of, tile_options
from ._pipeline import CONSUMERS, Weights, add_bias, make_ring, produce
from ._schedule import Tiles, find_masked_groups, make_places


@jit_kernel
def masked_gmm_kernel(
    x_desc,  # groups of M rows, (M, K), x_rows apart
    x_rows,
    w_desc,  # groups (N, K), w_rows apart
    w_rows,
    out_desc,  # groups (M, N), out_rows apart, ragged
    out_rows,
    x_scale_ptr,  # (G, M) float32, or None
    w_scale_ptr,  # (G, N) float32, or None
    x_scale_strides,  # g, m
    w_scale_strides,  # g, n
    bias_ptr,  # (N,) for every group, or None
    group_sizes_ptr,  # (G,), or None where every row counts
    G,
    M,
    N,
    K,
    SPAN: gl.constexpr,  # stages that the tensor core sums, or 0: all
    BLOCK_G: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    STORES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    b = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, False, STAGES)
    places = make_places(CONSUMERS)
    weights = Weights(w_desc, N, K, BLOCK_N, BLOCK_K, "rows", w_rows)
    scales = Scales(x_scale_ptr, x_scale_strides[0], x_scale_strides[1],
                    w_scale_ptr, w_scale_strides[0], w_scale_strides[1], M)  # fmt: skip
    groups, rows = find_masked_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
    tiles = Tiles(rows, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    gap = out_rows - M
    gl.warp_specialize(
        [
            (masked_consumer, (0, weights, ring, tiles, places, scales, bias_ptr, out, out_desc, gap,
                               BLOCK_M, STORES, SPAN)),
            (masked_consumer, (1, weights, ring, tiles, places, scales, bias_ptr, out, out_desc, gap,
                               BLOCK_M, STORES, SPAN)),
            (produce, (x_desc, weights, None, None, ring, tiles, groups, places, x_rows - M)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def masked_consumer(
    WHO: gl.constexpr,
    weights,
    ring,
    tiles,
    places,
    scales,
    bias_ptr,
    out,  # buffers for a block of columns
    out_desc,
    gap,  # rows of out between two groups
    BLOCK_M: gl.constexpr,
    STORES: gl.constexpr,
    SPAN: gl.constexpr,
):
    WIDTH: gl.constexpr = weights.BLOCK_N // STORES
    i = 0
    for n in range(tiles.mine()):
        group, first, end, tile_n = places.get(n)
        row = first + WHO * (BLOCK_M // 2)
        parts, i = multiply_parts(WHO, weights, ring, i, weights.K, BLOCK_M, STORES, SPAN)
        for j in gl.static_range(STORES):
            column = tile_n * weights.BLOCK_N + j * WIDTH
            first_row = group * scales.M
            part = scales.apply(parts[j], group, row - first_row, end - first_row, column, weights.N)
            part = add_bias(part, bias_ptr, 0, column, weights.N)
            store_wait(pendings=0)
            out.index(WHO).store(part.to(out_desc.dtype).reshape(out_desc.block_type.shape))
            fence_async_shared()
            tma_store(out_desc, ragged(row + group * gap, end + group * gap, column), out.index(WHO))
    store_wait(pendings=0)


# launcher


def launch_masked_gmm(
    out: Tensor, x: Tensor, w: Tensor, group_sizes: Tensor | None,
    x_scale: Tensor | None, w_scale: Tensor | None, shuffled: bool, bias: Tensor | None = None,
) -> None:  # fmt: skip
    (G, M, N), K = out.shape, x.shape[2]
    plain = out.itemsize == 4 or (x_scale is None and w_scale is None)
    op = "hopper_masked" + kind_of(x)
    op += "_plain" if op.endswith("fp8") and plain else ""
    c = tuning.lookup(op, x.dtype, G * M, N, K, G)
    c = beside_groups(c, c.block_m * c.store_n * out.itemsize // 2, G, x.itemsize)
    (x, x_rows), (w, w_rows), (flat, out_rows) = map(flatten, (x, w, out))
    scales = [(0, 0) if s is None else s.stride() for s in (x_scale, w_scale)]
    programs = num_programs(x)
    masked_gmm_kernel[(programs,)](
        descriptor(x, c.block_m, c.block_k), x_rows,
        descriptor(w, c.block_n, c.block_k), w_rows,
        ragged_descriptor(flat, c.block_m // 2, c.store_n), out_rows,
        x_scale, w_scale, *scales, None if bias is None else bias.contiguous(),
        None if group_sizes is None else group_sizes.contiguous(),
        G, M, N, K,
        SPAN=span_of(x, c, out), STORES=c.block_n // c.store_n,
        BLOCK_G=block_g(G), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip


def launch_scaled_gemm(
    out: Tensor, x: Tensor, w: Tensor,
    x_scale: Tensor | None, w_scale: Tensor | None, bias: Tensor | None, dtype,
) -> None:  # fmt: skip
    """One group of which every row counts."""
    scales = (None if s is None else s[None] for s in (x_scale, w_scale))
    launch_masked_gmm(out[None], x[None], w.mT[None], None, *scales, False, bias)
