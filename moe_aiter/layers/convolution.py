"""Two-dimensional convolution: torch's, so cuDNN's, MIOpen's or oneDNN's."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.check import (
    check_device,
    check_float,
    check_shape,
    check_size,
    check_sizes,
    check_tensor,
    is_kind,
)
from ..switches import Shared, inside, switches

PADDINGS = "valid", "same"
SEARCH = Shared("cudnn search", (torch.backends.cudnn, "benchmark"))


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0, dilation: int | tuple[int, int] = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """`F.conv2d`: input (N, C, H, W) or (C, H, W), weight (O, C / groups, kH, kW), bias (O,).

    `padding` may be "valid" or, with a stride of 1, "same".  With `enable_dynamic_shapes` no new shape is
    searched for its fastest kernel, whatever `torch.backends.cudnn.benchmark` says, in the gradient neither.

    Raises ValueError for shapes, devices, steps and paddings that do not fit, TypeError for dtypes and kinds.
    """
    arguments = input, weight, bias, stride, padding, dilation, groups
    if len({t.device for t in arguments[:3] if isinstance(t, Tensor)}) > 1:
        check_convolution(input, weight, bias, groups)
    try:
        # off, maybe, for as long as another thread is in such a block
        if switches.dynamic_shapes and (SEARCH.blocks or torch.backends.cudnn.benchmark):
            return inside(partial(SEARCH.set, False), F.conv2d, arguments, {})
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    except (RuntimeError, TypeError):
        # torch looks before it launches: only what it refused is looked at again
        check_convolution(input, weight, bias, groups)
        check_steps(stride, padding, dilation)
        raise


def check_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    check_tensor("input", input)
    if input.dim() not in (3, 4):
        raise ValueError(f"input must be (N, C, H, W) or (C, H, W), but it has shape {tuple(input.shape)}")
    check_shape("weight", weight, "O", "C / groups", "kH", "kW")
    check_sizes(groups=groups)
    wanted = f"weight is (O, C / groups={weight.shape[1]}, kH, kW) and groups {groups}: C would be {{}}"
    check_size("input is (..., C={}, H, W)", input.shape[-3], wanted, weight.shape[1] * groups)
    if weight.shape[0] % groups:
        raise ValueError(f"weight is (O={weight.shape[0]}, ...), which groups={groups} does not divide")
    if bias is not None:
        check_shape("bias", bias, "O")
        check_size("bias is (O={},)", bias.shape[0], "weight is (O={}, ...)", weight.shape[0])
    # autocast gives all of them its own dtype
    if input.is_meta or not torch.is_autocast_enabled(input.device.type):
        check_float(input=input, weight=weight, bias=bias)
    check_device(input=input, weight=weight, bias=bias)


def check_steps(stride: Any, padding: Any, dilation: Any, kernel_size: Any = 1) -> None:
    steps = ("stride", stride, 1), ("dilation", dilation, 1), ("padding", padding, 0)
    for name, value, least in (*steps, ("kernel_size", kernel_size, 1)):
        if isinstance(value, str) and name == "padding":
            if value not in PADDINGS:
                raise ValueError(f"unknown padding {value!r}; known: {', '.join(PADDINGS)}, an int or two")
            if value == "same" and stride not in (1, (1,), [1], (1, 1), [1, 1]):
                raise ValueError(f"padding='same' needs a stride of 1, not {stride}")
            continue
        both = value if isinstance(value, (tuple, list)) else (value,)
        if len(both) not in (1, 2) or not all(is_kind(n, int) for n in both):
            raise TypeError(f"{name} must be an int or two, not {value!r}")
        if min(both) < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
