"""Experts of 4 bits in transformers' models: gpt-oss's published layout, adapters on it, other models."""

import json

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from check import error
from integrations.families import WIDE_FAMILIES, WIDE_SIZES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moe_aiter.config import interpret
from moe_aiter.integrations import transformers as file
from moe_aiter.integrations.checkpoints import moe_from_huggingface
from moe_aiter.integrations.four_bit import load_gpt_oss, quantize_experts
from moe_aiter.integrations.lora import add_lora, load_lora, merge_lora, save_lora
from moe_aiter.integrations.monitor import ExpertsMonitor
from moe_aiter.kernels.quantize.four_bit import FORMATS, quantized

if interpret:
    pytest.skip("the interpreted kernels have tests of their own", allow_module_level=True)

TOKENS = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(1))


def tiny(family, experts="eager", **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **WIDE_SIZES, **WIDE_FAMILIES[family] | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=experts)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def in_mxfp4(model):
    """By its name, each weight of the experts as the published checkpoint has it, and in float32."""
    found = {}
    for name, p in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            w = quantized(p.detach().mT, "mxfp4")
            found[name] = w.packed.unflatten(2, (-1, 16)), w.scales, w.dequantize().mT.contiguous()
    return found


@pytest.fixture
def published(tmp_path):
    """A directory as gpt-oss is published, its tensors, and the same model with dequantised weights."""
    model = tiny("gpt_oss")
    packed = in_mxfp4(model)
    state = {name: p.detach().clone() for name, p in model.state_dict().items() if name not in packed}
    for name, (blocks, scales, _) in packed.items():
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model.load_state_dict({name: full for name, (_, _, full) in packed.items()}, strict=False)
    return tmp_path, state, model


def test_gpt_oss_as_published(published, tmp_path_factory):
    directory, state, whole = published
    model = load_gpt_oss(directory, dtype=torch.float32)
    assert type(model) is type(whole) and model.loss_type == whole.loss_type == "ForCausalLM"
    assert not any(name.endswith(("gate_up_proj", "down_proj")) for name, _ in model.named_parameters())
    torch.testing.assert_close(model(TOKENS).logits, whole(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert {path.path for path in file.check(model).values()} == {"two products"}
    other = tmp_path_factory.mktemp("saved")
    model.save_pretrained(other)
    config = [json.loads((d / "config.json").read_text())["quantization_config"] for d in (directory, other)]
    assert config[0] == config[1]
    again = load_file(other / "model.safetensors")
    assert again.keys() == state.keys() and all(torch.equal(again[name], t) for name, t in state.items())
    with pytest.raises(ValueError, match="is qwen3_moe, not gpt_oss"):
        tiny("qwen3_moe").config.save_pretrained(other)
        load_gpt_oss(other)


def test_gpt_oss_with_experts_that_are_not_as_published(published, tmp_path_factory):
    """Some tensors are missing, or all, as of a checkpoint in bfloat16."""
    directory, state, whole = published
    experts = "model.layers.1.mlp.experts."
    for name in ("down_proj_scales", "gate_up_proj_blocks", "down_proj_bias"):
        rest = {key: t for key, t in state.items() if key != f"{experts}{name}"}
        save_file(rest, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"not as gpt-oss is published: experts lack {name}$"):
            load_gpt_oss(directory)
    whole.save_pretrained(other := tmp_path_factory.mktemp("whole"))
    with pytest.raises(ValueError, match=r"experts lack gate_up_proj_blocks, gate_up_proj_scales, down_proj"):
        load_gpt_oss(other)


@pytest.mark.parametrize("which", ["published", "gpt_oss", "qwen3_moe"])
def test_monitor_and_conversion(which, request):
    """A monitor counts experts of 4 bits, whose weights are no tensors; conversion refuses them."""
    if which == "published":
        model = load_gpt_oss(request.getfixturevalue("published")[0], dtype=torch.float32)
    else:
        quantize_experts(model := tiny(which, intermediate_size=64), "nf4")
    with ExpertsMonitor(model.train()) as monitor:
        model(TOKENS)
        read = monitor.read()
    assert len(read) == 2 and all(s.choices.sum() == TOKENS.numel() * 2 for s in read.values())
    assert {len(s.choices) for s in read.values()} == {4}
    with pytest.raises(ValueError, match="have 4 bits: convert first"):
        moe_from_huggingface(model.model.layers[0].mlp)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["published", "qwen3_moe"])
def test_other_dtypes(which, dtype, request):
    """The codes and scales of 4 bits stay, and the products have the model's new dtype."""
    if which == "published":
        model = load_gpt_oss(request.getfixturevalue("published")[0], dtype=torch.float32)
    else:
        quantize_experts(model := tiny(which), "nf4")
    codes = {name: t.clone() for name, t in model.state_dict().items() if t.dtype == torch.uint8}
    want = model(TOKENS).logits
    got = model.to(dtype)(TOKENS).logits
    assert got.dtype == dtype and error(got, want) < 0.05
    assert codes and all(torch.equal(model.state_dict()[name], t) for name, t in codes.items())
    assert model.float()(TOKENS).logits.dtype == torch.float32


@pytest.mark.parametrize(
    "family, format", [("qwen3_moe", "nf4"), ("qwen3_moe", "mxfp4"), ("gpt_oss", "mxfp4")]
)
def test_saved_by_save_pretrained(family, format, tmp_path):
    """The keys are those of state_dict; transformers would divide the codes of a stacked weight by expert."""
    tiny(family).save_pretrained(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    quantize_experts(model, format)
    model.save_pretrained(tmp_path / "packed")
    found, state = load_file(tmp_path / "packed" / "model.safetensors"), model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[name], t) for name, t in state.items())
    quantize_experts(other := tiny(family), format)
    other.load_state_dict(found)
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


