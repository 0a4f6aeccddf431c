"""The precision of torch's own products of float32 on a GPU: that of our kernels."""

import contextlib

import torch
from torch import Tensor

from ..switches import MATMUL, matmul


def matmul_precision(x: Tensor) -> contextlib.AbstractContextManager:
    """Inside the block torch multiplies as our kernels do, whatever it was told elsewhere."""
    on_gpu = x.is_cuda and x.dtype == torch.float32
    return MATMUL.set(matmul()) if on_gpu else contextlib.nullcontext()
