"""Segment matmul: `out[s:e] = x[s:e] @ w[weight_indices[i]]` for each segment i, whose rows are [s, e).

M rows, B segments, W weights, K in, N out.  The kernel finds the weight itself; no weight is copied.  As in
`gmm`, strides say the layout.  There are two kernels.  If K is short (a LoRA's expansion), a program keeps
its rows and walks over columns.  Else a program makes one tile, or if there are few tiles (a LoRA's shrinking
to its rank) a part of the tile's sum over K; the parts are added in order.

`segment_tgmm` is the gradient of the weights: `out[i] = sum of x[s:e].T @ y[s:e]` over weight i's segments.

Segments lie one behind the other.  Either `lens` (B,) counts their rows from row 0 on, or `indptr` (B + 1,)
says where each begins and where the last one ends; rows before its first element are in no segment.  Both
stay on the device.  Lengths (the steps of an indptr) and the first element are clamped to [0, M], and
segments to the rows that are left: no row belongs to two segments, and no kernel touches memory outside of
the M rows.  `weight_indices` (B,) names the matrix of each segment, by default the one with the segment's
number; an index outside of [0, W), usually -1, names a matrix of zeros.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ... import tuning
from ...op import INTEGERS, define_inplace_op, define_op, takes
from .. import hopper
from ..base.check import FLOATS, check_device, check_float, check_index, check_shape, check_size, group_ends
from ..base.launch import cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES, at_least_16, dense, multiply, operand, row_tiles, swizzle, tile_options
from .tgmm import chosen, weight_gradient

# segments


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
ENOUGH = 256  # programs that keep a GPU busy, two for each SM of an H200
Segments = tuple[Tensor | None, Tensor | None, Tensor | None]  # lens, indptr, weight_indices


def num_segments(lens: Tensor | None, indptr: Tensor | None) -> int:
    return lens.shape[0] if indptr is None else indptr.shape[0] - 1


def sizes_with_first(indptr: Tensor) -> Tensor:
    """(B + 1,): the rows before the first segment, then those of each segment, for ops on groups.

    A step is negative where an indptr decreases, which counts as 0.
    """
    return indptr.diff(prepend=indptr.new_zeros(1))


def split_segments(
    x: Tensor, lens: Tensor | None, indptr: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """The rows before the segments, those of each segment and those past them: views; this synchronises."""
    ends = [0, *group_ends(lens, len(x))] if indptr is None else group_ends(sizes_with_first(indptr), len(x))
    before, *segments, past = x.tensor_split(ends)
    return before, tuple(segments), past


def weight_numbers(weight_indices: Tensor | None, segments: int, weights: int) -> list[int | None]:
    """The matrix of each segment, or None for one of zeros; for references."""
    if weight_indices is None:
        return list(range(segments))
    return [i if 0 <= i < weights else None for i in weight_indices.tolist()]


def check_operands(**tensors: Tensor) -> None:
    """Raise unless all have the dtype of the first, a floating one or of 8 bits."""
    (first, x), *rest = tensors.items()
    if x.dtype not in FLOATS + FP8:
        raise TypeError(f"{first} must be float16, bfloat16, float32, float64 or float8, not {x.dtype}")
    for name, t in rest:
        if t.dtype != x.dtype:
            raise TypeError(f"{first} is {x.dtype} but {name} is {t.dtype}")


def check_segments(x: Tensor, weights: int, segments: Segments) -> None:
    """Raise unless these say of every segment where it is, and which of so many weights is its own."""
    lens, indptr, weight_indices = segments
    if (lens is None) == (indptr is None):
        raise ValueError("either lens or indptr must be given, and not both")
    if indptr is None:
        check_shape("lens", lens, "B")
        check_index(lens=lens)
    else:
        check_shape("indptr", indptr, "B + 1")
        check_index(indptr=indptr)
        if indptr.shape[0] < 1:
            raise ValueError("indptr must be (B + 1,), but it is empty")
    B = num_segments(lens, indptr)
    if weight_indices is None:
        check_size("there are {} segments", B, "{} weights and no weight_indices", weights)
    else:
        check_shape("weight_indices", weight_indices, "B")
        check_index(weight_indices=weight_indices)
        check_size("there are {} segments", B, "weight_indices is ({},)", weight_indices.shape[0])
    check_device(x=x, lens=lens, indptr=indptr, weight_indices=weight_indices)


def check_segment_values(rows: int, segments: Segments) -> None:
    """Raise for segments that do not fit into so many rows; this synchronises."""
    lens, indptr, _ = segments
    sizes = (lens if indptr is None else sizes_with_first(indptr)).tolist()
    if indptr is not None and (sizes[0] < 0 or sum(sizes) > rows):
        raise ValueError(f"indptr must lie in [0, {rows}], but it is from {sizes[0]} to {sum(sizes)}")
    if min(sizes, default=0) < 0 or sum(sizes) > rows:
        raise ValueError(
            f"lens: segments of {sizes} rows must not be negative nor sum to more than {rows} rows"
        )


def check_count(name: str, count: int) -> None:
    """Raise unless `count` is a whole number, 0 or more."""
    if not isinstance(count, INTEGERS) or isinstance(count, bool):
        raise TypeError(f"{name} must be an int, not {type(count).__name__}")
    if count < 0:
        raise ValueError(f"{name} must not be negative, but it is {count}")


@triton.jit
def load_segments(
    g,  # (BLOCK_G,)
    bounds_ptr,  # (G,) lengths, or (G + 1,) ends with the first begin in front
    M,
    G,
    INDPTR: tl.constexpr,
):
    """The first and the end row of the segments g.

    Segment G stands for the rows past the last one, and with an indptr segment G + 1 for the rows before the
    first one.
    """
    if INDPTR:
        first = tl.minimum(tl.maximum(tl.load(bounds_ptr).to(tl.int64), 0), M)
        start = tl.load(bounds_ptr + g, mask=g < G, other=0).to(tl.int64)
        size = tl.load(bounds_ptr + g + 1, mask=g < G, other=0).to(tl.int64) - start
    else:
        size = tl.load(bounds_ptr + g, mask=g < G, other=0).to(tl.int64)
    size = tl.where(g == G, M, tl.minimum(tl.maximum(size, 0), M))  # or the sum could overflow
    end = tl.cumsum(size, 0)
    if INDPTR:
        end += first
    start = tl.minimum(end - size, M)
    end = tl.minimum(end, M)
    if INDPTR:
        start, end = tl.where(g == G + 1, 0, start), tl.where(g == G + 1, first, end)
    return start, end


@triton.jit
def load_weights(
    g,  # (BLOCK_G,)
    indices_ptr,  # (G,) or None
    G,
    W,
):
    """The weight of each of the segments g, -1 for one of zeros."""
    weight = g.to(tl.int64)
    if indices_ptr is not None:
        weight = tl.load(indices_ptr + g, mask=g < G, other=-1).to(tl.int64)
    return tl.where((g < G) & (weight >= 0) & (weight < W), weight, -1)


@triton.jit
def locate_segment(
    tile,
    bounds_ptr,
    indices_ptr,
    M,
    G,
    W,
    INDPTR: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Row tile number -> (segment, its weight or -1, first row, end row); no other segment has a tile.

    The indices are loaded with the bounds, not once the segment is known: one wait for memory instead of two.
    """
    g = tl.arange(0, BLOCK_G)
    start, end = load_segments(g, bounds_ptr, M, G, INDPTR)
    weight = load_weights(g, indices_ptr, G, W)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    last_tile = tl.cumsum(tiles, 0)
    segment = tl.sum((last_tile <= tile).to(tl.int32), 0)
    here = g == segment
    row = tl.sum(tl.where(here, start + (tile - last_tile + tiles) * BLOCK_M, 0), 0)
    row_end = tl.sum(tl.where(here, end, 0), 0)
    weight = tl.sum(tl.where(here, weight, 0), 0)
    return segment, weight, row, row_end


