"""Slots: where the tokens of all ranks of a group stand, and which rows of them a rank's experts take.

Token t of rank r stands in slot r * T + t, on every rank.  A rank joins the plans of all ranks for its own
experts (`merge_plans`); choices of other ranks' experts are dropped.  So the rows of an expert are in global
token order, and addresses depend on shapes alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..routing.plan import RoutePlan

ROWS = 128  # a window's rows are a multiple of these, as a tile of a product has them


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


def spans_of_window(spans: Tensor, rows: int) -> Tensor:
    """Return the spans, (2, ranks, E), of the first `rows` rows alone."""
    starts, ends = spans[0].clamp(max=rows), (spans[0] + spans[1]).clamp(max=rows)
    return torch.stack([starts, ends - starts])


def windows(choices: int, bound: int) -> tuple[int, int]:
    """Return how many windows hold so many choices, and how many rows each has: at most `bound`, rounded up
    to a multiple of ROWS."""
    rows = max(min(-(-max(bound, 1) // ROWS) * ROWS, choices), 1)
    return max(-(-choices // rows), 1), rows
