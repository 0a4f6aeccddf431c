"""Grouped and masked grouped matmul on Hopper; see ../grouped/gmm.py and ../grouped/masked_gmm.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from ... import tuning
from ..base.check import take_rows
from ..base.launch import bind_kernel, num_programs
from .epilogue import Scales, multiply_blocks, narrowed, span_of
from .gluon import (
    beside_groups,
    bind_descriptor,
    block_g,
    descriptor,
    fence_async_shared,
    flatten,
    gl,
    gluon,
    jit_kernel,
    kind_of,
    ragged,
    ragged_descriptor,
    store_wait,
    tile_options,
    tma_store,
    weights_descriptor,
    weights_layout,
)
from .pipeline import CONSUMERS, Weights, add_bias, allocate_weights, make_ring, produce
from .schedule import Tiles, find_groups, find_masked_groups, make_queue

# gmm: kernel


@jit_kernel
def gmm_kernel(
    x_desc,  # (M, K)
    w_desc,  # W weights (N, K)
    guests_desc,  # those of the groups from `own` on, or None
    numbers_ptr,  # (G,) the weight of each group, or None
    bias_ptr,  # (G, N) or None
    out_desc,  # (M, N), ragged
    group_sizes_ptr,  # (G,), or with INDPTR where groups end
    starts_ptr,  # (G,) or None: see `group_ends`
    x_scale_ptr,  # (M,) float32 or None
    w_scale_ptr,  # (G, N) float32 or None
    w_scale_stride,  # of its groups
    M, G,
    W,  # or None where a group's weight is its own number
    own, N, K, ZERO_REST: gl.constexpr,
    INDPTR: gl.constexpr,  # group 0 has the rows before the first segment, and no weight
    LAYOUT: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, STORES: gl.constexpr,
    SUMS: gl.constexpr,  # stages that the tensor core sums, or 0: all; and whether scales are of blocks
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    SPAN: gl.constexpr = SUMS[0]
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    b = allocate_weights(STAGES, w_desc, BLOCK_N, BLOCK_K, LAYOUT)
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, False, STAGES)
    queue = make_queue(CONSUMERS)
    weights = Weights(w_desc, guests_desc, own, N, K, BLOCK_N, BLOCK_K, LAYOUT)
    groups, rows = find_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, INDPTR, ZERO_REST, starts_ptr)
    tiles = Tiles(rows, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    scales = Scales(x_scale_ptr, 0, 1, w_scale_ptr, w_scale_stride, 1, M, SUMS[1])
    gl.warp_specialize(
        [
            (gmm_consumer, (0, weights, ring, tiles, queue, scales, out, out_desc, bias_ptr,
                            BLOCK_M, STORES, ZERO_REST, SPAN)),
            (gmm_consumer, (1, weights, ring, tiles, queue, scales, out, out_desc, bias_ptr,
                            BLOCK_M, STORES, ZERO_REST, SPAN)),
            (produce, (x_desc, weights, numbers_ptr, W, ring, tiles, groups, queue, None, INDPTR)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def gmm_consumer(
    CONSUMER: gl.constexpr, weights, ring, tiles, queue, scales,
    out,  # buffers for a block of columns
    out_desc, bias_ptr, BLOCK_M: gl.constexpr, STORES: gl.constexpr, ZERO_REST: gl.constexpr,
    SPAN: gl.constexpr, WIDEST: gl.constexpr = 256,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_M // 2
    WIDTH: gl.constexpr = weights.BLOCK_N // STORES
    i = 0
    for n in range(tiles.mine()):
        group, row, end, tile_n = queue.get(n)
        depth = tiles.used(group, weights.K)
        place = group, row + CONSUMER * HALF, end, tile_n
        accs, i = multiply_blocks(
            CONSUMER, weights, ring, i, depth, scales, place, BLOCK_M, STORES, SPAN, WIDEST
        )
        biased = tiles.used(group, weights.N)  # columns
        if not ZERO_REST:
            end = gl.where(group != tiles.G, end, row)  # so TMA clips the rows in no group, which stay
        for j in gl.static_range(STORES):
            column = tile_n * weights.BLOCK_N + j * WIDTH
            scaled_end = gl.where(group < tiles.G, end, row)
            part = scales.apply(accs[j], group, row + CONSUMER * HALF, scaled_end, column, biased)
            part = add_bias(part, bias_ptr, group * weights.N, column, biased)
            store_wait(pendings=0)
            out.index(CONSUMER).store(part.to(out_desc.dtype).reshape(out_desc.block_type.shape))
            fence_async_shared()
            tma_store(out_desc, ragged(row + CONSUMER * HALF, end, column), out.index(CONSUMER))
    store_wait(pendings=0)


# gmm: launcher


def bind_gmm(i) -> Callable:
    sizes = *i.lhs.shape, i.group_sizes.shape[0]
    product = bind_product(i.lhs, i.rhs, sizes, i.dtype or i.lhs.dtype, programs=i.programs)
    return lambda out, i: product(out, i.lhs, i.rhs, i.group_sizes, i.bias)


def bind_gmm_into(i) -> Callable:
    sizes, dtype = (*i.lhs.shape, i.group_sizes.shape[0]), i.existing_out.dtype
    product = bind_product(i.lhs, i.rhs, sizes, dtype, programs=i.programs, zero_rest=False)
    return lambda out, i: product(out, i.lhs, i.rhs, i.group_sizes, i.bias, starts=i.starts, guests=i.guests)


def bind_product(
    x: Tensor, w: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype,
    *, programs: int = 0, zero_rest: bool = True, indptr: bool = False, blocks: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Return `product(out, x, w, group_sizes, bias, numbers, x_scale, w_scale, starts, guests)` for M, K and
    G of these sizes and a result of this dtype.  x may have other rows than the x that the product is given.

    With `numbers` (G,), group g has the matrix numbers[g] of w (W, K, N), or of zeros where there is none.
    Rows past the groups become zeros, or without `zero_rest` stay as they are.  x and w of 8 bits, the
    latter K-major, have scales in float32, x_scale (M,) and w_scale (G, N), or of `blocks`, as
    `quantize_blocks` returns them.  With `indptr`, `group_sizes` are G rows: where the first group begins,
    and where each ends.
    """
    (M, K, G), (W, _, N) = sizes, w.shape
    c = tuning.lookup("hopper_gmm" + kind_of(x), x.dtype, M, N, K, G)
    c = narrowed(c) if blocks else c
    c = beside_groups(c, c.block_m * c.store_n, G, x.itemsize)
    programs = programs or num_programs(x)
    kernel = bind_kernel(
        gmm_kernel, (programs,), ZERO_REST=zero_rest, INDPTR=indptr, LAYOUT=weights_layout(w),
        STORES=c.block_n // c.store_n, SUMS=(span_of(x, c, dtype, blocks), blocks),
        BLOCK_G=block_g(G), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    rows = bind_descriptor(descriptor, c.block_m, c.block_k)
    own_boxes, guest_boxes = (bind_descriptor(weights_descriptor, c.block_n, c.block_k) for _ in range(2))
    out_rows = bind_descriptor(ragged_descriptor, c.block_m // 2, c.store_n)

    def product(
        out, x, w, group_sizes, bias=None, numbers=None, x_scale=None, w_scale=None, starts=None, guests=None
    ):  # fmt: skip
        kernel(
            rows(x), own_boxes(w), guest_boxes(guests),
            None if numbers is None else numbers.contiguous(), None if bias is None else bias.contiguous(),
            out_rows(out), group_sizes.contiguous(),
            starts, x_scale, w_scale, 0 if w_scale is None else w_scale.stride(0),
            M, G, None if numbers is None and not indptr else W, W, N, K,
        )  # fmt: skip

    return product


def bind_segments(i, zero_rest: bool) -> Callable:
    """`i`: the inputs of `segment_gmm` or of `segment_gmm_out`."""
    indptr = i.indptr is not None
    bounds = i.indptr if indptr else i.lens
    sizes = *i.x.shape, bounds.shape[0]
    product = bind_product(i.x, i.w, sizes, i.x.dtype, zero_rest=zero_rest, indptr=indptr)
    return lambda out, i: product(out, i.x, i.w, i.indptr if indptr else i.lens, None, i.weight_indices)


def bind_scaled_gmm(i, blocks: bool = False, zero_rest: bool = True) -> Callable:
    """`i`: the inputs of `scaled_gmm`, or with `blocks` of `gmm_fp8`."""
    (G, K, _), M = i.w.shape, i.x.shape[0] if i.order is None else i.order.shape[0]
    how, top_k = {"zero_rest": zero_rest, "blocks": blocks}, i.top_k
    product = bind_product(i.x, i.w, (M, K, G), i.dtype, **how)

    def launch(out, i):
        # words of eight bytes are copied faster than bytes
        rows = take_rows(i.x.view(torch.int64), i.order, top_k).view(i.x.dtype)
        x_scale = None if i.x_scale is None else take_rows(i.x_scale, i.order, top_k).contiguous()
        w_scale = None if i.w_scale is None else i.w_scale.contiguous()
        product(out, rows, i.w, i.group_sizes, i.bias, None, x_scale, w_scale)

    return launch


# masked_gmm: kernel


@jit_kernel
def masked_gmm_kernel(
    x_desc,  # groups of M rows, (M, K), x_rows apart
    x_rows,
    w_desc,  # (G, N, K)
    out_desc,  # groups (M, N), out_rows apart, ragged
    out_rows,
    x_scale_ptr,  # (G, M) float32, or None
    w_scale_ptr,  # (G, N) float32, or None
    x_scale_strides,  # g, m
    w_scale_strides,  # g, n
    bias_ptr,  # (N,) for every group, or None
    group_sizes_ptr,  # (G,), or None where every row counts
    G, M, N, K,
    SPAN: gl.constexpr,  # stages that the tensor core sums, or 0: all
    BLOCK_G: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, STORES: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    a = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    b = allocate_weights(STAGES, w_desc, BLOCK_N, BLOCK_K, "rows")
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    ring = make_ring(a, b, False, STAGES)
    queue = make_queue(CONSUMERS)
    weights = Weights(w_desc, None, G, N, K, BLOCK_N, BLOCK_K, "rows")
    scales = Scales(x_scale_ptr, x_scale_strides[0], x_scale_strides[1],
                    w_scale_ptr, w_scale_strides[0], w_scale_strides[1], M, False)  # fmt: skip
    groups, rows = find_masked_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
    tiles = Tiles(rows, gl.cdiv(N, BLOCK_N), G, GROUP_M, PROGRAMS)
    gap = out_rows - M
    gl.warp_specialize(
        [
            (masked_consumer, (0, weights, ring, tiles, queue, scales, bias_ptr, out, out_desc, gap,
                               BLOCK_M, STORES, SPAN)),
            (masked_consumer, (1, weights, ring, tiles, queue, scales, bias_ptr, out, out_desc, gap,
                               BLOCK_M, STORES, SPAN)),
            (produce, (x_desc, weights, None, None, ring, tiles, groups, queue, x_rows - M)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def masked_consumer(
    CONSUMER: gl.constexpr, weights, ring, tiles, queue, scales, bias_ptr,
    out,  # buffers for a block of columns
    out_desc,
    gap,  # rows of out between two groups
    BLOCK_M: gl.constexpr, STORES: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = weights.BLOCK_N // STORES
    i = 0
    for n in range(tiles.mine()):
        group, first, end, tile_n = queue.get(n)
        row = first + CONSUMER * (BLOCK_M // 2)
        place, depth = (group, row, end, tile_n), weights.K
        accs, i = multiply_blocks(CONSUMER, weights, ring, i, depth, scales, place, BLOCK_M, STORES, SPAN)
        for j in gl.static_range(STORES):
            column = tile_n * weights.BLOCK_N + j * WIDTH
            first_row = group * scales.M
            part = scales.apply(accs[j], group, row - first_row, end - first_row, column, weights.N)
            part = add_bias(part, bias_ptr, 0, column, weights.N)
            store_wait(pendings=0)
            out.index(CONSUMER).store(part.to(out_desc.dtype).reshape(out_desc.block_type.shape))
            fence_async_shared()
            tma_store(out_desc, ragged(row + group * gap, end + group * gap, column), out.index(CONSUMER))
    store_wait(pendings=0)


# masked_gmm: launcher


def bind_masked_gmm(i) -> Callable:
    product = bind_masked(i.x, i.w, i.x_scale, i.w_scale, i.out.dtype)
    return lambda out, i: product(out, i.x, i.w, i.x_scale, i.w_scale, i.group_sizes)


def bind_scaled_gemm(i) -> Callable:
    """Bind the product as one group in which every row counts."""
    product = bind_masked(*one_group(i), i.dtype)
    return lambda out, i: product(out[None], *one_group(i), None, i.bias)


def one_group(i) -> list[Tensor | None]:
    return [None if t is None else t[None] for t in (i.x, i.w.mT, i.x_scale, i.w_scale)]


def bind_masked(
    x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None, dtype: torch.dtype
) -> Callable[..., None]:
    """Return `product(out, x, w, x_scale, w_scale, group_sizes, bias)` for a result of this dtype."""
    (G, M, K), N = x.shape, w.shape[1]
    plain = dtype.itemsize == 4 or (x_scale is None and w_scale is None)
    op = "hopper_masked" + kind_of(x)
    op += "_plain" if op.endswith("fp8") and plain else ""
    c = tuning.lookup(op, x.dtype, G * M, N, K, G)
    c = beside_groups(c, c.block_m * c.store_n * dtype.itemsize // 2, G, x.itemsize)
    programs = num_programs(x)
    kernel = bind_kernel(
        masked_gmm_kernel, (programs,), SPAN=span_of(x, c, dtype), STORES=c.block_n // c.store_n,
        BLOCK_G=block_g(G), PROGRAMS=programs, **tile_options(c),
    )  # fmt: skip
    strides = [(0, 0) if s is None else s.stride() for s in (x_scale, w_scale)]

    def product(out, x, w, x_scale, w_scale, group_sizes, bias=None):
        (x, x_rows), (flat, out_rows) = flatten(x), flatten(out)
        kernel(
            descriptor(x, c.block_m, c.block_k), x_rows,
            weights_descriptor(w.mT, c.block_n, c.block_k),
            ragged_descriptor(flat, c.block_m // 2, c.store_n), out_rows,
            x_scale, w_scale, *strides, None if bias is None else bias.contiguous(),
            None if group_sizes is None else group_sizes.contiguous(), G, M, N, K,
        )  # fmt: skip

    return product
