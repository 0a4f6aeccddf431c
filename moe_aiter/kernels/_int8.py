"""Products of 8 bits by torch; of int8 exact, by a CPU's instructions for them where these are right."""

import functools

import torch

from ._fp8 import MOST_K
from ._groups import wide


def product(x, w):
    """x @ w in float32: of int8 exact, and rounded once."""
    if x.dtype != torch.int8:
        return wide(x) @ wide(w)
    # torch's own is wrong where there is one number to sum
    if x.is_cpu and 1 < x.shape[1] <= MOST_K and has_exact_int8():
        w = in_rows(w.mT).mT if w.mT.is_contiguous() else in_rows(w)
        return torch._int_mm(in_rows(x), w).to(torch.float32)
    return (x.to(torch.float64) @ w.to(torch.float64)).to(torch.float32)


def in_rows(t):
    """Contiguous, even where there is but one row: torch's `_int_mm` misreads other strides."""
    return t.contiguous().view(-1).view(t.shape)


@functools.cache
def has_exact_int8() -> bool:
    """Whether this CPU multiplies int8 as it should: an old one saturates the sums of two products."""
    x = torch.tensor([[-128, 127], [127, 127]], dtype=torch.int8).repeat(32, 64)
    return torch.equal(torch._int_mm(x, x.T).double(), x.double() @ x.T.double())
