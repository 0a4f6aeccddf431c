"""Cases of the layers: experts, and the whole MoE with its router."""

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import moe_aiter
from moe_aiter.kernels.experts.glu import glu as public_glu
from moe_aiter.routing.plan import make_plan

from ..layers.double_loop import ACTIVATIONS, GATED, experts_loop, mlp
from . import choosing, loops
from .draw import DEVICE, Draw
from .hold import Case, Loss, target
from .products import wide_or
from .routes import (
    PlainRoute,
    balance,
    draw_choice,
    draw_offsets,
    draw_scoring,
    hide,
    seen,
    sequence_balance,
    squared,
)

BESIDE = ("load_balance_coef", "sequence_balance_coef", "global_balance_coef", "z_loss_coef")


def draw_activation(draw: Draw) -> dict:
    activation = draw.option("swiglu", *ACTIVATIONS, chance=0.7)
    return {"activation": activation, "interleaved": activation in GATED and draw.flip(0.3)}


def expert_tensors(
    draw: Draw, E: int, H: int, width: int, inner: int, dtype, bias: bool
) -> dict[str, Tensor]:
    """The parameters of `Experts` with values and strides that are drawn."""
    found = {
        "gate_up": draw.weights(E, H, width, dtype=dtype).mT,
        "down": draw.weights(E, inner, H, dtype=dtype).mT,
    }
    if bias:
        found["gate_up_bias"] = draw.numbers(E, width, dtype=dtype)
        found["down_bias"] = draw.numbers(E, H, dtype=dtype)
    return found


@target
def glu(draw: Draw) -> Case:
    dtype, how = draw.dtype(), draw_activation(draw)
    gated = how["activation"] in GATED
    R, width = draw.size(), draw.size()
    tensors = {"z": draw.numbers(R, 2 * width if gated else width, dtype=dtype, scale=3.0)}

    def ours(z):
        return public_glu(z, *how.values())

    def plain(z):
        formula = ACTIVATIONS[how["activation"]]
        wide = z.to(loops.sum_dtype(z.dtype))
        if not gated:
            return formula(wide).to(z.dtype)
        gate, up = (wide[:, 0::2], wide[:, 1::2]) if how["interleaved"] else wide.chunk(2, 1)
        return formula(gate, up).to(z.dtype)

    return Case(ours, plain, tensors)


