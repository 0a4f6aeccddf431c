"""Experts of transformers that lack its decorator `use_experts_implementation`.

`OTHERS` has the classes that run on our kernels all the same, by their full names, and `NOT_OURS` those that
cannot, with the reason.  Such a class gets a `forward` that asks the configuration of its model, as the
decorator's does: for our name it calls the function of the class in this file, with the same arguments.
"""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.base.check import FLOATS, cast_as_linear
from ..kernels.experts.mlp import mix_experts
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..kernels.grouped.gmm import gmm
from ..layers.by_step import Projection, experts_by_step
from ..layers.experts import local_part
from ..private_api import is_changed, is_of_torchao, own_modules, own_parameters
from ..routing.plan import make_plan
from .gates import FUNCTIONS, full_name, function_name

__all__: list[str] = []

NAME = "moe_aiter"
DECORATED = {  # what transformers' decorator says of a class that computes as most do
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}


class Between(NamedTuple):
    """The activation between the two products."""

    name: str | None  # what `expert_mlp` calls it; None if `function` runs between the products
    function: Callable[[Tensor], Tensor]  # (R, 2I) or (R, I) -> (R, I)


class Other(NamedTuple):
    """A class of experts."""

    forward: Callable[..., Any] | None  # of (module, between, *inputs); None: it only lacks the decorator
    activation: Callable[[nn.Module], nn.Module] | None = lambda module: module.act_fn
    gated: bool = True
    dropout: Callable[[nn.Module], nn.Module | None] = lambda module: None  # behind the activation
    parts: Callable[[nn.Module], Iterator[nn.Module]] = lambda module: iter(())  # whose forward is not called
    oldest: tuple[int, int] = (5, 7)  # the first transformers whose class computes this
    note: str = ""  # for `check`, if the class has no activation


def mix(
    x: Tensor, ids: Tensor, routing_weights: Tensor, gate_up: Tensor, down: Tensor, between: Between
) -> Tensor:
    """(T, H), the ids and weights of its choices (T, k), gate_up (E, width, H), down (E, H, I) -> (T, H)."""
    gate_up, down = cast_as_linear(gate_up, down)
    plan, rows = make_plan(ids, down.shape[0]), x.to(gate_up.dtype)
    if between.name is None:
        up, act = Projection(gate_up, None), between.function
        return experts_by_step(rows, up, act, Projection(down, None), routing_weights, plan).to(x.dtype)
    options = ExpertOptions(between.name)
    return mix_experts(rows, ExpertWeights(gate_up, down), routing_weights, plan, options).to(x.dtype)


# one class each


def longcat(module: Any, between: Between, x: Tensor, ids: Tensor, routing_weights: Tensor) -> Tensor:
    """An expert past the last one with weights is the identity; gate_up_proj has rows for these too."""
    last = module.num_routed_experts
    own, gate_up = ids < last, module.gate_up_proj[:last]
    out = mix(x, ids.where(own, -1), routing_weights, gate_up, module.down_proj, between)
    share = routing_weights.masked_fill(own, 0).sum(-1, keepdim=True)  # (T, 1)
    return out + (module.identity_expert(x) * share).to(x.dtype)


