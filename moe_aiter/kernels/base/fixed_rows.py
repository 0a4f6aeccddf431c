"""Products and functions in torch that give a row the same bits in any batch: for `batch_invariant()`.

A BLAS sums in another order where a product has another number of rows.  So a product here is computed in
blocks of a fixed number of rows, the last one padded with zeros.  To the BLAS all blocks are one product.

Inside a block a row must have the same bits at every place.  oneDNN's products of float32 and 16 bits have
this property; MKL's lack it where the matrix is narrow.  So on a CPU oneDNN multiplies.  float64, and all
products of a torch without oneDNN, are computed one row at a time, which is slow.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...invariance import batch_invariant
from ...op import is_plain, is_transformed
from ...private_api import ONEDNN, fast_on_cpu, onednn_linear
from .check import apart, multiply_apart

ROWS = 16  # fewer are slow for many rows, more are slow for one
PIECE = 2**14  # numbers: torch computes more than twice as many on several threads
VECTORS = 64  # numbers: a multiple of those that a loop of torch's takes at a time


def multiply_by_blocks(out: Tensor, x: Tensor, w: Tensor, plus: Tensor | None) -> None:
    """`out = x @ w + plus` (M, N), all of one dtype; `plus` may be a row, or `out` itself."""
    x, w = apart(x, w)
    by_onednn = out.is_cpu and ONEDNN and out.dtype != torch.float64 and w.numel() > 0
    height = ROWS if by_onednn or not out.is_cpu else 1
    for first in range(0, len(x), height):
        rows = slice(first, min(first + height, len(x)))
        missing = first + height - rows.stop
        # a row alone is copied, so that it always lies in memory in the same way
        block = F.pad(x[rows], (0, 0, 0, missing)) if missing or height == 1 else x[rows]
        added = plus if plus is None or plus.dim() == 1 else plus[rows]
        if by_onednn and out.dtype == torch.float32:
            product = onednn_linear(block, w.mT, None, "none", [], "")[: height - missing]
            torch.add(product, added, out=out[rows]) if added is not None else out[rows].copy_(product)
        elif missing or height == 1:
            if added is not None and added.dim() == 2:
                added = F.pad(added, (0, 0, 0, missing))
            product = block @ w if added is None else torch.addmm(added, block, w)
            out[rows].copy_(product[: height - missing])
        elif added is None:
            torch.mm(block, w, out=out[rows])
        else:
            torch.addmm(added, block, w, out=out[rows])


def multiply_rows(x: Tensor, w: Tensor) -> Tensor:
    """Return `x @ w`, (..., M, K) and (..., K, N) of one dtype; with batch invariance, by blocks of rows."""
    if not batch_invariant() or is_transformed():
        return multiply_apart(x, w)
    dtype = x.dtype
    if x.is_cpu and not fast_on_cpu(dtype):
        x, w = x.to(torch.float32), w.to(torch.float32)
    batch = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    out = x.new_empty(*batch, x.shape[-2], w.shape[-1])
    x, w = (t.expand(*batch, *t.shape[-2:]).flatten(0, -3) if batch else t[None] for t in (x, w))
    for o, a, b in zip(out.view(-1, *out.shape[-2:]) if batch else out[None], x, w, strict=True):
        multiply_by_blocks(o, a, b, None)
    return out.to(dtype)


def each_number(fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `fn(*tensors)`, of tensors of one shape, where `fn` treats each number alike.

    torch's loops on a CPU compute the last numbers, which fill no vector, by other functions, of other bits.
    With batch invariance, all numbers are in vectors.
    """
    x = tensors[0]
    if torch.compiler.is_compiling() or not (x.is_cpu and batch_invariant() and x.numel()):
        return fn(*tensors)
    if not is_plain(tensors) or is_transformed():
        return fn(*tensors)
    flat = [F.pad(t.reshape(-1), (0, -t.numel() % VECTORS)).split(PIECE) for t in tensors]
    return torch.cat([fn(*pieces) for pieces in zip(*flat, strict=True)])[: x.numel()].view(x.shape)
