"""PEFT's adapters of the experts of transformers models, in its own way: with ours as with the eager ones."""

import pytest
import torch
from check import error
from integrations.families import VOCAB, tiny_model

from moe_aiter.integrations.transformers import NAME, register

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def base(family, experts):
    register()
    torch.manual_seed(0)
    return tiny_model(family, experts=experts)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_train_as_with_eager_experts(family, tmp_path):
    tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    logits = []
    for experts in ("eager", NAME):
        model = peft.get_peft_model(base(family, experts), peft.LoraConfig(r=2, target_parameters=TARGETS))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            assert all(p.grad is not None for p in trained)
            optimizer.step()
            optimizer.zero_grad()
        logits.append(model.eval()(input_ids=tokens).logits)
    assert error(logits[1], logits[0]) < 1e-4
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(family, NAME), tmp_path).eval()
    assert torch.equal(again(input_ids=tokens).logits, logits[1])
    assert error(model.merge_and_unload()(tokens).logits, logits[1]) < 1e-4
