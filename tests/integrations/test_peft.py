"""PEFT's adapters of experts without whole weights, beside PEFT's own way on eager experts."""

import copy
import re
import warnings

import pytest
import torch
from check import assert_output_as_good, error
from integrations.families import VOCAB, experts_of, tiny_model

from moe_aiter.integrations import transformers as ours

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", minversion="0.20", reason="PEFT 0.20 is not installed")

from moe_aiter.integrations import peft as file  # noqa: E402

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CHOICES = {"both": BOTH, "gate_up": BOTH[:1], "down": BOTH[1:]}
FAMILIES = [
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
]  # plain; transposed, interleaved, with biases; a dense layer
TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(file, "warned", set())
    file.register()
    yield
    file.unregister()


@pytest.fixture
def whole(monkeypatch):
    """How often PEFT makes the product of an adapter's factors, as a parametrization or as a delta."""
    calls = []
    wrapper = file.param_wrapper()
    for name in file.DECIDING[-2:]:
        if (plain := getattr(wrapper, name, None)) is None:
            continue  # PEFT 0.20 has no get_delta_factors

        def counted(self, *args, plain=plain, **named):
            calls.append(self.parameter_name)
            return plain(self, *args, **named)

        monkeypatch.setattr(wrapper, name, counted)
    return calls


def adapted(family, experts, targets=BOTH, dtype=torch.float32, base=None, **config):
    """A model with adapters as after some training."""
    torch.manual_seed(0)
    model = tiny_model(family, dtype, experts, **(base or {}))
    settings = {"r": 3, "lora_alpha": 7, "target_parameters": targets} | config
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[], **settings))
    torch.manual_seed(2)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data + 0.1 * torch.randn_like(p)
    return model


def step(model):
    """Logits and the gradients of the adapters, by name."""
    model.zero_grad()
    out = model(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {
        n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("targets", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, targets, whole):
    exact = step(adapted(family, "eager", targets).double())
    theirs = step(adapted(family, "eager", targets))
    assert whole
    whole.clear()
    got = step(adapted(family, ours.NAME, targets))
    assert not whole  # neither forward nor backward
    assert got.keys() == exact.keys()
    for name, truth in exact.items():
        assert_output_as_good(name, got[name], theirs[name], truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_adapters_of_a_narrow_model(dtype):
    """As PEFT makes them: float32 whatever the weights are."""
    exact = step(adapted("qwen3_moe", "eager", dtype=dtype).double())
    theirs = step(adapted("qwen3_moe", "eager", dtype=dtype))
    model = adapted("qwen3_moe", ours.NAME, dtype=dtype)
    got = step(model)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    for name, truth in exact.items():
        assert_output_as_good(name, got[name].float(), theirs[name].float(), truth)


def test_autocast():
    exact = step(adapted("qwen3_moe", "eager").double())
    with torch.autocast("cpu", torch.bfloat16):
        got, theirs = (step(adapted("qwen3_moe", experts)) for experts in (ours.NAME, "eager"))
    for name, truth in exact.items():
        assert_output_as_good(name, got[name].float(), theirs[name].float(), truth)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, whole):
    plain = step(adapted("qwen3_moe", ours.NAME))
    model = adapted("qwen3_moe", ours.NAME)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    got = step(model)
    assert not whole
    for name, expected in plain.items():
        assert error(got[name], expected) < 1e-6


def test_no_gradient_of_a_frozen_weight(monkeypatch):
    from moe_aiter.kernels import experts

    def refuse(*_):
        raise AssertionError("the gradient of a frozen weight was computed")

    model = adapted("qwen3_moe", ours.NAME)
    weights = {tuple(p.shape) for n, p in model.named_parameters() if "_proj" in n and p.dim() == 3}
    assert len(weights) == 2
    for module in (experts.adapted, experts.up):
        plain = module.weight_gradient

        def checked(w, *rest, plain=plain):
            assert tuple(w.shape) not in weights and tuple(w.mT.shape) not in weights
            return plain(w, *rest)

        monkeypatch.setattr(module, "weight_gradient", checked)
    step(model)


def test_unknown_gates_keep_their_adapters(whole):
    """A gate of the module's own, between the same products."""
    models = [adapted("qwen3_moe", experts) for experts in ("eager", ours.NAME)]
    for model in models:
        for experts in experts_of(model.base_model.model):
            experts.act_fn = torch.nn.Tanh()
    expected = step(models[0])
    whole.clear()
    got = step(models[1])
    assert not whole
    for name, truth in expected.items():
        assert error(got[name], truth) < 1e-5


def test_adapters_are_switched_disabled_merged_and_saved(tmp_path, whole):
    def logits(model):
        with torch.no_grad():
            return model(input_ids=TOKENS).logits

    models = []
    for experts in ("eager", ours.NAME):
        model = adapted("mixtral", experts).eval()
        config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=[], target_parameters=BOTH)
        model.add_adapter("other", config)
        torch.manual_seed(3)
        for name, p in model.named_parameters():
            if ".other." in name:
                p.data = p.data + 0.2 * torch.randn_like(p)
        models.append(model)
    eager, model = models
    first = logits(model)
    assert error(first, logits(eager)) < 1e-5
    for m in models:
        m.set_adapter("other")
    whole.clear()
    second = logits(model)
    assert not whole and error(second, first) > 1e-2
    assert error(second, logits(eager)) < 1e-5
    with model.disable_adapter(), eager.disable_adapter():
        plain = logits(model)
        assert error(plain, logits(eager)) < 1e-5 and error(plain, second) > 1e-2
    assert torch.equal(logits(model), second)
    assert torch.equal(model.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False),
                       eager.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False))  # fmt: skip
    for m in models:
        m.base_model.set_adapter(["default", "other"])
    whole.clear()
    assert error(logits(model), logits(eager)) < 1e-5 and whole  # two at once: PEFT's own way
    model.set_adapter("other")
    model.save_pretrained(tmp_path, selected_adapters=["other"])
    again = peft.PeftModel.from_pretrained(base_of("mixtral"), tmp_path / "other").eval()
    assert torch.equal(logits(again), second)
    model.merge_adapter()
    assert error(logits(model), second) < 1e-5
    model.unmerge_adapter()
    assert error(model.merge_and_unload()(TOKENS).logits, second) < 1e-5


