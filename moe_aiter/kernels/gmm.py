"""Grouped matmul: `out[s:e] = x[s:e] @ w[g] + bias[g]` for each group g, whose rows are [s, e).

M rows, G groups, K in, N out.
Shapes say the maths; strides say the layout.  `w.mT` is a valid `w`.
"""

import torch
from torch import Tensor

from .. import tuning
from ..backend import define_op, takes
from . import hopper
from ._check import check_float, check_shape, check_size
from ._groups import check_groups, check_plan_values, split_groups
from ._tile import TILE_DTYPES, locate, multiply, row_tiles, swizzle, tile_options
from ._triton import cdiv, jit_kernel, next_power_of_2, tl
from .tgmm import group_sum, weight_gradient

# reference


def gmm_reference(x, w, group_sizes, bias):
    *rows, rest = split_groups(x, group_sizes)
    out = [r @ w[g] if bias is None else r @ w[g] + bias[g].to(x.dtype) for g, r in enumerate(rows)]
    return torch.cat([*out, rest.new_zeros(len(rest), w.shape[2])])


# kernel


@jit_kernel
def gmm_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (G, K, N)
    bias_ptr,  # (G, N) or None
    out_ptr,  # (M, N), contiguous
    group_sizes_ptr,  # (G,)
    M,
    N,
    K,
    G,
    tiles_m,
    x_strides,  # m, k
    w_strides,  # g, k, n
    bias_strides,  # g, n
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
    w_stride_g, w_stride_k, w_stride_n = w_strides
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M, NUM_DIES)
    group, row, row_end = locate(tile_m, group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
    if group > G:
        return
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    m_read = tl.where(m < row_end, m, row).to(tl.int64)
    n_read = n % N

    x_ptrs = x_ptr + m_read[:, None] * x_stride_m + k[None, :] * x_stride_k
    w_base = w_ptr + tl.minimum(group, G - 1).to(tl.int64) * w_stride_g
    w_ptrs = w_base + k[:, None] * w_stride_k + n_read[None, :] * w_stride_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if bias_ptr is not None:  # first rather than last: the epilogue has no registers to spare
        bias_ptrs = bias_ptr + group.to(tl.int64) * bias_strides[0] + n * bias_strides[1]
        acc += tl.load(bias_ptrs, mask=(n < N) & (group < G), other=0.0).to(tl.float32)[None, :]
    depth = tl.where(group < G, K, 0)  # rows past the last group become zeros
    acc = multiply(acc, x_ptrs, w_ptrs, depth, x_stride_k, w_stride_k, BLOCK_K, EVEN_K, PRECISION)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < row_end)[:, None] & (n < N)[None, :])


# launcher


def new_gmm(x, w, group_sizes, bias):
    check_shape("x", x, "M", "K")
    check_shape("w", w, "G", "K", "N")
    (M, K), (G, w_K, N) = x.shape, w.shape
    check_size("x is (M, K={})", K, "w is (G, K={}, N)", w_K)
    check_float(x=x, w=w)
    check_groups(group_sizes, x, w=w, bias=bias)
    check_size("group_sizes is ({},)", group_sizes.shape[0], "w is (G={}, K, N)", G)
    if bias is not None and (bias.shape != (G, N) or not bias.is_floating_point()):
        raise ValueError(f"bias must be floating (G={G}, N={N}), but it is {bias.dtype} {tuple(bias.shape)}")
    return x.new_empty(M, N)


@takes(*TILE_DTYPES)
def launch_gmm(out, x, w, group_sizes, bias):
    (M, N), (G, K, _) = out.shape, w.shape
    config = tuning.lookup("gmm", x.dtype, M, N, K, G)
    tiles_m = row_tiles(M, G, config.block_m)
    gmm_kernel[(tiles_m * cdiv(N, config.block_n),)](
        x, w, bias, out, group_sizes.contiguous(), M, N, K, G, tiles_m,
        x.stride(), w.stride(), (0, 0) if bias is None else bias.stride(),
        BLOCK_G=next_power_of_2(G + 1), EVEN_K=K % config.block_k == 0, **tile_options(config),
    )  # fmt: skip


# op


def save_gmm(ctx, inputs, output):
    x, w, group_sizes, bias = inputs
    ctx.save_for_backward(x, w, group_sizes)
    ctx.bias_dtype = None if bias is None else bias.dtype


def backward_gmm(ctx, dout):
    x, w, group_sizes = ctx.saved_tensors
    dx = dw = dbias = None
    if ctx.needs_input_grad[0]:
        dx = gmm(dout, w.mT, group_sizes)
    if ctx.needs_input_grad[1]:
        dw = weight_gradient(w, None, x, dout, group_sizes)
    if ctx.needs_input_grad[3]:
        dbias = group_sum(dout, group_sizes).to(ctx.bias_dtype)
    return dx, dw, None, dbias


gmm_op = define_op(
    "gmm(Tensor x, Tensor w, Tensor group_sizes, Tensor? bias) -> Tensor",
    new=new_gmm,
    reference=gmm_reference,
    check_values=lambda x, w, group_sizes, bias: check_plan_values(len(x), group_sizes),
    triton=launch_gmm,
    hopper=hopper.launch_gmm,
    backward=backward_gmm,
    save=save_gmm,
)


# public


def gmm(x: Tensor, w: Tensor, group_sizes: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each group of rows of `x` (M, K) by its own matrix of `w` (G, K, N); returns (M, N).

    `group_sizes` (G,) int32 or int64 counts the rows of each group, in order; it stays on the device.
    Rows past its sum become zeros; sizes that are negative or reach past M are clamped.  `bias` (G, N) of
    any floating dtype is added in float32 before the one rounding.  `x` and `w` share a dtype and may have
    any strides; both have gradients, as `bias` has.  Sums are kept in float32.

    Raises ValueError for shapes or devices that do not fit, TypeError for dtypes; with MOE_AITER_DEBUG=1 also
    ValueError for group sizes that are negative or sum to more than M.
    """
    return gmm_op(x, w, group_sizes, bias)
