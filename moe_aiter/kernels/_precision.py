"""The precision of torch's own products of float32 on a GPU: what `Settings.matmul_precision` says."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import settings


@contextlib.contextmanager
def matmul_precision(x: Tensor) -> Iterator[None]:
    """Inside the block torch multiplies as our kernels do, whatever it was told elsewhere."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision if x.is_cuda and x.dtype == torch.float32 else settings.matmul_precision
    if before == settings.matmul_precision:
        yield
        return
    backend.fp32_precision = settings.matmul_precision
    try:
        yield
    finally:
        backend.fp32_precision = before
