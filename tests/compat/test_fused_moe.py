"""AITER's fused_moe and moe_sorting against loops in float64 and against upstream's format."""

import pytest
import torch
import torch.nn.functional as F

from moe_aiter import make_plan
from moe_aiter.compat.aiter import ActivationType, QuantType, shuffle_weight
from moe_aiter.compat.aiter.fused_moe import fused_moe, moe_sorting

from ..check import error

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def clamped(z, limit, alpha=1.0, offset=0.0):
    gate, up = z.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + offset)


def gated(fn):
    return lambda z: fn(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]


ACTIVATIONS = {  # name: rows of w1 for each of w2's columns, arguments, f(z)
    "silu": (2, {}, gated(F.silu)),
    "silu limit": (2, {"swiglu_limit": 0.5}, lambda z: clamped(z, 0.5)),
    "gelu": (2, {"activation": ActivationType.Gelu}, gated(F.gelu)),
    "swiglu": (2, {"activation": ActivationType.Swiglu}, lambda z: clamped(z, 7.0, 1.702, 1.0)),
    "swiglu limit": (
        2,
        {"activation": ActivationType.Swiglu, "swiglu_limit": 0.5},
        lambda z: clamped(z, 0.5, 1.702, 1.0),
    ),
    "plain silu": (1, {"activation": 0}, F.silu),
    "plain gelu": (1, {"activation": ActivationType.Gelu}, F.gelu),
}


def reference(x, w1, w2, weights, ids, act, bias1=None, bias2=None, first=False):
    """The formula, choice by choice; `first` weighs the first product."""
    out = x.new_zeros(len(x), w2.shape[1])
    for t, chosen in enumerate(ids.tolist()):
        for j, e in enumerate(chosen):
            if e >= 0:
                z = (w1[e] @ x[t]) * (weights[t, j] if first else 1)
                y = w2[e] @ act(z if bias1 is None else z + bias1[e])
                y = y if bias2 is None else y + bias2[e]
                out[t] += y * (1 if first else weights[t, j])
    return out


def inputs(device, dtype=F32, T=7, k=2, E=4, H=32, I=16, rows=2, ids=torch.int32):  # noqa: E741
    x, w1, w2 = torch.randn(T, H), torch.randn(E, rows * I, H) / 4, torch.randn(E, H, I) / 4
    chosen = torch.rand(T, E).argsort(1)[:, :k].to(device, ids)
    return *(t.to(device, dtype) for t in (x, w1, w2)), torch.rand(T, k, device=device), chosen


