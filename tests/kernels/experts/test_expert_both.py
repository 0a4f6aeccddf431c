"""Experts that keep no z: every gradient to the bit as with it."""

import functools

import pytest
import torch
from shapes import KINDS
from torch.utils.checkpoint import checkpoint

from moe_aiter.config import interpret
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import by_layer, expert_mlp
from moe_aiter.kernels.experts.up import expert_up_op, expert_z_op
from moe_aiter.kernels.rows.sort import sort_by_expert

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
T, H, WIDTH, E, K = 30, 24, 40, 5, 2
FLOATS = ExpertInputs._fields[:6]


def make(device, kind=("swiglu", False), dtype=torch.float32, bias=True, tokens=T, **others):
    width = get_activation(kind[0]).projections * WIDTH
    shapes = (tokens, H), (E, width, H), (E, width), (E, H, WIDTH), (E, H), (tokens, K)
    tensors = [(torch.randn(s) * s[-1] ** -0.5).to(device, dtype) for s in shapes]
    if not bias:
        tensors[2] = tensors[4] = None
    plan = sort_by_expert(torch.randint(-1, E, (tokens, K), device=device), E)
    return ExpertInputs(*tensors, *plan, *kind, True)._replace(**others)


def layered(i, recompute):
    """The GPU's path, on any device."""
    return by_layer(i._replace(save_z=recompute == "none"))


def whole(i, recompute):
    """Whatever the device runs."""
    floats = dict(zip(FLOATS, i[:6], strict=True))
    return expert_mlp(
        **floats, plan=i[6:9], activation=i.activation, interleaved=i.interleaved, recompute=recompute,
        gate_up_main_grad=i.gate_up_main_grad, down_main_grad=i.down_main_grad,
    )  # fmt: skip


def step(forward, i, recompute, frozen=()):
    """Output and the gradients of what is not frozen, for a fixed gradient of the output."""
    leaves = {
        name: t.detach().requires_grad_() for name, t in zip(FLOATS, i[:6], strict=True)
        if t is not None and name not in frozen
    }  # fmt: skip
    out = forward(i._replace(**leaves), recompute)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)


def assert_same_bits(forward, i, **options):
    for a, b in zip(step(forward, i, "z", **options), step(forward, i, "none", **options), strict=True):
        assert a is b is None or torch.equal(a, b)


# the interpreter runs the whole by layer
both = pytest.mark.parametrize("forward", [whole] if interpret else [layered, whole])


@both
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_activations(device, forward, kind):
    assert_same_bits(forward, make(device, kind))


@both
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.pairwise
def test_dtypes(device, forward, dtype, bias):
    assert_same_bits(forward, make(device, dtype=dtype, bias=bias))


@both
@pytest.mark.parametrize(
    "frozen",
    [*([name] for name in FLOATS), ["x", "gate_up", "gate_up_bias"], ["gate_up", "down"]],
    ids="-".join,
)
def test_frozen_inputs(device, forward, frozen):
    assert_same_bits(forward, make(device), frozen=frozen)


@both
def test_no_tokens(device, forward):
    assert_same_bits(forward, make(device, tokens=0))


@both
def test_main_gradients(device, forward):
    i = make(device, bias=False)
    sums = {}
    for recompute in ("none", "z"):
        mains = [torch.ones_like(t) for t in (i.gate_up, i.down)]
        for _ in range(2):
            given = i._replace(gate_up_main_grad=mains[0], down_main_grad=mains[1])
            _, dx, dgate_up, ddown, _ = step(forward, given, recompute)
            assert dgate_up is None and ddown is None
        sums[recompute] = *mains, dx
    assert all(torch.equal(a, b) for a, b in zip(sums["z"], sums["none"], strict=True))


@both
def test_nothing_is_kept_but_inputs(device, forward):
    i = make(device)
    leaves = dict(zip(FLOATS, (t.detach().requires_grad_() for t in i[:6]), strict=True))
    mine = {t.untyped_storage().data_ptr() for t in (*leaves.values(), *i[6:9])}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        forward(i._replace(**leaves), "z")
    assert kept and all(not t.numel() or t.untyped_storage().data_ptr() in mine for t in kept)


@both
def test_a_kept_graph_can_be_used_again(device, forward):
    i = make(device)
    x = i.x.requires_grad_()
    out = forward(i._replace(x=x), "z")
    first, second = (torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, forward, reentrant):
    def around(i, recompute):
        def run(*floats):
            return forward(ExpertInputs(*floats, *i[6:]), recompute)

        return checkpoint(run, *i[:6], use_reentrant=reentrant) if recompute == "z" else run(*i[:6])

    i = make(device)
    leaves = [t.detach().requires_grad_() for t in i[:6]]
    grads = []
    for recompute in ("none", "z"):
        around(i._replace(**dict(zip(FLOATS, leaves, strict=True))), recompute).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@both
def test_compiled_for_any_number_of_tokens(device, forward):
    for recompute in ("none", "z"):
        torch.compiler.reset()
        run = functools.partial(forward, recompute=recompute)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (T, 9, 77):
                i = make(device, tokens=tokens)
                got = step(lambda i, _: compiled(i), i, recompute)  # noqa: B023
                for a, b in zip(got, step(forward, i, recompute), strict=True):
                    torch.testing.assert_close(a, b)


def test_z_alone(device):
    i = make(device)
    inputs = *i[:3], i.order, i.rank, i.group_sizes, "swiglu", False
    n = int(i.group_sizes.sum())  # other rows are not written
    assert torch.equal(expert_z_op(*inputs)[:n], expert_up_op(*inputs, True, 0, None)[0][:n])


def test_a_value_that_is_none_is_named(device):
    with pytest.raises(ValueError, match="unknown recompute 'all'; known: none, z"):
        whole(make(device), "all")
