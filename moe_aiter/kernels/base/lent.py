"""Weights in two tensors: those of a rank's own experts (E, ...), and those of its guests (G, ...).

A guest is an expert that another rank has lent for one call (distributed/guests.py).  Its group comes behind
the groups of own experts, and its weight is `guests[g]`, which lies in memory as an own one does.  The
products of `expert_up`, `expert_down`, `expert_down_grad` and `gmm_unpermute` take such weights.  With
`guests` None, all groups are own ones.

Gradients of guests' weights go home, so autograd gets None for them: inside of `guest_gradients`, products
add them to the tensors there.
"""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...private_api import Scoped
from .check import check_device, check_float, check_size, check_whole_shape
from .launch import tl, triton

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])

# of gate_up (G, width, H) and of down (G, H, I), in float32; None where that weight is not trained
guest_gradients: Scoped[tuple[Tensor | None, Tensor | None]] = Scoped("guest_gradients", (None, None))


def all_weights(w: Tensor, guests: Tensor | None) -> Tensor:
    """Return the weights of all groups as one tensor, for references."""
    return w if guests is None else torch.cat([w, guests])


def own_part(i: Inputs, weight: str, *of_groups: str) -> Inputs:
    """Return an op's inputs without guests, once these fit: `of_groups` lose the numbers of their groups."""
    guests: Tensor | None = i.guests  # type: ignore[attr-defined]
    if guests is None:
        return i
    part: Inputs = without(i, weight, guests, *of_groups)._replace(guests=None)  # type: ignore[attr-defined]
    return part


def without(i: Inputs, weight: str, guests: Tensor, *of_groups: str) -> Inputs:
    """Do as `own_part` with these guests, which are no input."""
    w: Tensor = getattr(i, weight)
    check_float(**{weight: w, "guests": guests})
    check_device(**{weight: w, "guests": guests})
    check_whole_shape(f"guests of {weight}", guests, (guests.shape[0], *w.shape[1:]))
    if guests.stride()[1:] != w.stride()[1:]:
        raise ValueError(f"guests of {weight} have the strides {guests.stride()}, but {weight} {w.stride()}")
    own, both = {}, w.shape[0] + guests.shape[0]
    for name in of_groups:
        t: Tensor | None = getattr(i, name)
        if t is not None:
            check_size(f"{name} has {{}} groups", t.shape[0], f"{weight} and guests have {{}}", both)
            own[name] = t[: w.shape[0]]
    part: Inputs = i._replace(**own)  # type: ignore[attr-defined]
    return part


def own_sizes(group_sizes: Tensor, w: Tensor, guests: Tensor | None) -> Tensor:
    """Return the sizes of the groups of w."""
    return group_sizes if guests is None else group_sizes[: len(w)]


@triton.jit
def matrix_of(w_ptr, guests_ptr, group, own, w_stride, guests_stride, UNIT: tl.constexpr):
    """The first number of a group's matrix: of w (own, ...), or behind these of the guests.  UNIT as
    `unit_with` returns it."""
    if guests_ptr is None:
        matrix = w_ptr + group.to(tl.int64) * w_stride
    else:  # as numbers, which the compiler chooses from without a branch
        SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        own_base = w_ptr.to(tl.int64) + group.to(tl.int64) * w_stride * SIZE
        base = guests_ptr.to(tl.int64) + (group - own).to(tl.int64) * guests_stride * SIZE
        matrix = tl.where(group < own, own_base, base).to(w_ptr.dtype)
        matrix = tl.multiple_of(matrix, UNIT * SIZE if UNIT * SIZE < 16 else 16)
    return matrix


def unit_with(unit: int, w: Tensor, guests: Tensor | None) -> tuple[int, int]:
    """Return the unit of a kernel that calls `matrix_of`, and how far the guests' matrices lie apart.

    `unit` is what `unit_of` returns for the kernel without guests.
    """
    if guests is None:
        return unit, 0
    aligned = w.data_ptr() % 16 == 0 == guests.data_ptr() % 16
    return math.gcd(unit, guests.stride(0)) if aligned else 1, guests.stride(0)
