"""Segment matmul: `out[s:e] = x[s:e] @ w[weight_indices[i]]` for each segment i, whose rows are [s, e).

M rows, B segments, W weights, K in, N out.  The weight is found inside the kernel: none is copied.
As in `gmm`, strides say the layout.  Two kernels share the work: where K is short (a LoRA's expansion), a
program keeps its rows and walks over columns; else a program makes one tile, or where there are few tiles
(a LoRA's shrinking to its rank) a part of its sum over K, and the parts are added in order.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import tuning
from ..op import define_inplace_op, define_op, takes
from . import hopper
from ._by_group import chosen
from ._check import check_device, check_shape, check_size
from ._segments import (
    FP8,
    add_parts,
    check_operands,
    check_segment_values,
    check_segments,
    locate_segment,
    num_segments,
    split_segments,
    weight_numbers,
)
from ._tile import TILE_DTYPES, at_least_16, dense, multiply, operand, row_tiles, swizzle, tile_options
from ._triton import cdiv, jit_kernel, next_power_of_2, tl
from .segment_tgmm import segment_weight_gradient

SHORT_K = 64  # sums that a program makes in one step
ENOUGH = 256  # programs that keep a GPU busy, two for each SM of an H200
PART_K = 512  # of a sum over K that is shared among programs, the least that each takes
FILLED = 64  # rows of a segment on average from which on a Hopper tile is worth it
DTYPES = (*TILE_DTYPES, *FP8)

# reference


def segment_gmm_reference(x, w, lens, indptr, weight_indices):
    """Each segment's product, and zeros for the rows in no segment."""
    x, w = x.to(out_dtype(x)), w.to(out_dtype(w))
    numbers = weight_numbers(weight_indices, num_segments(lens, indptr), len(w))
    before, segments, past = split_segments(x, lens, indptr)
    pairs = zip([before, *segments, past], [None, *numbers, None], strict=True)
    return torch.cat([r.new_zeros(len(r), w.shape[2]) if i is None else r @ w[i] for r, i in pairs])


def fill_segment_gmm(out, x, w, lens, indptr, weight_indices, zero_rest=True):
    """By torch, each segment straight into its place."""
    x, w = x.to(out_dtype(x)), w.to(out_dtype(w))
    product = chosen(out, x, None)
    numbers = weight_numbers(weight_indices, num_segments(lens, indptr), len(w))
    before, outs, past = split_segments(out, lens, indptr)
    for o, r, i in zip(outs, split_segments(x, lens, indptr)[1], numbers, strict=True):
        if i is None:
            o.zero_()
        elif len(r):
            product(o, r, w[i], None)
    if zero_rest:
        before.zero_()
        past.zero_()


# kernel


@jit_kernel
def segment_gmm_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (W, K, N)
    out_ptr,  # (M, N), or (parts, M, N) float32; contiguous
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M,
    N,
    K,
    G,
    W,
    tiles_m,
    part,  # of K, which the programs of one place on axis 1 take
    x_strides,  # m, k
    w_strides,  # w, k, n
    INDPTR: tl.constexpr,
    ZERO_REST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    x_stride_m, x_stride_k = x_strides
    w_stride_w, w_stride_k, w_stride_n = w_strides
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M, NUM_DIES)
    group, weight, row, row_end = locate_segment(
        tile_m, bounds_ptr, indices_ptr, M, G, W, INDPTR, BLOCK_G, BLOCK_M
    )
    if group > ((G + 1 if INDPTR else G) if ZERO_REST else G - 1):
        return
    k_start = tl.program_id(1).to(tl.int64) * part
    depth = tl.where(weight >= 0, tl.minimum(K - k_start, part), 0).to(tl.int32)
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
    M,
    N,
    K,
    G,
    W,
    width,  # columns of a program
    x_strides,  # m, k
    w_strides,  # w, k, n
    ADD: tl.constexpr,  # to what out holds
    INDPTR: tl.constexpr,
    ZERO_REST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
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


