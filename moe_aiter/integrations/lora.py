"""Adapters on the experts of transformers' models, with dropout and DoRA, which PEFT does not support there.

    from moe_aiter.integrations.lora import add_lora, load_lora, merge_lora, save_lora

    add_lora(model, rank=16, alpha=32, dropout=0.05)    # freezes the model; the adapters train
    ...
    save_lora(model, directory)                         # for PEFT's `target_parameters`
    save_lora(model, directory, per_expert=True)        # for models with a linear layer for each expert
    merge_lora(model)                                   # for programs that read no adapters

Both forms of `save_lora` write adapter_config.json and adapter_model.safetensors as PEFT does.  Only the form
`per_expert` can hold DoRA's magnitudes.  vLLM's loader reads the names of this form,
`<experts>.{e}.gate_proj.lora_A.weight`, or those of the first form if it keeps all experts of a layer in one
tensor.  vLLM refuses DoRA: merge such adapters first.
"""

import json
import pathlib
import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import printable
from ..files import drafted, need, plain, read_json
from ..kernels.base.check import check_parameter_dtype, checked
from ..layers.experts import local_part
from ..layers.lora import LoRAFactors, row_norms
from ..layers.lora_peft import factors_of_all_experts, factors_per_expert, load_stacked, rank_in
from ..private_api import hooks_before
from .sharded import gathered, kept, shard_factors
from .transformers import (
    ADAPTERS,
    NAME,
    experts_in,
    four_bits_of,
    known_gate,
    names_of,
    register,
    run_ours,
    weights_of,
)

__all__ = ["add_lora", "load_lora", "merge_lora", "save_lora"]

TARGETS = ("gate_up_proj", "up_proj", "down_proj")
CONFIG, TENSORS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


@checked
def add_lora(
    model: nn.Module, *, targets: tuple[str, ...] = TARGETS, dtype: torch.dtype = torch.float32, **lora
) -> list[str]:
    """Freeze `model` and add adapters of `dtype` to its experts; returns the names of the experts' modules.

    targets: which weights get adapters: gate_up_proj (up_proj in a model without gates) and down_proj.
    lora: `rank`, `alpha` [the rank], `rslora`, `dora`, `dropout` and `rank_dropout` of `LoRAFactors`.  Before
        gate_up_proj, dropout draws once for each token, and all its experts see the same; before down_proj,
        it draws once for each row of an expert.

    From then on the model runs `experts_implementation="moe_aiter"`.  Other implementations ignore adapters;
    with one of them, the next forward pass raises RuntimeError.  Existing parameters keep their names.  New
    parameters are `<experts>.moe_aiter_adapters.<weight>.A` (E, r, in), `.B` (E, out, r) and with `dora`
    `.magnitude` (E, out).  You may unfreeze other parameters afterwards.

    In a model that transformers or FSDP2 has sharded, adapters are sharded with their experts.  All ranks
    must call this, before the first forward pass, `load_lora` and `save_lora`.

    Raises ValueError if the model has no experts with transformers' decorator, only holds a model of
    transformers, or has adapters already, if tensor parallelism divides single experts, and as `LoRAFactors`
    does; then the model is unchanged.
    """
    return attach(model, new_adapters(model, targets, dtype, lora))


