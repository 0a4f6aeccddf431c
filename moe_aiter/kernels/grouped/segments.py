"""Segments of rows, one behind the other.

Either `lens` (B,) counts their rows from row 0 on, or `indptr` (B + 1,)
says where each begins and where the last one ends; rows before its first element are in no segment.  Both
stay on the device.  Lengths (the steps of an indptr) and the first element are clamped to [0, M], and
segments to the rows that are left: no row belongs to two segments, and no kernel touches memory outside of
the M rows.  `weight_indices` (B,) names the matrix of each segment, by default the one with the segment's
number; an index outside of [0, W), usually -1, names a matrix of zeros.
"""

from torch import Tensor

from ...op import INTEGERS
from ..base.check import check_device, check_index, check_shape, check_size, group_ends
from ..base.launch import tl, triton

ENOUGH = 256  # programs that keep a GPU busy, two for each SM of an H200


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
    check_device(x=i.x, lens=i.lens, indptr=i.indptr, weight_indices=i.weight_indices)


def check_segment_values(i) -> None:
    """Raise for segments that do not fit into the rows of x; this synchronises."""
    rows, sizes = len(i.x), (i.lens if i.indptr is None else sizes_with_first(i.indptr)).tolist()
    if i.indptr is not None and (sizes[0] < 0 or sum(sizes) > rows):
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
