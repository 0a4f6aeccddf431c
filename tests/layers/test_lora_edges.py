"""Adapters of nothing, of rows of zeros, and after what was refused."""

import pytest
import torch
from torch import nn

from moe_aiter import LoRAExperts, LoRALinear, MoE

from .test_lora import KINDS, H, kinds, make_experts, make_linear


@kinds
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_rows(kind, shape):
    layer, x = make_linear(kind, 2), torch.zeros(*shape, H, dtype=torch.float64, requires_grad=True)
    out = layer(x, torch.zeros(shape[:1], dtype=torch.int64))
    assert out.shape == (*shape, 10)
    out.sum().backward()
    assert not x.grad.numel() and not layer.lora.A.grad.any()


@pytest.mark.parametrize("shape", [(), (4, H + 1), (4, 2 * H)])
def test_another_width_is_named(shape):
    with pytest.raises(ValueError, match=rf"the layer needs \(\.\.\., in={H}\)"):
        make_linear({})(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_of_zeros_has_a_direction_of_zeros(dtype):
    base = nn.Linear(H, 10, dtype=dtype)
    base.weight.data[3] = 0
    x = torch.randn(4, H, dtype=dtype)
    out = LoRALinear(base, rank=2, dora=True)(x)
    torch.testing.assert_close(out, base(x))


def test_a_refused_merge_changes_nothing():
    layer, x = make_linear({}, 2), torch.randn(4, H, dtype=torch.float64)
    ids = torch.tensor([0, 1, 0, -1])
    before = layer(x, ids)
    with pytest.raises(IndexError):
        layer.merge(2)
    assert torch.equal(layer(x, ids), before)
    layer.merge(1)


@pytest.mark.parametrize("make, kind", [(make_linear, "dora"), (make_experts, "lora")])
def test_a_refused_state_changes_nothing(make, kind):
    layer = make(KINDS[kind])
    last = list(layer.peft_state_dict())[-1]
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    state = {name: t + 1 for name, t in layer.peft_state_dict().items()}
    for wrong, error in (({last: state[last][:-1]}, ValueError), ({}, KeyError)):
        del state[last]
        with pytest.raises(error, match=last):
            layer.load_peft_state_dict(state | wrong)
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        state |= {last: torch.zeros(1)}


def test_what_has_no_place_for_adapters_is_named():
    moe = MoE(hidden=8, intermediate=4, num_experts=2, top_k=1)
    with pytest.raises(TypeError, match="base must be an Experts.* not MoE"):
        LoRAExperts(moe, rank=2)
    assert moe.router.weight.requires_grad
    with pytest.raises(TypeError, match="not LoRAExperts"):
        LoRAExperts(LoRAExperts(moe.experts, rank=2), rank=2)
