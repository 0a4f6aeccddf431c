"""AITER's topk_softmax, biased_grouped_topk and grouped_topk against plain torch in float64."""

import pytest
import torch

from moe_aiter.compat import aiter
from moe_aiter.compat.aiter.ops import moe_op, topk

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def outputs(num_tokens, top_k, device, ids=torch.int32, more=0, strided=False):
    """Poisoned; with `strided`, every other column of a wider tensor."""
    step = 2 if strided else 1
    weights = torch.full((num_tokens, step * (top_k + more)), float("nan"), device=device)[:, ::step]
    return weights, torch.full((num_tokens, step * top_k), -7, dtype=ids, device=device)[:, ::step]


def grouped(logits, top_k, groups, kept, renorm, *, score="sigmoid", bias=0.0, scale=1.0):
    """The formula, group by group: weights and experts, the best first."""
    p = logits.sigmoid() if score == "sigmoid" else logits.softmax(1)
    q = (p + bias).unflatten(1, (groups, -1))
    best = q.amax(2) if isinstance(bias, float) else q.sort(2, descending=True)[0][..., :2].sum(2)
    outside = best.argsort(dim=1, descending=True, stable=True)[:, kept:]
    q = q.scatter(1, outside[..., None].expand(-1, -1, q.shape[2]), -float("inf")).flatten(1)
    ids = q.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    weights = p.gather(1, ids)
    return scale * (weights / weights.sum(1, keepdim=True) if renorm else weights), ids


