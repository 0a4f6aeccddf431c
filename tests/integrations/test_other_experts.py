"""Experts of transformers without its decorator, on our kernels, beside transformers' own code."""

import copy
import importlib
import pathlib
import re

import pytest
import torch
from check import error, few
from integrations.families import COMMON, TOP_K, VOCAB, E, H
from integrations.test_torchao import wrap
from torch import nn

from moe_aiter import use_main_grad
from moe_aiter.integrations import other_experts as others
from moe_aiter.integrations.other_experts import NOT_OURS, OTHERS, implementation_of, transformers_version
from moe_aiter.integrations.transformers import NAME, check, known_gate, register, unregister

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SPARSE = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}
NO_NOISE = {"router_jitter_noise": 0.0, "dropout_rate": 0.0}
MODELS = {  # the class of the model, of its configuration, its sizes, and its experts' classes and paths
    "longcat_flash": (
        "LongcatFlashForCausalLM", "LongcatFlashConfig",
        {
            **COMMON, **RANKS, "num_layers": 1, "n_routed_experts": E, "zero_expert_num": 3, "moe_topk": 4,
            "expert_ffn_hidden_size": 24, "ffn_hidden_size": 32, "head_dim": 4, "num_hidden_layers": None,
            "num_experts_per_tok": None,
        },
        {"LongcatFlashExperts": "fused"},
    ),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {
            **COMMON, "num_local_experts": E, "intermediate_size": 24, "intermediate_size_mlp": 32,
            "head_dim": 8, "num_hidden_layers": 1,
        },
        {"Llama4TextMoe": "fused"},
    ),
    "dbrx": (
        "DbrxForCausalLM", "DbrxConfig",
        {
            "d_model": H, "n_heads": 2, "n_layers": 1, "vocab_size": VOCAB,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {
                "ffn_hidden_size": 24, "moe_num_experts": E, "moe_top_k": TOP_K, "hidden_size": H
            },
        },
        {"DbrxExperts": "fused"},
    ),
    "jetmoe": (
        "JetMoeForCausalLM", "JetMoeConfig",
        {
            **COMMON, "num_local_experts": E, "intermediate_size": 24, "kv_channels": 8,
            "num_attention_heads": None, "num_hidden_layers": 1,
        },
        {"JetMoeMoE": "fused", "JetMoeParallelExperts": "two products"},
    ),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        {
            **SPARSE, **NO_NOISE, "vocab_size": VOCAB, "d_model": H, "d_kv": 8, "d_ff": 24, "num_layers": 2,
            "num_heads": 2, "num_experts": 4, "expert_capacity": 4, "decoder_start_token_id": 0,
        },
        {"SwitchTransformersExperts": "fused"},
    ),
    "step3p7": (
        "Step3p7TextModel", "Step3p7TextConfig",
        {
            **COMMON, "n_routed_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32,
            "head_dim": 8, "share_expert_dim": 24, "sliding_window": 8, "swiglu_limits": [0.3, 0.0],
            "mlp_layer_types": ["sparse", "sparse"],
        },
        {"Step3p7Experts": "fused"},
    ),
}  # fmt: skip
families = pytest.mark.parametrize("family", MODELS)
EXPERTS = ("experts", "input_linear", "output_linear")  # of one of these are the weights of the experts
TOKENS = torch.arange(18).view(2, 9) * 7 % (VOCAB - 1) + 1


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


@pytest.fixture
def calls(monkeypatch):
    """The activation of each call of the experts."""
    seen = []
    for name in ("mix_experts", "experts_by_step"):
        run = getattr(others, name)
        monkeypatch.setattr(others, name, lambda *a, run=run, name=name: seen.append(name) or run(*a))
    return seen


