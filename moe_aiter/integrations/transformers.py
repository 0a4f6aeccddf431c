"""The experts of transformers' models: `experts_implementation="moe_aiter"`.

    from moe_aiter.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_aiter")

For a model that is loaded already, call `model.set_experts_implementation("moe_aiter")`.  It works for every
model whose experts have transformers' decorator `use_experts_implementation`: Mixtral, Qwen3-MoE, OLMoE,
DeepSeek-V3, gpt-oss and more, and for the classes of `other_experts.OTHERS`, which lack it: Llama 4, DBRX,
LongCat-Flash and more.  Parameters keep their names, shapes and values, and so do checkpoints.

`check(model)` prints which kernels each experts module runs.

Several GPUs: `DistributedConfig(..., ep_implementation="moe_aiter")`, see `DispatchedExperts`.
"""

import sys
import warnings
from collections.abc import Set
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from ..kernels.base.check import (
    FLOATS,
    cast_as_linear,
    check_axes,
    check_device,
    check_float,
    check_index,
    check_size,
    checked,
)
from ..kernels.experts.mlp import expert_rows, mix_experts
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..kernels.quantize.four_bit import FP8, FourBit
from ..layers.by_step import LowRank, Projection, experts_by_step
from ..layers.experts import Weights, local_part, local_weight, through
from ..layers.four_bit import FourBitWeight, from_mxfp4
from ..layers.lora import LoRAFactors
from ..layers.offloaded import FINDERS as OFFLOAD_FINDERS
from ..layers.route_replay import FINDERS as ROUTE_FINDERS
from ..layers.route_replay import Foreign
from ..layers.training import FINDERS
from ..op import once
from ..private_api import is_of_torchao, own_buffers, own_modules, own_parameters, parameter_of
from ..routing.plan import RoutePlan, make_plan, unpermute
from .gates import full_name, gate_and_reason
from .other_experts import (
    NAME,
    NOT_OURS,
    OTHERS,
    any_asks,
    class_of,
    follow_configurations,
    give_configurations,
    implementation_of,
    path_of_other,
    reason_of,
    transformers_version,
)
from .sharded import BLOCKS, SCALES, all_tokens, kept, own_tokens
from .transformers_fp8 import SCALE_INV, fp8_interface, fp8_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check", "experts_forward", "known_gate", "register", "unregister"]

ADAPTERS = "moe_aiter_adapters"  # of a module: by a weight's name, what has a method `low_rank(weight)`
OLDEST = (5, 7)  # those before know a fixed list of names

_originals = {}  # methods of PreTrainedModel, while those that warn are in their places
_inside = ContextVar("inside", default=False)  # while a model is made, in which further models are its parts
_options = {}  # of `ExpertDispatcher`, for models to come
warned = set()  # classes of models that had their warning


@checked
def register(
    *, rows: float | None = None, max_tokens: int | None = None, keep_x: bool | None = None,
    guests: int | str | None = None,
) -> None:  # fmt: skip
    """Add `experts_implementation="moe_aiter"` to transformers.  Further calls change only the options.

    Where transformers has `DistributedConfig(ep_implementation=...)`, as 5.23 does, the name works there too.
    The options are those of `ExpertDispatcher` for models that are loaded with it after this call; None
    leaves an option as it is.

    After that, `from_pretrained`, `from_config` and `set_experts_implementation` warn, once for each class of
    models, if the name changes nothing in a model.
    Raises ImportError if transformers is missing or older than 5.7, and TypeError or ValueError for options
    that `ExpertDispatcher` refuses.
    """
    options = {"rows": rows, "max_tokens": max_tokens, "keep_x": keep_x, "guests": guests}
    if given := {name: value for name, value in options.items() if value is not None}:
        from ..distributed.experts import check_dispatch_options

        check_dispatch_options(**_options | given)
    interface().register(NAME, experts_forward)
    if (of_fp8 := fp8_interface()) is not None:
        of_fp8.register(NAME, experts_forward)
    if (parallel := parallel_interface()) is not None:
        parallel.register(NAME, implementation())
    _options.update(given)
    if summed_weights not in FINDERS:
        FINDERS.append(summed_weights)
        ROUTE_FINDERS["transformers"] = routed_experts
        OFFLOAD_FINDERS.append(is_experts)
    from transformers import PreTrainedModel as model

    making = "from_pretrained", "_from_config"
    for name in {*making, "set_experts_implementation"} - _originals.keys():
        own = _originals[name] = vars(model)[name]
        ours = classmethod(warns_after_making(own.__func__)) if name in making else warns_after_switching(own)
        setattr(model, name, ours)


