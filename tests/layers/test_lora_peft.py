"""LoRALinear and LoRAExperts beside PEFT itself: adapters that it trained, and its results with them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_aiter import Experts, LoRAExperts, LoRALinear, make_plan

peft = pytest.importorskip("peft", reason="PEFT is not installed")

E, H, CHANNELS, RANK, ALPHA = 3, 8, 6, 2, 7.0


class PlainExperts(nn.Module):
    """As in transformers."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * CHANNELS, H))
        self.down_proj = nn.Parameter(torch.randn(E, H, CHANNELS))

    def forward(self, x, ids, weights):
        rows = []
        for token, choices, ws in zip(x, ids.tolist(), weights, strict=True):
            out = torch.zeros_like(token)
            for e, w in zip(choices, ws, strict=True):
                gate, up = (self.gate_up_proj[e] @ token).chunk(2)
                out = out + w * (self.down_proj[e] @ (F.silu(gate) * up))
            rows.append(out)
        return torch.stack(rows)


class Around(nn.Module):
    """PEFT takes a model whose module has a name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner(*inputs)


def trained(module, **config):
    """PEFT's model and its adapters, random."""
    config = {"r": RANK, "lora_alpha": ALPHA} | config
    model = peft.get_peft_model(Around(module), peft.LoraConfig(**config))
    return randomized(model), peft.get_peft_model_state_dict(model)


def randomized(model):
    for name, p in model.named_parameters():
        if "lora" in name:
            p.data = p.data + 0.3 * torch.randn_like(p)
    return model


def test_experts():
    base, plain = Experts(E, H, CHANNELS), PlainExperts()
    base.gate_up.data.copy_(plain.gate_up_proj)
    base.down.data.copy_(plain.down_proj)
    targets = ["inner.gate_up_proj", "inner.down_proj"]
    model, state = trained(plain, target_modules=[], target_parameters=targets)
    ours, prefix = LoRAExperts(base, rank=RANK, alpha=ALPHA), "base_model.model.inner."
    ours.load_peft_state_dict(state, prefix)
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]]), torch.rand(4, 2)
    x = torch.randn(4, H)
    torch.testing.assert_close(ours(x, weights, make_plan(ids, E)), model(x, ids, weights))
    back = ours.peft_state_dict(prefix)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_linear(dora, rslora):
    """And gradients, which DoRA has but for the norm."""
    base, plain = nn.Linear(H, 10), nn.Linear(H, 10)
    base.load_state_dict(plain.state_dict())
    model, state = trained(plain, target_modules=["inner"], use_dora=dora, use_rslora=rslora)
    ours, prefix = (
        LoRALinear(base, rank=RANK, alpha=ALPHA, rslora=rslora, dora=dora),
        "base_model.model.inner.",
    )
    ours.load_peft_state_dict(state, prefix=prefix)
    x = torch.randn(4, H)
    torch.testing.assert_close(ours(x), model(x))
    back = ours.peft_state_dict(prefix=prefix)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    ours(x).square().sum().backward()
    model(x).square().sum().backward()
    theirs = {p.grad.shape: p.grad for p in model.parameters() if p.grad is not None}
    for p in ours.lora.parameters():
        torch.testing.assert_close(p.grad[0], theirs.pop(p.shape[1:]))
    assert not theirs


def test_a_batch_of_several_adapters():
    """Adapters of several ranks, one for each example, as `adapter_names` of PEFT names them."""
    configs = {
        "one": {"r": 2, "lora_alpha": 7.0, "use_rslora": False},
        "two": {"r": 4, "lora_alpha": 3.0, "use_rslora": True},
        "three": {"r": 1, "lora_alpha": 5.0, "use_rslora": False},
    }
    plain = nn.Linear(H, 10)
    ours = LoRALinear(nn.Linear(H, 10), 3, rank=4)
    ours.base.load_state_dict(plain.state_dict())
    model = peft.get_peft_model(
        Around(plain), peft.LoraConfig(target_modules=["inner"], **configs["one"]), adapter_name="one"
    )
    for name in ("two", "three"):
        model.add_adapter(name, peft.LoraConfig(target_modules=["inner"], **configs[name]))
    randomized(model).eval()
    prefix = "base_model.model.inner."
    for n, (name, config) in enumerate(configs.items()):
        state = peft.get_peft_model_state_dict(model, adapter_name=name)
        how = {"alpha": config["lora_alpha"], "rslora": config["use_rslora"]}
        ours.load_peft_state_dict(state, n, prefix, **how)
        back = ours.peft_state_dict(n, prefix)
        assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
    names, x = ["two", "__base__", "one", "three", "two"], torch.randn(5, 3, H)
    ids = torch.tensor([[*configs].index(name) if name in configs else -1 for name in names])
    torch.testing.assert_close(ours(x, ids), model(x, adapter_names=names))


def test_experts_of_several_adapters():
    """Of several ranks: as PEFT with one adapter after the other, and back in its format."""
    base, plain = Experts(E, H, CHANNELS), PlainExperts()
    base.gate_up.data.copy_(plain.gate_up_proj)
    base.down.data.copy_(plain.down_proj)
    ours, prefix = LoRAExperts(base, 3, rank=4), "base_model.model.inner."
    ids, weights, x = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]]), torch.rand(4, 2), torch.randn(4, H)
    expected = [plain(x, ids, weights).detach()]
    for n, rank in enumerate((2, 4, 1)):
        targets = {"target_modules": [], "target_parameters": ["inner.gate_up_proj", "inner.down_proj"]}
        model, state = trained(copy.deepcopy(plain), r=rank, **targets)
        expected.append(model(x, ids, weights).detach())
        ours.load_peft_state_dict(state, prefix, adapter=n, alpha=ALPHA)
        back = ours.peft_state_dict(prefix, adapter=n)
        assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
    adapters = torch.tensor([1, -1, 2, 0])
    want = torch.stack([expected[n + 1][t] for t, n in enumerate(adapters.tolist())])
    torch.testing.assert_close(ours(x, weights, make_plan(ids, E), adapters), want)
