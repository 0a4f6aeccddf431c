"""The fused experts against the double loop over tokens and choices: both autograd nodes, every backend."""

import functools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from moe_aiter.config import interpret
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import by_layer, expert_mlp, expert_rows
from moe_aiter.kernels.experts.options import ExpertOptions, ExpertWeights
from moe_aiter.kernels.rows.merge import merge_plans
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use
from moe_aiter.routing.plan import RoutePlan, make_plan, unpermute

from ...check import assert_as_good_as_torch, error, with_gradients
from ...shapes import NAMES, expert_ids, spread, transposed

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
SMALL = dict(T=13, H=20, I=24, E=5, k=2)


def loop(ids, activation, interleaved, x, gate_up, down, weights, gate_up_bias=None, down_bias=None):
    """The meaning: one token, one choice at a time."""
    out = [x.new_zeros(down.shape[1]) for _ in x]
    for t, j in [(t, j) for t in range(len(x)) for j in range(ids.shape[1])]:
        e = ids[t, j]
        if 0 <= e < len(down):
            z = gate_up[e] @ x[t] + (0 if gate_up_bias is None else gate_up_bias[e])
            y = down[e] @ get_activation(activation)(z, interleaved) + (
                0 if down_bias is None else down_bias[e]
            )
            out[t] = out[t] + weights[t, j].to(x.dtype) * y
    return torch.stack(out) if len(x) else x @ down.new_zeros(x.shape[1], down.shape[1])


def fused(
    ids, activation, interleaved, x, gate_up, down, weights, gate_up_bias=None, down_bias=None, **options
):
    plan = sort_by_expert(ids, len(down))
    return expert_mlp(
        x, gate_up, down, weights, plan, activation=activation, interleaved=interleaved,
        gate_up_bias=gate_up_bias, down_bias=down_bias, **options,
    )  # fmt: skip


def layered(
    ids, activation, interleaved, x, gate_up, down, weights, gate_up_bias=None, down_bias=None,
    recompute="none",
):  # fmt: skip
    """The GPU's nodes, on whatever device and backend the inputs are for."""
    plan = sort_by_expert(ids, len(down))
    differentiable = x, gate_up, gate_up_bias, down, down_bias, weights
    return by_layer(ExpertInputs(*differentiable, *plan, activation, interleaved, recompute == "none"))


def by_rows(
    ids, activation, interleaved, x, gate_up, down, weights, gate_up_bias=None, down_bias=None
):  # fmt: skip
    """The rows of `expert_rows`, summed."""
    plan = make_plan(ids, len(down))
    stacked = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    rows = expert_rows(x, stacked, plan, ExpertOptions(activation, interleaved))
    return unpermute(rows, plan, weights)


WAYS = [fused] if interpret else [fused, layered]  # the interpreter runs fused by layer


def make(device, T=13, H=20, I=24, E=5, k=2, activation="swiglu", dtype=torch.float32, bias=True):  # noqa: E741
    """x, gate_up, down, weights and biases of modest size."""
    width = get_activation(activation).projections * I
    sizes = [(T, H), (E, width, H), (E, H, I), (T, k), (E, width), (E, H)][: 6 if bias else 4]
    scales = [1, max(H, 1) ** -0.5, max(I, 1) ** -0.5, 1, 1, 1]
    tensors = [torch.randn(size) * scale for size, scale in zip(sizes, scales, strict=False)]
    tensors[3] = tensors[3].softmax(-1)
    return [t.to(device, dtype) for t in tensors]


def compare(fn, ids, activation, interleaved, inputs, **tolerance):
    """Values and all gradients, by layer or as the device would run it, against the loop."""
    ours = functools.partial(fn, ids, activation, interleaved)
    meaning = functools.partial(loop, ids, activation, interleaved)
    assert_as_good_as_torch(with_gradients(ours), with_gradients(meaning), *inputs, **tolerance)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("fn", WAYS)
@pytest.mark.pairwise
def test_activations(device, fn, activation, interleaved):
    if interleaved and not get_activation(activation).gated:
        pytest.skip("nothing to interleave")
    ids = expert_ids(13, 5, 2).to(device)
    compare(fn, ids, activation, interleaved, make(device, activation=activation))


