"""Gradients of weights from 8-bit rows: a transposed grouped matmul whose operands are quantised.

    out[g] = the sum over a group's rows r of x[t] outer y[r],        t = order[r] // top_k

x is given as 8-bit rows with scales (`quantize_rows`), as for products that sum over its columns.  A sum over
rows cannot factor out a scale that each of them has, so y takes it over: the numbers y[r] * scale[t] are
quantised, with a scale for each column and each ROW_BLOCK rows of a group.  `quantize_y` does so before the
product, which then needs y no longer.

On Hopper the rows of x are laid out by columns as well (quantize/blocks.py), and both are multiplied as they
are.  For each expert of a token x is there once, so it comes in slices of its columns, as few as take
`x_bytes` each, MOST at most.  The result has the same bits for any slices.  On other devices, and for sizes
that do not fit, both operands are dequantised and multiplied in the dtype of y.

`scaled_tgmm_into` takes x and y (M, N) that are both quantised before, with a scale for each column of each
group.  Such scales are constant along the sum, so they multiply it at its end, and x need not be known when
y is quantised:

    out[g] = (x[s:e].T @ y[s:e]) * x_scale[g][:, None] * y_scale[g]

On Hopper both operands are laid out by columns.  Other devices convert them to float16, where each 8-bit
float is exact, and multiply that.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import Written, binds, define_inplace_op, define_op, extended, fill
from .. import hopper
from ..base.check import (
    Float8,
    Index,
    check_fields,
    check_plan_values,
    check_row_values,
    check_rows,
    take_rows,
    wide,
)
from ..base.fp8 import FP8, ROW_BLOCK, check_scales
from ..base.launch import cdiv
from ..base.tile import BLOCK, column_slices
from ..quantize.blocks import (
    most_row_blocks,
    plan_row_blocks,
    quantize_row_blocks,
    rows_of_blocks,
    transpose_row_blocks,
)
from ..quantize.layouts import transpose_rows8
from ..quantize.rows import check_float32, dequantize_rows
from .tgmm import MOST, TgmmInputs, check_sum, tgmm_into_op


class RowBlocks(NamedTuple):
    """y, times the scales of x, as `quantize_y` returns it."""

    y8: Tensor  # (C, N, ROW_BLOCK)
    y_scale: Tensor  # (C, N)
    spans: Tensor  # (G, 3)
    row_blocks: Tensor  # (C, 2)
    dtype: torch.dtype | None  # of y


class TgmmFp8Operands(NamedTuple):
    """The inputs of both ops below: out[g] = the sum of x[order[r] // top_k] outer y[r] of g."""

    x8: Annotated[Float8, "T, K"]
    factor: Tensor  # (T,), the scales of the rows of x8
    y8: Annotated[Float8, "C, N, ROW_BLOCK"]
    y_scale: Annotated[Tensor, "C, N"]
    spans: Annotated[Tensor, "G, 3"]
    row_blocks: Annotated[Tensor, "C, 2"]
    dtype: torch.dtype | None
    group_sizes: Annotated[Index, "G"]
    order: Annotated[Index, "M"]
    top_k: int
    x_bytes: int | torch.SymInt  # the most for a slice of the columns of x


# `tgmm_fp8`, which returns (G, N, K) with columns_first, else (G, K, N), and `tgmm_fp8_into`, which adds it
TgmmFp8Inputs = extended("TgmmFp8Inputs", TgmmFp8Operands, columns_first=bool)
TgmmFp8IntoInputs = extended("TgmmFp8IntoInputs", TgmmFp8Operands, {"existing_out": Written})


# reference


def rounded_operands(i: TgmmFp8Inputs | TgmmFp8IntoInputs) -> tuple:
    """Return the first inputs of `tgmm`: what the quantised numbers stand for, without the scales of x in y,
    and the plan."""
    wide = torch.promote_types(i.dtype, torch.float32)
    folded = rows_of_blocks(dequantize_rows(i.y8, i.y_scale, wide), i.row_blocks, len(i.order))
    y = folded / take_rows(i.factor, i.order, i.top_k)[:, None]
    x = dequantize_rows(i.x8, i.factor, i.dtype)
    return x, y.to(i.dtype), i.group_sizes, i.order, i.top_k


def rounded_tgmm(out: Tensor, i: TgmmFp8Inputs) -> None:
    fill("tgmm", out, TgmmInputs(*rounded_operands(i), i.columns_first))


def rounded_tgmm_into(i: TgmmFp8IntoInputs) -> None:
    tgmm_into_op(i.existing_out, *rounded_operands(i))


# launcher


def lay_out(i: TgmmFp8Inputs | TgmmFp8IntoInputs, k: slice) -> tuple[Tensor, ...]:
    """Return the operands x (C, columns k, ROW_BLOCK) and y, the scales of y, and the spans."""
    return transpose_row_blocks(i.x8[:, k], i.order, i.top_k, i.row_blocks), i.y8, i.y_scale, i.spans


def bind_columns(
    i: TgmmFp8Inputs | TgmmFp8IntoInputs, columns: int, out_strides: Sequence[int], accumulate: bool = False
) -> Callable[..., None]:
    """Return `product(out, *operands)` for so many columns of x, a result with these strides along (G, N, K),
    and operands that `lay_out` returns.  The rows of the product are y's columns: of their scales a thread
    needs few."""
    (C, N, _), G = i.y8.shape, i.group_sizes.shape[0]
    bind = hopper.launcher("tgmm", "bind_tgmm_fp8")
    return bind(i.y8, (C, G, N, columns), out_strides, accumulate)


def bind_slices(i: TgmmFp8Inputs | TgmmFp8IntoInputs, axis: int, *how) -> Callable:
    """Return `launch(out, i)`, which multiplies slice after slice of x.  K is this axis of `out`."""
    column_bytes, K = len(i.row_blocks) * ROW_BLOCK, i.x8.shape[1]
    least = column_bytes * cdiv(K, MOST * BLOCK) * BLOCK
    slices = column_slices(K, column_bytes, max(i.x_bytes, least))
    products = [(k, bind_columns(i, k.stop - k.start, *how)) for k in slices]

    def launch(out, i):
        for k, product in products:
            product(out.narrow(axis, k.start, k.stop - k.start), *lay_out(i, k))

    return launch


@binds
def bind_tgmm_fp8(i: TgmmFp8Inputs) -> Callable:
    N, K = i.y8.shape[1], i.x8.shape[1]
    return bind_slices(i, 2, (N * K, K, 1)) if i.columns_first else bind_slices(i, 1, (K * N, 1, N))


@binds
def bind_tgmm_fp8_into(i: TgmmFp8IntoInputs) -> Callable:
    return bind_slices(i, 1, i.existing_out.mT.stride(), True)


bind_tgmm_fp8.fits = bind_tgmm_fp8_into.fits = hopper.fits_tgmm_fp8

# op


def shape_of_tgmm_fp8(i: TgmmFp8Inputs | TgmmFp8IntoInputs) -> tuple[int, int, int]:
    """(G, K, N), once the inputs fit together."""
    check_rows("x8", i.x8, "K", i.order, i.top_k, i.order.shape[0])
    size = check_fields(i)
    check_float32("factor", i.factor, i.x8.shape[0])
    return size["G"], size["K"], size["N"]


def new_tgmm_fp8(i: TgmmFp8Inputs) -> Tensor:
    G, K, N = shape_of_tgmm_fp8(i)
    return i.y8.new_empty((G, N, K) if i.columns_first else (G, K, N), dtype=i.dtype)


tgmm_fp8_op = define_op(
    "tgmm_fp8", TgmmFp8Inputs, new=new_tgmm_fp8, check_values=lambda i: check_row_values(i.x8, i),
    torch=rounded_tgmm, triton=rounded_tgmm, hopper=bind_tgmm_fp8,
)  # fmt: skip
tgmm_fp8_into_op = define_inplace_op(
    "tgmm_fp8_into", TgmmFp8IntoInputs,
    check=lambda i: check_sum("out", i.existing_out, shape_of_tgmm_fp8(i)),
    check_values=lambda i: check_row_values(i.x8, i),
    reference=rounded_tgmm_into, triton=lambda out, i: rounded_tgmm_into(i), hopper=bind_tgmm_fp8_into,
)  # fmt: skip


# scaled_tgmm: inputs


class ScaledTgmmInputs(NamedTuple):
    """The inputs of the op `scaled_tgmm_into`."""

    existing_out: Written  # (G, K, N)
    x: Annotated[Tensor, "M, K"]
    y: Annotated[Tensor, "M, N"]
    group_sizes: Annotated[Index, "G"]
    x_scale: Tensor  # (G, K)
    y_scale: Tensor  # (G, N)
    accumulate: bool


# scaled_tgmm: reference


def fill_scaled_tgmm(i: ScaledTgmmInputs) -> None:
    end = i.group_sizes.long().clamp(0, len(i.x)).cumsum(0).clamp(max=len(i.x))
    empty = end.diff(prepend=end.new_zeros(1)) == 0  # such a group may have any scales
    product = i.existing_out.new_empty(i.existing_out.shape, dtype=torch.float32)
    tgmm_into_op(product, i.x.to(torch.float16), i.y.to(torch.float16), i.group_sizes, None, 1, False)
    product *= i.x_scale[:, :, None]
    product *= i.y_scale[:, None, :]
    product.masked_fill_(empty[:, None, None], 0)
    i.existing_out.copy_(wide(i.existing_out) + product if i.accumulate else product)


# scaled_tgmm: launcher


@binds
def bind_scaled_tgmm(i: ScaledTgmmInputs) -> Callable:
    (M, K), N, G, out = i.x.shape, i.y.shape[1], i.group_sizes.shape[0], i.existing_out
    stored = not i.accumulate and hopper.stores_weights(out)  # else it is added to what is there
    sizes = most_row_blocks(M, G), G, K, N
    product = hopper.launcher("tgmm", "bind_tgmm_fp8")(i.x, sizes, out.stride(), not stored)
    turned = stored and out.stride(2) != 1

    def launch(out, i):
        if not (stored or i.accumulate):
            out.zero_()
        spans, row_blocks = plan_row_blocks(i.group_sizes, M)
        x8, y8 = (transpose_row_blocks(in_rows(t), None, 1, row_blocks) for t in (i.x, i.y))
        scales = i.x_scale.contiguous(), i.y_scale.contiguous()
        product(out.mT if turned else out, y8, x8, None, spans, scales)

    return launch


def in_rows(x: Tensor) -> Tensor:
    """x (M, K), whose columns may lie side by side, by rows."""
    return x if x.stride(1) == 1 else transpose_rows8(x.mT[None])[0]


bind_scaled_tgmm.fits = hopper.fits_scaled_tgmm

# scaled_tgmm: op


def check_scaled_tgmm(i: ScaledTgmmInputs) -> None:
    size = check_fields(i)
    for name, t in (("x", i.x), ("y", i.y)):
        if t.dtype not in FP8:
            raise TypeError(f"{name} must be of 8-bit floats, not {t.dtype}")
    G, K, N = size["G"], size["K"], size["N"]
    check_scales((G, K), (G, N), i.x_scale, i.y_scale)
    check_sum("existing_out", i.existing_out, (G, K, N))


scaled_tgmm_into_op = define_inplace_op(
    "scaled_tgmm_into", ScaledTgmmInputs, check=check_scaled_tgmm,
    check_values=lambda i: check_plan_values(len(i.x), i.group_sizes),
    reference=fill_scaled_tgmm, triton=lambda out, i: fill_scaled_tgmm(i), hopper=bind_scaled_tgmm,
)  # fmt: skip


def num_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def quantize_y(
    plan: tuple[Tensor, Tensor], order: Tensor, top_k: int, format: str, factor: Tensor, y: Tensor
) -> RowBlocks:
    """Return the rows y (M, N), times factor[order // top_k], in this format, by a `plan_row_blocks`."""
    return RowBlocks(*quantize_row_blocks(y, factor, order, top_k, plan[1], format), *plan, y.dtype)


def weight_gradient_fp8(
    x8: tuple[Tensor, Tensor], room: int, w, main_grad, _, y: RowBlocks, group_sizes, order, top_k
) -> Tensor | None:
    """`weight_gradient` of 8-bit floats: rows and scales x8 take the place of x, and row blocks that of y.

    The bytes of `room` are for the operands, for a slice of x by columns, and for the result.
    """
    inputs, x_bytes = (*x8, *y, group_sizes, order, top_k), room - num_bytes(*x8, *y[:-1])
    if main_grad is not None:
        return tgmm_fp8_into_op(main_grad, *inputs, x_bytes)
    columns_first = w.stride(1) < w.stride(2)
    dw = tgmm_fp8_op(*inputs, x_bytes - num_bytes(w), columns_first)
    return dw.mT if columns_first else dw