def tiny(family: str, experts: str = "eager", **changes) -> nn.Module:
    """A model, with random numbers for all of its parameters."""
    kind, config, sizes, _ = MODELS[family]
    if not hasattr(transformers, config) or (family == "dbrx" and transformers_version() < (5, 16)):
        pytest.skip(f"transformers {transformers.__version__} has no {kind} that computes this")
    sizes = {name: size for name, size in (sizes | changes).items() if size is not None}
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, config)(**sizes)
    model = getattr(file, kind)._from_config(config, experts_implementation=experts)
    for name, p in model.named_parameters():
        p.data = p.data + 0.1 * torch.randn_like(p)
        if any(part in name for part in EXPERTS):
            p.data *= 3  # far enough from zero that a gate bends
    return model


def step(model: nn.Module, experts: str, tokens: torch.Tensor = TOKENS) -> dict[str, torch.Tensor]:
    """The output and all gradients, zeros where transformers has none."""
    model.set_experts_implementation(experts)
    model.zero_grad()
    more = {"labels": tokens} if model.config.is_encoder_decoder else {}
    out = model(input_ids=tokens, **more)[1 if more else 0]
    out.square().mean().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {"output": out.detach(), **grads}


def assert_close(got: dict, want: dict, bound: float = 1e-5) -> None:
    assert want["output"].abs().max() > 1e-3
    for name, value in want.items():
        if max(value.abs().max(), got[name].abs().max()) > 1e-7:  # else 0, rounded
            assert error(got[name], value) < bound, name


def paths(model: nn.Module) -> dict[str, str]:
    return {module.kind: module.path for module in check(model).values()}


@families
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:1, :1]], ids=["18 tokens", "one token"])
def test_a_step_as_eager(family, tokens, calls):
    model = tiny(family)
    want = step(model, "eager", tokens)
    assert not calls and set(paths(model).values()) == {"not ours"}
    got = step(model, NAME, tokens)
    assert paths(model) == MODELS[family][3]
    assert set(calls) == (set() if family == "step3p7" else {"mix_experts"})
    assert_close(got, want)
    assert_close(step(model, "eager", tokens), want, 1e-6)


@families
@pytest.mark.parametrize("dtype", few([torch.float16, torch.bfloat16], torch.bfloat16))
def test_autocast(family, dtype):
    """The output differs from float32 about as much as that of transformers' own code."""
    model = tiny(family)
    exact = step(model, "eager")
    with torch.autocast("cpu", dtype):
        got = step(model, NAME)
    assert error(got["output"].float(), exact["output"]) < 0.1
    assert error(got["output"].float(), exact["output"]) > 1e-5
    assert all(got[name].dtype == torch.float32 for name, _ in model.named_parameters())


@families
def test_frozen_experts(family):
    model = tiny(family)
    for name, p in model.named_parameters():
        p.requires_grad = not any(part in name for part in EXPERTS)
    want, got = step(model, "eager"), step(model, NAME)
    assert_close(got, want)
    assert all(p.grad is None for n, p in model.named_parameters() if any(part in n for part in EXPERTS))


@pytest.mark.parametrize("family", few(MODELS, "llama4", "longcat_flash", "switch_transformers"))
def test_gradient_checkpointing(family):
    """Without a cache: transformers checkpoints without one, and attention then rounds differently."""
    model = tiny(family, use_cache=False)
    if not model.supports_gradient_checkpointing:
        pytest.skip("transformers does not checkpoint this model")
    model.train()
    want = step(model, NAME)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(step(model, NAME), want, 1e-6)


def test_loading_copying_and_unregistering(tmp_path):
    tiny("llama4").save_pretrained(tmp_path)
    model = transformers.Llama4ForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME)
    assert NAME not in (tmp_path / "config.json").read_text()
    copied = copy.deepcopy(model)
    assert paths(copied) == {"Llama4TextMoe": "fused"}
    model.set_experts_implementation({"": "eager"})
    assert paths(model) == {"Llama4TextMoe": "not ours"} and paths(copied) == {"Llama4TextMoe": "fused"}
    unregister()
    model(TOKENS)
    with pytest.raises(KeyError, match=NAME):
        copied(TOKENS)


