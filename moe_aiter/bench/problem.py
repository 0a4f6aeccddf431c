"""What the contenders are given, and what they should make of it."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from ..routing.router import route
from .shapes import Shape


@dataclasses.dataclass
class Problem:
    """Inputs and weights that all contenders share.  `renew` draws new inputs in place."""

    shape: Shape
    x: Tensor  # (T, H)
    dout: Tensor  # (T, H)
    router: Tensor  # (E, H)
    gate_up: Tensor  # (E, 2I, H)
    down: Tensor  # (E, H, I)
    expert_ids: Tensor  # (T, k) int64
    routing_weights: Tensor  # (T, k) float32

    @torch.no_grad()
    def renew(self, seed: int) -> None:
        """New tokens, gradients and routing: the logits are normal, so the experts' shares are ragged."""
        torch.manual_seed(seed)
        self.x.normal_()
        self.dout.normal_()
        routing = route(self.x.float() @ self.router.float().T, self.shape.top_k)
        self.expert_ids.copy_(routing.expert_ids)
        self.routing_weights.copy_(routing.routing_weights)


def new_problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> Problem:
    """A problem with inputs of variance 1, and weights that keep it near 1."""
    torch.manual_seed(0)
    T, H, width, E, k = dataclasses.astuple(shape)

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).mul_(fan_in**-0.5)

    problem = Problem(
        shape,
        x=normal(T, H).requires_grad_(),
        dout=normal(T, H),
        router=normal(E, H, fan_in=H).requires_grad_(),
        gate_up=normal(E, 2 * width, H, fan_in=H).requires_grad_(),
        down=normal(E, H, width, fan_in=width).requires_grad_(),
        expert_ids=torch.zeros(T, k, dtype=torch.int64, device=device),
        routing_weights=torch.zeros(T, k, device=device).requires_grad_(),
    )
    problem.renew(0)
    return problem


def for_loop(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> Tensor:
    """The experts one by one in plain torch: the definition, and the yardstick of every error."""
    out = torch.zeros_like(x)
    for e, (up_weight, down_weight) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        token, j = torch.where(expert_ids == e)
        gate, up = F.linear(x[token], up_weight).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down_weight)
        out.index_add_(0, token, (y * routing_weights[token, j, None]).to(x.dtype))
    return out


def routed_for_loop(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, router: Tensor) -> Tensor:
    """`for_loop` with weights from the router, for a choice of experts already made."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = (x.to(wide) @ router.to(wide).T).softmax(-1)  # (T, E)
    weights = scores.gather(1, expert_ids)
    return for_loop(x, gate_up, down, expert_ids, weights / weights.sum(1, keepdim=True))


def truth(problem: Problem, expert_ids: Tensor, routed: bool, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of x, gate_up, down and the router or the routing weights, computed in `dtype`."""
    last = problem.router if routed else problem.routing_weights
    leaves = [
        leaf.detach().to(torch.promote_types(dtype, torch.float32) if leaf.dtype == torch.float32 else dtype)
        for leaf in (problem.x, problem.gate_up, problem.down, last)
    ]
    x, gate_up, down, last = (leaf.requires_grad_() for leaf in leaves)
    out = (routed_for_loop if routed else for_loop)(x, gate_up, down, expert_ids, last)
    gradients = torch.autograd.grad(out, (x, gate_up, down, last), problem.dout.to(out.dtype))
    return [out.detach(), *gradients]
