"""MoE blocks of transformers' models with batch invariance: router, experts and gradients of tokens."""

import pytest
import torch

from moe_aiter import patch_linear
from moe_aiter.config import interpret
from moe_aiter.integrations.transformers import NAME, register, unregister
from moe_aiter.invariance import invariant

if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    unregister()


def results(block, x, dout):
    x = x.detach().requires_grad_()
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(dout)
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_blocks(kind, dtype):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=NAME, dtype=dtype)
    block = model.model.layers[0].mlp
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x, dout = torch.randn(2, 1, 400, 64).to(dtype)
    with invariant(), patch_linear():
        many = results(block, x, dout)
        for size in (1, 3, 8, 100):
            tokens = torch.randperm(400)[:size]
            few = results(block, x[:, tokens], dout[:, tokens])
            assert all(torch.equal(a, b[:, tokens]) for a, b in zip(few, many, strict=True)), size
