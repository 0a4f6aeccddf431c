"""Gradients of weights from 8-bit rows: a transposed grouped matmul whose operands are quantised.

    out[g] = the sum over a group's rows r of x[t] outer y[r],        t = order[r] // top_k

x is quantised by rows, as for products that sum over its columns.  A sum over rows cannot factor out a scale
that each of them has, so y takes it over: the numbers y[r] * scale[t] are quantised, with a scale for each
column and each CHUNK rows of a group.

On Hopper both are laid out by columns (`token_chunks`) and multiplied as they are.  Elsewhere, and for sizes
that do not fit, what the quantised numbers stand for is multiplied in the dtype of x.
"""

from torch import Tensor

from ..backend import define_inplace_op, define_op, pick
from . import hopper
from ._groups import sum_dtype, take_rows
from .chunk_plan import plan_chunks, rows_of_chunks
from .quantize import FORMATS, dequantize_rows, quantize_rows
from .tgmm import check_tgmm_into, check_tgmm_values, new_tgmm
from .token_chunks import quantize_chunks, transpose_chunks

# reference


def rounded_operands(x, y, group_sizes, order, top_k, x_format, y_format) -> tuple[Tensor, Tensor]:
    """What the quantised numbers stand for, without the scales of x in y."""
    x8, factor = quantize_rows(x, x_format)
    _, chunks = plan_chunks(group_sizes, len(y))
    y8, y_scale = quantize_chunks(y, factor, order, top_k, chunks, y_format)
    folded = rows_of_chunks(dequantize_rows(y8, y_scale, sum_dtype(y)), chunks, len(y))
    y = (folded / take_rows(factor, order, top_k)[:, None]).to(y.dtype)
    return dequantize_rows(x8, factor, x.dtype), y


def rounded_tgmm(out, x, y, group_sizes, order, top_k, columns_first, *formats) -> None:
    operands = rounded_operands(x, y, group_sizes, order, top_k, *formats)
    inputs = *operands, group_sizes, order, top_k, columns_first
    pick("tgmm", *inputs)(out, *inputs)


def rounded_tgmm_into(out, x, y, group_sizes, order, top_k, *formats) -> None:
    operands = rounded_operands(x, y, group_sizes, order, top_k, *formats)
    inputs = *operands, group_sizes, order, top_k, True, None, False, (), 0
    pick("tgmm_into", *inputs, out)(out, *inputs)


# launcher


def lay_out(x, y, group_sizes, order, top_k, x_format, y_format) -> tuple[Tensor, ...]:
    """The operands of a product by tensor cores: x (C, K, CHUNK), y (C, N, CHUNK) and its scales, places."""
    x8, factor = quantize_rows(x, x_format)
    places, chunks = plan_chunks(group_sizes, len(y))
    y8 = quantize_chunks(y, factor, order, top_k, chunks, y_format)
    return transpose_chunks(x8, order, top_k, chunks), *y8, places


def multiply(out, *operands, accumulate=False) -> None:
    """`out` is (G, K, N).  The rows of the product are y's columns: of their scales a thread needs few."""
    hopper.launcher("tgmm_fp8", "launch_tgmm_fp8")(out.mT, *operands, accumulate)


def launch_tgmm_into(out, *inputs) -> None:
    multiply(out, *lay_out(*inputs), accumulate=True)


def launch_tgmm(out, x, y, group_sizes, order, top_k, columns_first, *formats) -> None:
    out = out.mT if columns_first else out
    multiply(out, *lay_out(x, y, group_sizes, order, top_k, *formats))


launch_tgmm.takes = launch_tgmm_into.takes = hopper.DTYPES
launch_tgmm.fits, launch_tgmm_into.fits = hopper.fits_tgmm_fp8, hopper.fits_tgmm_fp8

# op


def check_formats(*formats: str) -> None:
    for format in formats:
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")


def new_tgmm_fp8(x, y, group_sizes, order, top_k, columns_first, *formats):
    check_formats(*formats)
    return new_tgmm(x, y, group_sizes, order, top_k, columns_first)


def check_tgmm_fp8_into(out, x, y, group_sizes, order, top_k, *formats):
    check_formats(*formats)
    check_tgmm_into(out, x, y, group_sizes, order, top_k, True, None, False, (), 0)


INPUTS = "Tensor x, Tensor y, Tensor group_sizes, Tensor order, int top_k"
tgmm_fp8_op = define_op(
    f"tgmm_fp8({INPUTS}, bool columns_first, str x_format, str y_format) -> Tensor",
    new=new_tgmm_fp8,
    check_values=check_tgmm_values,
    torch=rounded_tgmm,
    triton=rounded_tgmm,
    hopper=launch_tgmm,
)
tgmm_fp8_into_op = define_inplace_op(
    f"tgmm_fp8_into(Tensor(a!) existing_out, {INPUTS}, str x_format, str y_format) -> ()",
    check=check_tgmm_fp8_into,
    check_values=lambda out, *inputs: check_tgmm_values(*inputs),
    reference=rounded_tgmm_into,
    triton=rounded_tgmm_into,
    hopper=launch_tgmm_into,
)


def weight_gradient_fp8(
    x_format: str, y_format: str, w, main_grad, x, y, group_sizes, order, top_k
) -> Tensor | None:
    """`weight_gradient` of 8-bit floats in these formats."""
    if main_grad is not None:
        return tgmm_fp8_into_op(main_grad, x, y, group_sizes, order, top_k, x_format, y_format)
    columns_first = w.stride(1) < w.stride(2)
    dw = tgmm_fp8_op(x, y, group_sizes, order, top_k, columns_first, x_format, y_format)
    return dw.mT if columns_first else dw
