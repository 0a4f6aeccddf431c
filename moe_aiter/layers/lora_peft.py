"""Adapters as PEFT names and lays out their tensors.

linear layer  lora_A.weight (r, in), lora_B.weight (out, r) and, with DoRA, lora_magnitude_vector (out,)
stacked       of `target_parameters`, the experts in one: lora_A.weight (E * r, in), expert after expert,
              and lora_B.weight (out, r * E), rank after rank; no place for magnitudes
per expert    of `target_modules`, a linear layer each, with the names {e}.{layer}.lora_A.weight and so on
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from ..kernels.base.check import check_range
from .experts import whole_part

if TYPE_CHECKING:
    from .lora import LoRAFactors


def factors_of_all_experts(
    found: Mapping[str, "LoRAFactors"], adapter: int = 0, ranks: Mapping[str, int | None] | None = None
) -> dict[str, Tensor]:
    """Copies of an adapter of the `LoRAFactors` of all experts, by their prefixes; of its rank by default.

    Ranks that share the experts must all call this.
    """
    tensors: dict[str, Tensor] = {}
    for prefix, lora in found.items():
        if lora.magnitude is not None:
            raise ValueError("PEFT has no DoRA for experts in one tensor, and so no names for its magnitudes")
        lora.check_present()
        A, B = map(whole_part, lora.of_adapter(adapter, (ranks or {}).get(prefix)))
        tensors[f"{prefix}lora_A.weight"] = rearrange(A, "e r i -> (e r) i").clone()
        tensors[f"{prefix}lora_B.weight"] = rearrange(B, "e o r -> o (r e)").clone()
    return tensors


def load_stacked(
    found: Mapping[str, "LoRAFactors"], state: Mapping[str, Tensor], adapter: int = 0,
    alpha: float | None = None, rslora: bool | None = None,
) -> None:  # fmt: skip
    """The inverse, of `LoRAFactors` by their prefixes.  Raises as `copy_in` does, and then copies nothing."""
    ranks = {prefix: rank_in(state, prefix, lora, alpha) for prefix, lora in found.items()}
    to = {name: torch.empty_like(t) for name, t in factors_of_all_experts(found, adapter, ranks).items()}
    copy_in(to, state)
    for prefix, lora in found.items():
        A, B = lora.of_adapter(adapter, ranks[prefix])
        A.copy_(rearrange(to[f"{prefix}lora_A.weight"], "(e r) i -> e r i", r=A.shape[1]))
        B.copy_(rearrange(to[f"{prefix}lora_B.weight"], "o (r e) -> e o r", r=A.shape[1]))
        lora.take_rank(adapter, ranks[prefix], alpha, rslora)


def rank_in(
    state: Mapping[str, Tensor], prefix: str, lora: "LoRAFactors", alpha: float | None = None
) -> int:  # fmt: skip
    """Return the rank of an adapter; ValueError unless `lora` has a place for it and `alpha` is finite."""
    check_alpha(alpha)
    check_state(state)
    name, magnitude = f"{prefix}lora_A.weight", f"{prefix}lora_magnitude_vector"
    if lora.magnitude is None and magnitude in state:
        raise ValueError(f"state has {magnitude}, an adapter with DoRA, but the layer was made without dora")
    shape, experts = tuple(found_in(state, name).shape), lora.count // lora.adapters
    rank, rest = divmod(shape[0] if shape else 0, experts)
    if rest or not 1 <= rank <= lora.rank:
        ranks = f"{experts} times a rank of 1 to {lora.rank}" if experts > 1 else f"1 to {lora.rank} ranks"
        raise ValueError(f"{name} is {shape}, but the adapter has rows for {ranks}")
    return rank


def factors_per_expert(prefix: str, lora: "LoRAFactors", layers: Mapping[str, slice]) -> dict[str, Tensor]:
    """Copies of each expert's, for linear layers that are these rows of the weight; they share an A."""
    lora.check_present()
    A, B = whole_part(lora.A.detach()), whole_part(lora.B.detach())
    magnitude = None if lora.magnitude is None else whole_part(lora.magnitude.detach())
    found = {}
    for e in range(len(A)):
        for layer, rows in layers.items():
            name = f"{prefix}{e}.{layer}."
            found[f"{name}lora_A.weight"] = A[e].clone()
            found[f"{name}lora_B.weight"] = B[e, rows].contiguous().clone()
            if magnitude is not None:
                found[f"{name}lora_magnitude_vector"] = magnitude[e, rows].contiguous().clone()
    return found


@torch.no_grad()
def copy_in(to: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Fill each tensor of `to` with what `state` has by its name, if that fits for all of them.

    Raises KeyError for what is not there, ValueError for another shape.
    """
    check_state(state)
    for name, t in to.items():
        if (shape := found_in(state, name).shape) != t.shape:
            raise ValueError(f"{name} is {tuple(shape)} but the adapter needs {tuple(t.shape)}")
    for name, t in to.items():
        t.copy_(state[name])


def found_in(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        there = ", ".join(map(repr, [*state][:2])) or "nothing"
        raise KeyError(f"state has no {name!r}, but {there}: give the prefix of its names, if they have one")
    return state[name]


def number_of(adapter: int, adapters: int) -> int:
    """Return `adapter`, counted from the first; IndexError if it is not one of `adapters`."""
    if not -adapters <= adapter < adapters:
        raise IndexError(f"adapter is {adapter}, but the adapters are 0 to {adapters - 1}")
    return adapter % adapters


def check_alpha(alpha: float | None) -> None:
    if alpha is not None:
        check_range({"alpha": alpha}, math.isfinite, "finite")


def check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be tensors by name, not {type(state).__name__}")
