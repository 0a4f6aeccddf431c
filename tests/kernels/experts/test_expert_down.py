"""dz in the memory of z: when, and that nothing else changes."""

import functools

import pytest
import torch
from check import of_groups, to_double
from shapes import KINDS
from torch.utils.checkpoint import checkpoint

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels import experts
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.experts.down import expert_down_grad_op, expert_down_grad_over_z_op
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import by_layer
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
TRITON = interpret or torch.cuda.is_available()
T, H, WIDTH, E, K = 40, 24, 70, 5, 2  # more channels than one block of the kernels' epilogues


def routing(device):
    """Choices of which some are dropped, sorted."""
    return sort_by_expert(torch.randint(-1, E, (T, K), device=device), E)


def inputs(device, kind=("swiglu", False), dtype=torch.float32):
    """The experts' inputs, and the gradient of their output."""
    width = get_activation(kind[0]).projections * WIDTH
    shapes = (T, H), (E, width, H), (E, width), (E, H, WIDTH), (E, H), (T, K)
    scales = 1, H**-0.5, 1, WIDTH**-0.5, 1, 1
    tensors = [(torch.randn(s) * scale).to(device, dtype) for s, scale in zip(shapes, scales, strict=True)]
    return ExpertInputs(*tensors, *routing(device), *kind, True), torch.randn(T, H).to(device, dtype)


@pytest.fixture
def spent(monkeypatch):
    """How often dz took the memory of z."""
    calls = []
    real = experts.down.down_grad_over_z
    monkeypatch.setattr(experts.down, "down_grad_over_z", lambda *args: calls.append(1) or real(*args))
    return calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("need_a", [True, False], ids=["", "frozen"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.pairwise
@pytest.mark.no_host
def test_the_same_bits_in_the_memory_of_z(backend, device, kind, need_a, dtype):
    i, dout = inputs(device, kind, dtype)
    z = torch.randn(T * K, i.gate_up.shape[1]).to(device, dtype)
    rest = i.down, i.routing_weights, i.order, i.rank, i.group_sizes, *kind, need_a
    apart = of_groups(expert_down_grad_op, i.group_sizes)(dout, z, *rest)
    assert not torch.equal(apart[0], z[: len(apart[0])])
    over_z = of_groups(lambda *given: (z, *expert_down_grad_over_z_op(*given)), i.group_sizes)
    assert all(map(torch.equal, apart, over_z(dout, z, *rest)))


@pytest.mark.parametrize("over_z", [False, True], ids=["", "over z"])
@pytest.mark.parametrize("need_a", [True, False], ids=["", "frozen"])
@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.pairwise
@pytest.mark.skipif(not TRITON, reason="needs Triton's kernels")
def test_tiles_of_one_part_and_of_many(device, kind, block_n, need_a, over_z):
    """z is read some parts ahead, or all of it at once, and the last tile has fewer channels."""
    i, dout = inputs(device, kind)
    z = torch.randn(T * K, i.gate_up.shape[1]).to(device)
    rest = i.down, i.routing_weights, i.order, i.rank, i.group_sizes, *kind, need_a
    with use("torch"):
        want = of_groups(expert_down_grad_op, i.group_sizes)(dout.double(), z.double(), *map(to_double, rest))
    op = (lambda *given: (z, *expert_down_grad_over_z_op(*given))) if over_z else expert_down_grad_op
    with use("triton"), tuning.choose(lambda key: tuning.Config(16, block_n, 16)):
        got = of_groups(op, i.group_sizes)(dout, z, *rest)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def leaves_of(i):
    leaves = [t.detach().requires_grad_() for t in i[:6]]
    return leaves, i._replace(**dict(zip(ExpertInputs._fields, leaves, strict=False)))


def gradients(i, dout, forward=by_layer, **options):
    leaves, i = leaves_of(i)
    return torch.autograd.grad(forward(i), leaves, dout, **options)


def packed(forward, pack, unpack):
    def run(i):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(i)

    return run


def on_cpu(i):
    with torch.autograd.graph.save_on_cpu():
        return by_layer(i)


WAYS = {
    "plain": by_layer,
    "saved on the CPU": on_cpu,
    "packed": packed(by_layer, lambda t: (t.double(), t.dtype), lambda p: p[0].to(p[1])),
    "checkpoint": functools.partial(checkpoint, by_layer, use_reentrant=False),
    "reentrant checkpoint": lambda i: checkpoint(
        lambda *leaves: by_layer(ExpertInputs(*leaves, *i[6:])), *i[:6], use_reentrant=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_whoever_saves_z(device, spent, way):
    i, dout = inputs(device)
    want = gradients(i, dout, retain_graph=True)
    assert not spent
    leaves, i = leaves_of(i)
    WAYS[way](i).backward(dout)
    assert len(spent) == 1
    for leaf, grad in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_a_kept_graph_can_be_used_again(device, spent):
    i, dout = inputs(device)
    leaves, i = leaves_of(i)
    out = by_layer(i)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert not spent
    last = torch.autograd.grad(out, leaves, dout)
    assert len(spent) == 1
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, last, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, dout)


def test_a_compiler_sees_no_memory_change(device, spent):
    i, dout = inputs(device)
    want = gradients(i, dout, retain_graph=True)

    def step(*leaves):
        return by_layer(ExpertInputs(*leaves, *i[6:]))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves, _ = leaves_of(i)
    got = torch.autograd.grad(compiled(*leaves), leaves, dout)
    assert not spent
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_who_saved_z_besides_is_told(device):
    """Ops called one by one, with a z that somebody else keeps for a gradient."""
    i, dout = inputs(device)
    z = torch.randn(T * K, 2 * WIDTH, device=device, requires_grad=True) * 1
    before, squares = z.detach().clone(), z.square().sum()
    a = torch.randn(T * K, WIDTH, device=device)
    rest = i.down, None, i.routing_weights, i.order, i.rank, i.group_sizes, "swiglu", False
    for spend_z in (False, True):
        out = experts.down.expert_down_op(a, z, *rest, spend_z, 0, None)
        torch.autograd.grad(out, z, dout)
        assert torch.equal(z, before) != spend_z
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize("biases", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_biases_of_another_dtype(device, dtype, biases):
    i, dout = inputs(device)
    want = gradients(ExpertInputs(*map(to_double, i)), dout.double())
    tensors = [t.to(biases if n in (2, 4) else dtype) for n, t in enumerate(i[:6])]
    got = gradients(ExpertInputs(*tensors, *i[6:]), dout.to(dtype))
    for given, a, b in zip(tensors, got, want, strict=True):
        assert a.dtype == given.dtype
        torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="of the GPU's allocator")
@pytest.mark.parametrize("kept", [False, True])
def test_a_whole_dz_is_saved(no_debug, kept):
    def randn(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    ids = torch.randint(4, (4096, 2), device="cuda")
    x, gate_up, down = randn(4096, 256), randn(4, 2 * 2048, 256), randn(4, 256, 2048)
    s = torch.rand(4096, 2, device="cuda", requires_grad=True)
    plan = sort_by_expert(ids, 4)
    i = ExpertInputs(x, gate_up, None, down, None, s, *plan, "swiglu", False, True)
    by_layer(i).sum().backward()  # compiles the kernels
    out = by_layer(i)
    z, a = 2 * 2 * 4096 * 2 * 2048, 2 * 4096 * 2 * 2048
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, [x, gate_up, down, s], torch.ones_like(out), retain_graph=kept)
    more = torch.cuda.max_memory_allocated() - before
    assert (more > z + a) if kept else (more < z)
