"""Two-dimensional convolution: torch's, so cuDNN's, MIOpen's or oneDNN's."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels._check import check_device, check_float, check_shape, check_size, check_sizes, check_tensor
from ..switches import inside, switches


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d`: input (N, C, H, W) or (C, H, W), weight (O, C / groups, kH, kW), bias (O,).

    `padding` may be "valid" or, with a stride of 1, "same".  With `enable_dynamic_shapes` no new shape is
    searched for its fastest kernel, whatever `torch.backends.cudnn.benchmark` says, in the gradient neither.

    Raises ValueError for shapes and devices that do not fit, TypeError for dtypes.
    """
    given = input, weight, bias, stride, padding, dilation, groups
    if len({t.device for t in given[:3] if isinstance(t, Tensor)}) > 1:
        check_inputs(input, weight, bias, groups)
    try:
        if switches.dynamic_shapes and torch.backends.cudnn.benchmark:
            return inside(without_search, F.conv2d, given, {})
        return F.conv2d(*given)
    except (
        RuntimeError,
        TypeError,
    ):  # torch looks before it launches: only what it refused is looked at again
        check_inputs(input, weight, bias, groups)
        raise


def check_inputs(input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
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
    if not torch.is_autocast_enabled(input.device.type):  # which gives all of them its own dtype
        check_float(input=input, weight=weight, bias=bias)
    check_device(input=input, weight=weight, bias=bias)


@contextlib.contextmanager
def without_search() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