@jit_kernel
def add_parts_kernel(
    parts_ptr,  # (parts, M, N) float32
    out_ptr,  # (M, N), contiguous
    bounds_ptr,  # (G,) or (G + 1,)
    parts,
    size,  # of a part
    M,
    N,
    G,
    INDPTR: tl.constexpr,
    ZERO_REST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the parts, in order, in the rows of segments."""
    g = tl.arange(0, BLOCK_G)
    start, end = load_segments(g, bounds_ptr, M, G, INDPTR)
    rest = tl.sum(tl.where(g == G, start, 0), 0)  # the first row past the segments
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = i < rest * N
    if INDPTR:
        mine &= i >= tl.sum(tl.where(g == G + 1, end, 0), 0) * N
    acc = tl.zeros((BLOCK,), tl.float32)
    size = tl.cast(size, tl.int64)
    for p in range(0, parts):
        acc += tl.load(parts_ptr + p * size + i, mask=mine, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size if ZERO_REST else mine)


def add_parts(parts: Tensor, out: Tensor, bounds: Tensor, **flags) -> None:
    """out = the sum of `parts` (P, M, N) in the rows of segments; the `flags` are those of `segment_gmm`."""
    block, (P, M, N) = 1024, parts.shape
    segments = len(bounds) - flags["INDPTR"]
    add_parts_kernel[(cdiv(M * N, block),)](
        parts, out, bounds, P, M * N, M, N, segments, **flags, BLOCK=block, num_warps=4
    )


# segment_tgmm


PART_ROWS = 512  # of those that programs share, the least that each takes
WIDE = 128  # of K and N, from where on `tgmm`'s tiles are filled

# segment_tgmm: reference


def segment_tgmm_reference(x, y, lens, indptr, weight_indices, weights, columns_first):
    out = x.new_zeros(weights, x.shape[1], y.shape[1])
    product = chosen(out, x, None)
    numbers = weight_numbers(weight_indices, num_segments(lens, indptr), weights)
    pairs = zip(split_segments(x, lens, indptr)[1], split_segments(y, lens, indptr)[1], strict=True)
    for i, (a, b) in zip(numbers, pairs, strict=True):
        if i is not None:
            product(out[i], a.T, b, out[i])
    return out.mT if columns_first else out


# segment_tgmm: kernel


@jit_kernel
def segment_tgmm_kernel(
    x_ptr,  # (M, K)
    y_ptr,  # (M, N)
    out_ptr,  # (W, K, N), or (parts, W, K, N) float32
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M,
    N,
    K,
    G,
    W,
    part,  # of the rows, which the programs of one place on axis 1 take
    x_strides,  # m, k
    y_strides,  # m, n
    out_strides,  # w, k, n; those of a part are W * K * N apart
    INDPTR: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # here BLOCK_M x BLOCK_N is a tile of out[i] (K, N), and BLOCK_K rows are summed over at a time
    tiles_k, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_k, tile_n = swizzle(tl.program_id(0), W * tiles_k, tiles_n, GROUP_M, NUM_DIES)
    weight = tile_k // tiles_k
    g = tl.arange(0, BLOCK_G)
    start, end = load_segments(g, bounds_ptr, M, G, INDPTR)
    first = tl.program_id(1).to(tl.int64) * part
    start, end = tl.maximum(start, first), tl.minimum(end, first + part)
    mine = load_weights(g, indices_ptr, G, W) == weight
    turn = tl.cumsum(mine.to(tl.int32), 0)
    k = tile_k % tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + (k % K)[None, :] * x_strides[1]
    y_ptrs = y_ptr + (n % N)[None, :] * y_strides[1]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(1, tl.sum(mine.to(tl.int32), 0) + 1):
        here = mine & (turn == i)
        row_end = tl.sum(tl.where(here, end, 0), 0)
        for row in range(tl.sum(tl.where(here, start, 0), 0), row_end, BLOCK_K):
            m = row + tl.arange(0, BLOCK_K)
            mask = (m < row_end)[:, None]
            x = tl.load(x_ptrs + m[:, None] * x_strides[0], mask=mask, other=0.0)
            y = tl.load(y_ptrs + m[:, None] * y_strides[0], mask=mask, other=0.0)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)

    out_base = out_ptr + tl.program_id(1).to(tl.int64) * W * K * N + weight.to(tl.int64) * out_strides[0]
    out_ptrs = out_base + k.to(tl.int64)[:, None] * out_strides[1] + n.to(tl.int64)[None, :] * out_strides[2]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(k < K)[:, None] & (n < N)[None, :])


# segment_tgmm: launcher


def new_segment_tgmm(x, y, lens, indptr, weight_indices, weights, columns_first):
    check_shape("x", x, "M", "K")
    check_shape("y", y, "M", "N")
    check_size("x is (M={}, K)", x.shape[0], "y is (M={}, N)", y.shape[0])
    check_float(x=x, y=y)
    check_count("weights", weights)
    check_segments(x, weights, (lens, indptr, weight_indices))
    K, N = x.shape[1], y.shape[1]
    return x.new_empty(weights, N, K) if columns_first else x.new_empty(weights, K, N)


@takes(*TILE_DTYPES)
def launch_segment_tgmm(out, x, y, lens, indptr, weight_indices, weights, columns_first):
    out = out.mT if columns_first else out
    (W, K, N), M, G = out.shape, x.shape[0], num_segments(lens, indptr)
    bounds, indices = dense(lens if indptr is None else indptr, weight_indices)
    config = tuning.lookup("segment_tgmm", x.dtype, M, N, K, W)
    block_m, block_n = min(config.block_m, at_least_16(K)), min(config.block_n, at_least_16(N))
    config = dataclasses.replace(config, block_m=block_m, block_n=block_n)
    tiles = W * cdiv(K, config.block_m) * cdiv(N, config.block_n)
    parts = max(min(ENOUGH // tiles, M // PART_ROWS), 1)
    sums = out if parts == 1 else out.new_empty(parts, W, K, N, dtype=torch.float32)
    segment_tgmm_kernel[(tiles, parts)](
        x, y, sums, bounds, indices, M, N, K, G, W, cdiv(M, parts),
        x.stride(), y.stride(), sums.stride()[-3:],
        INDPTR=indptr is not None, BLOCK_G=next_power_of_2(G + 1), **tile_options(config),
    )  # fmt: skip
    if parts > 1:
        out.copy_(sums.sum(0))


# segment_tgmm: op


segment_tgmm_op = define_op(
    "segment_tgmm(Tensor x, Tensor y, Tensor? lens, Tensor? indptr, Tensor? weight_indices, SymInt weights, "
    "bool columns_first) -> Tensor",
    new=new_segment_tgmm,
    check_values=lambda x, y, lens, indptr, weight_indices, *_: check_segment_values(
        len(x), (lens, indptr, weight_indices)
    ),
    reference=segment_tgmm_reference,
    triton=launch_segment_tgmm,
)


def segment_weight_gradient(
    w: Tensor,
    x: Tensor,
    dout: Tensor,
    lens: Tensor | None,
    indptr: Tensor | None,
    weight_indices: Tensor | None,
) -> Tensor:
    """The gradient of the weights `w` (W, K, N) of `segment_gmm`, in the memory layout of `w`.

    Where each segment has a matrix of its own, and a wide one, it is `tgmm`'s.
    """
    if weight_indices is None and min(w.shape[1:]) >= WIDE:
        if indptr is None:
            return weight_gradient(w, None, x, dout, lens)
        return weight_gradient(w, None, x, dout, sizes_with_first(indptr))[1:]
    columns_first = w.stride(1) < w.stride(2)
    dw = segment_tgmm_op(x, dout, lens, indptr, weight_indices, w.shape[0], columns_first)
    return dw.mT if columns_first else dw


# segment_gmm

SHORT_K = 64  # sums that a program makes in one step
PART_K = 512  # of a sum over K that is shared among programs, the least that each takes
FILLED = 64  # rows of a segment on average from which on a Hopper tile is worth it
DTYPES = (*TILE_DTYPES, *FP8)

# segment_gmm: reference


def segment_gmm_reference(x, w, lens, indptr, weight_indices):
    """Each segment's product, and zeros for the rows in no segment."""
    x, w = x.to(out_dtype(x)), w.to(out_dtype(w))
    numbers = weight_numbers(weight_indices, num_segments(lens, indptr), len(w))
    before, segments, past = split_segments(x, lens, indptr)
    pairs = zip([before, *segments, past], [None, *numbers, None], strict=True)
    return torch.cat([r.new_zeros(len(r), w.shape[2]) if i is None else r @ w[i] for r, i in pairs])


def fill_segment_gmm(out, x, w, lens, indptr, weight_indices, zero_rest=True):
    """By torch, each segment straight into its place."""
    x, w = x.to(out_dtype(x)), w.to(out_dtype(w))
    product = chosen(out, x, None)
    numbers = weight_numbers(weight_indices, num_segments(lens, indptr), len(w))
    before, outs, past = split_segments(out, lens, indptr)
    for o, r, i in zip(outs, split_segments(x, lens, indptr)[1], numbers, strict=True):
        if i is None:
            o.zero_()
        elif len(r):
            product(o, r, w[i], None)
    if zero_rest:
        before.zero_()
        past.zero_()


# segment_gmm: kernel


@jit_kernel
def segment_gmm_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (W, K, N)
    out_ptr,  # (M, N), or (parts, M, N) float32; contiguous
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M,
    N,
    K,
    G,
    W,
    tiles_m,
    part,  # of K, which the programs of one place on axis 1 take
    x_strides,  # m, k
    w_strides,  # w, k, n
    INDPTR: tl.constexpr,
    ZERO_REST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    x_stride_m, x_stride_k = x_strides
    w_stride_w, w_stride_k, w_stride_n = w_strides
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M, NUM_DIES)
    group, weight, row, row_end = locate_segment(
        tile_m, bounds_ptr, indices_ptr, M, G, W, INDPTR, BLOCK_G, BLOCK_M
    )
    if group > ((G + 1 if INDPTR else G) if ZERO_REST else G - 1):
        return
    k_start = tl.program_id(1).to(tl.int64) * part
    depth = tl.where(weight >= 0, tl.minimum(K - k_start, part), 0).to(tl.int32)
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    m_read = tl.where(m < row_end, m, row).to(tl.int64)
    n_read = n % N

    x_base = x_ptr + k_start * x_stride_k
    x_ptrs = x_base + m_read[:, None] * x_stride_m + k[None, :] * x_stride_k
    w_base = w_ptr + tl.maximum(weight, 0) * w_stride_w + k_start * w_stride_k
    w_ptrs = w_base + k[:, None] * w_stride_k + n_read[None, :] * w_stride_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = multiply(acc, x_ptrs, w_ptrs, depth, x_stride_k, w_stride_k, BLOCK_K, EVEN_K, PRECISION)
    out_base = out_ptr + tl.program_id(1).to(tl.int64) * M * N
    out_ptrs = out_base + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < row_end)[:, None] & (n < N)[None, :])


