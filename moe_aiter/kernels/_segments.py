"""Segments of rows, and the weight of each: what the ops on them share.

B segments lie one behind the other in M rows.  `lens` (B,) counts their rows from row 0 on, or else `indptr`
(B + 1,) says where they begin and the last one ends; the rows before its first element are in no segment.
Both stay on the device.  Lengths, for an indptr the steps from one element to the next, and the first element
are clamped to [0, M], and segments to the rows that are left: no row belongs to two, and nothing outside (M,)
is ever touched.  `weight_indices` (B,) names the matrix of
each segment, which is its own number if there are none; an index outside [0, W), usually -1, names one of
zeros.
"""

import torch
from torch import Tensor

from ..op import INTEGERS
from ._check import FLOATS, check_device, check_index, check_shape, check_size
from ._groups import group_ends
from ._triton import cdiv, jit_kernel, tl, triton

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
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
