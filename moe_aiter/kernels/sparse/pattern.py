"""The pattern of a sparse matrix's blocks, as kernels read it; one pattern serves all values.

Rows and columns here are those of blocks, of which a matrix (N, K) has R = N / block down and C = K / block
across, rounded up; a matrix without structure has blocks of 1 x 1.  L of the blocks are there.
"""

import dataclasses
import math
import warnings

import torch
from einops import rearrange
from torch import Tensor

from ..base.check import check_device, check_shape, check_sizes, check_tensor, checked, is_kind
from ..base.launch import cdiv

COMPRESSED = torch.sparse_csr, torch.sparse_bsr


@dataclasses.dataclass(frozen=True, eq=False)
class SparsePattern:
    """The positions of the nonzero blocks of a sparse (N, K) matrix, without their values.

    The values of L blocks are (L, *blocksize), or (L,) for blocks of 1 x 1.  Blocks are counted row by row
    and from left to right, or in the order of the sparse tensor.  Make a pattern with `from_mask`,
    `from_dense` or `from_sparse`, and pass it to `sparse_gemm` with values that change: what depends on the
    pattern alone is computed once.
    """

    shape: tuple[int, int]  # N, K
    blocksize: tuple[int, int]
    lists: Tensor = dataclasses.field(repr=False)  # int32: see `make_lists`

    def __post_init__(self):
        for name, pair in (("shape", self.shape), ("blocksize", self.blocksize)):
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(is_kind(n, int) for n in pair):
                raise TypeError(f"{name} must be a tuple of two ints, not {pair!r}")
        check_tensor("lists", self.lists)
        if self.lists.dtype != torch.int32:
            raise TypeError(f"lists must be int32, not {self.lists.dtype}")

    @classmethod
    def from_mask(
        cls, mask: Tensor, blocksize: int | tuple[int, int], shape: tuple[int, int] | None = None
    ) -> "SparsePattern":
        """Return the pattern of the blocks where `mask` (R, C) is not zero.  Synchronises.

        `shape` is the shape of the matrix, by default that of R x C whole blocks; the last blocks may reach
        past its end.
        Raises ValueError for a mask or a shape that do not fit, TypeError for other types.
        """
        check_has_values("mask", mask, "R", "C")
        block = pair(blocksize)
        if shape is not None and not isinstance(shape, (tuple, list)):
            raise TypeError(f"shape must be two ints, not {type(shape).__name__}")
        whole = tuple(n * b for n, b in zip(mask.shape, block, strict=True))
        shape = whole if shape is None else tuple(shape)
        if len(shape) != 2 or count(shape, block) != tuple(mask.shape):
            raise ValueError(f"mask is {tuple(mask.shape)} but shape is {shape} and blocksize {block}")
        row, col = mask.nonzero().unbind(1)
        return cls(shape, block, lists_of(row, col, *mask.shape))

    @classmethod
    def from_dense(cls, w: Tensor, blocksize: int | tuple[int, int]) -> "SparsePattern":
        """Return the pattern of the blocks of `w` (N, K) that are not all zeros.  Synchronises."""
        check_has_values("w", w, "N", "K")
        block = pair(blocksize)
        return cls.from_mask(as_blocks(w.detach(), block).ne(0).flatten(2).any(2), block, tuple(w.shape))

    @classmethod
    def from_sparse(cls, w: Tensor) -> "SparsePattern":
        """Return the pattern of a CSR or BSR tensor (N, K), whose values are `w.values()`.  Synchronises.

        Raises ValueError for another layout or shape, and for two entries at one position.
        """
        check_tensor("w", w)
        if w.layout not in COMPRESSED or w.dense_dim():
            raise ValueError(f"w must be CSR or BSR, and not hybrid, but it is {w.layout} {tuple(w.shape)}")
        check_shape("w", w, "N", "K")
        return pattern_of_compressed(w.crow_indices(), w.col_indices(), tuple(w.shape), sides_of(w.values()))

    @property
    def num_blocks(self) -> int:
        """The number of blocks, L."""
        return num_blocks(self.lists, *count(self.shape, self.blocksize))

    @checked
    def to(self, device: torch.device | str) -> "SparsePattern":
        """Return the pattern on another device."""
        return dataclasses.replace(self, lists=self.lists.to(device))

    def take(self, w: Tensor) -> Tensor:
        """Return the values that a dense `w` (N, K) has in the blocks: (L, *blocksize), or (L,).

        Differentiable.  Blocks that reach past the end of `w` have zeros there.
        """
        check_tensor("w", w)
        if tuple(w.shape) != self.shape:
            raise ValueError(f"w is {tuple(w.shape)} but the pattern is of {self.shape}")
        row, col = self.indices()
        values = as_blocks(w, self.blocksize)[row, col]
        return values.flatten() if self.blocksize == (1, 1) else values

    def to_dense(self, values: Tensor) -> Tensor:
        """Return the matrix (N, K) with `values` in the blocks and zeros in between.  Differentiable."""
        check_tensor("values", values)
        block, L = self.blocksize, self.num_blocks
        if tuple(values.shape) not in ((L, *block), (L,) if block == (1, 1) else ()):
            raise ValueError(f"values are {tuple(values.shape)} but the pattern has {L} blocks of {block}")
        check_device(values=values, lists=self.lists)
        return to_dense(values, self.lists, *self.shape)

    def to_sparse(self, values: Tensor) -> Tensor:
        """Return the matrix as a BSR or CSR tensor that shares `values`.  Differentiable.

        A gradient with the same indices, for example from `sparse_gemm`, is used as it is; torch's own
        constructors make it dense, and synchronise.
        Raises ValueError unless all blocks are whole and have values.
        """
        check_tensor("values", values)
        block, L = self.blocksize, self.num_blocks
        if tuple(values.shape) != ((L,) if block == (1, 1) else (L, *block)):
            raise ValueError(f"values are {tuple(values.shape)} but the pattern has {L} blocks of {block}")
        if any(size % side for size, side in zip(self.shape, block, strict=True)):
            raise ValueError(f"the shape is {self.shape} but torch needs whole blocks of {block}")
        check_device(values=values, lists=self.lists)
        return AsSparse.apply(values, self)

    def indices(self) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each block, (L,) int64."""
        return block_indices(self.lists, *count(self.shape, self.blocksize))

    def places(self) -> tuple[Tensor, Tensor]:
        """Deprecated, until 0.3: `indices`."""
        warnings.warn("SparsePattern.places is now called indices", DeprecationWarning, stacklevel=2)
        return self.indices()


# sizes


def check_has_values(name: str, x: Tensor, *axes: str) -> None:
    """Raise unless `x` has these axes and values, which a meta tensor lacks."""
    check_shape(name, x, *axes)
    if x.is_meta:
        raise ValueError(f"{name} is on meta, which has no values to look for zeros")


def pair(blocksize: int | tuple[int, int]) -> tuple[int, int]:
    sides = tuple(blocksize) if isinstance(blocksize, (tuple, list)) else (blocksize, blocksize)
    if len(sides) != 2:
        raise ValueError(f"blocksize must be a number or two of them, not {blocksize}")
    for side in sides:
        check_sizes(blocksize=side)
    return sides


def count(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """R and C."""
    return cdiv(shape[0], block[0]), cdiv(shape[1], block[1])


def sides_of(values: Tensor) -> tuple[int, int]:
    """The blocksize of values (L, a, b), or (L,)."""
    return tuple(values.shape[1:]) if values.dim() == 3 else (1, 1)


# lists


def make_lists(start: Tensor, row: Tensor, col: Tensor, columns: int) -> Tensor:
    """All that the kernels read of a pattern, one after the other in one int32 tensor, without a wait:

    start (R + 1,)    block j of row r is one of start[r] <= j < start[r + 1]
    start_t (C + 1,)  the same of columns
    col, row (L,)     where block j is, row by row
    row_t (L,)        the rows of the blocks column by column
    place_t (L,)      and the j of each
    """
    place_t = col.argsort(stable=True)
    start_t = torch.searchsorted(col[place_t], torch.arange(columns + 1, device=col.device))
    return torch.cat([t.int() for t in (start, start_t, col, row, row[place_t], place_t)])


def lists_of(row: Tensor, col: Tensor, rows: int, columns: int) -> Tensor:
    """The lists of blocks that are sorted by row."""
    start = torch.searchsorted(row.contiguous(), torch.arange(rows + 1, device=row.device))
    return make_lists(start, row, col, columns)


def num_blocks(lists: Tensor, R: int, C: int) -> int:
    return (lists.shape[0] - R - C - 2) // 4


def block_indices(lists: Tensor, R: int, C: int) -> tuple[Tensor, Tensor]:
    L = num_blocks(lists, R, C)
    col, row = lists[R + C + 2 :][: 2 * L].long().split(L) if L else lists.new_empty(2, 0, dtype=torch.long)
    return row, col


def pattern_of_compressed(
    start: Tensor, col: Tensor, shape: tuple[int, int], block: tuple[int, int]
) -> SparsePattern:
    """Return the pattern of a CSR or BSR tensor, or of a transposed CSC or BSC tensor, in any order."""
    columns = count(shape, block)[1]
    rows = torch.arange(len(start) - 1, device=col.device)
    row = rows.repeat_interleave(start.diff(), output_size=len(col))
    pattern = SparsePattern(shape, block, make_lists(start, row, col, columns))
    if block == (1, 1):
        row, col = pattern.indices()
        if ((row * columns + col).sort().values.diff() == 0).any():
            raise ValueError("weight has two entries in one place, which only a COO tensor may have")
    return pattern


# matrices


class AsSparse(torch.autograd.Function):
    """See `SparsePattern.to_sparse`."""

    @staticmethod
    def forward(ctx, values, pattern):
        ctx.pattern, (R, C) = pattern, count(pattern.shape, pattern.blocksize)
        start, col = pattern.lists[: R + 1], pattern.lists[R + C + 2 :][: len(values)]
        ctx.layout, ctx.indices = COMPRESSED[values.dim() == 3], (start.data_ptr(), col.data_ptr())
        return torch.sparse_compressed_tensor(
            start, col, values, pattern.shape, layout=ctx.layout, check_invariants=False
        )

    @staticmethod
    def backward(ctx, dw):
        if dw.layout != ctx.layout:
            return ctx.pattern.take(dw.to_dense()), None
        same = (dw.crow_indices().data_ptr(), dw.col_indices().data_ptr()) == ctx.indices
        return dw.values() if same else ctx.pattern.take(dw.to_dense()), None


def as_blocks(w: Tensor, block: tuple[int, int]) -> Tensor:
    """w (N, K) as (R, C, *block), with zeros past its end."""
    (R, C), (a, b) = count(tuple(w.shape), block), block
    missing = R * a - w.shape[0], C * b - w.shape[1]
    if any(missing):
        w = torch.nn.functional.pad(w, (0, missing[1], 0, missing[0]))
    return rearrange(w, "(R a) (C b) -> R C a b", a=a, b=b)


def to_dense(values: Tensor, lists: Tensor, rows: int, columns: int) -> Tensor:
    """Blocks of values as a matrix."""
    a, b = sides_of(values)
    R, C = count((rows, columns), (a, b))
    w = values.new_zeros(R, a, C, b)
    w.transpose(1, 2)[block_indices(lists, R, C)] = values.reshape(-1, a, b)
    return w.view(R * a, C * b)[:rows, :columns]


@dataclasses.dataclass(frozen=True, eq=False)
class Regrouped:
    """A pattern, and where in its values each number of those of another pattern lies."""

    pattern: SparsePattern
    place: Tensor  # (numbers of the other,) int64

    def values(self, others: Tensor) -> Tensor:
        """The values of the pattern, with zeros where the other one has none.  Differentiable."""
        pattern = self.pattern
        size = pattern.num_blocks * math.prod(pattern.blocksize)
        values = others.new_zeros(size).scatter(0, self.place, others.flatten())
        return values if pattern.blocksize == (1, 1) else values.unflatten(0, (-1, *pattern.blocksize))


def regroup(pattern: SparsePattern, block: tuple[int, int]) -> Regrouped:
    """Return the pattern of the same matrix in blocks of another size.  Synchronises."""
    (a, b), (N, K) = pattern.blocksize, pattern.shape
    R, C = count((N, K), block)
    row, col = pattern.indices()
    device = row.device
    row = (row[:, None, None] * a + torch.arange(a, device=device)[:, None]).expand(-1, a, b).flatten()
    col = (col[:, None, None] * b + torch.arange(b, device=device)).expand(-1, a, b).flatten()
    blocks, number = torch.unique(row // block[0] * C + col // block[1], return_inverse=True)
    place = (number * block[0] + row % block[0]) * block[1] + col % block[1]
    lists = lists_of(blocks // C, blocks % C, R, C)
    return Regrouped(SparsePattern((N, K), block, lists), place)
