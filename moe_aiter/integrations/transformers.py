"""The experts of transformers' models: `experts_implementation="moe_aiter"`.

    from moe_aiter.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_aiter")

For a model that is loaded already, call `model.set_experts_implementation("moe_aiter")`.  It works for every
model whose experts have transformers' decorator `use_experts_implementation`: Mixtral, Qwen3-MoE, OLMoE,
DeepSeek-V3, gpt-oss and more.  Parameters keep their names, shapes and values, and so do checkpoints.
"""

import types
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.experts.glu import glu
from ..kernels.experts.mlp import expert_mlp
from ..layers.experts import cast_as_linear
from ..layers.lora import Projection, experts_by_step
from ..layers.training import FINDERS
from ..private_api import is_changed
from ..routing.plan import RoutePlan, make_plan

__all__ = ["known_gate", "register", "unregister"]

NAME = "moe_aiter"
ADAPTERS = "moe_aiter_adapters"  # of a module: by a weight's name, what has a method `low_rank(weight)`
OLDEST = (5, 7)  # those before know a fixed list of names

# activation functions by what they are called: f of a plain activation; f of a gated one, f(gate) * up
FUNCTIONS = {
    "torch.nn.modules.activation.SiLU": ("silu", "swiglu"),
    "transformers.activations.SiLUActivation": ("silu", "swiglu"),
    "transformers.activations.GELUActivation": ("gelu", "geglu"),
    "torch.nn.modules.activation.ReLU": ("relu", "reglu"),
    "transformers.activations.ReLUSquaredActivation": ("relu2", None),
}
BY_FUNCTION = None
OAI = {"limit": 7.0, "alpha": 1.702}
# methods `_apply_gate` by what they are called: whether gate and up come in turn, and which constants of the
# module must be what they are in "swiglu_oai", or BY_FUNCTION for f(gate) * up with f = module.act_fn
GATES = {
    "transformers.integrations.moe._default_apply_gate": (False, BY_FUNCTION),
    "transformers.models.beam.modeling_beam.BeamExperts._apply_gate": (False, BY_FUNCTION),
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": (True, OAI),
    "transformers.models.openai_privacy_filter.modeling_openai_privacy_filter."
    "OpenAIPrivacyFilterExperts._apply_gate": (False, OAI),
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": (
        False,
        {f"swiglu_{name}": value for name, value in OAI.items()},
    ),
}


def register() -> None:
    """Add `experts_implementation="moe_aiter"` to transformers.  Further calls change nothing.

    Raises ImportError if transformers is missing or older than 5.7.
    """
    interface().register(NAME, experts_forward)
    if summed_weights not in FINDERS:
        FINDERS.append(summed_weights)


def unregister() -> None:
    """Remove the name "moe_aiter" from transformers.

    The next forward pass of a model that still uses it raises an error.
    """
    interface()._global_mapping.pop(NAME, None)
    FINDERS[:] = [finder for finder in FINDERS if finder is not summed_weights]


def interface() -> type:
    """transformers' registry of experts implementations."""
    needed = (
        f"experts_implementation={NAME!r} needs transformers 5.7 or newer: pip install -U 'transformers>=5.7'"
    )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(needed) from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImportError(f"{needed} (here is {transformers.__version__})")
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface


class Weights(NamedTuple):
    """Those of an experts module, in the orientation of `expert_mlp`: views where the module has another."""

    gate_up: Tensor  # (E, width, H)
    gate_up_bias: Tensor | None  # (E, width)
    gate_up_main_grad: Tensor | None
    down: Tensor  # (E, H, I)
    down_bias: Tensor | None  # (E, H)
    down_main_grad: Tensor | None


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls instead of the `forward` of an experts module.

    hidden_states: (T, H).  top_k_index: (T, k), int32 or int64; num_experts, with which expert parallelism
    marks the experts of other ranks, and negative ids drop the choice.  top_k_weights: (T, k), any floating
    dtype, used in float32.  Returns (T, H) in the dtype of `hidden_states`; products are in that of the
    weights, or of torch.autocast.  Differentiable in all floating inputs; a frozen one costs nothing.

    A gate in `GATES` is computed inside the products, by `expert_mlp`; any other by calling the module's own
    `_apply_gate` between two grouped products, as is one whose activation function has hooks.  What decides
    about gate and up side by side or in turn is the gate: it is what all of transformers' own
    implementations obey.

    Transposed weights, (E, H, 2I) in gpt-oss, are not copied: every kernel takes them as strided views, and
    their gradients come in their own order of memory.  On a Hopper GPU the two kernels with the activation
    inside then are Triton's, since the Gluon ones copy rows of columns; the other products are the same.  A
    transposed copy would cost each step the memory of the weights, and a second one for the gradients.

    Adapters, PEFT's after `integrations.peft.register()` or those of `integrations.lora`, are two thin
    products beside each weight's; then the activation is an op of its own as well.

    A weight with a `main_grad` gets its gradient added there, as in `Experts`; `use_main_grad` gives it one.
    Raises ValueError where that cannot be, with an adapter or a gate that is not fused; else as `expert_mlp`
    does.
    """
    weights = weights_of(module)
    gate_up, down = cast_as_linear(weights.gate_up, weights.down)
    x, num_experts = hidden_states.to(gate_up.dtype), down.shape[0]
    plan = make_plan(top_k_index.masked_fill(top_k_index == num_experts, -1), num_experts)
    weights = weights._replace(gate_up=gate_up, down=down)
    gate = known_gate(module)
    if not runs_fused(module):
        out = unfused(module, gate, weights, x, top_k_weights, plan)
    else:
        activation, interleaved = gate
        out = expert_mlp(
            x, gate_up, down, top_k_weights, plan, activation=activation, interleaved=interleaved,
            gate_up_bias=weights.gate_up_bias, down_bias=weights.down_bias,
            gate_up_main_grad=weights.gate_up_main_grad, down_main_grad=weights.down_main_grad,
        )  # fmt: skip
    return out.to(hidden_states.dtype)


def weights_of(module: nn.Module) -> Weights:
    def read(name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weight = getattr(module, name)  # once: with an adapter, it is computed here
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        main_grad = getattr(weight, "main_grad", None)
        if not module.is_transposed:
            return weight, bias, main_grad
        return weight.mT, bias, None if main_grad is None else main_grad.mT

    up, down = names_of(module)
    return Weights(*read(up), *read(down))


def is_experts(module: nn.Module) -> bool:
    """Whether its class has transformers' decorator."""
    flags = "has_gate", "has_bias", "is_transposed", "is_concatenated"
    return all(hasattr(module, flag) for flag in flags)


