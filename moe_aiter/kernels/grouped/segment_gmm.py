"""Segment matmul: `out[s:e] = x[s:e] @ w[weight_indices[i]]` for each segment i, whose rows are [s, e).

M rows, B segments, W weights, K in, N out.  The kernel finds the weight itself; no weight is copied.  As in
`gmm`, strides say the layout.  There are two kernels.  If K is short (a LoRA's expansion), a program keeps
its rows and walks over columns.  Else a program makes one tile, or if there are few tiles (a LoRA's shrinking
to its rank) a part of the tile's sum over K (split-K); the partial sums are added in order.

./segments.py says what segments are, and has the gradient of the weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ...invariance import batch_invariant
from ...op import Written, binds, define_inplace_op, define_op, extended, gradients, takes
from .. import hopper
from ..base.check import (
    FLOATS,
    cast_as_linear,
    check_fields,
    check_tensor,
    needs_grad,
)
from ..base.fixed_rows import multiply_rows
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import (
    TILE_DTYPES,
    dense,
    in_units,
    multiply,
    no_larger,
    operand,
    row_tiles,
    swizzle,
    tile_options,
    unit_of,
    whole_units,
)
from .segments import (
    ENOUGH,
    check_segment_values,
    check_segments,
    load_segments,
    load_weights,
    num_segments,
    segment_weight_gradient,
    split_segments,
    weight_numbers,
)
from .tgmm import chosen


class SegmentInputs(NamedTuple):
    """The inputs of the op `segment_gmm`: out[s:e] = x[s:e] @ w[weight_indices[b]] for each segment b."""

    x: Annotated[Tensor, "M, K"]
    w: Annotated[Tensor, "W, K, N"]
    lens: Tensor | None  # (B,), or
    indptr: Tensor | None  # (B + 1,)
    weight_indices: Tensor | None  # (B,)


# the inputs of the op `segment_gmm_out`: `segment_gmm` into a tensor (M, N) that is there
SegmentOutInputs = extended("SegmentOutInputs", SegmentInputs, {"out": Written})

SHORT_K = 64  # sums that a program makes in one step
PART_K = 512  # of a sum over K that is shared among programs, the least that each takes
FILLED = 64  # rows of a segment on average from which on a Hopper tile is worth it
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (*TILE_DTYPES, *FP8)

# reference


def segment_gmm_reference(i: SegmentInputs) -> Tensor:
    """Each segment's product, and zeros for the rows in no segment."""
    x, w = (t.to(out_dtype(t)) for t in (i.x, i.w))
    numbers = weight_numbers(i.weight_indices, num_segments(i.lens, i.indptr), len(w))
    before, segments, past = split_segments(x, i.lens, i.indptr)
    pairs = zip([before, *segments, past], [None, *numbers, None], strict=True)
    return torch.cat(
        [r.new_zeros(len(r), w.shape[2]) if n is None else multiply_rows(r, w[n]) for r, n in pairs]
    )


def fill_segment_gmm(out: Tensor, i: SegmentInputs | SegmentOutInputs, zero_rest: bool = True) -> None:
    """Compute by torch, each segment in its place."""
    x, w = (t.to(out_dtype(t)) for t in (i.x, i.w))
    product = chosen(out, x, None)
    numbers = weight_numbers(i.weight_indices, num_segments(i.lens, i.indptr), len(w))
    before, outs, past = split_segments(out, i.lens, i.indptr)
    for o, r, n in zip(outs, split_segments(x, i.lens, i.indptr)[1], numbers, strict=True):
        if n is None:
            o.zero_()
        elif len(r):
            product(o, r, w[n], None)
    if zero_rest:
        before.zero_()
        past.zero_()


# kernel


