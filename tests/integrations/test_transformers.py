"""transformers' models with `experts_implementation="moe_aiter"` beside their own eager experts."""

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from check import assert_as_good_as_torch, error, with_gradients
from integrations.families import FAMILIES, TOP_K, VOCAB, E, H, experts_of, tiny_model
from torch.func import functional_call

from moe_aiter.integrations import transformers as ours
from moe_aiter.integrations.transformers import NAME, known_gate, register, unregister

pytest.importorskip("transformers", reason="transformers is not installed")

T = 13
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


@pytest.fixture
def calls(monkeypatch):
    """Which of the two ways through the experts was taken."""
    seen = []
    for name in ("expert_mlp", "unfused"):
        monkeypatch.setattr(ours, name, spy(getattr(ours, name), name, seen))
    return seen


def spy(fn, name, seen):
    @functools.wraps(fn)
    def run(*args, **kwargs):
        seen.append(name)
        return fn(*args, **kwargs)

    return run


def step(model, experts, tokens):
    """Logits, loss and every gradient."""
    model.set_experts_implementation(experts)
    model.zero_grad()
    logits = model(tokens).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    loss.backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()}


def experts(family="mixtral", dtype=torch.float32):
    """One experts module, its implementation chosen by its own configuration."""
    module = experts_of(tiny_model(family, dtype))[0]
    module.config._experts_implementation = NAME
    return module


def routed(dtype=torch.float32, weights_dtype=None, tokens=T):
    x = torch.randn(tokens, H, dtype=dtype)
    scores = torch.randn(tokens, E).softmax(-1)
    weights, ids = scores.topk(TOP_K)
    return x, ids, weights.to(weights_dtype or dtype)


def eager(module, *inputs):
    before = module.config._experts_implementation
    module.config._experts_implementation = "eager"
    out = module(*inputs)
    module.config._experts_implementation = before
    return out


@families
def test_model_in_float64(family, calls):
    """float64 runs the slow reference; what is left is that routing weights are used in float32."""
    model, tokens = tiny_model(family, torch.float64), torch.randint(1, VOCAB, (2, 9))
    want, got = step(model, "eager", tokens), step(model, NAME, tokens)
    assert set(calls) == {"expert_mlp"}
    for name, value in want.items():
        assert (value is None) == (got[name] is None), name
        assert value is None or error(got[name], value) < 1e-5, name


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_as_good_as_eager(family, dtype, device):
    """Output and gradients beside float64, with no more than twice the error of the eager experts."""
    module = experts(family, dtype).to(device)
    x, ids, weights = (t.to(device) for t in routed(dtype))
    names, parameters = zip(*module.named_parameters(), strict=True)

    def through(forward):
        def run(x, weights, *parameters):
            module.config._experts_implementation = forward
            state = dict(zip(names, parameters, strict=True))
            return functional_call(module, state, (x, ids, weights))

        return with_gradients(run)

    assert_as_good_as_torch(through(NAME), through("eager"), x, weights, *parameters)


@families
def test_model_in_bfloat16(family):
    """No further from float64 than twice what eager is, in the logits."""
    model, tokens = tiny_model(family, torch.bfloat16), torch.randint(1, VOCAB, (1, 8))
    with torch.no_grad():
        got = step_logits(model, NAME, tokens)
        want = step_logits(model, "eager", tokens)
        exact = step_logits(model.double(), "eager", tokens)
    # a choice that two roundings decide differently moves a whole token: compare the others
    near = (want - exact).norm(dim=-1) < 0.1 * exact.norm(dim=-1)
    near &= (got - exact).norm(dim=-1) < 0.1 * exact.norm(dim=-1)
    assert near.float().mean() > 0.5
    assert error(got[near], exact[near]) <= 2 * error(want[near], exact[near]) + 1e-3


def step_logits(model, experts, tokens):
    model.set_experts_implementation(experts)
    return model(tokens).logits.double()


@families
def test_frozen_experts_get_no_gradient_and_no_work(family, monkeypatch):
    from moe_aiter.kernels._loop import WeightGradient

    module = experts(family).requires_grad_(False)
    x, ids, weights = routed()
    monkeypatch.setattr(WeightGradient, "add", lambda *_: pytest.fail("a gradient nobody asked for"))
    x.requires_grad_()
    module(x, ids, weights).sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is None for p in module.parameters())


@families
def test_experts_without_tokens_get_exact_zeros(family):
    module = experts(family)
    x, ids, weights = routed()
    ids = ids % 3
    module(x, ids, weights).sum().backward()
    for name, p in module.named_parameters():
        assert (p.grad[3:] == 0).all(), name
        assert (p.grad[:3] != 0).any(), name


@families
def test_no_tokens(family):
    module = experts(family)
    x, ids, weights = routed(tokens=0)
    x.requires_grad_()
    out = module(x, ids, weights)
    out.sum().backward()
    assert out.shape == (0, H) and x.grad.shape == (0, H)
    assert all((p.grad == 0).all() for p in module.parameters())


