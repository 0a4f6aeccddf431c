"""Experts of 4 bits in transformers' models: gpt-oss as it is published, and other models quantised here.

    from moe_aiter.integrations.four_bit import load_gpt_oss, quantize_experts

    model = load_gpt_oss("openai/gpt-oss-20b")  # MXFP4, never dequantised
    quantize_experts(model, "nf4")  # another model, whose experts have transformers' decorator
    add_lora(model, rank=16, alpha=32)  # of integrations.lora: adapters on the frozen weights

The model runs `experts_implementation="moe_aiter"`, which dequantises tiles inside the products.
"""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ..kernels.base.check import check_known, check_parameter_dtype, checked
from ..kernels.quantize.four_bit import FORMATS, FP8
from ..layers.experts import is_hooked, local_part
from ..layers.training import is_fsdp
from ..private_api import forget_fsdp, hooks_before, own_buffers, own_parameters
from .other_experts import implementation_of
from .sharded import (
    BLOCKS,
    EP,
    SCALES,
    buffers_again,
    ep_mesh_of,
    fsdp_mesh_of,
    quantized_weight,
    shard_codes,
    share_published,
    take_from_fsdp,
)
from .transformers import ADAPTERS, NAME, four_bits_of, is_experts, is_packed, names_of, register, run_ours

__all__ = ["load_gpt_oss", "quantize_experts"]

CONVERSIONS = "_weight_conversions"  # of a model: with these, save_pretrained would divide codes like weights


@torch.no_grad()
@checked
def quantize_experts(model: nn.Module, format: str = "nf4") -> list[str]:
    """Replace the weights of the model's experts by frozen ones of 4 bits; returns the modules' names.

    format: "nf4", "mxfp4" or "int4"; rows must be a multiple of 64, 32 or 128 numbers.  One weight after
    another is replaced, so the peak is the model and the largest weight in 4 bits.  state_dict then has
    `<experts>.<weight>.packed`, `.scales` and so on in the place of `<experts>.<weight>`.  save_pretrained,
    and so the checkpoints of a Trainer, have the same keys, for load_state_dict of such a model.  Give the
    whole model: save_pretrained of a model that has it as a part divides codes as it divides weights, and
    raises an error or writes keys that no model has.

    If ranks share the experts by transformers' expert parallelism, each quantises its own.  If FSDP2 alone
    shards them, each rank quantises one whole weight after another, and FSDP2 shards the codes.  All ranks
    must call this before the first forward pass.  The result is that of one process, but NF4's scales are
    float32, 4.5 bits a number in all.

    From then on the model runs `experts_implementation="moe_aiter"`; with another one, the next forward pass
    raises RuntimeError.  Experts that have this format already stay as they are.

    Raises ValueError for an unknown format, other sizes, a model without experts that have transformers'
    decorator, experts with adapters, of another format or that are sharded otherwise, and weights that an
    offloading hook hides; then the model is unchanged.  Raises ValueError for a weight that has no 4 bits,
    too, which stays then: those before it have 4 bits.
    """
    check_known("format", format, FORMATS)
    register()
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts with transformers' decorator")
    check_quantisable(found, format)
    run_ours(model)
    keep_codes_whole(model, found.values())
    for name, module in found.items():
        refuse_others(module)
        mesh = take_from_fsdp(module, names_of(module))
        for weight in names_of(module):
            if four_bits_of(module, weight) is None:
                p = own_parameters(module)[weight]
                fsdp = fsdp_mesh_of(p)
                w = local_part(p) if fsdp is None else p.to(fsdp.device_type).full_tensor()
                w = w.mT if module.is_transposed else w
                try:
                    packed = quantized_weight(w, format, mesh)
                except ValueError as error:
                    raise ValueError(f"{weight} of {name}: {error}") from error
                if fsdp is not None:
                    shard_codes(packed, fsdp)
                    for unit in filter(is_fsdp, model.modules()):
                        forget_fsdp(unit, module, weight)
                del own_parameters(module)[weight]
                setattr(module, weight, packed)
        module.requires_grad_(False)
    return list(found)


def check_quantisable(found: Mapping[str, nn.Module], format: str) -> None:
    for name, module in found.items():
        if getattr(module, ADAPTERS, None):
            raise ValueError(f"{name} has adapters: call quantize_experts first, and add_lora then")
        for weight in names_of(module):
            made = four_bits_of(module, weight)
            if made is None:
                check_packable(module, weight, FORMATS[format].block)
            elif made.format == FP8:
                raise ValueError(
                    f"{name} has weights of 8 bits, of an FP8 checkpoint: to quantise them to {format}, "
                    "load the model with quantization_config=FineGrainedFP8Config(dequantize=True)"
                )
            elif made.format != format:
                raise ValueError(
                    f"{name} has weights of {made.format}: to quantise them to {format}, load the model again"
                )


def keep_codes_whole(model: nn.Module, experts: Collection[nn.Module]) -> None:
    """Let save_pretrained write codes as they are, of each model of transformers that has these experts."""
    for part in model.modules():
        if hasattr(part, "save_pretrained") and not {*experts}.isdisjoint(part.modules()):
            setattr(part, CONVERSIONS, [])


