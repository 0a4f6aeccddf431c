"""Rows as 8-bit floats or as int8, each with its own scale.

    x[..., m, :] ~ x8[..., m, :] * scale[..., m]      scale = the row's largest |x| / the largest 8-bit number

The largest number of a row is exact up to a rounding, and nothing overflows.  A row of zeros stays a row of
zeros; its scale, and the scale of a row without columns, is the smallest scale, LEAST.  A row that holds an
infinity or a NaN becomes NaN as a whole, in int8 by its scale: a product would spread the NaN anyway.

A scale is the product of two float32 and its inverse a quotient, both correctly rounded, so it has the same
bits wherever it is computed.

If the columns of x lie side by side in memory, `quantize_rows` reads them twice.  `quantize_rows_and_amax`
and `quantize_by_amax` quantise a weight both ways with one read each way: forward needs its rows as 8-bit
floats, backward its columns.  The first quantises the rows and keeps the largest magnitude of each column;
with these the second reads the columns once, tile by tile.  The results have the bits of `quantize_rows`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...op import binds, copy_into, define_op, takes
from ..base.check import Float, check_fields, check_known, check_tensor, wide
from ..base.fp8 import native_fp8
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OF_ROWS = {**FORMATS, "int8": torch.int8}
LEAST = 2.0**-126  # the smallest scale, whose reciprocal is finite as well
ELEMENTS = 8192  # of a tile of rows that lie in memory as rows
PART = 2**18  # of x that torch quantises at a time: a CPU's cache holds them, as float32
GPU_PART = 2**24  # the same on a GPU, where a launch has to pay


class QuantizeRowsInputs(NamedTuple):
    """The inputs of the ops `quantize_rows` and `quantize_rows_and_amax`: x ~ x8 * scale[..., None]."""

    x: Float  # (M, K) or (G, M, K)
    format: str


class QuantizeByAmaxInputs(NamedTuple):
    """The inputs of the op `quantize_by_amax`: `quantize_rows` with the rows' largest magnitudes."""

    x: Float  # (M, K) or (G, M, K)
    amax: Tensor  # (M,) or (G, M)
    format: str


# quantize_rows: reference


def most(dtype: torch.dtype) -> float:
    """The largest number; of int8 that of either sign."""
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def scale_of(amax: Tensor, format: str) -> Tensor:
    """The scales of rows whose largest magnitudes are these, float32."""
    scale = (amax * (1 / most(OF_ROWS[format]))).clamp(min=LEAST)
    return scale.masked_fill(~amax.isfinite(), float("nan"))


def amax_reference(x, dim):
    """The largest magnitudes in float32; infinity for a NaN as well, and 0 where there is nothing."""
    sizes = x.abs()
    amax = (sizes.amax(dim) if x.shape[dim] else sizes.sum(dim)).to(torch.float32)
    return amax.masked_fill(amax.isnan(), float("inf"))


def quantize_by_amax_reference(i: QuantizeByAmaxInputs) -> tuple[Tensor, Tensor]:
    scale = scale_of(i.amax, i.format)
    x8 = wide(i.x) * (1 / scale)[..., None]
    x8 = x8.round().nan_to_num(0) if i.format == "int8" else x8  # to even, as floats are
    return x8.to(OF_ROWS[i.format]), scale


def quantize_rows_reference(i: QuantizeRowsInputs) -> tuple[Tensor, Tensor]:
    return quantize_by_amax_reference(QuantizeByAmaxInputs(i.x, amax_reference(i.x, -1), i.format))


# quantize_rows: torch, in little memory


def fill_by_parts(outs: tuple[Tensor, Tensor], i: Any, reference: Callable, rows: int = 1) -> None:
    """Fill x8 and the scales, one for each block of `rows` rows, by `reference` of one part after another.

    It works in float32, which of all of x takes several times the memory of x.
    """
    x8, scale = outs
    for at, of in parts_of(i.x, rows):
        part = i._replace(x=i.x[at])
        part = part._replace(amax=i.amax[of]) if hasattr(i, "amax") else part
        copy_into((x8[at], scale[of]), reference(part))


