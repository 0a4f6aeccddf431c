"""Adapters merged into the weights of a layer, and what the layer's state is then."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..private_api import in_fsdp, own_parameters
from .experts import local_part
from .loading import Loading

MERGED_FIRST = "an adapter is merged into the weights: call unmerge() first, and load then"
# the layers with merged adapters, by id
MERGED: "weakref.WeakValueDictionary[int, Mergeable]" = weakref.WeakValueDictionary()


class Mergeable(Loading):
    """A module with adapters that can be merged into the weights of its submodule `base`.

    `merges` names these weights, and the module's `LoRAFactors` for each.  `original` has copies of the
    weights as they were before, or is None.  The module's state is always that of before: the weights of
    `base`, and the adapters beside them.
    """

    merges: ClassVar[Mapping[str, str]]
    base: nn.Module
    original: tuple[Tensor, ...] | None

    def own_weights(self) -> tuple[Tensor, ...]:
        """Return the weights outside of autograd; ValueError if what is written to them would be lost."""
        own, weights = own_parameters(self.base), []
        for name, factors in self.merges.items():
            p = own.get(name)
            if p is None:
                raise ValueError(
                    f"{name} is no parameter of the {type(self.base).__name__} itself, as with a "
                    "parametrization, pruning or a wrapper: remove that first"
                )
            getattr(self, factors).check_present(p)
            if in_fsdp(self.base) and not hasattr(p, "placements"):
                raise ValueError(f"FSDP2 has gathered {name} for a while: call reshard() of its unit first")
            weights.append(p.detach())
        return tuple(weights)

    def is_merged(self) -> bool:
        """Whether this layer, or another with the same weights, has merged an adapter into them."""
        return self.original is not None or any(map(has_original, own_parameters(self.base).values()))

    def check_unmerged(self) -> None:
        if self.original is not None:
            raise ValueError("an adapter is already merged: call unmerge() first")
        if self.is_merged():
            raise ValueError("another layer has merged an adapter into this weight: unmerge that one first")

    def check_loadable(self) -> None:
        if self.is_merged():
            raise ValueError(MERGED_FIRST)

    def check_trains(self) -> None:
        """Warn if training would not change the adapters, since one is merged."""
        if self.original is None or not (self.training and torch.is_grad_enabled()):
            return
        parameters = [own_parameters(self.base).get(name) for name in self.merges]
        for name in self.merges.values():
            parameters += getattr(self, name).parameters()
        train = any(p is not None and p.requires_grad for p in parameters)
        if train and not torch.compiler.is_compiling():
            warnings.warn(
                "an adapter is merged into the weights, so training does not change it: call unmerge() first "
                "or, to use the merged weights, eval() or requires_grad_(False)",
                stacklevel=3,
            )

    def keep_original(self) -> tuple[Tensor, ...]:
        """Copy the weights before they are merged; return them, of sharded ones the part of this rank."""
        weights = self.own_weights()
        self.original = tuple(w.clone() for w in weights)
        MERGED[id(self)] = self
        return tuple(map(local_part, weights))

    def unmerge(self) -> None:
        """Restore the weights as they were before `merge`, to the bit."""
        if self.original is None:
            raise ValueError("no adapter is merged")
        weights = self.own_weights()
        for w, before in zip(weights, self.original, strict=True):
            check_same_shards(w, before)
        for w, before in zip(weights, self.original, strict=True):
            local_part(w).copy_(local_part(before))
        self.original = None
        MERGED.pop(id(self), None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as nn.Module does; of merged weights as they were before `merge`."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name in self.merges:
            weight, key = own_parameters(self.base).get(name), f"{prefix}base.{name}"
            before = original_of(weight)
            if weight is not None and before is not None and key in state:
                check_same_shards(weight, before)
                state[key] = before
        return state

    def fit(self, state: Mapping[str, Any], prefix: str) -> list[str]:
        return [MERGED_FIRST] if self.refuses(state, prefix) else super().fit(state, prefix)

    def refuses(self, state: Mapping[str, Any], prefix: str) -> bool:
        return self.is_merged() and any(key.startswith(prefix) for key in state)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if self.refuses(state_dict, prefix):
            raise ValueError(MERGED_FIRST)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Mergeable":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        if self.original is not None:
            self.original = tuple(map(fn, self.original))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        if isinstance(self.original, Tensor):  # pickled by a LoRALinear of before
            self.original = (self.original,)
        if self.original is not None:
            MERGED[id(self)] = self


def has_original(weight: Tensor | None) -> bool:
    return original_of(weight) is not None


def original_of(weight: Tensor | None) -> Tensor | None:
    """Return what this parameter was before a layer merged an adapter into it, None if no layer did."""
    for layer in [ref() for ref in MERGED.valuerefs()]:  # a list: other threads may merge meanwhile
        if layer is None:
            continue
        own = own_parameters(layer.base)
        for name, before in zip(layer.merges, layer.original or (), strict=False):
            if weight is not None and own.get(name) is weight:
                return before
    return None


def check_same_shards(weight: Tensor, before: Tensor) -> None:
    """Raise ValueError if the weight was sharded since an adapter was merged into it."""
    shards = [(t.shape, getattr(t, "placements", None)) for t in (weight, before)]
    if shards[0] != shards[1]:
        raise ValueError(
            "the weight was sharded after an adapter was merged into it, and what it was before was not: "
            "shard the layer with its adapter, and merge then, or shard `base` alone in its place"
        )
