"""The mixture-of-experts layer: route each token, run its experts, add up their outputs."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..invariance import INVARIANT, batch_invariant, check_twins, invariant, make_twins, refuse_batch
from ..kernels.base.check import (
    check_device,
    check_flags,
    check_float,
    check_group,
    check_not_negative,
    check_sizes,
    check_tensor,
    checked,
)
from ..kernels.rows.route import decide
from ..op import is_plain, is_transformed, is_unwatched
from ..private_api import is_changed, own_buffers, process_group
from ..routing.balance import count_choices, sum_over_ranks
from ..routing.capacity import Capacity, drop_over_capacity
from ..routing.choices import Choice
from ..routing.fixed import route_to
from ..routing.losses import balance_of, check_sequences, sequence_balance_loss, z_loss
from ..routing.plan import RoutePlan, make_plan
from ..routing.quantile import count_margins
from ..routing.router import Router, Routing, hide, without_padding
from ..routing.zero_compute import ZeroCompute, rows_of
from .auxiliary import AuxLosses
from .dense_gradient import with_dense_gradient
from .experts import Experts, apply_linear, ids_for, new_latent, new_shared, parts_to_draw
from .loading import Loading

COUNTS = "load", "margins"  # the buffers of a layer that no state dict has
# as they are here: a class, or an object, can be given others later
ROUTER_CALL, EXPERTS_CALL = ((kind.__call__, kind.forward) for kind in (Router, Experts))
ROUTER_CHOICE = Router.choose
COEFS = "load_balance_coef", "sequence_balance_coef", "global_balance_coef", "z_loss_coef"


class MoERouting(NamedTuple):
    """The decisions of one forward pass, for losses and statistics."""

    routing: Routing  # expert_ids, routing_weights, scores and logits of the T tokens
    plan: RoutePlan  # order, rank and group_sizes, also of a `ZeroCompute`, whose rows come last


class MoE(Loading):
    """Top-k mixture of experts in place of a transformer's MLP: (..., H) -> (..., H).

        out[t] = sum_j s[t, j] * expert[e_tj](x[t]) + shared(x[t])

    Experts    `num_experts` MLPs of width `intermediate`.  `activation`, `interleaved`, `row_chunks` and
               `recompute` (time for memory) and `fp8` (precision for time): see `Experts`.
    Router     `top_k`, `score`, `renormalize`, `scale` and `choice`: see `route`; `jitter`: see `Router`.
    Capacity   `capacity` limits how many choices an expert accepts: see `Capacity`.
    Zero       `zero_compute` adds experts without weights among which the router chooses too: `ZeroCompute`.
    Latent     `latent` > 0 lets the routed experts act on vectors of that width L:
                   `out[t] = from_latent @ sum_j s[t, j] * expert[e_tj](to_latent @ x[t]) + shared(x[t])`
               as in Nemotron 3 Super and Ultra; router and shared expert see x.  Both maps have no bias.
    Router's   `dense_router_gradient` gives the router the gradient of all experts in training mode, by a
    gradient   straight-through estimator (DenseMixer, layers/dense_gradient.py).  In the backward pass every
               token then visits all other experts once.
    Shared     `shared_intermediate` > 0 adds a dense MLP of that width for every token.  For several shared
               experts pass their total width.  `shared_gate` multiplies the MLP's output by
               sigmoid(w . x), as in Qwen2-MoE.
    Balance    With `selection_bias` the router chooses experts by score + router.selection_bias.  After each
               optimizer step `balance_step` adjusts that bias by the choices that `load` has counted.
               `quantile_bins` > 0 (Kimi K3: 1000) also counts what `balance_step(rule="quantile")` needs.
    `bias` gives router, experts and shared expert biases.
    `batch_invariant` turns batch invariance on for this layer: see `enable_batch_invariance`.
    You may replace `router` by another module (T, H) -> Routing, and `experts` by one with the arguments of
    `Experts.forward`.

    Losses.  With a coefficient above 0, in training mode, the gradients are those of the training loss plus
    coef * loss; the output is unchanged.
      load_balance_coef      `load_balance_loss` of the tokens of a call
      sequence_balance_coef  `sequence_balance_loss`; the axis of `x` before the last is a sequence, unless
                             `forward` gets the `cu_seqlens` of packed ones
      global_balance_coef    `load_balance_loss` whose f counts all tokens since the last `balance_step`; call
                             `balance_step` after each optimizer step.  With `global_balance_group`, a process
                             group, f counts the tokens of all ranks: one all-reduce of E numbers a call
      z_loss_coef            `z_loss`
    The backward pass adds these gradients.  If you multiply the training loss, by a GradScaler's scale or by
    1/n for n micro-batches, call `set_loss_scale(model, factor)` before backward.  Or call
    `set_aux_loss(model, "return")` once: the layer then adds nothing, and you add `aux_loss(model)` to the
    training loss.

    Under activation checkpointing of any kind, the second forward pass reuses the routing of the first, and
    `load` counts that routing once: see docs/memory.md.

    state_dict keys: router.weight (E, H), experts.gate_up (E, 2I, H) and experts.down (E, H, I).  Options add
    router.bias, experts.gate_up_bias, experts.down_bias, shared.gate_up.weight, shared.down.weight,
    shared.gate.weight, their biases, to_latent.weight (L, H), from_latent.weight (H, L) (experts then have L
    in place of H), and router.selection_bias (E,).  The buffer `load` (E,), int64, counts the choices in
    training mode since the last `balance_step`; it is not saved.  With Z experts without weights,
    the router's tensors and `load` have E + Z entries.
    """

    load: Tensor | None
    margins: Tensor | None
    global_balance_group: "torch.distributed.ProcessGroup | str | None"
    monitor: Any = None  # a Monitor's recorder, while there is one
    routes: Any = None  # records or replays routes, while `record_routes` or `replay_routes` is open
    _loss_scale: Tensor | None = None  # None is 1
    batch_invariant: bool = False  # of a layer that 0.2 pickled

    drawn_parts = "router", "experts", "to_latent", "from_latent", "shared"

    @checked
    def __init__(
        self, hidden: int, intermediate: int, num_experts: int, top_k: int, *, activation: str = "swiglu",
        bias: bool = False, interleaved: bool = False, score: str = "softmax",
        renormalize: bool | None = None, scale: float = 1.0, choice: Choice | None = None,
        selection_bias: bool = False, quantile_bins: int = 0, jitter: float = 0.0,
        capacity: Capacity | None = None, zero_compute: ZeroCompute | None = None, latent: int = 0,
        dense_router_gradient: bool = False, shared_intermediate: int = 0, shared_gate: bool = False,
        load_balance_coef: float = 0.0, sequence_balance_coef: float = 0.0, global_balance_coef: float = 0.0,
        global_balance_group: "torch.distributed.ProcessGroup | None" = None, z_loss_coef: float = 0.0,
        row_chunks: int | None = None, recompute: str = "none", fp8: str | None = None,
        batch_invariant: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        coefs = load_balance_coef, sequence_balance_coef, global_balance_coef, z_loss_coef
        check_not_negative(**dict(zip(COEFS, coefs, strict=True)))
        self.load_balance_coef, self.sequence_balance_coef, self.global_balance_coef, self.z_loss_coef = coefs
        if global_balance_group is not None and not global_balance_coef:
            raise ValueError("global_balance_group is given, but global_balance_coef is 0")
        check_group(global_balance_group=global_balance_group)
        self.global_balance_group = global_balance_group
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        memory: dict[str, Any] = {"row_chunks": row_chunks, "recompute": recompute, "fp8": fp8}
        mlp = {"activation": activation, "bias": bias, "interleaved": interleaved, **where}
        scoring: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": scale}
        scoring |= {"choice": choice, "selection_bias": selection_bias, "jitter": jitter}
        if capacity is not None and choice is not None and not choice.takes_capacity:
            raise ValueError(f"capacity is given, but {choice} decides how many tokens an expert has")
        self.capacity, self.zero_compute, self.aux_losses = capacity, zero_compute, AuxLosses()
        self.set_batch_invariant(batch_invariant, choice)
        self.num_routed = num_experts + (0 if zero_compute is None else zero_compute.count)
        self.router = Router(hidden, self.num_routed, top_k, bias=bias, **scoring, **where)
        self.to_latent, self.from_latent = new_latent(hidden, latent, where)
        self.experts = Experts(num_experts, latent or hidden, intermediate, **mlp, **memory)
        self.shared = new_shared(hidden, shared_intermediate, shared_gate, mlp)
        self.set_dense_gradient(dense_router_gradient)
        self.set_counts(bool(selection_bias or global_balance_coef), quantile_bins, device)

    def set_batch_invariant(self, on: bool, choice: Choice | None) -> None:
        self.batch_invariant = on
        with invariant(on):
            self.check_by_token()
            if choice is not None:
                choice.check_by_token()

    def check_by_token(self) -> None:
        if self.capacity is not None:
            refuse_batch(f"{self.capacity} drops choices of a token because of other tokens")

    def set_dense_gradient(self, dense: bool) -> None:
        self.dense_router_gradient = dense
        used = {"choice": self.router.choice, "capacity": self.capacity, "zero_compute": self.zero_compute}
        for name, value in used.items():
            if dense and value is not None:
                raise ValueError(f"dense_router_gradient=True, but {name} is {value}: it needs a plain top-k")

    def set_counts(self, counts: bool, quantile_bins: int, device: torch.device | str | None) -> None:
        load = (self.num_routed,) if counts else None
        if quantile_bins != 0:
            check_quantile(self, quantile_bins)
        margins = (self.num_routed, quantile_bins) if quantile_bins != 0 else None
        for name, shape in (("load", load), ("margins", margins)):
            buffer = None if shape is None else torch.zeros(shape, dtype=torch.int64, device=device)
            self.register_buffer(name, buffer, persistent=False)
        self.register_load_state_dict_post_hook(follow_parameters)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "batch_invariant":
            check_flags(batch_invariant=value)
            if value:
                make_twins()
        before = own_buffers(self).get(name) if name in COUNTS else None
        if before is not None and before.is_meta and isinstance(value, Tensor):
            value = counts_on(value.device, before)  # transformers gives memory here that nothing has written
        super().__setattr__(name, value)

    def follow(self, device: torch.device) -> None:
        """Have the counts on the device of the tokens, wherever the layer was made."""
        for name in COUNTS:
            counts = getattr(self, name)
            if counts is not None and counts.device != device:
                setattr(self, name, counts_on(device, counts))
        if self._loss_scale is not None:
            _ = self.loss_scale

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoE":
        memo[id(self.global_balance_group)] = self.global_balance_group  # a process group has no copies
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(vars(self), memo))  # type: ignore[no-untyped-call]
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle writes: of a process group its name, which the first forward pass looks up."""
        group = self.global_balance_group
        return vars(self) | {"global_balance_group": getattr(group, "group_name", group)}

    def reset_parameters(self) -> None:
        """Draw every parameter anew; after `to_empty`, say.

        Raises TypeError, and changes nothing, if a part has no `reset_parameters`, as adapters and weights of
        4 or 8 bits have none.
        """
        for part in parts_to_draw(self):
            part.reset_parameters()
        for counts in (self.load, self.margins):
            if counts is not None:
                counts.zero_()

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
        expert_ids: Tensor | None = None, routing_weights: Tensor | None = None,
        adapter_ids: Tensor | None = None, return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, MoERouting]:  # fmt: skip
        """(..., H) -> (..., H), in the dtype of `x`; with `return_routing` also the MoERouting of the tokens,
        which are the leading axes of `x` flattened.

        `mask` (...), bool: tokens where it is False (padding) go to no expert, routed or shared.  Their
        output is 0, they are in no loss and no count, and their values, NaN included, affect no gradient.

        `cu_seqlens` (B + 1,), int32 or int64: the tokens of `x`, flattened, are B packed sequences, of which
        sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1].  Only `sequence_balance_coef` reads it.

        `expert_ids` (..., k) takes the place of the router's choice, `routing_weights` (..., k) that of its
        weights: to replay a recorded routing, or to route by a hash.  See `route_to`.

        `adapter_ids`, (...) or (batch,), is the adapter of each token, for `LoRAExperts` and `LoRALinear` in
        this layer; -1 means none.  Modules without adapters ignore it.

        `x` must have the dtype of the weights; under torch.autocast the result has its dtype, as from
        nn.Linear, and the router stays float32.  Raises ValueError if the last axis is not H, TypeError for
        dtypes that differ.
        """
        if return_routing is not False:
            check_flags(return_routing=return_routing)
        given = mask, cu_seqlens, expert_ids, routing_weights, adapter_ids, return_routing
        if not self.batch_invariant:
            return self.route_and_mix(x, *given)
        if not torch.compiler.is_compiling():
            with invariant():
                return self.route_and_mix(x, *given)
        check_twins()
        before, INVARIANT.default = INVARIANT.default, True  # of the trace: a compiler takes no thread's
        try:
            return self.route_and_mix(x, *given)
        finally:
            INVARIANT.default = before

    def route_and_mix(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, expert_ids: Tensor | None,
        routing_weights: Tensor | None, adapter_ids: Tensor | None, return_routing: bool,
    ) -> Tensor | tuple[Tensor, MoERouting]:  # fmt: skip
        """Do as `forward`."""
        self.check_by_token()
        tokens, mask, sequences = self.flattened(x, mask, cu_seqlens)
        if self.routes is not None:
            expert_ids, routing_weights = self.routes.given(x, expert_ids, routing_weights)
        expert_tokens, made = tokens, None
        if expert_ids is not None:
            routing = self.route_fixed(x, expert_ids, routing_weights, mask)
        elif routing_weights is not None:
            raise ValueError("routing_weights are given without their expert_ids")
        elif self.plans_few(tokens, mask, return_routing):
            routing, made = self.router.plan_few(tokens)
        else:
            routing, expert_tokens = self.route(tokens, return_routing, mask)
        if self.routes is not None:
            self.routes.see(routing, mask)
        plan = make_plan(routing.expert_ids, self.num_routed) if made is None else made
        if self.training and self.load is not None and self.load.device != x.device:
            self.follow(x.device)
        load = self.count(self.load, plan) if self.load is not None and self.training else None
        if self.margins is not None and self.training and isinstance(self.router, Router):
            scores, bias = routing.scores, self.router.selection_bias
            assert scores is not None and bias is not None  # as `check_quantile` says
            count_margins(self.margins, scores, bias, self.top_k, mask)
        weights = self.with_losses(routing, plan, load, sequences, mask)
        chosen = plan.group_sizes
        if self.capacity is not None:
            routing, plan = self.within_capacity(self.capacity, routing, plan, mask)
        if self.monitor is not None:
            self.monitor.record(routing, chosen, plan.group_sizes, mask, self.training)
        adapter_ids = None if adapter_ids is None else each_token(adapter_ids, x)
        out = self.mix(tokens, expert_tokens, routing, weights, plan, mask, adapter_ids)  # (T, H)
        if self.shared is not None:
            takes_ids = adapter_ids is not None and hasattr(self.shared, "takes_adapter_ids")
            ids = (adapter_ids,) if takes_ids else ()
            out = hide(out + self.shared(hide(tokens, mask), *ids), mask)
        out = out.view(x.shape)
        return (out, MoERouting(routing, plan)) if return_routing else out

    def flattened(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None, int | Tensor]:
        """Return the tokens (T, H), the mask (T,), and the length of each sequence or their `cu_seqlens`."""
        check_tensor("x", x)
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x is {tuple(x.shape)} but the layer needs (..., H={self.hidden})")
        tokens = x.reshape(-1, self.hidden)
        if mask is not None:
            check_padding(mask, x)
            mask = mask.reshape(-1)
        if cu_seqlens is not None:
            check_sequences(cu_seqlens, x=tokens)
            return tokens, mask, cu_seqlens
        return tokens, mask, x.shape[-2] if x.dim() > 1 else 1

    def route(
        self, tokens: Tensor, return_routing: bool, mask: Tensor | None = None
    ) -> tuple[Routing, Tensor]:
        """Return the routing, with scores only if they are needed, and the tokens for the experts."""
        router = self.router
        if type(router).forward is not Router.forward:
            routing: Routing = router(hide(tokens, mask))  # a custom router takes the tokens alone
            if mask is not None:
                routing = routing._replace(expert_ids=without_padding(routing.expert_ids, mask))
            return routing, tokens
        need_scores = return_routing or (self.has_losses() and self.needs_scores())
        if self.is_private(tokens) and not router.adds_noise():
            return router.pass_on(tokens, need_scores, mask)
        return router(tokens, need_scores=need_scores, mask=mask), tokens

    def plans_few(self, tokens: Tensor, mask: Tensor | None, return_routing: bool) -> bool:
        """Whether `Router.plan_few` does what `route` and `make_plan` do: without gradients, scores, padding
        or anyone who looks."""
        router, scores = self.router, self.margins is not None and self.training
        if mask is not None or return_routing or scores or self.routes is not None:
            return False
        if not is_unwatched(tokens) or is_transformed() or is_changed(router, ROUTER_CALL):
            return False
        return getattr(router.choose, "__func__", None) is ROUTER_CHOICE and not router.adds_noise()

    def route_fixed(
        self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor | None, mask: Tensor | None
    ) -> Routing:
        router = self.router
        if type(router).forward is not Router.forward:
            raise ValueError(f"expert_ids are given, but {type(router).__name__} has a forward of its own")
        tokens = x.reshape(-1, self.hidden)
        for name, t in (("expert_ids", expert_ids), ("routing_weights", routing_weights)):
            if t is not None:
                check_tensor(name, t)
                if t.dim() != x.dim() or t.shape[:-1] != x.shape[:-1]:
                    raise ValueError(f"{name} is {tuple(t.shape)} but x is {tuple(x.shape)}, (..., H)")
        expert_ids = expert_ids.reshape(tokens.shape[0], expert_ids.shape[-1])
        if routing_weights is not None:
            routing_weights = routing_weights.reshape(tokens.shape[0], routing_weights.shape[-1])
        routing: Routing = router(tokens, mask=mask, by=partial(
            route_to, expert_ids=expert_ids, routing_weights=routing_weights, score=router.score,
            # ids may be fewer than top_k
            renormalize=None if expert_ids.shape[1] == 1 else router.renormalize, scale=router.scale,
        ))  # fmt: skip
        return routing

    def mix(
        self, tokens: Tensor, expert_tokens: Tensor, routing: Routing, weights: Tensor, plan: RoutePlan,
        mask: Tensor | None, adapter_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sum of the outputs of each token's experts, (T, H), without the shared one."""
        ids = ids_for(self.experts, adapter_ids)
        if ids and self.dense_router_gradient:
            raise ValueError("adapter_ids are given, but dense_router_gradient=True has all tokens use one")
        zero, x = self.zero_compute, expert_tokens
        if zero is not None:
            plan = rows_of(plan, self.num_experts)
        if self.to_latent is not None:
            casts = not x.is_meta and torch.is_autocast_enabled(x.device.type)
            if type(self.to_latent) is nn.Linear and not casts:
                check_float(x=x, to_latent=self.to_latent.weight)
            x = apply_linear(self.to_latent, hide(x, mask), adapter_ids)
        out: Tensor = self.experts(x, weights, plan, *ids)
        if self.dense_router_gradient and self.has_losses() and routing.routing_weights.requires_grad:
            out = with_dense_gradient(out, x.detach(), self.experts, routing, self.router)
        if self.from_latent is not None:
            out = hide(apply_linear(self.from_latent, out, adapter_ids), mask)
        if zero is not None and zero.identity:
            weight = zero.identity_weight(routing.expert_ids, weights, self.num_experts)
            out = hide(out + (hide(tokens, mask) * weight).to(out.dtype), mask)
        return out

    def has_coefs(self) -> bool:
        return any(getattr(self, name) for name in COEFS)

    def needs_scores(self) -> bool:
        coefs = self.load_balance_coef, self.sequence_balance_coef, self.global_balance_coef
        return any(coefs) or self.dense_router_gradient

    def is_private(self, tokens: Tensor) -> bool:
        """Whether the experts' gradient of the tokens has no other reader than the router's backward pass.

        It is where it comes from `Experts`, by plain autograd, and nothing is hooked to either module.  With
        batch invariance it never counts: hooks, such as FSDP2's, would change the order in which autograd
        adds up the gradients of x.
        """
        if self.to_latent is not None or batch_invariant():
            return False
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and tokens.requires_grad):
            return False
        router, experts = self.router, self.experts
        changed = is_changed(router, ROUTER_CALL) or is_changed(experts, EXPERTS_CALL)
        return not changed and is_plain((tokens, router.weight, router.bias)) and not is_transformed()

    def has_losses(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def within_capacity(
        self, capacity: Capacity, routing: Routing, plan: RoutePlan, mask: Tensor | None
    ) -> tuple[Routing, RoutePlan]:
        limited = partial(drop_over_capacity, *routing[:2], plan, capacity, mask, self.zero_compute)
        expert_ids = decide("kept", limited, routing.expert_ids.shape[0], self.num_routed)
        return routing._replace(expert_ids=expert_ids), make_plan(expert_ids, self.num_routed)

    def count(self, load: Tensor, plan: RoutePlan) -> Tensor:
        """Count the choices, and return the counts for `global_balance_coef`.

        These are decided once: when a forward pass is repeated, later ones have been counted too.
        """
        count_choices(load, plan.group_sizes)
        if not self.global_balance_coef:
            return load
        group = self.global_balance_group
        if isinstance(group, str):
            self.global_balance_group = group = group_of_name(group)
        return decide("load", lambda: sum_over_ranks([load], group)[0], self.num_routed)

    def with_losses(self, routing: Routing, *inputs: Any) -> Tensor:
        """Return the routing weights, with the losses attached or kept; the rest is as for `losses`."""
        if self.has_losses():
            if losses := self.losses(routing, *inputs):
                return self.aux_losses.add(routing.routing_weights, losses, self._loss_scale)
        elif self.training:
            self.aux_losses.check()
        return routing.routing_weights

    def losses(
        self, routing: Routing, plan: RoutePlan, load: Any, sequences: int | Tensor, mask: Tensor | None
    ) -> list[Tensor]:
        """Return each loss with a coefficient, multiplied by it."""
        losses: list[Tensor] = []
        scores: Any = routing.scores  # as with `load`, `balance_of` raises where there are none
        zero = self.zero_compute
        if mask is not None and scores is not None:
            scores = scores.masked_fill(~mask[:, None], 0)
        if self.load_balance_coef:
            losses.append(self.load_balance_coef * balance_of(scores, plan.group_sizes, mask, zero))
        if self.sequence_balance_coef:
            length, packed = (None, sequences) if isinstance(sequences, Tensor) else (max(sequences, 1), None)
            loss = sequence_balance_loss(scores, routing.expert_ids, length, mask, zero, cu_seqlens=packed)
            losses.append(self.sequence_balance_coef * loss)
        if self.global_balance_coef:
            losses.append(self.global_balance_coef * balance_of(scores, load, mask, zero))
        if self.z_loss_coef:
            losses.append(self.z_loss_coef * z_loss(routing.logits, mask))
        return losses

    @property
    def loss_scale(self) -> Tensor:
        """The factor of the losses' gradients, a float32 scalar on the layer's device; see `set_loss_scale`.

        A layer on meta keeps the scalar on the CPU.  A CUDA graph reads the scalar if it was set, or read
        here, before the capture.
        """
        before, device = self._loss_scale, device_of(self)
        if device.type == "meta":  # where the factor would be lost
            device = torch.device("cpu")
        if before is None or before.device != device:
            value = 1.0 if before is None else before
            with torch.inference_mode(False):  # a training step could not use an inference tensor
                self._loss_scale = before = torch.as_tensor(value, dtype=torch.float32, device=device)
        return before

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        before = {name: counts for name in COUNTS if (counts := getattr(self, name)) is not None}

        def moved(t: Tensor) -> Tensor:
            try:
                return fn(t)
            except NotImplementedError:  # `to` copies nothing from meta, where counts have nothing to copy
                if any(t is counts for counts in before.values()):
                    return t
                raise

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]  # torch's
        for name, counts in before.items():  # which `to_empty` would have replaced by what memory held
            new = getattr(self, name)
            if new is not counts or counts.is_meta:
                own_buffers(self)[name] = counts_on(device_of(self) if new.is_meta else new.device, counts)
        if self._loss_scale is not None:
            _ = self.loss_scale  # follows the parameters to their device, and stays float32
        return self

    def extra_repr(self) -> str:
        always = COEFS[0], COEFS[-1]
        shown = {name: getattr(self, name) for name in COEFS}
        text = ", ".join(f"{name}={coef}" for name, coef in shown.items() if coef or name in always)
        for name in ("capacity", "zero_compute"):
            value = getattr(self, name)
            text = text if value is None else f"{text}, {name}={value}"
        return f"{text}, batch_invariant=True" if self.batch_invariant else text