ROUTINGS = {
    "every expert": lambda T, E, k: expert_ids(T, E, k),
    "int32": lambda T, E, k: expert_ids(T, E, k, torch.int32),
    "empty experts": lambda T, E, k: torch.randint(1, E - 1, (T, k)),
    "one expert takes all": lambda T, E, k: torch.full((T, k), 3),
    "dropped choices": lambda T, E, k: expert_ids(T, E, k).where(torch.rand(T, k) < 0.6, -1),
    "everything dropped": lambda T, E, k: torch.full((T, k), -1),
    "twice the same expert": lambda T, E, k: torch.randint(0, E, (T, 1)).expand(T, k),
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("fn", [*WAYS, by_rows])
def test_routings(device, fn, routing):
    compare(fn, routing(13, 5, 2).to(device), "swiglu", False, make(device))


SHAPES = {
    "no tokens": dict(T=0),
    "one token": dict(T=1),
    "one expert": dict(E=1, k=1),
    "every expert": dict(E=4, k=4),
    "odd sizes": dict(T=7, H=33, I=17, E=3, k=3),
    "one channel": dict(H=1, I=1),
    "many tokens": dict(T=150, H=16, I=40, E=3, k=2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("fn", [*WAYS, by_rows])
def test_shapes(device, fn, shape):
    size = SMALL | shape
    ids = expert_ids(size["T"], size["E"], size["k"]).to(device)
    compare(fn, ids, "swiglu", False, make(device, **size), floor=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("fn", WAYS)
@pytest.mark.pairwise
def test_dtypes(device, fn, dtype, bias):
    ids = expert_ids(40, 5, 2).to(device)
    compare(fn, ids, "swiglu", False, make(device, T=40, dtype=dtype, bias=bias))


@pytest.mark.parametrize("layout", [transposed, spread])
@pytest.mark.parametrize("fn", WAYS)
def test_layouts(device, fn, layout):
    ids = expert_ids(13, 5, 2).to(device)
    compare(fn, transposed(ids), "swiglu", False, [layout(t) for t in make(device)])


def test_gradcheck():
    ids = torch.tensor([[0, 2], [2, 2], [3, -1]])
    inputs = [t.requires_grad_() for t in make("cpu", 3, 4, 3, 4, 2, "geglu", torch.float64)]
    for fn in WAYS:
        with use("torch"):
            assert torch.autograd.gradcheck(functools.partial(fn, ids, "geglu", False), inputs)


def test_two_runs_give_the_same_bits(device):
    ids, inputs = expert_ids(60, 5, 3).to(device), make(device, T=60, k=3)
    for fn in WAYS:
        run = with_gradients(functools.partial(fn, ids, "swiglu", False))
        for a, b in zip(run(*inputs), run(*inputs), strict=True):
            assert torch.equal(a, b)


def test_only_the_tokens_experts_see_a_nan(device):
    ids = torch.tensor([[0, 1], [2, 3], [3, 2]], device=device)
    x, gate_up, down, weights, *_ = make(device, T=3)
    x[0] = float("nan")
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    for fn in WAYS:
        out = fn(ids, "swiglu", False, *leaves)
        dx, dgate_up, ddown, _ = torch.autograd.grad(out.sum(), leaves)
        assert out[0].isnan().all() and not out[1:].isnan().any() and not dx[1:].isnan().any()
        for dw in (dgate_up, ddown):
            assert dw[:2].isnan().any() and not dw[2:].isnan().any()
            assert torch.equal(dw[4], torch.zeros_like(dw[4])), "an expert without rows"


@pytest.mark.parametrize("fn", WAYS)
def test_held_memory_is_x_z_and_the_routing(device, fn):
    ids, inputs = expert_ids(13, 5, 2).to(device), make(device)
    leaves = [t.requires_grad_() for t in inputs]
    storages = {}

    def keep(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fn(ids, "swiglu", False, *leaves)
    for t in leaves:
        storages.pop(t.untyped_storage().data_ptr(), None)
    z, plan = 13 * 2 * 2 * 24 * 4, 13 * 2 * 4 * 2 + 5 * 4
    assert sum(storages.values()) == z + plan


@pytest.mark.parametrize("fn", WAYS)
def test_inference_keeps_nothing(device, fn):
    ids, inputs = expert_ids(13, 5, 2).to(device), make(device)
    with torch.no_grad():
        out = fn(ids, "swiglu", False, *(t.requires_grad_() for t in inputs))
    assert out.grad_fn is None
    assert error(out, loop(ids, "swiglu", False, *inputs)) < 1e-6


@pytest.mark.parametrize("frozen", range(6))
def test_frozen_inputs(device, frozen):
    ids, inputs = expert_ids(13, 5, 2).to(device), make(device)
    for fn in WAYS:
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(inputs)]
        asked = [t for t in leaves if t.requires_grad]
        expected = torch.autograd.grad(loop(ids, "swiglu", False, *leaves).sum(), asked)
        fn(ids, "swiglu", False, *leaves).sum().backward()
        assert leaves[frozen].grad is None
        for got, want in zip([t.grad for t in asked], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_main_grad_accumulates(device, main_dtype):
    if interpret and main_dtype is torch.bfloat16:
        pytest.skip("the interpreter rounds bfloat16 its own way")
    ids, (x, gate_up, down, weights) = expert_ids(13, 5, 2).to(device), make(device, bias=False)
    plan = sort_by_expert(ids, 5)
    leaves = [gate_up.requires_grad_(), down.requires_grad_()]
    expected = torch.autograd.grad(loop(ids, "swiglu", False, x, gate_up, down, weights).sum(), leaves)
    mains = [torch.ones_like(t, dtype=main_dtype) for t in leaves]
    for _ in range(2):
        out = expert_mlp(x, gate_up, down, weights, plan, gate_up_main_grad=mains[0], down_main_grad=mains[1])
        out.sum().backward()
    for leaf, main, grad in zip(leaves, mains, expected, strict=True):
        assert leaf.grad is None
        tolerance = 1e-4 if main_dtype is torch.float32 else 2e-2
        torch.testing.assert_close(main.float(), 1 + 2 * grad.float(), rtol=tolerance, atol=tolerance)


def test_compiles_without_graph_breaks(device):
    def step(ids, *inputs):
        return fused(ids, "swiglu", False, *inputs)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (13, 29):
        ids, inputs = expert_ids(T, 5, 2).to(device), make(device, T=T)
        expected = with_gradients(functools.partial(step, ids))(*inputs)
        for got, want in zip(
            with_gradients(functools.partial(compiled, ids))(*inputs), expected, strict=True
        ):
            torch.testing.assert_close(got, want)


BAD = {
    "width": (
        dict(gate_up=torch.zeros(5, 48, 21)),
        ValueError,
        r"x is \(T, H=20\) but gate_up is \(E, width, H=21\)",
    ),
    "odd": (
        dict(gate_up=torch.zeros(5, 47, 20)),
        ValueError,
        r"width=47, H\) but swiglu and down ask for 48",
    ),
    "down": (
        dict(down=torch.zeros(5, 20, 25)),
        ValueError,
        r"width=48, H\) but swiglu and down ask for 50",
    ),
    "experts": (dict(down=torch.zeros(4, 20, 24)), ValueError, r"E=4"),
    "weights": (dict(routing_weights=torch.zeros(13, 3)), ValueError, r"routing_weights is \(13, 3\)"),
    "integer weights": (
        dict(routing_weights=torch.zeros(13, 2, dtype=torch.long)),
        TypeError,
        "routing_weights must be",
    ),
    "dtype": (
        dict(x=torch.zeros(13, 20, dtype=torch.float16)),
        TypeError,
        "x is torch.float16 but gate_up is torch.float32",
    ),
    "tokens": (dict(x=torch.zeros(12, 20)), ValueError, "12"),
    "activation": (
        dict(activation="swish"),
        ValueError,
        "unknown activation 'swish'; known: geglu, geglu_tanh, gelu",
    ),
    "bias": (dict(down_bias=torch.zeros(5, 24)), ValueError, r"down_bias is \(5, 24\) but must be \(5, 20\)"),
    "main grad": (
        dict(down_main_grad=torch.zeros(1)),
        ValueError,
        r"down_main_grad is \(1,\) but must be \(5, 20, 24\)",
    ),
    "integer main grad": (
        dict(down_main_grad=torch.zeros(5, 20, 24, dtype=torch.long)),
        TypeError,
        "down_main_grad must be floating, not torch.int64",
    ),
    "expanded main grad": (
        dict(down_main_grad=torch.zeros(1, 20, 24).expand(5, -1, -1)),
        ValueError,
        "down_main_grad is expanded",
    ),
    "main grad over itself": (
        dict(down_main_grad=torch.zeros(2500).as_strided((5, 20, 24), (480, 23, 1))),
        ValueError,
        "down_main_grad has strides that overlap",
    ),
    "nothing to interleave": (
        dict(activation="relu", interleaved=True, gate_up=torch.zeros(5, 24, 20)),
        ValueError,
        "interleaved=True, but the activation 'relu' has no gate to interleave",
    ),
    "bias list": (dict(down_bias=[1.0]), TypeError, "down_bias must be a tensor, not list"),
    "x list": (dict(x=[1.0]), TypeError, "x must be a tensor, not list"),
    "weights list": (dict(routing_weights=[1.0]), TypeError, "routing_weights must be a tensor, not list"),
    "no plan": (dict(plan=None), TypeError, "plan must be order, rank and group_sizes, not NoneType"),
    "sizes list": (
        dict(plan=(torch.zeros(26).int(), torch.zeros(13, 2).int(), [26])),
        TypeError,
        "group_sizes must be a tensor, not list",
    ),
    "no choices": (
        dict(plan=(torch.zeros(0).int(), torch.zeros(13, 0).int(), torch.zeros(5).int())),
        ValueError,
        "k must be at least 1, not 0",
    ),
    "plan": (dict(plan=(torch.zeros(26), torch.zeros(13, 2))), ValueError, "but it has 2 items"),
    "rank": (dict(x=torch.zeros(20)), ValueError, r"x must be \(T, H\)"),
}


@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
def test_bad_input_is_named(change, kind, message):
    x, gate_up, down, weights = make("cpu", bias=False)
    plan = sort_by_expert(expert_ids(13, 5, 2), 5)
    good = dict(x=x, gate_up=gate_up, down=down, routing_weights=weights, plan=plan)
    with pytest.raises(kind, match=message):
        expert_mlp(**{**good, **change})


@pytest.mark.no_interpreter
def test_a_counted_row_without_a_choice_is_an_error_not_a_stray_write(no_debug):
    """group_sizes that count the dropped rows: their order is -1."""
    x, gate_up, down, weights = (t.requires_grad_() for t in make("cpu", bias=False))
    plan = (
        torch.full((26,), -1, dtype=torch.int32),
        torch.arange(26).view(13, 2),
        torch.tensor([26, 0, 0, 0, 0]),
    )
    with pytest.raises((ValueError, IndexError)):
        expert_mlp(x, gate_up, down, weights, plan).sum().backward()


@pytest.mark.parametrize("fn", [fused, layered])
def test_a_second_derivative_is_refused(device, fn):
    ids, inputs = expert_ids(13, 5, 2).to(device), make(device)
    leaves = [t.requires_grad_() for t in inputs]
    with pytest.raises(
        RuntimeError, match=r"has no gradient; a second derivative may have asked|differentiation"
    ):
        out = fn(ids, "swiglu", False, *leaves)
        (dx,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
        dx.square().sum().backward()


def turned(x):
    return transposed(x.detach()) if x.dim() > 1 else x.detach()


@pytest.mark.parametrize("fn", [fused, layered])
def test_gradients_of_saved_tensors_with_other_strides(device, fn):
    ids, leaves = expert_ids(13, 5, 2).to(device), [t.requires_grad_() for t in make(device)]

    def step():
        out = fn(ids, "swiglu", False, *leaves)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    with saved_tensors_hooks(turned, lambda t: t):
        got = step()
    torch.testing.assert_close(got, step())


@pytest.mark.parametrize("fn", [fused, layered])
def test_a_backward_pass_under_autocast(device, fn):
    """Its gradients are those of one outside, as autocast does not lower what the ops compute."""
    ids, leaves = expert_ids(13, 5, 2).to(device), [t.requires_grad_() for t in make(device)]
    with torch.autocast(device.type, torch.bfloat16):
        out = fn(ids, "swiglu", False, *leaves)
        loss = out.float().square().sum()
        got = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(loss, leaves))


def in_windows(
    ids, rows, recompute, fp8, x, gate_up, down, weights, gate_up_bias=None, down_bias=None
):  # fmt: skip
    """The sum over plans of so many rows of one plan."""
    plan = make_plan(ids, len(down))
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    options = {"recompute": recompute, "fp8": fp8, **biases}
    joined = plan.rank.view(1, -1), plan.group_sizes[None], ids.shape[1], 0, len(down)
    order, *windows, _ = merge_plans(*joined, rows, False)
    plans = [RoutePlan(*parts) for parts in zip(order.split(rows), *windows, strict=True)]
    assert all(len(p.order) <= rows for p in plans)
    return sum(expert_mlp(x, gate_up, down, weights, p, **options) for p in plans)


@pytest.mark.parametrize("recompute", ["none", "z"])
@pytest.mark.parametrize("rows", [5, 24, 26])
@pytest.mark.parametrize("routing", ["every expert", "dropped choices", "twice the same expert"])
@pytest.mark.pairwise
def test_plans_of_fewer_rows_than_choices(device, routing, rows, recompute):
    ids = ROUTINGS[routing](13, 5, 2).to(device)
    ours = functools.partial(in_windows, ids, rows, recompute, None)
    meaning = functools.partial(loop, ids, "swiglu", False)
    assert_as_good_as_torch(with_gradients(ours), with_gradients(meaning), *make(device), floor=3e-7)


@pytest.mark.parametrize("recipe", ["e4m3", "e5m2"])
def test_plans_of_fewer_rows_in_8_bits(device, recipe):
    """Rows are rounded one by one, and the weights' gradients multiply in the dtype of x."""
    ids = ROUTINGS["dropped choices"](13, 5, 2).to(device)
    whole, parts = (with_gradients(functools.partial(in_windows, ids, n, "none", recipe)) for n in (26, 9))
    inputs = make(device)
    for got, want in zip(parts(*inputs), whole(*inputs), strict=True):
        assert error(got, want) < 1e-6
