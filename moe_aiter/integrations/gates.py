"""The gates of transformers' experts that kernels compute: the methods `_apply_gate` and their numbers."""

import math
import types
from typing import NamedTuple

import torch.nn.functional as F
from torch import nn

from ..kernels.base.activations import swiglu_limit, swiglu_softcap
from ..kernels.base.check import check_positive
from ..private_api import is_changed, outside_of_dynamo

__all__: list[str] = []

# activation functions by what they are called: f of a plain activation; f of a gated one, f(gate) * up
FUNCTIONS = {
    "torch.nn.modules.activation.SiLU": ("silu", "swiglu"),
    "transformers.activations.SiLUActivation": ("silu", "swiglu"),
    "transformers.activations.GELUActivation": ("gelu", "geglu"),
    "transformers.activations.GELUTanh": (None, "geglu_tanh"),
    "torch.nn.modules.activation.ReLU": ("relu", "reglu"),
    "transformers.activations.ReLUSquaredActivation": ("relu2", None),
}


class Gate(NamedTuple):
    """A method `_apply_gate`: f(gate) * up with f = `module.act_fn`, or SwiGLU with limits or soft caps."""

    interleaved: bool = False
    limit: str | None = None  # what the module calls the limit of gate and up
    alpha: str | None = None  # and alpha, which is 1 otherwise
    up_offset: float = 0.0
    calls_act_fn: bool = True  # whether it calls `module.act_fn`, which must be SiLU if there is a limit
    after: bool = False  # whether the limit holds f(gate) and not gate; inf for none
    softcaps: bool = False  # whether it is `module.act_fn(gate, up)`, of a class that has the soft caps


OAI = Gate(limit="limit", alpha="alpha", up_offset=1.0, calls_act_fn=False)
HY = Gate(limit="swiglu_limit", calls_act_fn=False)
GATES = {  # by the name of the method
    "transformers.integrations.moe._default_apply_gate": Gate(),
    **{
        "transformers.models.{0}.modeling_{0}.{1}._apply_gate".format(*name.split(".")): gate
        for name, gate in {
            "beam.BeamExperts": Gate(),
            "deepseek_v4.DeepseekV4Experts": Gate(limit="limit"),
            "glm5_next.Glm5NextTextExperts": HY,
            "gpt_oss.GptOssExperts": OAI._replace(interleaved=True),
            "hy_v4.HYV4Experts": HY,
            "hy_v4_vl.HYV4VLExperts": HY,
            "inkling2.Inkling2Experts": Gate(softcaps=True),
            "inkling2_loop.Inkling2LoopExperts": Gate(softcaps=True),
            "minimax_m3_vl.MiniMaxM3VLExperts": OAI._replace(limit="swiglu_limit", alpha="swiglu_alpha"),
            "openai_privacy_filter.OpenAIPrivacyFilterExperts": OAI,
            "step3p7.Step3p7Experts": Gate(limit="limit", after=True),
        }.items()
    },
}


def gate_and_reason(module: nn.Module) -> tuple[tuple[str, bool] | None, str]:
    """Return what `known_gate` returns, and if it is None the reason."""
    plain, gated = FUNCTIONS.get(function_name(getattr(module, "act_fn", None)), (None, None))
    other = None, "no kernel has its activation function, or the function has hooks"
    if not module.has_gate:
        return ((plain, False), "") if plain else other
    gate = GATES.get(full_name(type(module)._apply_gate))
    if "_apply_gate" in vars(module) or gate is None:
        return None, "no kernel has its method _apply_gate"
    try:
        name = gate_name(module, gate, gated)
    except (TypeError, ValueError) as error:
        return None, f"the kernels do not have its gate with these constants: {error}"
    return ((name, gate.interleaved), "") if name else other


def gate_name(module: nn.Module, gate: Gate, gated: str | None) -> str | None:
    """Return the activation of a gate, `gated` without numbers, or None.  Raise for other numbers."""
    if gate.softcaps:
        caps = softcaps(module)
        return swiglu_softcap(*caps) if caps else None
    if gate.limit is None:
        return gated
    if gate.calls_act_fn and gated != "swiglu":
        return None
    limit = getattr(module, gate.limit, None)
    if gate.after and limit == math.inf:
        return gated
    alpha = getattr(module, gate.alpha, None) if gate.alpha else 1.0
    return swiglu_limit(gate_before(limit) if gate.after else limit, limit, alpha, gate.up_offset)


def softcaps(module: nn.Module) -> tuple | None:
    """Return the soft caps of gate and up, or None unless `act_fn` and its parts are transformers' own."""
    act_fn = getattr(module, "act_fn", None)
    parts = getattr(act_fn, "gate_softcap", None), getattr(act_fn, "up_softcap", None)
    prefix = full_name(type(module)._apply_gate).removesuffix("Experts._apply_gate")
    names = [f"{prefix}SoftcappedSwiGLU", f"{prefix}Softcap", f"{prefix}Softcap"]
    if [function_name(part) for part in (act_fn, *parts)] != names:
        return None
    return parts[0].softcap, parts[1].softcap


def gate_before(limit: float) -> float:
    """Return the gate whose SiLU is `limit` > 0: to hold one there is to hold the other, as SiLU grows.

    Newton's method; SiLU's slope is between 0.5 and 1.1 there.
    """
    check_positive(limit=limit)
    gate = limit + 1.0
    for _ in range(50):
        sig = 1 / (1 + math.exp(-gate))
        gate -= (gate * sig - limit) / (sig * (1 + gate * (1 - sig)))
    return gate


@outside_of_dynamo
def full_name(kind) -> str:
    """Return the full name of a class, or of a function that wraps no other function; otherwise ""."""
    if not isinstance(kind, (type, types.FunctionType)) or hasattr(kind, "__wrapped__"):
        return ""
    return f"{kind.__module__}.{kind.__qualname__}"


def function_name(act_fn) -> str:
    """Return the name of an activation's class, or "" if the module has hooks or a `forward` of its own."""
    if not isinstance(act_fn, nn.Module):
        return "torch.nn.modules.activation.SiLU" if act_fn is F.silu else ""
    kind = type(act_fn)
    return "" if is_changed(act_fn, (kind.__call__, kind.forward)) else full_name(kind)
