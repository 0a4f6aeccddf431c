"""Segments of rows, one behind the other, and the gradient of the weights of `segment_gmm`.

    out[i] = sum of x[s:e].T @ y[s:e] over the segments of weight i

M rows, B segments, W weights, K in, N out.  Either `lens` (B,) counts the rows of each segment from row 0 on,
or `indptr` (B + 1,) says where each begins and where the last one ends; rows before its first element are in
no segment.  Both stay on the device.  Lengths (the steps of an indptr) and the first element are clamped to
[0, M], and segments to the rows that are left: no row belongs to two segments, and no kernel touches memory
outside of the M rows.  `weight_indices` (B,) names the matrix of each segment, by default the one with the
segment's number; an index outside of [0, W), usually -1, names a matrix of zeros.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ...op import INTEGERS, binds, define_op, takes
from ..base.check import (
    Operand,
    check_fields,
    check_index,
    check_shape,
    check_size,
    group_ends,
)
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES, dense, in_units, no_larger, swizzle, tile_options, unit_of
from .tgmm import chosen, weight_gradient

ENOUGH = 256  # programs that keep a GPU busy, two for each SM of an H200
MANY, FEW = 1024, 128  # programs, and segments, from which on each program finds its own for several tiles
PART_ROWS = 512  # of those that programs share, the least that each takes
WIDE = 128  # of K and N, from where on `tgmm`'s tiles are filled


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


def check_segments(i, weights: int) -> None:
    """Raise unless these say of every segment where it is, and which of so many weights is its own."""
    if (i.lens is None) == (i.indptr is None):
        raise ValueError("either lens or indptr must be given, and not both")
    if i.indptr is None:
        check_shape("lens", i.lens, "B")
        check_index(lens=i.lens)
    else:
        check_shape("indptr", i.indptr, "B + 1")
        check_index(indptr=i.indptr)
        if i.indptr.shape[0] < 1:
            raise ValueError("indptr must be (B + 1,), but it is empty")
    B = num_segments(i.lens, i.indptr)
    if i.weight_indices is None:
        check_size("there are {} segments", B, "{} weights and no weight_indices", weights)
    else:
        check_shape("weight_indices", i.weight_indices, "B")
        check_index(weight_indices=i.weight_indices)
        check_size("there are {} segments", B, "weight_indices is ({},)", i.weight_indices.shape[0])


def check_segment_values(i) -> None:
    """Raise for segments that do not fit into the rows of x and for weights from W on; this synchronises."""
    rows, sizes = len(i.x), (i.lens if i.indptr is None else sizes_with_first(i.indptr)).tolist()
    if i.indptr is not None and (sizes[0] < 0 or sum(sizes) > rows):
        raise ValueError(f"indptr must lie in [0, {rows}], but it is from {sizes[0]} to {sum(sizes)}")
    if min(sizes, default=0) < 0 or sum(sizes) > rows:
        raise ValueError(
            f"lens: segments of {sizes} rows must not be negative nor sum to more than {rows} rows"
        )
    if i.weight_indices is not None and i.weight_indices.numel():
        last, weights = int(i.weight_indices.max()), i.weights if hasattr(i, "weights") else len(i.w)
        if last >= weights:
            raise ValueError(f"weight_indices holds {last} but there are {weights} weights")


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


# segment_tgmm


class SegmentTgmmInputs(NamedTuple):
    """The inputs of the op `segment_tgmm`: out[w] = the sum of x[s:e].T @ y[s:e] over the segments of w."""

    x: Annotated[Operand, "M, K"]
    y: Annotated[Operand, "M, N"]
    lens: Tensor | None  # (B,), or
    indptr: Tensor | None  # (B + 1,)
    weight_indices: Tensor | None  # (B,)
    weights: int | torch.SymInt  # W
    columns_first: bool  # return (W, N, K), else (W, K, N)


# reference


def segment_tgmm_reference(i: SegmentTgmmInputs) -> Tensor:
    out = i.x.new_zeros(i.weights, i.x.shape[1], i.y.shape[1])
    product = chosen(out, i.x, None, by_row=False)
    numbers = weight_numbers(i.weight_indices, num_segments(i.lens, i.indptr), i.weights)
    x, y = (split_segments(t, i.lens, i.indptr)[1] for t in (i.x, i.y))
    for n, a, b in zip(numbers, x, y, strict=True):
        if n is not None:
            product(out[n], a.T, b, out[n])
    return out.mT if i.columns_first else out


# kernel


@jit_kernel
def segment_tgmm_kernel(
    x_ptr,  # (M, K)
    y_ptr,  # (M, N)
    out_ptr,  # (W, K, N), or (split_k, W, K, N) float32
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M, N, K, G, W,
    part,  # of the rows, which the programs of one place on axis 1 take
    x_strides,  # m, k
    y_strides,  # m, n
    out_strides,  # w, k, n; those of a part are W * K * N apart
    INDPTR: tl.constexpr, UNIT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr,
    WALK: tl.constexpr,  # tiles of a program, one beside the other
    PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, x_strides, y_strides, out_strides = in_units((N, K, x_strides, y_strides, out_strides), UNIT)
    # here BLOCK_M x BLOCK_N is a tile of out[i] (K, N), and BLOCK_K rows are summed over at a time
    tiles_k, walks = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N * WALK)
    tile_k, walk = swizzle(tl.program_id(0), W * tiles_k, walks, GROUP_M, NUM_DIES)
    weight = tile_k // tiles_k
    g = tl.arange(0, BLOCK_G)
    start, end = load_segments(g, bounds_ptr, M, G, INDPTR)
    first = tl.program_id(1).to(tl.int64) * part
    start, end = tl.maximum(start, first), tl.minimum(end, first + part)
    mine = load_weights(g, indices_ptr, G, W) == weight
    turn = tl.cumsum(mine.to(tl.int32), 0)
    k = tile_k % tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + (k % K)[None, :] * x_strides[1]
    out_base = out_ptr + tl.program_id(1).to(tl.int64) * W * K * N + weight.to(tl.int64) * out_strides[0]
    out_rows = out_base + k.to(tl.int64)[:, None] * out_strides[1]
    for step in range(0, WALK):
        n = (walk * WALK + step) * BLOCK_N + tl.arange(0, BLOCK_N)
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
        out_ptrs = out_rows + n.to(tl.int64)[None, :] * out_strides[2]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(k < K)[:, None] & (n < N)[None, :])


# launcher


def new_segment_tgmm(i: SegmentTgmmInputs) -> Tensor:
    size = check_fields(i)
    check_count("weights", i.weights)
    check_segments(i, i.weights)
    K, N = size["K"], size["N"]
    return i.x.new_empty(i.weights, N, K) if i.columns_first else i.x.new_empty(i.weights, K, N)


def widest_last(i: SegmentTgmmInputs) -> SegmentTgmmInputs:
    """Return the same product, perhaps transposed, with K <= N: a program walks along N."""
    turned = i._replace(x=i.y, y=i.x, columns_first=not i.columns_first)
    return turned if i.y.shape[1] < i.x.shape[1] else i


@binds
@takes(*TILE_DTYPES)
def bind_segment_tgmm(i: SegmentTgmmInputs) -> Callable:
    i = widest_last(i)
    (M, K), N, W, G = i.x.shape, i.y.shape[1], i.weights, num_segments(i.lens, i.indptr)
    config = tuning.lookup("segment_tgmm", i.x.dtype, M, N, K, W)
    config = no_larger(config, block_m=K, block_n=N)
    tiles_k, tiles_n = W * cdiv(K, config.block_m), cdiv(N, config.block_n)
    tiles = tiles_k * tiles_n
    walks = cdiv(tiles_n, max(min(tiles // MANY, G // FEW), 1))
    splits, columns_first = max(min(ENOUGH // tiles, M // PART_ROWS), 1), i.columns_first
    out_strides = (N * K, 1, K) if columns_first and splits == 1 else (K * N, N, 1)
    kernel = bind_kernel(
        segment_tgmm_kernel, (tiles_k * walks, splits), INDPTR=i.indptr is not None,
        UNIT=unit_of((N, K), i.x.stride(), i.y.stride(), out_strides),
        BLOCK_G=next_power_of_2(G + 1), WALK=cdiv(tiles_n, walks), **tile_options(config),
    )  # fmt: skip
    numbers = M, N, K, G, W, cdiv(M, splits), i.x.stride(), i.y.stride(), out_strides

    def launch(out, i):
        i = widest_last(i)
        bounds, indices = dense(i.lens if i.indptr is None else i.indptr, i.weight_indices)
        sums = out if splits == 1 else out.new_empty(splits, W, K, N, dtype=torch.float32)
        kernel(i.x, i.y, sums, bounds, indices, *numbers)
        if splits > 1:
            (out.mT if columns_first else out).copy_(sums.sum(0))

    return launch


# op


segment_tgmm_op = define_op(
    "segment_tgmm", SegmentTgmmInputs, new=new_segment_tgmm, check_values=check_segment_values,
    reference=segment_tgmm_reference, triton=bind_segment_tgmm,
)  # fmt: skip


def segment_weight_gradient(
    w: Tensor, x: Tensor, dout: Tensor, lens: Tensor | None, indptr: Tensor | None,
    weight_indices: Tensor | None,
) -> Tensor:  # fmt: skip
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
