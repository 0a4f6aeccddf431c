"""Products of 8-bit operands with scales, which turn the sums into the numbers that the operands stand for.

    scaled_gemm   out    = (x @ w) * x_scale[:, None] * w_scale + bias
    scaled_gmm    out[r] = (x[t] @ w[g]) * x_scale[t] * w_scale[g] + bias[g]       t = order[r] // top_k, or r

M rows, K to sum over, N columns.  In `scaled_gmm` each row r belongs to a group g with its own weight; rows
past the last group are zeros.  One kernel computes both.  Sums of int8 are exact, those of 8-bit floats are
in float32.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ...invariance import batch_invariant
from ...op import binds, define_op, takes
from .. import hopper
from ..base.check import (
    Index,
    check_axes,
    check_fields,
    check_row_values,
    check_rows,
    group_ends,
    refuse_gradient,
    take_rows,
)
from ..base.choice import MANY_ROWS, fits_blas, multiply_by_blas, should_use_scaled
from ..base.fp8 import (
    FP8,
    MOST_K,
    ROW_BLOCK,
    add_product,
    as_loaded,
    as_operands,
    as_vector,
    check_scales,
    is_promoted,
    product,
)
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import (
    dense,
    in_units,
    is_transposed,
    locate,
    row_tiles,
    swizzle,
    tile_options,
    unit_of,
)

LARGEST = 128 * 128  # numbers of a tile of float32
SPAN = tl.constexpr(65536)  # of them that int32 sums where there are more
# columns beside which the tables' tiles fill a GPU; where there are less, tiles of fewer rows do
WIDTH = 4096


class ScaledInputs(NamedTuple):
    """The inputs of the op `scaled_gemm`: (x @ w) * x_scale[:, None] * w_scale + bias."""

    x: Annotated[Tensor, "M, K"]
    w: Annotated[Tensor, "K, N"]
    x_scale: Tensor | None  # (M,)
    w_scale: Tensor | None  # (N,)
    bias: Tensor | None  # (N,)
    dtype: torch.dtype | None  # of the result


class ScaledGroupsInputs(NamedTuple):
    """The inputs of the op `scaled_gmm`: for each row r of group g, and t = order[r] // top_k,
    (x[t] @ w[g]) * x_scale[t] * w_scale[g] + bias[g]."""

    x: Annotated[Tensor, "M, K"]  # or (T, K) with order
    w: Annotated[Tensor, "G, K, N"]
    group_sizes: Annotated[Index, "G"]
    x_scale: Tensor | None  # (M,), or (T,) with order
    w_scale: Tensor | None  # (G, N)
    bias: Tensor | None  # (G, N)
    order: Tensor | None  # (M,)
    top_k: int
    dtype: torch.dtype | None  # of the result


# scaled_gemm: reference


def scaled_gemm_reference(i: ScaledInputs) -> Tensor:
    y = product(i.x, i.w)
    y = y if i.x_scale is None else y * i.x_scale[:, None]
    y = y if i.w_scale is None else y * i.w_scale
    return (y if i.bias is None else y + i.bias).to(i.dtype)


# scaled_gemm: kernel


@jit_kernel
def scaled_gemm_kernel(
    x_ptr,  # (T, K)
    w_ptr,  # (G, K, N)
    x_scale_ptr,  # (T,) float32, or None
    w_scale_ptr,  # (G, N) float32, or None
    bias_ptr,  # (G, N), or None
    out_ptr,  # (M, N), contiguous
    order_ptr,  # (M,), or None where row r is x's own
    group_sizes_ptr,  # (G,), or None where there is one group, of all rows
    M, N, K, G, top_k,
    strides,  # of x: t, and of w: g, n; along K both are contiguous
    scale_strides,  # the same
    bias_strides,  # g, n
    LONG: tl.constexpr,  # more numbers to sum than int32 has room for
    TRANSPOSED: tl.constexpr, X_FORMAT: tl.constexpr, W_FORMAT: tl.constexpr, PROMOTED: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    K, strides = in_units((K, strides), UNIT)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    if group_sizes_ptr is None:
        tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tiles_n, GROUP_M, NUM_DIES)
        group, row, row_end = tile_m * 0, tile_m * BLOCK_M, M
    else:
        tile_m, tile_n = swizzle(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n, GROUP_M, NUM_DIES)
        group, row, row_end = locate(tile_m, group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
        if row >= row_end:
            return
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    m_read = tl.where(m < row_end, m, row).to(tl.int64)
    n_read = (n % N).to(tl.int64)
    if order_ptr is not None:
        m_read = tl.maximum(tl.load(order_ptr + m_read), 0).to(tl.int64) // top_k
    real_group = tl.minimum(group, G - 1).to(tl.int64)

    x_ptrs = x_ptr + m_read[:, None] * strides[0] + k[None, :]
    w_ptrs = w_ptr + real_group * strides[1] + n_read[None, :] * strides[2] + k[:, None]
    depth = tl.where(group < G, K, 0)  # rows past the last group become zeros
    integers: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros(
        (BLOCK_N, BLOCK_M) if TRANSPOSED else (BLOCK_M, BLOCK_N), tl.int32 if integers else tl.float32
    )
    if LONG:
        total = acc.to(tl.int64)
        for first in range(0, depth, SPAN):
            part = scaled_products(
                acc, x_ptrs + first, w_ptrs + first, tl.minimum(depth - first, SPAN),
                X_FORMAT, W_FORMAT, TRANSPOSED, PROMOTED, BLOCK_K, EVEN_K, PRECISION,
            )  # fmt: skip
            total += part.to(tl.int64)
        out = total.to(tl.float32)
    else:
        acc = scaled_products(
            acc, x_ptrs, w_ptrs, depth,
            X_FORMAT, W_FORMAT, TRANSPOSED, PROMOTED, BLOCK_K, EVEN_K, PRECISION,
        )  # fmt: skip
        out = acc.to(tl.float32)
    if TRANSPOSED:
        out = out.T

    rows, columns = (m < row_end) & (group < G), (n < N) & (group < G)
    if x_scale_ptr is not None:
        out *= tl.load(x_scale_ptr + m_read * scale_strides[0], mask=rows, other=0.0)[:, None]
    if w_scale_ptr is not None:
        w_scale_ptrs = w_scale_ptr + real_group * scale_strides[1] + n_read * scale_strides[2]
        out *= tl.load(w_scale_ptrs, mask=columns, other=0.0)[None, :]
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + real_group * bias_strides[0] + n_read * bias_strides[1]
        out += tl.load(bias_ptrs, mask=columns, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(m < row_end)[:, None] & (n < N)[None, :])


@triton.jit
def scaled_products(
    acc,
    x_ptrs,  # (BLOCK_M, BLOCK_K)
    w_ptrs,  # (BLOCK_K, BLOCK_N)
    depth,
    X_FORMAT: tl.constexpr, W_FORMAT: tl.constexpr, TRANSPOSED: tl.constexpr, PROMOTED: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x @ w over `depth` numbers."""
    k = tl.arange(0, BLOCK_K)
    for k_start in range(0, depth, BLOCK_K):
        if EVEN_K:
            x, w = tl.load(x_ptrs), tl.load(w_ptrs)
        else:
            k_mask = k < depth - k_start
            x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=k_mask[:, None], other=0.0)
        acc = add_product(acc, x, w, X_FORMAT, W_FORMAT, TRANSPOSED, PROMOTED, PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return acc


# scaled_gemm: launcher


@binds
@takes(torch.int8, *FP8)
def bind_scaled_gemm(i: ScaledInputs) -> Callable:
    product = bind_scaled(as_one_group(i), i.x.shape[0])
    return lambda out, i: product(out, as_one_group(i))


bind_scaled_gemm.should_use = should_use_scaled("triton")


def as_one_group(i: ScaledInputs) -> ScaledGroupsInputs:
    """Return the inputs of one group, of all rows."""
    w, w_scale, bias = (None if t is None else t[None] for t in (i.w, i.w_scale, i.bias))
    return ScaledGroupsInputs(i.x, w, None, i.x_scale, w_scale, bias, None, 1, i.dtype)


@binds
@takes(torch.int8, *FP8)
def bind_scaled_gmm(i: ScaledGroupsInputs) -> Callable:
    return bind_scaled(i, i.x.shape[0] if i.order is None else i.order.shape[0])


def operands(i: ScaledGroupsInputs) -> tuple[Tensor, Tensor]:
    """Return x and w with K in a row: matrix instructions of 8 bits want that, and a copy is cheaper than
    turning tiles in registers."""
    x = i.x if i.x.stride(1) == 1 else i.x.contiguous()
    return x, i.w if i.w.stride(1) == 1 else i.w.mT.contiguous().mT


def bind_scaled(i: ScaledGroupsInputs, M: int) -> Callable:
    """Return what computes a result of M rows; without group sizes there is one group, of all rows."""
    G, K, N = i.w.shape
    (x, w), (x_format, w_format) = as_operands(*operands(i))
    long = x.dtype == torch.int8 and K > MOST_K
    kind = "int8" if x.dtype == torch.int8 else "decode" if x_format or w_format else "fp8"
    M_asked = MANY_ROWS if batch_invariant() else M  # then every number of rows has the same tile
    rows = M_asked if G > 1 else min(M_asked, max(M_asked * N // WIDTH, 1))
    config = tuning.lookup(f"scaled_{'long' if long else kind}", x.dtype, rows, N, K, G)
    # registers have no room to store more
    if i.dtype.itemsize == 4 and config.block_m * config.block_n > LARGEST:
        config = dataclasses.replace(config, block_n=config.block_n // 2)
    rows = cdiv(M, config.block_m) if i.group_sizes is None else row_tiles(M, G, config.block_m)
    strides = x.stride(0), *w.stride()[::2]
    kernel = bind_kernel(
        scaled_gemm_kernel, (rows * cdiv(N, config.block_n),),
        LONG=long, TRANSPOSED=is_transposed(config, x),
        X_FORMAT=x_format, W_FORMAT=w_format, PROMOTED=is_promoted(x), UNIT=unit_of((K,), strides),
        BLOCK_G=next_power_of_2(G + 1), EVEN_K=K % config.block_k == 0, **tile_options(config),
    )  # fmt: skip
    of_x = 0 if i.x_scale is None else i.x_scale.stride(0)
    of_w, of_bias = ((0, 0) if t is None else t.stride() for t in (i.w_scale, i.bias))
    numbers = M, N, K, G, i.top_k, strides, (of_x, *of_w), of_bias

    def launch(out, i):
        x, w = operands(i)
        order, sizes = dense(i.order, i.group_sizes)
        x, w = as_loaded(x, x_format), as_loaded(w, w_format)
        kernel(x, w, i.x_scale, i.w_scale, i.bias, out, order, sizes, *numbers)

    return launch


def fill_scaled_gemm(out: Tensor, i: ScaledInputs) -> None:
    if fits_blas(i):
        multiply_by_blas(out, i)
    else:
        out.copy_(scaled_gemm_reference(i))


# scaled_gemm: op


RESULTS = torch.float16, torch.bfloat16, torch.float32


def check_8_bits(i: ScaledInputs | ScaledGroupsInputs, results: Sequence = RESULTS) -> dict[str, int]:
    """Return the sizes.  Raises unless x and w are int8 or 8-bit floats, for a result of such a dtype."""
    size, (x, w), dtype, supported = check_fields(i), i[:2], i.dtype, (torch.int8, *FP8)
    if x.dtype not in supported:
        raise TypeError(f"x must be int8 or 8-bit floats, not {x.dtype}")
    if w.dtype not in supported or (x.dtype == torch.int8) != (w.dtype == torch.int8):
        raise TypeError(f"x is {x.dtype} but w is {w.dtype}")
    if dtype not in results:
        raise TypeError(f"out_dtype must be float16, bfloat16 or float32, not {dtype}")
    return size


def new_scaled_gemm(i: ScaledInputs) -> Tensor:
    size = check_8_bits(i)
    check_scales((size["M"],), (size["N"],), i.x_scale, i.w_scale, i.bias, (size["N"],))
    return i.x.new_empty(size["M"], size["N"], dtype=i.dtype)


scaled_gemm_op = define_op(
    "scaled_gemm", ScaledInputs, new=new_scaled_gemm, reference=scaled_gemm_reference, torch=fill_scaled_gemm,
    triton=bind_scaled_gemm, hopper=hopper.bind_scaled_gemm,
)  # fmt: skip


# scaled_gemm: public


def scaled_gemm(
    x: Tensor, w: Tensor, x_scale: Tensor | float | None = None, w_scale: Tensor | float | None = None,
    bias: Tensor | None = None, *, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Multiply 8-bit matrices: `(x @ w) * x_scale * w_scale + bias`, (M, N) in `out_dtype`.

    x, w: (M, K) and (K, N).  Both int8, with exact sums for any K; or both 8-bit floats (e4m3fn, e4m3fnuz,
        e5m2, in any pair), with float32 sums.  Any strides; a `w` that is contiguous along K is the fastest,
        for example `weight.mT` of an nn.Linear's weight (N, K).
    x_scale, w_scale: float32, 1 if missing; a number, a tensor of one element, or one for each row of `x`,
        (M,) or (M, 1), and for each column of `w`, (N,), (N, 1) or (1, N).
    bias: (N,), any floating dtype.

    Everything is computed in float32 and rounded once, to float16, bfloat16 or float32; values too large for
    float16 become infinite.
    Raises ValueError for shapes and devices that do not fit, TypeError for dtypes, and RuntimeError if a
    gradient is needed, which this product does not have; all before anything is launched.
    """
    check_axes(x=(x, "M, K"), w=(w, "K, N"))  # first, or a scale would be blamed
    M, N = x.shape[0], w.shape[1]
    x_scale = as_vector("x_scale", x_scale, x, M, ((M,), (M, 1)))
    w_scale = as_vector("w_scale", w_scale, x, N, ((N,), (N, 1), (1, N)))
    refuse_gradient("a scaled product", x, w, x_scale, w_scale, bias)
    return scaled_gemm_op(x, w, x_scale, w_scale, bias, out_dtype)


# scaled_gmm: reference


def scaled_gmm_reference(i: ScaledGroupsInputs) -> Tensor:
    rows = take_rows(i.x.view(torch.uint8), i.order, i.top_k)  # torch gathers few kinds of 8 bits
    rows, scales = rows.view(i.x.dtype), None if i.x_scale is None else take_rows(i.x_scale, i.order, i.top_k)
    out, start = rows.new_zeros(len(rows), i.w.shape[2], dtype=i.dtype), 0
    for g, end in enumerate(group_ends(i.group_sizes, len(rows))):
        of_rows = None if scales is None else scales[start:end]
        of_g = (None if t is None else t[g] for t in (i.w_scale, i.bias))
        out[start:end] = scaled_gemm_reference(ScaledInputs(rows[start:end], i.w[g], of_rows, *of_g, i.dtype))
        start = end
    return out


# scaled_gmm: op


def shape_of_scaled_gmm(i: ScaledGroupsInputs, blocks: bool = False) -> tuple[int, int]:
    """(M, N), once the inputs fit together; with `blocks` the scales are those of `quantize_blocks`."""
    rows = i.x.shape[0] if i.order is None else i.order.shape[0]
    check_rows("x", i.x, "K", i.order, i.top_k, rows)
    size = check_8_bits(i, (*RESULTS, torch.float64) if blocks else RESULTS)
    of_x, of_w = (i.x.shape[0],), (size["G"], size["N"])
    of_bias = of_w
    if blocks:
        if i.x.dtype == torch.int8:
            raise TypeError("scales of blocks are for 8-bit floats, but x is torch.int8")
        across = cdiv(i.x.shape[1], ROW_BLOCK)
        of_x, of_w = (*of_x, across), (size["G"], cdiv(size["N"], ROW_BLOCK), across)
    check_scales(of_x, of_w, i.x_scale, i.w_scale, i.bias, of_bias)
    return rows, size["N"]


def new_scaled_gmm(i: ScaledGroupsInputs) -> Tensor:
    return i.x.new_empty(shape_of_scaled_gmm(i), dtype=i.dtype)


scaled_gmm_op = define_op(
    "scaled_gmm", ScaledGroupsInputs, new=new_scaled_gmm, check_values=lambda i: check_row_values(i.x, i),
    reference=scaled_gmm_reference, triton=bind_scaled_gmm, hopper=hopper.bind_scaled_gmm,
)  # fmt: skip

# scaled_gmm: public


def scaled_gmm(
    x: Tensor, w: Tensor, group_sizes: Tensor, x_scale: Tensor | None = None, w_scale: Tensor | None = None,
    bias: Tensor | None = None, *, order: Tensor | None = None, top_k: int = 1, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`scaled_gemm` of each group of rows with its own `w` (G, K, N): (M, N) in `out_dtype`.

    `x` (M, K) has the rows sorted by group, `group_sizes` (G,) int32 or int64 counts them and stays on the
    device.  With an `order` (M,), row r is row order[r] // top_k of `x` (T, K).  `x_scale`, for each row of
    `x`, and `w_scale` (G, N) are float32, `bias` (G, N) of any floating dtype.  Rows past the last group are
    zeros.  Operands, sums and errors as for `scaled_gemm`; not differentiable.
    """
    refuse_gradient("a scaled product", x, w, x_scale, w_scale, bias)
    return scaled_gmm_op(x, w, group_sizes, x_scale, w_scale, bias, order, top_k, out_dtype)
