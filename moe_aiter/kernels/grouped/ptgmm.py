"""Transposed grouped matmul by AITER's names: `tgmm` with (K, M) operands, into a tensor that is there.

    out[g] = lhs[:, s:e] @ rhs[s:e]              of 8 bits, times lhs_scale[g][:, None] * rhs_scale[g]

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
    refuse_gradient,
    renamed,
    result_dtype,
)
from ..base.fp8 import check_8_bit_options, check_two_scales, has_8_bits
from .tgmm import check_sum, tgmm_into_op
from .tgmm_fp8 import scaled_tgmm_into_op


def ptgmm(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *fourth: Tensor | torch.dtype | None,
    bias_grad: Tensor | None = None, preferred_element_type: torch.dtype | None = None,
    existing_out: Tensor | None = None, accumulate: bool = False, config: dict[str, int] | None = None,
    grid_dim: int | None = None, trans_lhs: bool | None = None, bias_grad_from: str = "lhs",
    lhs_scale: Tensor | None = None, rhs_scale: Tensor | None = None,
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

    lhs_scale, rhs_scale: (G, K) and (G, N) float32, for operands that are 8-bit floats (e4m3fn, e4m3fnuz,
        e5m2, in any pair): one scale for each column of each group, because what is constant along a sum can
        multiply it at its end.  One scale for each column of all groups is `scale.expand(G, -1)`.  The result
        is bfloat16 unless asked for in another dtype.  Neither `bias_grad`, `config` nor `grid_dim`.  GPUs
        other than Hopper multiply in float16, which holds every 8-bit float.

    Without scales `lhs` and `rhs` share a dtype, or under torch.autocast without an `existing_out` are cast
    to its dtype; sums are kept in float32.  No gradients are recorded.

    Raises ValueError for shapes, devices or block sizes that do not fit, for `accumulate` without an
    `existing_out` and for results that share memory with an operand or with each other, TypeError for
    dtypes, RuntimeError where 8 bits would need a gradient, before anything is written.
    """
    named = {"bias_grad": bias_grad, "preferred_element_type": preferred_element_type}
    how = existing_out, accumulate, config, grid_dim, trans_lhs, bias_grad_from
    return transposed(ptgmm, lhs, rhs, group_sizes, fourth, named, *how, scales=(lhs_scale, rhs_scale))


def nptgmm(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *fourth: Tensor | torch.dtype | None,
    bias_grad: Tensor | None = None, preferred_element_type: torch.dtype | None = None,
    existing_out: Tensor | None = None, accumulate: bool = False, config: dict[str, int] | None = None,
    trans_lhs: bool | None = None, bias_grad_from: str = "lhs", lhs_scale: Tensor | None = None,
    rhs_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `ptgmm` with one program for each tile instead of persistent programs.

    With the same block sizes, both give the same bits.  The Hopper kernel is persistent for both names.
    """
    named = {"bias_grad": bias_grad, "preferred_element_type": preferred_element_type}
    how = existing_out, accumulate, config, None, trans_lhs, bias_grad_from
    return transposed(nptgmm, lhs, rhs, group_sizes, fourth, named, *how, scales=(lhs_scale, rhs_scale))


def transposed(
    fn: Callable, lhs: Tensor, rhs: Tensor, group_sizes: Tensor, fourth: tuple, named: dict,
    existing_out: Tensor | None, accumulate: bool, config: dict[str, int] | None, grid_dim: int | None,
    trans_lhs: bool | None, bias_grad_from: str, *, scales: tuple[Tensor | None, Tensor | None],
) -> Tensor:  # fmt: skip
    bias_grad, preferred = fourth_argument(fn, fourth, **named) if fourth else named.values()
    check_shape("lhs", lhs, "K", "M")
    check_shape("rhs", rhs, "M", "N")
    eight_bits = has_8_bits(lhs, rhs, lhs_scale=scales[0], rhs_scale=scales[1])
    if existing_out is None and not eight_bits:
        lhs, rhs = cast_as_linear(lhs, rhs)
    lhs = oriented("trans_lhs", lhs, -1, rhs.shape[0], trans_lhs)
    check_axes(lhs=(lhs, "K, M"), rhs=(rhs, "M, N"))
    if not eight_bits:
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
        preferred = preferred or (torch.bfloat16 if eight_bits else lhs.dtype)
        out = lhs.new_empty(G, K, N, dtype=result_dtype(preferred, lhs))
    else:
        out = existing_out
        check_existing(out, preferred)
        check_device(lhs=lhs, existing_out=out)
        check_sum("existing_out", out, (G, K, N))
    if eight_bits:
        check_8_bit_options(bias_grad=bias_grad, config=config, grid_dim=grid_dim)
        transposed_8_bits(out, lhs.mT, rhs, group_sizes, *scales, bool(accumulate))
        return out
    tile, programs = tile_of(fn.__name__, config, (M, K, N, G), lhs.dtype, grid_dim, accumulate)
    with torch.no_grad():
        sums = (bias_grad, bias_grad_from == "rhs", tile, programs)
        tgmm_into_op(out, lhs.mT, rhs, group_sizes, None, 1, bool(accumulate), *sums)
    return out


@renamed(x="lhs", y="rhs", x_scale="lhs_scale", y_scale="rhs_scale", w_scale="rhs_scale")
def transposed_8_bits(
    out: Tensor, x: Tensor, y: Tensor, group_sizes: Tensor, x_scale: Tensor | None, y_scale: Tensor | None,
    accumulate: bool,
) -> None:  # fmt: skip
    check_two_scales(x_scale=x_scale, y_scale=y_scale)
    refuse_gradient("a product of 8 bits", x, y, x_scale, y_scale)
    with torch.no_grad():
        scaled_tgmm_into_op(out, x, y, group_sizes, x_scale, y_scale, accumulate)
