"""Scales and biases beside products of 8 bits: which shapes they may have, and what kernels get."""

import numbers

import torch
from torch import Tensor

from ._check import FLOATS, check_tensor


def check_scales(shape_of_x: tuple, shape_of_w: tuple, x_scale, w_scale, bias=None) -> None:
    """Raise unless the scales are float32 of these shapes, and the bias is of any floating dtype."""
    for name, t, shape in (
        ("x_scale", x_scale, shape_of_x),
        ("w_scale", w_scale, shape_of_w),
        ("bias", bias, shape_of_w),
    ):
        if t is None:
            continue
        if t.dtype not in (FLOATS if name == "bias" else (torch.float32,)):
            raise TypeError(f"{name} must be {'floating' if name == 'bias' else 'float32'}, not {t.dtype}")
        if t.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, but it has shape {tuple(t.shape)}")


def as_vector(
    name: str, scale: Tensor | float | None, x: Tensor, size: int, shapes: tuple[tuple[int, ...], ...]
) -> Tensor | None:
    """A scale of one of these shapes, or of one element, as (size,), without a copy."""
    if scale is None:
        return None
    if isinstance(scale, numbers.Real):
        return x.new_full((1,), scale, dtype=torch.float32).expand(size)
    check_tensor(name, scale)
    if scale.numel() == 1:
        return scale.reshape(1).expand(size)
    if scale.shape in shapes:
        return scale.reshape(size)
    known = ", ".join(map(str, shapes))
    raise ValueError(
        f"{name} must be a number, of one element, or {known}, but it has shape {tuple(scale.shape)}"
    )


def as_rows(name: str, scale: Tensor | float | None, x: Tensor, rows: int) -> Tensor | None:
    """A scale as (G, rows), without a copy."""
    G = x.shape[0]
    if scale is None:
        return None
    if isinstance(scale, numbers.Real):
        return x.new_full((1, 1), scale, dtype=torch.float32).expand(G, rows)
    check_tensor(name, scale)
    shape = tuple(scale.shape)
    if shape in ((G, rows), (G, rows, 1)):
        return scale.reshape(G, rows)
    if shape in ((G,), (G, 1), (G, 1, 1)) or scale.numel() == 1:
        return scale.reshape(-1, 1).expand(G, rows)
    known = f"a number, ({G},), ({G}, 1, 1), ({G}, {rows}) or ({G}, {rows}, 1)"
    raise ValueError(f"{name} must be {known}, but it has shape {shape}")
