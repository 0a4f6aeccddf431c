"""AITER's names: replace `aiter` by `moe_aiter.compat.aiter` in an import.  The real one stays as it is."""

import torch.nn.functional as F
from torch import Tensor

from ...kernels.grouped_gemm import grouped_gemm
from ...kernels.sparse_gemm import sparse_gemm
from .ops.deepgemm import deepgemm
from .ops.shuffle import ShuffledWeight, shuffle_weight, unshuffle_weight

__all__ = [
    "ShuffledWeight",
    "deepgemm",
    "gelu",
    "grouped_gemm",
    "shuffle_weight",
    "sparse_gemm",
    "unshuffle_weight",
]


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """GELU by the error function, or by its approximation with "tanh"."""
    return F.gelu(input, approximate=approximate)
