"""`offload` of transformers' models: experts as they are, of 4 bits, and with adapters."""

import copy

import pytest
import torch
from integrations.families import VOCAB, tiny_model
from torch import nn

from moe_aiter import offload
from moe_aiter.config import interpret

pytest.importorskip("transformers", reason="transformers is not installed")
if interpret:
    pytest.skip("the interpreted kernels have tests of their own", allow_module_level=True)

from moe_aiter.integrations import peft as peft_file
from moe_aiter.integrations import transformers as file
from moe_aiter.integrations.four_bit import quantize_experts
from moe_aiter.integrations.lora import add_lora

TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
FORMATS = {"": {}, "mxfp4": {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}}


@pytest.fixture(autouse=True)
def registered():
    file.register()
    yield
    file.unregister()


def adapted(family, format, lora):
    torch.manual_seed(0)
    model = tiny_model(family, torch.float32, "moe_aiter", **FORMATS[format])
    if format:
        quantize_experts(model, format)
    if lora == "peft":
        peft = pytest.importorskip("peft", reason="PEFT is not installed")
        peft_file.register()
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=targets)
        model = peft.get_peft_model(model, config)
    elif lora:
        add_lora(model, rank=3)
    else:
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    return model


def step(model):
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("format, lora", [("", ""), ("", "ours"), ("", "peft"), ("mxfp4", "ours")])
@pytest.mark.parametrize("repeat", [False, True], ids=["", "checkpointing"])
def test_training_is_the_same_to_the_bit(family, format, lora, repeat):
    model = adapted(family, format, lora)
    other = copy.deepcopy(model)
    for m in (model, other):
        m.train()
        if repeat:
            m.gradient_checkpointing_enable()
    offload(model, "cpu")
    try:
        for _ in range(2):
            pairs = list(zip(step(model), step(other), strict=True))
            assert all(torch.equal(a, b) for a, b in pairs) and len(pairs) > 1
    finally:
        peft_file.unregister()


def test_weights_of_another_dtype():
    model = adapted("qwen3_moe", "", "")
    other = copy.deepcopy(model)
    offload(model, "cpu")
    step(model)
    for m in (model, other):
        m.load_state_dict({name: t.bfloat16() for name, t in m.state_dict().items()}, assign=True)
    assert all(torch.equal(a, b) for a, b in zip(step(model), step(other), strict=True))


def test_adapters_of_peft_are_merged():
    """PEFT writes through `.data`."""
    model = adapted("qwen3_moe", "", "peft")
    other = copy.deepcopy(model)
    offload(model, "cpu")
    try:
        for change in ("train", "merge_adapter", "unmerge_adapter"):
            for m in (model, other):
                getattr(m, change)()
            assert torch.equal(model(input_ids=TOKENS).logits, other(input_ids=TOKENS).logits)
    finally:
        peft_file.unregister()


def test_another_implementation():
    model = adapted("qwen3_moe", "", "")
    model.set_experts_implementation("eager")
    other = copy.deepcopy(model)
    offload(model, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(step(model), step(other), strict=True))


def test_unregistered():
    model = adapted("qwen3_moe", "", "")
    file.unregister()
    with pytest.raises(ValueError, match="has no experts: there is nothing to offload"):
        offload(model, "cpu")
