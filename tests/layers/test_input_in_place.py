"""A change in place of the layer's input after the forward pass: allowed where backward needs no input."""

import pytest
import torch

from moe_aiter import MoE

H, E, T = 16, 4, 9
KINDS = {"plain": {}, "bias": {"bias": True}, "fp8": {"fp8": "e4m3"}, "fp8 all": {"fp8": "e4m3_all"}}


def run(moe, leaf, change):
    """The gradient of the leaf; `change` is applied to the layer's input after the forward pass."""
    leaf = leaf.clone().requires_grad_()
    x = leaf * 1
    out = moe(x)
    change(x)
    out.square().sum().backward()
    return leaf.grad


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_frozen_weights_need_no_input(device, kind):
    moe, leaf = MoE(H, 8, E, 2, device=device, **kind), torch.randn(T, H, device=device)
    moe.router.weight.requires_grad_(False)
    moe.experts.gate_up.requires_grad_(False)  # down and the biases may train
    expected = run(moe, leaf, lambda x: None)
    assert torch.equal(run(moe, leaf, lambda x: x.mul_(3)), expected)
    moe.requires_grad_(False)
    assert torch.equal(run(moe, leaf, lambda x: x.fill_(float("nan"))), expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_frozen_weights_save_no_input(device, kind):
    moe = MoE(H, 8, E, 2, device=device, **kind).requires_grad_(False)
    x, saved = torch.randn(T, H, device=device, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        moe(x).sum().backward()
    assert saved and x.data_ptr() not in saved


@pytest.mark.parametrize("leaf", [False, True], ids=["with gradient", "without gradient"])
@pytest.mark.parametrize("trained", ["router", "experts", ""])
@pytest.mark.parametrize("options", [{}, {"recompute": "z"}], ids=str)
def test_the_error_names_the_input(device, trained, leaf, options):
    moe = MoE(H, 8, E, 2, device=device, **options)
    moe.requires_grad_(not trained)
    moe.get_submodule(trained).requires_grad_(True)
    x = torch.randn(T, H, device=device)
    x = x if leaf else x.requires_grad_() * 1
    out = moe(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"x of MoE or Experts, \(9, 16\), was changed in place after"):
        out.sum().backward()


def test_another_tensor_is_not_called_x(device):
    moe, x = MoE(H, 8, E, 2, device=device), torch.randn(T, H, device=device)
    out = moe(x)
    with torch.no_grad():
        moe.experts.down.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_output_may_change(device):
    """As with nn.Linear: backward of the layer needs no output."""
    moe, x = MoE(H, 8, E, 2, shared_intermediate=4, device=device), torch.randn(T, H, device=device)
    grads = []
    for change in (lambda out: 2 * out, lambda out: out.mul_(2)):
        moe.zero_grad()
        change(moe(x)).sum().backward()
        grads.append([p.grad for p in moe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