def base_of(family):
    torch.manual_seed(0)
    return tiny_model(family, experts=ours.NAME)


def test_what_is_not_ours_is_left_to_peft(whole):
    """Other implementations; and one of a module's parameters that PEFT alone can adapt."""
    for experts, targets in (("eager", BOTH), (ours.NAME, [*BOTH, "mlp.experts.gate_up_proj_bias"])):
        family = "gpt_oss"
        whole.clear()
        got = step(adapted(family, experts, targets))
        assert set(whole) == ({"gate_up_proj", "down_proj"} if experts == "eager" else {"gate_up_proj_bias"})
        file.unregister()
        plain = step(adapted(family, "eager", targets))
        file.register()
        for name, expected in plain.items():
            assert error(got[name], expected) < 1e-5


def test_experts_that_do_not_ask_are_an_error():
    model = adapted("qwen3_moe", ours.NAME)
    for experts in experts_of(model.base_model.model):
        experts.forward = lambda x, *_: x
    with pytest.raises(RuntimeError, match="without asking for its adapter"):
        model(input_ids=TOKENS)
    assert not any(hasattr(m, ours.ADAPTERS) for m in model.modules())


def test_register_is_idempotent_and_can_be_undone():
    wrapper = file.param_wrapper()
    file.register()
    assert wrapper._activate_lora is file.activate_lora
    file.unregister()
    before = torch.get_rng_state()
    file.register()  # whose look at PEFT draws no random numbers of the user's
    assert torch.equal(torch.get_rng_state(), before)
    file.unregister()
    file.unregister()
    assert wrapper._activate_lora.__module__ == wrapper.__module__
    for name, (owner, method) in file.replaced().items():
        assert getattr(owner, name) is not method and getattr(owner, name).__module__.startswith("peft.")


def other_forward(self, x, *args, **named):
    return self.base_layer(x, *args, **named)


def other_activate(self, active_adapters, strength=1.0):
    raise AssertionError("never called")


def other_inject(self, model, peft_config, adapter_name):
    raise AssertionError("never called")


other_activate.__module__ = other_inject.__module__ = "peft.tuners.lora.layer"
CHANGED = {  # what a later PEFT, or another package, has in the place of which method, and the reason
    "signature": (0, "_activate_lora", other_activate, "_activate_lora takes .*strength=1.0"),
    "order": (1, "_inject_parameters", other_inject, "_inject_parameters takes .self, model, peft_config"),
    "another package": (0, "_activate_lora", other_forward, f"_activate_lora is that of {__name__}"),
    "no method": (0, "_activate_lora", None, "no method ParamWrapper._activate_lora"),
    "forward": (0, "forward", other_forward, "forward does not call _activate_lora"),
}