@families
@pytest.mark.parametrize("gate", ["fused", "unfused"])
def test_sentinel_ids_drop_the_choice(family, gate):
    """As under expert parallelism: the id past the last expert, whatever its weight is."""
    module = experts(family)
    if gate == "unfused":
        module._apply_gate = functools.partial(type(module)._apply_gate, module)
    x, ids, weights = routed()
    away = torch.rand(T, TOP_K) < 0.4
    away[0], away[1] = True, torch.tensor([True, False])
    x.requires_grad_(), weights.requires_grad_()
    out = module(x, ids.masked_fill(away, E), weights)
    with torch.no_grad():
        want = eager(module, x, ids, weights.masked_fill(away, 0))
    assert error(out, want) < 1e-5 and (out[0] == 0).all()
    out.sum().backward()
    assert (x.grad[0] == 0).all() and x.grad.isfinite().all()
    assert (weights.grad[away] == 0).all() and (weights.grad[~away] != 0).all()


@families
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_routing_weights_of_either_dtype(family, weights_dtype):
    module = experts(family, torch.bfloat16)
    x, ids, weights = routed(torch.bfloat16, weights_dtype)
    weights.requires_grad_()
    out = module(x, ids, weights)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and weights.grad.dtype == weights_dtype
    with torch.no_grad():
        want = eager(module.double(), x.double(), ids, weights.double())
    assert error(out, want) < 1e-2


@families
def test_autocast(family):
    """Products in bfloat16, result and gradients in the model's own dtype, as with the eager experts."""
    module = experts(family)
    x, ids, weights = routed()
    with torch.autocast("cpu", torch.bfloat16):
        out, want = module(x, ids, weights), eager(module, x, ids, weights)
    out.sum().backward()
    assert out.dtype == want.dtype == torch.float32 and error(out, want) < 2e-2
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@families
def test_weights_and_gradients_are_not_copied(family, monkeypatch):
    """Weights reach the products in their own memory, and their gradients come in that order."""
    module, seen = experts(family), {}
    fused = ours.expert_mlp

    def look(x, gate_up, down, *args, **kwargs):
        seen.update(gate_up_proj=gate_up.data_ptr(), down_proj=down.data_ptr())
        return fused(x, gate_up, down, *args, **kwargs)

    monkeypatch.setattr(ours, "expert_mlp", look)
    module(*routed()).sum().backward()
    for name, address in seen.items():
        p = getattr(module, name)
        assert p.data_ptr() == address and p.grad.stride() == p.stride()


@families
def test_main_grad(family):
    module, inputs = experts(family), routed()
    module(*inputs).sum().backward()
    want = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    for name in ("gate_up_proj", "down_proj"):
        getattr(module, name).main_grad = torch.ones_like(getattr(module, name), dtype=torch.float64)
    module(*inputs).sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        p = getattr(module, name)
        assert p.grad is None and error(p.main_grad - 1, want[name]) < 1e-5
    module._apply_gate = lambda z: z.chunk(2, -1)[0]
    with pytest.raises(ValueError, match="main_grad"):
        module(*inputs)


@families
def test_save_and_load(family, tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokens = tiny_model(family, experts=NAME), torch.randint(1, VOCAB, (1, 6))
    keys = {k: v.shape for k, v in tiny_model(family).state_dict().items()}
    assert {k: v.shape for k, v in model.state_dict().items()} == keys
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME)
    assert again.config._experts_implementation == NAME
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        assert error(plain(tokens).logits, model(tokens).logits) < 1e-5


@families
def test_generate(family):
    model, tokens = tiny_model(family).eval(), torch.randint(1, VOCAB, (2, 4))
    outs = []
    for name in ("eager", NAME):
        model.set_experts_implementation(name)
        outs.append(model.generate(tokens, max_new_tokens=4, do_sample=False))
    assert torch.equal(*outs)


@families
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family, reentrant):
    model, tokens = tiny_model(family), torch.randint(1, VOCAB, (1, 7))
    want = step(model, NAME, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    got = step(model, NAME, tokens)
    for name, value in want.items():
        assert (value is None and got[name] is None) or torch.equal(got[name], value), name


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_compile_without_a_graph_break(family):
    module = experts(family)
    x, ids, weights = routed()
    want = module(x, ids, weights)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for p in module.parameters():
        p.grad = None
    out = compiled(x, ids, weights)
    out.sum().backward()
    assert error(out, want) < 1e-6 and all(p.grad is not None for p in module.parameters())


def test_registering(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    register()
    assert ALL_EXPERTS_FUNCTIONS[NAME] is ours.experts_forward
    unregister(), unregister()
    assert NAME not in ALL_EXPERTS_FUNCTIONS
    with pytest.raises(ValueError, match=NAME):
        tiny_model("mixtral").set_experts_implementation(NAME)


def test_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 5\.7 or newer.*moe-aiter\[hf\]"):
        register()


@pytest.mark.parametrize("version", ["4.57.1", "5.6.2"])
def test_transformers_is_too_old(version, monkeypatch):
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=rf"5\.7 or newer.*{version}"):
        register()


def test_unknown_names_are_refused():
    register()
    with pytest.raises(ValueError, match="moe_eiter"):
        tiny_model("mixtral").set_experts_implementation("moe_eiter")


def test_known_gates_of_the_families():
    for family in FAMILIES:
        assert known_gate(experts(family)) == (
            ("swiglu_oai", True) if family == "gpt_oss" else ("swiglu", False)
        )
