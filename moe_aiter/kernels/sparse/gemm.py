"""A dense input times a sparse weight A (N, K): `x @ A.T + bias`, or `x @ A + bias` if transposed.

`sparse_matmul` takes the matrix as values, blocks (L, a, b) or single entries (L,), and `lists` that say
where these are: see pattern.py.  x and the result have M rows.  `sparse_gemm` accepts torch's sparse layouts
and reads the pattern of each weight once.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ...derived import derived
from ...op import binds, define_op, gradients, takes
from ...private_api import coo_indices, coo_values, version_of
from ..base.check import (
    apart,
    cast_as_linear,
    check_device,
    check_fields,
    check_flags,
    check_shape,
    check_size,
    check_tensor,
    multiply_apart,
    renamed,
    sum_dtype,
    wide,
)
from ..base.tile import TILE_DTYPES
from .kernels import (
    SparseGradInputs,
    SparseInputs,
    bind_blocks,
    bind_blocks_grad,
    bind_entries,
    bind_entries_grad,
)
from .pattern import (
    SparsePattern,
    as_blocks,
    block_indices,
    count,
    lists_of,
    num_blocks,
    pair,
    pattern_of_compressed,
    regroup,
    sides_of,
    to_dense,
)

# sparse_matmul


LARGE = 64  # sides of blocks that are worth a product of their own on a CPU
FEW = 1024  # elements of the matrix for each entry, from which on a CPU takes entries one by one

# sparse_matmul: reference


def sparse_matmul_reference(i: SparseInputs) -> Tensor:
    w = to_dense(i.values, i.lists, i.rows, i.columns)
    out = multiply_apart(i.x, w if i.transposed else w.T)
    return out if i.bias is None else (wide(out) + i.bias).to(i.x.dtype)


def sparse_matmul_grad_reference(i: SparseGradInputs) -> Tensor:
    size, block = (i.left.shape[1], i.right.shape[1]), (i.a, i.b)
    blocks = as_blocks(i.left.T @ i.right, block)[block_indices(i.lists, *count(size, block))]
    return blocks.flatten() if block == (1, 1) else blocks


def fill_sparse_matmul(out: Tensor, i: SparseInputs) -> None:
    """Compute by torch; on a CPU by the blocks of each of the result's columns, if blocks are large, and by
    torch.sparse if entries are few."""
    (a, b), L, size, on_cpu = sides_of(i.values), i.values.shape[0], (i.rows, i.columns), i.x.is_cpu
    if on_cpu and i.rows % a == 0 == i.columns % b and min(a, b) >= LARGE:
        fill_by_blocks(out, i)
    elif on_cpu and i.values.dim() == 1 and i.rows * i.columns > L * FEW:
        entries = torch.stack(block_indices(i.lists, *size)), wide(i.values), size
        w = torch.sparse_coo_tensor(*entries, check_invariants=False, is_coalesced=True)
        product = torch.sparse.mm(w.t() if i.transposed else w, wide(i.x).T).T
        out.copy_(product if i.bias is None else product + i.bias)
    else:
        out.copy_(sparse_matmul_reference(i))


def fill_by_blocks(out: Tensor, i: SparseInputs) -> None:
    bias, (R, C) = i.bias, count((i.rows, i.columns), sides_of(i.values))
    L = num_blocks(i.lists, R, C)
    start, start_t, col, _, row_t, place_t = i.lists.long().split([R + 1, C + 1, L, L, L, L])
    if i.transposed:
        values, start, other = i.values[place_t], start_t, row_t
    else:
        values, other = i.values.mT, col
    _, depth, width = values.shape
    x_blocks = i.x.unflatten(1, (-1, depth))
    for n, (first, end) in enumerate(pairwise(start.tolist())):
        mine = slice(n * width, (n + 1) * width)
        parts = x_blocks[:, other[first:end]].flatten(1), values[first:end].reshape(-1, width)
        x_part, w_part = apart(*parts)
        out[:, mine] = x_part @ w_part if bias is None else torch.addmm(bias[mine], x_part, w_part)


def fill_sparse_matmul_grad(out: Tensor, i: SparseGradInputs) -> None:
    """Compute by torch; on a CPU block by block if blocks are large, or entry by entry if entries are few."""
    (M, rows), columns, L, (a, b) = i.left.shape, i.right.shape[1], out.shape[0], (i.a, i.b)
    row, col = block_indices(i.lists, *count((rows, columns), (a, b)))
    if i.left.is_cpu and rows % a == 0 == columns % b and min(a, b) >= LARGE:
        left, right = i.left.T.unflatten(0, (-1, a)), i.right.unflatten(1, (-1, b))
        for j, (r, c) in enumerate(zip(row.tolist(), col.tolist(), strict=True)):
            out[j] = left[r] @ right[:, c]
    elif i.left.is_cpu and (a, b) == (1, 1) and rows * columns > L * FEW:
        left, right, step = wide(i.left).T, wide(i.right).T, max(1, 2**22 // max(M, 1))
        for j in (slice(start, start + step) for start in range(0, L, step)):
            out[j] = (left[row[j]] * right[col[j]]).sum(1)
    else:
        out.copy_(sparse_matmul_grad_reference(i))


# sparse_matmul: launcher


@binds
@takes(*TILE_DTYPES)
def bind_sparse_matmul(i: SparseInputs) -> Callable:
    return bind_entries(i) if i.values.dim() == 1 else bind_blocks(i)


@binds
@takes(*TILE_DTYPES)
def bind_sparse_matmul_grad(i: SparseGradInputs) -> Callable:
    return bind_entries_grad(i) if (i.a, i.b) == (1, 1) else bind_blocks_grad(i)


# sparse_matmul: op


def new_sparse_matmul(i: SparseInputs) -> Tensor:
    check_fields(i)
    if i.values.dim() not in (1, 3) or i.values.shape[1:] == (1, 1):
        raise ValueError(f"values must be (L,) or (L, a, b), but it has shape {tuple(i.values.shape)}")
    depth, width = (i.rows, i.columns) if i.transposed else (i.columns, i.rows)
    wanted = "the matrix is ({}, N)" if i.transposed else "the matrix is (N, {})"
    check_size("x is (M, K={})", i.x.shape[1], wanted, depth)
    if i.bias is not None:
        check_size("bias is ({},)", i.bias.shape[0], "the result is (M, {})", width)
    L = check_lists(i.lists, i.rows, i.columns, *sides_of(i.values))
    check_size("there are {} blocks of values", i.values.shape[0], "the pattern has {}", L)
    return i.x.new_empty(i.x.shape[0], width)


def new_sparse_matmul_grad(i: SparseGradInputs) -> Tensor:
    size = check_fields(i)
    L = check_lists(i.lists, size["N"], size["K"], i.a, i.b)
    return i.left.new_empty((L,) if (i.a, i.b) == (1, 1) else (L, i.a, i.b))


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


def save_sparse_matmul(ctx, i: SparseInputs, output):
    ctx.size, ctx.transposed = (i.rows, i.columns), i.transposed
    ctx.save_for_backward(i.x, i.values, i.lists)


def backward_sparse_matmul(ctx, dout):
    x, values, lists = ctx.saved_tensors
    needs, dx, dvalues, dbias = SparseInputs(*ctx.needs_input_grad), None, None, None
    if needs.x:
        dx = sparse_matmul_op(dout, values, None, lists, *ctx.size, not ctx.transposed)
    if needs.values:
        sides = (x, dout) if ctx.transposed else (dout, x)
        dvalues = sparse_matmul_grad_op(*sides, lists, *sides_of(values))
    if needs.bias:
        dbias = dout.sum(0, dtype=sum_dtype(dout)).to(dout.dtype)
    return gradients(SparseInputs, x=dx, values=dvalues, bias=dbias)


def backward_sparse_matmul_grad(ctx, dvalues):
    left, right, lists = ctx.saved_tensors
    size, needs = (left.shape[1], right.shape[1]), SparseGradInputs(*ctx.needs_input_grad)
    dleft = sparse_matmul_op(right, dvalues, None, lists, *size, False) if needs.left else None
    dright = sparse_matmul_op(left, dvalues, None, lists, *size, True) if needs.right else None
    return gradients(SparseGradInputs, left=dleft, right=dright)


sparse_matmul_op = define_op(
    "sparse_matmul", SparseInputs, new=new_sparse_matmul, reference=sparse_matmul_reference,
    torch=fill_sparse_matmul,
    check_values=lambda i: check_list_values(i.lists, i.rows, i.columns, *sides_of(i.values)),
    triton=bind_sparse_matmul, backward=backward_sparse_matmul, save=save_sparse_matmul,
)  # fmt: skip
sparse_matmul_grad_op = define_op(
    "sparse_matmul_grad", SparseGradInputs, new=new_sparse_matmul_grad,
    reference=sparse_matmul_grad_reference, torch=fill_sparse_matmul_grad,
    check_values=lambda i: check_list_values(i.lists, i.left.shape[1], i.right.shape[1], i.a, i.b),
    triton=bind_sparse_matmul_grad, backward=backward_sparse_matmul_grad,
    save=lambda ctx, i, output: ctx.save_for_backward(i.left, i.right, i.lists),
)  # fmt: skip


# sparse_gemm: public

PATTERNS = "csr", "coo", "block"
COLUMNS = torch.sparse_csc, torch.sparse_bsc
BLOCKS = torch.sparse_bsr, torch.sparse_bsc
BLOCKSIZE = 64  # of a weight without blocks


@renamed(x="input", values="weight")
def sparse_gemm(
    input: Tensor, weight: Tensor, sparsity_pattern: str | SparsePattern | None = None, *,
    bias: Tensor | None = None, transpose_weight: bool = True, blocksize: int | tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Multiply a dense `input` (..., K) by a sparse `weight` (N, K), as F.linear does; returns (..., N).

    weight: CSR, CSC, COO, BSR, BSC or dense; (K, N) with transpose_weight=False.  Entries of a COO weight may
        repeat a position.  The indices of other layouts must satisfy torch's `check_invariants`, but may be
        in any order.
    sparsity_pattern: how to multiply: "csr" or "coo" entry by entry, "block" by blocks on tensor cores; by
        default as the layout of `weight` says.  A weight of another layout is converted, and the zeros of a
        dense one are removed.  Or a `SparsePattern`; then `weight` holds its values (L, *blocksize).
    bias: (N,), added before the one rounding.
    blocksize: block size, a number or (rows, columns), for a weight that is converted to blocks [64].

    `input`, `weight` and `bias` share a floating dtype and all have gradients; sums are float32 (float64 for
    float64).  The gradient of a sparse weight has its layout and positions, for COO coalesced.  That of a
    dense weight is dense, and zero where the weight has no entry or block.  In torch, `backward()` cannot
    write BSR, BSC or CSC gradients to `.grad`; `torch.autograd.grad` returns them.

    What depends on the pattern alone is cached (see `moe_aiter.derived`): the first call synchronises, later
    calls do not, until the memory of the weight's indices, or of a dense weight, changes.  For torch, a write
    to a sparse weight's values also changes its indices.  So for training, pass a SparsePattern, or the
    weight that its `to_sparse` builds in each step.  If you write to index tensors from which a weight was
    made, and make another weight of them, call `moe_aiter.derived.forget()`.

    Raises ValueError for shapes, devices and patterns that do not fit, TypeError for dtypes and flags.
    """
    check_tensor("input", input)
    check_tensor("weight", weight)
    if input.layout != torch.strided or input.dim() == 0:
        raise ValueError(f"input must be dense (..., K), but it is {input.layout} {tuple(input.shape)}")
    check_device(input=input, weight=weight)
    check_flags(transpose_weight=transpose_weight)
    transposed = not transpose_weight
    if isinstance(sparsity_pattern, SparsePattern):
        if blocksize is not None:
            raise ValueError("blocksize is part of the sparsity_pattern that is given")
        values, pattern = weight, sparsity_pattern
        if tuple(values.shape[1:]) != (() if pattern.blocksize == (1, 1) else pattern.blocksize):
            shapes = tuple(values.shape), pattern.blocksize
            raise ValueError("weight is {} but the pattern has blocks of {}".format(*shapes))
    else:
        kind = check_kind(weight, sparsity_pattern, blocksize)
        if weight.layout == torch.strided:
            values, pattern = of_dense(weight, kind, blocksize)
        else:
            values, pattern = of_sparse(weight, kind, blocksize)
            transposed ^= weight.layout in COLUMNS
    input, values, bias = cast_as_linear(input, values, bias)
    K = pattern.shape[0 if transposed else 1]
    if input.shape[-1] != K:
        wanted = f"(N, K={K})" if transpose_weight else f"(K={K}, N)"
        raise ValueError(f"input is (..., K={input.shape[-1]}) but weight is {wanted}")
    x = input if input.dim() == 2 else input[None] if input.dim() == 1 else input.flatten(0, -2)
    out = sparse_matmul_op(x, values, bias, pattern.lists, *pattern.shape, transposed)
    return out if input.dim() == 2 else out.view(*input.shape[:-1], out.shape[1])


