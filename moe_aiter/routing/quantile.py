"""Quantile balancing: the selection bias that, for the tokens of a step, would have loaded experts evenly.

Moonshot AI 2026, Kimi K3 technical report, 2.3.3 and Appendix D, after Su 2026, https://kexue.fm/archives/11619.
With scores s (T, E), selection bias b, and all tokens of a step,

    cutoff[t] = the (k + 1)-th highest of s[t] + b
    margin[t, e] = cutoff[t] - s[t, e]         a bias above it would choose expert e for token t
    b[e] = the k / E quantile of margin[:, e]  the bias that T * k / E tokens reach
    b -= mean(b)

A histogram (E, bins) counts the margins of a step.  Scores are in [0, 1], so margins are in [min(b) - 1,
max(b) + 1], which the bins divide evenly; within a bin the quantile is interpolated.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.base.check import check_axes, check_device, check_shape, check_sizes
from ..kernels.rows.topk import topk
from ..op import Written, define_inplace_op
from .balance import repeats
from .losses import check_mask


class MarginInputs(NamedTuple):
    """The inputs of the op `count_margins`: see the function of this name."""

    counts: Written  # (E, bins)
    scores: Tensor  # (T, E)
    selection_bias: Tensor  # (E,)
    mask: Tensor | None  # (T,)
    top_k: int


def check_margins(i: MarginInputs) -> None:
    check_axes(
        counts=(i.counts, "E, bins"), scores=(i.scores, "T, E"), selection_bias=(i.selection_bias, "E")
    )
    check_sizes(bins=i.counts.shape[1], top_k=i.top_k)
    if i.top_k >= i.scores.shape[1]:
        raise ValueError(f"top_k is {i.top_k} of E={i.scores.shape[1]} experts: there is nothing to balance")
    check_mask(i.mask, "scores", i.scores)
    check_device(**{name: t for name, t in i._asdict().items() if name != "top_k"})


def margins_reference(i: MarginInputs) -> None:
    if repeats():
        return
    low, width = bins_of(i.selection_bias, i.counts.shape[1])
    cutoff = topk(i.scores + i.selection_bias, i.top_k + 1)[0][:, -1:]
    place = ((cutoff - i.scores - low) / width).long().clamp(0, i.counts.shape[1] - 1)  # (T, E)
    place = place + torch.arange(i.counts.shape[0], device=place.device) * i.counts.shape[1]
    seen = place.new_ones(place.shape[0]) if i.mask is None else i.mask.long()
    # whole numbers: their sum has no order
    i.counts.view(-1).scatter_add_(0, place.flatten(), seen[:, None].expand_as(place).flatten())


margins_op = define_inplace_op(
    "count_margins", MarginInputs, check=check_margins, reference=margins_reference
)


def count_margins(
    counts: Tensor, scores: Tensor, selection_bias: Tensor, top_k: int, mask: Tensor | None = None
) -> None:
    """Add the margins of `scores` (T, E) to the histograms `counts` (E, bins), int64.

    Tokens where `mask` (T,) bool is False do not count.  Nothing is added where a backward pass repeats the
    forward pass.  No gradient, no synchronisation.
    """
    margins_op(counts, scores.detach(), selection_bias, mask, top_k)


def bins_of(selection_bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """The low end of the first bin, and the width of each."""
    low, high = selection_bias.min() - 1, selection_bias.max() + 1
    return low, (high - low) / bins


def quantile_bias(selection_bias: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """The selection bias (E,) after `counts` (E, bins), counted with `selection_bias` (E,); float32.

    Without any count it is the same.  Raises ValueError for sizes that disagree.
    """
    check_shape("counts", counts, "E", "bins")
    check_axes(counts=(counts, "E, bins"), selection_bias=(selection_bias, "E"))
    num_experts, bins = counts.shape
    low, width = bins_of(selection_bias, bins)
    before_and_in = counts.cumsum(1)  # (E, bins)
    target = before_and_in[:, -1:].double() * (top_k / num_experts)  # (E, 1)
    bin_ = (before_and_in < target).sum(1, keepdim=True).clamp_max(bins - 1)  # the first that reaches it
    inside = counts.gather(1, bin_)
    before = before_and_in.gather(1, bin_) - inside
    bias = low + width * (bin_ + (target - before) / inside.clamp_min(1)).squeeze(1).float()
    return torch.where(before_and_in[:, -1].sum() > 0, bias - bias.mean(), selection_bias.float())
