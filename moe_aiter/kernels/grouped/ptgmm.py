"""Transposed grouped matmul by AITER's names: `tgmm` with (K, M) operands, into a tensor that is there.

    out[g] = lhs[:, s:e] @ rhs[s:e]

for each group g, whose rows are [s, e).  M rows, G groups; the sum runs over the rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...tuning.aiter_json import tile_of
from ..base.check import (
    cast_as_linear,
    check_axes,
    check_device,
    check_existing,
    check_flags,
    check_float,
    check_groups,
    check_shape,
    check_tensor,
    fourth_argument,
    oriented,
    result_dtype,
)
from .tgmm import check_sum, tgmm_into_op


def ptgmm(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *fourth: Tensor | torch.dtype | None,
    bias_grad: Tensor | None = None, preferred_element_type: torch.dtype | None = None,
    existing_out: Tensor | None = None, accumulate: bool = False, config: dict[str, int] | None = None,
    grid_dim: int | None = None, trans_lhs: bool | None = None, bias_grad_from: str = "lhs",
) -> Tensor:  # fmt: skip
    """Multiply each group's columns of `lhs` (K, M) by its rows of `rhs` (M, N); returns (G, K, N).

    This is the gradient of a grouped matmul's weights.  The kernel is persistent: programs take many tiles.

    group_sizes: (G,) int32 or int64, the rows of each group, in order.  Rows past their sum are not read; a
        group without rows gives exact zeros.
    bias_grad: (G, K) float32, always overwritten with the sum of each group's columns of `lhs`; or (G, N),
        with that of its rows of `rhs`, if `bias_grad_from` is "rhs".  For a layer y = x @ w + b with weights
        (G, in, out), `ptgmm(x.T, dy, ..., bias_grad_from="rhs")` has both gradients; for weights (G, out,
        in), as in nn.Linear, `ptgmm(dy.T, x, ...)`.
    preferred_element_type: dtype of the result [that of `lhs`]; may be float32.
    existing_out: (G, K, N), written instead of a fresh tensor, and returned.
    accumulate: add to `existing_out`, with one rounding; it can be float32 for 16-bit operands.
    config: block sizes as `get_config` returns them, for the Triton kernel, which then runs.
    grid_dim: the number of programs.
    trans_lhs: whether `lhs` is (M, K) [if only this shape fits]; by default, a square `lhs` is (K, M).  Any
        strides either way.
    fourth: the fourth argument by position is `bias_grad` if it is a tensor, and `preferred_element_type` if
        it is a dtype.  All others are given by name.

    `lhs` and `rhs` share a dtype, or under torch.autocast without an `existing_out` are cast to its dtype;
    sums are kept in float32.  No gradients are recorded.

    Raises ValueError for shapes, devices or block sizes that do not fit, for `accumulate` without an
    `existing_out` and for results that share memory with an operand or with each other, TypeError for
    dtypes, before anything is written.
    """
    named = {"bias_grad": bias_grad, "preferred_element_type": preferred_element_type}
    how = existing_out, accumulate, config, grid_dim, trans_lhs, bias_grad_from
    return transposed(ptgmm, lhs, rhs, group_sizes, fourth, named, *how)


def nptgmm(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *fourth: Tensor | torch.dtype | None,
    bias_grad: Tensor | None = None, preferred_element_type: torch.dtype | None = None,
    existing_out: Tensor | None = None, accumulate: bool = False, config: dict[str, int] | None = None,
    trans_lhs: bool | None = None, bias_grad_from: str = "lhs",
) -> Tensor:  # fmt: skip
    """Compute `ptgmm` with one program for each tile instead of persistent programs.

    With the same block sizes, both give the same bits.  The Hopper kernel is persistent for both names.
    """
    named = {"bias_grad": bias_grad, "preferred_element_type": preferred_element_type}
    how = existing_out, accumulate, config, None, trans_lhs, bias_grad_from
    return transposed(nptgmm, lhs, rhs, group_sizes, fourth, named, *how)


def transposed(
    fn: Callable, lhs: Tensor, rhs: Tensor, group_sizes: Tensor, fourth: tuple, named: dict,
    existing_out: Tensor | None, accumulate: bool, config: dict[str, int] | None, grid_dim: int | None,
    trans_lhs: bool | None, bias_grad_from: str,
) -> Tensor:  # fmt: skip
    bias_grad, preferred = fourth_argument(fn, fourth, **named) if fourth else named.values()
    check_shape("lhs", lhs, "K", "M")
    check_shape("rhs", rhs, "M", "N")
    if existing_out is None:
        lhs, rhs = cast_as_linear(lhs, rhs)
    lhs = oriented("trans_lhs", lhs, -1, rhs.shape[0], trans_lhs)
    check_axes(lhs=(lhs, "K, M"), rhs=(rhs, "M, N"))
    check_float(lhs=lhs, rhs=rhs)
    check_groups(group_sizes, lhs, "lhs", rhs=rhs)
    (K, M), N, G = lhs.shape, rhs.shape[1], group_sizes.shape[0]
    if bias_grad_from not in ("lhs", "rhs"):
        raise ValueError(f"bias_grad_from must be 'lhs' or 'rhs', not {bias_grad_from!r}")
    if bias_grad is not None:
        check_tensor("bias_grad", bias_grad)
        check_device(lhs=lhs, bias_grad=bias_grad)
    check_flags(accumulate=accumulate)
    if accumulate and existing_out is None:
        raise ValueError("accumulate=True adds to an existing_out, but there is none")
    if existing_out is None:
        out = lhs.new_empty(G, K, N, dtype=result_dtype(preferred, lhs))
    else:
        out = existing_out
        check_existing(out, preferred)
        check_device(lhs=lhs, existing_out=out)
        check_sum("existing_out", out, (G, K, N))
    tile, programs = tile_of(fn.__name__, config, (M, K, N, G), lhs.dtype, grid_dim, accumulate)
    with torch.no_grad():
        sums = (bias_grad, bias_grad_from == "rhs", tile, programs)
        tgmm_into_op(out, lhs.mT, rhs, group_sizes, None, 1, bool(accumulate), *sums)
    return out
