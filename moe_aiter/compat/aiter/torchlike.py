"""AITER's names for what torch has as well, computed as AITER's configuration says."""

import torch.nn.functional as F
from torch import Tensor

from ...kernels.base.check import check_float, check_tensor
from ...layers.attention import attention as _attention
from ...layers.convolution import conv2d as _conv2d
from ...switches import computed

__all__ = ["attention", "conv2d", "dynamic_conv2d", "gelu"]

attention = computed(_attention)
conv2d = computed(_conv2d)
# every shape is welcome to both; what `enable_dynamic_shapes` decides, it decides for both
dynamic_conv2d = conv2d


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """GELU by the error function, or by its approximation with "tanh"."""
    check_tensor("input", input)
    check_float(input=input)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return F.gelu(input, approximate=approximate)
