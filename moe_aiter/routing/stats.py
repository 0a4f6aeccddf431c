"""How evenly the experts are loaded.  For logs: everything stays on the device until it is read."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.base.check import check_tensor


class LoadStatistics(NamedTuple):
    """Of one load, or of a batch of loads, one for each layer say.  All float32 but `idle`, no gradient."""

    load: Tensor  # (..., E) each expert's share of the choices; sums to 1
    imbalance: Tensor  # (...) the largest load over the mean load, minus 1: 0 at balance, E - 1 at worst
    smallest: Tensor  # (...) the smallest load over the mean load: 1 at balance
    idle: Tensor  # (...) int64, the number of experts without a token
    entropy: Tensor  # (...) of the load, over log E: 1 at balance, 0 when one expert takes all


def load_statistics(group_sizes: Tensor) -> LoadStatistics:
    """Statistics of `group_sizes` (..., E), the tokens of each expert, int or float.

    Without any token the load and all figures are 0, but every expert is idle.
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
