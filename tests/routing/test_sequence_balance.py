"""The balance loss of each sequence, against its formula in plain Python."""

import itertools

import pytest
import torch

from moe_aiter.routing.losses import load_balance_loss, sequence_balance_loss
from moe_aiter.routing.router import route

B, S, E, K = 4, 7, 6, 2


def routed(score="sigmoid", device="cpu", dtype=torch.float64, top_k=K):
    logits = torch.randn(B * S, E, dtype=torch.float64).to(device, dtype).requires_grad_()
    return route(logits, top_k, score=score)


def mask_of(device):
    """The ends of two sequences, and a whole one."""
    mask = torch.ones(B, S, dtype=torch.bool, device=device)
    mask[0, 5:], mask[1, 1:], mask[2] = False, False, False
    return mask.flatten()


def by_hand(scores, expert_ids, mask):
    losses = []
    for b in range(B):
        kept = [t for t in range(b * S, b * S + S) if mask[t]]
        if not kept:
            continue
        choices = [e for t in kept for e in expert_ids[t] if e >= 0]
        loss = 0.0
        for e in range(E):
            f = choices.count(e) / max(len(choices), 1)
            loss += E * f * sum(scores[t][e] / sum(scores[t]) for t in kept) / len(kept)
        losses.append(loss)
    return sum(losses) / max(len(losses), 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_by_hand(device, score, masked):
    routing = routed(score, device)
    ids = routing.expert_ids.clone()
    ids[3, 1] = -1  # a dropped slot
    mask = mask_of(device) if masked else None
    want = by_hand(routing.scores.tolist(), ids.tolist(), mask.tolist() if masked else [True] * B * S)
    loss = sequence_balance_loss(routing.scores, ids, S, mask)
    assert loss.shape == () and loss.item() == pytest.approx(want, rel=1e-6)
    assert torch.autograd.gradcheck(lambda s: sequence_balance_loss(s, ids, S, mask), routing.scores)


def test_one_sequence_is_the_load_balance_loss(device):
    routing = routed("softmax", device)
    whole = load_balance_loss(routing.scores, routing.expert_ids)
    torch.testing.assert_close(sequence_balance_loss(routing.scores, routing.expert_ids, B * S), whole)


def test_opposite_sequences_do_not_balance_each_other(device):
    scores = torch.zeros(8, 2, device=device)
    scores[:4, 0] = scores[4:, 1] = 1.0
    ids = scores.argmax(1, keepdim=True)
    assert load_balance_loss(scores, ids) == 1 and sequence_balance_loss(scores, ids, 4) == 2


def test_what_is_masked_counts_for_nothing(device):
    routing, mask = routed(device=device), mask_of(device)
    scores, ids = routing.scores.detach().clone(), routing.expert_ids.clone()
    want = sequence_balance_loss(scores, ids, S, mask)
    scores[~mask], ids[~mask] = float("nan"), 0
    scores.requires_grad_()
    loss = sequence_balance_loss(scores, ids, S, mask)
    assert torch.equal(loss, want)
    (dscores,) = torch.autograd.grad(loss, scores)
    assert dscores[~mask].count_nonzero() == 0 and dscores.isfinite().all()


def test_no_tokens_give_0(device):
    routing = routed(device=device)
    nothing = torch.zeros(B * S, dtype=torch.bool, device=device)
    assert sequence_balance_loss(routing.scores, routing.expert_ids, S, nothing) == 0
    assert sequence_balance_loss(routing.scores[:0], routing.expert_ids[:0], S) == 0


OFFSETS = [
    0,
    5,
    5,
    12,
    12,
    13,
    25,
]  # sequences of all lengths, also of none; the last tokens are in no sequence


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences(device, dtype, masked):
    """The mean of each sequence's loss by itself, of those that have a token."""
    routing, cu_seqlens = routed(device=device), torch.tensor(OFFSETS, dtype=dtype, device=device)
    scores, ids = routing.scores.detach().clone(), routing.expert_ids
    mask = None
    if masked:
        mask = torch.arange(B * S, device=device) % 3 != 0  # of the sequence of one token, this token
    scores[25:] = float("nan")
    scores.requires_grad_()
    kept = torch.ones(B * S, dtype=torch.bool, device=device) if mask is None else mask
    parts = [torch.arange(*ends, device=device) for ends in itertools.pairwise(OFFSETS)]
    parts = [part[kept[part]] for part in parts if kept[part].any()]
    want = sum(load_balance_loss(scores[part], ids[part]) for part in parts) / len(parts)
    loss = sequence_balance_loss(scores, ids, mask=mask, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, scores)[0] for value in (loss, want)))
    assert len(parts) == 4 - masked


def test_packed_sequences_of_one_length(device):
    routing, mask = routed(device=device), mask_of(device)
    cu_seqlens = torch.arange(0, B * S + 1, S, device=device)
    given = {"mask": mask, "cu_seqlens": torch.stack([cu_seqlens, cu_seqlens], 1)[:, 0]}  # with strides
    packed = sequence_balance_loss(routing.scores, routing.expert_ids, **given)
    assert torch.equal(packed, sequence_balance_loss(routing.scores, routing.expert_ids, S, mask))


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_packed_sequences_without_tokens(device, offsets):
    routing, cu_seqlens = routed(device=device), torch.tensor(offsets, device=device)
    for tokens in (B * S, 0):
        given = routing.scores[:tokens], routing.expert_ids[:tokens]
        loss = sequence_balance_loss(*given, cu_seqlens=cu_seqlens)
        assert loss == 0 and torch.autograd.grad(loss, routing.scores)[0].count_nonzero() == 0


@pytest.mark.parametrize("offsets", [[5, 20, 7], [0, 9, 4], [0, 29], [-1, 4], [1, 4]])
def test_offsets_that_cannot_be(device, request, offsets):
    """Debug mode says so; otherwise nothing waits for the values, and nothing is read out of bounds."""
    routing, cu_seqlens = routed(device=device), torch.tensor(offsets, device=device)
    call = lambda: sequence_balance_loss(routing.scores, routing.expert_ids, cu_seqlens=cu_seqlens)  # noqa: E731
    with pytest.raises(ValueError, match=r"cu_seqlens must begin with 0, .* pass offsets, not lengths"):
        call()
    request.getfixturevalue("no_debug")
    assert call().isfinite()


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda s, i, m: sequence_balance_loss(s, i, 3),
            r"\(T=4, E\), which is no multiple of sequence_length=3",
        ),
        (lambda s, i, m: sequence_balance_loss(s, i, 0), "sequence_length must be at least 1, not 0"),
        (lambda s, i, m: sequence_balance_loss(s, i[1:], 2), r"\(T=4, E\) but expert_ids is \(T=3, k\)"),
        (lambda s, i, m: sequence_balance_loss(s, i, 2, m[1:]), r"\(T=4, E\) but mask is \(T=3,\)"),
        (lambda s, i, m: sequence_balance_loss(s, i), "give either sequence_length or cu_seqlens"),
        (lambda s, i, m: sequence_balance_loss(s, i, 2, cu_seqlens=i[:, 0]), "give either sequence_length"),
        (lambda s, i, m: sequence_balance_loss(s, i, cu_seqlens=i), r"cu_seqlens must be \(B \+ 1\)"),
        (lambda s, i, m: sequence_balance_loss(s, i, cu_seqlens=i[:0, 0]), "but it is empty"),
    ],
)
def test_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call(torch.rand(4, 5), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"cu_seqlens must be int32 or int64, not torch.float32"):
        sequence_balance_loss(torch.rand(4, 5), torch.zeros(4, 2).long(), cu_seqlens=torch.zeros(2))
