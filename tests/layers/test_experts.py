"""Experts against the double loop, and what a training loop does with the module."""

import copy
import io

import pytest
import torch
from check import assert_as_good_as_torch, error, with_gradients
from layers.double_loop import ACTIVATIONS, GATED, experts_loop
from torch import nn

from moe_aiter.kernels.experts.options import ExpertOptions
from moe_aiter.layers.experts import Experts
from moe_aiter.layers.moe import MoE
from moe_aiter.routing.plan import make_plan

E, H, WIDTH, T, K = 6, 12, 10, 17, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build(device="cpu", dtype=torch.float32, **options):
    return Experts(E, H, WIDTH, device=device, dtype=dtype, **options)


def draw(device="cpu", dtype=torch.float32, num_tokens=T, top_k=K):
    x = torch.randn(num_tokens, H).to(device, dtype)
    expert_ids = torch.rand(num_tokens, E).argsort(1)[:, :top_k].to(device)
    return x, expert_ids, torch.rand(num_tokens, top_k).to(device)


def run(experts, x, expert_ids, routing_weights, *params):
    """The layer as a function of its parameters."""
    params = dict(zip(dict(experts.named_parameters()), params, strict=True))
    args = (x, routing_weights, make_plan(expert_ids, E))
    return torch.func.functional_call(experts, params, args)


def compare(experts, x, expert_ids, routing_weights):
    """Values, and the gradients of x, the routing weights and every parameter."""
    names = [name for name, _ in experts.named_parameters()]

    def ours(x, expert_ids, routing_weights, *params):
        return run(experts, x, expert_ids, routing_weights, *params)

    def loop(x, expert_ids, routing_weights, *params):
        params = dict(zip(names, params, strict=True))
        return experts_loop(x, expert_ids, routing_weights, params, experts.activation, experts.interleaved)

    inputs = (x, expert_ids, routing_weights, *experts.parameters())
    floor = 1e-7 if len(x) > 1 else 5e-7  # in one token's gradients few roundings average out
    assert_as_good_as_torch(with_gradients(ours), with_gradients(loop), *inputs, floor=floor)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "activation, interleaved", [(a, False) for a in ACTIVATIONS] + [(a, True) for a in GATED]
)
@pytest.mark.pairwise
def test_against_the_loop(device, activation, interleaved, bias):
    compare(build(device, activation=activation, bias=bias, interleaved=interleaved), *draw(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, E])
def test_dtypes_and_top_k(device, dtype, top_k):
    compare(build(device, dtype, bias=True), *draw(device, dtype, top_k=top_k))


