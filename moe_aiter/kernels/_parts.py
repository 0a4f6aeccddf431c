"""The last step of a sum of which several programs have a part each."""

from torch import Tensor

from ._segments import load_segments
from ._triton import cdiv, jit_kernel, tl

# kernel


@jit_kernel
def sum_parts_kernel(
    parts_ptr,  # (P, M) float32
    rank_ptr,  # (C,)
    out_ptr,  # (C,)
    P,
    M,
    C,
    BLOCK: tl.constexpr,
):
    """out[c] = the sum of column rank[c] of parts, in order; 0 for a dropped choice."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(rank_ptr + c, mask=c < C, other=-1).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for p in range(0, P):
        acc += tl.load(parts_ptr + p * tl.cast(M, tl.int64) + r, mask=r >= 0, other=0.0)
    tl.store(out_ptr + c, acc, mask=c < C)


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


# launcher


def sum_parts(parts: Tensor, rank: Tensor, out: Tensor) -> None:
    """out[t, j] = the sum of column rank[t, j] of `parts` (P, R); 0 for a dropped choice."""
    block, (P, R) = 256, parts.shape
    sum_parts_kernel[(cdiv(rank.numel(), block),)](
        parts, rank.contiguous(), out, P, R, rank.numel(), BLOCK=block, num_warps=4
    )


def add_parts(parts: Tensor, out: Tensor, bounds: Tensor, **flags) -> None:
    """out = the sum of `parts` (P, M, N) in the rows of segments; the `flags` are those of `segment_gmm`."""
    block, (P, M, N) = 1024, parts.shape
    segments = len(bounds) - flags["INDPTR"]
    add_parts_kernel[(cdiv(M * N, block),)](
        parts, out, bounds, P, M * N, M, N, segments, **flags, BLOCK=block, num_warps=4
    )
