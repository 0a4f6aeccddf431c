"""Whole models of transformers with `experts_implementation="moe_aiter"`, and how it gets its name."""

import contextlib
import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from check import error, few
from integrations.families import FAMILIES, FUSED, VOCAB, experts_of, tiny_config, tiny_model

from moe_aiter.integrations import transformers as ours
from moe_aiter.integrations.transformers import NAME, register, unregister

pytest.importorskip("transformers", reason="transformers is not installed")

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
    for name in ("mix_experts", "unfused"):
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


@pytest.mark.parametrize("family", [*FAMILIES, *FUSED])
def test_model_in_float64(family, calls):
    model, tokens = tiny_model(family, torch.float64), torch.randint(1, VOCAB, (2, 9))
    want, got = step(model, "eager", tokens), step(model, NAME, tokens)
    assert set(calls) == {"mix_experts"}
    for name, value in want.items():
        assert (value is None) == (got[name] is None), name
        if value is not None and max(value.abs().max(), got[name].abs().max()) > 1e-15:  # else 0, rounded
            assert error(got[name], value) < 1e-12, name


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
def test_every_gradient_in_bfloat16(family, device):
    """No further from float64 than twice what eager is, on average and at worst, with the same choices.

    Not one by one: of a gradient of two numbers the error is chance.
    """
    want, got, exact = steps_with_the_same_choices(family, device)
    assert {n for n, g in got.items() if g is not None} == {n for n, g in exact.items() if g is not None}
    errors = torch.tensor(
        [[error(run[n], g) for run in (got, want)] for n, g in exact.items() if g is not None]
    )
    assert len(errors) > 20
    for statistic in errors.mean(0), errors.max(0)[0]:
        assert statistic[0] <= 2 * statistic[1], errors


def steps_with_the_same_choices(family: str, device: str) -> list[dict]:
    """What `step` gives of a bfloat16 model, eager and ours, and eager in float64."""
    for seed in range(50):
        torch.manual_seed(seed)
        model, tokens = tiny_model(family, torch.bfloat16).to(device), torch.randint(1, VOCAB, (1, 8))
        model.set_attn_implementation("eager")  # torch's fused one is wrong on CUDA for heads so narrow
        runs, chosen = [], []
        for dtype, experts in ((torch.bfloat16, "eager"), (torch.bfloat16, NAME), (torch.float64, "eager")):
            with choices(model.to(dtype)) as ids:
                runs.append(step(model, experts, tokens.to(device)))
            chosen.append(torch.cat(ids))
        if torch.equal(chosen[0], chosen[1]) and torch.equal(chosen[0], chosen[2]):
            return runs
    raise AssertionError("a rounding changed a choice with every seed")


@contextlib.contextmanager
def choices(model):
    """The experts that each layer is given, (T, k) in order of their numbers: some routers return none."""
    seen = []

    def see(_, args, kwargs):
        ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        seen.append(ids.sort(-1)[0])

    hooks = [m.register_forward_pre_hook(see, with_kwargs=True) for m in experts_of(model)]
    yield seen
    for hook in hooks:
        hook.remove()


@families
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_outputs_as_transformers_compares_them(family, dtype, device, tmp_path):
    """One reloaded model by each implementation, with the tolerance of transformers' own test of this."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, rms_norm_eps=1.0)  # nor there does a norm blow up a rounding
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval().to(device)
    tokens, outs = torch.randint(1, VOCAB, (13, 7), device=device), {}
    for name in ("eager", "grouped_mm", NAME):
        model.set_experts_implementation(name)
        with torch.no_grad():
            outs[name] = model(tokens).logits
    assert outs["eager"].abs().max() > 1e-3
    torch.testing.assert_close(outs["grouped_mm"], outs["eager"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outs[NAME], outs["eager"], rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("family", few(FAMILIES, "deepseek_v3", "gpt_oss"))
def test_compile_without_a_graph_break(family):
    model, tokens = tiny_model(family, experts=NAME), torch.randint(1, VOCAB, (2, 8))
    want = model(tokens).logits
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens).logits
    got.sum().backward()
    assert error(got, want) < 1e-5
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    assert experts and all(p.grad.abs().sum() > 0 for p in experts.values())


def test_registering(monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    register()
    register()
    assert ALL_EXPERTS_FUNCTIONS[NAME] is ours.experts_forward
    assert ours.FINDERS.count(ours.summed_weights) == 1
    unregister(), unregister()
    assert NAME not in ALL_EXPERTS_FUNCTIONS and ours.summed_weights not in ours.FINDERS
    with pytest.raises(ValueError, match=NAME):
        tiny_model("mixtral").set_experts_implementation(NAME)


def test_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 5\.7 or newer: pip install"):
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
