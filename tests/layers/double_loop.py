"""The oracle of every layer test: each token, each of its experts, one at a time, in plain torch."""

import torch
import torch.nn.functional as F

LIMITED = "swiglu_limit(2.5, 1.5, 0.75, -0.5)"
CAPPED = "swiglu_softcap(1.5, 2.5)"


def limited(gate, up, gate_max, up_limit, alpha, up_offset):
    gate, up = gate.clamp(max=gate_max), up.clamp(-up_limit, up_limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def capped(x, cap):
    return torch.tanh(x / cap) * cap


ACTIVATIONS = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "swiglu_oai": lambda gate, up: limited(gate, up, 7, 7, 1.702, 1),
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda up: F.relu(up) ** 2,
    LIMITED: lambda gate, up: limited(gate, up, 2.5, 1.5, 0.75, -0.5),
    CAPPED: lambda gate, up: capped(gate, 1.5) * torch.sigmoid(gate) * capped(up, 2.5),
}
GATED = ("swiglu", "swiglu_oai", LIMITED, CAPPED, "geglu", "geglu_tanh", "reglu")


def mlp(x, gate_up, down, gate_up_bias, down_bias, activation, interleaved=False):
    """One expert, one token: (H,) -> (H,)."""
    z = F.linear(x, gate_up, gate_up_bias)
    if activation not in GATED:
        return F.linear(ACTIVATIONS[activation](z), down, down_bias)
    gate, up = (z[0::2], z[1::2]) if interleaved else z.chunk(2)
    return F.linear(ACTIVATIONS[activation](gate, up), down, down_bias)


def experts_loop(x, expert_ids, routing_weights, params, activation="swiglu", interleaved=False):
    """(T, H) -> (T, H), for `params` named as those of Experts."""
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    weights = [params.get(name) for name in names]
    # a sum of nothing still depends on everything, with the gradient 0
    zero = sum(w.flatten()[:0].sum() for w in (x, routing_weights, *weights) if w is not None)
    weights = [None if w is None else w.unbind(0) for w in weights]
    rows = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for j in range(expert_ids.shape[1]):
            e = int(expert_ids[t, j])
            if e >= 0:
                y = mlp(x[t], *(None if w is None else w[e] for w in weights), activation, interleaved)
                total = total + routing_weights[t, j].to(y.dtype) * y
        rows.append(total)
    return torch.stack(rows) + zero.to(x.dtype) if rows else x * 0 + zero.to(x.dtype)


def router_loop(x, params, top_k, score="softmax", renormalize=True, scale=1.0):
    """Experts and weights of each token, chosen by the definition; scores and logits in at least float32."""
    width = torch.promote_types(x.dtype, torch.float32)
    bias = params.get("router.bias")
    logits = F.linear(
        x.to(width), params["router.weight"].to(width), None if bias is None else bias.to(width)
    )
    p = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "topk_softmax": logits}[score]
    expert_ids = torch.tensor(
        [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:top_k] for row in p.tolist()],
        dtype=torch.int64,
        device=x.device,
    ).view(-1, top_k)
    weights = p.gather(1, expert_ids)
    if score == "topk_softmax":
        weights = weights.softmax(1)
    elif renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return expert_ids, weights * scale, logits


def moe_loop(x, params, top_k, activation="swiglu", interleaved=False, **scoring):
    """(T, H) -> (T, H), for `params` named as those of MoE."""
    expert_ids, weights, _ = router_loop(x, params, top_k, **scoring)
    inside = {k.removeprefix("experts."): v for k, v in params.items() if k.startswith("experts.")}
    out = experts_loop(x, expert_ids, weights, inside, activation, interleaved)
    if "shared.down.weight" in params:
        names = ("gate_up.weight", "down.weight", "gate_up.bias", "down.bias")
        weights = [params.get(f"shared.{name}") for name in names]
        shared = [mlp(row, *weights, activation, interleaved) for row in x]
        if "shared.gate.weight" in params:
            gate = params["shared.gate.weight"][0]
            shared = [(row @ gate).sigmoid() * y for row, y in zip(x, shared, strict=True)]
        out = out + torch.stack(shared)
    return out
