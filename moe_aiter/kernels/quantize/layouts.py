"""Two 8-bit layouts that let a product use the scales of an operand's rows while it sums over these rows.

`quantize_folded`: rows as 8-bit floats that have taken over the scales of the weight that they multiply.

    x[r, :] * factor[g, :] ~ x8[r, :] * scale[r]      for row r of group g

A scale must be constant along the summed axis, or it cannot be factored out.  The scales of a weight's rows
vary along the columns of x, so `quantize_folded` multiplies x by them before it quantises x.

`quantize_transposed`, `transpose_rows8`: a weight's 8-bit numbers in the other order, with the same scales.

    x[..., m, k] ~ out[..., k, m] * scale[..., m]

Tensor cores need 8-bit operands whose summed axis is contiguous.  A product that sums over the rows of a
weight can use the numbers that `quantize_rows` made of them, if its other operand has taken over their
scales; no kernel has to find the largest magnitudes of columns.  `quantize_transposed` reads the weight
again; `transpose_rows8` moves the bytes of its 8-bit rows, if these still exist, and reads half as much.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import binds, copy_into, define_op, takes
from ..base.check import Float, Float8, Index, check_fields, wide
from ..base.fp8 import native_fp8
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl
from ..base.tile import TILE_DTYPES, dense, locate, row_tiles
from .blocks import transpose_words
from .rows import (
    ELEMENTS,
    FORMATS,
    OF_ROWS,
    QuantizeRowsInputs,
    check_float32,
    dtype_of,
    interleave,
    limits,
    magnitude,
    new_quantize_rows,
    quantize_rows_reference,
    rounded_to,
    scale_and_inverse,
)

ROWS = 32  # of a group that one program quantises, with one look at the group's factors


class QuantizeFoldedInputs(NamedTuple):
    """The inputs of the op `quantize_folded`: x[r] * factor[g] ~ x8[r] * scale[r] for row r of group g."""

    x: Annotated[Float, "M, K"]
    factor: Annotated[Tensor, "G, K"]
    group_sizes: Annotated[Index, "G"]
    format: str


class QuantizeTransposedInputs(NamedTuple):
    """The inputs of the op `quantize_transposed`: x[g, m, k] ~ out[g, k, m] * scale[g, m]."""

    x: Annotated[Float, "G, M, K"]
    scale: Tensor  # (G, M)
    format: str


class TransposeRows8Inputs(NamedTuple):
    """The inputs of the op `transpose_rows8`: out[g, k, m] = x8[g, m, k]."""

    x8: Annotated[Float8, "G, M, K"]


# quantize_folded: reference


def factors_of_rows(factor: Tensor, group_sizes: Tensor, rows: int) -> Tensor:
    """factor[g] (G, K) for each row of group g, (rows, K), ones past the groups."""
    end = group_sizes.long().clamp(0, rows).cumsum(0).clamp(max=rows)
    group = torch.searchsorted(end, torch.arange(rows, device=end.device), right=True)
    return torch.cat((factor, factor.new_ones(1, factor.shape[1])))[group]


def quantize_folded_reference(i: QuantizeFoldedInputs) -> tuple[Tensor, Tensor]:
    x = wide(i.x) * factors_of_rows(i.factor, i.group_sizes, len(i.x))
    past = torch.arange(len(x), device=x.device) >= i.group_sizes.long().clamp(min=0).sum()
    return quantize_rows_reference(QuantizeRowsInputs(x.masked_fill(past[:, None], 0), i.format))


# quantize_folded: kernel


@jit_kernel
def quantize_folded_kernel(
    x_ptr,  # (M, K)
    factor_ptr,  # (G, K) float32
    group_sizes_ptr,  # (G,)
    out_ptr,  # (M, K), contiguous
    scale_ptr,  # (M,) float32
    M, K, G,
    x_stride,  # m; columns lie side by side
    MOST: tl.constexpr, LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # a row fits in a tile
    BLOCK_G: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group, row, end = locate(tl.program_id(0), group_sizes_ptr, M, G, BLOCK_G, ROWS)
    if row >= end:
        return
    end = tl.minimum(row + ROWS, end)
    live = tl.where(group < G, end, row)  # rows past the last group become zeros
    k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    factor_ptrs = factor_ptr + tl.minimum(group, G - 1).to(tl.int64) * K + k
    if WHOLE:
        columns = (k < K)[None, :]
        factor = tl.load(factor_ptrs, mask=k < K, other=0.0)[None, :]
        m = row + rows
        mask = (m < live)[:, None] & columns
        later = tl.load(x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
        for first in range(row, end, BLOCK_M):
            x = later.to(tl.float32) * factor
            m = first + rows
            n = m + BLOCK_M
            ahead = (n < live)[:, None] & columns
            later = tl.load(x_ptr + n.to(tl.int64)[:, None] * x_stride + k[None, :], mask=ahead, other=0.0)
            scale, inverse = scale_and_inverse(tl.max(magnitude(x), 1), MOST, LEAST)
            tl.store(scale_ptr + m, scale, mask=m < end)
            x8 = rounded_to(x * inverse[:, None], out_ptr.dtype.element_ty)
            out_ptrs = out_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
            tl.store(out_ptrs, x8, mask=(m < end)[:, None] & columns)
    else:
        for first in range(row, end, BLOCK_M):
            m = first + rows
            x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
            amax = tl.zeros((BLOCK_M,), tl.float32)
            for begin in range(0, K, BLOCK_K):
                mask = (m < live)[:, None] & (k < K - begin)[None, :]
                x = tl.load(x_ptrs + begin, mask=mask, other=0.0).to(tl.float32)
                x *= tl.load(factor_ptrs + begin, mask=k < K - begin, other=0.0)[None, :]
                amax = tl.maximum(amax, tl.max(magnitude(x), 1))
            scale, inverse = scale_and_inverse(amax, MOST, LEAST)
            tl.store(scale_ptr + m, scale, mask=m < end)
            for begin in range(0, K, BLOCK_K):
                mask = (m < live)[:, None] & (k < K - begin)[None, :]
                x = tl.load(x_ptrs + begin, mask=mask, other=0.0).to(tl.float32)
                x *= tl.load(factor_ptrs + begin, mask=k < K - begin, other=0.0)[None, :]
                x8 = rounded_to(x * inverse[:, None], out_ptr.dtype.element_ty)
                mask = (m < end)[:, None] & (k < K - begin)[None, :]
                tl.store(out_ptr + m.to(tl.int64)[:, None] * K + (begin + k)[None, :], x8, mask=mask)


# quantize_folded: launcher


def new_quantize_folded(i: QuantizeFoldedInputs) -> tuple[Tensor, Tensor]:
    check_fields(i)
    if i.factor.dtype != torch.float32:
        raise TypeError(f"factor must be float32, not {i.factor.dtype}")
    return new_quantize_rows(QuantizeRowsInputs(i.x, i.format))


def tile_folded(K: int) -> tuple[int, int, int, int]:
    """Rows of a program, of a step, elements of each, and warps: 32 elements a thread, a factor for each."""
    block_k = min(next_power_of_2(max(K, 32)), ELEMENTS)
    return ROWS, max(1024 // block_k, 1), block_k, max(block_k // 1024, 1)


@binds
@takes(*TILE_DTYPES)
def bind_quantize_folded(i: QuantizeFoldedInputs) -> Callable:
    (M, K), G = i.x.shape, len(i.factor)
    if OF_ROWS[i.format] not in native_fp8() or not G:
        return lambda outs, i: copy_into(outs, quantize_folded_reference(i))
    rows, block_m, block_k, warps = tile_folded(K)
    kernel = bind_kernel(
        quantize_folded_kernel, (row_tiles(M, G, rows),),
        **limits(i.format), WHOLE=block_k >= K, BLOCK_G=next_power_of_2(G + 1), ROWS=rows,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    whole_rows = i.x.stride(1) == 1
    stride = i.x.stride(0) if whole_rows else K

    def launch(outs, i):
        x = i.x if whole_rows else i.x.contiguous()
        kernel(x, *dense(i.factor, i.group_sizes), *outs, M, K, G, stride)

    return launch


# quantize_folded: op

quantize_folded_op = define_op(
    "quantize_folded", QuantizeFoldedInputs, outputs=2, new=new_quantize_folded,
    reference=quantize_folded_reference, triton=bind_quantize_folded,
)  # fmt: skip

# quantize_folded: public


def quantize_folded(
    x: Tensor, factor: Tensor, group_sizes: Tensor, format: str = "e4m3"
) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of the rows of `x` (M, K), those of group g times `factor[g]`, (G, K) in float32.

    Rows past the groups become zeros.  Not differentiable.  Raises ValueError for shapes that do not fit or
    another format, TypeError for dtypes.
    """
    return quantize_folded_op(x.detach(), factor, group_sizes, format)


