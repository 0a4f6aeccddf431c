"""Checks that every op makes on its inputs.  They run under the fake as well, so they hold when compiled."""

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


def check_shape(name: str, x: Tensor, *axes: str) -> None:
    """Raise unless `x` is a tensor with as many dimensions as there are axis names."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor ({', '.join(axes)}), not {type(x).__name__}")
    if x.dim() != len(axes):
        raise ValueError(f"{name} must be ({', '.join(axes)}), but it has shape {tuple(x.shape)}")


def check_size(what: str, size: int, other: str, expected: int) -> None:
    """Raise unless two sizes agree, naming both: `x is (M, K=64) but w is (G, K=32, N)`."""
    if size != expected:
        raise ValueError(f"{what.format(size)} but {other.format(expected)}")


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


def check_device(**tensors: Tensor | None) -> None:
    """Raise unless every tensor given is on the device of the first."""
    (first, x), *rest = tensors.items()
    for name, t in rest:
        if t is not None and t.device != x.device:
            raise ValueError(f"{first} is on {x.device} but {name} is on {t.device}")