def llama4(module: Any, _: Between, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row is its token times the score, before the experts.  Only chosen experts get rows."""
    x = x.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)  # (T, E): 0 for experts that are not chosen
    weights, ids = scores.topk(module.top_k)
    rows = (x[:, None] * weights[..., None]).flatten(0, 1)  # (T*k, H)
    routed = module.experts(rows, ids.view(-1, 1)).view(*ids.shape, module.hidden_dim).sum(1)
    shared = module.shared_expert(x)
    return shared + routed.to(shared.dtype), logits


def llama4_experts(module: Any, between: Between, rows: Tensor, ids: Tensor | None = None) -> Tensor:
    """Without ids, `rows` has equally many for each expert, as transformers gives them."""
    rows, num_experts = rows.view(-1, module.hidden_size), module.gate_up_proj.shape[0]
    if ids is None:
        experts = torch.arange(num_experts, device=rows.device)
        ids = experts.repeat_interleave(len(rows) // num_experts)[:, None]
    ones = rows.new_ones(ids.shape)
    return mix(rows, ids, ones, module.gate_up_proj.mT, module.down_proj.mT, between)


def dbrx(module: Any, between: Between, x: Tensor, ids: Tensor, routing_weights: Tensor) -> Tensor:
    """Gate and up are two weights, which a copy joins."""
    shape = module.num_experts, -1, module.hidden_size
    gate, up, down = (getattr(module.mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    tokens = x.reshape(-1, module.hidden_size)
    return mix(tokens, ids, routing_weights, torch.cat([gate, up], 1), down.mT, between).view(x.shape)


def jetmoe(module: Any, between: Between, x: Tensor) -> Tensor:
    """The router sorts the choices: order (R,), the weights in that order, each expert's number of rows."""
    tokens = x.reshape(-1, module.input_size)
    order, _, gates, sizes, _ = module.router(tokens)
    sizes = torch.tensor(sizes, device=x.device)
    experts = torch.arange(len(sizes), device=x.device).repeat_interleave(sizes)
    ids = torch.empty_like(order).scatter(0, order, experts).view(-1, module.router.top_k)
    weights = torch.zeros_like(gates).scatter(0, order, gates).view(ids.shape)
    gate_up, down = module.input_linear.weight, module.output_linear.weight
    return mix(tokens, ids, weights, gate_up, down, between).view(x.shape) + module.bias


def jetmoe_product(module: Any, _: Between, rows: Tensor, sizes: list[int]) -> Tensor:
    """(R, in), sorted by expert -> (R, out)."""
    rows, weight = cast_as_linear(rows, module.weight)
    return gmm(rows, weight.mT, torch.tensor(sizes, device=rows.device), trans_rhs=False)


def switch(module: Any, between: Between, x: Tensor, chosen: Tensor, routing_weights: Tensor) -> Tensor:
    """chosen (T, 1, E) has a 1 for the token's expert, or none for a token above the capacity.

    Each expert has weights of its own, which a copy joins.
    """
    ids = chosen.argmax(-1).masked_fill(chosen.sum(-1) == 0, -1)  # (T, 1)
    up, down = (torch.stack([getattr(e, name).weight for e in module.values()]) for name in ("wi", "wo"))
    return mix(x, ids, routing_weights, up, down, between)


MODELS = "transformers.models."
OTHERS = {
    MODELS + "step3p7.modeling_step3p7.Step3p7Experts": Other(None),
    MODELS + "longcat_flash.modeling_longcat_flash.LongcatFlashExperts": Other(longcat),
    MODELS + "llama4.modeling_llama4.Llama4TextMoe": Other(
        llama4, lambda module: base(module.experts).act_fn
    ),
    MODELS + "llama4.modeling_llama4.Llama4TextExperts": Other(llama4_experts),
    MODELS + "dbrx.modeling_dbrx.DbrxExperts": Other(
        dbrx,
        lambda module: module.mlp.activation_fn,
        parts=lambda module: iter([module.mlp]),
        oldest=(5, 16),  # those before multiply by transposed weights
    ),
    MODELS + "jetmoe.modeling_jetmoe.JetMoeMoE": Other(
        jetmoe,
        lambda module: module.activation,
        parts=lambda module: iter([module.input_linear, module.output_linear]),
    ),
    MODELS + "jetmoe.modeling_jetmoe.JetMoeParallelExperts": Other(
        jetmoe_product, None, note="each is one grouped product, with attention between the two of a layer"
    ),
    MODELS + "switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": Other(
        switch,
        lambda module: module["expert_0"].act,
        gated=False,
        dropout=lambda module: module["expert_0"].dropout,
        parts=lambda module: (
            part for expert in module.values() for part in (expert, *own_modules(expert).values())
        ),
    ),
}
NOT_OURS = {
    MODELS + "doge.modeling_doge.DogeCDMoE": "each expert is one neuron, looked up in an embedding",
    MODELS + "nllb_moe.modeling_nllb_moe.NllbMoeExperts": (
        "transformers reads its router's mask as expert ids, so that experts 0 and 1 get all tokens"
    ),
    MODELS + "vitpose_backbone.modeling_vitpose_backbone.VitPoseNaiveMoe": (
        "each expert is one linear layer, and all experts run on every token"
    ),
}


# how a module runs


def class_of(module: nn.Module) -> str:
    """Return which class of `OTHERS` it has, or a subclass of (PEFT makes some), "" if none."""
    names = map(full_name, type(module).__mro__)
    return next((name for name in names if name in OTHERS), "")


def base(module: nn.Module) -> nn.Module:
    """Return the module in PEFT's wrapper around it, which calls it with the same arguments."""
    found: nn.Module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    return found


def reason_against(module: nn.Module, other: Other) -> str:
    """Return why a module's parts or weights keep it from running here, or "" if it can."""
    if other.forward is llama4:
        experts = base(module.experts)
        if not asks(experts):
            return f"its experts are {type(experts).__name__}"
        return reason_against(experts, OTHERS[class_of(experts)])
    parts = list(other.parts(module))
    for kind in dict.fromkeys(map(type, parts)):
        own = kind.__module__ in (type(module).__module__, "transformers.activations")
        if not own and not kind.__module__.startswith("torch.nn.modules."):
            return f"a part is {kind.__module__}.{kind.__name__}"
    for part in parts:
        if is_changed(part, (type(part).__call__, type(part).forward)):
            return f"its part {type(part).__name__} has hooks or another forward"
    found = (p for owner in (module, *parts) for p in own_parameters(owner).values())
    weights = [local_part(p) for p in found if p is not None]
    if torchaos := [p for p in weights if is_of_torchao(p)]:
        return f"a weight is a {type(torchaos[0]).__name__} of torchao"
    dtypes = {p.dtype for p in weights}
    if not dtypes <= set(FLOATS) or len(dtypes) > 1:
        return f"its weights are {' and '.join(sorted(map(str, dtypes)))}"
    return ""


def between_of(module: nn.Module, other: Other) -> Between:
    """Return what runs between the two products of a module of the class `other`."""
    if other.activation is None:
        return Between(None, lambda z: z)
    act, dropout = other.activation(module), other.dropout(module)
    if dropout is not None and dropout.p and dropout.training:
        return Between(None, lambda z: dropout(act(z)))
    name = FUNCTIONS.get(function_name(act), (None, None))[other.gated]
    if not other.gated:
        return Between(name, act)

    def gate(z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        return act(gate) * up

    return Between(name, gate)


def path_of_other(module: nn.Module) -> tuple[str, str]:
    """Return the path of a module of `OTHERS`, as `check` names it, and the reason."""
    if why := reason_of(module):
        return "not ours", why
    other = OTHERS[class_of(module)]
    if other.note:
        return "two products", other.note
    if (name := between_of(module, other).name) is None:
        return "two products", "its activation has no kernel or has hooks, or a dropout follows"
    return "fused", f"the activation {name} runs inside the products"


def reason_of(module: nn.Module) -> str:
    """Return why a module of `OTHERS` runs transformers' own code, "" if it does not."""
    other, implementation = OTHERS[class_of(module)], implementation_of(module)
    if other.oldest > transformers_version():
        oldest = ".".join(map(str, other.oldest))
        return f"transformers before {oldest} multiplies by the transposed weights of {type(module).__name__}"
    if not asks(module) or implementation is None:
        return f"its model was neither loaded nor switched to {NAME!r} after register()"
    if implementation != NAME:
        return f"its configuration has experts_implementation={implementation!r}"
    return reason_against(module, other)


def implementation_of(module: nn.Module) -> str | None:
    """The name in the configuration of a model or of experts."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def transformers_version() -> tuple[int, ...]:
    """Return the first two numbers of the version."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2]))


# how a module learns its implementation


def imported() -> Iterator[tuple[Any, Other]]:
    """The classes of `OTHERS` that are imported."""
    for name, other in OTHERS.items():
        file, _, kind = name.rpartition(".")
        if (found := getattr(sys.modules.get(file), kind, None)) is not None:
            yield found, other


def any_asks() -> bool:
    """Whether a class asks its configuration by `follow_configurations`."""
    return any(hasattr(found.forward, "is_ours") for found, _ in imported())


def follow_configurations() -> None:
    """Let each class of `OTHERS` that is imported ask its configuration for the implementation."""
    for found, other in imported():
        done = hasattr(found.forward, "__wrapped__")  # here, or by transformers' decorator
        if not done and other.oldest <= transformers_version():
            found.forward = following(found.forward, other)
            if other.forward is None:
                found.__init__ = keeping_configuration(found.__init__)
                for flag, value in DECORATED.items():
                    setattr(found, flag, value)


def keeping_configuration(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        self.config = config

    return __init__


def following(original: Callable[..., Any], other: Other) -> Callable[..., Any]:
    """Return a `forward` of `OTHERS` in place of transformers' own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if implementation_of(self) != NAME:
            return original(self, *args, **kwargs)
        decorated = ALL_EXPERTS_FUNCTIONS.get_interface(NAME, original)  # raises KeyError if not registered
        if other.forward is None:
            return decorated(self, *args, **kwargs)
        if reason_against(self, other):
            return original(self, *args, **kwargs)
        return other.forward(self, between_of(self, other), *args, **kwargs)

    forward.is_ours = True  # type: ignore[attr-defined]
    return forward


def asks(module: nn.Module) -> bool:
    """Whether its class is one of `OTHERS` and asks the configuration for the implementation."""
    return bool(class_of(module)) and hasattr(type(module).forward, "is_ours")


def give_configurations(model: nn.Module, given: str | dict[str, str] | None = None) -> None:
    """Give each module of `OTHERS` the configuration of its model, as transformers' decorator does.

    `given` is what `set_experts_implementation` was called with, None for a new model.  A module whose
    forward tensor parallelism replaced before its class could ask gets no configuration.
    """
    from transformers import PreTrainedModel

    for owner in filter(lambda m: isinstance(m, PreTrainedModel), model.modules()):
        others = [m for m in owner.modules() if asks(m) and (given is None or not replaced_before(m))]
        for module in others:
            module.config = owner.config
        if others and given is not None:
            name = given_to(model, given, owner.config)
            if NAME in (name, owner.config._experts_implementation):
                owner.config._experts_implementation = {"": name}  # and not of its parts


def replaced_before(module: nn.Module) -> bool:
    return "forward" in vars(module) and "config" not in vars(module)


def given_to(model: nn.Module, given: str | dict[str, str], config: Any) -> str | None:
    """Return the implementation for a part with this configuration; the keys are as for transformers."""
    if isinstance(given, str):
        return given
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    key = next((name for name, part in parts.items() if part is config), "")
    return given.get(key, config._experts_implementation)
