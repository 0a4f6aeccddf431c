"""Checks that every op makes on its inputs.  They run under the fake as well, so they hold when compiled."""

import math
import numbers

import torch
from torch import Tensor

from ..dispatch import INTEGERS

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


def check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")


def check_plan(plan: tuple[Tensor, Tensor, Tensor]) -> None:
    """Raise unless `plan` has the three parts of a RoutePlan, which need not be one."""
    if not isinstance(plan, (tuple, list)):
        raise TypeError(f"plan must be order, rank and group_sizes, not {type(plan).__name__}")
    if len(plan) != 3:
        raise ValueError(f"plan must be order, rank and group_sizes, but it has {len(plan)} parts")


def check_shape(name: str, x: Tensor, *axes: str) -> None:
    """Raise unless `x` is a tensor with as many dimensions as there are axis names."""
    check_tensor(name, x)
    if x.dim() != len(axes):
        raise ValueError(f"{name} must be ({', '.join(axes)}), but it has shape {tuple(x.shape)}")


def check_size(what: str, size: int, other: str, expected: int) -> None:
    """Raise unless two sizes agree, naming both: `x is (M, K=64) but w is (G, K=32, N)`."""
    if size != expected:
        raise ValueError(f"{what.format(size)} but {other.format(expected)}")


def check_sizes(**sizes: int) -> None:
    """Raise unless every size is a whole number of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, INTEGERS) or isinstance(size, bool):
            raise TypeError(f"{name} must be an int, not {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def check_not_negative(**values: float) -> None:
    """Raise unless every number is finite and at least 0."""
    for name, number in values.items():
        check_real(name, number)
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, not {number}")


def check_positive(**values: float) -> None:
    """Raise unless every number is finite and above 0."""
    for name, number in values.items():
        check_real(name, number)
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, not {number}")


def check_real(name: str, number: float) -> None:
    if not isinstance(number, numbers.Real) or isinstance(number, bool):
        raise TypeError(f"{name} must be a number, not {type(number).__name__}")


def check_float(**tensors: Tensor | None) -> None:
    """Raise unless every tensor given has the floating dtype of the first."""
    (first, x), *rest = tensors.items()
    if x.dtype not in FLOATS:
        raise TypeError(f"{first} must be float16, bfloat16, float32 or float64, not {x.dtype}")
    for name, t in rest:
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{first} is {x.dtype} but {name} is {t.dtype}")


def check_index(**tensors: Tensor) -> None:
    """Raise unless every tensor is int32 or int64."""
    for name, t in tensors.items():
        if t.dtype not in INDICES:
            raise TypeError(f"{name} must be int32 or int64, not {t.dtype}")


def check_own_memory(name: str, x: Tensor) -> None:
    """Raise for an expanded tensor, in which nothing can be added up."""
    if 0 in x.stride() and x.numel():
        raise ValueError(f"{name} is expanded: its elements must not share memory")


def check_device(**tensors: Tensor | None) -> None:
    """Raise unless every tensor given is on the device of the first."""
    (first, x), *rest = tensors.items()
    for name, t in rest:
        if t is not None and t.device != x.device:
            raise ValueError(f"{first} is on {x.device} but {name} is on {t.device}")


def check_routing_weights(routing_weights: Tensor, rank: Tensor, x: Tensor) -> None:
    """Raise unless there is a floating weight for each choice."""
    if routing_weights.shape != rank.shape:
        shapes = tuple(routing_weights.shape), tuple(rank.shape)
        raise ValueError("routing_weights is {} but the plan is for (T, k) = {}".format(*shapes))
    if not routing_weights.is_floating_point():
        raise TypeError(f"routing_weights must be floating, not {routing_weights.dtype}")
    check_device(x=x, routing_weights=routing_weights)


def refuse_gradient(what: str, *tensors: Tensor | None) -> None:
    """Raise where one of these would need a gradient through what has none."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError(f"{what} has no gradient: call it under torch.no_grad()")
