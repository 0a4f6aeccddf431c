"""A valid call of each public name of `integrations`: the rest of callables.py, if transformers is there."""

import copy
import functools
import importlib
import pathlib
import pkgutil
import tempfile
import types

import torch
from callables import BF16, LORA, small_moe
from integrations.families import tiny_config, tiny_model
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from moe_aiter import integrations
from moe_aiter.integrations import checkpoints, four_bit, lora, monitor, prime_rl, transformers

FOLDER = tempfile.TemporaryDirectory()  # for as long as the tests run
ROOT = pathlib.Path(FOLDER.name)
APART = {"auto", "axolotl"}  # tests/upstream/trainers.py has them
TITAN = importlib.util.find_spec("torchtitan") is not None
MODULES = [
    importlib.import_module(f"moe_aiter.integrations.{module.name}")
    for module in pkgutil.iter_modules(integrations.__path__)
    if module.name not in APART and (module.name != "torchtitan" or TITAN)
]
RESULTS = {"CheckpointError", "Report"}  # raised and returned


@functools.cache
def cached_model() -> nn.Module:
    transformers.register()
    return tiny_model("mixtral", num_hidden_layers=1)


def model() -> nn.Module:
    return copy.deepcopy(cached_model())


def adapted() -> nn.Module:
    new = model()
    lora.add_lora(new, rank=2)
    return new


@functools.cache
def saved(what: str) -> pathlib.Path:
    """Folders to read: a model, its layers converted, a dense one, gpt-oss as published, adapters."""
    folder = ROOT / what
    if what == "theirs":
        model().save_pretrained(folder, save_original_format=True)
    elif what == "ours":
        checkpoints.convert(saved("theirs"), folder)
    elif what == "gpt_oss":
        published = tiny_model("gpt_oss", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        four_bit.as_published(published.model.layers[0].mlp.experts)
        published.save_pretrained(folder)
    elif what == "adapters":
        lora.save_lora(adapted(), folder)
    else:
        import transformers

        config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                          num_attention_heads=1, vocab_size=8)  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def new_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(dir=ROOT))


def trainer() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        callback_handler=CallbackHandler([DefaultFlowCallback()], None, None, None, None)
    )


WRITTEN = {"shard_bytes": 1000, "check": True, "progress": lambda *_: None}
CALLS = {
    "lora.add_lora": (
        lora.add_lora,
        lambda: {"model": model(), "targets": ("gate_up_proj",), "dtype": torch.float32, **LORA},
    ),
    "lora.load_lora": (
        lora.load_lora,
        lambda: {"model": model(), "directory": saved("adapters"), "dtype": BF16, "dropout": 0.1},
    ),
    "lora.merge_lora": (lora.merge_lora, lambda: {"model": adapted()}),
    "lora.save_lora": (
        lora.save_lora,
        lambda: {
            "model": adapted(),
            "directory": new_folder(),
            "per_expert": True,
            "layers": ("gate_proj", "up_proj", "down_proj"),
            "base_model": "a name",
        },
    ),
    "four_bit.load_gpt_oss": (
        four_bit.load_gpt_oss,
        lambda: {"directory": saved("gpt_oss"), "dtype": BF16},
    ),
    "four_bit.quantize_experts": (
        four_bit.quantize_experts,
        lambda: {"model": tiny_model("mixtral", hidden_size=64, intermediate_size=64), "format": "nf4"},
    ),
    "monitor.ExpertsMonitor": (
        monitor.ExpertsMonitor,
        lambda: {"model": model(), "evaluation": True, "group": None},
    ),
    "monitor.MonitorCallback": (monitor.MonitorCallback, lambda: {"prefix": "moe", "group": None}),
    "monitor.watch": (monitor.watch, lambda: {"trainer": trainer(), "prefix": "moe", "group": None}),
    "prime_rl.run_experts": (
        prime_rl.run_experts,
        lambda: {
            "x": torch.randn(3, 16),
            "w1": torch.randn(6, 8, 16),
            "w2": torch.randn(6, 16, 8),
            "w3": torch.randn(6, 8, 16),
            "expert_ids": torch.tensor([[0, 1], [2, 5], [3, 4]]),
            "scores": torch.rand(3, 2),
            "num_experts": 6,
        },
    ),
    "transformers.register": (
        transformers.register,
        lambda: {"rows": 2.0, "max_tokens": 64, "keep_x": False},
    ),
    "transformers.check": (transformers.check, lambda: {"model": model()}),
    "transformers.experts_forward": (
        transformers.experts_forward,
        lambda: {
            "module": model().model.layers[0].mlp.experts,
            "hidden_states": torch.randn(3, 16),
            "top_k_index": torch.tensor([[0, 1], [2, 5], [3, 4]]),
            "top_k_weights": torch.rand(3, 2),
        },
    ),
    "transformers.known_gate": (
        transformers.known_gate,
        lambda: {"module": model().model.layers[0].mlp.experts},
    ),
    "checkpoints.convert": (
        checkpoints.convert,
        lambda: {"source": saved("theirs"), "target": new_folder(), "to": "moe_aiter", **WRITTEN},
    ),
    "checkpoints.load_moe": (
        checkpoints.load_moe,
        lambda: {"folder": saved("ours"), "layer": "model.layers.0.mlp"},
    ),
    "checkpoints.moe_from_huggingface": (
        checkpoints.moe_from_huggingface,
        lambda: {"block": MixtralSparseMoeBlock(tiny_config("mixtral"))},
    ),
    "checkpoints.state_dict_to_huggingface": (
        checkpoints.state_dict_to_huggingface,
        lambda: {"moe": small_moe(renormalize=True), "model_type": "mixtral"},
    ),
    "checkpoints.upcycle": (
        checkpoints.upcycle,
        lambda: {
            "source": saved("dense"),
            "target": new_folder(),
            "num_experts": 4,
            "top_k": 2,
            "to": "huggingface",
            "noise": 0.1,
            "router_std": 0.1,
            "seed": 3,
            **WRITTEN,
        },
    ),
}


def titan_config():
    """Of the routed experts of a layer."""
    spec = importlib.import_module("torchtitan.models.deepseek_v3").model_registry("debugmodel")
    return next(layer.moe for layer in spec.model.layers if layer.moe is not None).routed_experts


if TITAN:
    from moe_aiter.integrations import torchtitan

    CALLS["torchtitan.convert"] = torchtitan.convert, lambda: {"model": titan_config().build()}
    CALLS["torchtitan.experts"] = torchtitan.experts, lambda: {"config": titan_config()}
