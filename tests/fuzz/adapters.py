"""Cases of adapters, of layers quantised for inference, and of steps of an optimizer."""

import torch
import torch.nn.functional as F
from torch.func import functional_call

import moe_aiter
from moe_aiter.routing.plan import make_plan

from ..layers.double_loop import experts_loop
from . import loops
from .draw import DEVICE, Draw
from .hold import Ambiguous, Case, target
from .layers import draw_activation, expert_tensors
from .products import wide_or


def draw_lora(draw: Draw) -> dict:
    rank = draw.count(1, 8)
    how = {"rank": rank, "alpha": draw.pick(None, 2.0 * rank), "rslora": draw.flip(0.3)}
    return how | {"dora": draw.flip(0.3)}


def adapted(weight, A, B, scaling, magnitude):
    """W + c B A of one adapter; with DoRA its rows have the lengths `magnitude`, by a constant factor.

    Ambiguous where W and c B A cancel: DoRA enlarges what remains, and W x and c B A x are rounded apart.
    """
    change = scaling * (B @ A)
    full = weight + change
    if magnitude is None:
        return full
    wide = full.to(loops.sum_dtype(full.dtype))
    norms, parts = wide.detach().norm(dim=-1), [t.detach().norm(dim=-1) for t in (weight, change)]
    if (4 * norms < parts[0] + parts[1]).any():
        raise Ambiguous
    norms = norms.clamp_min(torch.finfo(torch.float32).tiny)
    return (wide * (magnitude / norms)[..., None]).to(full.dtype)


@target
def lora_linear(draw: Draw) -> Case:
    """An adapter for each row, for each segment, or one for all."""
    dtype, M, K, N, how = draw.dtype(), draw.size(), draw.size(1), draw.size(1), draw_lora(draw)
    kind = draw.pick("rows", "segments", "one")
    count = 1 if kind == "one" else draw.count()
    base = torch.nn.Linear(K, N, bias=draw.flip(), device=DEVICE, dtype=dtype)
    layer = moe_aiter.LoRALinear(base, count, **how)
    scaling, given = layer.lora.scaling, {}
    if kind == "segments":
        lens, sizes, M = draw.group_sizes(draw.count())
        of_segment = [draw.name(count) for _ in sizes]
        given = {"adapter_ids": draw.index(of_segment), "seg_lens": lens}
        numbers = [n for n, size in zip(of_segment, sizes, strict=True) for _ in range(size)]
        numbers += [-1] * (M - len(numbers))
    elif kind == "rows":
        numbers = [draw.name(count) for _ in range(M)]
        given = {"adapter_ids": draw.index(numbers)}
    else:
        numbers = [0] * M
    tensors = {"x": draw.numbers(M, K, dtype=dtype), "base.weight": draw.weights(K, N, dtype=dtype).mT}
    if base.bias is not None:
        tensors["base.bias"] = draw.numbers(N, dtype=dtype)
    tensors["lora.A"] = draw.weights(count, K, how["rank"], dtype=dtype).mT
    tensors["lora.B"] = draw.weights(count, how["rank"], N, dtype=dtype).mT
    if how["dora"]:
        tensors["lora.magnitude"] = draw.numbers(count, N, dtype=dtype).abs() + 0.5

    def ours(x, **params):
        return functional_call(layer, params, (x,), given)

    def plain(x, **params):
        weight, bias = params["base.weight"], params.get("base.bias")
        A, B = params["lora.A"].unbind(0), params["lora.B"].unbind(0)
        m = params["lora.magnitude"].unbind(0) if how["dora"] else [None] * count
        full = [*(adapted(weight, *pair, scaling, of) for *pair, of in zip(A, B, m, strict=True)), weight]
        rows = [F.linear(row, full[n], bias) for row, n in zip(x, numbers, strict=True)]  # -1: the last
        zero = loops.nothing(*params.values(), x)
        return loops.stack(rows, x, N, x.dtype, zero)

    frozen = ("base.weight", "base.bias")
    return Case(ours, plain, tensors, frozen=frozen)


