"""Weights in two tensors: products of own experts and of guests have the bits of one tensor of both."""

import pytest
import torch
from check import error

from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.base.lent import guest_gradients
from moe_aiter.kernels.experts.mlp import by_layer, mix_experts
from moe_aiter.kernels.experts.options import ExpertOptions, ExpertWeights
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import IMPLS

E, G, T, K = 5, 3, 29, 2
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
CASES = [  # activation, interleaved, biases, recompute, H, I, whether weights lie as (E, in, out)
    ("swiglu", False, False, "none", 64, 32, False),
    ("swiglu", True, True, "z", 33, 17, False),
    ("silu", False, True, "none", 24, 40, True),
    ("swiglu_oai", True, True, "none", 64, 32, True),
    ("gelu", False, False, "z", 128, 256, False),
]


@pytest.fixture(autouse=True)
def layers(backend, monkeypatch):
    """The reference computes experts layer by layer too."""
    if backend == "host":
        pytest.skip("experts that are computed one by one have no guests")
    monkeypatch.setitem(IMPLS["expert_mlp"], "torch", by_layer)


def alike(backend, ours, want):
    """Kernels have the same bits; torch's products depend on where a weight lies."""
    return torch.equal(ours, want) if backend != "torch" else error(ours, want) < LIMITS[ours.dtype]


def parts(t, *, trained=True):
    """Own and guests' part of weights (E + G, ...), apart in memory."""
    if t is None:
        return None, None
    return tuple(part.clone().requires_grad_(trained) for part in t.split([E, G]))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.pairwise
def test_guests(backend, device, dtype, case):
    activation, interleaved, bias, recompute, H, I, transposed = case  # noqa: E741
    width = get_activation(activation).projections * I

    def new(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    gate_up, down = new(E + G, width, H) / H**0.5, new(E + G, H, I) / I**0.5
    if transposed:
        gate_up, down = (w.mT.contiguous().mT for w in (gate_up, down))
    biases = (new(E + G, width), new(E + G, H)) if bias else (None, None)
    x, s, dout = new(T, H), torch.rand(T, K, device=device), new(T, H)
    plan = sort_by_expert(torch.randint(-1, E + G, (T, K), device=device), E + G)
    options = ExpertOptions(activation, interleaved, recompute=recompute)
    whole = [None if t is None else t.clone().requires_grad_() for t in (gate_up, down, *biases)]
    weights = ExpertWeights(*whole)

    def step(weights, leaves):
        inputs = [x.clone().requires_grad_(), s.clone().requires_grad_()]
        out = mix_experts(inputs[0], weights, inputs[1], plan, options)
        with torch.no_grad():
            alone = mix_experts(inputs[0], weights, inputs[1], plan, options)
        leaves = [t for t in leaves if t is not None]
        return out, alone, *torch.autograd.grad(out, [*inputs, *leaves], dout)

    expected = step(weights, whole)
    own, lent = zip(*(parts(t) for t in (gate_up, down, *biases)), strict=True)
    to = [torch.zeros(w.shape, device=device) for w in lent[:2]]
    with guest_gradients.set(tuple(to)):
        got = step(ExpertWeights(*own).with_guests(*lent), [*own, *lent[2:]])
    for ours, want in zip(got[:4], expected[:4], strict=True):
        assert alike(backend, ours, want)
    for n, (ours, guests) in enumerate(zip(got[4:6], to, strict=True)):
        assert alike(backend, ours, expected[4 + n][:E])
        assert error(guests, expected[4 + n][E:]) < LIMITS[dtype]
    for n in range(2 * bias):
        assert alike(backend, torch.cat([got[6 + n], got[8 + n]]), expected[6 + n])


def test_frozen_guests(backend, device):
    """Weights that need no gradient: nothing is added, and none is asked for."""
    x, s = torch.randn(T, 32, device=device, requires_grad=True), torch.rand(T, K, device=device)
    weights = torch.randn(E + G, 32, 32, device=device), torch.randn(E + G, 32, 16, device=device)
    plan = sort_by_expert(torch.randint(0, E + G, (T, K), device=device), E + G)
    own, lent = zip(*(parts(w, trained=False) for w in weights), strict=True)
    out = mix_experts(x, ExpertWeights(*own).with_guests(*lent, None, None), s, plan, ExpertOptions())
    (dx,) = torch.autograd.grad(out.sum(), x)
    want = mix_experts(x, ExpertWeights(*weights), s, plan, ExpertOptions())
    assert alike(backend, out, want) and alike(backend, dx, torch.autograd.grad(want.sum(), x)[0])


def test_guests_that_do_not_fit(backend, device):
    x, s = torch.randn(T, 32, device=device), torch.rand(T, K, device=device)
    plan = sort_by_expert(torch.randint(0, E + G, (T, K), device=device), E + G)
    own = torch.randn(E, 32, 32, device=device), torch.randn(E, 32, 16, device=device)
    for gate_up, down, what in (
        (torch.randn(G, 32, 24), torch.randn(G, 32, 16), r"guests of gate_up is \(3, 32, 24\) but must be"),
        (
            torch.randn(2, 32, 32),
            torch.randn(G, 32, 16),
            "group_sizes has 8 groups but gate_up and guests .* 7",
        ),
        (torch.randn(G, 32, 32), torch.randn(G, 30, 16), r"guests of down is \(3, 30, 16\) but must be"),
    ):
        weights = ExpertWeights(*own).with_guests(gate_up.to(device), down.to(device), None, None)
        with pytest.raises(ValueError, match=what):
            mix_experts(x, weights, s, plan, ExpertOptions())
