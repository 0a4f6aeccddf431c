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
    """Return the expert of each choice, (T, k) int32; -1 for a dropped choice."""
    ends = plan.group_sizes.cumsum(0, dtype=plan.rank.dtype)
    ids = torch.searchsorted(ends, plan.rank.contiguous(), right=True, out_int32=True)
    return torch.where(plan.rank < 0, -1, ids)


def local_ids(expert_ids: Tensor, first: int, count: int) -> Tensor:
    """Number the experts [first, first + count) from 0; the others become -1."""
    ids = (expert_ids - first).clamp(min=-1)
    return torch.where(ids < count, ids, -1)


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
    row, expert, rank = (torch.arange(n, device=ends.device) for n in (len(plan.order), len(ends), ranks + 1))
    ascending = plan.order.add(torch.searchsorted(ends, row, right=True), alpha=choices)
    bounds = torch.add(rank[:, None] * (choices // ranks), expert, alpha=choices)
    rows = torch.searchsorted(ascending, bounds).minimum(ends)  # past the last expert are no rows
    spans = rows.new_empty(2, ranks, -(-len(ends) // 4) * 4, dtype=torch.int32)[..., : len(ends)]
    spans[0] = rows[:-1]
    spans[1] = rows.diff(dim=0)
    return spans


def windows(choices: int, bound: int) -> tuple[int, int]:
    """Return how many windows hold so many choices, and how many rows each has: at most `bound`, rounded up
    to a multiple of ROWS."""
    rows = max(min(-(-max(bound, 1) // ROWS) * ROWS, choices), 1)
    return max(-(-choices // rows), 1), rows
