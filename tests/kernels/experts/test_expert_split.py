"""Experts with gate and up apart, beside `expert_mlp` of both in one."""

import pytest
import torch
from check import assert_as_good_as_torch, with_gradients

from moe_aiter.config import interpret
from moe_aiter.kernels.experts.mlp import expert_mlp
from moe_aiter.kernels.experts.split import split_expert_mlp
from moe_aiter.kernels.rows.sort import sort_by_expert

from ...references import expert_loop_reference

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
T, H, WIDTH, E, K = 30, 24, 40, 5, 2


def make(device, dtype=torch.float32, weights_dtype=None, tokens=T, ids=None):
    """x, gate, up, down, routing weights; and the plan."""
    shapes = (tokens, H), (E, WIDTH, H), (E, WIDTH, H), (E, H, WIDTH)
    x, *weights = [(torch.randn(s) * s[-1] ** -0.5).to(device, dtype) for s in shapes]
    weights = [w.to(weights_dtype or dtype) for w in weights]
    ids = torch.randint(-1, E, (tokens, K), device=device) if ids is None else ids
    return (x, *weights, torch.rand(tokens, K, device=device)), sort_by_expert(ids, E)


def reference(plan):
    def run(x, gate, up, down, s):
        gate_up = torch.cat((gate, up), 1).to(x.dtype)
        return expert_loop_reference(
            x, gate_up, None, down.to(x.dtype), None, s, *plan, "swiglu", False, False
        )[0]

    return with_gradients(run)


def split(plan):
    return with_gradients(lambda *inputs: split_expert_mlp(*inputs, plan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_good_as_torch(device, dtype):
    inputs, plan = make(device, dtype)
    assert_as_good_as_torch(split(plan), reference(plan), *inputs)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_weights_of_another_dtype(device, dtype):
    """Multiplied in that of x, with gradients in their own."""
    inputs, plan = make(device, dtype, torch.float32)
    assert_as_good_as_torch(split(plan), reference(plan), *inputs)


def test_without_gradients_the_same_bits(device):
    (x, gate, up, down, s), plan = make(device)
    with torch.no_grad():
        want = expert_mlp(x, torch.cat((gate, up), 1), down, s, plan)
        assert torch.equal(split_expert_mlp(x, gate, up, down, s, plan), want)


def test_strided_weights(device):
    inputs, plan = make(device)
    strided = [t.mT.contiguous().mT if t.dim() == 3 else t for t in inputs]
    assert strided[1].stride() != inputs[1].stride()
    for a, b in zip(split(plan)(*strided), split(plan)(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, T])
def test_experts_without_tokens_get_exact_zeros(device, tokens):
    ids = torch.zeros(tokens, K, dtype=torch.int64, device=device)
    inputs, plan = make(device, tokens=tokens, ids=ids)
    _, dx, *dweights, _ = split(plan)(*inputs)
    assert dx.shape == inputs[0].shape
    for dw in dweights:
        assert (dw[1:] == 0).all() and (dw[0] != 0).any() == (tokens > 0)


@pytest.mark.parametrize("trained", ["x", "gate", "up", "down", "s"])
def test_one_gradient_alone(device, trained):
    inputs, plan = make(device)
    names = ["x", "gate", "up", "down", "s"]
    want = dict(zip(names, split(plan)(*inputs)[1:], strict=True))[trained]
    leaf = inputs[names.index(trained)].requires_grad_()
    out = split_expert_mlp(*inputs, plan)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    out.backward(dout)
    torch.testing.assert_close(leaf.grad, want)
    assert all(t.grad is None for t in inputs if t is not leaf)


def test_the_joined_copy_is_not_kept(device):
    """Of the tensors that backward keeps, those as large as a weight are the weights themselves."""
    inputs, plan = make(device)
    leaves = [t.requires_grad_() for t in inputs]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        split_expert_mlp(*leaves, plan)
    large = {t.data_ptr() for t in kept if t.dim() == 3}
    assert large == {t.data_ptr() for t in leaves[1:4]}


def test_compiles_in_one_graph(device):
    inputs, plan = make(device)
    compiled = torch.compile(split_expert_mlp, fullgraph=True, backend="aot_eager")
    got = with_gradients(lambda *inputs: compiled(*inputs, plan))(*inputs)
    for a, b in zip(got, split(plan)(*inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_bad_inputs_are_named(device):
    (x, gate, up, down, s), plan = make(device)
    with pytest.raises(ValueError, match=r"gate is \(E, I, H\) = \(5, 40, 24\) but up is \(5, 39, 24\)"):
        split_expert_mlp(x, gate, up[:, 1:], down, s, plan)
    with pytest.raises(ValueError, match="down"):
        split_expert_mlp(x, gate, up, down[..., 1:], s, plan)
    with pytest.raises(TypeError, match="up must be floating"):
        split_expert_mlp(x, gate, up.int(), down, s, plan)
    with pytest.raises(ValueError, match="gate must be"):
        split_expert_mlp(x, gate[0], up, down, s, plan)


@pytest.mark.parametrize("summed", [("gate",), ("up", "down"), ("gate", "up", "down")], ids="+".join)
def test_main_gradients(device, summed):
    """Each weight's gradient is added to its own sum; the others keep autograd's."""
    names, (inputs, plan) = ("gate", "up", "down"), make(device, weights_dtype=torch.float16)
    leaves = [t.clone().requires_grad_() for t in inputs]
    split_expert_mlp(*leaves, plan).sum().backward()
    want = {name: leaf.grad for name, leaf in zip(names, leaves[1:4], strict=True)}
    dx = leaves[0].grad
    leaves = [t.clone().requires_grad_() for t in inputs]
    sums = {f"{name}_main_grad": torch.ones_like(want[name], dtype=torch.float32) for name in summed}
    split_expert_mlp(*leaves, plan, **sums).sum().backward()
    torch.testing.assert_close(leaves[0].grad, dx)
    for name, leaf in zip(names, leaves[1:4], strict=True):
        if name in summed:
            assert leaf.grad is None
            got = sums[f"{name}_main_grad"] - 1
            torch.testing.assert_close(got, want[name].float(), rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(leaf.grad, want[name])
    with pytest.raises(ValueError, match=r"up_main_grad is \(5, 40\) but must be \(5, 40, 24\)"):
        split_expert_mlp(*leaves, plan, up_main_grad=torch.zeros(E, WIDTH, device=device))
