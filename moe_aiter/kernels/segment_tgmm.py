"""Transposed segment matmul: `out[i] = sum of x[s:e].T @ y[s:e]` over the segments [s, e) whose weight is i.

The gradient of `segment_gmm`'s weights.  M rows, B segments, W weights, K in, N out.
"""

import dataclasses

import torch
from torch import Tensor

from .. import tuning
from ..op import define_op, takes
from ._by_group import chosen
from ._check import check_float, check_shape, check_size
from ._segments import (
    check_count,
    check_segment_values,
    check_segments,
    load_segments,
    load_weights,
    num_segments,
    sizes_with_first,
    split_segments,
    weight_numbers,
)
from ._tile import TILE_DTYPES, at_least_16, dense, swizzle, tile_options
from ._triton import cdiv, jit_kernel, next_power_of_2, tl
from .tgmm import weight_gradient

ENOUGH = 256  # programs that keep a GPU busy
PART_ROWS = 512  # of those that programs share, the least that each takes
WIDE = 128  # of K and N, from where on `tgmm`'s tiles are filled

# reference


def segment_tgmm_reference(x, y, lens, indptr, weight_indices, weights, columns_first):
    out = x.new_zeros(weights, x.shape[1], y.shape[1])
    product = chosen(out, x, None)
    numbers = weight_numbers(weight_indices, num_segments(lens, indptr), weights)
    pairs = zip(split_segments(x, lens, indptr)[1], split_segments(y, lens, indptr)[1], strict=True)
    for i, (a, b) in zip(numbers, pairs, strict=True):
        if i is not None:
            product(out[i], a.T, b, out[i])
    return out.mT if columns_first else out


# kernel


@jit_kernel
def segment_tgmm_kernel(
    x_ptr,  # (M, K)
    y_ptr,  # (M, N)
    out_ptr,  # (W, K, N), or (parts, W, K, N) float32
    bounds_ptr,  # (G,) or (G + 1,)
    indices_ptr,  # (G,) or None
    M,
    N,
    K,
    G,
    W,
    part,  # of the rows, which the programs of one place on axis 1 take
    x_strides,  # m, k
    y_strides,  # m, n
    out_strides,  # w, k, n; those of a part are W * K * N apart
    INDPTR: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # here BLOCK_M x BLOCK_N is a tile of out[i] (K, N), and BLOCK_K rows are summed over at a time
    tiles_k, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_k, tile_n = swizzle(tl.program_id(0), W * tiles_k, tiles_n, GROUP_M, NUM_DIES)
    weight = tile_k // tiles_k
    g = tl.arange(0, BLOCK_G)
    start, end = load_segments(g, bounds_ptr, M, G, INDPTR)
    first = tl.program_id(1).to(tl.int64) * part
    start, end = tl.maximum(start, first), tl.minimum(end, first + part)
    mine = load_weights(g, indices_ptr, G, W) == weight
    turn = tl.cumsum(mine.to(tl.int32), 0)
    k = tile_k % tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + (k % K)[None, :] * x_strides[1]
    y_ptrs = y_ptr + (n % N)[None, :] * y_strides[1]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(1, tl.sum(mine.to(tl.int32), 0) + 1):
        here = mine & (turn == i)
        row_end = tl.sum(tl.where(here, end, 0), 0)
        for row in range(tl.sum(tl.where(here, start, 0), 0), row_end, BLOCK_K):
            m = row + tl.arange(0, BLOCK_K)
            mask = (m < row_end)[:, None]
            x = tl.load(x_ptrs + m[:, None] * x_strides[0], mask=mask, other=0.0)
            y = tl.load(y_ptrs + m[:, None] * y_strides[0], mask=mask, other=0.0)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)

    out_base = out_ptr + tl.program_id(1).to(tl.int64) * W * K * N + weight.to(tl.int64) * out_strides[0]
    out_ptrs = out_base + k.to(tl.int64)[:, None] * out_strides[1] + n.to(tl.int64)[None, :] * out_strides[2]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(k < K)[:, None] & (n < N)[None, :])


# launcher


def new_segment_tgmm(x, y, lens, indptr, weight_indices, weights, columns_first):
    check_shape("x", x, "M", "K")
    check_shape("y", y, "M", "N")
    check_size("x is (M={}, K)", x.shape[0], "y is (M={}, N)", y.shape[0])
    check_float(x=x, y=y)
    check_count("weights", weights)
    check_segments(x, weights, (lens, indptr, weight_indices))
    K, N = x.shape[1], y.shape[1]
    return x.new_empty(weights, N, K) if columns_first else x.new_empty(weights, K, N)


@takes(*TILE_DTYPES)
def launch_segment_tgmm(out, x, y, lens, indptr, weight_indices, weights, columns_first):
    out = out.mT if columns_first else out
    (W, K, N), M, G = out.shape, x.shape[0], num_segments(lens, indptr)
    bounds, indices = dense(lens if indptr is None else indptr, weight_indices)
    config = tuning.lookup("segment_tgmm", x.dtype, M, N, K, W)
    block_m, block_n = min(config.block_m, at_least_16(K)), min(config.block_n, at_least_16(N))
    config = dataclasses.replace(config, block_m=block_m, block_n=block_n)
    tiles = W * cdiv(K, config.block_m) * cdiv(N, config.block_n)
    parts = max(min(ENOUGH // tiles, M // PART_ROWS), 1)
    sums = out if parts == 1 else out.new_empty(parts, W, K, N, dtype=torch.float32)
    segment_tgmm_kernel[(tiles, parts)](
        x, y, sums, bounds, indices, M, N, K, G, W, cdiv(M, parts),
        x.stride(), y.stride(), sums.stride()[-3:],
        INDPTR=indptr is not None, BLOCK_G=next_power_of_2(G + 1), **tile_options(config),
    )  # fmt: skip
    if parts > 1:
        out.copy_(sums.sum(0))


# op


segment_tgmm_op = define_op(
    "segment_tgmm(Tensor x, Tensor y, Tensor? lens, Tensor? indptr, Tensor? weight_indices, SymInt weights, "
    "bool columns_first) -> Tensor",
    new=new_segment_tgmm,
    check_values=lambda x, y, lens, indptr, weight_indices, *_: check_segment_values(
        len(x), (lens, indptr, weight_indices)
    ),
    reference=segment_tgmm_reference,
    triton=launch_segment_tgmm,
)


def segment_weight_gradient(
    w: Tensor,
    x: Tensor,
    dout: Tensor,
    lens: Tensor | None,
    indptr: Tensor | None,
    weight_indices: Tensor | None,
) -> Tensor:
    """The gradient of the weights `w` (W, K, N) of `segment_gmm`, in the memory layout of `w`.

    Where each segment has a matrix of its own, and a wide one, it is `tgmm`'s.
    """
    if weight_indices is None and min(w.shape[1:]) >= WIDE:
        if indptr is None:
            return weight_gradient(w, None, x, dout, lens)
        return weight_gradient(w, None, x, dout, sizes_with_first(indptr))[1:]
    columns_first = w.stride(1) < w.stride(2)
    dw = segment_tgmm_op(x, dout, lens, indptr, weight_indices, w.shape[0], columns_first)
    return dw.mT if columns_first else dw
