"""Masked grouped matmul: the first rows of each group, times its weight, with a scale for each row of both.

    out[g, :s] = (x[g, :s] @ w[g].T) * x_scale[g, :s, None] * w_scale[g]     s = group_sizes[g]

G groups of up to M rows, K in, N out.  Rows past a group's size do not count and are not written.  Operands
have 8 bits, and their tiles are scaled sums of float32; or 16 or 32 bits.

`scaled_bmm` is the same product of batches, in which every row counts.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ...config import interpret
from ...op import Written, binds, define_inplace_op, takes
from ...private_api import reads_registers_in_time
from .. import hopper
from ..base.check import (
    Index,
    check_axes,
    check_fields,
    check_float,
    check_own_memory,
    refuse_gradient,
    wide,
)
from ..base.fixed_rows import multiply_rows
from ..base.fp8 import FP8, add_product, as_loaded, as_operands, as_rows, check_scales, is_promoted
from ..base.launch import bind_kernel, cdiv, jit_kernel, tl, triton
from ..base.shuffle import check_shuffle, unshuffle_weight
from ..base.tile import TILE_DTYPES, in_units, swizzle, tile_options, unit_of

FEW = 128  # below, tiles are transposed: matrix instructions want 64 rows or more, and weights have them


class MaskedInputs(NamedTuple):
    """The inputs of the op `masked_gmm`: for each group g and each of its first group_sizes[g] rows r,
    out[g, r] = (x[g, r] @ w[g].T) * x_scale[g, r] * w_scale[g]."""

    out: Written  # (G, M, N)
    x: Annotated[Tensor, "G, M, K"]
    w: Annotated[Tensor, "G, N, K"]
    group_sizes: Annotated[Index, "G"] | None  # None: every row counts
    x_scale: Tensor | None  # (G, M)
    w_scale: Tensor | None  # (G, N)
    shuffled: bool  # w is what `shuffle_weight` returns


# reference


def masked_gmm_reference(i: MaskedInputs) -> None:
    (G, M, _), w = i.x.shape, unshuffle_weight(i.w) if i.shuffled else i.w
    sizes = [M] * G if i.group_sizes is None else i.group_sizes.clamp(0, M).tolist()
    for g, size in enumerate(sizes):
        y = multiply_rows(wide(i.x[g, :size]), wide(w[g]).T)
        y = y if i.x_scale is None else y * i.x_scale[g, :size, None]
        i.out[g, :size] = y if i.w_scale is None else y * i.w_scale[g]


# kernel


@jit_kernel
def masked_gmm_kernel(
    x_ptr,  # (G, M, K)
    w_ptr,  # (G, N, K)
    x_scale_ptr,  # (G, M) float32, or None
    w_scale_ptr,  # (G, N) float32, or None
    out_ptr,  # (G, M, N)
    group_sizes_ptr,  # (G,), or None where every row counts
    G, M, N, K,
    x_strides,  # g, m, k
    w_strides,  # g, n, k
    x_scale_strides,  # g, m
    w_scale_strides,  # g, n
    out_strides,  # g, m, n
    SHUFFLED: tl.constexpr, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr, X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr, PROMOTED: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, x_strides, w_strides, out_strides = in_units((N, K, x_strides, w_strides, out_strides), UNIT)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile, tile_n = swizzle(tl.program_id(0), G * tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M, NUM_DIES)
    group, row = (tile // tiles_m).to(tl.int64), tile % tiles_m * BLOCK_M
    row_end = M
    if group_sizes_ptr is not None:
        size = tl.load(group_sizes_ptr + group).to(tl.int64)
        row_end = tl.minimum(tl.maximum(size, 0), M).to(tl.int32)
    if row >= row_end:
        return
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    m_read = tl.where(m < row_end, m, row).to(tl.int64)
    n_read = (n % N).to(tl.int64)

    x_ptrs = x_ptr + group * x_strides[0] + m_read[:, None] * x_strides[1] + k[None, :] * x_strides[2]
    w_ptrs = w_ptr + group * w_strides[0]
    if SHUFFLED:  # a tile has one run of memory in each block of 16 rows
        w_stride_k = 16
        i = tl.arange(0, BLOCK_N * BLOCK_K)
        run = i % (16 * BLOCK_K)
        block = (tile_n * (BLOCK_N // 16) + i // (16 * BLOCK_K)) % (N // 16)
        w_ptrs += block.to(tl.int64) * (16 * K) + run
    else:
        w_stride_k = w_strides[2]
        w_ptrs += k[:, None] * w_stride_k + n_read[None, :] * w_strides[1]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if TRANSPOSED else (BLOCK_M, BLOCK_N), tl.float32)
    for k_start in range(0, K, BLOCK_K):
        if EVEN_K:
            x, w = tl.load(x_ptrs), tl.load(w_ptrs)
        else:
            k_mask = k < K - k_start
            x = tl.load(x_ptrs, mask=k_mask[None, :], other=0.0)
            w_mask = run < 16 * (K - k_start) if SHUFFLED else k_mask[:, None]
            w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        if SHUFFLED:
            w = unshuffle(w, BLOCK_N, BLOCK_K, VECTOR)
        acc = add_product(acc, x, w, X_FORMAT, W_FORMAT, TRANSPOSED, PROMOTED, PRECISION)
        x_ptrs += BLOCK_K * x_strides[2]
        w_ptrs += BLOCK_K * w_stride_k
    if TRANSPOSED:
        acc = acc.T

    if x_scale_ptr is not None:
        x_scale_ptrs = x_scale_ptr + group * x_scale_strides[0] + m * x_scale_strides[1]
        acc *= tl.load(x_scale_ptrs, mask=m < row_end, other=0.0)[:, None]
    if w_scale_ptr is not None:
        w_scale_ptrs = w_scale_ptr + group * w_scale_strides[0] + n * w_scale_strides[1]
        acc *= tl.load(w_scale_ptrs, mask=n < N, other=0.0)[None, :]
    out_ptrs = out_ptr + group * out_strides[0] + n.to(tl.int64)[None, :] * out_strides[2]
    out_ptrs += m.to(tl.int64)[:, None] * out_strides[1]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < row_end)[:, None] & (n < N)[None, :])


@triton.jit
def unshuffle(w, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """A shuffled tile, as memory has it, as (BLOCK_K, BLOCK_N): see shuffle.py.

    It is loaded in one dimension: of a tile with more, Triton gives neighbouring threads what lies apart, or
    AMD's shared memory bytes instead of vectors.  Matrix instructions then find their operand by its address.
    """
    vectors = tl.reshape(w, (BLOCK_N // 16, BLOCK_K // VECTOR, 16, VECTOR))
    return tl.reshape(tl.permute(vectors, (0, 2, 1, 3)), (BLOCK_N, BLOCK_K)).T


# launcher


@binds
@takes(*TILE_DTYPES, *FP8)
def bind_masked_gmm(i: MaskedInputs) -> Callable:
    (G, M, N), K = i.out.shape, i.x.shape[2]
    copied = i.shuffled and not i.w[0].is_contiguous()  # the kernel knows no strides within such a matrix
    (x, w), (x_format, w_format) = as_operands(i.x, i.w)
    few, decoded = "_few" if M < FEW else "", "_decode" if x_format or w_format else ""
    transposed, amd = shuffled_options(w, bool(few)) if i.shuffled else (bool(few), ())
    config = tuning.lookup(f"masked{few}{decoded}", x.dtype, G * M, N, K, G)
    scales = [(0, 0) if s is None else s.stride() for s in (i.x_scale, i.w_scale)]
    w_strides = (N * K, K, 1) if copied else w.stride()
    kernel = bind_kernel(
        masked_gmm_kernel, (G * cdiv(M, config.block_m) * cdiv(N, config.block_n),),
        SHUFFLED=i.shuffled, VECTOR=16 // w.itemsize, TRANSPOSED=transposed,
        X_FORMAT=x_format, W_FORMAT=w_format, PROMOTED=is_promoted(x), EVEN_K=K % config.block_k == 0,
        UNIT=unit_of((N, K), x.stride(), w_strides, i.out.stride()), **tile_options(config, amd),
    )  # fmt: skip
    numbers = G, M, N, K, x.stride(), w_strides, *scales, i.out.stride()

    def launch(out, i):
        x, w = as_loaded(i.x, x_format), as_loaded(i.w.contiguous() if copied else i.w, w_format)
        sizes = None if i.group_sizes is None else i.group_sizes.contiguous()
        kernel(x, w, i.x_scale, i.w_scale, out, sizes, *numbers)

    return launch


def shuffled_options(w: Tensor, few: bool) -> tuple[bool, tuple[int, ...]]:
    """Whether tiles of shuffled weights are transposed, and what AMD's compiler is told.

    Hopper multiplies from registers only what is on the left; 8-bit products end in the step that reads them.
    A lane of gfx942 has one vector of a row for two instructions, which is this order: with few rows the
    weights come to them straight from memory.
    """
    arch = None if interpret else triton.runtime.driver.active.get_current_target().arch
    if arch == 90 and w.itemsize > 1 and not reads_registers_in_time():
        return False, ()
    return few or (arch == 90 and w.itemsize <= 2), (0, 0, 2) if arch == "gfx942" else ()


# op


def check_masked_gmm(i: MaskedInputs) -> None:
    check_fields(i)
    (G, M, _), N = i.x.shape, i.w.shape[1]
    check_dtypes(i.out, i.x, i.w)
    if i.out.shape != (G, M, N):
        raise ValueError(f"out must be (G={G}, M={M}, N={N}), but it has shape {tuple(i.out.shape)}")
    check_own_memory("out", i.out)
    check_scales((G, M), (G, N), i.x_scale, i.w_scale)
    if i.shuffled:
        check_shuffle(i.w)


def check_dtypes(out: Tensor, x: Tensor, w: Tensor) -> None:
    """Raise unless the dtypes fit: 8-bit floats of any kind for 16 or 32 bits, or one dtype for all three."""
    if x.dtype not in FP8:
        return check_float(x=x, w=w, out=out)
    if w.dtype not in FP8:
        raise TypeError(f"x is {x.dtype} but w is {w.dtype}")
    if out.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"out must be float16, bfloat16 or float32 for {x.dtype}, not {out.dtype}")


def check_masked_values(i: MaskedInputs) -> None:
    M, sizes = i.x.shape[1], i.group_sizes
    if sizes is not None and ((sizes < 0) | (sizes > M)).any():
        raise ValueError(f"group_sizes {sizes.tolist()} must not be negative nor more than M={M}")


masked_gmm_op = define_inplace_op(
    "masked_gmm", MaskedInputs, check=check_masked_gmm, check_values=check_masked_values,
    reference=masked_gmm_reference, triton=bind_masked_gmm, hopper=hopper.bind_masked_gmm,
)  # fmt: skip


# public


def masked_gmm(
    out: Tensor, x: Tensor, w: Tensor, group_sizes: Tensor | None = None,
    x_scale: Tensor | float | None = None, w_scale: Tensor | float | None = None, *, shuffled: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply the first rows of each group of `x` (G, M, K) by its `w` (G, N, K), into `out` (G, M, N).

    `group_sizes` (G,) int32 or int64 counts the rows of each group and stays on the device; without it every
    row counts.  Sizes are clamped to [0, M].  The other rows of `x` do not count, those of `out` keep what
    they held.  Returns `out`.

    `x` and `w` are 8-bit floats (e4m3fn, e4m3fnuz, e5m2, in any pair) for an `out` of 16 or 32 bits, or all
    three have one floating dtype.  Any strides.  `w` may be `shuffled`, as `shuffle_weight(w)` gives it.
    The product is multiplied by `x_scale`, float32: a number, (G,) or (G, 1, 1), or (G, M) or (G, M, 1), and
    by `w_scale`: the same with N in place of M.  None is 1.  Hopper's tensor cores keep some 14 bits of a sum
    of 8-bit products; they add 128 at most, 256 for a bfloat16 result, and float32 adds the rest.

    Raises ValueError for shapes or devices that do not fit and for an `out` that shares memory with another
    argument, TypeError for dtypes, RuntimeError where it would need a gradient, which it has not, before
    anything is written; with MOE_AITER_DEBUG=1 also ValueError for sizes outside [0, M].
    """
    check_axes(x=(x, "G, M, K"), w=(w, "G, N, K"))
    scales = as_rows("x_scale", x_scale, x, x.shape[1]), as_rows("w_scale", w_scale, x, w.shape[1])
    refuse_gradient("a batched product" if group_sizes is None else "a masked product", out, x, w, *scales)
    masked_gmm_op(out, x, w, group_sizes, *scales, shuffled)
    return out


# scaled_bmm: public


def scaled_bmm(
    x: Tensor, w: Tensor, x_scale: Tensor | float | None = None, w_scale: Tensor | float | None = None, *,
    out_dtype: torch.dtype | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`(x @ w) * x_scale * w_scale` of batches: `x` (G, M, K), `w` (G, K, N), both of any strides; (G, M, N).

    8-bit floats in any pair give `out_dtype`, float16, bfloat16 or float32; other dtypes are one for all.
    Scales are float32: a number, one for each matrix (G,), or one for each row of `x`, (G, M), or column of
    `w`, (G, N).  They multiply sums in float32, which are rounded once, into `out` where it is given.  With
    8 bits a `w` whose K lies in a row, `w.mT` contiguous, is faster.  Not differentiable.
    """
    check_axes(x=(x, "G, M, K"), w=(w, "G, K, N"))
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1], w.shape[2], dtype=out_dtype)
    elif out_dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype} but out_dtype is {out_dtype}")
    return masked_gmm(out, x, w.mT, None, x_scale, w_scale)