@target
def experts(draw: Draw) -> Case:
    """expert_mlp, Experts and keep_fp8_weights, with main gradients, recomputation and chunks of columns."""
    dtype, how, bias = draw.dtype(), draw_activation(draw), draw.flip()
    T, E, k = draw.size(high=20), draw.count(), draw.count(high=4)
    H, inner = draw.size(high=40), draw.size(high=40)
    eight = draw.flip(0.25)
    if eight:
        dtype, H, inner = draw.dtype(), max(H, 1), max(inner, 1)
    ids = draw.experts(T, k, E)
    memory = {"row_chunks": draw.option(None, 1, 3), "recompute": draw.pick("none", "none", "z")}
    memory["fp8"] = draw.pick("e4m3", "e4m3_all", "block") if eight else None
    width = (2 if how["activation"] in GATED else 1) * inner
    tensors = {
        "x": hide(draw.numbers(T, H, dtype=dtype), (ids >= 0).any(1)),
        "routing_weights": draw.numbers(T, k, dtype=wide_or(draw, dtype)),
        **expert_tensors(draw, E, H, width, inner, dtype, bias),
    }
    layer = None
    if H and inner and draw.flip():
        layer = moe_aiter.Experts(E, H, inner, bias=bias, **how, **memory, device=DEVICE, dtype=dtype)
    sums = {n: draw.dense(draw.numbers(*tensors[n].shape, dtype=torch.float32)) for n in ("gate_up", "down")}
    main = layer is None and draw.flip(0.3)

    def ours(x, routing_weights, **params):
        plan = make_plan(ids, E)
        with moe_aiter.keep_fp8_weights():
            if layer is not None:
                return functional_call(layer, params, (x, routing_weights, plan))
            weights = params.pop("gate_up"), params.pop("down")
            return moe_aiter.expert_mlp(x, *weights, routing_weights, plan, **how, **params, **memory)

    def with_sums(x, routing_weights, **params):
        """The gradients of the weights added to what is there, and taken out again."""
        held = {n: t.clone() for n, t in sums.items()}
        leaves = {n: t.detach() for n, t in params.items()}
        for name in ("gate_up", "down"):
            leaves[name].requires_grad_()
        plan = make_plan(ids, E)
        weights = leaves.pop("gate_up"), leaves.pop("down")
        kept = {f"{n}_main_grad": t for n, t in held.items()}
        rest = how | memory | leaves | kept
        out = moe_aiter.expert_mlp(x.detach(), *weights, routing_weights.detach(), plan, **rest)
        out.backward(torch.ones_like(out))
        assert all(w.grad is None for w in weights), "a weight with a main_grad has a .grad"
        return out.detach(), held["gate_up"], held["down"]

    def plain(x, routing_weights, **params):
        return experts_loop(x, ids, routing_weights, params, **how)

    def plain_with_sums(x, routing_weights, **params):
        leaves = {n: t.detach().requires_grad_() for n, t in params.items()}
        out = experts_loop(x.detach(), ids, routing_weights.detach(), leaves, **how)
        grads = torch.autograd.grad(out, [leaves[n] for n in sums], torch.ones_like(out))
        added = [(s + g).to(loops.wider(torch.float32, x)) for s, g in zip(sums.values(), grads, strict=True)]
        return out.detach(), *added

    coarse = torch.float8_e4m3fn if eight else dtype
    if main:
        return Case(with_sums, plain_with_sums, tensors, gradients=False, coarse=coarse)
    return Case(ours, plain, tensors, coarse=coarse)


@target
def optimized(draw: Draw) -> Case:
    """OptimizedMoELayer, whose weights are (E, in, out)."""
    dtype, T, E, k = draw.dtype(), draw.size(high=20), draw.count(), draw.count(high=4)
    H, inner = draw.size(1, 40), draw.size(1, 40)
    activation = draw.pick(*ACTIVATIONS)
    ids = draw.experts(T, k, E)
    layer = moe_aiter.OptimizedMoELayer(H, E, inner, activation=activation, device=DEVICE, dtype=dtype)
    width = (2 if activation in GATED else 1) * inner
    tensors = {
        "x": hide(draw.numbers(T, H, dtype=dtype), (ids >= 0).any(1)),
        "routing_weights": draw.numbers(T, k, dtype=wide_or(draw, dtype)),
        "w1": draw.weights(E, H, width, dtype=dtype),
        "w2": draw.weights(E, inner, H, dtype=dtype),
    }

    def ours(x, routing_weights, w1, w2):
        return functional_call(layer, {"w1": w1, "w2": w2}, (x, ids, routing_weights))

    def plain(x, routing_weights, w1, w2):
        params = {"gate_up": w1.mT, "down": w2.mT}
        return experts_loop(x, ids, routing_weights, params, activation)

    return Case(ours, plain, tensors)