def unregister() -> None:
    """Remove the name "moe_aiter" from transformers.

    The next forward pass of a model that still uses it raises an error; `set_experts_implementation` switches
    it to another.  That method stays ours once a class of `OTHERS` asks: transformers' changes nothing there.
    """
    interface()._global_mapping.pop(NAME, None)
    if (of_fp8 := fp8_interface()) is not None:
        of_fp8._global_mapping.pop(NAME, None)
    if (parallel := parallel_interface()) is not None:
        parallel._global_mapping.pop(NAME, None)
    _options.clear()
    FINDERS[:] = [finder for finder in FINDERS if finder is not summed_weights]
    ROUTE_FINDERS.pop("transformers", None)
    OFFLOAD_FINDERS[:] = [finder for finder in OFFLOAD_FINDERS if finder is not is_experts]
    for name in _originals.keys() - ({"set_experts_implementation"} if any_asks() else set()):
        setattr(sys.modules["transformers"].PreTrainedModel, name, _originals.pop(name))


def interface() -> type:
    """transformers' registry of experts implementations."""
    needed = (
        f"experts_implementation={NAME!r} needs transformers 5.7 or newer: pip install -U 'transformers>=5.7'"
    )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(needed) from error
    if transformers_version() < OLDEST:
        raise ImportError(f"{needed} (here is {transformers.__version__})")
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface


def parallel_interface() -> type | None:
    """transformers' registry of expert parallelism, None in a version without one."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return None
    return EPImplementationInterface


# a warning if nothing here runs


def warns_after_making(method):
    @wraps(method)
    def run(cls, *args, **kwargs):
        follow_configurations()
        is_part, token = _inside.get(), _inside.set(True)
        try:
            made = method(cls, *args, **kwargs)
        finally:
            _inside.reset(token)
        model = made[0] if isinstance(made, tuple) else made  # from_pretrained may add what it has loaded
        give_configurations(model)
        if not is_part and any(implementation_of(module) == NAME for module in model.modules()):
            warn_if_unused(model)
        return made

    return run


def warns_after_switching(method):
    @wraps(method)
    def run(self, experts_implementation):
        method(self, experts_implementation)
        given = experts_implementation
        if NAME in interface()._global_mapping:  # else `unregister` has left this method
            follow_configurations()
        give_configurations(self, given)
        if NAME in (given.values() if isinstance(given, dict) else [given]):
            warn_if_unused(self)

    return run


def warn_if_unused(model: nn.Module) -> None:
    """Warn, once for its class, of a model without an experts module that could run here."""
    if type(model) not in warned and not any(map(can_run, model.modules())):
        warned.add(type(model))
        warnings.warn(
            f"experts_implementation={NAME!r} changes nothing in {type(model).__name__}: none of its modules "
            "has transformers' decorator use_experts_implementation or can run without, so transformers' own "
            "code runs",
            stacklevel=3,
        )


def can_run(module: nn.Module) -> bool:
    return not reason_of(module) if is_other(module) else is_experts(module)


def is_other(module: nn.Module) -> bool:
    """Whether it is of a class of `OTHERS`, and not made into one with transformers' decorator."""
    decorated = is_experts(module) and hasattr(type(module).forward, "__wrapped__")
    return bool(class_of(module)) and not decorated


# what runs where


class ModulePath(NamedTuple):
    """The path by which the experts of one module run."""

    kind: str  # the module's class
    path: str  # "fused", "two products", "whole weights" or "not ours"
    why: str


@checked
def check(model: nn.Module) -> dict[str, ModulePath]:
    """Return and print how each experts module of a transformers model runs: a `ModulePath` by its name.

    "fused": the activation runs inside the two products.  "two products": the activation is an op between
    them.  "whole weights": PEFT adds its adapter to a weight in each forward pass, and our products take the
    sum.  "not ours": transformers' own code runs.  A module without transformers' decorator of experts is
    listed if its class is in `other_experts.OTHERS`, and as not ours if it is in `NOT_OURS` or if the name
    of its class has "Expert" in it or ends in "MoE".
    """
    adapted = adapted_by_peft(model)
    found = {}
    for name, module in model.named_modules():
        if is_experts(module) and not is_other(module):
            found[name] = path_of(module, module in adapted, adapted.get(module))
        elif any(name.startswith(f"{above}.") for above in found):
            continue
        elif is_other(module):
            found[name] = path_of_whole(module, adapted.keys())
        elif looks_like_experts(module):
            lacks = "its class lacks transformers' decorator use_experts_implementation"
            why = NOT_OURS.get(full_name(type(module)), lacks)
            found[name] = ModulePath(type(module).__name__, "not ours", why)
    alike = {}
    for name, path in found.items():
        alike.setdefault(path, []).append(name)
    for (kind, path, why), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"{path}: {names[0]}{more} ({kind}): {why}")
    if not found:
        print(f"{type(model).__name__} has no experts")
    return found


