"""Where a sparse matrix has its blocks, as the kernels read it: made once, and good for every set of values.

Rows and columns here are those of blocks, of which a matrix (N, K) has R = N / block down and C = K / block
across, rounded up; a matrix without structure has blocks of 1 x 1.  L of the blocks are there.
"""

import dataclasses
import math

import torch
from torch import Tensor

from ._check import check_sizes, check_tensor
from ._triton import cdiv


@dataclasses.dataclass(frozen=True, eq=False)
class SparsePattern:
    """The places of the blocks of a sparse (N, K) matrix, for any values (L, *blocksize) or, of blocks of
    1 x 1, (L,).

    Blocks are counted row by row, and from left to right in a row.  Make one with `from_mask` or `from_dense`
    and give it to `sparse_gemm` with values that change: nothing is computed from it again.
    """

    shape: tuple[int, int]  # N, K
    blocksize: tuple[int, int]
    lists: Tensor  # int32: see `make_lists`

    @classmethod
    def from_mask(
        cls, mask: Tensor, blocksize: int | tuple[int, int], shape: tuple[int, int] | None = None
    ) -> "SparsePattern":
        """The blocks where `mask` (R, C) is not zero, of a matrix of `shape`, which is that of whole blocks
        unless given: its last blocks may reach past its end.  Synchronises.

        Raises ValueError for a mask or a shape that do not fit, TypeError for what is no tensor or size.
        """
        check_tensor("mask", mask)
        block = pair(blocksize)
        if mask.dim() != 2:
            raise ValueError(f"mask must be (R, C), but it has shape {tuple(mask.shape)}")
        whole = tuple(n * b for n, b in zip(mask.shape, block, strict=True))
        shape = whole if shape is None else tuple(shape)
        if len(shape) != 2 or count(shape, block) != tuple(mask.shape):
            raise ValueError(f"mask is {tuple(mask.shape)} but shape is {shape} in blocks of {block}")
        row, col = mask.nonzero().unbind(1)
        return cls(shape, block, lists_of(row, col, *mask.shape))

    @classmethod
    def from_dense(cls, w: Tensor, blocksize: int | tuple[int, int]) -> "SparsePattern":
        """The blocks of `w` (N, K) in which there is anything but zeros.  Synchronises."""
        block = pair(blocksize)
        return cls.from_mask(as_blocks(w.detach(), block).ne(0).flatten(2).any(2), block, tuple(w.shape))

    @property
    def num_blocks(self) -> int:
        """L."""
        return num_blocks(self.lists, *count(self.shape, self.blocksize))

    def to(self, device: torch.device | str) -> "SparsePattern":
        """The same on another device."""
        return dataclasses.replace(self, lists=self.lists.to(device))

    def take(self, w: Tensor) -> Tensor:
        """The values that a dense `w` (N, K) has in these places: (L, *blocksize), or (L,).

        Differentiable.  Blocks that reach past the end of `w` have zeros there.
        """
        if tuple(w.shape) != self.shape:
            raise ValueError(f"w is {tuple(w.shape)} but the pattern is of {self.shape}")
        row, col = self.places()
        values = as_blocks(w, self.blocksize)[row, col]
        return values.flatten() if self.blocksize == (1, 1) else values

    def to_dense(self, values: Tensor) -> Tensor:
        """The matrix (N, K) that has `values` in these places and zeros elsewhere.  Differentiable."""
        return to_dense(values, self.lists, *self.shape)

    def places(self) -> tuple[Tensor, Tensor]:
        """The row and the column of each block, (L,) int64."""
        return places(self.lists, *count(self.shape, self.blocksize))


# sizes


def pair(blocksize: int | tuple[int, int]) -> tuple[int, int]:
    sides = tuple(blocksize) if isinstance(blocksize, (tuple, list)) else (blocksize, blocksize)
    if len(sides) != 2:
        raise ValueError(f"blocksize must be a number or two of them, not {blocksize}")
    check_sizes(**{"blocksize": sides[0]})
    check_sizes(**{"blocksize": sides[1]})
    return sides


def count(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """R and C."""
    return cdiv(shape[0], block[0]), cdiv(shape[1], block[1])


def block_of(values: Tensor) -> tuple[int, int]:
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


def lists_of_compressed(start: Tensor, col: Tensor, columns: int) -> Tensor:
    """The lists of a CSR or BSR tensor, or of the transpose of a CSC or BSC one."""
    rows = torch.arange(len(start) - 1, device=col.device)
    row = rows.repeat_interleave(start.diff(), output_size=len(col))
    return make_lists(start, row, col, columns)


def num_blocks(lists: Tensor, R: int, C: int) -> int:
    return (lists.shape[0] - R - C - 2) // 4


def places(lists: Tensor, R: int, C: int) -> tuple[Tensor, Tensor]:
    L = num_blocks(lists, R, C)
    col, row = lists[R + C + 2 :][: 2 * L].long().split(L) if L else lists.new_empty(2, 0, dtype=torch.long)
    return row, col


# matrices


def as_blocks(w: Tensor, block: tuple[int, int]) -> Tensor:
    """w (N, K) as (R, C, *block), with zeros past its end."""
    (R, C), (a, b) = count(tuple(w.shape), block), block
    missing = R * a - w.shape[0], C * b - w.shape[1]
    if any(missing):
        w = torch.nn.functional.pad(w, (0, missing[1], 0, missing[0]))
    return w.reshape(R, a, C, b).transpose(1, 2)


def to_dense(values: Tensor, lists: Tensor, rows: int, columns: int) -> Tensor:
    """Blocks of values as a matrix."""
    a, b = block_of(values)
    R, C = count((rows, columns), (a, b))
    w = values.new_zeros(R, a, C, b)
    w.transpose(1, 2)[places(lists, R, C)] = values.reshape(-1, a, b)
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
    """The same numbers in blocks of another size.  Synchronises."""
    (a, b), (N, K) = pattern.blocksize, pattern.shape
    R, C = count((N, K), block)
    row, col = pattern.places()
    device = row.device
    row = (row[:, None, None] * a + torch.arange(a, device=device)[:, None]).expand(-1, a, b).flatten()
    col = (col[:, None, None] * b + torch.arange(b, device=device)).expand(-1, a, b).flatten()
    blocks, number = torch.unique(row // block[0] * C + col // block[1], return_inverse=True)
    place = (number * block[0] + row % block[0]) * block[1] + col % block[1]
    lists = lists_of(blocks // C, blocks % C, R, C)
    return Regrouped(SparsePattern((N, K), block, lists), place)