@families
@pytest.mark.parametrize("given", ["eager", {"": "eager"}], ids=["name", "dict"])
def test_back_to_eager_after_unregister(family, given, calls):
    model = tiny(family)
    want = step(model, "eager")
    model.set_experts_implementation(NAME)
    unregister()
    unregister()
    with pytest.raises(KeyError, match=NAME):
        step(model, NAME)
    model.set_experts_implementation(given)
    assert implementation_of(model) == "eager"
    got = step(model, "eager")
    assert all(torch.equal(got[name], value) for name, value in want.items()) and not calls
    with pytest.raises(ValueError, match=NAME):
        model.set_experts_implementation(NAME)
    assert_close(step(model, "eager"), want, 1e-6)
    register()
    assert_close(step(model, "eager"), want, 1e-6)  # as it was switched
    assert not calls and set(paths(model).values()) == {"not ours"}
    assert_close(step(model, NAME), want)
    assert paths(model) == MODELS[family][3]


def test_a_model_that_was_made_by_its_class():
    file = importlib.import_module("transformers.models.llama4.modeling_llama4")
    model = file.Llama4ForCausalLM(tiny("llama4", experts=NAME).config)
    (found,) = check(model).values()
    assert found.path == "not ours" and "after register()" in found.why
    model.set_experts_implementation(NAME)
    assert paths(model) == {"Llama4TextMoe": "fused"}


def test_the_dense_rows_of_llama4(calls):
    """As transformers gives them to the experts: each expert gets all tokens."""
    experts = tiny("llama4", experts=NAME).model.layers[0].feed_forward.experts
    rows = torch.randn(E * 5, H)
    want = type(experts).forward.__wrapped__(experts, rows)
    assert error(experts(rows), want) < 1e-5 and calls == ["mix_experts"]


def test_step3p7_is_as_a_class_with_the_decorator(calls):
    model = tiny("step3p7", experts=NAME)
    use_main_grad(model, torch.optim.SGD(model.parameters(), 0.1))
    weights = [p for n, p in model.named_parameters() if ".experts." in n]
    step(model, NAME)
    assert weights and all(p.grad is None and p.main_grad.count_nonzero() for p in weights)
    for p in weights:
        del p.main_grad
    known = [known_gate(m) for m in model.modules() if type(m).__name__ == "Step3p7Experts"]
    assert known[0][0].startswith("swiglu_limit(0.4847") and known[1] == ("swiglu", False)
    for module in model.modules():
        if type(module).__name__ == "Step3p7Experts":
            module.act_fn = nn.GELU()
    want, got = step(model, "eager"), step(model, NAME)
    assert [m.path for m in check(model).values()] == ["two products", "two products"]
    assert_close(got, want)


def test_another_activation(calls):
    model = tiny("llama4", hidden_act="tanh")
    want, got = step(model, "eager"), step(model, NAME)
    assert paths(model) == {"Llama4TextMoe": "two products"} and set(calls) == {"experts_by_step"}
    assert_close(got, want)


def test_dropout_behind_the_activation(calls):
    """The mean of many forward passes is the output without dropout, which eval mode has."""
    model = tiny("switch_transformers", dropout_rate=0.2, experts=NAME)
    experts = next(m for m in model.modules() if type(m).__name__ == "SwitchTransformersExperts")
    x, ids = torch.randn(3, H), torch.tensor([0, 0, 3])
    inputs = x, nn.functional.one_hot(ids, 4)[:, None], torch.rand(3, 1)
    assert paths(model) == {"SwitchTransformersExperts": "two products"}
    with torch.no_grad():
        mean = experts(*(t.repeat(5000, *[1] * (t.dim() - 1)) for t in inputs)).view(5000, 3, H).mean(0)
        assert set(calls) == {"experts_by_step"}
        model.eval()
        assert paths(model) == {"SwitchTransformersExperts": "fused"}
        assert error(mean, experts(*inputs)) < 0.05