# transposed: reference


def quantize_transposed_reference(i: QuantizeTransposedInputs) -> Tensor:
    return (wide(i.x) * (1 / i.scale)[..., None]).to(FORMATS[i.format]).mT.contiguous()


def fill_transposed(out: Tensor, i: QuantizeTransposedInputs) -> None:
    for o, x, scale in zip(out, i.x, i.scale, strict=True):  # float32 of one expert at a time
        o.copy_(quantize_transposed_reference(i._replace(x=x, scale=scale)))


def transpose_rows8_reference(i: TransposeRows8Inputs) -> Tensor:
    return i.x8.view(torch.uint8).mT.contiguous().view(i.x8.dtype)


# transposed: kernel


@jit_kernel
def quantize_transposed_kernel(
    x_ptr,  # (G, M, K)
    scale_ptr,  # (G, M) float32, contiguous
    out_ptr,  # (G, K, M), contiguous
    M, K, tiles_m, tiles_k,
    x_strides,  # g, m, k
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile at a time, read along k and written along m."""
    QUARTER: tl.constexpr = BLOCK_M // 4
    tile_m, tile = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    group, tile_k = (tile // tiles_k).to(tl.int64), tile % tiles_k
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + group * x_strides[0] + k.to(tl.int64)[:, None] * x_strides[2]
    loaded, scales, quarters = (), (), ()
    for i in tl.static_range(4):  # all of it is on its way before the first division, which branches
        m = tile_m * BLOCK_M + tl.arange(0, QUARTER) * 4 + i
        mask = (k < K)[:, None] & (m < M)[None, :]
        x_offsets = m.to(tl.int64)[None, :] * x_strides[1]
        loaded = loaded + (tl.load(x_ptrs + x_offsets, mask=mask, other=0.0),)
        scales = scales + (tl.load(scale_ptr + group * M + m, mask=m < M, other=1.0),)
    for i in tl.static_range(4):
        quarters = quarters + (loaded[i].to(tl.float32) * tl.div_rn(1.0, scales[i])[None, :],)
    x = interleave(quarters).to(out_ptr.dtype.element_ty)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    out_ptrs = out_ptr + (group * K + k[:, None]) * M + m[None, :]
    tl.store(out_ptrs, x, mask=(k < K)[:, None] & (m < M)[None, :])


@jit_kernel
def transpose_rows8_kernel(
    x_ptr,  # (G, M, W) words of four bytes, contiguous
    out_ptr,  # (G, 4 * W, M // 4), contiguous
    M, W, tiles_m, tiles_w,
    QUARTER: tl.constexpr,  # a fourth of the rows of a tile
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    tile_m, tile = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    group, tile_w = (tile // tiles_w).to(tl.int64), tile % tiles_w
    w = tile_w * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = ()
    for i in tl.static_range(4):
        m = tile_m * (4 * QUARTER) + tl.arange(0, QUARTER) * 4 + i
        mask = (w < W)[:, None] & (m < M)[None, :]
        x = tl.load(x_ptr + (group * M + m)[None, :] * W + w[:, None], mask=mask, other=0)
        rows = rows + (x.to(tl.uint32, bitcast=True),)
    k = tile_w * (4 * BLOCK_W) + tl.arange(0, 4 * BLOCK_W)
    four = tile_m * QUARTER + tl.arange(0, QUARTER)
    out_ptrs = out_ptr + (group * (4 * W) + k[:, None]) * (M // 4) + four[None, :]
    mask = (k < 4 * W)[:, None] & (four < M // 4)[None, :]
    tl.store(out_ptrs, transpose_words(rows).to(tl.int32, bitcast=True), mask=mask)


# transposed: launcher


def new_quantize_transposed(i: QuantizeTransposedInputs) -> Tensor:
    check_fields(i)
    check_float32("scale", i.scale, *i.x.shape[:2])
    return i.x.new_empty(i.x.mT.shape, dtype=dtype_of(i.format))


def new_transpose_rows8(i: TransposeRows8Inputs) -> Tensor:
    check_fields(i)
    return i.x8.new_empty(i.x8.mT.shape)


@binds
@takes(*TILE_DTYPES)
def bind_quantize_transposed(i: QuantizeTransposedInputs) -> Callable:
    if FORMATS[i.format] not in native_fp8():
        return lambda out, i: copy_into(out, quantize_transposed_reference(i))
    (G, M, K), block_m, block_k = i.x.shape, 128, 64  # whole lines to read and to write
    tiles_m, tiles_k = cdiv(M, block_m), cdiv(K, block_k)
    kernel = bind_kernel(
        quantize_transposed_kernel, (G * tiles_m * tiles_k,), BLOCK_M=block_m, BLOCK_K=block_k, num_warps=8
    )
    sizes = M, K, tiles_m, tiles_k, i.x.stride()
    return lambda out, i: kernel(i.x, i.scale.contiguous(), out, *sizes)


@binds
def bind_transpose_rows8(i: TransposeRows8Inputs) -> Callable:
    G, M, K = i.x8.shape
    quarter = block_w = 32  # whole lines to read and to write
    tiles_m, tiles_w = cdiv(M, 4 * quarter), cdiv(K, 4 * block_w)
    kernel = bind_kernel(
        transpose_rows8_kernel, (G * tiles_m * tiles_w,), QUARTER=quarter, BLOCK_W=block_w, num_warps=4
    )

    def launch(out, i):
        if M % 4 or K % 4 or i.x8.storage_offset() % 4:  # no whole words
            return copy_into(out, transpose_rows8_reference(i))
        x, out = i.x8.contiguous().flatten().view(torch.int32), out.view(torch.int32)
        kernel(x, out, M, K // 4, tiles_m, tiles_w)

    return launch


# transposed: op

quantize_transposed_op = define_op(
    "quantize_transposed", QuantizeTransposedInputs, new=new_quantize_transposed,
    reference=quantize_transposed_reference, triton=bind_quantize_transposed, torch=fill_transposed,
)  # fmt: skip
transpose_rows8_op = define_op(
    "transpose_rows8", TransposeRows8Inputs, new=new_transpose_rows8, reference=transpose_rows8_reference,
    triton=bind_transpose_rows8,
)  # fmt: skip

# transposed: public


def quantize_transposed(x: Tensor, scale: Tensor, format: str = "e4m3") -> Tensor:
    """The 8-bit floats that `quantize_rows` makes of the rows of `x` (G, M, K), as (G, K, M), contiguous.

    `scale` (G, M) is what it returned beside them.  Not differentiable.  Raises ValueError for shapes that do
    not fit or another format, TypeError for dtypes.
    """
    return quantize_transposed_op(x.detach(), scale, format)


def transpose_rows8(x8: Tensor) -> Tensor:
    """8-bit floats `x8` (G, M, K) as (G, K, M), contiguous: the same bytes.  Raises TypeError for others."""
    return transpose_rows8_op(x8)
