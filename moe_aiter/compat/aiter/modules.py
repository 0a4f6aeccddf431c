"""Functions and modules that torch has too, under AITER's names and with AITER's configuration."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ...kernels.base.check import (
    check_float,
    check_parameter_dtype,
    check_probability,
    check_sizes,
    check_tensor,
    checked,
)
from ...layers.attention import attention as _attention
from ...layers.convolution import check_steps
from ...layers.convolution import conv2d as _conv2d
from ...switches import computed
from .gemm import linear

__all__ = ["AITERAttention", "AITERConv2d", "AITERLinear", "attention", "conv2d", "dynamic_conv2d", "gelu"]

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


def fill_as_aiter(module: nn.Module) -> None:
    """Initialise as AITER's guide does, without a scale for the weight."""
    nn.init.normal_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


class AITERConv2d(nn.Conv2d):
    """`conv2d` with a weight (out_channels, in_channels / groups, kH, kW) of randn and a bias of zeros."""

    @checked
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1, groups: int = 1, bias: bool = True, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        check_sizes(in_channels=in_channels, out_channels=out_channels, groups=groups)
        check_steps(stride, padding, dilation, kernel_size)
        if isinstance(kernel_size, (tuple, list)) and len(kernel_size) != 2:
            raise ValueError(f"kernel_size must be an int or two, not {kernel_size}")
        check_parameter_dtype(dtype)
        options = {"dilation": dilation, "groups": groups, "bias": bias, "device": device, "dtype": dtype}
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, **options)

    reset_parameters = fill_as_aiter

    def forward(self, input: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, out_channels, H', W')."""
        options = self.stride, self.padding, self.dilation, self.groups
        return conv2d(input, self.weight, self.bias, *options)


class AITERLinear(nn.Linear):
    """`linear` with a weight (out_features, in_features) of randn and a bias of zeros; any size."""

    computes_linear = True  # for `quantize`

    @checked
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        check_sizes(in_features=in_features, out_features=out_features)
        check_parameter_dtype(dtype)
        super().__init__(in_features, out_features, bias, device, dtype)

    reset_parameters = fill_as_aiter

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return linear(input, self.weight, self.bias)


class AITERAttention(nn.Module):
    """Self-attention with projections query, key, value and output, and dropout after the last of them.

    Raises ValueError unless num_heads divides hidden_size.
    """

    @checked
    def __init__(
        self, hidden_size: int, num_heads: int, dropout_prob: float = 0.0, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(hidden_size=hidden_size)
        check_probability(dropout_prob=dropout_prob)
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"hidden_size is {hidden_size}, which num_heads={num_heads} does not divide")
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_size = hidden_size // num_heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(hidden_size, hidden_size, device=device, dtype=dtype) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, S, hidden_size) and a mask as `attention` takes it, (B, S) say -> (B, S, hidden_size)."""
        rows = (project(hidden_states) for project in (self.query, self.key, self.value))
        heads = (rearrange(t, "... s (heads n) -> ... heads s n", heads=self.num_heads) for t in rows)
        context = attention(*heads, attention_mask)  # (B, num_heads, S, head_size)
        return self.dropout(self.output(rearrange(context, "b heads s n -> b s (heads n)")))
