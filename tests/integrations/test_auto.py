"""`import moe_aiter.integrations.auto`: what it changes in transformers, and what it leaves alone."""

import importlib
import json
import sys

import pytest
from integrations.families import experts_of, tiny_config, tiny_model

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from moe_aiter.integrations.transformers import NAME, register, unregister

AUTO = "moe_aiter.integrations.auto"


@pytest.fixture(autouse=True)
def imported(monkeypatch):
    before = PreTrainedModel.get_correct_experts_implementation
    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", before)
    monkeypatch.delitem(sys.modules, AUTO, raising=False)
    unregister()
    importlib.import_module(AUTO)
    yield
    sys.modules.pop(AUTO)
    register()


def chosen(config, **kwargs):
    return AutoModelForCausalLM.from_config(config, **kwargs).config._experts_implementation


def test_models_get_it_where_nobody_chooses(tmp_path):
    assert chosen(tiny_config("qwen3_moe")) == NAME
    assert chosen(tiny_config("qwen3_moe"), experts_implementation="grouped_mm") == "grouped_mm"
    tiny_model("mixtral").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    for implementation in (None, "eager"):
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"experts_implementation": implementation})
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert experts_of(model)[0].config._experts_implementation == (implementation or NAME)


def test_models_keep_transformers_default_where_ours_cannot_run(recwarn):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    assert chosen(LlamaConfig(vocab_size=8, **sizes)) != NAME
    eight_bits = tiny_config("qwen3_moe", quantization_config={"quant_method": "fp8"})
    assert chosen(eight_bits) != NAME
    assert chosen(tiny_config("qwen3_moe", quantization_config={"quant_method": "bitsandbytes"})) == NAME
    unregister()
    assert chosen(tiny_config("qwen3_moe")) != NAME
    assert not [w for w in recwarn if "changes nothing" in str(w.message)]


def test_axolotl_does_not_override_a_choice(monkeypatch):
    axolotl = importlib.import_module("upstream.stubs.axolotl.integrations.base")
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, axolotl)
    monkeypatch.delitem(sys.modules, "moe_aiter.integrations.axolotl", raising=False)
    plugin = importlib.import_module("moe_aiter.integrations.axolotl").Plugin()
    monkeypatch.delitem(sys.modules, "moe_aiter.integrations.axolotl")
    cfg = importlib.import_module("upstream.stubs.axolotl.utils.dict").DictDefault()
    plugin.pre_model_load(cfg)
    plugin.pre_model_load(cfg)
    assert cfg == {"experts_implementation": NAME}
    cfg.experts_implementation = "eager"
    with pytest.raises(ValueError, match="'eager' but moe_aiter's plugin is on: remove"):
        plugin.pre_model_load(cfg)
