"""Products with a matrix of single entries: see sparse_matmul.py, whose launchers these are.

Tensor cores multiply by a matrix with nine zeros in ten faster than anything else finds the tenth number, so
the entries are put in their places among zeros, in a buffer as large as the dense matrix.  Where that costs
more, for few rows or a very large matrix, a program makes some columns of the transposed result from the rows
of the transposed x that its entries name.
"""

import torch
from torch import Tensor

from ._triton import cdiv, jit_kernel, tl
from .sparse_pattern import num_blocks

BLOCK = 1024
GATHERED, COLUMNS = 8, 256  # entries that a program reads at once, and columns of each

# kernel


@jit_kernel
def spread_entries_kernel(
    values_ptr,  # (L,)
    w_ptr,  # (N, K), contiguous
    lists_ptr,
    cols,  # where in the lists the column of each entry is,
    rows,  # and its row
    L,
    K,
    values_stride,
    BACK: tl.constexpr,  # from w to values
    BLOCK: tl.constexpr,
):
    """w[row, col] = values, or values = w[row, col]."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = j < L
    row = tl.load(lists_ptr + rows + j, mask=mask, other=0).to(tl.int64)
    col = tl.load(lists_ptr + cols + j, mask=mask, other=0)
    w_ptrs = w_ptr + row * K + col
    value_ptrs = values_ptr + j.to(tl.int64) * values_stride
    if BACK:
        tl.store(value_ptrs, tl.load(w_ptrs, mask=mask, other=0.0), mask=mask)
    else:
        tl.store(w_ptrs, tl.load(value_ptrs, mask=mask, other=0.0), mask=mask)


@jit_kernel
def gather_entries_kernel(
    x_ptr,  # (K, M), contiguous
    values_ptr,  # (L,)
    bias_ptr,  # (N,) or None
    out_ptr,  # (N, M), contiguous
    lists_ptr,
    starts,  # where in the lists those of the entries of each row of out begin,
    others,  # where the rows of x of these entries are,
    places,  # and those in values, or None: they are as they come
    M,
    N,
    values_stride,
    bias_stride,
    GATHERED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[n] = the sum of values * x[other] over the entries of row n."""
    n = tl.program_id(0) % N
    m = (tl.program_id(0) // N).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.load(lists_ptr + starts + n), tl.load(lists_ptr + starts + n + 1)
    acc = tl.zeros((GATHERED, COLUMNS), tl.float32)
    for start in range(first, end, GATHERED):
        j = start + tl.arange(0, GATHERED)
        other = tl.load(lists_ptr + others + j, mask=j < end, other=0).to(tl.int64)
        place = j
        if places is not None:
            place = tl.load(lists_ptr + places + j, mask=j < end, other=0)
        value = tl.load(values_ptr + place.to(tl.int64) * values_stride, mask=j < end, other=0.0)
        mask = (j < end)[:, None] & (m < M)[None, :]
        x = tl.load(x_ptr + other[:, None] * M + m[None, :], mask=mask, other=0.0)
        acc += value.to(tl.float32)[:, None] * x.to(tl.float32)
    out = tl.sum(acc, 0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n.to(tl.int64) * bias_stride).to(tl.float32)
    tl.store(out_ptr + n.to(tl.int64) * M + m, out.to(out_ptr.dtype.element_ty), mask=m < M)


@jit_kernel
def gather_entries_grad_kernel(
    left_ptr,  # (N, M), contiguous
    right_ptr,  # (K, M), contiguous
    out_ptr,  # (L,), contiguous
    lists_ptr,
    cols,  # where in the lists the column of each entry is,
    rows,  # and its row
    L,
    M,
    GATHERED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = the product of left[row] and right[col], summed."""
    j = tl.program_id(0) * GATHERED + tl.arange(0, GATHERED)
    row = tl.load(lists_ptr + rows + j, mask=j < L, other=0).to(tl.int64)
    col = tl.load(lists_ptr + cols + j, mask=j < L, other=0).to(tl.int64)
    acc = tl.zeros((GATHERED, COLUMNS), tl.float32)
    for m_start in range(0, M, COLUMNS):
        m = m_start + tl.arange(0, COLUMNS)
        mask = (j < L)[:, None] & (m < M)[None, :]
        left = tl.load(left_ptr + row[:, None] * M + m[None, :], mask=mask, other=0.0)
        right = tl.load(right_ptr + col[:, None] * M + m[None, :], mask=mask, other=0.0)
        acc += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out_ptr + j, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=j < L)


# launcher


def costs_less(M: int, numbers: int, places: int, L: int, results: int = 0) -> bool:
    """Whether to gather: by the picoseconds that an H200 takes for both.

    Gathering transposes M times `numbers`, starts programs for `results`, and has L entries times M; the
    other way writes and reads `places`, and multiplies by them.
    """
    gathered = 8 * M * numbers + 34 * results + 100 * L * cdiv(M, COLUMNS)
    return gathered < places * (1 + 0.0024 * M)


def launch_entries(
    out: Tensor, x: Tensor, values: Tensor, bias: Tensor | None, lists: Tensor, size: tuple[int, int],
    transposed: bool,
) -> None:  # fmt: skip
    (M, N), (R, C) = out.shape, size
    L, base = len(values), R + C + 2
    if not costs_less(M, R + C, R * C, L, results=M * N):
        w = spread_entries(values, lists, size)
        w = w if transposed else w.T
        torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
        return
    starts, others, places = (R + 1, base + 2 * L, base + 3 * L) if transposed else (0, base, None)
    columns = out.new_empty(N, M)
    gather_entries_kernel[(N * cdiv(M, COLUMNS),)](
        x.T.contiguous(), values, bias, columns, lists, starts, others, places, M, N,
        values.stride(0), 0 if bias is None else bias.stride(0),
        GATHERED=GATHERED, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    out.copy_(columns.T)


def launch_entries_grad(out: Tensor, left: Tensor, right: Tensor, lists: Tensor) -> None:
    (M, R), C, L = left.shape, right.shape[1], len(out)
    base = R + C + 2
    if not costs_less(M, R + C, R * C, L):
        spread_entries_kernel[(cdiv(L, BLOCK),)](
            out, left.T @ right, lists, base, base + L, L, C, 1, BACK=True, BLOCK=BLOCK, num_warps=4
        )
        return
    gather_entries_grad_kernel[(cdiv(L, GATHERED),)](
        left.T.contiguous(), right.T.contiguous(), out, lists, base, base + L, L, M,
        GATHERED=GATHERED, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


def spread_entries(values: Tensor, lists: Tensor, size: tuple[int, int]) -> Tensor:
    """The entries in their places among zeros."""
    L = num_blocks(lists, *size)
    w, base = values.new_zeros(size), sum(size) + 2
    if L:
        spread_entries_kernel[(cdiv(L, BLOCK),)](
            values, w, lists, base, base + L, L, size[1], values.stride(0),
            BACK=False, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return w