def names_of(module: nn.Module) -> tuple[str, str]:
    """What the two weights are called."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def runs_fused(module: nn.Module) -> bool:
    """Whether `expert_mlp` computes it all, and not a product, a gate, a norm or an adapter at a time."""
    return bool(known_gate(module)) and not has_norm(module) and not getattr(module, ADAPTERS, None)


def summed_weights(module: nn.Module) -> tuple[str, ...]:
    """For `use_main_grad`: what the weights are called, of experts that run here and fused."""
    if not is_experts(module) or module.config._experts_implementation != NAME or not runs_fused(module):
        return ()
    return names_of(module)


def has_norm(module: nn.Module) -> bool:
    """Whether the output of each expert is normalised before it is weighted, as in newer transformers."""
    return getattr(module, "has_post_expert_norm", False)


def known_gate(module: nn.Module) -> tuple[str, bool] | None:
    """Return the module's activation by `expert_mlp`'s name and whether gate and up are interleaved, or None.

    None means that the module's own `_apply_gate` runs.  The module's method decides and not its
    configuration: a configuration names only the activation function, and some models also clamp.  Raises
    TypeError for a module without transformers' decorator of experts.
    """
    if not is_experts(module):
        raise TypeError(
            f"module must have transformers' decorator of experts, but is {type(module).__name__}"
        )
    functions = FUNCTIONS.get(function_name(getattr(module, "act_fn", None)), (None, None))
    if not module.has_gate:
        return functions[0] and (functions[0], False)
    gate = type(module)._apply_gate
    if "_apply_gate" in vars(module) or full_name(gate) not in GATES:
        return None
    interleaved, constants = GATES[full_name(gate)]
    if constants is BY_FUNCTION:
        return functions[1] and (functions[1], interleaved)
    if any(getattr(module, name, None) != value for name, value in constants.items()):
        return None
    return "swiglu_oai", interleaved


def full_name(kind) -> str:
    """Of a class, or of a function that wraps no other, whose name it might have taken."""
    if not isinstance(kind, (type, types.FunctionType)) or hasattr(kind, "__wrapped__"):
        return ""
    return f"{kind.__module__}.{kind.__qualname__}"


def function_name(act_fn) -> str:
    """Of the class of a module, unless this one has hooks or a `forward` of its own; some functions too."""
    if not isinstance(act_fn, nn.Module):
        return "torch.nn.modules.activation.SiLU" if act_fn is F.silu else ""
    kind = type(act_fn)
    return "" if is_changed(act_fn, (kind.__call__, kind.forward)) else full_name(kind)


def unfused(
    module: nn.Module,
    gate: tuple[str, bool] | None,
    w: Weights,
    x: Tensor,
    routing_weights: Tensor,
    plan: RoutePlan,
) -> Tensor:
    """The experts step by step, with the module's own gate, adapters and norm of each output: (T, H).

    Each adapter's two products beside its weight's: never a weight with the product of the factors in it.
    """
    if w.gate_up_main_grad is not None or w.down_main_grad is not None:
        raise ValueError(
            f"a weight of {type(module).__name__} has a main_grad, which its gate, norm or adapter forbids: "
            "take it away, and the gradient is in .grad"
        )
    adapters = getattr(module, ADAPTERS, None) or {}
    low_rank = [
        adapters[name].low_rank(weight) if name in adapters else None
        for name, weight in zip(names_of(module), (w.gate_up, w.down), strict=True)
    ]
    up = Projection(w.gate_up, w.gate_up_bias, low_rank[0])
    down = Projection(w.down, w.down_bias, low_rank[1])
    if gate is not None:
        act = partial(glu, activation=gate[0], interleaved=gate[1])
    else:
        act = module._apply_gate if module.has_gate else module.act_fn
    norm = module.post_expert_norm if has_norm(module) else None
    return experts_by_step(x, up, act, down, routing_weights, plan, norm=norm)