def check_kind(weight: Tensor, kind: str | None, blocksize: int | tuple[int, int] | None) -> str:
    """Return the kind of product.  Raises if weight, pattern and blocksize do not fit together."""
    if kind is None:
        if weight.layout == torch.strided:
            raise ValueError(f"sparsity_pattern must be {', '.join(PATTERNS)} for a dense weight")
        kind = "block" if weight.layout in BLOCKS else "coo" if weight.layout == torch.sparse_coo else "csr"
    if kind not in PATTERNS:
        kinds = ", ".join(PATTERNS)
        raise ValueError(f"unknown sparsity_pattern {kind!r}; known: {kinds}, or a SparsePattern")
    if kind != "block" and blocksize is not None:
        raise ValueError(f"blocksize is for sparsity_pattern='block', not {kind!r}")
    if weight.layout != torch.strided and weight.dense_dim():
        raise ValueError(f"weight must not be hybrid, but it has {weight.dense_dim()} dense dimensions")
    check_shape("weight", weight, "N", "K")
    return kind


def of_dense(w: Tensor, kind: str, blocksize: int | tuple[int, int] | None) -> tuple[Tensor, SparsePattern]:
    """The values of a dense weight, and where they are."""
    block = chosen_block(kind, blocksize)
    pattern = derived(w, f"sparse pattern {block}", lambda: SparsePattern.from_dense(w, block))
    if torch.is_grad_enabled() and w.requires_grad:
        return pattern.take(w), pattern
    return derived(w, f"sparse values {block}", lambda: pattern.take(w)), pattern