def new_adapters(
    model: nn.Module, targets: tuple[str, ...], dtype: torch.dtype, lora: dict,
    state: Mapping[str, Tensor] | None = None,
) -> dict[str, nn.ModuleDict]:  # fmt: skip
    """Return new adapters, filled from `state`, by the names of the experts' modules, which have none yet."""
    register()
    check_parameter_dtype(dtype)
    if "adapters" in lora:
        raise TypeError("adapters is no option here: the experts of a model of transformers have one adapter")
    experts = experts_in(model)
    if not isinstance(targets, (tuple, list)) or not all(name in TARGETS for name in targets):
        raise ValueError(f"targets is {targets!r}, but must be a tuple of some of {', '.join(TARGETS)}")
    if not experts:
        raise ValueError(f"{type(model).__name__} has no experts with transformers' decorator")
    if any(hasattr(module, ADAPTERS) for module in experts.values()):
        raise ValueError(f"the experts of this {type(model).__name__} have adapters already")
    adapters = {}
    for name, module in experts.items():
        factors = {n: new_factors(module, n, lora).to(dtype) for n in names_of(module) if n in targets}
        if not factors:
            raise ValueError(f"none of targets {targets} is one of {names_of(module)}")
        if state is not None:
            loras = by_prefix({name: factors})
            for prefix, made in loras.items():
                if (rank := rank_in(state, prefix, made)) != made.rank:
                    raise ValueError(
                        f"{prefix}lora_A.weight has rank {rank}, but the adapter needs {made.rank}"
                    )
            load_stacked(loras, state)
        for n, whole in factors.items():
            shard_factors(whole, model, kept(module, n))
        adapters[name] = nn.ModuleDict(factors).train(module.training)
    return adapters


def new_factors(module: nn.Module, name: str, lora: dict) -> LoRAFactors:
    """Return adapters for the weight of all experts, of which ranks may have a part each."""
    at_rest = kept(module, name)
    if not hasattr(at_rest, "placements"):
        weights = weights_of(module)
        weight = weights.down if name == "down_proj" else weights.gate_up
        return LoRAFactors(weight, weight.shape[0], **lora)
    weight = four_bits_of(module, name)
    if weight is None:
        weight = local_part(at_rest.detach())
        weight = weight.mT if module.is_transposed else weight
    factors = LoRAFactors(weight, at_rest.shape[0], **(lora | {"dora": False}))
    if lora.get("dora"):
        norms = gathered(row_norms(weight), at_rest)
        factors.magnitude = nn.Parameter(norms.to(weight.dtype))
    return factors


def attach(model: nn.Module, adapters: Mapping[str, nn.ModuleDict]) -> list[str]:
    run_ours(model)
    model.requires_grad_(False)
    for name, factors in adapters.items():
        module = model.get_submodule(name)
        module.add_module(ADAPTERS, factors)
        module.register_forward_pre_hook(refuse_to_run_without)
    return list(adapters)


def refuse_to_run_without(module: nn.Module, _: tuple) -> None:
    """A hook: another implementation of the experts would run, and train, as if there were no adapters."""
    implementation = module.config._experts_implementation
    if hasattr(module, ADAPTERS) and implementation != NAME:
        raise RuntimeError(
            f"{type(module).__name__} has adapters, which experts_implementation={implementation!r} passes "
            f"over: model.set_experts_implementation({NAME!r}), or merge_lora(model) first"
        )


