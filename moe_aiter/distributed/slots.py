"""Slots: where the tokens of all ranks of a group stand, and which rows of them a rank's experts take.

Token t of rank r stands in slot r * T + t, on every rank.  A rank's plan sorts the choices of all slots by
its own experts; choices of other ranks' experts are dropped.  So the rows of an expert are in global token
order, and addresses depend on shapes alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..routing.plan import RoutePlan

ROWS = 128  # a window's rows are a multiple of these, as a tile of a product has them


def ids_of(plan: RoutePlan) -> Tensor:
    """Return the expert of each choice, (T, k) int64; -1 for a dropped choice."""
    ids = torch.searchsorted(plan.group_sizes.cumsum(0), plan.rank.long(), right=True)
    return ids.masked_fill(plan.rank < 0, -1)


def local_ids(expert_ids: Tensor, first: int, count: int) -> Tensor:
    """Number the experts [first, first + count) from 0; the others become -1."""
    ids = expert_ids - first
    return ids.masked_fill((ids < 0) | (ids >= count), -1)


def pad(x: Tensor, tokens: int, value: float = 0) -> Tensor:
    """Return `x` (T, ...) with rows of `value` at its end, `tokens` rows in all."""
    missing = tokens - x.shape[0]
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing), value=value) if missing else x


def window(plan: RoutePlan, first: int, rows: int) -> RoutePlan:
    """Return the plan of the rows [first, first + rows) alone: other choices are dropped."""
    rank = plan.rank - first
    rank = rank.masked_fill((rank < 0) | (rank >= rows), -1)
    ends = plan.group_sizes.cumsum(0, dtype=torch.int32).clamp(first, first + rows)
    group_sizes = ends.diff(prepend=ends.new_full((1,), first))
    return RoutePlan(plan.order[first : first + rows], rank, group_sizes)


def source_spans(plan: RoutePlan, ranks: int) -> Tensor:
    """Return where the rows of each rank's tokens begin in each expert, and how many they are: (2, ranks, E)
    int32.  An expert's rows are in the order of slots, so that those of a rank are contiguous.

    A rank's numbers lie at a multiple of 16 bytes.
    """
    choices, ends = plan.rank.numel(), plan.group_sizes.cumsum(0)
    row = torch.arange(len(plan.order), device=ends.device)
    ascending = torch.searchsorted(ends, row, right=True) * choices + plan.order
    first = torch.arange(ranks + 1, device=ends.device) * (choices // ranks)  # choice of each rank
    bounds = first[:, None] + torch.arange(len(ends), device=ends.device) * choices
    rows = torch.searchsorted(ascending, bounds).minimum(ends).int()  # past the last expert are no rows
    return F.pad(torch.stack([rows[:-1], rows.diff(dim=0)]), (0, -len(ends) % 4))[..., : len(ends)]


def windows(choices: int, bound: int) -> tuple[int, int]:
    """Return how many windows hold so many choices, and how many rows each has: at most `bound`, rounded up
    to a multiple of ROWS."""
    rows = max(min(-(-max(bound, 1) // ROWS) * ROWS, choices), 1)
    return max(-(-choices // rows), 1), rows
