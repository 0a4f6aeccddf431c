"""The mixture-of-experts layer: a token is routed, its experts run, their outputs add up."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..dispatch import is_plain, is_transformed
from ..kernels._check import check_sizes, check_tensor
from ..kernels.activations import get_activation
from ..kernels.glu import glu
from ..routing.balance import count_choices
from ..routing.choices import GroupLimit
from ..routing.losses import attach_loss, load_balance_loss, z_loss
from ..routing.plan import RoutePlan, make_plan
from ..routing.router import Router, Routing
from .experts import Experts

# as they are here: a class can be given another `forward` later
ROUTER_CALL, EXPERTS_CALL = ((kind.__call__, kind.forward) for kind in (Router, Experts))


class MoERouting(NamedTuple):
    """What one forward pass decided, for losses and statistics."""

    routing: Routing  # expert_ids, routing_weights, scores and logits of the T tokens
    plan: RoutePlan  # order, rank and group_sizes


class MoE(nn.Module):
    """Top-k mixture of experts in place of a transformer's MLP: (..., H) -> (..., H).

        out[t] = sum_j s[t, j] * expert[e_tj](x[t]) + shared(x[t])

    Experts    `num_experts` MLPs of width `intermediate`: see `Experts` for `activation` and `interleaved`,
               and for `row_chunks` and `recompute`, which trade time for memory.
    Router     `top_k`, `score`, `renormalize`, `scale` and `choice`: see `route`.
    Shared     `shared_intermediate` > 0 adds a dense MLP of that width which sees every token; several shared
               experts are one of their total width.  `shared_gate` multiplies its output by
               sigmoid(w . x), as in Qwen2-MoE.
    Balance    `selection_bias` lets experts be chosen by score + router.selection_bias, which `balance_step`
               moves after each optimizer step by the choices counted in `load` since the last.
    `bias` gives router, experts and shared expert biases.
    Another module may take the place of `router`: (T, H) -> Routing, or of `experts`: as `Experts.forward`.

    Losses.  With `load_balance_coef` or `z_loss_coef` above 0, in training mode, every gradient is what it
    would be with coef * loss added to the training loss (see `load_balance_loss`, `z_loss`); the output is
    unchanged.  Their gradient enters as the backward pass comes by, and knows nothing of what the training
    loss was multiplied by.  So if you scale that, by a GradScaler for float16 or by 1/n for n
    micro-batches, either scale the coefficients alike or leave them 0, take `return_routing=True` and add the
    losses yourself.

    state_dict keys: router.weight (E, H), experts.gate_up (E, 2I, H), experts.down (E, H, I), and where asked
    for router.bias, experts.gate_up_bias, experts.down_bias, shared.gate_up.weight, shared.down.weight,
    shared.gate.weight, and their biases, and router.selection_bias (E,).  `load` (E,) int64 counts the choices
    since the last `balance_step`, in training mode and once under activation checkpointing; it is 0 between
    two steps, and not saved.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        interleaved: bool = False,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        choice: GroupLimit | None = None,
        selection_bias: bool = False,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        load_balance_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        row_chunks: int | None = None,
        recompute: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.load_balance_coef, self.z_loss_coef = load_balance_coef, z_loss_coef
        where = {"device": device, "dtype": dtype}
        mlp = {"activation": activation, "bias": bias, "interleaved": interleaved, **where}
        scoring = {"score": score, "renormalize": renormalize, "scale": scale, "choice": choice}
        scoring["selection_bias"] = selection_bias
        self.router = Router(hidden, num_experts, top_k, bias=bias, **scoring, **where)
        memory = {"row_chunks": row_chunks, "recompute": recompute}
        self.experts = Experts(num_experts, hidden, intermediate, **mlp, **memory)
        if shared_gate and not shared_intermediate:
            raise ValueError(
                "shared_gate=True, but shared_intermediate is 0: there is no shared expert to gate"
            )
        shared = (
            SharedExpert(hidden, shared_intermediate, gate=shared_gate, **mlp)
            if shared_intermediate
            else None
        )
        self.shared = shared
        load = torch.zeros(num_experts, dtype=torch.int64, device=device) if selection_bias else None
        self.register_buffer("load", load, persistent=False)

    def reset_parameters(self) -> None:
        """Draw every parameter anew; after `to_empty`, say."""
        for part in (self.router, self.experts, self.shared):
            if part is not None:
                part.reset_parameters()
        if self.load is not None:
            self.load.zero_()

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, MoERouting]:
        """(..., H) -> (..., H), in the dtype of `x`; with `return_routing` also the MoERouting of the tokens,
        which are the leading axes of `x` flattened.

        `x` must have the dtype of the weights; under torch.autocast the result has its dtype, as from
        nn.Linear, and the router stays float32.  Raises ValueError if the last axis is not H, TypeError for
        dtypes that differ.
        """
        check_tensor("x", x)
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x is {tuple(x.shape)} but the layer needs (..., H={self.hidden})")
        tokens = x.reshape(-1, self.hidden)  # (T, H)
        routing, expert_tokens = self.route(tokens, return_routing)
        plan = make_plan(routing.expert_ids, self.num_experts)
        if self.load is not None and self.training:
            count_choices(self.load, plan.group_sizes)
        out = self.experts(expert_tokens, self.with_losses(routing, plan), plan)  # (T, H)
        if self.shared is not None:
            out = out + self.shared(tokens)
        out = out.view(x.shape)
        return (out, MoERouting(routing, plan)) if return_routing else out

    def route(self, tokens: Tensor, return_routing: bool) -> tuple[Routing, Tensor]:
        """What the router decides, without scores where nobody asks for them; and the experts' tokens."""
        if type(self.router).forward is not Router.forward:
            return self.router(tokens), tokens  # a router of one's own takes the tokens alone
        need_scores = return_routing or (self.has_losses() and self.load_balance_coef != 0)
        if self.is_private(tokens):
            return self.router.pass_on(tokens, need_scores)
        return self.router(tokens, need_scores=need_scores), tokens

    def is_private(self, tokens: Tensor) -> bool:
        """Whether the gradient of the tokens that the experts give is for the router alone.

        It is where it comes from `Experts`, by plain autograd, and nothing is hooked to either module.
        """
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and tokens.requires_grad):
            return False
        router, experts = self.router, self.experts
        changed = is_changed(router, ROUTER_CALL) or is_changed(experts, EXPERTS_CALL)
        return not changed and is_plain((tokens, router.weight, router.bias)) and not is_transformed()

    def has_losses(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def with_losses(self, routing: Routing, plan: RoutePlan) -> Tensor:
        """The routing weights, whose backward pass also starts those of the losses."""
        weights = routing.routing_weights
        if not self.has_losses():
            return weights
        if self.load_balance_coef:
            loss = load_balance_loss(routing.scores, group_sizes=plan.group_sizes)
            weights = attach_loss(weights, self.load_balance_coef * loss)
        if self.z_loss_coef:
            weights = attach_loss(weights, self.z_loss_coef * z_loss(routing.logits))
        return weights

    def extra_repr(self) -> str:
        return f"load_balance_coef={self.load_balance_coef}, z_loss_coef={self.z_loss_coef}"


def is_changed(module: nn.Module, known: tuple) -> bool:
    """Whether a call of this module is not just that of the `forward` known for it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    hooks = hooks or module._backward_pre_hooks or nn.modules.module._has_any_global_hook()
    kind = type(module)
    own = (kind.__call__, kind.forward) != known or "forward" in vars(module)
    return own or bool(hooks) or module._compiled_call_impl is not None


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