@triton.jit
def locate_segment(
    tile, bounds_ptr, indices_ptr, M, G, W,
    INDPTR: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Row tile number -> (segment, its weight or -1, first row, end row); no other segment has a tile.

    The indices are loaded with the bounds, not once the segment is known: one wait for memory instead of two.
    """
    g = tl.arange(0, BLOCK_G)
    start, end = load_segments(g, bounds_ptr, M, G, INDPTR)
    weight = load_weights(g, indices_ptr, G, W)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    last_tile = tl.cumsum(tiles, 0)
    segment = tl.sum((last_tile <= tile).to(tl.int32), 0)
    here = g == segment
    row = tl.sum(tl.where(here, start + (tile - last_tile + tiles) * BLOCK_M, 0), 0)
    row_end = tl.sum(tl.where(here, end, 0), 0)
    weight = tl.sum(tl.where(here, weight, 0), 0)
    return segment, weight, row, row_end


@jit_kernel
def add_split_k_kernel(
    partial_sums_ptr,  # (split_k, M, N) float32
    out_ptr,  # (M, N), contiguous
    bounds_ptr,  # (G,) or (G + 1,)
    split_k,
    size,  # M * N
    M, N, G,
    INDPTR: tl.constexpr, ZERO_REST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the partial sums, in order, in the rows of segments."""
    g = tl.arange(0, BLOCK_G)
    start, end = load_segments(g, bounds_ptr, M, G, INDPTR)
    rest = tl.sum(tl.where(g == G, start, 0), 0)  # the first row past the segments
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = i < rest * N
    if INDPTR:
        mine &= i >= tl.sum(tl.where(g == G + 1, end, 0), 0) * N
    acc = tl.zeros((BLOCK,), tl.float32)
    size = tl.cast(size, tl.int64)
    for split in range(0, split_k):
        acc += tl.load(partial_sums_ptr + split * size + i, mask=mine, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size if ZERO_REST else mine)


def bind_add_split_k(split_k: int, M: int, N: int, G: int, **flags) -> Callable[..., None]:
    """Return `add(sums, out, bounds)`: add up the partial sums (split_k, M, N) in the rows of G segments.
    The `flags` are those of `segment_gmm`."""
    block = 1024
    kernel = bind_kernel(add_split_k_kernel, (cdiv(M * N, block),), **flags, BLOCK=block, num_warps=4)
    return lambda sums, out, bounds: kernel(sums, out, bounds, split_k, M * N, M, N, G)


@jit_kernel
def segment_gmm_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (W, K, N)
    out_ptr,  # (M, N), or (split_k, M, N) float32; contiguous
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M, N, K, G, W, tiles_m,
    part,  # of K, which the programs of one place on axis 1 take
    x_strides,  # m, k
    w_strides,  # w, k, n
    INDPTR: tl.constexpr, ZERO_REST: tl.constexpr, UNIT: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, x_strides, w_strides = in_units((N, K, x_strides, w_strides), UNIT)
    x_stride_m, x_stride_k = x_strides
    w_stride_w, w_stride_k, w_stride_n = w_strides
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M, NUM_DIES)
    group, weight, row, row_end = locate_segment(
        tile_m, bounds_ptr, indices_ptr, M, G, W, INDPTR, BLOCK_G, BLOCK_M
    )
    if group > ((G + 1 if INDPTR else G) if ZERO_REST else G - 1):
        return
    k_start = tl.program_id(1).to(tl.int64) * part
    depth = whole_units(tl.where(weight >= 0, tl.minimum(K - k_start, part), 0).to(tl.int32), UNIT)
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    m_read = tl.where(m < row_end, m, row).to(tl.int64)
    n_read = n % N

    x_base = x_ptr + k_start * x_stride_k
    x_ptrs = x_base + m_read[:, None] * x_stride_m + k[None, :] * x_stride_k
    w_base = w_ptr + tl.maximum(weight, 0) * w_stride_w + k_start * w_stride_k
    w_ptrs = w_base + k[:, None] * w_stride_k + n_read[None, :] * w_stride_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = multiply(acc, x_ptrs, w_ptrs, depth, x_stride_k, w_stride_k, BLOCK_K, EVEN_K, PRECISION)
    out_base = out_ptr + tl.program_id(1).to(tl.int64) * M * N
    out_ptrs = out_base + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < row_end)[:, None] & (n < N)[None, :])