def path_of_whole(module: nn.Module, adapted: Set[nn.Module]) -> ModulePath:
    """Do as `path_of` for a class of `OTHERS`, whose weights PEFT adapts as a whole."""
    kind, (path, why) = type(module).__name__, path_of_other(module)
    if path == "not ours" or adapted.isdisjoint(module.modules()):
        return ModulePath(kind, path, why)
    return ModulePath(
        kind, "whole weights", "PEFT adds its adapter: the class has no transformers' decorator"
    )


def path_of(module: nn.Module, adapted: bool, why_whole: str | None) -> ModulePath:
    kind, implementation = type(module).__name__, implementation_of(module)
    try:
        packed = [four_bits_of(module, name) for name in names_of(module)]
    except (TypeError, ValueError) as error:
        return ModulePath(kind, "not ours", f"the kernels refuse its weights: {error}")
    dtypes = {getattr(module, n).dtype for n, w in zip(names_of(module), packed, strict=True) if w is None}
    if implementation != NAME:
        return ModulePath(
            kind, "not ours", f"its configuration has experts_implementation={implementation!r}"
        )
    for name, weight in own_parameters(module).items():
        if is_of_torchao(weight := local_part(weight)):
            why = f"{name} is a {type(weight).__name__} of torchao, which the kernels refuse"
            return ModulePath(kind, "not ours", why)
    if not dtypes <= set(FLOATS):
        return ModulePath(kind, "not ours", f"its weights are {' and '.join(map(str, dtypes))}")
    if why_whole is not None and any(w is not None for w in packed):
        return ModulePath(kind, "not ours", f"its weights are no tensors that PEFT can add to: {why_whole}")
    if why_whole is not None:
        return ModulePath(kind, "whole weights", why_whole)
    if any(w is not None for w in packed):
        how = "4 bits, dequantised inside the products"
        if FP8 in {w.format for w in packed if w is not None}:
            how = "8 bits, multiplied by rows of 8 bits"
        return ModulePath(kind, "two products", f"its weights have {how}")
    if adapted or getattr(module, ADAPTERS, None):
        return ModulePath(kind, "two products", "each weight has an adapter's products beside its own")
    gate, why = gate_and_reason(module)
    if gate is None:
        return ModulePath(kind, "two products", why)
    return ModulePath(kind, "fused", f"the activation {gate[0]} runs inside the products")


def adapted_by_peft(model: nn.Module) -> dict[nn.Module, str | None]:
    """Return the experts with active adapters of PEFT; and why PEFT makes whole weights of them, or None."""
    if not hasattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper"):
        return {}
    from .peft import why_whole

    return why_whole(model)


def looks_like_experts(module: nn.Module) -> bool:
    """Whether the class name says so; modules around experts that are listed do not count."""
    name = type(module).__name__.lower()
    named = "expert" in name or name.endswith("moe")
    ours = type(module).__module__.startswith(f"{__package__.partition('.')[0]}.")
    around = any(is_experts(m) or is_other(m) for m in module.modules())
    return named and not ours and "shared" not in name and not around


# experts


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function that transformers calls in place of the `forward` of an experts module.

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
    Raises ValueError where that cannot be, with an adapter or a gate that is not fused, and for sizes or
    devices that disagree; TypeError for a module without transformers' decorator of experts, and for dtypes.
    """
    check_is_experts(module)
    inputs = Chosen(hidden_states, top_k_index, top_k_weights)
    check_chosen(inputs)
    return through(owners_of(module), partial(run_experts, module), *inputs)


class Chosen(NamedTuple):
    """The tokens of experts and their choices, as transformers calls them."""

    hidden_states: Tensor  # (T, H)
    top_k_index: Tensor  # (T, k)
    top_k_weights: Tensor  # (T, k)


@once
def check_chosen(i: Chosen) -> None:
    choices = {"top_k_index": (i.top_k_index, "T, k"), "top_k_weights": (i.top_k_weights, "T, k")}
    check_axes(hidden_states=(i.hidden_states, "T, H"), **choices)
    check_index(top_k_index=i.top_k_index)
    check_float(hidden_states=i.hidden_states)
    check_float(top_k_weights=i.top_k_weights)
    check_device(**i._asdict())


def owners_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules below experts that have their codes of 4 bits and their adapters' factors."""
    owners = [*own_modules(module).values(), *(getattr(module, ADAPTERS, None) or {}).values()]
    return [owner for owner in owners if isinstance(owner, (FourBitWeight, LoRAFactors))]


