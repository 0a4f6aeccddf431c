"""Gradients of weights from 8-bit rows: a transposed grouped matmul whose operands are quantised.

    out[g] = the sum over a group's rows r of x[t] outer y[r],        t = order[r] // top_k

x is given as 8-bit rows with scales (`quantize_rows`), as for products that sum over its columns.  A sum over
rows cannot factor out a scale that each of them has, so y takes it over: the numbers y[r] * scale[t] are
quantised, with a scale for each column and each CHUNK rows of a group.

On Hopper both are laid out by columns (`token_chunks`) and multiplied as they are.  Elsewhere, and for sizes
that do not fit, what the quantised numbers stand for is multiplied in the dtype of x.
"""

import torch
from torch import Tensor

from ...op import define_inplace_op, define_op, launcher, pick
from .. import hopper
from ..base.check import check_float, check_plan_values, sum_dtype, take_rows
from ..quantize.blocks import plan_chunks, quantize_chunks, rows_of_chunks, transpose_chunks
from ..quantize.rows import FORMATS, dequantize_rows
from .tgmm import check_sum, shape_of_tgmm, tgmm_into_op

# reference


def rounded_operands(x8, factor, y, group_sizes, order, top_k, format) -> tuple[Tensor, Tensor]:
    """What the quantised numbers stand for, without the scales of x in y."""
    _, chunks = plan_chunks(group_sizes, len(y))
    y8, y_scale = quantize_chunks(y, factor, order, top_k, chunks, format)
    folded = rows_of_chunks(dequantize_rows(y8, y_scale, sum_dtype(y)), chunks, len(y))
    dtype, y = y.dtype, folded / take_rows(factor, order, top_k)[:, None]
    return dequantize_rows(x8, factor, dtype), y.to(dtype)


def rounded_tgmm(out, x8, factor, y, group_sizes, order, top_k, columns_first, format) -> None:
    operands = rounded_operands(x8, factor, y, group_sizes, order, top_k, format)
    inputs = *operands, group_sizes, order, top_k, columns_first
    launcher("tgmm", pick("tgmm", *inputs))(out, *inputs)


def rounded_tgmm_into(out, x8, factor, y, group_sizes, order, top_k, format) -> None:
    operands = rounded_operands(x8, factor, y, group_sizes, order, top_k, format)
    tgmm_into_op(out, *operands, group_sizes, order, top_k)


# launcher


def lay_out(x8, factor, y, group_sizes, order, top_k, format) -> tuple[Tensor, ...]:
    """The operands of a product by tensor cores: x (C, K, CHUNK), y (C, N, CHUNK) and its scales, places."""
    places, chunks = plan_chunks(group_sizes, len(y))
    y8 = quantize_chunks(y, factor, order, top_k, chunks, format)
    return transpose_chunks(x8, order, top_k, chunks), *y8, places


def multiply(out, *operands, accumulate=False) -> None:
    """`out` is (G, K, N).  The rows of the product are y's columns: of their scales a thread needs few."""
    hopper.launcher("tgmm", "launch_tgmm_fp8")(out.mT, *operands, accumulate)


def launch_tgmm_into(out, *inputs) -> None:
    multiply(out, *lay_out(*inputs), accumulate=True)


def launch_tgmm(out, x8, factor, y, group_sizes, order, top_k, columns_first, format) -> None:
    out = out.mT if columns_first else out
    multiply(out, *lay_out(x8, factor, y, group_sizes, order, top_k, format))


launch_tgmm.fits, launch_tgmm_into.fits = hopper.fits_tgmm_fp8, hopper.fits_tgmm_fp8

# op


def check_operands(x8, factor, y, group_sizes, order, top_k, format, **others) -> tuple[int, int, int]:
    """(G, K, N)."""
    shape = shape_of_tgmm(x8, y, group_sizes, order, top_k, factor=factor, **others)
    check_float(y=y)
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if x8.dtype not in FORMATS.values():
        raise TypeError(f"x8 must be of 8-bit floats, not {x8.dtype}")
    if factor.shape != x8.shape[:1] or factor.dtype != torch.float32:
        raise ValueError(
            f"factor must be ({x8.shape[0]},) in float32, not {tuple(factor.shape)} in {factor.dtype}"
        )
    return shape


def new_tgmm_fp8(x8, factor, y, group_sizes, order, top_k, columns_first, format):
    G, K, N = check_operands(x8, factor, y, group_sizes, order, top_k, format)
    return y.new_empty(G, N, K) if columns_first else y.new_empty(G, K, N)


INPUTS = "Tensor x8, Tensor factor, Tensor y, Tensor group_sizes, Tensor order, int top_k"
tgmm_fp8_op = define_op(
    f"tgmm_fp8({INPUTS}, bool columns_first, str format) -> Tensor",
    new=new_tgmm_fp8,
    check_values=lambda x8, factor, y, sizes, order, *_: check_plan_values(len(y), sizes, order),
    torch=rounded_tgmm,
    triton=rounded_tgmm,
    hopper=launch_tgmm,
)
tgmm_fp8_into_op = define_inplace_op(
    f"tgmm_fp8_into(Tensor(a!) existing_out, {INPUTS}, str format) -> ()",
    check=lambda out, *inputs: check_sum("out", out, check_operands(*inputs, out=out)),
    check_values=lambda out, x8, factor, y, sizes, order, *_: check_plan_values(len(y), sizes, order),
    reference=rounded_tgmm_into,
    triton=rounded_tgmm_into,
    hopper=launch_tgmm_into,
)


def weight_gradient_fp8(
    x8: tuple[Tensor, Tensor], format: str, w, main_grad, _, y, group_sizes, order, top_k
) -> Tensor | None:
    """`weight_gradient` of 8-bit floats: rows and scales x8 take the place of x, and y gets this format."""
    inputs = *x8, y, group_sizes, order, top_k
    if main_grad is not None:
        return tgmm_fp8_into_op(main_grad, *inputs, format)
    columns_first = w.stride(1) < w.stride(2)
    dw = tgmm_fp8_op(*inputs, columns_first, format)
    return dw.mT if columns_first else dw