def test_experts_of_switch_without_tokens():
    """As docs/transformers_models.md says: zeros, where transformers' own code, which waits, has None."""
    model = tiny("switch_transformers", experts=NAME)
    experts = next(m for m in model.modules() if type(m).__name__ == "SwitchTransformersExperts")
    chosen = nn.functional.one_hot(torch.tensor([0, 0, 2]), len(experts))[:, None]
    inputs = torch.randn(3, H), chosen, torch.rand(3, 1)
    experts(*inputs).sum().backward()
    assert [bool(e.wo.weight.grad.count_nonzero()) for e in experts.values()] == [True, False, True, False]
    experts.zero_grad()
    type(experts).forward.__wrapped__(experts, *inputs).sum().backward()
    assert [e.wo.weight.grad is None for e in experts.values()] == [False, True, False, True]


@pytest.mark.parametrize("family", few(["llama4", "longcat_flash"], "longcat_flash"))
def test_compile_without_a_graph_break(family):
    model = tiny(family, experts=NAME)
    kind = next(iter(MODELS[family][3]))
    experts = next(m for m in model.modules() if type(m).__name__ == kind)
    x = torch.randn(7, H)
    inputs = (x,) if family == "llama4" else (x, torch.randint(E + 3, (7, 4)), torch.rand(7, 4))
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*inputs), experts(*inputs), strict=True):
        assert error(got, want) < 1e-5


def hook_of_a_part(experts):
    experts["expert_1"].wo.register_forward_hook(lambda *_: None)


def another_layer(experts):
    experts["expert_1"].wi = type("LoraLinear", (nn.Linear,), {"__module__": "peft"})(H, 24, bias=False)


def another_dtype(experts):
    for expert in experts.values():
        expert.wo.double()


@pytest.mark.parametrize(
    "change, why",
    [(hook_of_a_part, "Linear has hooks"), (another_layer, "peft.LoraLinear"), (another_dtype, "float64")],
)
def test_what_runs_transformers_own_code(change, why, calls):
    model = tiny("switch_transformers")
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersExperts":
            change(module)
    want, got = step(model, "eager"), step(model, NAME)
    assert not calls and all(torch.equal(got[name], value) for name, value in want.items())
    assert {m.path for m in check(model).values()} == {"not ours"}
    assert all(why in m.why for m in check(model).values())


@pytest.mark.parametrize("family", few(["llama4", "longcat_flash"], "llama4"))
def test_adapters_of_peft(family):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    lora = peft.LoraConfig(r=2, target_parameters=["experts.gate_up_proj"])
    model = tiny(family)
    adapted = peft.get_peft_model(model, lora)
    for name, p in adapted.named_parameters():
        p.data = torch.randn_like(p) if "lora_B" in name else p.data
    want, got = step(model, "eager"), step(model, NAME)
    assert set(paths(model).values()) == {"whole weights"}
    with adapted.disable_adapter():
        assert paths(model) == MODELS[family][3]
    assert any("lora" in name and value.abs().sum() > 0 for name, value in want.items())
    assert_close(got, want)


def test_tensor_parallelism_that_came_first():
    """A forward that was replaced before our class could ask leaves the module as it is."""
    model = tiny("longcat_flash")
    for module in model.modules():
        vars(module).pop("config", None) if type(module).__name__ == "LongcatFlashExperts" else None
        if type(module).__name__ == "LongcatFlashExperts":
            module.forward = type(module).forward.__wrapped__.__get__(module)
    model.set_experts_implementation(NAME)
    (found,) = check(model).values()
    assert found.path == "not ours" and "after register()" in found.why


# all of transformers