def new_segment_gmm(x, w, *segments):
    check_shape("x", x, "M", "K")
    check_shape("w", w, "W", "K", "N")
    check_size("x is (M, K={})", x.shape[1], "w is (W, K={}, N)", w.shape[1])
    check_operands(x=x, w=w)
    check_segments(x, w.shape[0], segments)
    check_device(x=x, w=w)
    return x.new_empty(x.shape[0], w.shape[2], dtype=out_dtype(x))


def check_segment_gmm_out(out, x, w, *segments):
    expected = new_segment_gmm(x, w, *segments).shape
    if out.shape != expected or not out.is_contiguous():
        raise ValueError(f"out must be contiguous (M, N) = {tuple(expected)}, but it is {tuple(out.shape)}")
    narrow = (torch.bfloat16, torch.float16, torch.float32) if x.dtype in FP8 else (x.dtype,)
    if out.dtype not in narrow:
        raise TypeError(f"x is {x.dtype} but out is {out.dtype}")
    check_device(x=x, out=out)


def fits_triton(x, *_) -> bool:
    """Of float8, what Triton knows on this GPU."""
    if x.dtype not in FP8 or not x.is_cuda or torch.version.hip is not None:
        return x.is_cuda or x.dtype not in FP8
    return x.dtype in (FP8[:2] if torch.cuda.get_device_capability(x.device) >= (8, 9) else FP8[1:2])


@functools.cache
def no_larger(config: tuning.Config, N: int, K: int) -> tuning.Config:
    """A tile with no more columns than there are, nor more to sum over; a short sum is one step."""
    block_k = at_least_16(K)
    block_k = block_k if K <= SHORT_K else min(config.block_k, block_k)
    return dataclasses.replace(config, block_n=min(config.block_n, at_least_16(N)), block_k=block_k)


