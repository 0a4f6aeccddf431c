"""What a step of Muon computes: the same by kernels and by torch, whatever the layout, and as precisely."""

import pytest
import torch
from check import error

from moe_aiter.config import interpret
from moe_aiter.kernels.dense import muon
from moe_aiter.kernels.dense.muon import DirectionInputs, muon_direction, muon_update, new_direction
from moe_aiter.op import use
from moe_aiter.optim import HALVES, Muon, matrices_of

SHAPES = [(3, 1, 8, 8), (2, 1, 5, 40), (2, 1, 40, 5), (1, 1, 1, 7), (0, 1, 4, 3), (2, 2, 6, 9)]
LAYOUTS = [None, *HALVES]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def directions(u, dtype, grams, steps=5):
    i = DirectionInputs(u, None, 0.0, False, steps, dtype)
    out = new_direction(i)
    muon.orthogonalize(out, i, muon.normalize_reference, grams)
    return out


def by_definition(u, steps=5):
    """In float64."""
    a, b, c = muon.COEFFICIENTS
    x = u.double()
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(steps):
        p = x @ x.mT
        x = a * x + (b * p + c * p @ p) @ x
    return x


HOW = [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)]  # of CPUs, GPUs and Hopper


@pytest.mark.parametrize("dtype, grams", HOW)
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay(shape, dtype, grams):
    """And the values are near 1, whatever the size of the matrix."""
    u = torch.randn(shape) * 1e-5
    x = directions(u, dtype, grams)
    assert x.shape == u.shape and x.dtype == dtype
    if u.numel():
        left, _, right = torch.linalg.svd(u, full_matrices=False)
        inner = left.mT @ x.float() @ right.mT
        values = inner.diagonal(dim1=-2, dim2=-1)
        assert values.min() > 0.3 and values.max() < 1.4
        assert error(inner, values.diag_embed()) < (0.05 if dtype == torch.bfloat16 else 0.01)
    assert directions(torch.zeros(shape), dtype, grams).isfinite().all()


def values_from(first, last, rows, columns):
    """A matrix whose singular values fall from one to the other, by equal factors."""
    left, right = (torch.linalg.qr(torch.randn(n, rows))[0] for n in (rows, columns))
    return (left * torch.logspace(first, last, rows)) @ right.mT


SPECTRA = {
    "random": lambda: torch.randn(96, 256),
    "square": lambda: torch.randn(128, 128),
    "tall": lambda: torch.randn(256, 96),
    "wide spectrum": lambda: values_from(0, -5, 96, 256),
    "low rank": lambda: torch.randn(96, 4) @ torch.randn(4, 256) + 0.1 * torch.randn(96, 256),
    "rows of all sizes": lambda: torch.randn(96, 256) * torch.logspace(0, -4, 96)[:, None],
    "columns of all sizes": lambda: torch.randn(96, 256) * torch.logspace(0, -2, 256),
    "square, columns of all sizes": lambda: torch.randn(128, 128) * torch.logspace(0, -2, 128),
}


@pytest.mark.no_interpreter  # much work, and test_symmetric.py has its kernel
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_grams_are_as_precise(spectrum):
    """Rounds of two iterations have hardly more errors than one at a time, but for the hardest matrices."""
    u = torch.stack([SPECTRA[spectrum]() for _ in range(3)])[:, None]
    exact = by_definition(u)
    grams, one_by_one = (error(directions(u, torch.float16, grams), exact) for grams in (True, False))
    in_bfloat16 = error(directions(u, torch.bfloat16, False), exact)
    if spectrum == "square, columns of all sizes":  # the smallest values, which rounds scale up the most
        assert grams < 3 * one_by_one and grams < in_bfloat16
    else:
        assert grams < 1.5 * one_by_one and grams < in_bfloat16 / 2


@pytest.mark.no_interpreter  # much work, and test_symmetric.py has its kernel
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8])
def test_any_number_of_iterations(steps):
    u = torch.randn(2, 1, 40, 60)
    assert sum(muon.rounds(steps, True)) == steps == len(muon.rounds(steps, False))
    for grams in (True, False):
        assert error(directions(u, torch.float16, grams, steps), by_definition(u, steps)) < 0.02


