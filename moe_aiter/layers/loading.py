"""What modules do with a state before it is loaded, by load_state_dict and by `load_sharded`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..kernels.base.check import FLOATS
from ..private_api import own_buffers, own_modules, own_parameters


class Loading(nn.Module):
    """A module that makes room for a state, and refuses codes of another dtype, which a copy would cast.

    It refuses them for an nn.Linear that it has too: torch's would take codes, and only a strict load tells
    that their scales are left over.  A state has tensors by name, or what else has a shape and a dtype.
    """

    def fit(self, state: Mapping[str, Any], prefix: str) -> list[str]:
        """Make room for what `state` has under `prefix`, and return why this cannot be loaded.

        Floats of 16 and more bits can be cast.  Other shapes are left to torch, which refuses them.
        """
        self.make_room(state, prefix)
        tensors = own_parameters(self) | own_buffers(self)
        for part, module in own_modules(self).items():
            if isinstance(module, nn.Linear):
                tensors |= {f"{part}.{name}": t for name, t in own_parameters(module).items()}
        reasons = (
            why_not_cast(f"{prefix}{name}", state.get(f"{prefix}{name}"), t) for name, t in tensors.items()
        )
        return [why for why in reasons if why]

    def make_room(self, state: Mapping[str, Any], prefix: str) -> None:
        """Give buffers that not all states have, or not in one shape, the form of this state's."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if problems := self.fit(state_dict, prefix):
            rest[-1].extend(problems)  # torch raises them, strict or not
        else:
            super()._load_from_state_dict(state_dict, prefix, *rest)


def why_not_cast(key: str, saved: Any, t: Tensor | None) -> str:
    """Return why a tensor of a state is not copied to `t`, which has its shape, or ""."""
    if t is None or getattr(saved, "shape", None) != t.shape or saved.dtype == t.dtype:
        return ""
    if {saved.dtype, t.dtype} <= {*FLOATS}:
        return ""
    return (
        f"{key} is {saved.dtype} in the state and {t.dtype} here: make the model in the format that was "
        "saved, for example by the same `quantize`"
    )
