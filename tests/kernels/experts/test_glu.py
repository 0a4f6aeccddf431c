"""The activations between an expert's products, gated and plain, and their gradients."""

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients
from shapes import KINDS, LIMITED

from moe_aiter.kernels.base.activations import (
    get_activation,
    join_gate_up,
    split_gate_up,
    swiglu_limit,
    swiglu_softcap,
)
from moe_aiter.kernels.experts.glu import glu, glu_backward_op
from moe_aiter.op import use

from ...references import glu_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {  # R, I
    "small": (5, 16),
    "odd": (7, 23),
    "one row": (1, 40),
    "one channel": (9, 1),
    "wider than a block": (3, 600),
}


def make(device, rows, channels, activation, dtype=torch.float32):
    return (3 * torch.randn(rows, get_activation(activation).projections * channels)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.pairwise
def test_values_and_gradients(backend, device, shape, kind, dtype):
    z = make(device, *shape, kind[0], dtype)
    # a floor, because few elements may happen to be rounded well by torch
    assert_as_good_as_torch(with_gradients(glu), with_gradients(glu_reference), z, *kind, floor=3e-7)


def test_gate_comes_first(backend, device):
    gate, up = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(glu(torch.cat([gate, up], 1), "swiglu"), want)
    torch.testing.assert_close(glu(torch.stack([gate, up], 2).flatten(1), "swiglu", interleaved=True), want)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_strides(backend, device, kind):
    z = make(device, 6, 10, kind[0])
    dout = torch.randn(1, 10, device=device).expand(6, 10)
    out, dz = glu(z, *kind), glu_backward_op(dout.contiguous(), z, *kind)
    for strided in (z.t().contiguous().t(), torch.stack([z, z], 2)[:, :, 0]):
        torch.testing.assert_close(glu(strided, *kind), out)
        torch.testing.assert_close(glu_backward_op(dout, strided, *kind), dz)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "relu2"])
def test_large_arguments(backend, device, activation):
    """Values and slopes at both ends, where exp overflows."""
    z = torch.tensor([[-1e30, -1000.0, -90.0, -0.0, 0.0, 90.0, 1000.0]], device=device)
    with use("torch"):
        want = glu(z.double(), activation)
        slopes = glu_backward_op(torch.ones_like(want), z.double(), activation, False)
    torch.testing.assert_close(glu(z, activation), want.float())
    torch.testing.assert_close(glu_backward_op(torch.ones_like(z), z, activation, False), slopes.float())


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "relu2"])
def test_no_end_differs_from_torch(backend, device, activation):
    """Values and slopes at infinity, near it and at NaN, where torch's in float64 are the plain formula's."""
    ends = [float("inf"), -float("inf"), 3e38, -3e38, 1e20, -1e20, float("nan")]
    z = torch.tensor([ends], device=device).requires_grad_()
    x = torch.tensor([ends], dtype=torch.float64, requires_grad=True)
    fn = {"relu2": lambda x: torch.relu(x) ** 2}.get(activation) or getattr(torch.nn.functional, activation)
    out, want = glu(z, activation), fn(x)
    (slope,), (want_slope,) = torch.autograd.grad(out.sum(), z), torch.autograd.grad(want.sum(), x)
    for got, expected in ((out, want), (slope, want_slope)):
        torch.testing.assert_close(got.cpu(), expected.float(), equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "name, numbers",
    [
        ("swiglu_oai", (7, 7, 1.702, 1)),
        (LIMITED, (2.5, 1.5, 0.75, -0.5)),
        ("swiglu_limit(10, 10)", (10, 10, 1, 0)),
    ],
)
def test_limits(backend, device, name, numbers, interleaved):
    """Values and gradients on both sides of every limit, at it, and at the ends."""
    gate_max, up_limit, alpha, offset = numbers
    ends = [float("inf"), -float("inf"), 6e4, -6e4, float("nan"), -1.0, 0.0, 0.5]
    near = [s * n + d for n in (gate_max, up_limit) for s in (-1, 1) for d in (-0.0625, 0, 0.0625)]
    points = torch.tensor([*ends, *near])
    gate, up = (t.requires_grad_() for t in torch.meshgrid(points.double(), points.double(), indexing="ij"))
    g, u = gate.clamp(max=gate_max), up.clamp(-up_limit, up_limit)
    want = g * torch.sigmoid(alpha * g) * (u + offset)
    dgate, dup = torch.autograd.grad(want.sum(), (gate, up))
    z = join_gate_up(gate.detach(), up.detach(), interleaved).float().to(device).requires_grad_()
    out = glu(z, name, interleaved)
    (dz,) = torch.autograd.grad(out.sum(), z)
    torch.testing.assert_close(out.cpu(), want.float(), equal_nan=True)
    for ours, truth in zip(split_gate_up(dz, interleaved), (dgate, dup), strict=True):
        torch.testing.assert_close(ours.cpu()[~want.isnan()], truth.float()[~want.isnan()])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gate_cap, up_cap", [(4.0, 25.0), (1.5, 2.5), (0.125, 6e4), (6e4, 0.125)])
