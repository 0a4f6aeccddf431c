"""Expert parallelism whose bits do not depend on the number of ranks, on windows or on guests.

Ranks usually send back sums of a token's rows, which are added in another order than in one process.  With
batch invariance, each choice of a token travels as a token of its own: its row comes back alone, without its
weight, and the token's rank adds up all rows as one process does.  So do gradients of tokens.  This sends k
times as many tokens, and the buffers are k times as large.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.experts.mlp import by_expert
from ..kernels.rows.permute import rows_alone, unpermute_op
from ..op import pick
from ..routing.plan import RoutePlan
from .overflow import options_of
from .slots import pad

Dispatch = Callable[[Tensor, Tensor, RoutePlan], Tensor]


def by_choice(dispatch: Dispatch, experts: object, x: Tensor, s: Tensor, plan: RoutePlan) -> Tensor:
    """Return the output (T, H) for x (T, H), s (T, k) and a plan of these tokens, or of the first of them.

    `dispatch` returns the output of shared experts.  Raises NotImplementedError under torch.compile.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "batch invariance is on, but experts shared by ranks have it only outside of torch.compile"
        )
    rank = pad(plan.rank, len(x), -1)
    place = torch.arange(rank.numel(), dtype=rank.dtype, device=rank.device).view_as(rank)
    place, weights = place.masked_fill(rank < 0, -1), s
    if adds_by_expert(experts, x):
        by_row = rank.argsort(1)
        place, weights = place.gather(1, by_row), s.gather(1, by_row)
    choices = RoutePlan(plan.order, rank.view(-1, 1), plan.group_sizes)
    repeated = Repeated.apply(x, place)
    with rows_alone.set(True):
        rows = dispatch(repeated, s.reshape(-1, 1), choices)
    return Summed.apply(rows, weights.detach(), place)


def adds_by_expert(experts: object, x: Tensor) -> bool:
    """Whether one process adds the rows of a token expert by expert, and not choice by choice."""
    options = options_of(experts)
    return options is not None and options.fp8 is None and pick("expert_mlp", (x,)) is by_expert


def sums(rows: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of each token's rows (T * k, H), in the order of `place` (T, k); -1 for no row."""
    choice = torch.arange(len(rows), dtype=place.dtype, device=rows.device)
    to = place.where(place >= 0, len(rows)).flatten().long()
    order = place.new_full((len(rows) + 1,), -1).scatter_(0, to, choice)[:-1]
    out: Tensor = unpermute_op(rows, order, place, weights)
    return out


class Repeated(torch.autograd.Function):
    """x (T, H) -> (T * k, H): each token once for each of its choices."""

    apply: ClassVar[Callable[[Tensor, Tensor], Tensor]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.repeat_interleave(place.shape[1], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return sums(d.contiguous(), place, None), None


class Summed(torch.autograd.Function):
    """The weighted sum of each token's rows.

    Backward gives the gradient of the sum to each row as it is: experts weigh it, and compute the gradients
    of the weights, as they do in one process.
    """

    apply: ClassVar[Callable[[Tensor, Tensor, Tensor], Tensor]]

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
        ctx.top_k = place.shape[1]
        return sums(rows, place, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return dout.repeat_interleave(ctx.top_k, 0), None, None
