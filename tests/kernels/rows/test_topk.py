"""Top-k: what it picks, in which order, and that nothing can make it pick an expert twice."""

import math

import pytest
import torch

from moe_aiter.kernels.rows.topk import topk

from ...references import topk_reference

SHAPES = {  # T, E, k
    "mixtral": (37, 8, 2),
    "qwen3": (19, 128, 8),
    "odd E": (23, 13, 5),
    "top 1": (9, 60, 1),
    "all experts": (17, 7, 7),
    "one expert": (5, 1, 1),
    "one token": (1, 16, 4),
    "many experts": (3, 4096, 64),
    "more experts than a block of rows": (2, 5000, 3),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hard_scores(num_tokens, num_experts, dtype=torch.float32, device="cpu"):
    """Scores full of ties, both zeros, infinities and NaN."""
    gen = torch.Generator().manual_seed(0)
    scores = torch.randn(num_tokens, num_experts, generator=gen)
    scores = torch.where(scores.abs() < 0.4, 0.0, scores.mul(4).round() / 4)
    scores[1::2, num_experts // 2] = -0.0
    scores[::3, num_experts // 3] = float("nan")
    scores[2::5, -1] = float("inf")
    scores[3::5] = float("-inf")
    scores[4::7] = float("nan")
    return scores.to(device, dtype)


def expected_ids(scores, k):
    """By the definition, in Python: NaN first, then the higher score, then the lower expert."""
    picks = []
    for row in scores.double().tolist():
        keys = [(0, 0.0, e) if math.isnan(s) else (1, -s, e) for e, s in enumerate(row)]
        picks.append([e for _, _, e in sorted(keys)[:k]])
    return torch.tensor(picks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.pairwise
def test_picks_by_score_then_by_expert(backend, device, shape, dtype):
    num_tokens, num_experts, k = shape
    scores = hard_scores(num_tokens, num_experts, dtype, device)
    values, ids = topk(scores, k)
    assert values.dtype == dtype and ids.dtype == torch.int64
    assert torch.equal(ids.cpu(), expected_ids(scores, k))
    torch.testing.assert_close(values, scores.gather(1, ids), rtol=0, atol=0, equal_nan=True)


def test_same_as_torch_where_nothing_ties(backend, device):
    scores = torch.rand(64, 50, generator=torch.Generator().manual_seed(1)).to(device)
    values, ids = topk(scores, 6)
    expected = scores.topk(6)
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


def test_extremes_keep_their_order(backend, device):
    info = torch.finfo(torch.float32)
    ladder = [info.max, 1.0, info.tiny, 1e-45, 0.0, -1e-45, -info.tiny, -1.0, info.min]
    ladder = torch.tensor(ladder, device=device)
    shuffle = torch.tensor([4, 0, 7, 2, 8, 5, 1, 6, 3], device=device)
    values, ids = topk(ladder[shuffle][None], 9)
    assert torch.equal(values[0], ladder)
    assert torch.equal(shuffle[ids[0]], torch.arange(9, device=device))


@pytest.mark.parametrize("name", ["transposed", "sliced", "stride 0"])
def test_strides(backend, device, name):
    base = hard_scores(24, 48, device=device).nan_to_num()
    scores = {"transposed": base.T, "sliced": base[::2, 1::3], "stride 0": base[:1].expand(9, 48)}[name]
    values, ids = topk(scores, 4)
    dense = topk(scores.contiguous(), 4)
    assert torch.equal(ids, dense[1]) and torch.equal(values, dense[0])


def test_no_tokens(backend, device):
    values, ids = topk(torch.empty(0, 8, device=device), 2)
    assert values.shape == ids.shape == (0, 2)


def test_gradient_lands_on_the_chosen(device):
    scores = hard_scores(11, 6, torch.float64, device).nan_to_num().requires_grad_()
    values, ids = topk(scores, 3)
    assert not ids.requires_grad
    dvalues = torch.randn(11, 3, dtype=torch.float64, device=device)
    (dscores,) = torch.autograd.grad(values, scores, dvalues)
    expected = torch.zeros(11, 6, dtype=torch.float64, device=device)
    for t in range(11):
        for j in range(3):
            expected[t, ids[t, j]] += dvalues[t, j]
    assert torch.equal(dscores, expected)


def test_gradient_of_a_sum_has_stride_0(device):
    scores = torch.rand(5, 6, device=device, requires_grad=True)
    (dscores,) = torch.autograd.grad(topk(scores, 2)[0].sum(), scores)
    assert torch.equal(dscores.sum(1), torch.full((5,), 2.0, device=device))


def test_one_graph_for_any_number_of_tokens(device):
    torch.compiler.reset()
    compiled = torch.compile(lambda s: topk(s, 2), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (3, 8, 21):
            scores = torch.rand(num_tokens, 6, device=device, requires_grad=True)
            (values, ids), (want_values, want) = compiled(scores), topk(scores, 2)
            assert torch.equal(ids, want)
            got, expected = (torch.autograd.grad(v.square().sum(), scores)[0] for v in (values, want_values))
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "scores, k, error, text",
    [
        (torch.rand(4, 8), 9, ValueError, r"k is 9 but scores is \(T, E=8\)"),
        (torch.rand(4, 8), 0, ValueError, r"k is 0 but scores is \(T, E=8\)"),
        (torch.rand(8), 2, ValueError, r"scores must be \(T, E\), but it has shape \(8,\)"),
        (torch.ones(4, 8, dtype=torch.int64), 2, TypeError, "scores must be float16.* not torch.int64"),
    ],
)
@pytest.mark.no_interpreter
def test_errors(scores, k, error, text):
    with pytest.raises(error, match=text):
        topk(scores, k)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens, num_experts, k", [(70_000, 128, 8), (4096, 4096, 64), (3, 16384, 8)])
def test_large(num_tokens, num_experts, k):
    scores = torch.randn(num_tokens, num_experts, device="cuda").mul(8).round()
    values, ids = topk(scores, k)
    expected_values, expected = topk_reference(scores, k)
    assert torch.equal(ids, expected) and torch.equal(values, expected_values)


@pytest.mark.gpu
def test_rows_past_two_billion_elements(most_of_the_gpu):
    scores = torch.randn(2**31 // 128 + 5, 128, device="cuda", dtype=torch.bfloat16)
    values, ids = topk(scores, 2)
    assert torch.equal(ids[-7:], topk_reference(scores[-7:], 2)[1])
    assert torch.equal(values[-7:], topk_reference(scores[-7:], 2)[0])