def test_soft_caps(backend, device, gate_cap, up_cap, interleaved):
    """Values and gradients near 0, where tanh bends, where it is a constant, and at the ends."""
    ends = [float("inf"), -float("inf"), 3e38, -3e38, 6e4, float("nan"), 1e-30, -0.0, 1e-3, -90.0, 90.0]
    caps = gate_cap, up_cap, -gate_cap, -up_cap
    near = [n * cap for n in (0.25, 0.54, 0.56, 1, 3, 9, 12) for cap in caps]
    points = torch.tensor(ends + near)
    gate, up = (t.requires_grad_() for t in torch.meshgrid(points.double(), points.double(), indexing="ij"))
    f, h = gate_cap * torch.tanh(gate / gate_cap), up_cap * torch.tanh(up / up_cap)
    want = f * torch.sigmoid(gate) * h
    dgate, dup = torch.autograd.grad(want.sum(), (gate, up))
    z = join_gate_up(gate.detach(), up.detach(), interleaved).float().to(device).requires_grad_()
    out = glu(z, swiglu_softcap(gate_cap, up_cap), interleaved)
    (dz,) = torch.autograd.grad(out.sum(), z)
    known = ~want.isnan()
    assert torch.equal(out.isnan().cpu(), ~known)
    ours = out, *split_gate_up(dz, interleaved)
    for got, truth, most in zip(ours, (want, dgate, dup), (gate_cap * up_cap, up_cap, gate_cap), strict=True):
        torch.testing.assert_close(got.cpu()[known], truth.float()[known], rtol=3e-6, atol=1e-6 * most)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nan_stays_nan(backend, device, kind):
    z = make(device, 3, 5, kind[0])
    z[1] = float("nan")
    assert torch.equal(glu(z, *kind).isnan().all(1).cpu(), torch.tensor([False, True, False]))


def test_no_rows(backend, device):
    z = torch.empty(0, 8, device=device, requires_grad=True)
    out = glu(z, "swiglu")
    assert out.shape == (0, 4)
    out.sum().backward()
    assert z.grad.shape == (0, 8)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.no_interpreter
def test_gradcheck(kind):
    z = make("cpu", 3, 4, kind[0], torch.float64).requires_grad_()
    with use("torch"):
        assert torch.autograd.gradcheck(lambda z: glu(z, *kind), z)


@pytest.mark.no_interpreter
@pytest.mark.filterwarnings("error::UserWarning")
def test_names_that_a_compiled_function_sees_first():
    z, seen = torch.randn(3, 8), []
    compiled = torch.compile(lambda *args: glu(*args), fullgraph=True, backend="aot_eager")
    first = "swiglu_limit(0.25, 0.5)", "swiglu_softcap(.25, .5)"
    for name in (*first, swiglu_limit(0.125, 0.5), swiglu_softcap(0.125, 0.5)):
        seen += compiled(z, name), glu(z, name), compiled(z, name)
    assert all(torch.equal(seen[i], seen[i // 3 * 3]) for i in range(12))
    assert not torch.equal(seen[0], seen[6]) and not torch.equal(seen[3], seen[9])


def test_errors():
    z = torch.randn(3, 8)
    with pytest.raises(ValueError, match="unknown activation 'swish'; known: geglu"):
        glu(z, "swish")
    with pytest.raises(ValueError, match="z has 7 columns but swiglu needs pairs"):
        glu(z[:, :7], "swiglu")
    with pytest.raises(ValueError, match="interleaved is set but silu has no gate"):
        glu(z, "silu", interleaved=True)
    with pytest.raises(TypeError, match="z must be float16"):
        glu(z.int(), "silu")
    with pytest.raises(ValueError, match=r"z must be \(R, width\)"):
        glu(z[0], "silu")
    with pytest.raises(ValueError, match=r"dout is \(R, I=8\) but z with swiglu gives I=4"):
        glu_backward_op(z, z, "swiglu", False)
    with pytest.raises(TypeError, match=r"z is torch.float32 but dout is torch.float16"):
        glu_backward_op(z[:, :4].half(), z, "swiglu", False)
