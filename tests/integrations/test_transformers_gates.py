"""Every experts class that transformers has, and gates that it has not."""

import copy
import functools
import math
import pathlib
import re
import typing

import pytest
import torch
import torch.nn.functional as F
from check import error, with_gradients
from integrations.families import TOP_K, E, H
from torch import nn
from torch.func import functional_call

from moe_aiter.integrations import gates
from moe_aiter.integrations import transformers as ours
from moe_aiter.integrations.transformers import NAME, known_gate, register
from moe_aiter.kernels.base.activations import swiglu_limit, swiglu_softcap

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

T = 21
OAI = dict.fromkeys(("GptOssExperts",), ("swiglu_oai", True)) | dict.fromkeys(
    ("OpenAIPrivacyFilterExperts", "MiniMaxM3VLExperts"), ("swiglu_oai", False)
)
PLAIN = {"NemotronHExperts": ("silu", False)}
LIMITED = dict.fromkeys(
    ("DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts", "HYV4VLExperts"),
    ("swiglu_limit(7.0, 7.0, 1.0, 0.0)", False),
)
CAPPED = dict.fromkeys(("Inkling2Experts", "Inkling2LoopExperts"), ("swiglu_softcap(2.0, 3.0)", False))
KNOWN = OAI | PLAIN | LIMITED | CAPPED