@target
def lora_experts(draw: Draw) -> Case:
    dtype, how, bias = draw.dtype(), draw_activation(draw), draw.flip()
    T, E, k = draw.size(high=20), draw.count(), draw.count(high=4)
    H, inner, lora = draw.size(1, 40), draw.size(1, 40), draw_lora(draw)
    count = 1 if lora["dora"] or draw.flip() else draw.count(2, 4)
    ids, numbers = draw.experts(T, k, E), [draw.name(count) for _ in range(T)]
    given = (draw.index(numbers),) if count > 1 else ()
    layer = moe_aiter.Experts(E, H, inner, bias=bias, **how, device=DEVICE, dtype=dtype)
    width = layer.gate_up.shape[1]
    layer = moe_aiter.LoRAExperts(layer, count, **lora)
    base = expert_tensors(draw, E, H, width, inner, dtype, bias)
    tensors = {
        "x": draw.numbers(T, H, dtype=dtype),
        "routing_weights": draw.numbers(T, k, dtype=wide_or(draw, dtype)),
        **{f"base.{name}": t for name, t in base.items()},
    }
    for name, (inside, outside) in {"gate_up": (H, width), "down": (inner, H)}.items():
        tensors[f"{name}_lora.A"] = draw.weights(E * count, inside, lora["rank"], dtype=dtype).mT
        tensors[f"{name}_lora.B"] = draw.weights(E * count, lora["rank"], outside, dtype=dtype).mT
        if lora["dora"]:
            tensors[f"{name}_lora.magnitude"] = draw.numbers(E, outside, dtype=dtype).abs() + 0.5
    scaling = layer.down_lora.scaling
    merged = draw.flip(0.2) and count == 1

    def ours(x, routing_weights, **params):
        plan = make_plan(ids, E)
        if not merged:
            return functional_call(layer, params, (x, routing_weights, plan, *given))
        if layer.original is not None:
            layer.unmerge()
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p.copy_(params[name])
        layer.merge()
        return layer(x, routing_weights, plan)

    def plain(x, routing_weights, **params):
        weights = {name: params[f"base.{name}"] for name in base}
        outs = [experts_loop(x, ids, routing_weights, weights, **how)] if count > 1 else []  # without adapter
        for n in range(count):
            each = dict(weights)
            for name in ("gate_up", "down"):
                A, B = (params[f"{name}_lora.{factor}"][n::count] for factor in "AB")
                each[name] = adapted(each[name], A, B, scaling, params.get(f"{name}_lora.magnitude"))
            outs.append(experts_loop(x, ids, routing_weights, each, **how))
        if count == 1:
            return outs[0]
        rows = [outs[n + 1][t] for t, n in enumerate(numbers)]
        return loops.stack(rows, x, H, x.dtype, loops.nothing(*params.values(), x, routing_weights))

    frozen = tuple(n for n in tensors if n.startswith("base.") or (merged and "_lora." in n))
    return Case(ours, plain, tensors, frozen=frozen, coarse=dtype)


@target
def quantized(draw: Draw) -> Case:
    """What `quantize` makes of a linear layer and of experts: as near as 8 bits are."""
    dtype, to = draw.dtype(), draw.pick("int8", "fp8", "fp16")
    T, E, k, how = draw.size(high=20), draw.count(), draw.count(high=4), draw_activation(draw)
    H, inner = draw.size(1, 40), draw.size(1, 40)
    ids = draw.experts(T, k, E)
    inside = moe_aiter.Experts(E, H, inner, **how, device=DEVICE, dtype=dtype)
    linear = torch.nn.Linear(H, inner, device=DEVICE, dtype=dtype)
    tensors = {
        "x": draw.numbers(T, H, dtype=dtype),
        "routing_weights": draw.numbers(T, k, dtype=wide_or(draw, dtype)),
        **expert_tensors(draw, E, H, inside.gate_up.shape[1], inner, dtype, False),
        "weight": draw.weights(H, inner, dtype=dtype).mT,
        "bias": draw.numbers(inner, dtype=dtype),
    }

    def ours(x, routing_weights, gate_up, down, weight, bias):
        with torch.no_grad():
            for p, t in zip(
                (*inside.parameters(), linear.weight, linear.bias), (gate_up, down, weight, bias), strict=True
            ):
                p.copy_(t)
        # in a container: a model is a module with these inside
        model = moe_aiter.quantize(torch.nn.ModuleList([inside, linear]), to)
        return model[0](x, routing_weights, make_plan(ids, E)), model[1](x)

    def plain(x, routing_weights, gate_up, down, weight, bias):
        params = {"gate_up": gate_up, "down": down}
        return experts_loop(x, ids, routing_weights, params, **how), F.linear(x, weight, bias)

    coarse = {"int8": torch.float8_e4m3fn, "fp8": torch.float8_e4m3fn, "fp16": torch.bfloat16}[to]
    return Case(ours, plain, tensors, gradients=False, coarse=coarse)