def compare(weights, ids, expected):
    torch.testing.assert_close(ids.long(), expected[1])
    torch.testing.assert_close(weights.double(), expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize(
    "num_tokens, num_experts, top_k", [(7, 8, 2), (5, 6, 6), (1, 60, 1), (0, 8, 2), (9, 4, 3)]
)
@pytest.mark.pairwise
def test_topk_softmax(num_tokens, num_experts, top_k, renorm, dtype, ids, device):
    logits = torch.randn(num_experts, num_tokens, device=device).to(dtype).T  # not contiguous
    weights, chosen = outputs(num_tokens, top_k, device, ids, strided=True)
    rows = torch.empty_like(chosen)
    assert aiter.topk_softmax(weights, chosen, rows, logits, renorm) is None
    compare(weights, chosen, grouped(logits.double(), top_k, 1, 1, renorm, score="softmax"))
    t, j = torch.arange(num_tokens, device=device), torch.arange(top_k, device=device)
    assert torch.equal(rows.long(), j * num_tokens + t[:, None])


def test_topk_softmax_of_shared_experts(device):
    logits = torch.randn(5, 10, device=device)
    weights, ids = outputs(5, 3, device, more=2)
    aiter.topk_softmax(weights, ids, torch.empty_like(ids), logits, True, 2, "sigmoid")
    compare(weights[:, :3], ids, grouped(logits[:, :8].double(), 3, 1, 1, True, score="softmax"))
    torch.testing.assert_close(weights[:, 3:], logits[:, 8:].sigmoid())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize(
    "num_tokens, top_k, groups, kept", [(9, 3, 4, 2), (6, 4, 4, 1), (7, 5, 1, 1), (0, 2, 4, 2), (1, 1, 2, 1)]
)
@pytest.mark.pairwise
def test_biased_grouped_topk(num_tokens, top_k, groups, kept, renorm, dtype, device):
    logits = torch.randn(num_tokens, 16, device=device).to(dtype)
    bias = torch.linspace(-1, 1, 16, device=device)[torch.randperm(16)].to(dtype)
    weights, ids = outputs(num_tokens, top_k, device, strided=True)
    assert aiter.biased_grouped_topk(logits, bias, weights, ids, groups, kept, renorm, 2.5) is None
    how = {"bias": bias.double(), "scale": 2.5}
    compare(weights, ids, grouped(logits.double(), top_k, groups, kept, renorm, **how))


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize(
    "num_tokens, top_k, groups, kept", [(9, 3, 4, 2), (6, 4, 4, 1), (7, 16, 1, 1), (0, 2, 4, 2), (1, 1, 2, 1)]
)
@pytest.mark.pairwise
def test_grouped_topk(num_tokens, top_k, groups, kept, renorm, softmax, device):
    logits = torch.randn(num_tokens, 16, device=device)
    weights, ids = outputs(num_tokens, top_k, device)
    assert aiter.grouped_topk(logits, weights, ids, groups, kept, renorm, softmax, 0.5) is None
    score = "softmax" if softmax else "sigmoid"
    compare(weights, ids, grouped(logits.double(), top_k, groups, kept, renorm, score=score, scale=0.5))


def test_groups_change_the_choice():
    """The best expert is in a group that is left out."""
    logits = torch.tensor([[3.0, -9, 2, 2]])
    weights, ids = outputs(1, 2, "cpu")
    aiter.biased_grouped_topk(logits, torch.zeros(4), weights, ids, 2, 1, True)
    assert ids.tolist() == [[2, 3]] and weights.tolist() == [[0.5, 0.5]]
    aiter.grouped_topk(logits, weights, ids, 2, 1, True)
    assert ids.tolist() == [[0, 1]]


def test_outputs_carry_no_graph():
    logits, (weights, ids) = torch.randn(3, 4, requires_grad=True), outputs(3, 2, "cpu")
    aiter.topk_softmax(weights, ids, torch.empty_like(ids), logits, True)
    assert not weights.requires_grad


def test_the_doors():
    assert aiter.topk_softmax is moe_op.topk_softmax
    assert aiter.biased_grouped_topk is topk.biased_grouped_topk and aiter.grouped_topk is topk.grouped_topk


LOGITS, BIAS = torch.zeros(3, 8), torch.zeros(8)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (dict(num_expert_group=3), ValueError, r"which 3 groups cannot share evenly \(num_expert_group\)"),
        (dict(topk_group=5), ValueError, "topk_group is 5 but num_expert_group is 4"),
        (dict(topk_group=0), ValueError, "topk_group must be at least 1"),
        (dict(num_expert_group=8), ValueError, "groups of at least 2 experts"),
        (dict(need_renorm=1), TypeError, "need_renorm must be a bool"),
        (dict(correction_bias=None), TypeError, "correction_bias must be a tensor"),
        (
            dict(correction_bias=BIAS[1:]),
            ValueError,
            r"gating_output is \(T, E=8\) but correction_bias is \(E=7,\)",
        ),
        (dict(topk_weights=torch.zeros(3, 3)), ValueError, r"topk_weights is \(3, 3\) but must be \(3, 2\)"),
        (dict(topk_ids=torch.zeros(3, 2)), TypeError, "topk_ids must be int32 or int64, not torch.float32"),
        (
            dict(topk_ids=torch.zeros(3, 9).int(), topk_weights=torch.zeros(3, 9)),
            ValueError,
            "topk is 9 but gating_output",
        ),
        (dict(routed_scaling_factor=float("nan")), ValueError, "routed_scaling_factor must be finite"),
    ],
)
def test_bad_input_is_named(change, kind, message):
    weights, ids = outputs(3, 2, "cpu")
    good = dict(gating_output=LOGITS, correction_bias=BIAS, topk_weights=weights, topk_ids=ids)
    good |= dict(num_expert_group=4, topk_group=2, need_renorm=True)
    with pytest.raises(kind, match=message):
        aiter.biased_grouped_topk(**{**good, **change})
    assert (ids == -7).all()


def test_shared_experts_need_their_score():
    weights, ids = outputs(3, 2, "cpu", more=1)
    for name in ("", "softmax"):
        with pytest.raises(ValueError, match="shared_expert_scoring_func must be 'sigmoid'"):
            aiter.topk_softmax(weights, ids, ids.clone(), LOGITS, True, 1, name)
    with pytest.raises(ValueError, match="num_shared_experts is 8 but gating_output"):
        aiter.topk_softmax(torch.zeros(3, 10), ids, ids.clone(), LOGITS, True, 8, "sigmoid")
