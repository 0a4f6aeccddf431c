"""The precision of torch's own products of float32 on a GPU: what `switches.matmul` says."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..switches import switches


@contextlib.contextmanager
def matmul_precision(x: Tensor) -> Iterator[None]:
    """Inside the block torch multiplies as our kernels do, whatever it was told elsewhere."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision if x.is_cuda and x.dtype == torch.float32 else switches.matmul
    if before == switches.matmul:
        yield
        return
    backend.fp32_precision = switches.matmul
    try:
        yield
    finally:
        backend.fp32_precision = before
