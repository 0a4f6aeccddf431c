"""Gradients of weights from 8-bit rows: a transposed grouped matmul whose operands are quantised.

    out[g] = the sum over a group's rows r of x[t] outer y[r],        t = order[r] // top_k

x is given as 8-bit rows with scales (`quantize_rows`), as for products that sum over its columns.  A sum over
rows cannot factor out a scale that each of them has, so y takes it over: the numbers y[r] * scale[t] are
quantised, with a scale for each column and each ROW_BLOCK rows of a group.

On Hopper both are laid out by columns (quantize/blocks.py) and multiplied as they are.  On other devices, and
for sizes that do not fit, both are dequantised and multiplied in the dtype of x.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ...op import Written, binds, define_inplace_op, define_op, launcher, pick
from .. import hopper
from ..base.check import check_float, sum_dtype, take_rows
from ..quantize.blocks import (
    most_row_blocks,
    plan_row_blocks,
    quantize_row_blocks,
    rows_of_blocks,
    transpose_row_blocks,
)
from ..quantize.rows import FORMATS, check_float32, check_format, dequantize_rows
from .tgmm import check_sum, check_tgmm_values, shape_of_tgmm, tgmm_into_op


class TgmmFp8Inputs(NamedTuple):
    """The inputs of the op `tgmm_fp8`: out[g] = the sum of x[order[r] // top_k] outer y[r] of g."""

    x8: Tensor  # (T, K)
    factor: Tensor  # (T,), the scales of the rows of x8
    y: Tensor  # (M, N)
    group_sizes: Tensor  # (G,)
    order: Tensor  # (M,)
    top_k: int
    columns_first: bool  # return (G, N, K), else (G, K, N)
    format: str  # of the 8-bit floats that y becomes


class TgmmFp8IntoInputs(NamedTuple):
    """The inputs of the op `tgmm_fp8_into`: `tgmm_fp8`, added to a tensor that is there."""

    existing_out: Written  # (G, K, N)
    x8: Tensor  # (T, K)
    factor: Tensor  # (T,)
    y: Tensor  # (M, N)
    group_sizes: Tensor  # (G,)
    order: Tensor  # (M,)
    top_k: int
    format: str


# reference


def rounded_operands(i: TgmmFp8Inputs | TgmmFp8IntoInputs) -> tuple:
    """Return the first inputs of `tgmm`: what the quantised numbers stand for, without the scales of x in y,
    and the plan."""
    _, row_blocks = plan_row_blocks(i.group_sizes, len(i.y))
    y8, y_scale = quantize_row_blocks(i.y, i.factor, i.order, i.top_k, row_blocks, i.format)
    folded = rows_of_blocks(dequantize_rows(y8, y_scale, sum_dtype(i.y)), row_blocks, len(i.y))
    y = folded / take_rows(i.factor, i.order, i.top_k)[:, None]
    x = dequantize_rows(i.x8, i.factor, i.y.dtype)
    return x, y.to(i.y.dtype), i.group_sizes, i.order, i.top_k


def rounded_tgmm(out, *inputs) -> None:
    i = TgmmFp8Inputs(*inputs)
    inputs = *rounded_operands(i), i.columns_first
    launcher("tgmm", pick("tgmm", *inputs))(out, *inputs)


def rounded_tgmm_into(*inputs) -> None:
    i = TgmmFp8IntoInputs(*inputs)
    tgmm_into_op(i.existing_out, *rounded_operands(i))


# launcher


def lay_out(i: TgmmFp8Inputs | TgmmFp8IntoInputs) -> tuple[Tensor, ...]:
    """Return the operands x (C, K, ROW_BLOCK) and y (C, N, ROW_BLOCK), the scales of y, and the spans."""
    spans, row_blocks = plan_row_blocks(i.group_sizes, len(i.y))
    y8 = quantize_row_blocks(i.y, i.factor, i.order, i.top_k, row_blocks, i.format)
    return transpose_row_blocks(i.x8, i.order, i.top_k, row_blocks), *y8, spans


def bind_product(
    i: TgmmFp8Inputs | TgmmFp8IntoInputs, out_strides: Sequence[int], accumulate: bool = False
) -> Callable[..., None]:
    """Return `product(out, *operands)` for a result with these strides along (G, N, K), and operands that
    `lay_out` returns.  The rows of the product are y's columns: of their scales a thread needs few."""
    (M, N), K, G = i.y.shape, i.x8.shape[1], i.group_sizes.shape[0]
    bind, sizes = hopper.launcher("tgmm", "bind_tgmm_fp8"), (most_row_blocks(M, G), G, N, K)
    return bind(i.y, FORMATS[i.format], sizes, out_strides, accumulate)


@binds
def bind_tgmm_fp8(i: TgmmFp8Inputs) -> Callable:
    N, K = i.y.shape[1], i.x8.shape[1]
    product = bind_product(i, (N * K, K, 1) if i.columns_first else (K * N, 1, N))
    return lambda out, i: product(out, *lay_out(i))


@binds
def bind_tgmm_fp8_into(i: TgmmFp8IntoInputs) -> Callable:
    product = bind_product(i, i.existing_out.mT.stride(), accumulate=True)
    return lambda out, i: product(out, *lay_out(i))


bind_tgmm_fp8.fits = bind_tgmm_fp8_into.fits = hopper.fits_tgmm_fp8

# op


def check_operands(i: TgmmFp8Inputs | TgmmFp8IntoInputs, **others: Tensor) -> tuple[int, int, int]:
    """(G, K, N)."""
    shape = shape_of_tgmm(i.x8, i.y, i.group_sizes, i.order, i.top_k, factor=i.factor, **others)
    check_float(y=i.y)
    check_format(i.format)
    if i.x8.dtype not in FORMATS.values():
        raise TypeError(f"x8 must be of 8-bit floats, not {i.x8.dtype}")
    check_float32("factor", i.factor, i.x8.shape[0])
    return shape


def new_tgmm_fp8(i: TgmmFp8Inputs) -> Tensor:
    G, K, N = check_operands(i)
    return i.y.new_empty(G, N, K) if i.columns_first else i.y.new_empty(G, K, N)


def check_tgmm_fp8_into(i: TgmmFp8IntoInputs) -> None:
    check_sum("out", i.existing_out, check_operands(i, out=i.existing_out))


tgmm_fp8_op = define_op(
    "tgmm_fp8",
    TgmmFp8Inputs,
    new=new_tgmm_fp8,
    check_values=check_tgmm_values,
    torch=rounded_tgmm,
    triton=rounded_tgmm,
    hopper=bind_tgmm_fp8,
)
tgmm_fp8_into_op = define_inplace_op(
    "tgmm_fp8_into",
    TgmmFp8IntoInputs,
    check=check_tgmm_fp8_into,
    check_values=check_tgmm_values,
    reference=lambda i: rounded_tgmm_into(*i),
    triton=rounded_tgmm_into,
    hopper=bind_tgmm_fp8_into,
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
