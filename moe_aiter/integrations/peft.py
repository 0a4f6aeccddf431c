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
  * a wrapper that, or whose class, overrides one of DECIDING, with a warning

`register()` looks at what PEFT's classes do, not at a version: at the methods that it replaces, and at what a
wrapper makes of a tiny weight.  If one of them is unknown, it warns and changes nothing.

Weights of 4 bits, of `integrations.four_bit`, take one active adapter at a time.  PEFT looks for parameters,
so while it adds its wrappers and moves adapters, parameters without memory stand in for these weights.

Merging, saving, loading, switching and disabling adapters is left to PEFT.  Merging into weights of 4 bits
raises ValueError.
"""

import contextlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..derived import forget
from ..kernels.base.check import FLOATS
from ..kernels.quantize.four_bit import FourBit
from ..layers.by_step import LowRank
from ..private_api import own_modules, own_parameters
from . import transformers

__all__ = ["register", "unregister"]

# methods of ParamWrapper that decide about the sum
DECIDING = "forward", "_activate_lora", "get_param", "get_delta_factors", "get_delta_weight"

_originals = {}  # PEFT's own methods by name, while ours are in their places
warned = set()  # reasons that had their warning


def register() -> None:
    """Run PEFT's adapters on experts as low-rank products; calls `transformers.register()` too.

    It holds for all models of the process, existing ones included.  Further calls change nothing.
    Raises ImportError if PEFT or transformers is missing.  Warns once if PEFT's classes are not as known, and
    then changes nothing.
    """
    transformers.register()
    param_wrapper()  # which raises without PEFT
    if _originals:
        return
    if (why := unknown_method() or unknown_sum()) is not None:
        warn_once(f"PEFT {importlib.metadata.version('peft')} is not as known ({why})")
        return
    for name, (owner, method) in replaced().items():
        _originals[name] = vars(owner)[name]
        setattr(owner, name, method)


def warn_once(why: str) -> None:
    if why not in warned:
        warned.add(why)
        warnings.warn(f"{why}: its adapters of experts still make whole weights", stacklevel=3)


def unregister() -> None:
    """Restore PEFT's own methods; the name "moe_aiter" stays registered in transformers."""
    if _originals:
        for name, (owner, _) in replaced().items():
            setattr(owner, name, _originals.pop(name))


def replaced() -> dict[str, tuple[type, Callable]]:
    """PEFT's methods that `register` replaces, by name: their classes, and ours."""
    wrapper = param_wrapper()
    from peft.tuners.lora import LoraModel
    from peft.tuners.tuners_utils import BaseTuner

    return {
        "_activate_lora": (wrapper, activate_lora),
        "get_param": (wrapper, get_param),
        "_inject_parameters": (BaseTuner, inject_parameters),
        "_check_merge_allowed": (LoraModel, check_merge_allowed),
        "merge": (wrapper, forgetting("merge")),
        "unmerge": (wrapper, forgetting("unmerge")),
    }


def param_wrapper() -> type:
    """PEFT's module around one parameter of another module."""
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError as error:
        raise ImportError("adapters of experts need PEFT 0.20: pip install '.[peft]'") from error
    return ParamWrapper


# what PEFT's classes do


def unknown_method() -> str | None:
    """Return why ours cannot stand in for one of PEFT's methods, or None."""
    for name, (owner, ours) in replaced().items():
        theirs, called = vars(owner).get(name), f"{owner.__name__}.{name}"
        if not callable(theirs):
            return f"it has no method {called}"
        if not theirs.__module__.startswith("peft."):
            return f"{called} is that of {theirs.__module__}"
        takes, want = (list(inspect.signature(method).parameters.values()) for method in (theirs, ours))
        if want[-1].kind is inspect.Parameter.VAR_KEYWORD:  # ours hands the others on
            want = want[:-2]
            takes = takes[: len(want)]
        if [(p.name, p.kind) for p in takes] != [(p.name, p.kind) for p in want]:
            return f"{called} takes {inspect.signature(theirs)}"
    return None