@jit_kernel
def segment_expand_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (W, K, N)
    out_ptr,  # (M, N), contiguous
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M,
    N,
    K,
    G,
    W,
    width,  # columns of a program
    x_strides,  # m, k
    w_strides,  # w, k, n
    ADD: tl.constexpr,  # to what out holds
    INDPTR: tl.constexpr,
    ZERO_REST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, weight, row, row_end = locate_segment(
        tl.program_id(0), bounds_ptr, indices_ptr, M, G, W, INDPTR, BLOCK_G, BLOCK_M
    )
    if group > ((G + 1 if INDPTR else G) if ZERO_REST else G - 1):
        return
    m = row + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    k_mask = (k < K) & (weight >= 0)  # without a weight zeros times zeros
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_strides[0] + k[None, :] * x_strides[1]
    x = operand(tl.load(x_ptrs, mask=(m < row_end)[:, None] & k_mask[None, :], other=0.0))
    w_ptrs = w_ptr + tl.maximum(weight, 0) * w_strides[0] + k[:, None] * w_strides[1]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N
    first = tl.program_id(1) * width
    for n_start in range(first, tl.minimum(first + width, N), BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        w = tl.load(w_ptrs + (n % N)[None, :] * w_strides[2], mask=k_mask[:, None], other=0.0)
        mask = (m < row_end)[:, None] & (n < N)[None, :]
        out = tl.dot(x, operand(w), input_precision=PRECISION)
        if ADD:
            out += tl.load(out_ptrs + n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs + n[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


# segment_gmm: launcher


def out_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype in FP8 else x.dtype


def new_segment_gmm(x, w, *segments):
    check_shape("x", x, "M", "K")
    check_shape("w", w, "W", "K", "N")
    check_size("x is (M, K={})", x.shape[1], "w is (W, K={}, N)", w.shape[1])
    check_operands(x=x, w=w)
    check_segments(x, w.shape[0], segments)
    check_device(x=x, w=w)
    return x.new_empty(x.shape[0], w.shape[2], dtype=out_dtype(x))


def check_segment_gmm_out(out, x, w, *segments):
    expected = new_segment_gmm(x, w, *segments).shape
    if out.shape != expected or not out.is_contiguous():
        raise ValueError(f"out must be contiguous (M, N) = {tuple(expected)}, but it is {tuple(out.shape)}")
    narrow = (torch.bfloat16, torch.float16, torch.float32) if x.dtype in FP8 else (x.dtype,)
    if out.dtype not in narrow:
        raise TypeError(f"x is {x.dtype} but out is {out.dtype}")
    check_device(x=x, out=out)


def fits_triton(x, *_) -> bool:
    """Of float8, what Triton knows on this GPU."""
    if x.dtype not in FP8 or not x.is_cuda or torch.version.hip is not None:
        return x.is_cuda or x.dtype not in FP8
    return x.dtype in (FP8[:2] if torch.cuda.get_device_capability(x.device) >= (8, 9) else FP8[1:2])


@functools.cache
def no_larger(config: tuning.Config, N: int, K: int) -> tuning.Config:
    """A tile with no more columns than there are, nor more to sum over; a short sum is one step."""
    block_k = at_least_16(K)
    block_k = block_k if K <= SHORT_K else min(config.block_k, block_k)
    return dataclasses.replace(config, block_n=min(config.block_n, at_least_16(N)), block_k=block_k)


@takes(*DTYPES)
def launch_segment_gmm(out, x, w, lens, indptr, weight_indices, zero_rest=True, add=False):
    (M, N), (W, K, _), G = out.shape, w.shape, num_segments(lens, indptr)
    bounds, indices = dense(lens if indptr is None else indptr, weight_indices)
    short = K <= SHORT_K
    op, dtype = "segment_expand" if short else "segment_gmm", out.dtype
    config = no_larger(tuning.lookup(op, dtype, M, N, K, G), N, K)
    pieces = G if indptr is None else G + 1  # and the rows past the segments
    tiles_m, tiles_n = row_tiles(M, pieces, config.block_m), cdiv(N, config.block_n)
    tiles = max(cdiv(M, config.block_m), min(M, G)) * tiles_n  # that there are, about
    flags = {"INDPTR": indptr is not None, "ZERO_REST": zero_rest, "BLOCK_G": next_power_of_2(pieces + 1)}
    options = tile_options(config)
    if short:  # a program for some columns of a row tile
        width = min(max(tiles // ENOUGH, 1), 8) * config.block_n
        del options["GROUP_M"], options["NUM_DIES"]
        segment_expand_kernel[(tiles_m, cdiv(N, width))](
            x, w, out, bounds, indices, M, N, K, G, W, width, x.stride(), w.stride(),
            ADD=add, **flags, **options,
        )  # fmt: skip
        return
    steps = cdiv(K, config.block_k)
    part = max(cdiv(steps * tiles, ENOUGH), cdiv(PART_K, config.block_k)) * config.block_k
    parts = cdiv(K, part)
    sums = out if parts == 1 else out.new_empty(parts, M, N, dtype=torch.float32)
    segment_gmm_kernel[(tiles_m * tiles_n, parts)](
        x, w, sums, bounds, indices, M, N, K, G, W, tiles_m, part, x.stride(), w.stride(),
        EVEN_K=K % config.block_k == 0, **flags | {"ZERO_REST": zero_rest and parts == 1}, **options,
    )  # fmt: skip
    if parts > 1:
        add_parts(sums, out, bounds, **flags)


def launch_on_hopper(out, x, w, lens, indptr, weight_indices, zero_rest=True):
    """As a grouped product whose groups have the weights of their segments."""
    if not hopper.by_tma(out):
        return launch_segment_gmm(out, x, w, lens, indptr, weight_indices, zero_rest)
    hopper.launch_segments(out, x, w, lens, indptr, weight_indices, zero_rest)


def fits_hopper(x, w, lens, indptr, weight_indices, *_) -> bool:
    """Where tiles of 128 x 256 are well filled, and the grouped product itself runs."""
    rows, segments = x.shape[0], num_segments(lens, indptr)
    filled = rows >= FILLED * segments > 0 and w.shape[2] >= 128 and w.shape[1] > SHORT_K
    return filled and hopper.launch_segments.fits(x, w, segments + (indptr is not None))


launch_segment_gmm.fits = fits_triton
launch_on_hopper.takes, launch_on_hopper.fits = hopper.DTYPES, fits_hopper


def untouched_rest(launch: Callable) -> Callable:
    """The launcher that leaves the rows in no segment as they are."""
    return functools.wraps(launch)(functools.partial(launch, zero_rest=False))


# segment_gmm: op


def save_segment_gmm(ctx, inputs, output):
    x, w, *segments = inputs
    ctx.save_for_backward(x, w, *segments)


def backward_segment_gmm(ctx, dout):
    x, w, *segments = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = segment_gmm_op(dout, w.mT, *segments)
    if ctx.needs_input_grad[1]:
        dw = segment_weight_gradient(w, x, dout, *segments)
    return dx, dw, None, None, None


segment_gmm_op = define_op(
    "segment_gmm(Tensor x, Tensor w, Tensor? lens, Tensor? indptr, Tensor? weight_indices) -> Tensor",
    new=new_segment_gmm,
    reference=segment_gmm_reference,
    torch=fill_segment_gmm,
    check_values=lambda x, w, *segments: check_segment_values(len(x), segments),
    triton=launch_segment_gmm,
    hopper=launch_on_hopper,
    backward=backward_segment_gmm,
    save=save_segment_gmm,
)
segment_gmm_out_op = define_inplace_op(
    "segment_gmm_out(Tensor(a!) out, Tensor x, Tensor w, Tensor? lens, Tensor? indptr, "
    "Tensor? weight_indices) -> ()",
    check=check_segment_gmm_out,
    reference=untouched_rest(fill_segment_gmm),
    check_values=lambda out, x, w, *segments: check_segment_values(len(x), segments),
    triton=untouched_rest(launch_segment_gmm),
    hopper=untouched_rest(launch_on_hopper),
)


# segment_gmm: public


def segment_gmm(
    x: Tensor,
    w: Tensor,
    lens: Tensor | None = None,
    *,
    indptr: Tensor | None = None,
    weight_indices: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each segment of rows of `x` (M, K) by the matrix of `w` (W, K, N) it names; returns (M, N).

    `lens` (B,) counts the rows of each segment, in order from row 0 on.  Or else `indptr` (B + 1,) says where
    they lie: segment i has the rows from indptr[i] to indptr[i + 1].  Rows before and past the segments are
    zeros.  `weight_indices` (B,) is the number of each one's matrix, and may repeat; outside [0, W), usually
    -1, it stands for zeros.  Without it, segment i has matrix i and B = W.  All are int32 or int64, on the
    device of `x`, and stay there.  Segments that are negative or reach past M are clamped, and no row is
    multiplied twice: where an indptr decreases, that segment has no rows, and those behind it begin as if it
    had none.

    `x` and `w` share a dtype and may have any strides; both have gradients, those of a matrix summed over its
    segments in order.  Sums are kept in float32 (float64 for float64).  The result has that dtype, and
    bfloat16 for the four kinds of float8, which are multiplied as they are, without scales or gradients.
    `out` (M, N), contiguous, is overwritten where there are segments, and nowhere else; it has no gradient.

    Raises ValueError for shapes or devices that do not fit and for an `out` that shares memory with another
    argument, TypeError for dtypes, RuntimeError for `out` and a gradient at once; with MOE_AITER_DEBUG=1 also
    ValueError for lengths that are negative or sum to more than M, and for an indptr that does not lie in
    [0, M].
    """
    segments = lens, indptr, weight_indices
    if out is None:
        return segment_gmm_op(x, w, *segments)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, w)):
        raise RuntimeError("segment_gmm: out= has no gradient, but x or w requires one")
    segment_gmm_out_op(out, x, w, *segments)
    return out