def refuse_others(module: nn.Module) -> None:
    if refuse_to_run_elsewhere not in hooks_before(module).values():
        module.register_forward_pre_hook(refuse_to_run_elsewhere)


def refuse_to_run_elsewhere(module: nn.Module, _: tuple[Any, ...]) -> None:
    """A hook: other implementations of the experts take codes for a weight, or find none."""
    implementation = implementation_of(module)
    if implementation != NAME and any(is_packed(module, name) for name in names_of(module)):
        raise RuntimeError(
            f"{type(module).__name__} has weights of 4 bits, which experts_implementation={implementation!r} "
            f"cannot read: call model.set_experts_implementation({NAME!r})"
        )


def check_packable(module: nn.Module, name: str, block: int) -> None:
    w = own_parameters(module).get(name)
    if w is None:
        raise ValueError(f"{name} of {type(module).__name__} is no parameter: take away what wraps it")
    if w.dim() < 3 or (w.is_meta and is_hooked(module)):  # ZeRO-3's are (0,)
        raise ValueError(
            f"{name} of {type(module).__name__} has no numbers now, because hooks hide them outside of "
            "forward passes: call quantize_experts before you shard or offload the model"
        )
    if hasattr(w, "placements") and ep_mesh_of(w) is None and fsdp_mesh_of(w) is None:
        raise ValueError(
            f"{name} of {type(module).__name__} is sharded, but not by experts: load without tp_size or with "
            "an ep_size above 1"
        )
    width = w.shape[1 if module.is_transposed else 2]
    if width % block:
        found = f"{name} of {type(module).__name__} has rows of {width} numbers"
        raise ValueError(f"{found}, not a multiple of {block}")


@checked
def load_gpt_oss(
    directory: str | pathlib.Path, *, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> nn.Module:
    """Load gpt-oss's published checkpoint as transformers does, but keep its experts in MXFP4.

    directory: a directory or a name on the Hub.  dtype: of all other weights, and of the products.
    options: more arguments of `from_pretrained`, such as `device_map`.  The experts' weights are buffers,
    `<experts>.gate_up_proj_blocks` (E, 2I, H / 32, 16) and `..._scales` (E, 2I, H / 32), for down_proj alike.
    These are the checkpoint's names and shapes, so `save_pretrained` writes what was read.
    Raises ImportError without transformers, FileNotFoundError without a model there, ValueError for a model
    that is not gpt-oss, or whose experts are not in MXFP4 or not complete.
    """
    register()
    from transformers import AutoConfig, GptOssForCausalLM

    check_parameter_dtype(dtype)
    try:
        config = AutoConfig.from_pretrained(directory)
    except OSError as error:
        raise FileNotFoundError(f"{directory} is no model that transformers finds") from error
    if config.model_type != "gpt_oss":
        raise ValueError(f"{directory} is {config.model_type}, not gpt_oss")
    published = vars(config).pop("quantization_config", None)  # by which transformers would convert weights

    class Packed(GptOssForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for module in filter(is_experts, self.modules()):
                as_published(module)
            whole = ("gate_up_proj", "down_proj")  # which no plan finds any more
            self._ep_plan = {key: how for key, how in self._ep_plan.items() if not key.endswith(whole)}

        def initialize_weights(self):  # that the checkpoint has not
            for module in filter(is_experts, self.modules()):
                tensors, filled = own_parameters(module) | own_buffers(module), "_is_hf_initialized"
                lacks = ", ".join(name for name, t in tensors.items() if not getattr(t, filled, False))
                if lacks and f"down_proj{BLOCKS}" in tensors:
                    raise ValueError(f"{directory} is not as gpt-oss is published: experts lack {lacks}")
            super().initialize_weights()

        @classmethod
        def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
            if mesh_manager is not None and distributed_config.ep_size > 1:
                for module in filter(is_experts, model.modules()):
                    share_published(module, mesh_manager.get_mesh(EP))
            return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    Packed.__name__ = GptOssForCausalLM.__name__  # by which transformers chooses the loss
    model = Packed.from_pretrained(
        directory, config=config, dtype=dtype, experts_implementation=NAME, **options
    )
    if type(model) is Packed:  # and not what FSDP2 makes of it
        model.__class__ = GptOssForCausalLM
    if published is not None:
        model.config.quantization_config = published
    for module in filter(is_experts, model.modules()):
        buffers_again(module)
        refuse_others(module)
        module.requires_grad_(False)
    return model


def as_published(module: nn.Module) -> None:
    """Replace the weights of an experts module by empty buffers, named and shaped as in the checkpoint."""
    for name in names_of(module):
        E, width, rows = own_parameters(module).pop(name).shape  # transposed
        shape = E, rows, width // FORMATS["mxfp4"].block
        module.register_buffer(f"{name}{BLOCKS}", torch.empty(*shape, 16, dtype=torch.uint8))
        module.register_buffer(f"{name}{SCALES}", torch.empty(shape, dtype=torch.uint8))