@torch.no_grad()
def unknown_sum() -> str | None:
    """Return why a wrapper's forward pass on a tiny weight does not add what `Factors` stand for, or None."""
    from peft import LoraConfig

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight

    class Watched(param_wrapper()):
        def _activate_lora(self, active_adapters: list[str]) -> Any:
            active.extend(active_adapters)
            return super()._activate_lora(active_adapters)

    active: list[str] = []
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            wrapper = Watched(Tiny(), "tiny", parameter_name="weight", config=LoraConfig(), r=2, lora_alpha=6)
            a, b = wrapper.lora_A["tiny"].weight, wrapper.lora_B["tiny"].weight
            for factor in (a, b):  # numbers that every dtype holds
                factor.copy_((torch.arange(factor.numel()) % 3 - 1).view_as(factor))
            weight = wrapper.get_base_layer().weight
            low = Factors(a, b, wrapper.scaling["tiny"], 2).low_rank(weight)
            alike = torch.equal(wrapper(torch.zeros_like(weight)), low.b @ low.a)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        return f"ParamWrapper cannot adapt a tiny weight: {type(error).__name__}: {error}"
    if active != ["tiny"]:
        return "ParamWrapper.forward does not call _activate_lora with the active adapters"
    return None if alike else "ParamWrapper lays out A and B in another way"


def overridden(wrapper: nn.Module) -> str | None:
    """Return what a wrapper or its class overrides of DECIDING, None for one that is PEFT's own."""
    kind, plain = type(wrapper), param_wrapper()
    for name in DECIDING:
        if name in vars(wrapper) or getattr(kind, name, None) is not getattr(plain, name, None):
            return f"{kind.__module__}.{kind.__qualname__} overrides {name} of PEFT's ParamWrapper"
    return None


def why_whole(model: nn.Module) -> dict[nn.Module, str | None]:
    """Return the experts that adapters of PEFT change now, and why as whole weights; None: as products."""
    found: dict[nn.Module, str | None] = {}
    for module in model.modules():
        if isinstance(module, param_wrapper()) and not module.disable_adapters and not module.merged:
            active = [name for name in module.active_adapters if name in module.lora_A]
            if active:
                experts, why = module.get_base_layer(), reason_against(module, active)
                found[experts] = found.get(experts) or why
    return found


# the products


class Factors:
    """The factors of one adapter of one parameter, in the form that experts need."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float, num_experts: int):
        self.a, self.b, self.scaling = a, b, scaling  # (E * r, in), (out, r * E)
        self.num_experts, self.used = num_experts, False

    def low_rank(self, weight: Tensor | FourBit) -> LowRank:
        """In the dtype of the weight (E, out, in).  A is laid out expert after expert, B rank after rank."""
        self.used, E = True, self.num_experts
        if weight.shape[0] != E:
            raise ValueError(
                f"this rank has {weight.shape[0]} of {E} experts, but PEFT's adapters are not shared: use "
                "add_lora of moe_aiter.integrations.lora, whose save_lora writes PEFT's files"
            )
        a = (self.a * self.scaling).to(weight.dtype).unflatten(0, (E, -1))
        b = self.b.to(weight.dtype).unflatten(1, (-1, E)).permute(2, 0, 1)
        return LowRank(a, b.contiguous())


@contextlib.contextmanager
def activate_lora(self: nn.Module, active_adapters: list[str]) -> Iterator[None]:
    """Replace `ParamWrapper._activate_lora`: put the factors on the experts, or do as PEFT does."""
    factors, experts = factors_of(self, active_adapters), self.get_base_layer()
    if factors is None:
        packed = packed_weight(self)
        if packed is not None and any(name in self.lora_A for name in active_adapters):
            raise ValueError(
                f"{self.parameter_name} of {type(experts).__name__} has {packed.bits} bits: it needs "
                f"experts_implementation={transformers.NAME!r} and takes one active adapter at a time"
            )
        with _originals["_activate_lora"](self, active_adapters):
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
    """Return the factors of the only active adapter, if our experts will use them."""
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    if adapters and (why := overridden(wrapper)) is not None:
        warn_once(why)
    if not adapters or reason_against(wrapper, adapters) is not None:
        return None
    a, b = wrapper.lora_A[adapters[0]].weight, wrapper.lora_B[adapters[0]].weight
    return Factors(a, b, wrapper.scaling[adapters[0]], wrapper.num_experts)


def reason_against(wrapper: nn.Module, adapters: list[str]) -> str | None:
    """Return why PEFT makes a whole weight of these adapters of the wrapper; None: our products run."""
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    if not _originals:
        return "PEFT's own methods run: call register() of moe_aiter.integrations.peft"
    if (why := overridden(wrapper)) is not None:
        return why
    if len(adapters) > 1:
        return f"{len(adapters)} adapters of {name} are active"
    if not runs_ours(experts) or name not in transformers.names_of(experts):
        return f"{name} is no weight of experts on our kernels"
    if transformers.ADAPTERS in own_modules(experts):
        return "the experts have adapters of moe_aiter.integrations.lora too"
    weight = packed_weight(wrapper)
    if weight is None:
        weight = own_parameters(experts).get(name)
        if weight is None or weight.dim() != 3 or len(weight) < 2 or weight.dtype not in FLOATS:
            return f"{name} is no parameter (E, ., .) of 16, 32 or 64 bits with E > 1"
        weight = weight.mT if experts.is_transposed else weight
    E, out_features, in_features = weight.shape
    a, b = wrapper.lora_A[adapters[0]].weight, wrapper.lora_B[adapters[0]].weight
    if (wrapper.num_experts, a.shape[1], b.shape[0]) != (E, in_features, out_features):
        return f"{name} has another shape than its adapter was made for"
    return None


def runs_ours(experts: nn.Module) -> bool:
    """Whether transformers' decorator is around it, and calls our function."""
    config = getattr(experts, "config", None)
    ours = getattr(config, "_experts_implementation", None) == transformers.NAME
    return ours and transformers.is_experts(experts)