@jit_kernel
def segment_expand_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (W, K, N)
    out_ptr,  # (M, N), contiguous
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M, N, K, G, W,
    width,  # columns of a program
    x_strides,  # m, k
    w_strides,  # w, k, n
    ADD: tl.constexpr,  # to what out holds
    INDPTR: tl.constexpr, ZERO_REST: tl.constexpr, UNIT: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, x_strides, w_strides = in_units((N, K, x_strides, w_strides), UNIT)
    group, weight, row, row_end = locate_segment(
        tl.program_id(0), bounds_ptr, indices_ptr, M, G, W, INDPTR, BLOCK_G, BLOCK_M
    )
    if group > ((G + 1 if INDPTR else G) if ZERO_REST else G - 1):
        return
    m = row + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    k_mask = (k < K) & (weight >= 0)  # without a weight zeros times zeros
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_strides[0] + k[None, :] * x_strides[1]
    x = operand(tl.load(x_ptrs, mask=(m < row_end)[:, None] & k_mask[None, :], other=0.0))
    w_ptrs = w_ptr + tl.maximum(weight, 0) * w_strides[0] + k[:, None] * w_strides[1]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N
    first = tl.program_id(1) * width
    for n_start in range(first, tl.minimum(first + width, N), BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        w = tl.load(w_ptrs + (n % N)[None, :] * w_strides[2], mask=k_mask[:, None], other=0.0)
        mask = (m < row_end)[:, None] & (n < N)[None, :]
        out = tl.dot(x, operand(w), input_precision=PRECISION)
        if ADD:
            out += tl.load(out_ptrs + n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs + n[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


# launcher


def out_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype in FP8 else x.dtype


def new_segment_gmm(i: SegmentInputs | SegmentOutInputs) -> Tensor:
    size = check_fields(i)
    if i.x.dtype not in FLOATS + FP8:
        raise TypeError(f"x must be float16, bfloat16, float32, float64 or float8, not {i.x.dtype}")
    if i.w.dtype != i.x.dtype:
        raise TypeError(f"x is {i.x.dtype} but w is {i.w.dtype}")
    check_segments(i, size["W"])
    return i.x.new_empty(size["M"], size["N"], dtype=out_dtype(i.x))


def check_segment_gmm_out(i: SegmentOutInputs) -> None:
    out, expected = i.out, new_segment_gmm(i).shape
    if out.shape != expected or not out.is_contiguous():
        has = f"{tuple(out.shape)} with the strides {out.stride()}"
        raise ValueError(f"out must be contiguous (M, N) = {tuple(expected)}, but it is {has}")
    narrow = (torch.bfloat16, torch.float16, torch.float32) if i.x.dtype in FP8 else (i.x.dtype,)
    if out.dtype not in narrow:
        raise TypeError(f"x is {i.x.dtype} but out is {out.dtype}")


def fits_triton(i: SegmentInputs | SegmentOutInputs) -> bool:
    """Whether Triton takes the dtype: for float8, the formats that it knows on this GPU."""
    if i.x.dtype not in FP8 or not i.x.is_cuda or torch.version.hip is not None:
        return i.x.is_cuda or i.x.dtype not in FP8
    return i.x.dtype in (FP8[:2] if torch.cuda.get_device_capability(i.x.device) >= (8, 9) else FP8[1:2])


@binds
@takes(*DTYPES)
def bind_segment_gmm(i: SegmentInputs) -> Callable:
    return bind_segments(i, out_dtype(i.x))


@binds
@takes(*DTYPES)
def bind_segment_gmm_out(i: SegmentOutInputs) -> Callable:
    return bind_segments(i, i.out.dtype, zero_rest=False)


def bind_segments(
    i: SegmentInputs | SegmentOutInputs, dtype: torch.dtype, zero_rest: bool = True, add: bool = False
) -> Callable:
    """For a contiguous result of this dtype.  `zero_rest`: rows in no segment become zeros, or stay as they
    are; `add`, where K is short: the products are added to what the result holds."""
    (M, K), (W, _, N), G = i.x.shape, i.w.shape, num_segments(i.lens, i.indptr)
    short = K <= SHORT_K
    config = tuning.lookup("segment_expand" if short else "segment_gmm", dtype, M, N, K, G)
    config = dataclasses.replace(config, block_k=SHORT_K) if short else config  # a short sum is one step
    config = no_larger(config, block_n=N, block_k=K)
    pieces = G if i.indptr is None else G + 1  # and the rows past the segments
    tiles_m, tiles_n = row_tiles(M, pieces, config.block_m), cdiv(N, config.block_n)
    tiles = max(cdiv(M, config.block_m), min(M, G)) * tiles_n  # that there are, about
    flags = {"INDPTR": i.indptr is not None, "ZERO_REST": zero_rest, "BLOCK_G": next_power_of_2(pieces + 1)}
    sizes, strides, options = (M, N, K, G, W), (i.x.stride(), i.w.stride()), tile_options(config)
    options["UNIT"] = unit_of((N, K), *strides)
    split_k, add_split_k = 1, None
    if short:  # a program for some columns of a row tile
        width = min(max(tiles // ENOUGH, 1), 8) * config.block_n
        del options["GROUP_M"], options["NUM_DIES"]
        grid, numbers = (tiles_m, cdiv(N, width)), (*sizes, width, *strides)
        kernel = bind_kernel(segment_expand_kernel, grid, ADD=add, **flags, **options)
    else:
        steps = cdiv(K, config.block_k)
        least = steps if batch_invariant() else cdiv(PART_K, config.block_k)
        part = max(cdiv(steps * tiles, ENOUGH), least) * config.block_k
        split_k, numbers = cdiv(K, part), (*sizes, tiles_m, part, *strides)
        add_split_k = bind_add_split_k(split_k, M, N, G, **flags) if split_k > 1 else None
        flags["ZERO_REST"] = zero_rest and split_k == 1
        options["EVEN_K"] = K % config.block_k == 0
        kernel = bind_kernel(segment_gmm_kernel, (tiles_m * tiles_n, split_k), **flags, **options)

    def launch(out, i):
        bounds, indices = dense(i.lens if i.indptr is None else i.indptr, i.weight_indices)
        sums = out if split_k == 1 else out.new_empty(split_k, M, N, dtype=torch.float32)
        kernel(i.x, i.w, sums, bounds, indices, *numbers)
        if add_split_k is not None:
            add_split_k(sums, out, bounds)

    return launch


@binds
def bind_on_hopper(i: SegmentInputs) -> Callable:
    """Bind a grouped product whose groups have the weights of their segments."""
    return hopper.bind_segments(i, zero_rest=True)


@binds
def bind_out_on_hopper(i: SegmentOutInputs) -> Callable:
    return hopper.bind_segments(i, zero_rest=False) if hopper.by_tma(i.out) else bind_segment_gmm_out(i)


def fills_tiles(i: SegmentInputs | SegmentOutInputs) -> bool:
    """Whether tiles of 128 x 256 are well filled, and the grouped product itself runs on Hopper."""
    segments = num_segments(i.lens, i.indptr)
    filled = i.x.shape[0] >= FILLED * segments > 0 and i.w.shape[2] >= 128 and i.w.shape[1] > SHORT_K
    return filled and not batch_invariant() and hopper.bind_segments.fits(i)


bind_segment_gmm.fits = bind_segment_gmm_out.fits = fits_triton
bind_on_hopper.takes = bind_out_on_hopper.takes = hopper.DTYPES
bind_on_hopper.fits = bind_out_on_hopper.fits = fills_tiles


# op


def backward_segment_gmm(ctx, dout):
    x, w, *segments = ctx.saved_tensors
    dx, dw, needs = None, None, SegmentInputs(*ctx.needs_input_grad)
    if needs.x:
        dx = segment_gmm_op(dout, w.mT, *segments)
    if needs.w:
        dw = segment_weight_gradient(w, x, dout, *segments)
    return gradients(SegmentInputs, x=dx, w=dw)


segment_gmm_op = define_op(
    "segment_gmm", SegmentInputs, new=new_segment_gmm, reference=segment_gmm_reference,
    torch=fill_segment_gmm, check_values=check_segment_values, triton=bind_segment_gmm, hopper=bind_on_hopper,
    backward=backward_segment_gmm, save=lambda ctx, i, output: ctx.save_for_backward(*i),
)  # fmt: skip
segment_gmm_out_op = define_inplace_op(
    "segment_gmm_out", SegmentOutInputs, check=check_segment_gmm_out,
    reference=lambda i: fill_segment_gmm(i.out, i, zero_rest=False), check_values=check_segment_values,
    triton=bind_segment_gmm_out, hopper=bind_out_on_hopper,
)  # fmt: skip


# public


def segment_gmm(
    x: Tensor, w: Tensor, lens: Tensor | None = None, *, indptr: Tensor | None = None,
    weight_indices: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply each segment of rows of `x` (M, K) by its matrix of `w` (W, K, N); returns (M, N).

    lens: (B,), the number of rows of each segment, in order from row 0 on.
    indptr: (B + 1,), instead of `lens`: segment i has the rows from indptr[i] to indptr[i + 1].
    weight_indices: (B,), the number of each segment's matrix; numbers may repeat.  A number outside of
        [0, W), usually -1, stands for a matrix of zeros.  Without it, segment i has matrix i, and B = W.
    out: (M, N), contiguous; written in the rows of segments and nowhere else; it has no gradient.

    Index tensors are int32 or int64, on the device of `x`; nothing synchronises.  Rows before and past the
    segments are zeros.  Segments that are negative or reach past M are clamped, and no row is multiplied
    twice: if an indptr decreases, that segment has no rows, and later ones begin as if it had none.

    `x` and `w` share a dtype, or under torch.autocast without `out` are cast to its dtype, and may have any
    strides; both have gradients, that of a matrix summed over its
    segments in order.  Sums are float32 (float64 for float64).  The result has the dtype of `x`, or bfloat16
    for the four kinds of float8, which are multiplied without scales or gradients.

    Raises ValueError for shapes or devices that do not fit and for an `out` that shares memory with another
    argument, TypeError for dtypes, RuntimeError for `out` and a gradient at once; with MOE_AITER_DEBUG=1 also
    ValueError for lengths that are negative or sum to more than M, for an indptr that is not within [0, M],
    and for weight_indices from W on.
    """
    segments = lens, indptr, weight_indices
    if out is None:
        check_tensor("x", x)
        check_tensor("w", w)
        return segment_gmm_op(*cast_as_linear(x, w), *segments)
    if needs_grad(x, w):
        raise RuntimeError("segment_gmm: out= has no gradient, but x or w requires one")
    segment_gmm_out_op(out, x, w, *segments)
    return out
