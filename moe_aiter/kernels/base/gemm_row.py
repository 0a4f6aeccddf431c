"""The epilogue that every kernel of the dense product shares, and the kernel for products of one row.

`finish` adds bias and c to a sum and applies the activation.  If several programs share a sum over K, each
writes a partial sum, and `bind_split` adds these and finishes the result.

A product of one row takes as long as reading its weight, and needs no tensor cores.  Each thread multiplies
the numbers that it loads by its piece of x and adds them up in float32; then the program adds up its threads.
Programs are small, a few columns each, and there are thousands of them, so some begin while others end.
"""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from .activations import FUNCTIONS
from .check import Operand
from .launch import bind_kernel, cdiv, jit_kernel, num_programs, tl, triton

FINISHED = 1024  # elements that a program finishes after a split sum


class GemmInputs(NamedTuple):
    """The inputs of the op `gemm`: activation(alpha * x @ w + beta * c + bias) for a batch of matrices."""

    x: Annotated[Operand, "B, M, K"]
    w: Annotated[Operand, "B, K, N"]
    bias: Tensor | None  # (N,)
    c: Tensor | None  # (B, M, N)
    activation: str  # "" for none
    alpha: float
    beta: float
    dtype: torch.dtype | None  # of the result; None: that of x
    save_z: bool  # whether to return the input of the activation as well


# epilogue: kernel


