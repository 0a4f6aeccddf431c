"""The last step of a sum of which several programs have a part each."""

from torch import Tensor

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


# launcher


def sum_parts(parts: Tensor, rank: Tensor, out: Tensor) -> None:
    """out[t, j] = the sum of column rank[t, j] of `parts` (P, R); 0 for a dropped choice."""
    block, (P, R) = 256, parts.shape
    sum_parts_kernel[(cdiv(rank.numel(), block),)](
        parts, rank.contiguous(), out, P, R, rank.numel(), BLOCK=block, num_warps=4
    )
