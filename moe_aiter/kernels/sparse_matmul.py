"""Matmul with a sparse matrix A (N, K) of blocks: `x @ A.T + bias`, or `x @ A + bias` where it is transposed.

Values (L, a, b) are blocks of a x b, or (L,) single entries; `lists` say where they are: see
sparse_pattern.py.  M rows of x, and of the result.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ..op import define_op, takes
from ._check import check_device, check_float, check_shape, check_size
from ._groups import sum_dtype, wide
from ._tile import TILE_DTYPES
from .sparse_blocks import launch_blocks, launch_blocks_grad
from .sparse_entries import launch_entries, launch_entries_grad
from .sparse_pattern import as_blocks, block_of, count, num_blocks, places, to_dense

LARGE = 64  # sides of blocks that are worth a product of their own on a CPU
FEW = 1024  # places for each entry, from which on a CPU takes them one by one

# reference


def sparse_matmul_reference(x, values, bias, lists, rows, columns, transposed):
    w = to_dense(values, lists, rows, columns)
    out = x @ (w if transposed else w.T)
    return out if bias is None else (wide(out) + bias).to(x.dtype)


def sparse_matmul_grad_reference(left, right, lists, a, b):
    size = left.shape[1], right.shape[1]
    blocks = as_blocks(left.T @ right, (a, b))[places(lists, *count(size, (a, b)))]
    return blocks.flatten() if (a, b) == (1, 1) else blocks


def fill_sparse_matmul(out, x, values, bias, lists, rows, columns, transposed):
    """By torch; on a CPU by the blocks of each of the result's columns, where they are large, and by
    torch.sparse where entries are few."""
    (a, b), L = block_of(values), values.shape[0]
    whole = rows % a == 0 and columns % b == 0
    if x.device.type == "cpu" and whole and min(a, b) >= LARGE:
        fill_by_blocks(out, x, values, bias, lists, rows, columns, transposed)
    elif x.device.type == "cpu" and values.dim() == 1 and rows * columns > L * FEW:
        w = torch.sparse_coo_tensor(
            torch.stack(places(lists, rows, columns)),
            wide(values),
            (rows, columns),
            check_invariants=False,
            is_coalesced=True,
        )
        product = torch.sparse.mm(w.t() if transposed else w, wide(x).T).T
        out.copy_(product if bias is None else product + bias)
    else:
        out.copy_(sparse_matmul_reference(x, values, bias, lists, rows, columns, transposed))


def fill_by_blocks(out, x, values, bias, lists, rows, columns, transposed):
    R, C = count((rows, columns), block_of(values))
    L = num_blocks(lists, R, C)
    start, start_t, col, _, row_t, place_t = lists.long().split([R + 1, C + 1, L, L, L, L])
    if transposed:
        values, start, other = values[place_t], start_t, row_t
    else:
        values, other = values.mT, col
    _, depth, width = values.shape
    x_blocks = x.unflatten(1, (-1, depth))
    for n, (first, end) in enumerate(pairwise(start.tolist())):
        mine = slice(n * width, (n + 1) * width)
        x_part, w_part = x_blocks[:, other[first:end]].flatten(1), values[first:end].reshape(-1, width)
        out[:, mine] = x_part @ w_part if bias is None else torch.addmm(bias[mine], x_part, w_part)


def fill_sparse_matmul_grad(out, left, right, lists, a, b):
    """By torch; on a CPU block by block, where they are large, or entry by entry, where they are few."""
    (M, rows), columns, L = left.shape, right.shape[1], out.shape[0]
    whole = rows % a == 0 and columns % b == 0
    row, col = places(lists, *count((rows, columns), (a, b)))
    if left.device.type == "cpu" and whole and min(a, b) >= LARGE:
        left, right = left.T.unflatten(0, (-1, a)), right.unflatten(1, (-1, b))
        for j, (r, c) in enumerate(zip(row.tolist(), col.tolist(), strict=True)):
            out[j] = left[r] @ right[:, c]
    elif left.device.type == "cpu" and (a, b) == (1, 1) and rows * columns > L * FEW:
        left, right, step = wide(left).T, wide(right).T, max(1, 2**22 // max(M, 1))
        for j in (slice(start, start + step) for start in range(0, L, step)):
            out[j] = (left[row[j]] * right[col[j]]).sum(1)
    else:
        out.copy_(sparse_matmul_grad_reference(left, right, lists, a, b))


# launcher


@takes(*TILE_DTYPES)
def launch_sparse_matmul(out, x, values, bias, lists, rows, columns, transposed):
    launch = launch_entries if values.dim() == 1 else launch_blocks
    launch(out, x, values, bias, lists, (rows, columns), transposed)


@takes(*TILE_DTYPES)
def launch_sparse_matmul_grad(out, left, right, lists, a, b):
    launch = launch_entries_grad if (a, b) == (1, 1) else launch_blocks_grad
    launch(out, left, right, lists)


# op


def new_sparse_matmul(x, values, bias, lists, rows, columns, transposed):
    check_shape("x", x, "M", "K")
    if values.dim() not in (1, 3) or values.shape[1:] == (1, 1):
        raise ValueError(f"values must be (L,) or (L, a, b), but it has shape {tuple(values.shape)}")
    depth, width = (rows, columns) if transposed else (columns, rows)
    wanted = "the matrix is ({}, N)" if transposed else "the matrix is (N, {})"
    check_size("x is (M, K={})", x.shape[1], wanted, depth)
    check_float(x=x, values=values)
    check_device(x=x, values=values, lists=lists, bias=bias)
    if bias is not None:
        check_shape("bias", bias, "N")
        check_size("bias is ({},)", bias.shape[0], "the result is (M, {})", width)
        check_float(x=x, bias=bias)
    L = check_lists(lists, rows, columns, *block_of(values))
    check_size("there are {} blocks of values", values.shape[0], "the pattern has {}", L)
    return x.new_empty(x.shape[0], width)


def new_sparse_matmul_grad(left, right, lists, a, b):
    check_shape("left", left, "M", "N")
    check_shape("right", right, "M", "K")
    check_size("left is ({}, N)", left.shape[0], "right is ({}, K)", right.shape[0])
    check_float(left=left, right=right)
    check_device(left=left, right=right, lists=lists)
    L = check_lists(lists, left.shape[1], right.shape[1], a, b)
    return left.new_empty((L,) if (a, b) == (1, 1) else (L, a, b))


def check_lists(lists: Tensor, rows: int, columns: int, a: int, b: int) -> int:
    """The number of blocks, or raise unless `lists` are those of such a matrix."""
    if lists.dim() != 1 or lists.dtype != torch.int32 or not lists.is_contiguous():
        raise ValueError("lists must be one contiguous int32 tensor, as make_lists returns it")
    R, C = count((rows, columns), (a, b))
    L = num_blocks(lists, R, C)
    if L < 0 or lists.shape[0] != R + C + 2 + 4 * L:
        raise ValueError(f"lists have {lists.shape[0]} numbers, as none of {R} x {C} blocks")
    return L


def check_list_values(lists: Tensor, rows: int, columns: int, a: int, b: int) -> None:
    R, C = count((rows, columns), (a, b))
    L = num_blocks(lists, R, C)
    start, start_t, col, row, row_t, place_t = lists.split([R + 1, C + 1, L, L, L, L])
    limits = ("col", col, C), ("row", row, R), ("row_t", row_t, R), ("place_t", place_t, L)
    for name, t, limit in limits:
        if ((t < 0) | (t >= limit)).any():
            raise ValueError(f"the pattern's {name} must be from 0 to {limit - 1}")
    for name, t in (("start", start), ("start_t", start_t)):
        if t[0] != 0 or t[-1] != L or (t.diff() < 0).any():
            raise ValueError(f"the pattern's {name} must grow from 0 to {L}, the number of blocks")


def save_sparse_matmul(ctx, inputs, output):
    x, values, _, lists, *ctx.size, ctx.transposed = inputs
    ctx.save_for_backward(x, values, lists)


def backward_sparse_matmul(ctx, dout):
    x, values, lists = ctx.saved_tensors
    dx = dvalues = dbias = None
    if ctx.needs_input_grad[0]:
        dx = sparse_matmul_op(dout, values, None, lists, *ctx.size, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        sides = (x, dout) if ctx.transposed else (dout, x)
        dvalues = sparse_matmul_grad_op(*sides, lists, *block_of(values))
    if ctx.needs_input_grad[2]:
        dbias = dout.sum(0, dtype=sum_dtype(dout)).to(dout.dtype)
    return dx, dvalues, dbias, None, None, None, None


def save_sparse_matmul_grad(ctx, inputs, output):
    left, right, lists, *_ = inputs
    ctx.save_for_backward(left, right, lists)


def backward_sparse_matmul_grad(ctx, dvalues):
    left, right, lists = ctx.saved_tensors
    size, dleft, dright = (left.shape[1], right.shape[1]), None, None
    if ctx.needs_input_grad[0]:
        dleft = sparse_matmul_op(right, dvalues, None, lists, *size, False)
    if ctx.needs_input_grad[1]:
        dright = sparse_matmul_op(left, dvalues, None, lists, *size, True)
    return dleft, dright, None, None, None


sparse_matmul_op = define_op(
    "sparse_matmul(Tensor x, Tensor values, Tensor? bias, Tensor lists, int rows, int columns, "
    "bool transposed) -> Tensor",
    new=new_sparse_matmul,
    reference=sparse_matmul_reference,
    torch=fill_sparse_matmul,
    check_values=lambda x, values, bias, lists, rows, columns, _: check_list_values(
        lists, rows, columns, *block_of(values)
    ),
    triton=launch_sparse_matmul,
    backward=backward_sparse_matmul,
    save=save_sparse_matmul,
)
sparse_matmul_grad_op = define_op(
    "sparse_matmul_grad(Tensor left, Tensor right, Tensor lists, int a, int b) -> Tensor",
    new=new_sparse_matmul_grad,
    reference=sparse_matmul_grad_reference,
    torch=fill_sparse_matmul_grad,
    check_values=lambda left, right, lists, a, b: check_list_values(
        lists, left.shape[1], right.shape[1], a, b
    ),
    triton=launch_sparse_matmul_grad,
    backward=backward_sparse_matmul_grad,
    save=save_sparse_matmul_grad,
)
