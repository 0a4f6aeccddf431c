"""How experts compute, and their weights, each as one value that the layers hand on."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.activations import get_activation
from ..base.check import check_known, check_sizes
from .fp8 import RECIPES
from .glu import glu


@dataclass(frozen=True)
class ExpertOptions:
    """The options of `expert_mlp`.  Raises ValueError for values that are unknown, TypeError for kinds.

    `check` raises for values that do not fit each other: a module can be set one after the other.
    """

    activation: str = "swiglu"
    interleaved: bool = False
    row_chunks: int | None = None
    recompute: str = "none"
    fp8: str | None = None

    def __post_init__(self) -> None:
        get_activation(self.activation)
        if self.row_chunks is not None:
            check_sizes(row_chunks=self.row_chunks)
        check_known("recompute", self.recompute, ("none", "z"))
        if self.fp8 not in (None, *RECIPES):
            raise ValueError(f"unknown fp8 {self.fp8!r}; known: None, {', '.join(RECIPES)}")

    def check(self) -> None:
        if self.interleaved and not get_activation(self.activation).gated:
            what = f"the activation {self.activation!r} has no gate to interleave"
            raise ValueError(f"interleaved=True, but {what}")

    def activate(self, z: Tensor) -> Tensor:
        """Apply the activation to `z`, (R, 2I) or (R, I); returns (R, I): see `glu`."""
        return glu(z, self.activation, self.interleaved)


class ExpertWeights(NamedTuple):
    """The weights of experts as `expert_mlp` takes them, for sharded ones the part of this rank."""

    gate_up: Tensor  # (E, width, H)
    down: Tensor  # (E, H, I)
    gate_up_bias: Tensor | None = None  # (E, width)
    down_bias: Tensor | None = None  # (E, H)
    gate_up_main_grad: Tensor | None = None  # (E, width, H)
    down_main_grad: Tensor | None = None  # (E, H, I)
    guests: tuple[Tensor, Tensor] | None = None  # (G, width, H), (G, H, I): see base/lent.py

    def with_guests(self, gate_up: Tensor, down: Tensor, *biases: Tensor | None) -> "ExpertWeights":
        """Return these weights with those of guests; biases are those of all groups."""
        own = self.gate_up_bias, self.down_bias
        both = [None if b is None else torch.cat([b, guest]) for b, guest in zip(own, biases, strict=True)]
        return self._replace(gate_up_bias=both[0], down_bias=both[1], guests=(gate_up, down))
