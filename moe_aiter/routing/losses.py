"""Losses that keep all experts in use and logits small, and how evenly experts are loaded.

Each loss is a scalar to add to the training loss.  One normalisation, whatever the score, k or number of
tokens: the load-balance loss is 1 at balance.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import settings
from ..kernels.base.check import (
    check_axes,
    check_device,
    check_float,
    check_index,
    check_shape,
    check_size,
    check_sizes,
    check_tensor,
)
from ..op import define_op, gradients, is_plain, is_transformed
from .plan import make_plan
from .zero_compute import ZeroCompute, over_target


class LoadStatistics(NamedTuple):
    """Statistics of one load, or of a batch of loads, for example one for each layer.

    All tensors are float32, except `idle`, and have no gradient.
    """

    load: Tensor  # (..., E) each expert's share of the choices; sums to 1
    imbalance: Tensor  # (...) the largest load over the mean load, minus 1: 0 at balance, E - 1 at worst
    smallest: Tensor  # (...) the smallest load over the mean load: 1 at balance
    idle: Tensor  # (...) int64, the number of experts without a token
    entropy: Tensor  # (...) of the load, over log E: 1 at balance, 0 when one expert takes all


def load_statistics(group_sizes: Tensor) -> LoadStatistics:
    """Return statistics of `group_sizes` (..., E), the number of tokens of each expert, int or float.

    Without any token, the load and all figures are 0, and every expert is idle.  Does not synchronise.
    Raises ValueError without an axis of experts, TypeError for complex numbers.
    """
    check_tensor("group_sizes", group_sizes)
    if group_sizes.dim() < 1 or not group_sizes.shape[-1]:
        raise ValueError(
            f"group_sizes must be (..., E) with E >= 1, but it has shape {tuple(group_sizes.shape)}"
        )
    if group_sizes.is_complex():
        raise TypeError(f"group_sizes must be whole or floating numbers, not {group_sizes.dtype}")
    num_experts = group_sizes.shape[-1]
    group_sizes = group_sizes.detach().float()
    total = group_sizes.sum(-1, keepdim=True)  # (..., 1)
    load = group_sizes / total.where(total > 0, 1)  # (..., E)
    some = total.squeeze(-1) > 0
    evenness = torch.special.entr(load).sum(-1) / math.log(num_experts) if num_experts > 1 else some.float()
    return LoadStatistics(
        load=load,
        imbalance=(load.amax(-1) * num_experts - 1).clamp_min(0),
        smallest=load.amin(-1) * num_experts,
        idle=(group_sizes == 0).sum(-1),
        entropy=evenness,
    )


def load_balance_loss(
    scores: Tensor, expert_ids: Tensor | None = None, *, group_sizes: Tensor | None = None,
    mask: Tensor | None = None, zero_compute: ZeroCompute | None = None,
) -> Tensor:  # fmt: skip
    """Return E * sum_e f_e * P_e: 1 if experts are loaded evenly, up to E if one expert takes all tokens.

        f_e  the share of expert e in all choices that are not dropped; no gradient
        P_e  the mean over tokens of score[t, e] / sum_e score[t, e]; softmax scores sum to 1 already

    Fedus et al. 2021, arXiv 2101.03961, eq. 4-6, for any k.  (Hugging Face's version is k at balance.)

    `scores` (T, E) are summed in float32.  Pass the choices as `expert_ids` (T, k), or as `group_sizes` (E,)
    if there is a plan already.  With the `group_sizes` of all micro-batches and ranks, this is the
    global-batch loss (Qiu et al. 2025, arXiv 2501.11873): f counts all their tokens, P only those of
    `scores`.  `mask` (T,), bool: tokens where it is False (padding) do not count; a mask needs `expert_ids`.
    `zero_compute` is that of the layer: then E counts experts without weights too, see `ZeroCompute`.
    Returns a float32 scalar, 0 without tokens.
    Raises ValueError for sizes that disagree.
    """
    check_shape("scores", scores, "T", "E")
    check_float(scores=scores)
    num_experts = scores.shape[1]
    if (expert_ids is None) == (group_sizes is None):
        raise ValueError("give either expert_ids or group_sizes")
    if expert_ids is not None:
        check_axes(scores=(scores, "T, E"), expert_ids=(expert_ids, "T, k"))
    if mask is not None:
        check_mask(mask, "scores", scores)
        check_device(scores=scores, expert_ids=expert_ids)
        if expert_ids is None:
            raise ValueError("mask needs expert_ids: group_sizes count masked tokens too")
        expert_ids = expert_ids.masked_fill(~mask[:, None], -1)
        scores = scores.masked_fill(~mask[:, None], 0)
    if group_sizes is None:
        assert expert_ids is not None  # as checked above
        group_sizes = make_plan(expert_ids, num_experts).group_sizes
    return balance_of(scores, group_sizes, mask, zero_compute)


def balance_of(
    scores: Tensor, group_sizes: Tensor, mask: Tensor | None, zero_compute: ZeroCompute | None = None
) -> Tensor:
    """The load-balance loss of a load that is counted: where `mask` is False a row of `scores` is zeros."""
    check_axes(scores=(scores, "T, E"), group_sizes=(group_sizes, "E"))
    check_device(scores=scores, group_sizes=group_sizes)
    load = group_sizes / group_sizes.sum().clamp_min(1)  # (E,)
    load = over_target(load, zero_compute)
    return scores.shape[1] * (load * mean_over_tokens(shares_of(scores), mask)).sum()


def shares_of(scores: Tensor) -> Tensor:
    """Scores over their sum, in float32; a row of zeros, masked or underflown, stays zeros."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores / scores.sum(1, keepdim=True).clamp_min(1e-20)


def sequence_balance_loss(
    scores: Tensor, expert_ids: Tensor, sequence_length: int | None = None, mask: Tensor | None = None,
    zero_compute: ZeroCompute | None = None, *, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean of all sequences' load-balance losses: 1 if each sequence is balanced.

    DeepSeek-V3, arXiv 2412.19437, eq. 17-20: E * sum_e f_e * P_e, with f and P of one sequence.

    `scores` (T, E) and `expert_ids` (T, k) hold T / `sequence_length` sequences, one after the other, or B
    packed ones of any lengths: sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1].  `cu_seqlens`
    (B + 1,), int32 or int64, is that of flash-attention; it must begin with 0 and not decrease, which
    MOE_AITER_DEBUG=1 checks.  An id outside of [0, E) is a dropped choice.  `mask` (T,), bool: tokens where
    it is False do not count, nor do tokens after the last sequence, nor sequences without other tokens.
    `zero_compute` as for `load_balance_loss`.  Returns a float32 scalar, 0 without tokens.
    Raises ValueError for sizes that disagree, and unless exactly one of both says what the sequences are.
    """
    check_axes(scores=(scores, "T, E"), expert_ids=(expert_ids, "T, k"))
    check_float(scores=scores)
    check_index(expert_ids=expert_ids)
    num_tokens, num_experts = scores.shape
    check_device(scores=scores, expert_ids=expert_ids)
    if mask is None:
        mask = torch.ones(num_tokens, dtype=torch.bool, device=scores.device)
    check_mask(mask, "scores", scores)
    if sequence_length is not None and cu_seqlens is None:
        sequence, num_sequences = number_equal(scores, sequence_length)
    elif cu_seqlens is not None and sequence_length is None:
        sequence, num_sequences = number_packed(scores, cu_seqlens)
        mask = mask & (sequence > 0) & (sequence < num_sequences - 1)
    else:
        raise ValueError("give either sequence_length or cu_seqlens")
    used = mask[:, None] & (expert_ids >= 0) & (expert_ids < num_experts)
    # whole numbers: their sum has no order
    choices = torch.zeros(num_sequences * num_experts, dtype=torch.int64, device=scores.device)
    place = sequence[:, None] * num_experts + expert_ids.where(used, 0)
    choices = choices.scatter_add(0, place.flatten(), used.long().flatten()).view(num_sequences, num_experts)
    tokens = choices.new_zeros(num_sequences).scatter_add(0, sequence, mask.long())
    load = over_target(choices / choices.sum(1, keepdim=True).clamp_min(1), zero_compute)
    shares = shares_of(scores.masked_fill(~mask[:, None], 0))  # (T, E)
    of_tokens = (load[sequence] * shares).sum(1) / tokens.clamp_min(1)[sequence]
    return num_experts * of_tokens.sum() / (tokens > 0).sum().clamp_min(1)


def number_equal(scores: Tensor, sequence_length: int) -> tuple[Tensor, int]:
    """Return each token's sequence (T,), int64, and how many numbers there are."""
    check_sizes(sequence_length=sequence_length)
    num_tokens = scores.shape[0]
    if num_tokens % sequence_length:
        raise ValueError(
            f"scores is (T={num_tokens}, E), which is no multiple of sequence_length={sequence_length}"
        )
    token = torch.arange(num_tokens, device=scores.device)
    return token // sequence_length, num_tokens // sequence_length


def number_packed(scores: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, int]:
    """As `number_equal`; the first and the last number are of tokens before and after all sequences."""
    check_sequences(cu_seqlens, scores=scores)
    token = torch.arange(scores.shape[0], dtype=cu_seqlens.dtype, device=scores.device)
    sequence = torch.bucketize(token, cu_seqlens.contiguous(), right=True)
    return sequence, cu_seqlens.shape[0] + 1


def check_sequences(cu_seqlens: Tensor, **tokens: Tensor) -> None:
    """Raise unless these can be offsets of packed sequences; in debug mode, see that they are."""
    check_shape("cu_seqlens", cu_seqlens, "B + 1")
    check_index(cu_seqlens=cu_seqlens)
    check_device(**tokens, cu_seqlens=cu_seqlens)
    if not cu_seqlens.shape[0]:
        raise ValueError("cu_seqlens must be (B + 1,), so it has at least the offset 0, but it is empty")
    if settings.debug and not torch.compiler.is_compiling() and is_plain((cu_seqlens,)):
        offsets, (num_tokens,) = cu_seqlens.tolist(), {len(t) for t in tokens.values()}
        if offsets != sorted(offsets) or offsets[0] != 0 or offsets[-1] > num_tokens:
            raise ValueError(
                f"cu_seqlens must begin with 0, not decrease and end at T={num_tokens} at most, but it is "
                f"{offsets}: pass offsets, not lengths"
            )


def z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of logsumexp_e(logits[t, e])^2, which keeps a router's logits small.

    Zoph et al. 2022, arXiv 2202.08906, eq. 5.  `logits` (T, E) float; `mask` (T,), bool: tokens where it is
    False do not count.  Returns a float32 scalar, 0 without tokens.
    Raises ValueError for sizes that disagree.
    """
    check_shape("logits", logits, "T", "E")
    check_float(logits=logits)
    check_mask(mask, "logits", logits)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], 0)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    square = logits.logsumexp(1).square()  # (T,)
    return mean_over_tokens(square if mask is None else square.masked_fill(~mask, 0), mask)


def attach_loss(x: Tensor, loss: Tensor, loss_scale: Tensor | None = None) -> Tensor:
    """Return `x` itself; the backward pass through the result also runs that of the scalar `loss`.

    Every gradient becomes that of training loss + `loss_scale` * `loss`, without passing `loss` to the
    training loop.  `loss_scale` is a scalar tensor; its value when backward runs counts.  None means 1,
    whatever factor the training loss has.
    Raises ValueError unless `loss` and `loss_scale` have no axes, and NotImplementedError under torch.func,
    where one backward pass cannot start another.
    """
    check_tensor("x", x)
    check_tensor("loss", loss)
    check_float(x=x)
    check_float(loss=loss)
    if not torch.compiler.is_compiling() and is_transformed():
        raise NotImplementedError("no loss can be attached under torch.func: add it to the training loss")
    return attach_loss_op(x, loss, loss_scale)


class AttachInputs(NamedTuple):
    """The inputs of the op `attach_loss`: see the function of this name."""

    x: Tensor  # of any shape
    loss: Tensor  # ()
    loss_scale: Tensor | None  # ()


def new_attached(i: AttachInputs) -> Tensor:
    for name, scalar in (("loss", i.loss), ("loss_scale", i.loss_scale)):
        if scalar is not None and scalar.dim():
            raise ValueError(f"{name} must be a scalar, but it has shape {tuple(scalar.shape)}")
    return torch.empty_like(i.x)


def save_attached(ctx: Any, i: AttachInputs, output: Tensor) -> None:
    ctx.loss_dtype = i.loss.dtype
    ctx.save_for_backward(i.loss_scale)


def backward_attached(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
    (loss_scale,) = ctx.saved_tensors
    if loss_scale is None:
        return gradients(AttachInputs, x=dx, loss=dx.new_ones((), dtype=ctx.loss_dtype))
    dloss = loss_scale.clone()
    if not is_plain((dx, loss_scale)):  # a compiled forward pass would read the scalar, but for a part of dx
        dloss = loss_scale + dx.flatten()[:0].sum(dtype=loss_scale.dtype)
    return gradients(AttachInputs, x=dx, loss=dloss.to(ctx.loss_dtype))


# an op, because torch.export drops the backward pass of an autograd.Function
attach_loss_op = define_op(
    "attach_loss", AttachInputs, new=new_attached, reference=lambda i: i.x, save=save_attached,
    backward=backward_attached,
)  # fmt: skip


def mean_over_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the first axis of `x`, which is 0 where `mask` is False; 0 if no token counts."""
    if mask is None:
        return x.sum(0) / max(x.shape[0], 1)
    return x.sum(0) / mask.sum().clamp_min(1)


def check_mask(mask: Tensor | None, name: str, x: Tensor, width: str = "E") -> None:
    """Raise unless `mask` is None, or (T,) bool for `x` (T, width), which errors call `name`."""
    if mask is None:
        return
    check_shape("mask", mask, "T")
    check_size(f"{name} is (T={{}}, {width})", x.shape[0], "mask is (T={},)", mask.shape[0])
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    check_device(**{name: x}, mask=mask)