@checked
def save_lora(
    model: nn.Module, directory: str | pathlib.Path, *, per_expert: bool = False,
    layers: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), base_model: str | None = None,
) -> None:  # fmt: skip
    """Write the adapters of `add_lora` in PEFT's format: adapter_config.json and adapter_model.safetensors.

    By default there is one pair of tensors for each weight, for PEFT's `target_parameters` on the same model.
    The configuration then says no dropout, which PEFT would refuse.  With `per_expert` there is one pair for
    each expert and layer, `<experts>.{e}.{layer}.lora_A.weight`, for a model whose experts are linear layers
    of these names; gate and up have the same A.  Of a sharded model, the first rank writes what one process
    would.

    Raises ValueError for a model without adapters and, unless `per_expert`, with DoRA; ImportError without
    safetensors.
    """
    save = need("safetensors.torch", "convert").save
    if not isinstance(layers, (tuple, list)) or [type(name) for name in layers] != [str] * 3:
        raise ValueError(f"layers must be three names, of gate, up and down, not {layers!r}")
    modules = {name: getattr(module, ADAPTERS) for name, module in adapted_experts(model).items()}
    shared, tensors = any(hasattr(p, "placements") for m in modules.values() for p in m.parameters()), {}
    for name, factors in modules.items():  # one by one: ranks gather them
        if per_expert:
            found = tensors_per_expert(f"{PREFIX}{name}.", model.get_submodule(name), layers)
        else:
            found = factors_of_all_experts(by_prefix({name: factors}))
        if not shared or torch.distributed.get_rank() == 0:
            tensors |= {key: t.cpu() if shared else t for key, t in found.items()}
    targets = [n for n in TARGETS if any(n in factors for factors in modules.values())]
    some = next(lora for factors in modules.values() for lora in factors.values())
    config = peft_config(some, base_model or getattr(model, "name_or_path", None) or None)
    if per_expert:
        there = [layer for layer in layers if any(f".{layer}." in name for name in tensors)]
        config |= {"target_modules": there, "lora_dropout": some.dropout}
    else:
        parents = sorted({".".join(name.split(".")[-2:]) for name in modules})
        config |= {"target_parameters": [f"{parent}.{n}" for parent in parents for n in targets]}

    def write() -> None:
        folder = pathlib.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        with drafted(folder / CONFIG) as text, drafted(folder / TENSORS, "wb") as data:
            data.write(save({name: t.contiguous() for name, t in tensors.items()}))
            text.write(json.dumps(config, indent=2, sort_keys=True) + "\n")

    if not shared:
        return write()
    from ..distributed.checkpoint import on_first_rank  # which takes long to import

    return on_first_rank(write)


@checked
def load_lora(
    model: nn.Module, directory: str | pathlib.Path, *, dtype: torch.dtype = torch.float32, **lora
) -> list[str]:
    """Add adapters to `model` as `add_lora` does, with the values that PEFT or `save_lora` wrote.

    The files must be for `target_parameters`.  `lora` has options that they do not contain, such as
    `dropout`.
    Raises ValueError for another kind of directory and for tensors that fit no experts of the model, KeyError
    and ValueError for tensors that are missing or of another shape; then the model is unchanged.
    """
    load_file = need("safetensors.torch", "convert").load_file
    directory = pathlib.Path(directory)
    try:
        config = read_json(directory / CONFIG)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG} is not JSON: {error}") from error
    targets, how = read_lora_config(config, directory / CONFIG)
    try:
        state = load_file(plain(directory / TENSORS))
    except need("safetensors", "convert").SafetensorError as error:
        raise ValueError(f"{directory / TENSORS} is damaged: {error}") from error
    if how["rank"] > max((size for tensor in state.values() for size in tensor.shape), default=0):
        raise ValueError(f"{directory / CONFIG} has r {how['rank']}, which no tensor of {TENSORS} has")
    adapters = new_adapters(model, targets, dtype, how | lora, state)
    names = {f"{prefix}lora_{m}.weight" for prefix in by_prefix(adapters) for m in "AB"}
    if extra := sorted(state.keys() - names):
        key = printable(extra[0])
        raise ValueError(f"{directory / TENSORS} has {key}, which no experts of this model have")
    return attach(model, adapters)


def read_lora_config(config, path: pathlib.Path) -> tuple[tuple[str, ...], dict]:
    """Which weights have adapters, and the arguments of `LoRAFactors`."""
    names = (config.get("target_parameters") or []) if isinstance(config, dict) else []
    if not names or config.get("peft_type") != "LORA" or config.get("target_modules"):
        raise ValueError(
            f"{path} is not of a LoRA of target_parameters alone, the stacked form, which load_lora reads"
        )
    if missing := [key for key in ("r", "lora_alpha") if key not in config]:
        raise ValueError(f"{path} has no {missing[0]}")
    if other := [key for key in ("rank_pattern", "alpha_pattern", "use_dora") if config.get(key)]:
        raise ValueError(f"{path} has {other[0]}, which add_lora has not for experts in one tensor")
    rslora = config.get("use_rslora") or False
    kinds = {"target_parameters": (names, list), "r": (config["r"], int), "use_rslora": (rslora, bool)}
    kinds["lora_alpha"] = config["lora_alpha"], (int, float)
    if wrong := [key for key, (value, kind) in kinds.items() if not isinstance(value, kind)]:
        raise ValueError(f"{path}: {wrong[0]} is a {type(config[wrong[0]]).__name__}")
    if not abs(config["lora_alpha"]) <= sys.float_info.max:
        raise ValueError(f"{path}: lora_alpha is no finite number")
    targets = tuple({str(name).rpartition(".")[2] for name in names})
    return targets, {"rank": config["r"], "alpha": config["lora_alpha"], "rslora": rslora}