def check(got, exact, dtype):
    assert got.dtype == dtype and got.shape == exact.shape
    assert error(got, exact) <= {F32: 1e-5, F16: 3e-3, BF16: 2e-2}[dtype]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("T, k", [(7, 2), (1, 1), (0, 2), (5, 4)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.pairwise
def test_against_a_loop_in_float64(activation, T, k, first, dtype, ids, device):
    rows, arguments, act = ACTIVATIONS[activation]
    given = inputs(device, dtype, T, k, rows=rows, ids=ids)
    given[-1][given[-1] == 2] = 3 if k == 1 else 2  # without rows, if each token has one expert
    exact = reference(*(t.double() for t in given[:4]), given[4], act, first=first)
    check(fused_moe(*given, doweight_stage1=first, **arguments), exact, dtype)


def test_biases_strides_and_the_dtype_of_the_result(device):
    x, w1, w2, weights, ids = inputs(device, BF16)
    bias1, bias2 = torch.randn(4, 32, device=device), torch.randn(4, 32, device=device)
    exact = reference(
        *(t.double() for t in (x, w1, w2, weights)), ids, gated(F.silu), bias1.double(), bias2.double()
    )
    x, w1, w2, weights, ids = (t.mT.contiguous().mT for t in (x, w1, w2, weights, ids))
    check(fused_moe(x, w1, w2, weights, ids, bias1=bias1, bias2=bias2), exact, BF16)
    check(fused_moe(x, w1, w2, weights, ids, bias1=bias1, bias2=bias2, dtype=F16).to(BF16), exact, BF16)


def test_experts_of_other_ranks_and_tokens_that_are_not_there(device):
    x, w1, w2, weights, ids = inputs(device, T=9, k=3, E=6)
    mask = torch.tensor([0, 1, 1, 0, 1, 0], device=device, dtype=torch.int32)
    kept = ids.where(mask[ids.long()] > 0, -1)
    kept[5:] = -1
    exact = reference(*(t.double() for t in (x, w1, w2, weights)), kept, gated(F.silu))
    here, count = mask.bool(), torch.tensor([5], device=device, dtype=torch.int32)
    got = fused_moe(x, w1[here], w2[here], weights, ids, mask, num_local_tokens=count)
    check(got, exact, F32)
    assert exact[:5].any() and not got[5:].any()


def test_the_gradient(device):
    given = [*(t.double().requires_grad_() for t in inputs(device)[:4]), inputs(device)[4]]
    fused_moe(*given).square().sum().backward()
    ours = [t.grad for t in given[:4]]
    again = [*(t.detach().requires_grad_() for t in given[:4]), given[4]]
    reference(*again, gated(F.silu)).square().sum().backward()
    for a, b in zip(ours, (t.grad for t in again[:4]), strict=True):
        torch.testing.assert_close(a, b)


def test_hints_change_nothing(device):
    given = inputs(device)
    hints = {"block_size_M": 64, "moe_sorting_dispatch_policy": 2, "splitk": 4}
    assert torch.equal(fused_moe(*given, **hints), fused_moe(*given))


ONE = torch.ones(1)
REFUSED = {
    "quant_type": QuantType.per_Token, **dict.fromkeys(("w1_scale", "w2_scale", "a1_scale", "a2_scale"), ONE),
    "hidden_pad": 8, "intermediate_pad": 8, "beta": 1.0, "linear_beta": 1.0, "gate_mode": "interleave",
    **dict.fromkeys(("shared_w1", "shared_w2", "shared_w1_scale", "shared_w2_scale"), ONE),
    "shared_expert_id": 3, "stage2_scatter": object(), "activation": ActivationType.Situv2,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_its_name(name):
    with pytest.raises(NotImplementedError, match=rf"\b{name} is "):
        fused_moe(*inputs("cpu"), **{name: REFUSED[name]})


def test_other_refusals():
    x, w1, w2, weights, ids = inputs("cpu")
    with pytest.raises(NotImplementedError, match=r"w1 is shuffled: pass unshuffle_weight\(w1\)"):
        fused_moe(x, shuffle_weight(w1), w2, weights, ids)
    with pytest.raises(NotImplementedError, match=r"swiglu_limit is 2.0, but geglu has no limit"):
        fused_moe(x, w1, w2, weights, ids, activation=ActivationType.Gelu, swiglu_limit=2.0)
    with pytest.raises(NotImplementedError, match=r"activation is .*Swiglu.*lacks without a gate"):
        fused_moe(x, w1[:, :16], w2, weights, ids, activation=ActivationType.Swiglu)
    with pytest.raises(ValueError, match="activation must be an ActivationType, not 'silu'"):
        fused_moe(x, w1, w2, weights, ids, activation="silu")
    with pytest.raises(ValueError, match="topk_ids holds 9 but num_experts is 4"):
        fused_moe(x, w1, w2, weights, ids.clone().fill_(9))
    with pytest.raises(ValueError, match="swiglu_limit must be above 0"):
        fused_moe(x, w1, w2, weights, ids, activation=ActivationType.Swiglu, swiglu_limit=-1.0)


# moe_sorting


def sorted_by_loops(ids, weights, num_experts, block, mask=None, count=None):
    """Upstream's format, expert by expert; padding of weights is 0 and of blocks -1."""
    (T, k), length = ids.shape, ids.numel() + num_experts * block - ids.shape[1]
    rows, experts, local = [], [], 0
    for e in range(num_experts):
        if mask is not None and not mask[e]:
            continue
        found = [(t, j) for t in range(T if count is None else count) for j in range(k) if ids[t, j] == e]
        rows += found + [(T, k)] * (-len(found) % block)
        experts += [local] * -(-len(found) // block)
        local += 1
    valid = [len(rows), T if count is None else count]
    rows += [(T, k)] * (length - len(rows))
    experts += [-1] * (-(-length // block) - len(experts))
    weights = [0.0 if t == T else float(weights[t, j]) for t, j in rows]
    return [j << 24 | t for t, j in rows], weights, experts, valid


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [1, 8, 32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T, k, E", [(9, 2, 5), (1, 3, 3), (0, 2, 4), (40, 1, 2), (6, 4, 4)])
@pytest.mark.pairwise
def test_the_format(T, k, E, masked, block, dtype, device):
    ids = torch.rand(T, E).argsort(1)[:, :k].to(dtype)
    weights = torch.rand(T, k).T.contiguous().T
    mask = torch.tensor([1, 0, 1, 1, 0][:E], dtype=torch.int32) if masked else None
    count = torch.tensor([T // 2], dtype=torch.int32) if masked else None
    expected = sorted_by_loops(ids, weights, E, block, mask, T // 2 if masked else None)
    there = [t if t is None else t.to(device) for t in (ids, weights, mask, count)]
    *got, moe_buf = moe_sorting(*there[:2], E, 24, BF16, block, *there[2:], 1)
    assert [t.tolist() for t in got] == [*map(list, expected)]
    assert [t.dtype for t in got] == [torch.int32, F32, torch.int32, torch.int32]
    assert moe_buf.dtype == BF16 and moe_buf.shape == (T, 24) and not moe_buf.any()


def test_upstreams_local_ids(device):
    """The numbers of its test of `return_local_topk_ids`."""
    ids = torch.tensor([[0, 1, 5], [2, 4, 3], [5, 0, 2]], dtype=torch.int32, device=device)
    mask = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.int32, device=device)
    given = ids, torch.ones(3, 3, device=device), 6, 16, BF16, 8
    *_, local = moe_sorting(*given, expert_mask=mask, return_local_topk_ids=True)
    assert local.dtype == torch.int32 and local.tolist() == [[-1, 0, -1], [1, 2, -1], [-1, -1, 1]]
    assert torch.equal(moe_sorting(*given, return_local_topk_ids=True)[-1], ids)


def test_the_rows_are_those_of_the_plan(device):
    """Without padding, in the order of `make_plan`; and without `accumulate` no buffer."""
    ids = torch.rand(50, 6, device=device).argsort(1)[:, :3]
    given = ids, torch.rand(50, 3, device=device), 6, 8, F32
    rows, *_, moe_buf = moe_sorting(*given, accumulate=False)
    assert moe_buf.shape == (0, 0)
    rows = rows[rows != 3 << 24 | 50].long()
    assert torch.equal((rows & 0xFFFFFF) * 3 + (rows >> 24), make_plan(ids, 6).order.long())


def test_nothing_waits_for_values():
    """Tensors on the meta device have no values, so a call that reads one raises an error."""
    ids, mask, count = torch.zeros(9, 2).int(), torch.ones(4).int(), torch.tensor([5])
    ids, weights, mask, count = (t.to("meta") for t in (ids, torch.rand(9, 2), mask, count))
    sizes = [tuple(t.shape) for t in moe_sorting(ids, weights, 4, 8, BF16, 4, mask, count)]
    assert sizes == [(32,), (32,), (8,), (2,), (9, 8)]
    x, w1, w2, weights, ids = (t.to("meta") for t in inputs("cpu", T=9))
    got = fused_moe(x, w1, w2, weights, ids, mask, doweight_stage1=True, num_local_tokens=count)
    assert got.is_meta and got.shape == x.shape


@pytest.mark.parametrize("name", ["flat", "output_aux"])
def test_inputs_of_single_kernels_are_refused(name):
    with pytest.raises(NotImplementedError, match=f"{name} is True"):
        moe_sorting(torch.zeros(2, 1).int(), torch.ones(2, 1), 4, 8, F32, **{name: True})


def test_mistakes_are_named():
    ids, weights = torch.zeros(2, 1).int(), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"expert_mask is \(3,\) but num_experts is 4"):
        moe_sorting(ids, weights, 4, 8, F32, expert_mask=torch.ones(3).int())
    with pytest.raises(ValueError, match=r"topk_ids has 16777216 tokens"):
        moe_sorting(ids[:1].expand(1 << 24, 1), weights[:1].expand(1 << 24, 1), 4, 8, F32)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'moebuf_dtype'"):
        moe_sorting(ids, weights, 4, 8)