def train(model, steps=20):
    """The loss of each step, on one batch."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adapters_train_as_on_dequantised_weights(published, tmp_path_factory):
    directory, _, whole = published
    models = load_gpt_oss(directory, dtype=torch.float32), whole
    losses = []
    for model in models:
        torch.manual_seed(5)
        add_lora(model, rank=4, alpha=8)
        losses.append(train(model))
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    saved = tmp_path_factory.mktemp("lora")
    save_lora(models[0], saved)
    fresh = load_gpt_oss(directory, dtype=torch.float32)
    load_lora(fresh, saved)
    assert torch.equal(fresh(TOKENS).logits, models[0](TOKENS).logits)
    with pytest.raises(ValueError, match="have 4 bits, which would round the adapters away"):
        merge_lora(fresh)


# PEFT


@pytest.fixture
def peft():
    found = pytest.importorskip("peft", reason="PEFT is not installed")
    from moe_aiter.integrations.peft import register, unregister

    register()
    yield found
    unregister()


def with_adapters(peft, model):
    torch.manual_seed(7)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=names)
    return peft.get_peft_model(model, config)


def trained_by_trainer(model, directory):
    """The loss of each of 50 steps."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(directory), max_steps=50, per_device_train_batch_size=2, learning_rate=2e-2, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=11,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_and_peft_as_on_dequantised_weights(published, peft, tmp_path_factory):
    """Beside eager experts with PEFT's own products; the adapter makes the round trip alone."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    directory, state, whole = published
    folder = tmp_path_factory.mktemp("trainer")
    models = [with_adapters(peft, m) for m in (load_gpt_oss(directory, dtype=torch.float32), whole)]
    trained = [{n: p.shape for n, p in m.named_parameters() if p.requires_grad} for m in models]
    assert trained[0] == trained[1]
    losses = [trained_by_trainer(model, folder) for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert len(losses[0]) == 50 and losses[0][-1] < 0.7 * losses[0][0]

    model = models[0].eval()
    packed = {n: b for n, b in model.get_base_model().named_buffers() if n.endswith(("_blocks", "_scales"))}
    assert len(packed) == 8, "of two layers"
    assert all(torch.equal(t, state[name.replace("base_layer.", "")]) for name, t in packed.items())
    model.save_pretrained(folder)
    saved = load_file(folder / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    expected = model(TOKENS).logits
    for low in (False, True):  # True begins with adapters on the meta device
        fresh = load_gpt_oss(directory, dtype=torch.float32)
        again = peft.PeftModel.from_pretrained(fresh, folder, low_cpu_mem_usage=low).eval()
        assert torch.equal(again(TOKENS).logits, expected)
    fresh = load_gpt_oss(directory, dtype=torch.float32)
    fresh.load_adapter(str(folder))  # transformers' own way
    assert torch.equal(fresh.eval()(TOKENS).logits, expected)


def test_peft_switches_disables_and_unloads(peft):
    model, whole = tiny("qwen3_moe"), tiny("qwen3_moe")
    names = quantize_experts(model, "nf4")
    plain = model(TOKENS).logits
    dequantize(model, whole, names)
    models = [with_adapters(peft, m) for m in (model, whole)]
    for m in models:
        torch.manual_seed(3)
        m.add_adapter("other", m.peft_config["default"])
        for name, p in m.named_parameters():
            p.data += 0.1 * torch.randn(p.shape) if "lora_" in name else 0
    model, whole = models
    for active in ("default", "other"):
        model.set_adapter(active)
        whole.set_adapter(active)
        got, expected = model(TOKENS).logits, whole(TOKENS).logits
        assert not torch.allclose(got, plain, atol=0.1)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert torch.equal(model(TOKENS).logits, plain)
    with pytest.raises(ValueError, match=r"down_proj of .*experts has 4 bits, which would round adapters"):
        model.merge_and_unload()
    assert torch.equal(model(TOKENS).logits, got), "nothing is merged"
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"has 4 bits: it .* takes one active adapter at a time"):
        model(TOKENS)
    assert {path.path for path in file.check(model).values()} == {"not ours"}
    assert torch.equal(model.unload()(TOKENS).logits, plain)
    assert not any("lora" in name for name, _ in model.named_modules())


# other models


def dequantize(model, whole, names):
    """Give `whole` the weights that those of 4 bits of `model` stand for."""
    for name in names:
        module, plain = model.get_submodule(name), whole.get_submodule(name)
        for weight in ("gate_up_proj", "down_proj"):
            full = getattr(module, weight).dequantize()
            getattr(plain, weight).data.copy_(full.mT if plain.is_transposed else full)


@pytest.mark.parametrize(
    "family, format", [("qwen3_moe", "nf4"), ("qwen3_moe", "mxfp4"), ("gpt_oss", "mxfp4")]
)
def test_quantize_experts(family, format, tmp_path):
    """The loss is that of a model whose weights are dequantised, and state_dict makes the round trip."""
    model, whole = tiny(family), tiny(family)
    names = quantize_experts(model, format)
    dequantize(model, whole, names)
    expected = whole(TOKENS).logits
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = tiny(family)
    nn.init.zeros_(other.lm_head.weight)
    quantize_experts(other, format)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    assert quantize_experts(model, format) == names, "what has 4 bits stays as it is"


@pytest.mark.parametrize("normed", [False, True])
def test_dora_and_norms_of_outputs(normed):
    model, whole = tiny("qwen3_moe"), tiny("qwen3_moe")
    for m in (model, whole) if normed else ():
        for experts in filter(file.is_experts, m.modules()):
            experts.has_post_expert_norm, experts.post_expert_norm = True, nn.LayerNorm(64)
    dequantize(model, whole, quantize_experts(model, "nf4"))
    for m in (model, whole):
        torch.manual_seed(5)
        add_lora(m, rank=2, dora=True)
        for name, p in m.named_parameters():
            p.data += 0.1 * torch.randn(p.shape) if file.ADAPTERS in name else 0
        m(input_ids=TOKENS, labels=TOKENS).loss.backward()
    torch.testing.assert_close(model(TOKENS).logits, whole(TOKENS).logits, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(
        [(n, p) for n, p in model.named_parameters() if p.requires_grad],
        [q for q in whole.parameters() if q.requires_grad], strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_offloaded_by_accelerate():
    """Weights of 4 bits are buffers of modules of their own, beside adapters."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny("qwen3_moe")
    quantize_experts(model, "nf4")
    add_lora(model, rank=2, dora=True)
    want = model(TOKENS).logits
    for layer in model.model.layers:
        accelerate.cpu_offload(layer.mlp, execution_device="cpu", offload_buffers=True)
        assert all(t.is_meta for t in (*layer.mlp.parameters(), *layer.mlp.buffers()))
    assert torch.equal(model(TOKENS).logits, want)