@target
def main_grad_step(draw: Draw) -> Case:
    """A step of SGD over micro-batches: the gradients of the experts add up in their main gradients."""
    dtype, T, E, k = draw.dtype(), draw.size(high=12), draw.count(), draw.count(high=3)
    H, inner, batches = draw.size(1, 24), draw.size(1, 24), draw.count(1, 3)
    ids = [draw.experts(T, k, E) for _ in range(batches)]
    optimized = draw.flip(0.3)
    tensors = {
        "x": draw.numbers(batches, T, H, dtype=dtype),
        "routing_weights": draw.numbers(batches, T, k, dtype=torch.float32),
        **expert_tensors(draw, E, H, 2 * inner, inner, dtype, False),
    }

    def new_layer(gate_up, down):
        where = {"activation": "swiglu", "device": DEVICE, "dtype": dtype}
        if optimized:
            layer = moe_aiter.OptimizedMoELayer(H, E, inner, **where)
            weights = {"w1": gate_up.mT, "w2": down.mT}
        else:
            layer, weights = moe_aiter.Experts(E, H, inner, **where), {"gate_up": gate_up, "down": down}
        for name, t in weights.items():
            getattr(layer, name).data.copy_(t)
        return layer

    def ours(x, routing_weights, gate_up, down):
        layer = new_layer(gate_up, down)
        sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
        moe_aiter.use_main_grad(layer, sgd)
        for i in range(batches):
            plan = ids[i] if optimized else make_plan(ids[i], E)
            args = (plan, routing_weights[i]) if optimized else (routing_weights[i], plan)
            out = layer(x[i], *args)
            out.backward(torch.ones_like(out))
        sgd.step()
        after = [p.detach() for p in layer.parameters()]
        return [t.mT for t in after] if optimized else after

    def plain(x, routing_weights, gate_up, down):
        params = {"gate_up": gate_up.detach(), "down": down.detach()}
        leaves = {n: t.clone().requires_grad_() for n, t in params.items()}
        for i in range(batches):
            out = experts_loop(x[i], ids[i], routing_weights[i], leaves)
            out.backward(torch.ones_like(out))
        return [params[n] - leaves[n].grad for n in params]

    return Case(ours, plain, tensors, gradients=False)


@target
def balance_step(draw: Draw) -> Case:
    """The selection bias after a step, by counting choices."""
    T, E = draw.size(high=20), draw.count(high=9)
    k, rule, zero_mean = draw.count(high=min(E, 3)), draw.pick("sign", "proportional"), draw.flip()
    layer = moe_aiter.MoE(4, 4, E, k, renormalize=False, selection_bias=True, device=DEVICE)
    ids = draw.experts(T, k, E)
    tensors = {"x": draw.numbers(T, 4, dtype=torch.float32), "bias": draw.numbers(E, dtype=torch.float32)}

    def ours(x, bias):
        layer.router.selection_bias.copy_(bias)
        layer(x, expert_ids=ids)
        moe_aiter.balance_step(layer, 0.01, rule=rule, zero_mean=zero_mean)
        assert not layer.load.any(), "the counts are not 0 after a step"
        return layer.router.selection_bias.clone()

    def plain(x, bias):
        chosen = [e for row in ids.tolist() for e in row]
        counts = [chosen.count(e) for e in range(E)]
        mean = sum(counts) / E
        steps = [mean - c for c in counts]
        if rule == "sign":
            steps = [(v > 0) - (v < 0) for v in steps]
        else:
            steps = [v / mean if mean else 0.0 for v in steps]
        steps = torch.tensor(steps, dtype=torch.float64, device=bias.device) * 0.01
        steps = steps - steps.mean() if zero_mean else steps
        return (bias + steps).to(bias.dtype)

    return Case(ours, plain, tensors, gradients=False)