def reasons(make) -> tuple:
    """What is made, and the warnings of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(w.message) for w in caught if "still make whole weights" in str(w.message)]


@pytest.mark.parametrize("owner, name, method, reason", CHANGED.values(), ids=CHANGED)
def test_a_peft_that_is_not_as_known(owner, name, method, reason, monkeypatch):
    """One warning that says why, no method replaced, and `check` names whole weights."""
    file.unregister()
    owner = [file.param_wrapper(), peft.tuners.tuners_utils.BaseTuner][owner]
    monkeypatch.setattr(owner, name, method)
    stays_as_it_is(reason)


def stays_as_it_is(reason):
    """`register` replaces no method, and says why, once."""
    before = {name: vars(owner)[name] for name, (owner, _) in file.replaced().items()}
    _, said = reasons(lambda: (file.register(), file.register()))
    assert len(said) == 1 and re.search(reason, said[0]), said
    assert before == {name: vars(owner)[name] for name, (owner, _) in file.replaced().items()}


def test_a_peft_whose_experts_have_another_order(monkeypatch):
    file.unregister()
    for name in file.DECIDING[-2:]:
        if (plain := getattr(file.param_wrapper(), name, None)) is not None:

            def flipped(self, adapter, plain=plain):
                made = plain(self, adapter)
                return made.flip(0) if torch.is_tensor(made) else (made[0].flip(0), made[1].flip(0), made[2])

            monkeypatch.setattr(file.param_wrapper(), name, flipped)
    stays_as_it_is("lays out A and B in another way")
    model = adapted("mixtral", ours.NAME)
    assert {path.path for path in ours.check(model).values()} == {"whole weights"}
    assert error(step(model)["logits"], step(adapted("mixtral", "eager"))["logits"]) < 1e-5


@pytest.mark.parametrize("name", file.DECIDING)
def test_a_wrapper_with_an_override_is_not_fused(name, whole):
    """PEFT's own way runs, with the class's name in one warning and in `check`."""
    wrapper = file.param_wrapper()
    if not hasattr(wrapper, name):
        pytest.skip(f"this PEFT has no {name}")

    def override(self, *args, **named):
        return getattr(super(Other, self), name)(*args, **named)

    Other = type("Other", (wrapper,), {name: override})
    model = adapted("qwen3_moe", ours.NAME)
    want = step(model)
    for module in model.modules():
        if type(module) is wrapper:
            module.__class__ = Other
    whole.clear()
    (got, _), said = reasons(lambda: (step(model), step(model)))
    assert whole and all(error(got[key], value) < 1e-5 for key, value in want.items())
    assert len(said) == 1 and f"Other overrides {name} of PEFT's ParamWrapper" in said[0]
    (path,) = set(ours.check(model).values())
    assert path.path == "whole weights" and f"Other overrides {name}" in path.why


def test_a_subclass_that_changes_no_product_is_fused(whole):
    model = adapted("qwen3_moe", ours.NAME)
    for module in model.modules():
        if type(module) is file.param_wrapper():
            module.__class__ = type("Named", (file.param_wrapper(),), {"__repr__": lambda self: "named"})
    _, said = reasons(lambda: step(model))
    assert not whole and not said and {p.path for p in ours.check(model).values()} == {"two products"}


def test_check_of_adapters_that_run_as_whole_weights():
    model = adapted("mixtral", ours.NAME)
    paths = lambda: {(p.path, p.why) for p in ours.check(model).values()}  # noqa: E731
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=[], target_parameters=BOTH))
    model.base_model.set_adapter(["default", "other"])
    assert paths() == {("whole weights", "2 adapters of down_proj are active")}
    with model.disable_adapter():
        assert {path for path, _ in paths()} == {"fused"}
    model.set_adapter("other")
    assert {path for path, _ in paths()} == {"two products"}
    file.unregister()
    assert {path for path, _ in paths()} == {"whole weights"}


def test_a_forward_pass_leaves_nothing_behind():
    """A model can be copied after it."""
    model = adapted("qwen3_moe", ours.NAME)
    expected = step(model)["logits"]
    assert torch.equal(step(copy.deepcopy(model))["logits"], expected)
