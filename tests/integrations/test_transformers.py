"""transformers' models with `experts_implementation="moe_aiter"` beside their own eager experts."""

import copy
import functools

import pytest
import torch
from check import assert_as_good_as_torch, error, with_gradients
from integrations.families import FAMILIES, FUSED, TOP_K, E, H, experts_of, tiny_model
from torch.func import functional_call

from moe_aiter import use_main_grad
from moe_aiter.integrations import transformers as ours
from moe_aiter.integrations.transformers import NAME, known_gate, register

pytest.importorskip("transformers", reason="transformers is not installed")

T = 13
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_as_good_as_eager(family, dtype, device):
    """Output and gradients beside float64, with no more than twice the error of the eager experts."""
    module = experts(family, dtype).to(device)
    # of T tokens, the gradient of the weights has one large number, whose one rounding would decide
    x, ids, weights = (t.to(device) for t in routed(dtype, tokens=8 * T))
    names, parameters = zip(*module.named_parameters(), strict=True)

    def through(forward):
        def run(x, weights, *parameters):
            module.config._experts_implementation = forward
            state = dict(zip(names, parameters, strict=True))
            return functional_call(module, state, (x, ids, weights))

        return with_gradients(run)

    assert_as_good_as_torch(through(NAME), through("eager"), x, weights, *parameters)


@families
def test_frozen_experts_get_no_gradient_and_no_work(family, monkeypatch):
    from moe_aiter.kernels.experts.cpu import WeightGradient

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
@pytest.mark.parametrize("gate", ["fused", "unfused"])
def test_autocast(family, gate):
    """Products in bfloat16, result and gradients in the model's own dtype, as with the eager experts."""
    module = experts(family)
    inputs = routed()
    if gate == "unfused":
        module._apply_gate = functools.partial(type(module)._apply_gate, module)
    with torch.autocast("cpu", torch.bfloat16):
        out, want = module(*inputs), eager(module, *inputs)
    out.sum().backward()
    assert out.dtype == want.dtype == torch.float32 and error(out, want) < 2e-2
    assert error(out, module(*inputs)) > 1e-4
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_tokens_of_another_dtype_than_the_weights():
    """They are cast to that of the weights, and the result back, as by transformers' grouped_mm."""
    module = experts(dtype=torch.bfloat16)
    x, ids, weights = routed()
    out = module(x, ids, weights)
    assert out.dtype == torch.float32
    assert torch.equal(out.bfloat16(), module(x.bfloat16(), ids, weights))


def test_a_gate_that_computes_in_float32():
    module = experts(dtype=torch.bfloat16)
    known = type(module)._apply_gate
    module._apply_gate = lambda z: known(module, z.float())
    inputs = routed(torch.bfloat16)
    out = module(*inputs)
    assert out.dtype == torch.bfloat16
    del module._apply_gate
    assert error(out, module(*inputs)) < 1e-2


@families
def test_weights_and_gradients_are_not_copied(family, monkeypatch):
    """Weights reach the products in their own memory, and their gradients come in that order."""
    module, seen = experts(family), {}
    fused = ours.mix_experts

    def look(x, weights, *args):
        seen.update(gate_up_proj=weights.gate_up.data_ptr(), down_proj=weights.down.data_ptr())
        return fused(x, weights, *args)

    monkeypatch.setattr(ours, "mix_experts", look)
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


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", *FUSED])
def test_use_main_grad_in_a_model(family):
    """A step is that of autograd's gradients; a gate of the module's own keeps to `.grad`."""
    model = tiny_model(family, experts=NAME)
    plain = copy.deepcopy(model)
    want, got = (torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model))
    use_main_grad(model, got)
    own = experts_of(model)[0]
    assert own.gate_up_proj.main_grad.dtype == own.down_proj.main_grad.dtype == torch.float32
    ids = torch.arange(12).view(2, 6)
    for m, optimizer in ((plain, want), (model, got)):
        for _ in range(2):
            m(input_ids=ids, labels=ids).loss.backward()
        if m is model:
            assert own.gate_up_proj.grad is None and own.gate_up_proj.main_grad.count_nonzero()
        optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p, q[1], msg=lambda m, name=name: f"{name}: {m}")

    for module in experts_of(plain):
        module._apply_gate = lambda z: z.chunk(2, -1)[0]
    with pytest.raises(ValueError, match="no experts whose weights"):
        use_main_grad(plain, want)
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="no experts whose weights"):
        use_main_grad(model, got)


def test_compile_with_an_unknown_gate():
    module = experts()
    module._apply_gate = lambda z: torch.sin(z.chunk(2, -1)[0])
    inputs = routed()
    out = torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs)
    out.sum().backward()
    assert error(out, module(*inputs)) < 1e-6
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


def test_known_gates_of_the_families():
    for family in FAMILIES:
        assert known_gate(experts(family)) == (
            ("swiglu_oai", True) if family == "gpt_oss" else ("swiglu", False)
        )
