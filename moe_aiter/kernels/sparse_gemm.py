"""A dense input times a sparse weight: torch's layouts for `sparse_matmul`, whose patterns are read once."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..derived import derived
from ._check import check_device, check_flags, check_shape, check_tensor, renamed
from ._groups import wide
from .sparse_matmul import sparse_matmul_op
from .sparse_pattern import (
    SparsePattern,
    block_of,
    lists_of,
    pair,
    pattern_of_compressed,
    regroup,
)

PATTERNS = "csr", "coo", "block"
COLUMNS = torch.sparse_csc, torch.sparse_bsc
BLOCKS = torch.sparse_bsr, torch.sparse_bsc
BLOCKSIZE = 64  # of a weight without blocks


@renamed(x="input", values="weight")
def sparse_gemm(
    input: Tensor,
    weight: Tensor,
    sparsity_pattern: str | SparsePattern | None = None,
    *,
    bias: Tensor | None = None,
    transpose_weight: bool = True,
    blocksize: int | tuple[int, int] | None = None,
) -> Tensor:
    """Multiply a dense `input` (..., K) by a sparse `weight` (N, K), as F.linear does; returns (..., N).

    weight: of any of torch's sparse layouts, CSR, CSC, COO, BSR or BSC, or dense; without `transpose_weight`
        it is (K, N).  A COO weight may name a place several times.  The indices of other layouts are taken
        to be what torch's `check_invariants` asks for, but in any order.
    sparsity_pattern: how it is multiplied: "csr" or "coo" entry by entry, "block" by blocks on tensor cores.
        Unless given, as its layout says.  A weight of another layout is converted, a dense one loses its
        zeros.  Or a SparsePattern, with its values (L, *blocksize) for the weight.
    bias: (N,), added before the one rounding.
    blocksize: of a weight that is converted to blocks, a number or one down and one across, 64 unless given.

    `input`, `weight` and `bias` share a floating dtype; sums are kept in float32 (float64 for float64).  All
    three have gradients.  That of a sparse weight is sparse, in its own layout and places; of a COO weight
    with repeated places coalesced; that of a dense one is dense, and zero where it has no entry or block.
    `backward()` cannot put what is BSR, BSC or CSC into `.grad`, in torch; `torch.autograd.grad` returns it.

    What is computed of a pattern is kept (see `moe_aiter.derived`), and the calls after the first wait for
    nothing, while the memory of the weight's indices, or of a dense weight, stays as it is.  To torch a write
    to a sparse weight's values is one to its indices as well: for training give a SparsePattern, or the
    weight that its `to_sparse` builds in each step.  Who writes to indices from which a weight was made, and
    makes another of them, says `moe_aiter.derived.forget()`.

    Raises ValueError for shapes, devices and patterns that do not fit, TypeError for dtypes and flags.
    """
    check_operands(input, weight)
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
    K = pattern.shape[0 if transposed else 1]
    if input.shape[-1] != K:
        wanted = f"(N, K={K})" if transpose_weight else f"(K={K}, N)"
        raise ValueError(f"input is (..., K={input.shape[-1]}) but weight is {wanted}")
    x = input if input.dim() == 2 else input[None] if input.dim() == 1 else input.flatten(0, -2)
    out = sparse_matmul_op(x, values, bias, pattern.lists, *pattern.shape, transposed)
    return out if input.dim() == 2 else out.view(*input.shape[:-1], out.shape[1])


def check_operands(input: Tensor, weight: Tensor) -> None:
    check_tensor("input", input)
    check_tensor("weight", weight)
    if input.layout != torch.strided or input.dim() == 0:
        raise ValueError(f"input must be dense (..., K), but it is {input.layout} {tuple(input.shape)}")
    check_device(input=input, weight=weight)


def check_kind(weight: Tensor, kind: str | None, blocksize: int | tuple[int, int] | None) -> str:
    """How to multiply; raises where weight, pattern and blocksize do not go together."""
    if kind is None:
        if weight.layout == torch.strided:
            raise ValueError(f"sparsity_pattern must be {', '.join(PATTERNS)} for a dense weight")
        kind = "block" if weight.layout in BLOCKS else "coo" if weight.layout == torch.sparse_coo else "csr"
    if kind not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise ValueError(f"unknown sparsity_pattern {kind!r}; known: {known}, or a SparsePattern")
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
    own = block_of(values)
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
    block = block_of(values)

    def make() -> tuple[SparsePattern, Tensor | None]:
        # the start lives as long as this is kept, so that no other has its address
        apart = start.untyped_storage() is not other.untyped_storage()
        return pattern_of_compressed(start, other, tuple(shape), block), start if apart else None

    return values, other, f"sparse pattern {*shape, *block, start.data_ptr(), start._version}", make


def of_coo(w: Tensor) -> tuple[Tensor, Tensor, str, Callable[[], tuple]]:
    shape, indices = tuple(w.shape), w._indices()
    if w.is_coalesced():
        return w.values(), indices, f"sparse pattern {shape}", lambda: (pattern_of(indices, shape),)
    name = f"sparse pattern {shape}, coalesced"
    order, ends, places, pattern = derived(indices, name, lambda: coalesce(indices, shape))
    return Coalesced.apply(w, order, ends, places), indices, f"{name} alone", lambda: (pattern,)


def pattern_of(indices: Tensor, shape: tuple[int, int]) -> SparsePattern:
    """Of the entries at `indices` (2, L), which are in order."""
    return SparsePattern(shape, (1, 1), lists_of(*indices, *shape))


def coalesce(indices: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, SparsePattern]:
    """The order that brings the entries of a place together, where each place begins, (L + 1,), the places
    (2, L), and their pattern.  Synchronises."""
    place, order = (indices[0] * shape[1] + indices[1]).sort(stable=True)
    place, counts = place.unique_consecutive(return_counts=True)
    places = torch.stack([place // max(shape[1], 1), place % max(shape[1], 1)])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return order, starts, places, pattern_of(places, shape)


class Coalesced(torch.autograd.Function):
    """The values of a COO tensor, those of one place added; its gradient has each place once."""

    @staticmethod
    def forward(ctx, w, order, starts, places):
        ctx.save_for_backward(places)
        ctx.shape = w.shape
        values = wide(w._values()[order])
        return torch.segment_reduce(values, "sum", offsets=starts, unsafe=True, initial=0).to(w.dtype)

    @staticmethod
    def backward(ctx, dvalues):
        (places,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(places, dvalues, ctx.shape, is_coalesced=True), None, None, None
