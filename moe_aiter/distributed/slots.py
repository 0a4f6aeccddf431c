"""Slots: where the tokens of all ranks of a group stand, and which rows of them a rank's experts take.

Token t of rank r stands in slot r * T + t, on every rank.  A rank joins the plans of all ranks for its own
experts (`merge_plans`); choices of other ranks' experts are dropped.  So the rows of an expert are in global
token order, and addresses depend on shapes alone.
"""

import torch.nn.functional as F
from torch import Tensor

ROWS = 128  # a window's rows are a multiple of these, as a tile of a product has them


def pad(x: Tensor, tokens: int, value: float = 0) -> Tensor:
    """Return `x` (T, ...) with rows of `value` at its end, `tokens` rows in all."""
    missing = tokens - x.shape[0]
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing), value=value) if missing else x


def window_rows(choices: int, bound: int) -> int:
    """Return how many rows a window of so many choices has: at most `bound`, rounded up to a multiple of
    ROWS."""
    return max(min(-(-max(bound, 1) // ROWS) * ROWS, choices), 1)