@torch.no_grad()
@checked
def merge_lora(model: nn.Module) -> None:
    """Add the adapters of `add_lora` to the weights, and remove them; the model stays frozen.

    Raises ValueError for a model without adapters, and for weights of 4 or 8 bits, which would round the
    adapters away.
    """
    adapted = adapted_experts(model)
    for name, module in adapted.items():
        for packed in (four_bits_of(module, weight) for weight in names_of(module)):
            if packed is not None:
                why = f"have {packed.bits} bits, which would round the adapters away"
                raise ValueError(f"the weights of {name} {why}")
        for weight, lora in getattr(module, ADAPTERS).items():
            lora.check_present(getattr(module, weight))
    for module in adapted.values():
        for name, lora in getattr(module, ADAPTERS).items():
            weight = local_part(getattr(module, name))  # and the adapters of the same experts
            weight = weight.mT if module.is_transposed else weight
            for e in range(len(weight)):  # one by one: all of them in float32 would take twice their memory
                weight[e].copy_(lora.merged(weight[e], e))
        delattr(module, ADAPTERS)
        for key in [k for k, hook in hooks_before(module).items() if hook is refuse_to_run_without]:
            del hooks_before(module)[key]


def adapted_experts(model: nn.Module) -> dict[str, nn.Module]:
    found = {name: module for name, module in experts_in(model).items() if hasattr(module, ADAPTERS)}
    if not found:
        raise ValueError(f"the experts of this {type(model).__name__} have no adapters: call add_lora first")
    return found


def by_prefix(modules: Mapping[str, Mapping[str, LoRAFactors] | nn.ModuleDict]) -> dict[str, LoRAFactors]:
    """The adapters by what PEFT puts before their tensors' names: a module's last has the outer wrapper."""
    found = {}
    for name, factors in modules.items():
        for depth, lora in enumerate(reversed(list(factors.values()))):
            found[f"{PREFIX}{name}.{'base_layer.' * depth}"] = lora
    return found


def tensors_per_expert(prefix: str, module: nn.Module, layers: tuple[str, str, str]) -> dict[str, Tensor]:
    """The adapters of one module, for linear layers of each expert."""
    gate, up, down = layers
    up_name, down_name = names_of(module)
    factors, tensors = getattr(module, ADAPTERS), {}
    if up_name in factors:
        rows = factors[up_name].B.shape[1]
        if not module.has_gate:
            rows_of = {up: slice(rows)}
        elif known_gate(module) is not None and known_gate(module)[1]:  # in turn
            rows_of = {gate: slice(0, rows, 2), up: slice(1, rows, 2)}
        elif module.is_concatenated:
            rows_of = {gate: slice(rows // 2), up: slice(rows // 2, rows)}
        else:
            raise ValueError(f"cannot tell which rows of {type(module).__name__} are gates")
        tensors |= factors_per_expert(prefix, factors[up_name], rows_of)
    if down_name in factors:
        tensors |= factors_per_expert(prefix, factors[down_name], {down: slice(None)})
    return tensors


def peft_config(lora: LoRAFactors, base_model: str | None) -> dict:
    """Return PEFT's configuration of a LoRA of any form."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.magnitude is not None,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [],
    }
