"""Adapters that PEFT refuses for the experts of transformers' models, and the directories that it reads."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from check import assert_output_as_good, error, gather_and_release
from integrations.families import VOCAB, E, tiny_model
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors.torch import load_file, save_file

from moe_aiter.integrations.lora import add_lora, load_lora, merge_lora, save_lora
from moe_aiter.integrations.transformers import ADAPTERS, NAME, experts_in

TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]


def base(family="qwen3_moe", experts="eager", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    return tiny_model(family, dtype, experts, **changes)


def with_lora(family="qwen3_moe", dtype=torch.float64, **lora):
    """A model whose adapters are as after some training."""
    model = base(family, dtype=dtype)
    add_lora(model, **{"rank": 3, "alpha": 7.0, "dtype": dtype} | lora)
    torch.manual_seed(2)
    for p in adapters(model):
        p.data = p.data + 0.2 * torch.randn_like(p)
    return model


def adapters(model):
    return [p for n, p in model.named_parameters() if ADAPTERS in n]


def logits(model):
    return model(input_ids=TOKENS).logits


def merged(model, family, dtype=torch.float64, **changes):
    """A model without adapters, whose weights have the product of the factors in them."""
    plain = base(family, dtype=dtype, **changes)
    for name, module in experts_in(model).items():
        for weight, lora in getattr(module, ADAPTERS).items():
            swap = module.is_transposed
            w = getattr(module, weight).detach()
            full = lora.merged(w.mT if swap else w, slice(None))
            getattr(plain.get_submodule(name), weight).data.copy_(full.mT if swap else full)
    return plain


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_as_merged_weights(family, dora):
    model = with_lora(family, dora=dora)
    assert model.config._experts_implementation == NAME
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if ADAPTERS in n
    }
    assert error(logits(model), logits(merged(model, family))) < 1e-12
    assert error(logits(model), logits(base(family))) > 1e-3
    logits(model).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters(model))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merge(family, dora):
    model = with_lora(family, dora=dora).eval()
    expected = logits(model)
    merge_lora(model)
    assert model.state_dict().keys() == base(family).state_dict().keys()
    assert error(logits(model), expected) < 1e-12
    with pytest.raises(ValueError, match="call add_lora first"):
        merge_lora(model)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_begin_without_effect(dora):
    model = base()
    names = add_lora(model, rank=2, dora=dora, dropout=0.5, dtype=torch.float64)
    assert names == [name for name, _ in experts_in(model).items()]
    assert error(logits(model.train()), logits(base().train())) < 1e-12
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(model, rank=2)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_dropout_is_of_what_the_adapters_are_given(dora, monkeypatch):
    """In training; each number is kept or not, and on average nothing changes."""
    model = with_lora(dropout=0.5, dora=dora)
    expected = logits(model.eval())
    assert error(expected, logits(with_lora(dora=dora))) < 1e-12
    model.train()
    masks, plain = [], F.dropout

    def recorded(x, p=0.5, training=True):
        out = plain(x, p, training)
        masks.append((tuple(x.shape), (out != 0).double().mean().item()))
        return out

    monkeypatch.setattr(F, "dropout", recorded)
    first, second = logits(model), logits(model)
    assert error(first, expected) > 1e-3 and error(first, second) > 1e-3
    T, k = TOKENS.numel(), model.config.num_experts_per_tok
    widths = model.config.hidden_size, model.config.moe_intermediate_size
    kept = {size: share for size, share in masks if size in ((T, widths[0]), (T * k, widths[1]))}
    assert len(kept) == 2 and all(0.3 < share < 0.7 for share in kept.values())
    torch.manual_seed(5)
    again = logits(model)
    torch.manual_seed(5)
    assert torch.equal(logits(model), again)


def test_float32_adapters_of_a_bfloat16_model():
    """No further from the truth than weights of bfloat16 with the product in them.

    Each token takes all experts: float64 may choose others than bfloat16, which is no error of a product.
    """
    every = {"num_experts_per_tok": E}
    model = base(dtype=torch.bfloat16, **every)
    add_lora(model, rank=3, alpha=7.0)
    for p in adapters(model):
        p.data += 0.2 * torch.randn_like(p)
        assert p.dtype == torch.float32
    plain = merged(model, "qwen3_moe", torch.bfloat16, **every)
    exact = copy.deepcopy(model).double()
    assert_output_as_good("logits", logits(model), logits(plain), logits(exact))


@pytest.mark.parametrize(
    "targets", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")], ids=len
)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_what_we_save_and_the_reverse(family, targets, tmp_path):
    peft = pytest.importorskip("peft", minversion="0.20", reason="PEFT 0.20 is not installed")
    model = with_lora(family, targets=targets, dropout=0.1, rslora=True).eval()
    save_lora(model, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(base(family), tmp_path / "ours", autocast_adapter_dtype=False)
    assert error(logits(theirs), logits(model)) < 1e-12
    theirs.save_pretrained(tmp_path / "theirs")
    again = base(family)
    load_lora(again, tmp_path / "theirs", dtype=torch.float64)
    for p, q in zip(adapters(again), adapters(model), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(logits(again), logits(model))


class Expert(nn.Module):
    """One of a model whose experts are linear layers, as in older transformers."""

    def __init__(self, gate_up, down):
        super().__init__()
        half, H = gate_up.shape[0] // 2, gate_up.shape[1]
        self.gate_proj, self.up_proj = (nn.Linear(H, half, bias=False, dtype=down.dtype) for _ in range(2))
        self.down_proj = nn.Linear(half, H, bias=False, dtype=down.dtype)
        self.gate_proj.weight.data.copy_(gate_up[:half])
        self.up_proj.weight.data.copy_(gate_up[half:])
        self.down_proj.weight.data.copy_(down)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ListOfExperts(nn.ModuleList):
    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self):
            token, j = torch.where(ids == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token, j, None])
        return out


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_loads_a_pair_for_each_expert(dora, tmp_path):
    """Into a model with linear layers, of a kind that PEFT has no conversion for; DoRA's magnitudes too."""
    peft = pytest.importorskip("peft", minversion="0.20", reason="PEFT 0.20 is not installed")
    model = with_lora(dora=dora, dropout=0.25).eval()
    save_lora(model, tmp_path, per_expert=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["gate_proj", "up_proj", "down_proj"]
    assert (config["use_dora"], config["lora_dropout"]) == (dora, 0.25)
    plain = base()
    plain.config.model_type = "another"
    for name, module in experts_in(plain).items():
        pairs = zip(module.gate_up_proj.detach(), module.down_proj.detach(), strict=True)
        plain.set_submodule(name, ListOfExperts([Expert(*pair) for pair in pairs]))
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path, autocast_adapter_dtype=False).eval()
    assert error(logits(theirs), logits(model)) < 1e-12


