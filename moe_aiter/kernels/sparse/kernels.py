"""The kernels of `sparse_matmul` in gemm.py: products with a matrix of blocks, and of single entries.

Blocks: a program of the product makes a tile of the result and walks over the blocks that matter for its
columns; a program of the gradient makes a tile of one block.

Entries: tensor cores multiply by a matrix of nine zeros in ten faster than any code finds the tenth number,
so the launcher spreads the entries into a buffer as large as the dense matrix.  If the buffer costs more, for
few rows or a very large matrix, a program makes some columns of the result from the columns of x that their
entries name.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ..base.check import Operand, packed
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import in_units, multiply, no_larger, swizzle, tile_options, unit_of, whole_units
from .pattern import count, num_blocks


class SparseInputs(NamedTuple):
    """The inputs of the op `sparse_matmul`: x @ A.T + bias, or `transposed` x @ A + bias."""

    x: Annotated[Operand, "M, K"]
    values: Operand  # (L, a, b) blocks of A, or (L,) entries
    bias: Annotated[Operand, "N"] | None
    lists: Tensor  # where the values are: see pattern.py
    rows: int  # of A
    columns: int
    transposed: bool


class SparseGradInputs(NamedTuple):
    """The inputs of the op `sparse_matmul_grad`: the blocks (a, b) of left.T @ right that `lists` name."""

    left: Annotated[Operand, "M, N"]
    right: Annotated[Operand, "M, K"]
    lists: Tensor
    a: int
    b: int


# blocks: kernel


@jit_kernel
def sparse_blocks_kernel(
    x_ptr,  # (M, K)
    values_ptr,  # (L, BLOCK_IN, BLOCK_OUT)
    bias_ptr,  # (N,) or None
    out_ptr,  # (M, N)
    lists_ptr,
    starts,  # offset in the lists of the first block of each column of the result
    others,  # offset of the blocks' indices in x
    indices,  # offset of the indices in values, or None: values lie in the order of the lists
    M, N, K,
    x_strides,  # m, k
    values_strides,  # l, in, out
    bias_stride,
    out_strides,  # m, n
    BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, out_strides = in_units((N, K, out_strides), UNIT)
    x_strides, values_strides = in_units((x_strides, values_strides), UNIT)
    TILES_PER_BLOCK: tl.constexpr = (BLOCK_OUT + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (BLOCK_IN + BLOCK_K - 1) // BLOCK_K
    tiles_n = tl.cdiv(N, BLOCK_OUT) * TILES_PER_BLOCK
    tile_m, tile_n = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), tiles_n, GROUP_M, NUM_DIES)
    column, n = tile_n // TILES_PER_BLOCK, tile_n % TILES_PER_BLOCK * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = tl.load(lists_ptr + starts + column)
    end = tl.load(lists_ptr + starts + column + 1)

    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    n_read = n if EVEN_N else n % BLOCK_OUT
    x_ptrs = x_ptr + m_read[:, None] * x_strides[0] + k[None, :] * x_strides[1]
    w_ptrs = values_ptr + k[:, None] * values_strides[1] + n_read[None, :] * values_strides[2]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # a block is looked up a step before it is read: Triton would halve the stages between list and product
    other, index = find_block(lists_ptr, others, indices, first, end)
    for step in range(first * STEPS, end * STEPS):
        k_start = step % STEPS * BLOCK_K
        x_step = x_ptrs + (other.to(tl.int64) * BLOCK_IN + k_start) * x_strides[1]
        w_step = w_ptrs + index.to(tl.int64) * values_strides[0] + k_start * values_strides[1]
        if EVEN_K:
            x, w = tl.load(x_step), tl.load(w_step)
        else:
            k_mask = k < whole_units(tl.minimum(BLOCK_IN, K - other * BLOCK_IN) - k_start, UNIT)
            x = tl.load(x_step, mask=k_mask[None, :], other=0.0)
            w = tl.load(w_step, mask=k_mask[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        other, index = find_block(lists_ptr, others, indices, (step + 1) // STEPS, end)

    n_out = column * BLOCK_OUT + n
    n_mask = (n < BLOCK_OUT) & (n_out < N)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n_out.to(tl.int64) * bias_stride, mask=n_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_strides[0]
    out_ptrs += n_out.to(tl.int64)[None, :] * out_strides[1]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & n_mask[None, :])


@triton.jit
def find_block(lists_ptr, others, indices, j, end):
    """Block j of the list -> its index in x and its index in values; zeros past the end."""
    other = tl.load(lists_ptr + others + j, mask=j < end, other=0)
    index = j
    if indices is not None:
        index = tl.load(lists_ptr + indices + j, mask=j < end, other=0)
    return other, index


@jit_kernel
def sparse_blocks_grad_kernel(
    left_ptr,  # (M, N)
    right_ptr,  # (M, K)
    out_ptr,  # (L, BLOCK_ROWS, BLOCK_COLUMNS), contiguous
    lists_ptr,
    cols,  # where in the lists the column of each block is,
    rows,  # and its row
    M, N, K,
    left_strides,  # m, n
    right_strides,  # m, k
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, left_strides, right_strides = in_units((N, K, left_strides, right_strides), UNIT)
    DOWN: tl.constexpr = (BLOCK_ROWS + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (BLOCK_COLUMNS + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // (DOWN * ACROSS)
    part = tl.program_id(0) % (DOWN * ACROSS)
    row, col = tl.load(lists_ptr + rows + block), tl.load(lists_ptr + cols + block)
    n = part // ACROSS * BLOCK_M + tl.arange(0, BLOCK_M)
    k = part % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_K)
    n_left, k_right = row * BLOCK_ROWS + n, col * BLOCK_COLUMNS + k
    n_mask, k_mask = (n < BLOCK_ROWS) & (n_left < N), (k < BLOCK_COLUMNS) & (k_right < K)
    if not EVEN_N:  # what is past the end reads others' values, and becomes zeros
        n_left, k_right = n_left % N, k_right % K
    left_ptrs = left_ptr + n_left.to(tl.int64)[:, None] * left_strides[1]
    left_ptrs += m.to(tl.int64)[None, :] * left_strides[0]
    right_ptrs = right_ptr + k_right.to(tl.int64)[None, :] * right_strides[1]
    right_ptrs += m.to(tl.int64)[:, None] * right_strides[0]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = multiply(
        acc, left_ptrs, right_ptrs, M, left_strides[0], right_strides[0], BLOCK_K, EVEN_M, PRECISION
    )
    if not EVEN_N:
        acc = tl.where(n_mask[:, None] & k_mask[None, :], acc, 0.0)
    out_ptrs = out_ptr + block.to(tl.int64) * (BLOCK_ROWS * BLOCK_COLUMNS)
    out_ptrs += n[:, None] * BLOCK_COLUMNS + k[None, :]
    mask = (n < BLOCK_ROWS)[:, None] & (k < BLOCK_COLUMNS)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


# blocks: launcher


def bind_blocks(i: SparseInputs) -> Callable:
    block, size, transposed = tuple(i.values.shape[1:]), (i.rows, i.columns), i.transposed
    (M, K), N = i.x.shape, i.columns if transposed else i.rows
    R, C = count(size, block)
    L = num_blocks(i.lists, R, C)
    base = R + C + 2
    starts, others, positions = (R + 1, base + 2 * L, base + 3 * L) if transposed else (0, base, None)
    block, values = (block, i.values) if transposed else (block[::-1], i.values.mT)
    c = tuning.lookup("sparse_blocks", i.x.dtype, M, block[1], block[0], 1)
    c = no_larger(c, block_n=block[1], block_k=block[0])
    kernel = bind_kernel(
        sparse_blocks_kernel, (cdiv(M, c.block_m) * cdiv(N, block[1]) * cdiv(block[1], c.block_n),),
        BLOCK_IN=block[0], BLOCK_OUT=block[1],
        UNIT=unit_of((N, K, *block), i.x.stride(), values.stride()),
        EVEN_K=block[0] % c.block_k == 0 and K % block[0] == 0,
        EVEN_N=block[1] % c.block_n == 0, **tile_options(c),
    )  # fmt: skip
    strides = i.x.stride(), values.stride(), 0 if i.bias is None else i.bias.stride(0), (N, 1)
    numbers = starts, others, positions, M, N, K, *strides
    return lambda out, i: kernel(i.x, i.values, i.bias, out, i.lists, *numbers)


def bind_blocks_grad(i: SparseGradInputs) -> Callable:
    (M, N), K, block = i.left.shape, i.right.shape[1], (i.a, i.b)
    L = num_blocks(i.lists, *count((N, K), block))
    base = len(i.lists) - 4 * L
    c = tuning.lookup("sparse_blocks_grad", i.left.dtype, block[0], block[1], M, 1)
    c = no_larger(c, block_m=block[0], block_n=block[1])
    options = tile_options(c)
    del options["GROUP_M"], options["NUM_DIES"]
    whole = block[0] % c.block_m == 0 and block[1] % c.block_n == 0
    kernel = bind_kernel(
        sparse_blocks_grad_kernel, (L * cdiv(block[0], c.block_m) * cdiv(block[1], c.block_n),),
        BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1],
        UNIT=unit_of((N, K, *block), i.left.stride(), i.right.stride()),
        EVEN_N=whole and N % block[0] == 0 and K % block[1] == 0, EVEN_M=M % c.block_k == 0, **options,
    )  # fmt: skip
    numbers = base, base + L, M, N, K, i.left.stride(), i.right.stride()
    return lambda out, i: kernel(i.left, i.right, out, i.lists, *numbers)


# entries


BLOCK = 1024
BLOCK_N = 16  # columns of a program's tile of the result, the fewest that tensor cores take
PIECES = 2**19  # numbers that are read one by one where they are

# entries: kernel


@jit_kernel
def spread_entries_kernel(
    values_ptr,  # (L,)
    w_ptr,  # (N, K), contiguous
    lists_ptr,
    cols,  # where in the lists the column of each entry is,
    rows,  # and its row
    L, K, values_stride,
    BACK: tl.constexpr,  # from w to values
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    x_ptr,  # (M, K)
    values_ptr,  # (L,)
    bias_ptr,  # (N,) or None
    out_ptr,  # (M, N), contiguous
    lists_ptr,
    starts,  # offset in the lists of the first entry of each column of out
    others,  # offset of the entries' columns of x
    indices,  # offset of the indices in values, or None: values lie in the order of the lists
    M, N,
    x_strides,  # m, k
    values_stride, bias_stride,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """out[:, n] = the sum of values * x[:, other] over the entries of column n.

    Those of neighbouring columns are neighbours: a program walks over all that its columns have, however they
    share them, and a product with a matrix that has each value in the row of its column adds them up.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    start_ptrs = lists_ptr + starts
    first, end = tl.load(start_ptrs + tl.minimum(n, N)), tl.load(start_ptrs + tl.minimum(n + 1, N))
    begin = tl.load(start_ptrs + tile_n * BLOCK_N)
    stop = tl.load(start_ptrs + tl.minimum(tile_n * BLOCK_N + BLOCK_N, N))
    x_ptrs = x_ptr + m[None, :] * x_strides[0]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(begin, stop, GATHERED):
        j = start + tl.arange(0, GATHERED)
        there = j < stop
        other = tl.load(lists_ptr + others + j, mask=there, other=0).to(tl.int64)
        index = j
        if indices is not None:
            index = tl.load(lists_ptr + indices + j, mask=there, other=0)
        value = tl.load(values_ptr + index.to(tl.int64) * values_stride, mask=there, other=0.0)
        mask = there[:, None] & (m < M)[None, :]
        x = tl.load(x_ptrs + other[:, None] * x_strides[1], mask=mask, other=0.0)
        mine = (j[None, :] >= first[:, None]) & (j[None, :] < end[:, None])
        if x_ptr.dtype.element_ty == tl.float32:  # a product would add in one chain, less exactly
            terms = tl.where(mine[:, :, None], (value[:, None] * x)[None, :, :], 0.0)
            acc += tl.sum(terms, 1)
        else:
            acc = tl.dot(tl.where(mine, value[None, :], 0.0), x, acc)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n.to(tl.int64) * bias_stride, mask=n < N, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    out_ptrs = out_ptr + m[None, :] * N + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@jit_kernel
