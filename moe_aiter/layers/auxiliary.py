"""The auxiliary losses of a layer's forward passes: added by the backward pass, or kept for `aux_loss`.

A layer whose losses are returned keeps them with their graph.  They are those of one forward pass of the
model, in which a layer may run several times: `NewPass`, a hook of the model, drops them when the next one
begins.
"""

import sys
import warnings
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ..private_api import REPLICA, is_exporting
from ..replay import current_pass
from ..routing.balance import repeats
from ..routing.losses import attach_loss

REENTRANT = (
    "aux_loss cannot return the losses of a layer under reentrant activation checkpointing, which computes "
    "them without gradients: pass use_reentrant=False, or call set_aux_loss(model, 'attach')"
)


class AuxLosses:
    """The losses of one layer.  A copy has none, whatever the original holds."""

    def __init__(self, attached: bool = True):
        self.attached, self.warned = attached, False
        self.new: list[Tensor] = []  # since `read`; of an attached loss the last value alone
        self.seen: list[Tensor] = []  # what `read` has returned, for further calls

    def __reduce__(self) -> tuple[type["AuxLosses"], tuple[bool]]:
        return AuxLosses, (self.attached,)

    def add(self, weights: Tensor, losses: Sequence[Tensor], loss_scale: Tensor | None) -> Tensor:
        """Attach the losses of a forward pass to the routing weights and return these, or keep the losses."""
        loss, compiles = reduce(torch.add, losses), torch.compiler.is_compiling()
        if self.attached:
            if not compiles:  # a compiled graph would have to return each value
                self.seen = [loss.detach()]
                if loss_scale is None and not self.warned:
                    self.warned = warn_of_scale(weights)
            return attach_loss(weights, loss, loss_scale)
        if compiles:
            if is_exporting():
                raise NotImplementedError(
                    "an exported program returns no losses: call set_aux_loss(model, 'attach') before"
                )
        else:
            check_pass()
            if repeats():
                return weights
            self.seen = []
        self.new.append(loss)
        return weights

    def check(self) -> None:
        """Raise RuntimeError if a training pass runs without gradients, which are to come in a second run."""
        if not self.attached and not torch.compiler.is_compiling():
            check_pass()

    def read(self) -> list[Tensor]:
        if self.new:
            self.seen, self.new = self.new, []
        return self.seen


class NewPass:
    """A hook of a model before each forward pass, which drops the losses of the one before."""

    def __init__(self, kept: Sequence[AuxLosses]):
        self.kept = kept

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        trains = model.training or any(module.training for module in model.modules())
        if not (trains and torch.is_grad_enabled()) or REPLICA in vars(model):
            return
        compiles = torch.compiler.is_compiling()
        if not compiles and repeats():
            return
        if not compiles and any(losses.new and not losses.seen for losses in self.kept):
            warnings.warn(
                "a forward pass in training mode was not followed by aux_loss(model), so its auxiliary "
                "losses are lost: add aux_loss(model) to each training loss; evaluate under torch.no_grad()",
                stacklevel=5,
            )
        for losses in self.kept:
            losses.new, losses.seen = [], []


def check_pass() -> None:
    """Raise RuntimeError where a loss would lack its graph: in both runs of a reentrant checkpoint."""
    here = current_pass()
    reentrant = any(isinstance(region, FunctionCtx) for region in (*here.first, here.repeated))
    if reentrant or (repeats() and here.repeated is None):
        raise RuntimeError(REENTRANT)


def warn_of_scale(x: Tensor) -> bool:
    """Warn if something visible scales the training loss, and return whether it does.

    Float16 autocast comes with a GradScaler, and accelerate divides the loss by its accumulation steps.
    """
    device, causes = x.device.type, []
    casts = not x.is_meta and torch.is_autocast_enabled(device)
    if casts and torch.get_autocast_dtype(device) == torch.float16:
        causes.append("float16 autocast, which needs a GradScaler, is on")
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        steps = accelerate.GradientState().num_steps
        if steps > 1:
            causes.append(f"accelerate divides the training loss by gradient_accumulation_steps={steps}")
    if causes:
        warnings.warn(
            f"{' and '.join(causes)}, but the auxiliary losses of the MoE are attached with the scale 1: "
            "call set_aux_loss(model, 'return') and add aux_loss(model) to the training loss, or call "
            "set_loss_scale",
            stacklevel=8,
        )
    return bool(causes)
