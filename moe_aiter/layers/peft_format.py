"""Adapters of experts as PEFT names and lays out their tensors, in its two ways.

stacked       of `target_parameters`, all experts in one: lora_A.weight (E * r, in), expert after expert,
              and lora_B.weight (out, r * E), rank after rank
per expert    of `target_modules`, a linear layer each: {e}.{layer}.lora_A.weight (r, in), lora_B.weight
              (out, r) and, with DoRA, lora_magnitude_vector (out,), which the stacked form has no place for
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def stacked(found: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Copies of the `LoRAFactors` of all experts, by their prefixes."""
    tensors = {}
    for prefix, lora in found.items():
        if lora.magnitude is not None:
            raise ValueError("PEFT has no DoRA for experts in one tensor, and so no names for its magnitudes")
        A, B = lora.A.detach(), lora.B.detach()
        tensors[f"{prefix}lora_A.weight"] = A.flatten(0, 1).clone()
        tensors[f"{prefix}lora_B.weight"] = B.permute(1, 2, 0).flatten(1).clone()
    return tensors


def load_stacked(found: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> None:
    """The inverse, of `LoRAFactors` by their prefixes.  Raises as `copy_in` does, and then copies nothing."""
    to = {name: torch.empty_like(t) for name, t in stacked(found).items()}
    copy_in(to, state)
    for prefix, lora in found.items():
        lora.A.data.copy_(to[f"{prefix}lora_A.weight"].view_as(lora.A))
        B = to[f"{prefix}lora_B.weight"].unflatten(1, (lora.rank, len(lora.B)))  # (out, r, E)
        lora.B.data.copy_(B.permute(2, 0, 1))


def per_expert(prefix: str, lora: nn.Module, layers: Mapping[str, slice]) -> dict[str, Tensor]:
    """Copies of each expert's, for linear layers that are these rows of the weight; they share an A."""
    found = {}
    for e in range(len(lora.A)):
        for layer, rows in layers.items():
            name = f"{prefix}{e}.{layer}."
            found[f"{name}lora_A.weight"] = lora.A[e].detach().clone()
            found[f"{name}lora_B.weight"] = lora.B[e, rows].detach().contiguous().clone()
            if lora.magnitude is not None:
                found[f"{name}lora_magnitude_vector"] = lora.magnitude[e, rows].detach().contiguous().clone()
    return found


@torch.no_grad()
def copy_in(to: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Fill each tensor of `to` with what `state` has by its name, if that fits for all of them.

    Raises KeyError for what is not there, ValueError for another shape.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be tensors by name, not {type(state).__name__}")
    for name, t in to.items():
        if state[name].shape != t.shape:
            raise ValueError(f"{name} is {tuple(state[name].shape)} but the adapter needs {tuple(t.shape)}")
    for name, t in to.items():
        t.copy_(state[name])