def gather_entries_grad_kernel(
    left_ptr,  # (M, N)
    right_ptr,  # (M, K)
    out_ptr,  # (L,), contiguous
    lists_ptr,
    cols,  # where in the lists the column of each entry is,
    rows,  # and its row
    L, M,
    left_strides,  # m, n
    right_strides,  # m, k
    BLOCK_M: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """out = the product of left[:, row] and right[:, col], summed."""
    j = tl.program_id(0) * GATHERED + tl.arange(0, GATHERED)
    row = tl.load(lists_ptr + rows + j, mask=j < L, other=0).to(tl.int64)
    col = tl.load(lists_ptr + cols + j, mask=j < L, other=0).to(tl.int64)
    left_ptrs = left_ptr + row[:, None] * left_strides[1]
    right_ptrs = right_ptr + col[:, None] * right_strides[1]
    acc = tl.zeros((GATHERED, BLOCK_M), tl.float32)
    for m_start in range(0, M, BLOCK_M):
        m = (m_start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (j < L)[:, None] & (m < M)[None, :]
        left = tl.load(left_ptrs + m[None, :] * left_strides[0], mask=mask, other=0.0)
        right = tl.load(right_ptrs + m[None, :] * right_strides[0], mask=mask, other=0.0)
        acc += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out_ptr + j, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=j < L)


# entries: launcher


def costs_less(M: int, numbers: int, entries: int, L: int, results: int = 0) -> bool:
    """Whether to gather: by the picoseconds that an H200 takes for both.

    Gathering reads L entries and M numbers for each, turns M times `numbers`, and writes `results`; the other
    way writes and reads `entries`, or multiplies by them, and writes L of them once more.
    """
    gathered = L * (30 + 0.5 * M) + 12 * M * numbers + results
    return gathered < entries * (1 + max(1.1, 0.0024 * M)) + 7 * L


def columns_of(x: Tensor, L: int) -> Tensor:
    """x (M, K) with each column in one piece, unless so few of its numbers are read that it does not pay."""
    return x if x.shape[0] == 1 or x.shape[0] * L < PIECES else x.T.contiguous().T


def gather_options(x: Tensor, N: int, L: int) -> dict[str, int]:
    """Return launch options: a program gathers as many entries at once as its columns have on average."""
    gathered = min(max(next_power_of_2(BLOCK_N * L // N), 64), 256)
    warps = gathered // 32
    if x.dtype == torch.float32:  # whose terms are in registers all at once
        gathered, warps = 64, 8
    block_m = 16 if x.shape[0] <= 16 else 32
    return {"BLOCK_N": BLOCK_N, "BLOCK_M": block_m, "GATHERED": gathered, "num_warps": warps}


def bind_entries(i: SparseInputs) -> Callable:
    (M, K), size, transposed = i.x.shape, (i.rows, i.columns), i.transposed
    N, (R, C), L = i.columns if transposed else i.rows, size, len(i.values)
    if not costs_less(M, K, R * C, L, results=M * N):
        spread = bind_spread(i.values, size, back=False)

        def multiply_whole(out, i):
            w = i.values.new_zeros(size)
            if L:
                spread(i.values, w, i.lists)
            w = w if transposed else w.T
            x, w = packed(i.x, w)
            torch.mm(x, w, out=out) if i.bias is None else torch.addmm(i.bias, x, w, out=out)

        return multiply_whole
    base = R + C + 2
    starts, others, positions = (R + 1, base + 2 * L, base + 3 * L) if transposed else (0, base, None)
    options = gather_options(i.x, N, L)
    grid = (cdiv(N, options["BLOCK_N"]) * cdiv(M, options["BLOCK_M"]),)
    kernel = bind_kernel(gather_entries_kernel, grid, **options)
    numbers, bias_stride = (starts, others, positions, M, N), 0 if i.bias is None else i.bias.stride(0)

    def launch(out, i):
        x = columns_of(i.x, L)
        strides = x.stride(), i.values.stride(0), bias_stride
        kernel(x, i.values, i.bias, out, i.lists, *numbers, *strides)

    return launch


def bind_entries_grad(i: SparseGradInputs) -> Callable:
    (M, R), C = i.left.shape, i.right.shape[1]
    L, base = num_blocks(i.lists, R, C), R + C + 2
    if not costs_less(M, R + C, R * C, L):
        collect = bind_spread(i.left.new_empty(L), (R, C), back=True)
        return lambda out, i: collect(out, i.left.T @ i.right, i.lists)
    block_m = min(next_power_of_2(max(M, 1)), 64)  # x may have no rows
    gathered = 2048 // max(block_m, 16)
    kernel = bind_kernel(
        gather_entries_grad_kernel, (cdiv(L, gathered),), BLOCK_M=block_m, GATHERED=gathered, num_warps=4
    )

    def launch(out, i):
        left, right = columns_of(i.left, L), columns_of(i.right, L)
        kernel(left, right, out, i.lists, base, base + L, L, M, left.stride(), right.stride())

    return launch


def bind_spread(values: Tensor, size: tuple[int, int], back: bool) -> Callable:
    """Return `spread(values, w, lists)`, which copies entries to their positions in w, or `back`."""
    L, base = len(values), sum(size) + 2
    kernel = bind_kernel(spread_entries_kernel, (cdiv(L, BLOCK),), BACK=back, BLOCK=BLOCK, num_warps=4)
    numbers = base, base + L, L, size[1], values.stride(0)
    return lambda values, w, lists: kernel(values, w, lists, *numbers)
