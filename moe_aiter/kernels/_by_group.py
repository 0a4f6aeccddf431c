"""Grouped products by torch, a group after another, each into its place: what runs on a CPU.

With one dtype for all, that of the result too, torch's product reads operands as they are, sums in float32
and rounds once.  Where dtypes differ it has no such product, nor under torch.func's vmap: there all are
widened first.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..op import is_transformed
from ._groups import group_ends, sum_dtype, take_rows
from .group_sum import group_sum_reference


def multiply(out: Tensor, x: Tensor, y: Tensor, plus: Tensor | None) -> None:
    """`out = x @ y + plus`, which may be a row, or `out` itself; of one dtype."""
    if x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.stride(0) > x.shape[1]:
        # torch 2.13 reads past such rows on CPUs with AMX and multiplies by 0, which leaves NaN
        x = x.contiguous()
    torch.mm(x, y, out=out) if plus is None else torch.addmm(plus, x, y, out=out)


def multiply_wide(out: Tensor, x: Tensor, y: Tensor, plus: Tensor | None) -> None:
    """The same of several dtypes, or of what vmap makes of tensors."""
    x, y = widened(out, x, y)
    out.copy_(x @ y if plus is None else torch.addmm(plus.to(x.dtype), x, y))


def widened(out: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(sum_dtype(x), out.dtype)
    return x.to(wide), y.to(wide)


def chosen(out: Tensor, x: Tensor, plus: Tensor | None) -> Callable:
    same = {x.dtype, out.dtype if plus is None else plus.dtype} == {out.dtype}
    return multiply if same and not is_transformed() else multiply_wide


def fill_gmm(out, lhs, rhs, group_sizes, bias, dtype=None, tile=(), programs=0, zero_rest=True):
    product, ends = chosen(out, lhs, bias), group_ends(group_sizes, len(lhs))
    *outs, rest = out.tensor_split(ends)
    biases = [None] * len(ends) if bias is None else bias.unbind()
    for o, x, w, b in zip(outs, lhs.tensor_split(ends), rhs.unbind(), biases, strict=False):
        if len(x):
            product(o, x, w, b)
    if zero_rest:
        rest.zero_()


def fill_gmm_into(out, lhs, rhs, group_sizes, bias, tile, programs):
    fill_gmm(out, lhs, rhs, group_sizes, bias, zero_rest=False)


def fill_tgmm(out, x, y, group_sizes, order, top_k, columns_first, accumulate=False):
    x = take_rows(x, order, top_k)
    x, y = (y, x) if columns_first else (x, y)
    if x.dtype != out.dtype:  # all groups at once, whose float32 result is then written in place
        x, y = widened(out, x, y)
    product, ends = chosen(out, x, None), group_ends(group_sizes, len(x))
    for o, a, b in zip(out.unbind(), x.tensor_split(ends), y.tensor_split(ends), strict=False):
        if len(a):
            product(o, a.T, b, o if accumulate else None)
        elif not accumulate:
            o.zero_()


def fill_tgmm_sums(outs, x, y, group_sizes, columns_first):
    out, sums = outs
    fill_tgmm(out, x, y, group_sizes, None, 1, columns_first)
    sums.copy_(group_sum_reference(y, group_sizes, None, 1, None))


def fill_tgmm_into(
    out, x, y, group_sizes, order, top_k, accumulate, sums, sums_of_y, tile, programs
):  # fmt: skip
    fill_tgmm(out, x, y, group_sizes, order, top_k, False, accumulate)
    if sums is not None:
        summed = (y, group_sizes, None, 1) if sums_of_y else (x, group_sizes, order, top_k)
        sums.copy_(group_sum_reference(*summed, None))
