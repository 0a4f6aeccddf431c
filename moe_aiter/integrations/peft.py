"""PEFT's adapters on experts as low-rank products: the sum W + B A is never computed.

    from moe_aiter.integrations.peft import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_aiter")
    model = get_peft_model(model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj", ...]))

PEFT wraps the experts in one `ParamWrapper` for each adapted parameter.  While the experts run, the wrapper's
method `_activate_lora` adds B A to the parameter W.  After `register()`, the method hands A and B to
the experts instead.  In these cases PEFT's own method runs, which is correct and slower:

  * several adapters at once, or none for this parameter
  * a parameter that is not (E, ., .) with E > 1, or not of 16, 32 or 64 bits
  * experts that run another implementation than "moe_aiter"
  * a version of PEFT that is not in SUPPORTED, with a warning from `register()`

Merging, saving, loading, switching and disabling adapters is left to PEFT.
"""

import contextlib
import importlib.metadata
import warnings
from collections.abc import Iterator

from torch import Tensor, nn

from ..kernels.base.check import FLOATS
from ..layers.by_step import LowRank
from ..private_api import own_modules, own_parameters
from . import transformers

__all__ = ["register", "unregister"]

SUPPORTED = ("0.21",)  # versions whose `_activate_lora` this replaces

_original = None  # PEFT's own, while ours is in its place


def register() -> None:
    """Run PEFT's adapters on experts as low-rank products; calls `transformers.register()` too.

    It holds for all models of the process, existing ones included.  Further calls change nothing.
    Raises ImportError if PEFT or transformers is missing.  Warns of an unknown version of PEFT, and then
    changes nothing.
    """
    global _original
    transformers.register()
    wrapper = param_wrapper()
    version = importlib.metadata.version("peft")
    if not any(version.startswith(f"{tested}.") for tested in SUPPORTED):
        warnings.warn(
            f"PEFT {version} is none of {', '.join(SUPPORTED)}: "
            "its adapters of experts still make whole weights",
            stacklevel=2,
        )
    elif _original is None:
        _original, wrapper._activate_lora = wrapper._activate_lora, activate_lora


def unregister() -> None:
    """Restore PEFT's own method; the name "moe_aiter" stays registered in transformers."""
    global _original
    if _original is not None:
        param_wrapper()._activate_lora, _original = _original, None


def param_wrapper() -> type:
    """PEFT's module around one parameter of another module."""
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError as error:
        raise ImportError("adapters of experts need PEFT 0.21: pip install '.[peft]'") from error
    return ParamWrapper


class Factors:
    """Those of one adapter of one parameter, as experts ask for them."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float):
        self.a, self.b, self.scaling = a, b, scaling  # (E * r, in), (out, r * E)
        self.used = False

    def low_rank(self, weight: Tensor) -> LowRank:
        """In the dtype of the weight (E, out, in).  A is laid out expert after expert, B rank after rank."""
        self.used, E = True, len(weight)
        a = (self.a * self.scaling).to(weight.dtype).unflatten(0, (E, -1))
        b = self.b.to(weight.dtype).unflatten(1, (-1, E)).permute(2, 0, 1)
        return LowRank(a, b.contiguous())


@contextlib.contextmanager
def activate_lora(self: nn.Module, active_adapters: list[str]) -> Iterator[None]:
    """Instead of `ParamWrapper._activate_lora`: the factors on the experts, or else PEFT's own way."""
    factors, experts = factors_of(self, active_adapters), self.get_base_layer()
    if factors is None:
        with _original(self, active_adapters):
            yield
        return
    before = vars(experts).get(transformers.ADAPTERS, {})
    setattr(experts, transformers.ADAPTERS, before | {self.parameter_name: factors})
    try:
        yield
    finally:
        if before:
            setattr(experts, transformers.ADAPTERS, before)
        else:
            delattr(experts, transformers.ADAPTERS)
    if not factors.used:
        raise RuntimeError(
            f"{type(experts).__name__} ran without asking for its adapter: call unregister() for this model"
        )


def factors_of(wrapper: nn.Module, active_adapters: list[str]) -> Factors | None:
    """Those of the only active adapter, if the experts will ask for them."""
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    if len(adapters) != 1 or type(wrapper) is not param_wrapper() or not runs_ours(experts):
        return None
    if name not in transformers.names_of(experts) or name not in own_parameters(experts):
        return None
    if transformers.ADAPTERS in own_modules(experts):  # of `integrations.lora`
        return None
    weight = own_parameters(experts)[name]
    if (
        weight.dim() != 3
        or len(weight) != wrapper.num_experts
        or len(weight) < 2
        or weight.dtype not in FLOATS
    ):
        return None
    _, out_features, in_features = (weight.mT if experts.is_transposed else weight).shape
    a, b = wrapper.lora_A[adapters[0]].weight, wrapper.lora_B[adapters[0]].weight
    if (a.shape[1], b.shape[0]) != (in_features, out_features):
        return None
    return Factors(a, b, wrapper.scaling[adapters[0]])


def runs_ours(experts: nn.Module) -> bool:
    """Whether transformers' decorator is around it, and calls our function."""
    config = getattr(experts, "config", None)
    ours = getattr(config, "_experts_implementation", None) == transformers.NAME
    return ours and transformers.is_experts(experts)