def parts_of(x: Tensor, rows: int = 1) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield where some part of x (M, K) or (G, M, K) lies, and where its blocks of `rows` rows do."""
    (G, M, K), _ = as_groups(x)
    part = PART if x.is_cpu else GPU_PART
    groups = min(max(part // max(M * K, 1), 1), max(G, 1))
    blocks = max(part // max(groups * rows * K, 1), 1)
    for g, b in product(range(0, G, groups), range(0, cdiv(M, rows), blocks)):
        of = slice(g, g + groups), slice(b, b + blocks)
        at = of[0], slice(b * rows, (b + blocks) * rows)
        yield at[3 - x.dim() :], of[3 - x.dim() :]


# quantize_rows: kernel


@triton.jit
def magnitude(x):
    """In float32; infinity for a NaN as well."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x == x, x, float("inf"))


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in float32, ordered as magnitudes are, where a NaN comes last."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def magnitude_of(bits):
    """In float32; infinity for a NaN as well."""
    return tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scale_and_inverse(amax, MOST: tl.constexpr, LEAST: tl.constexpr):
    scale = tl.where(amax == float("inf"), float("nan"), tl.maximum(amax * (1 / MOST), LEAST))
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def rounded_to(x, DTYPE: tl.constexpr):
    """float32 as 8 bits, to the nearest and to even; NaN, which int8 has not, as 0."""
    if tl.int8 == DTYPE:
        x = tl.where(x == x, x + 12582912.0 - 12582912.0, 0.0)  # 1.5 * 2**23 leaves no bits for a fraction
    return x.to(DTYPE)


@triton.jit
def interleave(quarters):
    """Interleave four tensors: number 4 * n + i of a row is number n of quarters[i] (rows, N).  A thread that
    has four neighbours moves them as one."""
    x = tl.join(tl.join(quarters[0], quarters[2]), tl.join(quarters[1], quarters[3]))
    return x.reshape(quarters[0].shape[0], 4 * quarters[0].shape[1])