def test_peft_loads_a_pair_for_each_expert_into_stacked_weights(tmp_path):
    """By its own conversion, which doubles the rank of gate_up_proj."""
    peft = pytest.importorskip("peft", minversion="0.20", reason="PEFT 0.20 is not installed")
    model = with_lora().eval()
    save_lora(model, tmp_path, per_expert=True)
    theirs = peft.PeftModel.from_pretrained(base(), tmp_path, autocast_adapter_dtype=False).eval()
    assert error(logits(theirs), logits(model)) < 1e-12


def test_rows_in_turn_are_told_apart(tmp_path):
    """gpt-oss: gates are the even rows of the weight."""
    model = with_lora("gpt_oss")
    save_lora(model, tmp_path, per_expert=True)
    state = load_file(tmp_path / "adapter_model.safetensors")
    name, module = next(iter(experts_in(model).items()))
    B = getattr(module, ADAPTERS)["gate_up_proj"].B
    assert torch.equal(state[f"base_model.model.{name}.1.gate_proj.lora_B.weight"], B[1, ::2])
    assert torch.equal(state[f"base_model.model.{name}.1.up_proj.lora_B.weight"], B[1, 1::2])


def is_untouched(model) -> bool:
    """As it came: no adapters, nothing frozen, its own implementation of the experts."""
    trained = all(p.requires_grad for p in model.parameters())
    return trained and not adapters(model) and model.config._experts_implementation != "moe_aiter"


