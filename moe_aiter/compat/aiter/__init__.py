"""AITER's names: replace `aiter` by `moe_aiter.compat.aiter` in an import.  The real one stays as it is."""

import torch.nn.functional as F
from torch import Tensor

from ...kernels.grouped_gemm import grouped_gemm

__all__ = ["gelu", "grouped_gemm"]


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """GELU by the error function, or by its approximation with "tanh"."""
    return F.gelu(input, approximate=approximate)
