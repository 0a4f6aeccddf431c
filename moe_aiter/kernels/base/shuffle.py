"""Weights in the order in which AMD's matrix instructions read them, and back: plain torch.

The last two axes (N, K) fall into blocks of `layout[0]` rows and 2 * `layout[1]` columns, and a block's rows
into vectors of 16 bytes.  Memory then holds, block after block, first vector of each row, second vector of
each row, and so on.  With v elements in a vector, element (n, k) of layout (16, 16) lies at

    n // 16 * 16 * K + k // v * 16 * v + n % 16 * v + k % v
"""

import torch
from einops import rearrange
from torch import Tensor

from .check import check_layout, check_tensor, checked

LAYOUT = (16, 16)


@checked
def shuffle_weight(x: Tensor, layout: tuple[int, int] = LAYOUT, use_int4: bool = False) -> Tensor:
    """A copy of `x` (..., N, K) of any dtype in the shuffled order, with the same shape.

    A vector has 16 bytes; with `use_int4`, 32 elements.  The order depends on the size of an element:
    quantise first.  Not its own inverse: see `unshuffle_weight`.  The copy has the attribute `is_shuffled`,
    which most operations of torch lose; keep that fact yourself.

    Raises ValueError unless N is a multiple of layout[0], and K and the vectors fit 2 * layout[1].
    """
    rows, columns, vector = check_shuffle(x, layout, use_int4)
    sizes = {"rows": rows, "vectors": columns // vector, "size": vector}
    blocks = "... (n rows) (k vectors size) -> ... n k vectors rows size"
    return tag(copied(rearrange(as_bytes(x), blocks, **sizes), x), True)


@checked
def unshuffle_weight(x: Tensor, layout: tuple[int, int] = LAYOUT, use_int4: bool = False) -> Tensor:
    """A copy of a shuffled `x` (..., N, K) in the usual order: the exact inverse of `shuffle_weight`."""
    rows, columns, vector = check_shuffle(x, layout, use_int4)
    sizes = {"n": x.shape[-2] // rows, "k": x.shape[-1] // columns}
    sizes |= {"rows": rows, "vectors": columns // vector, "size": vector}
    blocks = "... (n k vectors rows size) -> ... n rows k vectors size"
    return tag(copied(rearrange(as_bytes(x).flatten(-2), blocks, **sizes), x), False)


def check_shuffle(x: Tensor, layout: tuple[int, int] = LAYOUT, use_int4: bool = False) -> tuple[int, ...]:
    """Return rows and columns of a block, and elements of a vector.  Raises unless x has whole blocks."""
    check_tensor("x", x)
    check_layout(layout)
    rows, columns, vector = layout[0], 2 * layout[1], 32 if use_int4 else max(16 // x.itemsize, 1)
    if x.dim() < 2:
        raise ValueError(f"x must be (..., N, K), but it has shape {tuple(x.shape)}")
    N, K = x.shape[-2:]
    if N % rows or K % columns:
        raise ValueError(f"N={N} must be a multiple of {rows} and K={K} of {columns} for the layout {layout}")
    if columns % vector:
        raise ValueError(f"2 * layout[1] = {columns} must be a multiple of the {vector} elements of a vector")
    return rows, columns, vector


def as_bytes(x: Tensor) -> Tensor:
    """Torch copies bytes on every device, but not every 8-bit or 4-bit float."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def copied(blocks: Tensor, x: Tensor) -> Tensor:
    """The blocks one after another in new memory, in the shape and the dtype of `x`."""
    out = blocks.clone(memory_format=torch.contiguous_format).view(x.shape)
    return out if out.dtype == x.dtype else out.view(x.dtype)  # which has no gradient


def tag(x: Tensor, is_shuffled: bool) -> Tensor:
    x.is_shuffled = is_shuffled
    return x