def test_a_weight_without_4_bits_stays():
    model = tiny("qwen3_moe")
    before = {name: p.shape for name, p in model.named_parameters()}
    model.model.layers[0].mlp.experts.gate_up_proj.data[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="w holds NaN or infinity"):
        quantize_experts(model, "mxfp4")
    assert {name: p.shape for name, p in model.named_parameters()} == before


def test_a_later_weight_without_4_bits(tmp_path):
    """The layers before have 4 bits already: the model runs, can be saved, and the next call goes on."""
    model = tiny("qwen3_moe")
    weight = model.model.layers[1].mlp.experts.down_proj
    before = weight[0, 0, 0].item()
    weight.data[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"down_proj of model\.layers\.1\.mlp\.experts: w holds NaN"):
        quantize_experts(model, "mxfp4")
    weight.data[0, 0, 0] = before
    assert model(TOKENS).logits.isfinite().all()
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    quantize_experts(model, "mxfp4")
    quantize_experts(other := tiny("qwen3_moe"), "mxfp4")
    assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)


def test_the_inner_model_is_saved_too(tmp_path):
    quantize_experts(model := tiny("qwen3_moe"), "mxfp4")
    model.model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.model.state_dict().keys()


@pytest.mark.parametrize("which", ["published", "qwen3_moe"])
def test_other_implementations_are_refused(which, request):
    if which == "published":
        model = load_gpt_oss(request.getfixturevalue("published")[0], dtype=torch.float32)
    else:
        quantize_experts(model := tiny(which), "nf4")
    want = model(TOKENS).logits
    for name in ("eager", "grouped_mm"):
        model.set_experts_implementation(name)
        with pytest.raises(
            RuntimeError, match=f"has weights of 4 bits, which experts_implementation='{name}'"
        ):
            model(TOKENS)
    model.set_experts_implementation("moe_aiter")
    assert torch.equal(model(TOKENS).logits, want)


