"""Muon's groups of transformers' models with adapters, on weights of 4 bits or not."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.families import tiny_config

from moe_aiter.integrations.four_bit import quantize_experts
from moe_aiter.integrations.lora import add_lora
from moe_aiter.integrations.transformers import register
from moe_aiter.optim import Muon, muon_groups


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_adapters(family, four_bits):
    """Factors are matrices, one for each expert, and magnitudes vectors; frozen weights are in no group."""
    from transformers import AutoModelForCausalLM

    register()
    config = tiny_config(family, hidden_size=64, intermediate_size=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if four_bits:
        quantize_experts(model, "nf4")
    add_lora(model, rank=2, dora=True)
    groups = muon_groups(model)
    found = {name: g for g in groups for name in g["param_names"]}
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(found) == config.num_hidden_layers * 2 * 3
    for name, group in found.items():
        vector = name.endswith("magnitude")
        assert group["muon"] == (not vector) and group.get("weight_decay") == (0.0 if vector else None), name
    optimizer = Muon(groups, lr=0.1)
    model(torch.ones(1, 5, dtype=torch.int64)).logits.square().sum().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in found}
    optimizer.step()
    assert any(not torch.equal(model.get_parameter(name), p) for name, p in before.items())