def of_sparse(w: Tensor, kind: str, blocksize: int | tuple[int, int] | None) -> tuple[Tensor, SparsePattern]:
    """The values of a sparse weight, and where they are; those of the transpose if it has columns first."""
    values, indices, name, make = of_coo(w) if w.layout == torch.sparse_coo else of_compressed(w)
    own = sides_of(values)
    if kind == "block" and blocksize is None and w.layout in BLOCKS:
        block = own
    else:
        block = chosen_block(kind, blocksize)
        block = block[::-1] if w.layout in COLUMNS else block
    pattern = derived(indices, name, make)[0]
    if block == own:
        return values.flatten() if own == (1, 1) else values, pattern
    other = derived(indices, f"{name} in {block}", lambda: (regroup(pattern, block),))[0]
    return other.values(values), other.pattern


def chosen_block(kind: str, blocksize: int | tuple[int, int] | None) -> tuple[int, int]:
    return pair(BLOCKSIZE if blocksize is None else blocksize) if kind == "block" else (1, 1)


# what a sparse tensor consists of: its values, the indices by which its pattern is kept, the name of the
# latter, and what makes it, in a tuple with all else that the name speaks of and that must not change


def of_compressed(w: Tensor) -> tuple[Tensor, Tensor, str, Callable[[], tuple]]:
    values, shape = w.values(), w.shape
    if w.layout in COLUMNS:
        start, other, shape = w.ccol_indices(), w.row_indices(), shape[::-1]
        values = values.mT if values.dim() == 3 else values
    else:
        start, other = w.crow_indices(), w.col_indices()
    block = sides_of(values)

    def make() -> tuple[SparsePattern, Tensor | None]:
        # the start lives as long as this is kept, so that no other has its address
        apart = start.untyped_storage() is not other.untyped_storage()
        return pattern_of_compressed(start, other, tuple(shape), block), start if apart else None

    return values, other, f"sparse pattern {*shape, *block, start.data_ptr(), version_of(start)}", make