@triton.jit
def finish(
    acc,  # float32: elements (m, n) of a matrix
    m,  # int64
    n, mask,
    offsets,  # of the elements in out and z
    bias_ptr,  # (N,) or None
    c_ptr,  # (M, N) or None
    z_ptr,  # or None
    out_ptr, alpha, beta, N, bias_stride, c_stride_m, c_stride_n, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The epilogue."""
    acc *= alpha
    if c_ptr is not None:
        c_ptrs = c_ptr + (m * c_stride_m + n.to(tl.int64) * c_stride_n)
        acc += beta * tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n.to(tl.int64) * bias_stride, mask=n < N, other=0.0).to(tl.float32)
    if z_ptr is not None:
        tl.store(z_ptr + offsets, acc.to(z_ptr.dtype.element_ty), mask=mask)
    if ACTIVATION is not None:
        acc = ACTIVATION(acc)[0]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit_kernel
def finish_kernel(
    partial_sums_ptr,  # (splits, B, M, N) float32
    bias_ptr,  # (N,) or None
    c_ptr,  # (B, M, N) or None
    z_ptr,  # (B, M, N), contiguous, as is out, or None
    out_ptr, splits,
    size,  # B * M * N
    M, N, alpha, beta, bias_stride,
    c_strides,  # b, m, n
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of splits, added up in order, and their epilogue."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    acc = tl.zeros((BLOCK,), tl.float32)
    size = tl.cast(size, tl.int64)
    for split in range(0, splits):
        acc += tl.load(partial_sums_ptr + split * size + i, mask=mask, other=0.0)
    row, n = i // N, i % N
    c_base = c_ptr if c_ptr is None else c_ptr + row // M * c_strides[0]
    finish(acc, row % M, n, mask, i, bias_ptr, c_base, z_ptr, out_ptr, alpha, beta,
           N, bias_stride, c_strides[1], c_strides[2], ACTIVATION)  # fmt: skip


# epilogue: launcher


def splits_of(tiles: int, K: int, block_k: int, units: int) -> tuple[int, int]:
    """Return how many programs share a sum, and each one's part of K: several if tiles leave units idle."""
    most = cdiv(K, 4 * block_k)  # or there is little to wait for
    wanted = max(min(units // max(tiles, 1), most), 1)
    part = cdiv(cdiv(K, wanted), block_k) * block_k
    return (cdiv(K, part), part) if wanted > 1 else (1, max(K, 1))


def in_triton(activation: str) -> Callable | None:
    return FUNCTIONS[activation][1] if activation else None


def epilogue_of(i: GemmInputs) -> tuple:
    """Return the last arguments of every kernel with `finish`: alpha, beta, the strides of bias and c."""
    c_strides = (0, 0, 0) if i.c is None else i.c.stride()
    return float(i.alpha), float(i.beta), 0 if i.bias is None else i.bias.stride(0), c_strides


def bind_split(i: GemmInputs, splits: int, kernel: Callable, numbers: tuple) -> Callable:
    """Return the launch of a product whose kernel writes the result, or partial sums (splits, B, M, N).

    A second launch adds up partial sums and computes the epilogue.
    """
    (B, M, _), N = i.x.shape, i.w.shape[2]
    constants = {"ACTIVATION": in_triton(i.activation), "BLOCK": FINISHED, "num_warps": 4}
    finish = bind_kernel(finish_kernel, (cdiv(B * M * N, FINISHED),), **constants)
    sums = splits, B * M * N, M, N, *epilogue_of(i)

    def launch(outs, i):
        out, z = outs
        z, partial_sums = z if i.save_z else None, None
        if splits > 1:
            partial_sums = i.x.new_empty(splits, B, M, N, dtype=torch.float32)
        kernel(i.x, i.w, i.bias, i.c, z, out, partial_sums, *numbers)
        if splits > 1:
            finish(partial_sums, i.bias, i.c, z, out, *sums)

    return launch


# one row


WIDEST = 8  # numbers that a thread loads at once
BUSY = 6  # programs of an SM that read as fast as it can
MOST = 2**16  # matrices, on the second axis of a grid
LONGEST = 2**31 - 2**16  # K, and a step behind it

# one row: kernel


@jit_kernel
def one_row_kernel(
    x_ptr,  # (B, K)
    w_ptr,  # (B, N, K)
    bias_ptr,  # (N,) or None
    c_ptr,  # (B, N) or None
    z_ptr,  # (B, N) contiguous, as is out, or None
    out_ptr, N,
    K,  # this and the strides of x and w in pieces of UNIT numbers
    end,  # K again, which the compiler does not know
    x_stride_b,
    w_strides,  # b, n
    alpha, beta, bias_stride,
    c_strides,  # b, n
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    K *= UNIT
    matrix = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = tl.minimum(n, N - 1).to(tl.int64)  # past the end: others' values, which are never stored
    x_ptrs = x_ptr + matrix * x_stride_b * UNIT + k
    w_ptrs = w_ptr + matrix * w_strides[0] * UNIT + (rows * w_strides[1] * UNIT)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, K, BLOCK_K):
        mask = k < K - first
        w = tl.load(w_ptrs + first, mask=mask[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptrs + first, mask=mask, other=0.0)
        if first < end:  # always: without the branch the assembler puts each load before its product
            acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    out = matrix * N
    c_base = c_ptr if c_ptr is None else c_ptr + matrix * c_strides[0]
    z_base = z_ptr if z_ptr is None else z_ptr + out
    finish(tl.sum(acc, 1), 0, n, n < N, n, bias_ptr, c_base, z_base, out_ptr + out, alpha, beta,
           N, bias_stride, 0, c_strides[1], ACTIVATION)  # fmt: skip


# one row: launcher


def takes_row(x: Tensor, w: Tensor, config: tuning.Config | None) -> bool:
    """Whether this multiplies x (B, M, K), of one row in each matrix, by w (B, K, N), which lies by rows and
    has enough of them, unless a tile of more rows is asked for."""
    (B, M, K), N = x.shape, w.shape[2]
    fit = M == 1 and x.stride(2) == 1 == w.stride(1) and K < LONGEST and B < MOST
    return fit and BUSY * num_programs(x) <= B * N and (config is None or config.block_m == 1)


def bind_one_row(i: GemmInputs, config: tuning.Config | None) -> Callable:
    """Bind what `takes_row` lets through, of x, w and results of at most 32 bits."""
    (B, _, K), N = i.x.shape, i.w.shape[2]
    config = config or tuning.lookup("gemm_row", i.x.dtype, 1, B * N, K, 1)
    alpha, beta, bias_stride, c_strides = epilogue_of(i)
    lengths = K, i.x.stride(0) if B > 1 else 0, i.w.stride(0) if B > 1 else 0, i.w.stride(2)
    unit = math.gcd(WIDEST, *lengths)
    K, x_stride, *w_strides = (n // unit for n in lengths)
    kernel = bind_kernel(
        one_row_kernel, (cdiv(N, config.block_n), B), ACTIVATION=in_triton(i.activation),
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, UNIT=unit, num_warps=config.num_warps,
    )  # fmt: skip
    sizes = N, K, K * unit, x_stride, tuple(w_strides)
    epilogue = alpha, beta, bias_stride, (c_strides[0], c_strides[2])

    def launch(outs, i):
        out, z = outs
        kernel(i.x, i.w, i.bias, i.c, z if i.save_z else None, out, *sizes, *epilogue)

    return launch