@jit_kernel
def quantize_rows_kernel(
    x_ptr,  # (G, M, K)
    out_ptr,  # (G, M, K), contiguous
    scale_ptr,  # (G, M) float32
    M, K,
    tiles,  # of a group
    x_strides,  # g, m, k
    MOST: tl.constexpr,  # the largest number of the result's dtype
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # a row fits in a tile
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_stride_g, x_stride_m, x_stride_k = x_strides
    x_ptrs = x_ptr + group * x_stride_g + m.to(tl.int64)[:, None] * x_stride_m
    out_ptrs = out_ptr + (group * M + m[:, None]) * K
    row_mask = (m < M)[:, None]
    if WHOLE:
        mask = row_mask & (k < K)[None, :]
        x = tl.load(x_ptrs + k.to(tl.int64)[None, :] * x_stride_k, mask=mask, other=0.0)
        amax = tl.max(magnitude(x), 1)
    else:
        amax = tl.zeros((BLOCK_M,), tl.float32)
        for first in range(0, K, BLOCK_K):
            mask = row_mask & (k < K - first)[None, :]
            at = (first + k).to(tl.int64)[None, :] * x_stride_k
            amax = tl.maximum(amax, tl.max(magnitude(tl.load(x_ptrs + at, mask=mask, other=0.0)), 1))
    scale, inverse = scale_and_inverse(amax, MOST, LEAST)
    tl.store(scale_ptr + group * M + m, scale, mask=m < M)
    if WHOLE:
        tl.store(
            out_ptrs + k[None, :],
            rounded_to(x.to(tl.float32) * inverse[:, None], out_ptr.dtype.element_ty),
            mask=mask,
        )
    else:
        for first in range(0, K, BLOCK_K):
            mask = row_mask & (k < K - first)[None, :]
            at = (first + k).to(tl.int64)[None, :] * x_stride_k
            x = tl.load(x_ptrs + at, mask=mask, other=0.0).to(tl.float32) * inverse[:, None]
            tl.store(out_ptrs + first + k[None, :], rounded_to(x, out_ptr.dtype.element_ty), mask=mask)


# quantize_rows: launcher


def dtype_of(format: str, formats: dict[str, torch.dtype] = FORMATS) -> torch.dtype:
    """Return the dtype of a format.  Raises ValueError unless this is the name of one of the formats."""
    check_known("format", format, formats)
    return formats[format]


def check_float32(name: str, t: Tensor, *shape: int) -> None:
    """Raise ValueError unless `t` is float32 of this shape."""
    check_tensor(name, t)
    if t.dtype != torch.float32 or t.shape != shape:
        raise ValueError(f"{name} must be {shape} in float32, not {tuple(t.shape)} in {t.dtype}")


def new_quantize_rows(i: QuantizeRowsInputs | QuantizeByAmaxInputs) -> tuple[Tensor, Tensor]:
    check_tensor("x", i.x)
    if i.x.dim() not in (2, 3):
        raise ValueError(f"x must be (M, K) or (G, M, K), but it has shape {tuple(i.x.shape)}")
    check_fields(i)
    x8 = i.x.new_empty(i.x.shape, dtype=dtype_of(i.format, OF_ROWS))
    return x8, i.x.new_empty(i.x.shape[:-1], dtype=torch.float32)


def tile_of_rows(K: int) -> tuple[int, int, int]:
    """Rows, elements of each, and warps."""
    block_k = min(next_power_of_2(max(K, 1)), ELEMENTS)
    return max(ELEMENTS // 2 // block_k, 1), block_k, 4 if block_k < ELEMENTS else 8


def tile_of_columns(K: int) -> tuple[int, int, int]:
    """Return rows, elements of each, and warps for columns that lie side by side and are read twice."""
    return 64, min(max(next_power_of_2(K), 32), 128), 4


def limits(format: str) -> dict:
    return {"MOST": most(OF_ROWS[format]), "LEAST": LEAST}


def as_groups(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides of x as (G, M, K); the strides of (M, K) begin with 0."""
    return ((1, *x.shape), (0, *x.stride())) if x.dim() == 2 else (tuple(x.shape), x.stride())


@binds
@takes(*TILE_DTYPES)
def bind_quantize_rows(i: QuantizeRowsInputs | QuantizeByAmaxInputs) -> Callable:
    # nor does Triton convert to floats that a GPU does not multiply
    if i.format != "int8" and OF_ROWS[i.format] not in native_fp8():
        return lambda outs, i: copy_into(outs, quantize_rows_reference(i))
    (G, M, K), strides = as_groups(i.x)
    side_by_side = strides[1] == 1 < strides[2]
    block_m, block_k, warps = tile_of_columns(K) if side_by_side else tile_of_rows(K)
    tiles = cdiv(M, block_m)
    kernel = bind_kernel(
        quantize_rows_kernel, (G * tiles,),
        **limits(i.format), WHOLE=block_k >= K, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
        enable_fp_fusion=False,  # or what is rounded to a whole number is a product that was not yet rounded
    )  # fmt: skip
    return lambda outs, i: kernel(i.x, *outs, M, K, tiles, strides)


# quantize_rows: op

quantize_rows_op = define_op(
    "quantize_rows", QuantizeRowsInputs, outputs=2, new=new_quantize_rows, reference=quantize_rows_reference,
    triton=bind_quantize_rows, torch=partial(fill_by_parts, reference=quantize_rows_reference),
)  # fmt: skip

# quantize_rows: public


def quantize_rows(x: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """The rows of `x`, (M, K) or (G, M, K) of any floating dtype and strides, as 8 bits with scales.

    Returns x8, contiguous, float8_e4m3fn, or float8_e5m2 or int8 by `format`, and float32 scales (M,) or
    (G, M), with x ~ x8 * scale[..., None].  `x.mT` gives the columns of x, as rows.  Not differentiable.
    Raises ValueError for another shape or format, TypeError for a dtype that is not floating.
    Source: row-wise scaling as in torchao.float8, whose scales are these in float32.
    """
    check_tensor("x", x)
    return quantize_rows_op(x.detach(), format)


def dequantize_rows(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantize_rows` kept, in `dtype`."""
    return by_parts(multiplied_back, x8, scale, dtype)


def multiplied_back(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    product = torch.promote_types(dtype, torch.float32)
    return (x8.to(product) * scale.to(product)[..., None]).to(dtype)


def by_parts(fn: Callable, x8: Tensor, scale: Tensor, dtype: torch.dtype, rows: int = 1) -> Tensor:
    """Return `fn(x8, scale, dtype)`, one part after another, since `fn` works in float32."""
    if torch.compiler.is_compiling() or x8.numel() <= (PART if x8.is_cpu else GPU_PART):
        return fn(x8, scale, dtype)
    out = torch.empty_like(x8, dtype=dtype)
    for at, of in parts_of(x8, rows):
        out[at] = fn(x8[at], scale[of], dtype)
    return out


# both ways


LONGEST = 16384  # the rows of which a tile holds a whole one, and the largest magnitudes so far
ROWS = 128  # the most whose columns' largest magnitudes one program finds
PROGRAMS = 2048  # with fewer rows each, as long as there are fewer programs

# both ways: kernel


@jit_kernel
def quantize_rows_and_amax_kernel(
    x_ptr,  # (G, M, K)
    out_ptr,  # (G, M, K), contiguous
    scale_ptr,  # (G, M) float32
    amax_ptr,  # (G, blocks, K) float32: the largest magnitudes of each column in each block of rows
    M, K, blocks,
    x_strides,  # g, m, k
    MOST: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row
):  # fmt: skip
    group, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    x_stride_g, x_stride_m, x_stride_k = x_strides
    x_ptr += group * x_stride_g
    at = k.to(tl.int64)[None, :] * x_stride_k
    begin, end = block * ROWS, min(block * ROWS + ROWS, M)
    m = begin + rows
    mask = (m < end)[:, None] & (k < K)[None, :]
    later = tl.load(x_ptr + m.to(tl.int64)[:, None] * x_stride_m + at, mask=mask, other=0.0)
    # one row of maxima for each of a step's rows: threads that share a column meet but once, at the end
    columns = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for first in range(begin, end, BLOCK_M):
        x = later
        m = first + rows
        mask = (m < end)[:, None] & (k < K)[None, :]
        n = m + BLOCK_M
        ahead = (n < end)[:, None] & (k < K)[None, :]
        later = tl.load(x_ptr + n.to(tl.int64)[:, None] * x_stride_m + at, mask=ahead, other=0.0)
        bits = magnitude_bits(x)
        columns = tl.maximum(columns, bits)
        scale, inverse = scale_and_inverse(magnitude_of(tl.max(bits, 1)), MOST, LEAST)
        tl.store(scale_ptr + group * M + m, scale, mask=m < end)
        x8 = (x.to(tl.float32) * inverse[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (group * M + m[:, None]) * K + k[None, :], x8, mask=mask)
    amax = magnitude_of(tl.max(columns, 0))
    tl.store(amax_ptr + (group * blocks + block) * K + k, amax, mask=k < K)


@jit_kernel
def quantize_columns_kernel(
    x_ptr,  # (G, M, K)
    amax_ptr,  # (G, M) float32
    out_ptr,  # (G, M, K), contiguous
    scale_ptr,  # (G, M) float32
    M, K, tiles_m, tiles_k,
    x_strides,  # g, k; numbers m lie side by side
    MOST: tl.constexpr, LEAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile at a time, read along m and written along k."""
    QUARTER: tl.constexpr = BLOCK_K // 4
    tile_k, tile = tl.program_id(0) % tiles_k, tl.program_id(0) // tiles_k
    group, tile_m = (tile // tiles_m).to(tl.int64), tile % tiles_m
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    amax = tl.load(amax_ptr + group * M + m, mask=m < M, other=0.0)
    scale, inverse = scale_and_inverse(amax, MOST, LEAST)
    tl.store(scale_ptr + group * M + m, scale, mask=(m < M) & (tile_k == 0))
    x_stride_g, x_stride_k = x_strides
    x_ptrs = x_ptr + group * x_stride_g + m[:, None]
    four = tile_k * BLOCK_K + tl.arange(0, QUARTER) * 4
    quarters = ()
    for i in tl.static_range(4):
        mask = (m < M)[:, None] & (four + i < K)[None, :]
        x = tl.load(x_ptrs + (four + i).to(tl.int64)[None, :] * x_stride_k, mask=mask, other=0.0)
        quarters = quarters + (x.to(tl.float32) * inverse[:, None],)
    mask = (m < M)[:, None] & (k < K)[None, :]
    tl.store(
        out_ptr + (group * M + m[:, None]) * K + k[None, :],
        interleave(quarters).to(out_ptr.dtype.element_ty),
        mask=mask,
    )


# both ways: launcher


def new_quantize_by_amax(i: QuantizeByAmaxInputs) -> tuple[Tensor, Tensor]:
    out = new_quantize_rows(i)
    check_float32("amax", i.amax, *i.x.shape[:-1])
    return out


def is_read_once(x: Tensor) -> bool:
    """Whether the kernel below finds the columns' largest magnitudes by the way."""
    return x.stride(-1) == 1 and x.shape[-1] <= LONGEST


def tile_with_amax(G: int, M: int, K: int, itemsize: int) -> tuple[int, int, int, int]:
    """Rows of a block, of a step, elements of each, and warps.

    A warp has whole rows, or a part of one, 2 KiB, of float32 1 KiB: of warps that shared columns each step
    would be a conversion through shared memory.
    """
    block_k = max(next_power_of_2(K), 16)
    rows = min(max(next_power_of_2(G * M // PROGRAMS), 16), ROWS)
    block_m, warps = max(1024 // block_k, 1), min(max(block_k // (1024 if itemsize == 2 else 256), 1), 16)
    return max(rows, block_m), block_m, block_k, warps


def bind_rows_then_amax(i: QuantizeRowsInputs) -> Callable:
    rows = bind_quantize_rows(i)

    def launch(outs, i):
        rows(outs[:2], i)
        outs[2].copy_(amax_reference(i.x, -2))

    return launch


@binds
@takes(*TILE_DTYPES)
def bind_quantize_rows_and_amax(i: QuantizeRowsInputs) -> Callable:
    if OF_ROWS[i.format] not in native_fp8() or not is_read_once(i.x):
        return bind_rows_then_amax(i)
    if not i.x.numel():  # there may be columns all the same
        return lambda outs, i: (outs[1].fill_(LEAST), outs[2].zero_())
    (G, M, K), strides = as_groups(i.x)
    rows, block_m, block_k, warps = tile_with_amax(G, M, K, i.x.element_size())
    blocks = cdiv(M, rows)
    kernel = bind_kernel(
        quantize_rows_and_amax_kernel, (G * blocks,),
        **limits(i.format), ROWS=rows, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip

    def launch(outs, i):
        x8, scale, amax = outs
        block_amax = amax.new_empty(G, blocks, K)
        kernel(i.x, x8, scale, block_amax, M, K, blocks, strides)
        torch.amax(block_amax, 1, out=amax.view(G, K))

    return launch


@binds
@takes(*TILE_DTYPES)
def bind_quantize_by_amax(i: QuantizeByAmaxInputs) -> Callable:
    if OF_ROWS[i.format] not in native_fp8():
        return lambda outs, i: copy_into(outs, quantize_by_amax_reference(i))
    if i.x.stride(-2) != 1 or not i.x.numel():  # there may be scales all the same
        return bind_quantize_rows(i)
    ((G, M, K), strides), block_m, block_k = as_groups(i.x), 64, 128  # whole lines to read and to write
    tiles_m, tiles_k = cdiv(M, block_m), cdiv(K, block_k)
    kernel = bind_kernel(
        quantize_columns_kernel, (G * tiles_m * tiles_k,),
        **limits(i.format), BLOCK_M=block_m, BLOCK_K=block_k, num_warps=8,
    )  # fmt: skip
    sizes = M, K, tiles_m, tiles_k, strides[::2]
    return lambda outs, i: kernel(i.x, i.amax.contiguous(), *outs, *sizes)


def fill_rows_and_amax(outs: tuple[Tensor, Tensor, Tensor], i: QuantizeRowsInputs) -> None:
    fill_by_parts(outs[:2], i, quantize_rows_reference)
    outs[2].zero_()
    for at, _ in parts_of(i.x):
        amax = outs[2][at[:-1]]
        torch.maximum(amax, amax_reference(i.x[at], -2), out=amax)


# both ways: op

quantize_rows_and_amax_op = define_op(
    "quantize_rows_and_amax", QuantizeRowsInputs, outputs=3,
    new=lambda i: (*new_quantize_rows(i), i.x.new_empty(*i.x.shape[:-2], i.x.shape[-1], dtype=torch.float32)),
    reference=lambda i: (*quantize_rows_reference(i), amax_reference(i.x, -2)),
    triton=bind_quantize_rows_and_amax, torch=fill_rows_and_amax,
)  # fmt: skip
quantize_by_amax_op = define_op(
    "quantize_by_amax", QuantizeByAmaxInputs, outputs=2, new=new_quantize_by_amax,
    reference=quantize_by_amax_reference, triton=bind_quantize_by_amax,
    torch=partial(fill_by_parts, reference=quantize_by_amax_reference),
)  # fmt: skip


# both ways: public


def quantize_rows_and_amax(x: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_rows`, and the largest magnitude of each column, (K,) or (G, K) in float32: infinity where
    there is a NaN."""
    return quantize_rows_and_amax_op(x.detach(), format)


def quantize_by_amax(x: Tensor, amax: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor]:
    """`quantize_rows` of an x whose rows' largest magnitudes are known: `amax`, (M,) or (G, M) in float32, as
    `quantize_rows_and_amax` returns those of the columns of `x.mT`.  Raises ValueError for another."""
    return quantize_by_amax_op(x.detach(), amax, format)
