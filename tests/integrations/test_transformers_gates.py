"""Every experts class that transformers has, and gates that it has not."""

import copy
import functools
import importlib
import pathlib
import re

import pytest
import torch
import torch.nn.functional as F
from check import error, with_gradients
from integrations.families import TOP_K, E, H
from torch import nn
from torch.func import functional_call

from moe_aiter.integrations import transformers as ours
from moe_aiter.integrations.transformers import NAME, known_gate, register

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

T = 21
OAI = dict.fromkeys(("GptOssExperts",), ("swiglu_oai", True)) | dict.fromkeys(
    ("OpenAIPrivacyFilterExperts", "MiniMaxM3VLExperts"), ("swiglu_oai", False)
)
PLAIN = {"NemotronHExperts": ("silu", False)}
UNKNOWN = {
    "DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts", "Inkling2Experts", "Step3p7Experts",
}  # fmt: skip


class Config:
    """What any of them reads of its configuration: numbers by their names."""

    _experts_implementation = NAME
    numbers = {  # the first name that is part of the one asked for
        "eps": 1e-6, "latent": None, "act": "silu", "alpha": 1.702, "limit": 7.0, "softcap": 3.0,
        "hidden": H, "intermediate": 24, "expert": E,
    }  # fmt: skip

    def __getattr__(self, name):
        for part, value in self.numbers.items():
            if part in name and not name.startswith("__"):
                return value
        raise AttributeError(name)


def decorated_classes():
    models = pathlib.Path(transformers.__path__[0]) / "models"
    pattern = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.M)
    return [
        pytest.param(f"transformers.models.{file.parent.name}.{file.stem}", kind, id=kind)
        for file in sorted(models.glob("*/modeling_*.py"))
        for kind in pattern.findall(file.read_text())
    ]


def new_experts(module, kind, **numbers):
    config = Config()
    config.numbers = Config.numbers | numbers
    return randomised(getattr(importlib.import_module(module), kind)(config))


def randomised(experts):
    for p in experts.parameters():
        p.data = torch.randn_like(p)
    return experts.double()


def mixtral(**numbers):
    return new_experts("transformers.models.mixtral.modeling_mixtral", "MixtralExperts", **numbers)


def gpt_oss():
    return new_experts("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")


def assert_as_eager(experts):
    """Output and all gradients, in float64; some of the models compute in float32."""
    weights, ids = torch.randn(T, E, dtype=torch.float64).softmax(-1).topk(TOP_K)
    x = torch.randn(T, H, dtype=torch.float64)
    names, parameters = zip(*experts.named_parameters(), strict=True)

    def through(implementation):
        def run(x, weights, *parameters):
            experts.config._experts_implementation = implementation
            return functional_call(experts, dict(zip(names, parameters, strict=True)), (x, ids, weights))

        return with_gradients(run)(x, weights, *parameters)

    for got, want in zip(through(NAME), through("eager"), strict=True):
        assert error(got, want) < 1e-6


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture
def fused(monkeypatch):
    """How often the fused experts were called."""
    calls, run = [], ours.expert_mlp
    monkeypatch.setattr(ours, "expert_mlp", lambda *a, **k: calls.append(1) or run(*a, **k))
    return calls


@pytest.mark.parametrize("module, kind", decorated_classes())
def test_every_class_of_transformers(module, kind, fused):
    experts = new_experts(module, kind)
    known = OAI.get(kind) or PLAIN.get(kind) or (None if kind in UNKNOWN else ("swiglu", False))
    assert known_gate(experts) == known
    assert_as_eager(experts)
    assert len(fused) == (known is not None and not getattr(experts, "has_post_expert_norm", False))


@pytest.mark.parametrize(
    "act, known",
    [("silu", "swiglu"), ("swish", "swiglu"), ("gelu", "geglu"), ("relu", "reglu"),
     ("gelu_python", "geglu"), ("gelu_pytorch_tanh", "geglu_tanh"), ("relu2", None), ("tanh", None)],
)  # fmt: skip
def test_activation_functions(act, known, fused):
    experts = mixtral(act=act)
    assert known_gate(experts) == (known and (known, False))
    assert_as_eager(experts)
    assert len(fused) == (known is not None)


@pytest.mark.parametrize("act, known", [("relu2", "relu2"), ("gelu", "gelu"), ("tanh", None)])
def test_without_a_gate(act, known, fused):
    experts = new_experts("transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts", act=act)
    assert known_gate(experts) == (known and (known, False))
    assert_as_eager(experts)
    assert len(fused) == (known is not None)


def weird(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.sin(gate) * up + gate


def eager_with(gate):
    """The loop of an experts module in plain torch, with any gate."""

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for t, j in ((t, j) for t in range(T) for j in range(TOP_K)):
            e = ids[t, j]
            a = gate(self, F.linear(x[t], self.gate_up_proj[e]))
            out[t] = out[t] + weights[t, j] * F.linear(a, self.down_proj[e])
        return out

    return forward


def overridden_in_a_subclass():
    class Own(type(mixtral())):
        _apply_gate = weird

    experts = Own(Config())
    return randomised(experts)


def overridden_in_an_instance():
    experts = mixtral()
    experts._apply_gate = functools.partial(weird, experts)
    return experts


def overridden_under_the_old_name():
    class Own(type(mixtral())):
        _apply_gate = functools.wraps(type(mixtral())._apply_gate)(weird)

    return randomised(Own(Config()))


@pytest.mark.parametrize(
    "new", [overridden_in_a_subclass, overridden_in_an_instance, overridden_under_the_old_name]
)
def test_an_overridden_gate_is_honoured(new, fused):
    experts = new()
    assert known_gate(experts) is None
    inputs = torch.randn(T, H, dtype=torch.float64), torch.randint(E, (T, TOP_K)), torch.rand(T, TOP_K)
    want = eager_with(weird)(experts, *inputs)
    got = experts(*inputs)
    assert error(got, want) < 1e-6 and not fused
    for a, b in zip(*(torch.autograd.grad(o.sum(), experts.parameters()) for o in (got, want)), strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("constant, value", [("limit", 1.0), ("alpha", 1.0)])
def test_other_constants_are_honoured(constant, value, fused):
    experts = gpt_oss()
    setattr(experts, constant, value)
    assert known_gate(experts) is None
    assert_as_eager(experts)
    assert not fused


def test_hooks_of_the_activation_function_are_called(fused):
    experts, seen = mixtral(), []
    experts.act_fn = copy.deepcopy(experts.act_fn)
    handle = experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
    assert_as_eager(experts)
    assert seen and not fused
    handle.remove()
    assert known_gate(experts) == ("swiglu", False)


def test_a_function_for_an_activation():
    experts = mixtral()
    del experts.act_fn  # a module, whose place only modules can take
    experts.act_fn = F.silu
    assert known_gate(experts) == ("swiglu", False)
    experts.act_fn = torch.sin
    assert known_gate(experts) is None
    assert_as_eager(experts)


def test_a_gate_with_parameters_of_its_own():
    experts = mixtral()
    experts.act_fn = nn.PReLU(dtype=torch.float64)
    assert_as_eager(experts)