# weights of 4 bits


def packed_weight(wrapper: nn.Module) -> FourBit | None:
    """The weight of 4 bits that a `ParamWrapper` adapts."""
    return transformers.four_bits_of(wrapper.get_base_layer(), wrapper.parameter_name)


def get_param(self: nn.Module) -> nn.Parameter:
    """Replace `ParamWrapper.get_param`: PEFT reads the result's shape, dtype and device."""
    weight = packed_weight(self)
    if weight is None:
        return _originals["get_param"](self)
    return stand_in(weight, self.get_base_layer().is_transposed)


def inject_parameters(self: nn.Module, peft_config: Any, model: nn.Module, *args: Any, **named: Any) -> list:
    """Replace `BaseTuner._inject_parameters`, which looks at parameters alone."""
    stand_ins = [
        (module, name, stand_in(weight, module.is_transposed))
        for module in filter(transformers.is_experts, model.modules())
        for name in transformers.names_of(module)
        if name not in own_parameters(module)  # FP8 weights are: PEFT asks our get_param
        and (weight := transformers.four_bits_of(module, name)) is not None
    ]
    for module, name, parameter in stand_ins:
        own_parameters(module)[name] = parameter
    try:
        result = _originals["_inject_parameters"](self, peft_config, model, *args, **named)
    finally:
        for module, name, _ in stand_ins:
            del own_parameters(module)[name]
    for module in model.modules():  # a forward pass might never ask ours
        if isinstance(module, param_wrapper()) and (why := overridden(module)) is not None:
            warn_once(why)
    return result


def stand_in(weight: FourBit, is_transposed: bool) -> nn.Parameter:
    """A parameter of the shape, dtype and device of a weight that has one number in memory."""
    whole = weight.packed.new_empty(1, dtype=weight.dtype).expand(weight.shape)
    return nn.Parameter(whole.mT if is_transposed else whole, requires_grad=False)


def check_merge_allowed(self: nn.Module) -> None:
    """Replace `LoraModel._check_merge_allowed`, which runs before anything is merged."""
    _originals["_check_merge_allowed"](self)
    for name, module in self.model.named_modules():
        packed = packed_weight(module) if isinstance(module, param_wrapper()) else None
        if packed is not None:
            weight = f"{module.parameter_name} of {name}"
            raise ValueError(f"{weight} has {packed.bits} bits, which would round adapters away")


def forgetting(name: str) -> Callable[..., None]:
    """Return a method in place of `merge` or `unmerge`, which write to the weight without a trace."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        _originals[name](self, *args, **kwargs)
        forget()

    return method
