"""Batches of products of 8-bit floats with scales: a masked product of which every row counts."""

import torch
from torch import Tensor

from ._check import check_shape, check_size
from .masked_gmm import masked_gmm


def scaled_bmm(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | float | None = None,
    w_scale: Tensor | float | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`(x @ w) * x_scale * w_scale` of batches: `x` (G, M, K), `w` (G, K, N), both of any strides; (G, M, N).

    8-bit floats in any pair give `out_dtype`, float16, bfloat16 or float32; other dtypes are one for all.
    Scales are float32: a number, one for each matrix (G,), or one for each row of `x`, (G, M), or column of
    `w`, (G, N).  They multiply sums in float32, which are rounded once, into `out` where it is given.  With
    8 bits a `w` whose K lies in a row, `w.mT` contiguous, is faster.  Not differentiable.
    """
    check_shape("x", x, "G", "M", "K")
    check_shape("w", w, "G", "K", "N")
    check_size("x is (G, M, K={})", x.shape[2], "w is (G, K={}, N)", w.shape[1])
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1], w.shape[2], dtype=out_dtype)
    elif out_dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype} but out_dtype is {out_dtype}")
    return masked_gmm(out, x, w.mT, None, x_scale, w_scale)
