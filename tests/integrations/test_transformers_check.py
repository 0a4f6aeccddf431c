"""What is said of models in which no module, or not every one, obeys `experts_implementation="moe_aiter"`."""

import warnings

import pytest
import torch
from integrations.families import experts_of, tiny_config, tiny_model

from moe_aiter.integrations import peft as our_peft
from moe_aiter.integrations import transformers as ours
from moe_aiter.integrations.lora import add_lora
from moe_aiter.integrations.transformers import NAME, check, register, unregister

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
SPARSE = {"vocab_size": 32, "d_model": 16, "num_experts": 4}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
OTHERS = {  # models whose experts run by transformers' own code: the sizes, and classes that `check` names
    "NllbMoeConfig": (
        {**SPARSE, **HEADS, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
         "decoder_ffn_dim": 16, "encoder_sparse_step": 1, "decoder_sparse_step": 1},
        {"NllbMoeExperts"},
    ),
    "DogeConfig": ({**SIZES, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}, {"DogeCDMoE"}),
    "LlamaConfig": (SIZES, set()),
}  # fmt: skip
IGNORED = "changes nothing in {}: none of its modules has transformers' decorator"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(ours, "warned", set())
    register()
    yield
    register()


def other(kind: str, **how):
    """A model of this class of configurations."""
    config = getattr(transformers, kind)(**OTHERS[kind][0])
    auto = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
    return getattr(transformers, f"AutoModelFor{auto}").from_config(config, **how)


def messages(make, *args, **kwargs) -> list[str]:
    """The warnings of ours in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(*args, **kwargs)
    return [str(w.message) for w in caught if NAME in str(w.message)]


def of_llava():
    text = tiny_config("mixtral")
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
        patch_size=4,
    )  # fmt: skip
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_without_decorated_experts(kind, capsys):
    """One warning for each class, from each way to ask; `check` names the modules that look like experts."""
    model = other(kind)
    if any(map(ours.is_experts, model.modules())):
        pytest.skip("the experts have the decorator in this version of transformers")
    (message,) = messages(model.set_experts_implementation, NAME)
    assert IGNORED.format(type(model).__name__) in message
    assert not messages(other, kind, experts_implementation=NAME)
    ours.warned.clear()
    (message,) = messages(other, kind, experts_implementation=NAME)
    assert IGNORED.format(type(model).__name__) in message
    assert not messages(model.set_experts_implementation, NAME)
    found, text = check(model), capsys.readouterr().out
    assert {module.kind for module in found.values()} == OTHERS[kind][1]
    assert {module.path for module in found.values()} <= {"not ours"}
    whys = {"DogeCDMoE": "each expert is one neuron", "NllbMoeExperts": "router's mask as expert ids"}
    assert all(whys[module.kind] in module.why and module.why in text for module in found.values())
    assert found or "has no experts" in text


def test_loading(tmp_path):
    other("LlamaConfig").save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert not messages(load, tmp_path)
    with pytest.warns(UserWarning, match=IGNORED.format("LlamaForCausalLM")):
        model, info = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, experts_implementation=NAME, output_loading_info=True
        )
    assert isinstance(model, transformers.LlamaForCausalLM) and not info["missing_keys"]
    assert not messages(load, tmp_path, experts_implementation=NAME)


def test_models_that_obey_are_silent():
    make = transformers.AutoModelForCausalLM.from_config
    for family in ("mixtral", "gpt_oss"):
        assert not messages(make, tiny_config(family), experts_implementation=NAME)
        assert not messages(tiny_model(family).set_experts_implementation, NAME)
    assert not messages(other("LlamaConfig").set_experts_implementation, "eager")
    assert not messages(other, "LlamaConfig", experts_implementation="eager")


def test_a_model_of_several_parts():
    """The part that sees has no experts: no warning for it, as the part that speaks has."""
    make = transformers.AutoModelForImageTextToText.from_config
    assert not messages(make, of_llava(), experts_implementation=NAME)
    model = make(of_llava(), experts_implementation="eager")
    assert not messages(model.set_experts_implementation, {"text_config": NAME})
    assert {module.path for module in check(model).values()} == {"fused"}
    assert messages(model.model.vision_tower.set_experts_implementation, NAME)


def test_an_error_while_a_model_is_made():
    with pytest.raises(ValueError, match="no_such"):
        other("LlamaConfig", experts_implementation="no_such")
    assert messages(other, "LlamaConfig", experts_implementation=NAME)


def test_unregister_restores_the_methods():
    register()
    unregister()
    kept = [vars(transformers.PreTrainedModel)[name] for name in ("from_pretrained", "_from_config")]
    assert all(method.__func__.__module__ == "transformers.modeling_utils" for method in kept)
    assert not hasattr(kept[0].__func__, "__wrapped__")
    unregister()
    register()
    assert transformers.PreTrainedModel.set_experts_implementation.__wrapped__
    unregister()
    assert [vars(transformers.PreTrainedModel)[name] for name in ("from_pretrained", "_from_config")] == kept


def test_check_of_each_path(capsys):
    model = tiny_model("mixtral", experts=NAME, num_hidden_layers=3)
    names = [f"model.layers.{i}.mlp.experts" for i in range(3)]
    found, text = check(model), capsys.readouterr().out
    assert list(found) == names
    assert {(m.kind, m.path) for m in found.values()} == {("MixtralExperts", "fused")}
    assert text.splitlines() == [
        f"fused: {names[0]} and 2 more (MixtralExperts): the activation swiglu runs inside the products"
    ]
    experts_of(model)[1]._apply_gate = lambda z: z.chunk(2, -1)[0]
    found, text = check(model), capsys.readouterr().out
    assert [found[name].path for name in names] == ["fused", "two products", "fused"]
    assert f"two products: {names[1]} (MixtralExperts): no kernel has its method _apply_gate" in text
    model.set_experts_implementation("eager")
    assert {m.path for m in check(model).values()} == {"not ours"}
    assert "its configuration has experts_implementation='eager'" in capsys.readouterr().out


def why(model) -> str:
    (found,) = set(check(model).values())
    assert found.path == "two products"
    return found.why


def test_reasons_of_two_products():
    model = tiny_model("mixtral", experts=NAME, hidden_act="tanh")
    assert "activation function" in why(model)
    model = tiny_model("gpt_oss", experts=NAME)
    for module in experts_of(model):
        module.limit = 0.0
    assert "with these constants: gate_max must be above 0" in why(model)
    model = tiny_model("mixtral", experts=NAME)
    add_lora(model, rank=2)
    assert "adapter" in why(model)


def test_adapters_of_peft():
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    lora = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
    our_peft.register()
    try:
        model = peft.get_peft_model(tiny_model("mixtral", experts=NAME), lora)
        assert "adapter" in why(model)
    finally:
        our_peft.unregister()
    assert {m.path for m in check(model).values()} == {"whole weights"}  # which PEFT makes


def test_8_bit_weights():
    model = tiny_model("mixtral", experts=NAME, num_hidden_layers=1)
    weight = experts_of(model)[0].down_proj
    weight.data = weight.data.to(torch.float8_e4m3fn)
    (found,) = check(model).values()
    assert found.path == "not ours" and "float8_e4m3fn" in found.why


def test_our_own_layers_are_not_listed():
    from moe_aiter import MoE

    assert check(torch.nn.ModuleList([MoE(16, 8, 4, 2), torch.nn.Linear(2, 2)])) == {}