@takes(*DTYPES)
def launch_segment_gmm(out, x, w, lens, indptr, weight_indices, zero_rest=True, add=False):
    (M, N), (W, K, _), G = out.shape, w.shape, num_segments(lens, indptr)
    bounds, indices = dense(lens if indptr is None else indptr, weight_indices)
    short = K <= SHORT_K
    op, dtype = "segment_expand" if short else "segment_gmm", out.dtype
    config = no_larger(tuning.lookup(op, dtype, M, N, K, G), N, K)
    pieces = G if indptr is None else G + 1  # and the rows past the segments
    tiles_m, tiles_n = row_tiles(M, pieces, config.block_m), cdiv(N, config.block_n)
    tiles = max(cdiv(M, config.block_m), min(M, G)) * tiles_n  # that there are, about
    flags = {"INDPTR": indptr is not None, "ZERO_REST": zero_rest, "BLOCK_G": next_power_of_2(pieces + 1)}
    options = tile_options(config)
    if short:  # a program for some columns of a row tile
        width = min(max(tiles // ENOUGH, 1), 8) * config.block_n
        del options["GROUP_M"], options["NUM_DIES"]
        segment_expand_kernel[(tiles_m, cdiv(N, width))](
            x, w, out, bounds, indices, M, N, K, G, W, width, x.stride(), w.stride(),
            ADD=add, **flags, **options,
        )  # fmt: skip
        return
    steps = cdiv(K, config.block_k)
    part = max(cdiv(steps * tiles, ENOUGH), cdiv(PART_K, config.block_k)) * config.block_k
    parts = cdiv(K, part)
    sums = out if parts == 1 else out.new_empty(parts, M, N, dtype=torch.float32)
    segment_gmm_kernel[(tiles_m * tiles_n, parts)](
        x, w, sums, bounds, indices, M, N, K, G, W, tiles_m, part, x.stride(), w.stride(),
        EVEN_K=K % config.block_k == 0, **flags | {"ZERO_REST": zero_rest and parts == 1}, **options,
    )  # fmt: skip
    if parts > 1:
        add_parts(sums, out, bounds, **flags)


def launch_on_hopper(out, x, w, lens, indptr, weight_indices, zero_rest=True):
    """As a grouped product whose groups have the weights of their segments."""
    if not hopper.by_tma(out):
        return launch_segment_gmm(out, x, w, lens, indptr, weight_indices, zero_rest)
    hopper.launch_segments(out, x, w, lens, indptr, weight_indices, zero_rest)


def fits_hopper(x, w, lens, indptr, weight_indices, *_) -> bool:
    """Where tiles of 128 x 256 are well filled, and the grouped product itself runs."""
    rows, segments = x.shape[0], num_segments(lens, indptr)
    filled = rows >= FILLED * segments > 0 and w.shape[2] >= 128 and w.shape[1] > SHORT_K
    return filled and hopper.launch_segments.fits(x, w, segments + (indptr is not None))


launch_segment_gmm.fits = fits_triton
launch_on_hopper.takes, launch_on_hopper.fits = hopper.DTYPES, fits_hopper


def untouched_rest(launch: Callable) -> Callable:
    """The launcher that leaves the rows in no segment as they are."""
    return functools.wraps(launch)(functools.partial(launch, zero_rest=False))


# op


def save_segment_gmm(ctx, inputs, output):
    x, w, *segments = inputs
    ctx.save_for_backward(x, w, *segments)


def backward_segment_gmm(ctx, dout):
    x, w, *segments = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = segment_gmm_op(dout, w.mT, *segments)
    if ctx.needs_input_grad[1]:
        dw = segment_weight_gradient(w, x, dout, *segments)
    return dx, dw, None, None, None


segment_gmm_op = define_op(
    "segment_gmm(Tensor x, Tensor w, Tensor? lens, Tensor? indptr, Tensor? weight_indices) -> Tensor",
    new=new_segment_gmm,
    reference=segment_gmm_reference,
    torch=fill_segment_gmm,
    check_values=lambda x, w, *segments: check_segment_values(len(x), segments),
    triton=launch_segment_gmm,
    hopper=launch_on_hopper,
    backward=backward_segment_gmm,
    save=save_segment_gmm,
)
segment_gmm_out_op = define_inplace_op(
    "segment_gmm_out(Tensor(a!) out, Tensor x, Tensor w, Tensor? lens, Tensor? indptr, "
    "Tensor? weight_indices) -> ()",
    check=check_segment_gmm_out,
    reference=untouched_rest(fill_segment_gmm),
    check_values=lambda out, x, w, *segments: check_segment_values(len(x), segments),
    triton=untouched_rest(launch_segment_gmm),
    hopper=untouched_rest(launch_on_hopper),
)


# public


def segment_gmm(
    x: Tensor,
    w: Tensor,
    lens: Tensor | None = None,
    *,
    indptr: Tensor | None = None,
    weight_indices: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each segment of rows of `x` (M, K) by the matrix of `w` (W, K, N) it names; returns (M, N).

    `lens` (B,) counts the rows of each segment, in order from row 0 on.  Or else `indptr` (B + 1,) says where
    they lie: segment i has the rows from indptr[i] to indptr[i + 1].  Rows before and past the segments are
    zeros.  `weight_indices` (B,) is the number of each one's matrix, and may repeat; outside [0, W), usually
    -1, it stands for zeros.  Without it, segment i has matrix i and B = W.  All are int32 or int64, on the
    device of `x`, and stay there.  Segments that are negative or reach past M are clamped, and no row is
    multiplied twice: where an indptr decreases, that segment has no rows, and those behind it begin as if it
    had none.

    `x` and `w` share a dtype and may have any strides; both have gradients, those of a matrix summed over its
    segments in order.  Sums are kept in float32 (float64 for float64).  The result has that dtype, and
    bfloat16 for the four kinds of float8, which are multiplied as they are, without scales or gradients.
    `out` (M, N), contiguous, is overwritten where there are segments, and nowhere else; it has no gradient.

    Raises ValueError for shapes or devices that do not fit and for an `out` that shares memory with another
    argument, TypeError for dtypes, RuntimeError for `out` and a gradient at once; with MOE_AITER_DEBUG=1 also
    ValueError for lengths that are negative or sum to more than M, and for an indptr that does not lie in
    [0, M].
    """
    segments = lens, indptr, weight_indices
    if out is None:
        return segment_gmm_op(x, w, *segments)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, w)):
        raise RuntimeError("segment_gmm: out= has no gradient, but x or w requires one")
    segment_gmm_out_op(out, x, w, *segments)
    return out