def of_coo(w: Tensor) -> tuple[Tensor, Tensor, str, Callable[[], tuple]]:
    shape, indices = tuple(w.shape), coo_indices(w)
    if w.is_coalesced():
        return w.values(), indices, f"sparse pattern {shape}", lambda: (pattern_of(indices, shape),)
    name = f"sparse pattern {shape}, coalesced"
    order, ends, unique, pattern = derived(indices, name, lambda: coalesce(indices, shape))
    return Coalesced.apply(w, order, ends, unique), indices, f"{name} alone", lambda: (pattern,)


def pattern_of(indices: Tensor, shape: tuple[int, int]) -> SparsePattern:
    """Return the pattern of the entries at `indices` (2, L), which are in order."""
    return SparsePattern(shape, (1, 1), lists_of(*indices, *shape))


def coalesce(indices: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, SparsePattern]:
    """The order that brings entries of equal indices together, where each run of them begins, (L + 1,), the
    unique indices (2, L), and their pattern.  Synchronises."""
    place, order = (indices[0] * shape[1] + indices[1]).sort(stable=True)
    place, counts = place.unique_consecutive(return_counts=True)
    unique = torch.stack([place // max(shape[1], 1), place % max(shape[1], 1)])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return order, starts, unique, pattern_of(unique, shape)


class Coalesced(torch.autograd.Function):
    """The values of a COO tensor, those of one place added; its gradient has each place once."""

    @staticmethod
    def forward(ctx, w, order, starts, unique):
        ctx.save_for_backward(unique)
        ctx.shape = w.shape
        values = wide(coo_values(w)[order])
        return torch.segment_reduce(values, "sum", offsets=starts, unsafe=True, initial=0).to(w.dtype)

    @staticmethod
    def backward(ctx, dvalues):
        (unique,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(unique, dvalues, ctx.shape, is_coalesced=True), None, None, None
