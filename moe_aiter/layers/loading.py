"""What modules do with a state before it is loaded, by load_state_dict and by `load_sharded`."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..kernels.base.check import FLOATS
from ..private_api import own_buffers, own_parameters


class Loading(nn.Module):
    """A module that makes room for a state, and refuses codes of another dtype, which a copy would cast.

    A state has tensors by name, or what else has a shape and a dtype.
    """

    def fit(self, state: Mapping[str, Any], prefix: str) -> list[str]:
        """Make room for what `state` has under `prefix`, and return why this cannot be loaded.

        Floats of 16 and more bits can be cast.  Other shapes are left to torch, which refuses them.
        """
        self.make_room(state, prefix)
        problems = []
        for name, t in (own_parameters(self) | own_buffers(self)).items():
            saved: Any = state.get(f"{prefix}{name}")
            if t is None or getattr(saved, "shape", None) != t.shape or saved.dtype == t.dtype:
                continue
            if not {saved.dtype, t.dtype} <= {*FLOATS}:
                problems.append(
                    f"{prefix}{name} is {saved.dtype} in the state and {t.dtype} here: make the model in the "
                    "format that was saved, for example by the same `quantize`"
                )
        return problems

    def make_room(self, state: Mapping[str, Any], prefix: str) -> None:
        """Give buffers that not all states have, or not in one shape, the form of this state's."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if problems := self.fit(state_dict, prefix):
            rest[-1].extend(problems)  # torch raises them, strict or not
        else:
            super()._load_from_state_dict(state_dict, prefix, *rest)