CLASS = re.compile(r"^(@use_experts_implementation.*\n)?class (\w+)\(", re.M)
HAS_EXPERTS = re.compile(r"^    ((moe_)?num_(local_)?experts|n_routed_experts)\b", re.M)
LATER = {  # models that have the decorator in a newer transformers, and not in the oldest that we support
    "aria", "granitemoe", "granitemoehybrid", "granitemoeshared",
}  # fmt: skip


def found_in_transformers() -> dict[str, dict[str, str]]:
    """For each folder of transformers with experts: how `check` would list its classes of experts."""
    found = {}
    for folder in sorted((pathlib.Path(transformers.__path__[0]) / "models").iterdir()):
        code, config = (
            "".join(file.read_text("utf-8") for file in sorted(folder.glob(f"{kind}_*.py")))
            for kind in ("modeling", "configuration")
        )
        listed = {}
        for decorator, kind in CLASS.findall(code):
            full = f"transformers.models.{folder.name}.modeling_{folder.name}.{kind}"
            if decorator or full in OTHERS:
                listed[kind] = "ours"
            elif full in NOT_OURS:
                listed[kind] = "not ours"
            elif "Experts" in kind and "Shared" not in kind:
                listed[kind] = "unknown"
        if code and (listed or HAS_EXPERTS.search(config)):
            found[folder.name] = listed
    return found


def test_every_model_of_transformers_is_listed():
    """A new family with experts fails here until it runs on our kernels or is in `NOT_OURS`."""
    found = found_in_transformers()
    for name, listed in found.items():
        print(name, *(f"{kind}: {how}" for kind, how in listed.items()))
    unknown = [n for n, listed in found.items() if not listed or "unknown" in listed.values()]
    assert len(found) > 30 and set(unknown) <= LATER, unknown
    assert not set(unknown) or transformers_version() < (5, 20)


def test_every_class_is_in_the_documentation():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "transformers_models.md").read_text("utf-8")
    rows = {name.rpartition(".")[2]: "our kernels" for name in OTHERS}
    rows |= {name.rpartition(".")[2]: "not ours" for name in NOT_OURS}
    table = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|:]+)[^|]*\|", page, re.M)
    assert {kind: "not ours" if how == "not ours" else "our kernels" for kind, how in table} == rows


def test_llama4_with_weights_of_two_dtypes():
    model = tiny("llama4", NAME)
    (moe,) = (m for m in model.modules() if type(m).__name__ == "Llama4TextMoe")
    moe.experts.down_proj.data = moe.experts.down_proj.data.bfloat16()
    assert paths(model) == {"Llama4TextMoe": "not ours"}
    with torch.autocast("cpu", torch.bfloat16):  # without, transformers' product refuses them
        logits = model(TOKENS).logits
        model.set_experts_implementation("eager")
        assert torch.equal(model(TOKENS).logits, logits)


def test_a_router_of_another_dtype(calls):
    """It is a module that is called, so the experts run here all the same."""
    model = tiny("jetmoe").bfloat16()
    for module in model.modules():
        if type(module).__name__ == "JetMoeTopKGating":
            module.float()
    with torch.autocast("cpu", torch.bfloat16):
        want = model(TOKENS).logits
        model.set_experts_implementation(NAME)
        assert paths(model) == {"JetMoeMoE": "fused", "JetMoeParallelExperts": "two products"}
        assert error(model(TOKENS).logits, want) < 0.05 and "mix_experts" in calls


@pytest.mark.parametrize("family", ["longcat_flash", "llama4", "dbrx", "jetmoe", "switch_transformers"])
def test_weights_of_torchao_run_transformers_code(family):
    model = tiny(family, NAME)
    for module in list(model.modules()):
        if type(module).__name__ in MODELS[family][3]:
            for m in module.modules():
                wrap(m, *(n for n, p in m.named_parameters(recurse=False) if p.dim() > 1))
    assert set(paths(model).values()) == {"not ours"}
    got = step(model, NAME)
    assert_close({"output": got["output"]}, {"output": step(model, "eager")["output"]}, 1e-6)
