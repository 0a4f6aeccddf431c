"""Adapters of nothing, of rows of zeros, and after what was refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_aiter import LoRAExperts, LoRALinear, MoE

from .test_lora import CHANNELS, KINDS, E, H, kinds, make_experts, make_linear, routed


@kinds
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_rows(kind, shape):
    layer, x = make_linear(kind, 2), torch.zeros(*shape, H, dtype=torch.float64, requires_grad=True)
    out = layer(x, torch.zeros(shape[:1], dtype=torch.int64))
    assert out.shape == (*shape, 10)
    out.sum().backward()
    assert not x.grad.numel() and not layer.lora.A.grad.any()


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"num_adapters": 2}], ids=str)
@pytest.mark.parametrize("inner, out", [(0, 10), (H, 0), (0, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")  # torch's, of nn.Linear
def test_no_columns(inner, out, options):
    base = nn.Linear(inner, out)
    layer, x = LoRALinear(base, rank=2, **options), torch.zeros(2, 4, inner, requires_grad=True)
    got = layer(x, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(got, base(x))
    got.sum().backward()
    assert not layer.lora.B.grad.any() and x.grad.shape == x.shape


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
    with pytest.raises(IndexError, match="adapter is 2, but the adapters are 0 to 1"):
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
    with pytest.raises(TypeError, match=r"base must be an Experts.* not MoE"):
        LoRAExperts(moe, rank=2)
    assert moe.router.weight.requires_grad
    with pytest.raises(TypeError, match="not LoRAExperts"):
        LoRAExperts(LoRAExperts(moe.experts, rank=2), rank=2)


def dropped(monkeypatch, *masks):
    """What F.dropout makes of tensors of these widths, in training and if asked for."""
    by_width = {mask.shape[1]: mask for mask in masks}

    def dropout(x, p=0.5, training=True):
        return x * by_width[x.shape[1]] if p and training else x

    monkeypatch.setattr(F, "dropout", dropout)
    return by_width


def factor(weight, lora, n):
    """What DoRA multiplies each row by; 1 without."""
    return 1 if lora.magnitude is None else lora.magnitude[n] / (weight + product(lora, n)).norm(dim=1)


def product(lora, n):
    return lora.scaling * lora.B[n] @ lora.A[n]


@kinds
def test_dropout_of_what_an_adapter_is_given(kind, monkeypatch):
    layer, x = make_linear(kind | {"dropout": 0.5}, bias=False), torch.randn(4, H, dtype=torch.float64)
    mask = dropped(monkeypatch, 2.0 * (torch.rand(4, H) < 0.5))[H]
    weight, lora = layer.base.weight, layer.lora
    expected = factor(weight, lora, 0) * (x @ weight.T + (x * mask) @ product(lora, 0).T)
    torch.testing.assert_close(layer.train()(x), expected)
    torch.testing.assert_close(layer.eval()(x), factor(weight, lora, 0) * (x @ (weight + product(lora, 0)).T))


@kinds
def test_dropout_in_experts(kind, monkeypatch):
    """Once for a token before gate_up, once for a row before down."""
    layer, (x, s, plan) = make_experts(kind | {"dropout": 0.5}), routed()
    rows, order = int(plan.group_sizes.sum()), plan.order.tolist()
    masks = (2.0 * (torch.rand(n, width) < 0.5) for n, width in ((len(x), H), (len(order), CHANNELS)))
    masks = dropped(monkeypatch, *masks)
    experts = torch.arange(E).repeat_interleave(plan.group_sizes).tolist()
    expected = torch.zeros_like(x)
    for r, c, e in zip(range(rows), order, experts, strict=False):
        a, t = x[c // 2], c // 2
        for weight, lora, mask in (
            (layer.base.gate_up[e], layer.gate_up_lora, masks[H][t]),
            (layer.base.down[e], layer.down_lora, masks[CHANNELS][r]),
        ):
            y = factor(weight, lora, e) * (weight @ a + product(lora, e) @ (a * mask))
            gate, up = y.chunk(2)
            a = F.silu(gate) * up
        expected[t] += s[t, c % 2] * y
    torch.testing.assert_close(layer.train()(x, s, plan), expected)


def test_chances_are_checked():
    with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1, not 1"):
        make_linear({"dropout": 1})


@pytest.mark.parametrize("make", [LoRALinear, LoRAExperts])
def test_a_sharded_layer_is_refused(make):
    """FSDP2 would leave out its adapters, which each rank would train by its own tokens."""
    base = nn.Linear(H, 10) if make is LoRALinear else MoE(H, CHANNELS, E, 2).experts
    for p in base.parameters():
        p.placements = ("Shard(dim=0)",)  # as a DTensor has
    with pytest.raises(ValueError, match="the weight is sharded: make the adapters first"):
        make(base, rank=2)