ROUTES = {
    "one expert takes all": lambda ids: torch.full_like(ids, 4),
    "the same expert twice": lambda ids: ids[:, :1].expand(-1, K),
    "dropped": lambda ids: ids.where(torch.rand(ids.shape, device=ids.device) < 0.6, -1),
    "all dropped": lambda ids: torch.full_like(ids, -1),
    "idle experts": lambda ids: ids % 2 * 3,
    "int32": lambda ids: ids.int(),
    "one token": lambda ids: ids[:1],
    "no tokens": lambda ids: ids[:0],
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_routes(device, name, bias):
    x, expert_ids, routing_weights = draw(device)
    expert_ids = ROUTES[name](expert_ids)
    compare(build(device, bias=bias), x[: len(expert_ids)], expert_ids, routing_weights[: len(expert_ids)])


def test_idle_experts_get_exact_zeros(device):
    experts = build(device, bias=True)
    x, expert_ids, routing_weights = draw(device)
    expert_ids = expert_ids % 2 * 3
    run(experts, x, expert_ids, routing_weights, *experts.parameters()).sum().backward()
    for p in experts.parameters():
        assert p.grad[[1, 2, 4, 5]].count_nonzero() == 0
        assert (p.grad[[0, 3]].flatten(1).abs().sum(1) > 0).all()


@pytest.mark.parametrize("layout", ["transposed", "sliced", "stride 0"])
def test_strided_inputs(device, layout):
    x, expert_ids, routing_weights = draw(device)
    strided = {
        "transposed": x.T.contiguous().T,
        "sliced": torch.cat((x, x), 1)[:, ::2],
        "stride 0": x[:1].expand(T, H),
    }[layout]
    compare(build(device), strided, expert_ids, routing_weights.T.contiguous().T)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_gradcheck(activation, bias):
    experts = build(dtype=torch.float64, activation=activation, bias=bias)
    x, expert_ids, routing_weights = draw(dtype=torch.float64, num_tokens=4, top_k=2)
    expert_ids[0, 1] = -1
    inputs = [x, routing_weights.double(), *experts.parameters()]
    inputs = [t.detach().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(
        lambda x, w, *p: run(experts, x, expert_ids, w, *p), inputs, fast_mode=True
    )


@pytest.mark.parametrize("frozen", ["gate_up", "down", "x", "routing_weights"])
def test_frozen_inputs_get_no_gradient(device, frozen):
    experts = build(device)
    x, expert_ids, routing_weights = draw(device)
    leaves = dict(experts.named_parameters(), x=x, routing_weights=routing_weights)
    for name, t in leaves.items():
        t.requires_grad_(name != frozen)
    experts(x, routing_weights, make_plan(expert_ids, E)).square().sum().backward()
    got = {name: t.grad for name, t in leaves.items()}
    for t in leaves.values():
        t.grad = None
        t.requires_grad_()
    experts(x, routing_weights, make_plan(expert_ids, E)).square().sum().backward()
    for name, t in leaves.items():
        assert got[name] is None if name == frozen else torch.equal(got[name], t.grad)


def test_main_grad_adds_up_over_micro_batches(device):
    experts = build(device)
    plain = copy.deepcopy(experts)
    for p in experts.parameters():
        p.main_grad = torch.ones_like(p)
    for _ in range(2):
        x, expert_ids, routing_weights = draw(device)
        plan = make_plan(expert_ids, E)
        experts(x, routing_weights, plan).sum().backward()
        plain(x, routing_weights, plan).sum().backward()
    for p, q in zip(experts.parameters(), plain.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad - 1, q.grad, rtol=1e-5, atol=1e-5)


def test_main_grad_keeps_what_bfloat16_would_round(device):
    experts = build(device, torch.bfloat16)
    for p in experts.parameters():
        p.main_grad = torch.full(p.shape, 256.0, device=device)  # 256 + g is 256 in bfloat16, for g below 1
    x, expert_ids, routing_weights = draw(device, torch.bfloat16)
    args = (x, routing_weights, make_plan(expert_ids, E))
    experts(*args).sum().mul(2**-8).backward()
    added = [p.main_grad - 256 for p in experts.parameters()]
    for p in experts.parameters():
        p.main_grad = None
    experts(*args).sum().mul(2**-8).backward()
    for p, got in zip(experts.parameters(), added, strict=True):
        assert 0 < got.abs().max() < 0.5
        torch.testing.assert_close(got, p.grad.float(), rtol=2**-8, atol=2**-14)


def test_main_grad_of_a_frozen_weight_stays(device):
    experts = build(device)
    experts.down.requires_grad_(False)
    experts.gate_up.main_grad = torch.zeros_like(experts.gate_up)
    experts.down.main_grad = torch.zeros_like(experts.down)
    x, expert_ids, routing_weights = draw(device)
    experts(x, routing_weights, make_plan(expert_ids, E)).sum().backward()
    assert experts.down.main_grad.count_nonzero() == 0 and experts.gate_up.main_grad.count_nonzero() > 0


@pytest.mark.parametrize("main_grad", [False, True])
def test_autocast_is_a_cast(device, main_grad):
    """Nothing inside the layer, forward or backward, is lowered besides."""
    experts = build(device, bias=True)
    cast = copy.deepcopy(experts)
    cast.gate_up.data, cast.down.data = cast.gate_up.data.bfloat16(), cast.down.data.bfloat16()
    x, expert_ids, routing_weights = draw(device)
    plan = make_plan(expert_ids, E)
    if main_grad:
        for layer in (experts, cast):
            for p in (layer.gate_up, layer.down):
                p.main_grad = torch.zeros(p.shape, device=device)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = experts(x, routing_weights, plan)
        dout = torch.randn_like(out)
        out.backward(dout)
    want = cast(x.bfloat16(), routing_weights, plan)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want)
    want.backward(dout)
    for p, q in zip(experts.parameters(), cast.parameters(), strict=True):
        if p.grad is None:
            assert main_grad and torch.equal(p.main_grad, q.main_grad)
        else:
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad, q.grad.float())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "memory", [{"recompute": "z"}, {"row_chunks": 2}, {"recompute": "z", "row_chunks": 3}], ids=str
)
def test_memory_is_traded_for_time_alone(device, memory, autocast):
    """By MoE, with biases and a main gradient: the results are what they were."""
    results = []
    for options in ({}, memory):
        torch.manual_seed(1)
        moe = MoE(600, 24, E, 2, bias=True, device=device, **options)
        moe.experts.down.main_grad = torch.zeros_like(moe.experts.down)
        x = torch.randn(T, 600, device=device).requires_grad_()
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            out = moe(x)
        out.float().square().sum().backward()
        assert moe.experts.down.grad is None
        results.append(
            [out, x.grad, moe.experts.down.main_grad, moe.experts.gate_up.grad, moe.router.weight.grad]
        )
    for got, want in zip(*results, strict=True):
        if "row_chunks" in memory:  # a product of other width may have other tiles
            assert error(got, want) < (1e-2 if autocast else 1e-5)
        else:
            assert torch.equal(got, want)


def test_autocast_leaves_float64_alone(device):
    experts = build(device, torch.float64)
    x, expert_ids, routing_weights = draw(device, torch.float64)
    plan = make_plan(expert_ids, E)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = experts(x, routing_weights, plan)
    assert torch.equal(out, experts(x, routing_weights, plan))


