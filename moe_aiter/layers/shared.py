"""The expert that every token goes to."""

import torch
from torch import Tensor, nn

from ..kernels.base.activations import get_activation
from ..kernels.base.check import check_sizes
from ..kernels.experts.glu import glu


class SharedExpert(nn.Module):
    """A dense MLP, gated or plain: down(act(gate_up(x))), times sigmoid(gate(x)) with `gate`."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        interleaved: bool = False,
        gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_sizes(shared_intermediate=intermediate)
        self.activation, self.interleaved = activation, interleaved
        where = {"device": device, "dtype": dtype}
        width = get_activation(activation).parts * intermediate
        self.gate_up = nn.Linear(hidden, width, bias=bias, **where)
        self.down = nn.Linear(intermediate, hidden, bias=bias, **where)
        self.gate = nn.Linear(hidden, 1, bias=False, **where) if gate else None

    def reset_parameters(self) -> None:
        for part in self.children():
            part.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        out = self.down(glu(self.gate_up(x), self.activation, self.interleaved))
        return out if self.gate is None else out * self.gate(x).sigmoid()

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, interleaved={self.interleaved}"


def new_shared(hidden: int, intermediate: int, gate: bool, mlp: dict) -> SharedExpert | None:
    if gate and not intermediate:
        raise ValueError("shared_gate=True, but shared_intermediate is 0: there is no shared expert to gate")
    return SharedExpert(hidden, intermediate, gate=gate, **mlp) if intermediate else None