class Config:
    """What any of them reads of its configuration: numbers by their names."""

    _experts_implementation = NAME
    numbers: typing.ClassVar = {  # the first name that is part of the one asked for
        "eps": 1e-6, "latent": None, "act": "silu", "alpha": 1.702, "limit": 7.0,
        "gate_softcap": 2.0, "softcap": 3.0,
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
    file = pytest.importorskip(module, reason="this transformers has no such model")
    return randomised(getattr(file, kind)(config))


def randomised(experts):
    for p in experts.parameters():
        p.data = torch.randn_like(p)
    return experts.double()


def muse_spark():
    return new_experts("transformers.models.muse_spark.modeling_muse_spark", "MuseSparkExperts")


def mixtral(**numbers):
    return new_experts("transformers.models.mixtral.modeling_mixtral", "MixtralExperts", **numbers)


def gpt_oss():
    return new_experts("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")


def inkling2():
    return new_experts("transformers.models.inkling2.modeling_inkling2", "Inkling2Experts")


def assert_as_eager(experts, ids=None):
    """Output and all gradients, in float64; some of the models compute in float32."""
    weights, best = torch.randn(T, E, dtype=torch.float64).softmax(-1).topk(TOP_K)
    ids = best if ids is None else ids
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
    calls = []
    for name in ("mix_experts", "expert_rows"):
        run = getattr(ours, name)
        monkeypatch.setattr(ours, name, lambda *a, run=run, **k: calls.append(1) or run(*a, **k))
    return calls


@pytest.mark.parametrize("module, kind", decorated_classes())
def test_every_class_of_transformers(module, kind, fused):
    experts = new_experts(module, kind)
    assert known_gate(experts) == KNOWN.get(kind, ("swiglu", False))
    assert_as_eager(experts)
    assert len(fused) == 1


@pytest.mark.parametrize("module, kind", decorated_classes())
def test_main_grad_of_every_class(module, kind):
    experts = new_experts(module, kind)
    inputs = torch.randn(T, H, dtype=torch.float64), torch.randint(E, (T, TOP_K)), torch.rand(T, TOP_K)
    experts.config._experts_implementation = "eager"
    experts(*inputs).sum().backward()
    want = {name: p.grad for name, p in experts.named_parameters()}
    experts.config._experts_implementation = NAME
    experts.zero_grad()
    names = ours.names_of(experts)
    for name in names:
        p = getattr(experts, name)
        p.main_grad = torch.ones_like(p)
    experts(*inputs).sum().backward()
    for name, p in experts.named_parameters():
        assert (p.grad is None) == (name in names)
        assert error(p.main_grad - 1 if name in names else p.grad, want[name]) < 1e-6


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


@pytest.mark.parametrize("limit", [0.01, 1.0, 7.0, 1000.0])
def test_a_limit_on_silu(limit):
    """Of the output, as in Step 3.7: the same as a limit on the gate."""
    gate = gates.gate_before(limit)
    assert math.isclose(gate / (1 + math.exp(-gate)), limit, rel_tol=1e-12)
    z = torch.tensor(
        [-2 * limit, -0.1, 0.5 * gate, 0.999 * gate, 1.001 * gate, 3 * gate], dtype=torch.float64
    )
    assert error(F.silu(z.clamp(max=gate)), F.silu(z).clamp(max=limit)) < 1e-12


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


@pytest.mark.parametrize("constant, value", [("limit", 1.0), ("limit", 12), ("alpha", 1.0), ("alpha", 0.5)])
def test_other_constants(constant, value, fused):
    experts = gpt_oss()
    setattr(experts, constant, value)
    numbers = {"limit": 7.0, "alpha": 1.702, constant: value}
    assert known_gate(experts) == (
        swiglu_limit(numbers["limit"], numbers["limit"], numbers["alpha"], 1.0), True,
    )  # fmt: skip
    assert_as_eager(experts)
    assert len(fused) == 1


@pytest.mark.parametrize(
    "constant, value", [("limit", math.inf), ("limit", 0), ("alpha", -1.0), ("alpha", torch.tensor(1.0))]
)
def test_constants_that_no_kernel_has(constant, value, fused):
    experts = gpt_oss()
    setattr(experts, constant, value)
    assert known_gate(experts) is None
    assert "with these constants: " in ours.gate_and_reason(experts)[1]
    assert_as_eager(experts)
    assert not fused


@pytest.mark.parametrize("gate, up", [(0.5, 100), (25.0, 4.0)])
def test_other_soft_caps(gate, up, fused):
    experts = inkling2()
    experts.act_fn.gate_softcap.softcap, experts.act_fn.up_softcap.softcap = gate, up
    assert known_gate(experts) == (swiglu_softcap(gate, up), False)
    assert_as_eager(experts)
    assert len(fused) == 1


@pytest.mark.parametrize("part", ["gate_softcap", "up_softcap"])
@pytest.mark.parametrize("value", [-1.0, 1e5, torch.tensor(1.0)])
def test_soft_caps_that_no_kernel_has(part, value, fused):
    experts = inkling2()
    getattr(experts.act_fn, part).softcap = value
    assert known_gate(experts) is None
    assert "with these constants: " in ours.gate_and_reason(experts)[1]
    assert_as_eager(experts)
    assert not fused


class Sine(nn.Module):
    def forward(self, *xs):
        return sum(map(torch.sin, xs))


@pytest.mark.parametrize("part", ["act_fn", "act_fn.gate_softcap", "act_fn.up_softcap"])
@pytest.mark.parametrize("change", ["another", "hooks"])
def test_soft_caps_in_other_modules(part, change, fused):
    experts = inkling2()
    if change == "another":
        experts.set_submodule(part, Sine())
    else:
        experts.get_submodule(part).register_forward_hook(lambda module, args, out: 2 * out)
    assert known_gate(experts) is None
    assert_as_eager(experts)
    assert not fused


@pytest.mark.parametrize("dropped", [0.3, 1.0])
def test_a_norm_with_dropped_choices(dropped, fused):
    ids = torch.randint(E, (T, TOP_K))
    assert_as_eager(muse_spark(), ids.where(torch.rand(T, TOP_K) > dropped, E))
    assert len(fused) == 1


@pytest.mark.parametrize(
    "kind",
    ["deepseek_v4.DeepseekV4Experts", "inkling2.Inkling2Experts", "muse_spark.MuseSparkExperts"],
)
def test_compile(kind, fused):
    model, _, name = kind.partition(".")
    experts = new_experts(f"transformers.models.{model}.modeling_{model}", name)
    inputs = torch.randn(T, H, dtype=torch.float64), torch.randint(E, (T, TOP_K)), torch.rand(T, TOP_K)
    out = torch.compile(experts, fullgraph=True, backend="aot_eager")(*inputs)
    assert len(fused) == 1
    assert error(out, experts(*inputs)) < 1e-12


def test_limits_around_another_function(fused):
    experts = new_experts(
        "transformers.models.deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts", act="gelu"
    )
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