@pytest.mark.parametrize(
    "lora, message",
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"rank": 2, "dropout": 1.0}, "dropout must be"),
        ({"rank": 2, "alpha": float("nan")}, "alpha must be finite"),
        ({"rank": 2, "targets": ("up_proj",)}, "none of targets"),
        ({"rank": 2, "targets": ("down_proj", "gateup_proj")}, "must be a tuple of some of gate_up_proj"),
        ({"rank": 2, "targets": "down_proj"}, "must be a tuple of some of gate_up_proj"),
    ],
)
def test_adapters_that_cannot_be_leave_the_model_as_it_was(lora, message):
    model = base()
    with pytest.raises(ValueError, match=message):
        add_lora(model, **lora)
    assert is_untouched(model)


def changed(**changes):
    def edit(folder):
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return edit


def with_another_tensor(folder):
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.lora_A.weight": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "header too small"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "target_parameters alone"),
        (changed(r=...), "has no r"),
        (changed(r="3"), "adapter_config.json: r is a str"),
        (changed(r=3.0), "adapter_config.json: r is a float"),
        (changed(r=10**13), "has r 10000000000000, which no tensor of adapter_model.safetensors has"),
        (changed(lora_alpha="7"), "lora_alpha is a str"),
        (changed(lora_alpha=10**400), "lora_alpha is no finite number"),
        (changed(lora_alpha=float("inf")), "lora_alpha is no finite number"),
        (changed(lora_alpha=float("nan")), "lora_alpha is no finite number"),
        (changed(use_rslora="no"), "use_rslora is a str"),
        (changed(target_parameters="down_proj"), "target_parameters is a str"),
        (changed(alpha_pattern={".*": 7}), "has alpha_pattern, which"),
        (changed(target_parameters=["mlp.experts.down_proj"]), "which no experts of this model have"),
        (with_another_tensor, "lm_head.lora_A.weight, which no experts of this model have"),
    ],
)
def test_a_damaged_directory_leaves_the_model_as_it_was(edit, message, tmp_path):
    save_lora(with_lora(), tmp_path)
    edit(tmp_path)
    model = base()
    with pytest.raises(Exception, match=message):
        load_lora(model, tmp_path)
    assert is_untouched(model)


def test_a_full_disk_leaves_what_was_saved_before(tmp_path, monkeypatch):
    save_lora(with_lora(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(json, "dumps", lambda *_, **__: "\udc00")  # which cannot be written
    with pytest.raises(UnicodeError):
        save_lora(with_lora(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="no experts"):
        add_lora(nn.Linear(2, 2), rank=2)
    with pytest.raises(ValueError, match="call add_lora first"):
        save_lora(base(), tmp_path)
    with pytest.raises(ValueError, match="no DoRA for experts in one tensor"):
        save_lora(with_lora(dora=True), tmp_path)
    save_lora(with_lora(), tmp_path, per_expert=True)
    with pytest.raises(ValueError, match="target_parameters alone"):
        load_lora(base(), tmp_path)
    save_lora(with_lora(), tmp_path)
    model = base()
    with pytest.raises(ValueError, match="but the adapter needs"):
        load_lora(model, tmp_path, rank=4)
    assert is_untouched(model)
    load_lora(model, tmp_path)


def test_another_implementation_does_not_pass_over_adapters():
    """It would run and train as if they were not there; once they are merged it is welcome."""
    model = with_lora()
    want = logits(model)
    for other in (model, copy.deepcopy(model)):
        other.set_experts_implementation("eager")
        with pytest.raises(
            RuntimeError, match="has adapters, which experts_implementation='eager' passes over"
        ):
            logits(other)
    merge_lora(model)
    assert error(logits(model), want) < 1e-9
    assert not any(module._forward_pre_hooks for _, module in experts_in(model).items())


@pytest.mark.parametrize("dora", [False, True])
def test_parameters_with_numbers_in_their_own_forward_pass_alone(dora):
    """As with ZeRO-3: adapters are gathered by the hooks of their module, weights by those of the experts."""
    model = with_lora(dora=dora).requires_grad_(False)
    want = logits(model)
    gather_and_release(model)
    assert torch.equal(logits(model), want)


def test_hidden_weights_are_neither_merged_nor_saved(tmp_path):
    model = with_lora().requires_grad_(False)
    gather_and_release(model)
    for call in (merge_lora, lambda model: save_lora(model, tmp_path / "adapter")):
        with pytest.raises(ValueError, match="the weights have no numbers now"):
            call(model)
