"""What the benchmark asks, and what it holds for true."""

import functools
import re

import pytest
import torch

from moe_aiter.bench import layer, measure, problem
from moe_aiter.bench.problem import GROUPS, SHAPES, for_loop, listed, named, new_problem, truth
from moe_aiter.kernels.base.activations import ACTIVATIONS
from moe_aiter.kernels.experts import fp8

from .judge import check

TOYS = ["toy", "toy-oai"]


def toy(device, name="toy", dtype=torch.float32):
    return new_problem(SHAPES[name], dtype, device)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("routed", [False, True])
def test_truth_is_the_gradient_of_the_loop(device, name, routed):
    p = toy(device, name, torch.float64)
    if routed:
        weights = problem.chosen_weights(p.x, p.router, p.expert_ids, torch.float64)
        last, p.routing_weights = p.router, weights
    else:
        last = p.routing_weights = p.routing_weights.detach().double().requires_grad_()
    out = for_loop(p)
    expected = [out, *torch.autograd.grad(out, (p.x, p.gate_up, p.down, last, *p.biases), p.dout)]
    p.routing_weights = p.routing_weights.detach()
    for found, exact in zip(truth(p, p.expert_ids, routed, torch.float64), expected, strict=True):
        torch.testing.assert_close(found, exact)


def test_the_activation_of_gpt_oss():
    z = torch.tensor([[9.0, 1.0, -9.0, 9.0, 2.0, -9.0]])  # gate and up in turn
    gate, up = torch.tensor([7.0, -9.0, 2.0]), torch.tensor([1.0, 7.0, -7.0])
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    torch.testing.assert_close(problem.activation(z, SHAPES["gpt-oss"])[0], expected)


def test_contenders_with_biases(device, capsys):
    if "swiglu_oai" not in ACTIVATIONS:
        pytest.skip("the layer does not know swiglu_oai")
    p = toy(device, "toy-oai")
    field = list(layer.contenders(p))
    assert len(field) >= 3 and "SwiGLU without biases" in capsys.readouterr().out
    assert [f for f in check(field, p) if f["refused"]] == []


@pytest.mark.parametrize("name", TOYS)
def test_grouped_products_of_torch(device, name):
    p = toy(device, name, torch.bfloat16)
    assert not check([layer.torch_grouped_mm(p)], p)[0]["refused"]


def test_some_experts_are_enough(device, monkeypatch):
    p = toy(device)
    monkeypatch.setattr(problem, "CHECKED", 3 * 3 * 32 * 24)
    assert problem.checked_experts(p.shape) == [0, 2, 4]
    good = next(layer.our_experts(p))
    wrong = layer.Contender("wrong for expert 4", good.run, good.leaves)

    def spoiled(gradients):
        gradients[2][4] *= 1.01
        return gradients

    wrong.as_ours = spoiled
    good_row, wrong_row = check([good, wrong], p)
    assert not good_row["refused"] and wrong_row["refused"]


def test_a_large_layer_is_checked_in_parts():
    assert problem.checked_experts(SHAPES["A"]) == list(range(128))
    some = problem.checked_experts(SHAPES["dsv3"])
    assert 32 <= len(some) < 64 and (some[0], some[-1]) == (0, 255)


@pytest.mark.parametrize("skew", [1.0, 0.0, 1.5])
def test_zipf(skew, device):
    """The shares of ten tokens out of a hundred thousand, and the layer's own router agrees."""
    p = toy(device)
    given = {"skew": skew} if skew != 1 else {}  # the exponent of before there was a choice
    T, E = 20000, p.shape.num_experts
    shape = type(p.shape)(T, *p.shape.sizes[1:4], 1)
    chosen = problem.zipf_logits(shape, device, **given).argmax(1)
    shares = chosen.bincount(minlength=E).sort(descending=True).values / T
    chances = torch.arange(1.0, E + 1, device=device) ** -skew
    torch.testing.assert_close(shares.double(), (chances / chances.sum()).double(), atol=0.015, rtol=0)

    p = new_problem(SHAPES["toy"], torch.float32, device, "zipf", **given)
    popular = p.expert_ids.flatten().bincount(minlength=E).argmax()
    p.renew(1)
    assert not skew or p.expert_ids.flatten().bincount(minlength=E).argmax() == popular
    assert [f for f in check([layer.our_layer(p)], p) if f["refused"]] == []


@pytest.mark.parametrize("both_orders", [False, True])
def test_a_later_micro_batch_has_its_weights(both_orders, device, monkeypatch):
    """Backward's order is made again unless it is kept; the results are the same."""
    p, quantised = toy(device), []
    first = layer.our_layer(p, fp8="e4m3")
    later = layer.later_micro_batch(first, p, both_orders)

    def watched(quantize, x, *rest):
        quantised.append(x.dim())
        return quantize(x, *rest)

    weights = "rows_and_amax", "by_amax", "transposed"
    for name in ("quantize_rows", "transpose_rows8", *(f"quantize_{n}" for n in weights)):
        monkeypatch.setattr(fp8, name, functools.partial(watched, getattr(fp8, name)))
    want = first.gradients(first.run(), p)
    assert quantised.count(3) == 4  # both ways of both
    with later.context():
        quantised.clear()
        with torch.no_grad():
            later.run()
        assert all(map(torch.equal, later.gradients(later.run(), p), want))
        assert quantised.count(3) == (0 if both_orders else 2)


def test_steering_reaches_the_logits(device):
    p = toy(device)
    logits = torch.randn(p.shape.num_tokens, p.shape.num_experts, device=device)
    steered = problem.steered(p.x.detach(), p.router.detach(), logits)
    torch.testing.assert_close(steered @ p.router.detach().T, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name, forward, backward", [("A", 8.91, 17.26), ("B", 0.745, 1.418), ("1.4B-256", 0.626, 1.276)]
)
def test_floors(name, forward, backward):
    floor = measure.floors(SHAPES[name], "NVIDIA H200")
    assert floor["forward"] == pytest.approx(forward, rel=1e-3)
    assert floor["step"] == pytest.approx(forward + backward, rel=1e-3)
    assert measure.floors(SHAPES[name], "Abacus") == {}
    row = layer.shares({"forward_ms": 2 * forward, "step_ms": 4 * (forward + backward)}, floor)
    assert row == pytest.approx({"forward_roofline": 50, "step_roofline": 25}, rel=1e-3)


def test_groups():
    assert {name for names in GROUPS.values() for name in names} <= set(SHAPES)
    assert list(named(["A", "top-k", "30B-512", "A"])) == ["A", "30B-1024", "30B-512", "30B-256"]
    assert len({SHAPES[name].forward_flops for name in GROUPS["top-k"]}) == 1
    assert len(set(SHAPES.values())) == len(SHAPES) - 1  # C twice


def test_plain_shapes():
    """Every word that is listed is taken, and other shapes are refused, also in a group."""
    words = re.findall(r"[\w.-]+(?=[,;]|$)", listed(plain=True))
    assert all(shape.plain for shape in named(words, plain=True).values())
    assert {"C", "gpt-oss-plain", "paper"} <= set(words) and not {"gpt-oss", "models"} & set(words)
    assert named(["64,32,24,5,2"], plain=True) and named(["models"])
    with pytest.raises(ValueError, match="shape gpt-oss has biases"):
        named(["C", "models"], plain=True)