def test_offloaded_weights_are_refused():
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model := tiny("qwen3_moe"), execution_device="cpu")
    want = model(TOKENS).logits
    with pytest.raises(ValueError, match="gate_up_proj of Qwen3MoeExperts has no numbers now, because hooks"):
        quantize_experts(model, "nf4")
    assert torch.equal(model(TOKENS).logits, want)


def test_mistakes():
    model = tiny("qwen3_moe", moe_intermediate_size=48)
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(
        ValueError, match="down_proj of Qwen3MoeExperts has rows of 48 numbers, not a multiple of 64"
    ):
        quantize_experts(model, "nf4")
    assert {name: p.shape for name, p in model.named_parameters()} == before
    with pytest.raises(ValueError, match="unknown format 'int8'; known: " + ", ".join(FORMATS)):
        quantize_experts(model, "int8")
    with pytest.raises(ValueError, match="Linear has no experts with transformers' decorator"):
        quantize_experts(nn.Linear(2, 2))
    for call in (lambda held: quantize_experts(held, "mxfp4"), lambda held: add_lora(held, rank=2)):
        with pytest.raises(ValueError, match="Sequential is no model of transformers: give the model"):
            call(nn.Sequential(tiny("qwen3_moe")))
    quantize_experts(packed := tiny("qwen3_moe"), "nf4")
    with pytest.raises(
        ValueError, match="has weights of nf4: to quantise them to mxfp4, load the model again"
    ):
        quantize_experts(packed, "mxfp4")
    add_lora(model, rank=2)
    with pytest.raises(ValueError, match="has adapters: call quantize_experts first"):
        quantize_experts(model, "mxfp4")