def parts(layout, dtype, device, shape=(3, 12, 10)):
    """Gradient, momentum and weight, as views of the matrices that such a parameter has."""
    drawn = [torch.randn(shape, device=device).to(dtype) for _ in range(3)]
    drawn[1] = drawn[1].mT.contiguous().mT  # strides are passed, not guessed
    return [matrices_of(t, layout) for t in drawn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_in_float64(backend, device, layout, dtype, nesterov):
    g, m, p = parts(layout, dtype, device)
    expected = m.double().lerp(g.double(), 0.05)
    u = g.double().lerp(expected, 0.95) if nesterov else expected
    before = p.double().clone()
    lr = torch.tensor(0.5, device=device, dtype=torch.promote_types(dtype, torch.float32))
    with use(backend):
        x = muon_direction(g, m, 0.95, nesterov, 5, torch.float16)
        muon_update(p, x, lr, 0.1, 3.0)
    bound = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
    assert error(m, expected) < bound
    assert error(x, by_definition(u)) < max(4 * bound, 1e-2)
    assert error(p, before * (1 - 0.05) - 1.5 * x.double()) < bound


@pytest.mark.parametrize("shape", [(2, 70, 600), (1, 600, 70), (2, 1, 2), (3, 0, 4), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.float16], ids=str)
def test_sizes_and_a_momentum_of_another_dtype(backend, device, shape, own):
    g, m, p = parts(None, torch.float32, device, shape)
    m = m.to(own)
    expected = m.double().lerp(g.double(), 0.05)
    with use(backend):
        x = muon_direction(g, m, 0.95, True, 1, torch.float16)
        muon_update(p, x, torch.zeros((), device=device), 0.1, 3.0)
    assert error(m, expected) < (1e-6 if own == torch.float32 else 2e-3)
    if g.numel():
        assert error(x, by_definition(g.double().lerp(expected, 0.95), 1)) < 5e-3


@pytest.mark.skipif(interpret, reason="torch.compile is not interpreted")
def test_a_learning_rate_that_is_a_tensor_is_one_graph(device):
    """Its value is read on the device: no wait, and no compilation for another value."""
    graphs = []

    def counting(graph, example):
        graphs.append(graph)
        return graph.forward

    w, g = torch.randn(2, 2, 6, 8, device=device)
    m = torch.zeros_like(g)

    @torch.compile(backend=counting, fullgraph=True)
    def step(w, g, m, lr):
        w, g, m = (matrices_of(t, "rows") for t in (w, g, m))
        muon_update(w, muon_direction(g, m, 0.9, True, 5, None), lr, 0.1, 0.2)

    for value in (0.1, 0.2, 0.3):
        before, lr = w.clone(), torch.tensor(value, device=device)
        own = [t.clone() for t in (w, g, m)]
        step(w, g, m, lr)
        optimizer = Muon([{"params": [p := torch.nn.Parameter(own[0])], "halves": "rows"}], lr, momentum=0.9)
        p.grad, optimizer.state[p]["momentum_buffer"] = own[1:]
        optimizer.param_groups[0]["adjust_lr_fn"] = "original"
        optimizer.step()
        assert not torch.equal(w, before) and torch.equal(m, own[2])
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_on_a_gpu(layout, no_debug):
    """As by torch in float64, the same bits each time, without a wait, in a graph, and in little memory."""
    w = torch.randn(4, 512, 640, device="cuda", dtype=torch.bfloat16)
    grad, lr = torch.randn_like(w), torch.tensor(0.02, device="cuda")

    def start():
        p = torch.nn.Parameter(w.clone())
        p.grad = grad
        return p, Muon([{"params": [p], "halves": layout}], lr)

    first, optimizer = start()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again, other = start()
    other.step()
    assert torch.equal(first, again)
    moved = matrices_of(first.detach(), layout).double() - matrices_of(w, layout).double() * (1 - 0.02 * 0.1)
    scale = 0.2 * max(moved.shape[-2:]) ** 0.5
    # what bfloat16 weights of about 1 hold of an update is little
    exact = by_definition(matrices_of(grad, layout))
    lost = 2.0**-9 * matrices_of(w, layout).double().abs().clamp(min=1)
    assert ((moved + 0.02 * scale * exact).abs() < 2 * lost + 0.05 * 0.02 * scale).all()
    graph = torch.cuda.CUDAGraph()
    third, captured = start()
    captured.step()
    third.data.copy_(w)
    captured.state[third]["momentum_buffer"].zero_()
    with torch.cuda.graph(graph):
        captured.step()
    graph.replay()
    assert torch.equal(first, third)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 256, 512), (2, 768, 256), (2, 100, 60)], ids=str)
def test_directions_on_a_gpu(shape):
    u = torch.randn(shape, device="cuda")[:, None]
    exact = by_definition(u)
    with use("auto"):
        x, again = (muon_direction(u, None, 0.0, False, 5, None) for _ in range(2))
    assert torch.equal(x, again) and error(x, exact) < 1e-2
