"""The inputs of the experts as one thing, and the checks on them that every backend needs."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..op import once
from ._check import (
    check_device,
    check_float,
    check_index,
    check_own_memory,
    check_shape,
    check_size,
    check_sizes,
    check_tensor,
)
from ._groups import check_plan_values
from .activations import get_activation


class ExpertInputs(NamedTuple):
    """What the experts need to know, and the arguments of `expert_loop_op`, in order.

    x and the weights share a dtype, float32, bfloat16, float16 or float64; the weights may have any strides.
    `order`, `rank` and `group_sizes` are those of `sort_by_expert`.  z (R, parts * I) is for the backward
    pass alone, and has no rows without `save_z`.  Differentiable in the first six; a frozen one costs
    nothing.  A weight with a main gradient, of its shape and any floating dtype, has its gradient added
    there; autograd gets None.
    """

    x: Tensor  # (T, H)
    gate_up: Tensor  # (E, parts * I, H)
    gate_up_bias: Tensor | None  # (E, parts * I)
    down: Tensor  # (E, H, I)
    down_bias: Tensor | None  # (E, H)
    routing_weights: Tensor  # (T, k)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)
    activation: str
    interleaved: bool
    save_z: bool
    gate_up_main_grad: Tensor | None = None  # (E, parts * I, H)
    down_main_grad: Tensor | None = None  # (E, H, I)


NUM_INPUTS = len(ExpertInputs._fields)  # of an op whose arguments begin with them


def needs_grad(i: ExpertInputs) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in i[:6])


@once
def check_experts(i: ExpertInputs) -> None:
    """Raise ValueError for shapes or devices that do not fit, TypeError for dtypes, naming both sides."""
    check_shapes(i)
    check_kinds(i)


def check_memory(row_chunks: int | None, recompute: str) -> None:
    """Raise unless these say how to trade time for memory; see `expert_mlp`."""
    if row_chunks is not None:
        check_sizes(row_chunks=row_chunks)
    if recompute not in ("none", "z"):
        raise ValueError(f"unknown recompute {recompute!r}; known: none, z")


def check_expert_values(*inputs) -> None:
    """Raise ValueError for a plan that contradicts itself; this synchronises."""
    i = ExpertInputs(*inputs)
    check_plan_values(i.order.shape[0], i.group_sizes, i.order, i.rank)


def check_shapes(i: ExpertInputs) -> None:
    for name, axes in (("x", "T H"), ("gate_up", "E parts*I H"), ("down", "E H I"), ("order", "R"),
                       ("rank", "T k"), ("routing_weights", "T k"), ("group_sizes", "E")):  # fmt: skip
        check_shape(name, getattr(i, name), *axes.split())
    (T, H), (E, width, _), parts = i.x.shape, i.gate_up.shape, get_activation(i.activation).parts
    check_size("x is (T, H={})", H, "gate_up is (E, parts*I, H={})", i.gate_up.shape[2])
    check_size("x is (T, H={})", H, "down is (E, H={}, I)", i.down.shape[1])
    check_size("gate_up is (E={}, parts*I, H)", E, "down is (E={}, H, I)", i.down.shape[0])
    check_size("gate_up is (E={}, parts*I, H)", E, "group_sizes is (E={},)", i.group_sizes.shape[0])
    check_size(
        "gate_up is (E, parts*I={}, H)",
        width,
        f"{i.activation} and down ask for {{}}",
        parts * i.down.shape[2],
    )
    check_sizes(k=i.rank.shape[1])
    check_size("x is (T={}, H)", T, "rank is (T={}, k)", i.rank.shape[0])
    check_size("order is (R={},)", i.order.shape[0], "rank (T, k) holds {} choices", i.rank.numel())
    for name, shape in (
        ("routing_weights", i.rank.shape),
        ("gate_up_bias", (E, width)),
        ("down_bias", (E, H)),
    ):
        given = getattr(i, name)
        if given is None:
            continue
        check_tensor(name, given)
        if given.shape != shape:
            raise ValueError(f"{name} is {tuple(given.shape)} but must be {tuple(shape)}")


def check_kinds(i: ExpertInputs) -> None:
    check_float(x=i.x, gate_up=i.gate_up, down=i.down)
    if i.interleaved and not get_activation(i.activation).gated:
        raise ValueError(f"interleaved=True, but {i.activation} has no gate")
    for name in ("gate_up", "down"):
        check_main_grad(f"{name}_main_grad", getattr(i, f"{name}_main_grad"), getattr(i, name).shape, i.x)
    for name in ("routing_weights", "gate_up_bias", "down_bias"):
        if getattr(i, name) is not None:
            check_float(**{name: getattr(i, name)})
    check_index(order=i.order, rank=i.rank, group_sizes=i.group_sizes)
    check_device(**{name: t for name, t in i._asdict().items() if isinstance(t, Tensor)})


def check_main_grad(name: str, main_grad: Tensor | None, shape: tuple, x: Tensor) -> None:
    """Raise unless the gradient of a weight of that shape, from the device of `x`, can be added to it."""
    if main_grad is None:
        return
    check_tensor(name, main_grad)
    if main_grad.shape != shape:
        raise ValueError(f"{name} is {tuple(main_grad.shape)} but must be {tuple(shape)}")
    if not main_grad.is_floating_point():
        raise TypeError(f"{name} must be floating, not {main_grad.dtype}")
    check_own_memory(name, main_grad)
    check_device(x=x, **{name: main_grad})