def run_experts(module: nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Do as `experts_forward`, where all weights have numbers."""
    weights = weights_of(module)
    num_experts, hidden = weights.down.shape[:2]
    check_size("hidden_states is (T, H={})", x.shape[1], "the experts have H={}", hidden)
    plan = make_plan(top_k_index.masked_fill(top_k_index == num_experts, -1), num_experts)
    return compute_experts(module, x, top_k_weights, plan, weights).to(x.dtype)


def compute_experts(
    module: nn.Module, x: Tensor, routing_weights: Tensor, plan: RoutePlan, weights: ExpertWeights,
    save_z: bool = True, low_rank: "LowRanks | None" = None,
) -> Tensor:  # fmt: skip
    """Return (T, H) in the dtype of the products, from the experts of `plan` with these weights.

    low_rank: the adapters' factors for these weights; None reads them from the module.
    """
    gate_up, down = cast_as_linear(weights.gate_up, weights.down)
    x, weights = x.to(gate_up.dtype), weights._replace(gate_up=gate_up, down=down)
    gate = known_gate(module)
    options = None if gate is None else ExpertOptions(*gate, recompute="none" if save_z else "z")
    if not runs_fused(module):
        low_rank = low_rank_of(module, gate_up, down) if low_rank is None else low_rank
        return unfused(module, options, weights, low_rank, x, routing_weights, plan)
    if not has_norm(module):
        return mix_experts(x, weights, routing_weights, plan, options)
    return unpermute(module.post_expert_norm(expert_rows(x, weights, plan, options)), plan, routing_weights)


def weights_of(module: nn.Module) -> ExpertWeights:
    """Return the weights in the orientation of `expert_mlp`: views if the module's differs."""

    def read(name: str) -> tuple[Tensor | FourBit, Tensor | None, Tensor | None]:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        if (packed := four_bits_of(module, name)) is not None:
            return packed, bias, None
        weight = getattr(module, name)  # once: with an adapter, it is computed here
        main_grad = getattr(p := parameter_of(weight), "main_grad", None)
        if main_grad is not None and p is not weight:  # transformers has put its local part there
            weight, main_grad = local_weight(p), local_part(main_grad)
        if not module.is_transposed:
            return weight, bias, main_grad
        return weight.mT, bias, None if main_grad is None else main_grad.mT

    (up, up_bias, up_sum), (down, down_bias, down_sum) = map(read, names_of(module))
    return ExpertWeights(up, down, up_bias, down_bias, up_sum, down_sum)


def four_bits_of(module: nn.Module, name: str) -> FourBit | None:
    """Return a weight (E, out, in) of experts if `integrations.four_bit` gave it 4 bits, or of transformers'
    FP8Experts."""
    if (packed := fp8_of(module, name)) is not None:
        return packed
    weight = own_modules(module).get(name)
    if isinstance(weight, FourBitWeight):
        return weight.weight()
    blocks = own_buffers(module).get(name + BLOCKS)
    if blocks is None:
        return None
    dtype = getattr(module, f"{name}_bias").dtype
    return from_mxfp4(local_part(blocks), local_part(own_buffers(module)[name + SCALES]), dtype).weight()


def is_packed(module: nn.Module, name: str) -> bool:
    """Whether `four_bits_of` returns a weight, without making one."""
    parts = own_parameters(module).get(name + SCALE_INV), own_buffers(module).get(name + BLOCKS)
    return isinstance(own_modules(module).get(name), FourBitWeight) or any(t is not None for t in parts)


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with transformers' decorator, by their names."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    """Whether its class has transformers' decorator."""
    flags = "has_gate", "has_bias", "is_transposed", "is_concatenated"
    return all(hasattr(module, flag) for flag in flags)


def routed_experts(module: nn.Module) -> Foreign | str | None:
    """For `record_routes` and `replay_routes`: experts that any implementation runs, or why they cannot."""
    if not is_experts(module):
        if not (is_other(module) or looks_like_experts(module)):
            return None
        kind = type(module).__name__
        if class_of(module) and OTHERS[class_of(module)].forward is None:
            return f"for {kind}, {reason_of(module)}"
        return (
            f"{kind} lacks transformers' decorator use_experts_implementation, so its routes can be neither "
            "recorded nor replayed (docs/replay.md)"
        )
    return Foreign(1, 2, down_of(module).shape[0], dropped=dropped_id)


def dropped_id(module: nn.Module) -> int | None:
    """Return E, which our kernels drop, or None: other implementations have no id that drops a choice."""
    return down_of(module).shape[0] if implementation_of(module) == NAME else None


def down_of(module: nn.Module) -> Tensor:
    """Return the second weight of an experts module, or its codes, with the experts of all ranks."""
    weight = kept(module, "down_proj")
    return module.down_proj if weight is None else weight


def run_ours(model: nn.Module) -> None:
    """Let the experts of a model of transformers run here; ValueError for what only holds such a model."""
    if not hasattr(model, "set_experts_implementation"):
        raise ValueError(f"{type(model).__name__} is no model of transformers: give the model that it holds")
    model.set_experts_implementation(NAME)


def names_of(module: nn.Module) -> tuple[str, str]:
    """Return the names of the two weights."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def runs_fused(module: nn.Module) -> bool:
    """Whether the gate is computed inside the products, and not a product, a gate or an adapter at a time."""
    if any(is_packed(module, name) for name in names_of(module)):
        return False
    return bool(known_gate(module)) and not getattr(module, ADAPTERS, None)


def summed_weights(module: nn.Module) -> tuple[str, ...]:
    """For `use_main_grad`: what the weights are called, of experts that run here and fused."""
    if not is_experts(module) or implementation_of(module) != NAME or not runs_fused(module):
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
    check_is_experts(module)
    return gate_and_reason(module)[0]


def check_is_experts(module: nn.Module) -> None:
    if not is_experts(module):
        raise TypeError(
            f"module must have transformers' decorator of experts, but is {type(module).__name__}"
        )


LowRanks = tuple[LowRank | None, LowRank | None]  # the factors of both weights' adapters


def low_rank_of(module: nn.Module, gate_up: Tensor | FourBit, down: Tensor | FourBit) -> LowRanks:
    adapters = getattr(module, ADAPTERS, None) or {}
    up, low = (
        adapters[name].low_rank(weight) if name in adapters else None
        for name, weight in zip(names_of(module), (gate_up, down), strict=True)
    )
    return up, low


def unfused(
    module: nn.Module, options: ExpertOptions | None, w: ExpertWeights, low_rank: LowRanks, x: Tensor,
    routing_weights: Tensor, plan: RoutePlan,
) -> Tensor:  # fmt: skip
    """The experts step by step, with the module's own gate, adapters and norm of each output: (T, H).

    Each adapter's two products beside its weight's: never a weight with the product of the factors in it.
    """
    if w.gate_up_main_grad is not None or w.down_main_grad is not None:
        raise ValueError(
            f"a weight of {type(module).__name__} has a main_grad, which its gate or adapter forbids: "
            "take it away, and the gradient is in .grad"
        )
    up = Projection(w.gate_up, w.gate_up_bias, low_rank[0])
    down = Projection(w.down, w.down_bias, low_rank[1])
    if options is not None:
        act = options.activate
    else:
        act = module._apply_gate if module.has_gate else module.act_fn
    norm = module.post_expert_norm if has_norm(module) else None
    return experts_by_step(x, up, act, down, routing_weights, plan, norm=norm)


# several GPUs


class DispatchedExperts:
    """Expert parallelism of transformers on our dispatcher.

        sizes = {"fsdp_size": 8, "ep_size": 8}
        config = DistributedConfig(**sizes, ep_implementation="moe_aiter")
        model = AutoModelForCausalLM.from_pretrained(
            name, experts_implementation="moe_aiter", distributed_config=config
        )

    transformers shards the parameters while it loads them, and makes one of these for each experts module.
    Each rank has tokens of its own; gradients are those of the mean of the ranks' losses.  With `tp_size`
    above 1, the ranks of a tensor-parallel group have the same tokens, of which each sends an equal part.
    Adapters of `integrations.lora` and weights of 4 bits are shared with their experts.
    Raises ValueError for experts that do not run on our kernels or whose parameters the `ep_plan` does not
    shard, and in a call for adapters of PEFT.
    """

    def __init__(self, experts: nn.Module, ep_mesh: "DeviceMesh", tp_mesh: "DeviceMesh"):
        from ..distributed import ExpertDispatcher

        kind = type(experts).__name__
        if not is_experts(experts):
            raise ValueError(
                f"ep_implementation={NAME!r} needs experts with transformers' decorator, which {kind} lacks"
            )
        if implementation_of(experts) != NAME:
            raise ValueError(
                f"ep_implementation={NAME!r} needs experts on our kernels, but {kind} runs "
                f"{implementation_of(experts)!r}: pass experts_implementation={NAME!r} too"
            )
        weights = [kept(experts, name) for name in names_of(experts)]
        if not all(hasattr(weight, "placements") for weight in weights):
            raise ValueError(f"ep_plan leaves weights of {kind} whole: shard each by 'grouped_gemm'")
        self.module, self.sums = experts, (None, None)
        self.dispatcher = ExpertDispatcher(ep_mesh.get_group(), weights[0].shape[0], **_options)
        super().__init__(experts, ep_mesh, tp_mesh)  # of transformers' EPImplementation

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Do as `experts_forward` for this rank's tokens; ids count all experts."""
        return through(owners_of(self.module), self.run, hidden_states, top_k_index, top_k_weights)

    def run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_experts = self.dispatcher.num_experts
        ids = top_k_index.masked_fill(top_k_index == num_experts, -1)
        x = hidden_states.to(weights_of(self.module).down.dtype)  # before it travels
        if self.tp_mesh.size() > 1:
            x, top_k_weights = (own_tokens(t, self.tp_mesh) for t in (x, top_k_weights))
            ids = own_tokens(ids, self.tp_mesh, padding=-1)
        out = self.dispatcher(self, x, top_k_weights, make_plan(ids, num_experts))
        return all_tokens(out, self.tp_mesh, len(hidden_states)) if self.tp_mesh.size() > 1 else out

    def local_weights(self) -> Weights:
        """Return this rank's weights and the factors of its adapters; none if the module itself computes
        something, with parameters perhaps.

        transformers puts the local part of each parameter in its place during the call.
        """
        module = self.module
        if has_norm(module) or known_gate(module) is None:
            return ()
        up, down, *biases, up_sum, down_sum = weights_of(module)[:6]
        self.sums = up_sum, down_sum
        if runs_fused(module):
            return up, down, *biases
        up, down = cast_as_linear(up, down)
        none = LowRank(None, None)
        factors = [(low or none)[:3] for low in low_rank_of(module, up, down)]
        return up, down, *biases, *factors[0], *factors[1]

    def parameters(self) -> list[Tensor]:
        """Return what must not change before backward."""
        return list(map(parameter_of, self.module.parameters()))

    def main_grads(self) -> tuple[Tensor | None, ...]:
        """Return where gradients of gate_up and down are added, if they have such a place."""
        return self.sums

    def kernel_options(self) -> ExpertOptions | None:
        """Do as `Experts.kernel_options`."""
        fused = runs_fused(self.module) and not has_norm(self.module)
        return ExpertOptions(*known_gate(self.module)) if fused else None

    def compute(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, weights: Weights, save_z: bool = True,
        lent: bool = False, guests: Weights = (),
    ) -> Tensor:  # fmt: skip
        """Return the output of this rank's experts, with these weights in place of the module's."""
        module, low_rank = self.module, None
        weights, factors = weights[:4], weights[4:]
        if factors:
            adapters = getattr(module, ADAPTERS, None) or {}
            low_rank = tuple(
                LowRank(*found, adapters[name].input_dropout) if name in adapters else None
                for name, found in zip(names_of(module), (factors[:3], factors[3:]), strict=True)
            )
        sums = () if lent else self.sums
        weights = ExpertWeights(*weights, *sums) if weights else weights_of(module)
        weights = weights.with_guests(*guests) if guests else weights
        return compute_experts(module, x, routing_weights, plan, weights, save_z, low_rank)


def implementation() -> type:
    """Return `DispatchedExperts` as one of transformers' own `EPImplementation`s."""
    from transformers.distributed.expert_parallel import EPImplementation

    return type("DispatchedExperts", (DispatchedExperts, EPImplementation), {})