def each_token(adapter_ids: Tensor, x: Tensor) -> Tensor:
    """Return ids (...), one for each index of the first axes of `x` (..., H), as (T,), one for each token."""
    check_tensor("adapter_ids", adapter_ids)
    axes, leading = adapter_ids.shape, x.shape[:-1]
    if not axes or axes != leading[: len(axes)]:
        raise ValueError(f"adapter_ids is {tuple(axes)} but x is {tuple(x.shape)}, (..., H)")
    return adapter_ids.reshape(*axes, *[1] * (len(leading) - len(axes))).expand(leading).reshape(-1)


def device_of(moe: MoE) -> torch.device:
    return next(chain(moe.parameters(), moe.experts.buffers())).device  # those of experts of 4 bits


def follow_parameters(moe: MoE, _: object) -> None:
    """A hook: load_state_dict(assign=True) moves parameters alone."""
    moe.follow(device_of(moe))


def counts_on(device: torch.device, counts: Tensor) -> Tensor:
    """Return `counts` on a device; zeros if they were on meta, where nothing is counted."""
    with torch.inference_mode(False):
        return torch.zeros_like(counts, device=device) if counts.is_meta else counts.to(device)


def group_of_name(name: str) -> "torch.distributed.ProcessGroup":
    """Return the process group of a layer that was pickled with it."""
    try:
        return process_group(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"the layer was pickled with the process group {name!r}, which this process does not have: make "
            "it, or set global_balance_group of the layer"
        ) from error


def check_quantile(moe: MoE, quantile_bins: int) -> None:
    check_sizes(quantile_bins=quantile_bins)
    router = moe.router
    problems = {
        "selection_bias is False: there is nothing to balance by": router.selection_bias is None,
        f"choice is {router.choice}": router.choice is not None,
        f"zero_compute is {moe.zero_compute}": moe.zero_compute is not None,
        f"score={router.score!r} has no largest value": router.score == "sqrt_softplus",
        f"top_k is {moe.top_k}, all of the experts": moe.top_k == moe.num_experts,
    }
    for problem, holds in problems.items():
        if holds:
            raise ValueError(f"quantile_bins is {quantile_bins}, but {problem}")


def check_padding(mask: Tensor, x: Tensor) -> None:
    check_tensor("mask", mask)
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask is {tuple(mask.shape)} but x is {tuple(x.shape)}, (..., H)")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    check_device(x=x, mask=mask)