def test_two_runs_give_the_same_bits(device):
    experts = build(device, bias=True)
    x, expert_ids, routing_weights = draw(device)

    def step():
        inputs = [t.detach().requires_grad_() for t in (x, routing_weights, *experts.parameters())]
        out = run(experts, inputs[0], expert_ids, *inputs[1:])
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    assert all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))


def test_module_state(device):
    experts = build(device, bias=True)
    shapes = {name: tuple(p.shape) for name, p in experts.state_dict().items()}
    assert shapes == {
        "gate_up": (E, 2 * WIDTH, H),
        "gate_up_bias": (E, 2 * WIDTH),
        "down": (E, H, WIDTH),
        "down_bias": (E, H),
    }
    assert {n: tuple(p.shape) for n, p in build(activation="gelu").state_dict().items()} == {
        "gate_up": (E, WIDTH, H),
        "down": (E, H, WIDTH),
    }
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    x, expert_ids, routing_weights = draw(device)
    plan = make_plan(expert_ids, E)
    for twin in (copy.deepcopy(experts), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x, routing_weights, plan), experts(x, routing_weights, plan))
    text = "Experts(6, hidden=12, intermediate=10, activation='swiglu', bias=True, interleaved=False"
    assert repr(experts) == f"{text}, row_chunks=None, recompute='none', fp8=None)"


def test_initialised_as_linear_layers_would_be(device):
    """Also after `to_empty`, which leaves memory as it was."""
    experts = Experts(4, 100, 25, bias=True, device="meta").to_empty(device=device)
    experts.reset_parameters()
    for p, bound in zip(experts.parameters(), (0.1, 0.1, 0.2, 0.2), strict=True):
        assert 0.9 * bound < p.abs().max() <= bound
        assert p.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Experts(0, 8, 8), "num_experts must be at least 1, not 0"),
        (lambda: Experts(4, 8, -1), "intermediate must be at least 1, not -1"),
        (lambda: Experts(4, 8, 8, recompute="x"), "unknown recompute 'x'; known: none, z"),
        (lambda: Experts(4, 8, 8, row_chunks=0), "row_chunks must be at least 1, not 0"),
        (
            lambda: Experts(4, 8, 8, activation="tanh"),
            "unknown activation 'tanh'; known: geglu, geglu_tanh, gelu",
        ),
        (lambda: Experts(4, 8, 8, activation="gelu", interleaved=True), "'gelu' has no gate to interleave"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_options_are_attributes():
    """Set later, they are checked and used; an older pickle has each of them apart."""
    experts = build(activation="swiglu_oai", interleaved=True)
    experts.recompute = "z"
    assert experts.options == ExpertOptions("swiglu_oai", True, recompute="z")
    with pytest.raises(ValueError, match="unknown fp8 'e4'"):
        experts.fp8 = "e4"
    state = vars(experts).copy()
    state |= vars(state.pop("options"))
    older = Experts.__new__(Experts)
    older.__setstate__(state)
    assert older.options == experts.options and older.fp8 is None and "fp8" not in vars(older)


def test_options_that_do_not_fit_each_other_raise_when_they_are_used():
    """One can be set after the other, in any order; a subclass may set them in an __init__ of its own."""

    class Plain(Experts):
        def __init__(self):
            nn.Module.__init__(self)
            self.interleaved, self.activation = True, "relu"
            self.gate_up = nn.Parameter(torch.ones(E, WIDTH, H))
            self.down = nn.Parameter(torch.ones(E, H, WIDTH))
            self.gate_up_bias = self.down_bias = None

    experts, (x, expert_ids, routing_weights) = Plain(), draw()
    plan = make_plan(expert_ids, E)
    with pytest.raises(ValueError, match="'relu' has no gate to interleave"):
        copy.deepcopy(experts)(x, routing_weights, plan)
    experts.interleaved = False
    assert experts(x, routing_weights, plan).shape == (T, H)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda x, w, plan: (x[:, 1:], w, plan), ValueError, "H=11"),
        (lambda x, w, plan: (x[None], w, plan), ValueError, r"x must be \(T, H\)"),
        (lambda x, w, plan: (x[1:], w, plan), ValueError, "16"),
        (lambda x, w, plan: (x, w[:, 1:], plan), ValueError, r"routing_weights is \(17, 2\).* \(17, 3\)"),
        (lambda x, w, plan: (x, w.long(), plan), TypeError, "routing_weights must be float"),
        (lambda x, w, plan: (x.tolist(), w, plan), TypeError, "x must be a tensor, not list"),
        (
            lambda x, w, plan: (x.double(), w, plan),
            TypeError,
            "x is torch.float64 but gate_up is torch.float32",
        ),
    ],
)
def test_errors_of_forward(device, change, error, text):
    x, expert_ids, routing_weights = draw(device)
    with pytest.raises(error, match=text):
        build(device)(*change(x, routing_weights, make_plan(expert_ids, E)))
