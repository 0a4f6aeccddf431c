"""Experts under routing that the caller has already decided."""

import torch
from torch import Tensor, nn

from ..kernels.base.activations import get_activation
from ..kernels.base.check import (
    cast_as_linear,
    check_axes,
    check_float,
    check_parameter_dtype,
    check_sizes,
    checked,
    renamed,
)
from ..kernels.experts.mlp import mix_experts
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..routing.plan import make_plan
from .experts import WithOptions


class OptimizedMoELayer(WithOptions):
    """AITER's example of an MoE forward pass, as a module that trains.

        out[t] = sum_j routing_weights[t, j] * (act(x[t] @ w1[e]) @ w2[e]),  e = expert_ids[t, j]

    AITER's example leaves the order open.  Here the activation comes first, then the routing weights, then
    the sum over a token's experts: only this order is a mixture of experts.  Sums are float32, rounded once.

    Parameters `w1` (E, H, F) and `w2` (E, F, H) are drawn from N(0, 1), as in the example.  They are not
    scaled: load a checkpoint, or initialise them yourself.  For a gated activation w1 is (E, H, 2F), gate
    columns first.  The layer uses both without a copy, except 8-bit copies with `fp8`, as for `Experts`.

    By default the layer is float16 on a GPU, as in the example; without a GPU it is float32 on the CPU, where
    float16 is slow.  torch.set_default_device and `with torch.device(...)` work as for nn.Linear.
    """

    @checked
    def __init__(
        self, hidden_dim: int, num_experts: int, expert_dim: int, *, activation: str = "gelu",
        fp8: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        check_parameter_dtype(dtype)
        check_sizes(hidden_dim=hidden_dim, num_experts=num_experts, expert_dim=expert_dim)
        if device is None:
            device = torch.get_default_device()
            if device.type == "cpu" and torch.cuda.is_available():
                device = torch.device("cuda")
        if dtype is None:
            dtype = torch.float32 if torch.device(device).type == "cpu" else torch.float16
        self.hidden_dim, self.num_experts, self.expert_dim = hidden_dim, num_experts, expert_dim
        self.options = ExpertOptions(activation, fp8=fp8)
        width = get_activation(activation).projections * expert_dim
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, width, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num_experts, expert_dim, hidden_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w1)
        nn.init.normal_(self.w2)

    @renamed(order="expert_ids")
    def forward(self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> Tensor:
        """Send `x` (T, H) to `expert_ids` (T, k), weighted by `routing_weights` (T, k); returns (T, H).

        `expert_ids` int32 or int64: -1 drops a choice, which adds nothing and gets no gradient; the same
        expert twice counts twice.  `routing_weights` of any floating dtype.  `x` in the dtype of the weights,
        or any under torch.autocast.  Differentiable in x, w1, w2 and routing_weights; `main_grad` works as
        for Experts.  Raises ValueError for sizes that disagree, TypeError for dtypes.
        """
        check_axes(x=(x, "T, H"), expert_ids=(expert_ids, "T, k"), w1=(self.w1, "E, H, F"))
        x, w1, w2 = cast_as_linear(x, self.w1, self.w2)
        check_float(x=x, w1=w1, w2=w2)
        main_grads = [getattr(w, "main_grad", None) for w in (self.w1, self.w2)]
        main_grads = [None if g is None else g.mT for g in main_grads]
        weights = ExpertWeights(w1.mT, w2.mT, None, None, *main_grads)
        plan = make_plan(expert_ids, self.num_experts)
        return mix_experts(x, weights, routing_weights, plan, self.options)

    def extra_repr(self) -> str:
        sizes = f"{self.hidden_dim}, num_experts={self.num_experts}, expert_dim={self.expert_dim}"
        return f"{sizes}, activation={self.activation!r}, fp8={self.fp8!r}"