class PlainMoE:
    """The layer by its definition, token by token."""

    def __init__(self, draw: Draw, how: dict, k: int, mask: Tensor | None, bias: Tensor | None):
        self.how, self.k, self.mask, self.offsets = how, k, mask, None
        scoring = {name: how[name] for name in ("score", "renormalize", "scale")}
        self.route = PlainRoute(how["choice"], k, scoring, bias, mask)
        self.kept, self.loss_scale = None, 1.0
        self.zero = 0 if how["zero_compute"] is None else how["zero_compute"].count

    def losses(self, scores: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        """Their sum, each times its coefficient."""
        out = loops.nothing(scores)
        one = balance(scores, ids, self.mask, self.zero)
        out = out + (self.how["load_balance_coef"] + self.how["global_balance_coef"]) * one
        if self.how["sequence_balance_coef"]:
            sequences = sequence_balance(scores, ids, self.offsets, self.mask, self.zero)
            out = out + self.how["sequence_balance_coef"] * sequences
        return out + self.how["z_loss_coef"] * squared(logits, self.mask)

    def __call__(self, x: Tensor, **params: Tensor):
        wide = loops.sum_dtype(x.dtype)
        W, b = params["router.weight"].to(wide), params.get("router.bias")
        visible = seen(x.to(wide), self.mask)
        logits = seen(visible @ W.mT if b is None else visible @ W.mT + b, self.mask)
        ids, weights, scores = self.route(logits)
        kept = self.within_capacity(ids, weights, scores)
        inside = {n.removeprefix("experts."): t for n, t in params.items() if n.startswith("experts.")}
        act, real = (self.how["activation"], self.how["interleaved"]), scores.shape[1] - self.zero
        latent = seen(x, self.mask) @ params["to_latent.weight"].mT if self.how["latent"] else x
        out = experts_loop(latent, kept.masked_fill(kept >= real, -1), weights, inside, *act)
        if self.how["latent"]:
            out = seen(out @ params["from_latent.weight"].mT, self.mask)
        if self.zero and self.how["zero_compute"].identity:
            same = (kept >= real) & (kept < real + self.how["zero_compute"].identity)
            out = out + (seen(x, self.mask) * (weights * same).sum(1, keepdim=True)).to(out.dtype)
        if "shared.down.weight" in params:
            out = out + self.shared(x, params)
        return out, Loss(self.losses(scores, logits, ids) * self.loss_scale)

    def within_capacity(self, ids: Tensor, weights: Tensor, scores: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = ids
            if (capacity := self.how["capacity"]) is not None and len(ids):
                rows = ids.tolist(), weights.tolist(), scores.tolist()
                tokens = len(ids) if self.mask is None else int(self.mask.sum())
                kept = choosing.over_capacity(*rows, tokens, capacity, scores.shape[1] - self.zero)
                self.kept = torch.tensor(kept, dtype=torch.int64, device=ids.device)
        return self.kept

    def shared(self, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        names = ("gate_up.weight", "down.weight", "gate_up.bias", "down.bias")
        weights = [params.get(f"shared.{name}") for name in names]
        act = self.how["activation"], self.how["interleaved"]
        x = seen(x, self.mask)
        rows = [mlp(row, *weights, *act) for row in x]
        if "shared.gate.weight" in params:
            gate = params["shared.gate.weight"][0]
            rows = [(row @ gate).sigmoid() * y for row, y in zip(x, rows, strict=True)]
        return seen(torch.stack(rows), self.mask) if rows else x * 0


def draw_moe(draw: Draw, E: int, k: int) -> dict:
    """The options of a layer."""
    choice = draw_choice(draw, E, k)
    how = draw_activation(draw) | draw_scoring(draw, k, choice, E)
    how |= {"choice": choice, "bias": draw.flip(0.3), "capacity": None}
    how["selection_bias"] = (choice is None or choice.takes_bias) and draw.flip(0.2)
    if (choice is None or choice.takes_capacity) and draw.flip(0.25):
        drop = draw.pick("position", "probability")
        how["capacity"] = moe_aiter.Capacity(draw.pick(0.25, 1.0, 1.5), drop)
    if draw.flip(0.3):
        how |= {"shared_intermediate": draw.size(1, 24), "shared_gate": draw.flip()}
    how["zero_compute"] = None
    if E > 1 and draw.flip(0.2):
        zero = draw.form.randint(1, E - 1)
        identity = draw.form.randint(0, zero)
        how["zero_compute"] = moe_aiter.ZeroCompute(identity, zero - identity)
    how["latent"] = draw.size(1, 33) if draw.flip(0.2) else 0
    how |= {name: draw.pick(0.0, 0.0, 0.0, 0.5) for name in BESIDE}
    return how | {"row_chunks": draw.option(None, 2), "recompute": draw.option("none", "z")}


@target
def moe(draw: Draw) -> Case:
    """MoE with its router; x and the router hold few different numbers, whose logits every dtype has."""
    dtype, E, H, inner = draw.dtype(), draw.count(high=12), draw.size(1, 33), draw.size(1, 33)
    k = draw.count(high=min(E, 4))
    how = draw_moe(draw, E, k)
    shape = draw.pick((draw.size(high=16),), (draw.size(high=4), draw.size(high=6)))
    T = torch.Size(shape).numel()
    mask = draw.mask(T) if draw.flip(0.3) else None
    real = E - (how["zero_compute"].count if how["zero_compute"] else 0)
    layer = moe_aiter.MoE(H, inner, real, k, jitter=0.0, **how, device=DEVICE, dtype=dtype)
    tensors = {"x": hide(draw.grid(T, H, dtype=dtype, step=0.25, most=4), mask)}
    for name, p in layer.named_parameters():
        if name == "router.weight":
            tensors[name] = draw.grid(E, H, dtype=dtype, step=1 / 16, most=8)
        elif name == "router.bias":
            tensors[name] = draw.grid(E, dtype=dtype, step=1 / 16, most=8)
        else:
            wide = p.shape if p.dim() > 1 else (1, *p.shape)
            tensors[name] = draw.weights(*wide[:-2], wide[-1], wide[-2], dtype=dtype).mT.reshape(p.shape)
    bias = None
    if how["selection_bias"]:
        bias = draw.grid(E, dtype=torch.float32, step=1 / 64, most=20)
        layer.router.selection_bias.copy_(bias)
    plain = PlainMoE(draw, how, k, mask, bias)
    given = {"mask": None if mask is None else mask.view(shape)}
    plain.offsets = range(0, T + 1, max(shape[-1], 1))
    if draw.flip(0.2):
        plain.offsets = given["cu_seqlens"] = draw_offsets(draw, T)
    saved, training = draw.flip(0.2), draw.flip(0.8)
    if not training:
        how |= dict.fromkeys(BESIDE, 0.0)
    layer.train(training)
    returned = draw.flip(0.3)
    if draw.flip(0.3):
        plain.loss_scale = draw.pick(0.25, 8.0)
        moe_aiter.set_loss_scale(layer, plain.loss_scale)
    if returned:
        moe_aiter.set_aux_loss(layer, "return")

    def ours(x, **params):
        if layer.load is not None:
            layer.load.zero_()

        def run(x):
            return functional_call(layer, params, (x.view(*shape, H),), given)

        out = checkpoint(run, x, use_reentrant=False) if saved else run(x)
        beside = [Loss(moe_aiter.aux_loss(layer) * plain.loss_scale)] if returned else []
        return out.view(T, H), *beside

    return Case(ours, plain, tensors)


@target
def moe_as_given(draw: Draw) -> Case:
    """MoE with experts, and maybe weights, that were recorded."""
    dtype, E, H, inner = draw.dtype(), draw.count(high=9), draw.size(1, 33), draw.size(1, 33)
    k, T = draw.count(high=min(E, 4)), draw.size(high=16)
    ids, how = draw.experts(T, k, E), draw_scoring(draw, k)
    layer = moe_aiter.MoE(H, inner, E, k, **how, device=DEVICE, dtype=dtype)
    tensors = {"x": draw.numbers(T, H, dtype=dtype), "router.weight": draw.weights(H, E, dtype=dtype).mT}
    inside = expert_tensors(draw, E, H, 2 * inner, inner, dtype, False)
    tensors |= {f"experts.{name}": t for name, t in inside.items()}
    if draw.flip():
        tensors["weights"] = draw.numbers(T, k, dtype=torch.float32)
    route = PlainRoute(None, k, how)
    route.ids = ids.long()

    def ours(x, weights=None, **params):
        given = {"expert_ids": ids, "routing_weights": weights, "return_routing": True}
        out, found = functional_call(layer, params, (x,), given)
        return out, found.routing.scores

    def plain(x, weights=None, **params):
        wide = loops.sum_dtype(x.dtype)
        logits = x.to(wide) @ params["router.weight"].to(wide).mT
        _, own, scores = route(logits)
        names = {name: params[f"experts.{name}"] for name in inside}
        return experts_loop(x, ids, own if weights is None else weights, names), scores

    return Case(ours, plain, tensors)
