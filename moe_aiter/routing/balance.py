"""What is counted between two optimizer steps, and the selection bias that evens the load without a loss.

Wang et al. 2024, arXiv 2408.15664, as DeepSeek-V3 (arXiv 2412.19437, 2.1.2) uses it: experts are chosen by
score + bias and weighed by the score alone, and with c[e] the choices of expert e since the last step,

    v[e] = mean(c) - c[e]                    the violation
    bias[e] += rate * sign(v[e])             rule="sign"
    bias[e] += rate * v[e] / mean(c)         rule="proportional"

with the mean of what is added taken off first where `zero_mean`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.base.check import check_device, check_positive, check_shape, check_size
from ..op import Written, define_inplace_op
from ..private_api import graph_task

RULES = ("sign", "proportional")


class CountInputs(NamedTuple):
    """The inputs of the op `count_choices`: see the function of this name."""

    total: Written  # (E,)
    group_sizes: Tensor  # (E,)


def check_count(i: CountInputs) -> None:
    check_shape("total", i.total, "E")
    check_shape("group_sizes", i.group_sizes, "E")
    check_size("total is (E={},)", i.total.shape[0], "group_sizes is (E={},)", i.group_sizes.shape[0])
    check_device(**i._asdict())


def count_reference(i: CountInputs) -> None:
    # inside a backward pass the forward pass is a repetition, by activation checkpointing
    if graph_task() == -1:
        i.total.add_(i.group_sizes)


count_op = define_inplace_op("count_choices", CountInputs, check=check_count, reference=count_reference)


def count_choices(total: Tensor, group_sizes: Tensor) -> None:
    """Add `group_sizes` (E,) to `total` (E,), but not where a forward pass runs again within a backward pass.

    An op, so that a compiled graph asks each time it runs.
    """
    count_op(total, group_sizes)


def selection_bias_step(
    selection_bias: Tensor, load: Tensor, rate: float, rule: str = "sign", zero_mean: bool = False
) -> Tensor:
    """What to add to `selection_bias` (E,) after the choices `load` (E,); see the head of this file.

    Float32, zeros for a load of zeros.  Raises ValueError for an unknown `rule`.
    """
    check_rule(rate, rule)
    check_shape("selection_bias", selection_bias, "E")
    check_shape("load", load, "E")
    check_size("selection_bias is (E={},)", selection_bias.shape[0], "load is (E={},)", load.shape[0])
    # whole numbers are subtracted: a mean in float32 would not find a perfect balance
    num_experts = load.shape[0]
    total = load.sum()
    violation = (total - load * num_experts).float()  # times E
    step = violation.sign() if rule == "sign" else violation / total.clamp_min(1)
    return rate * (step - step.mean() if zero_mean else step)


def check_rule(rate: float, rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
    check_positive(rate=rate)


def sum_over_ranks(totals: list[Tensor], group) -> list[Tensor]:
    """The sums of `totals`, all (E,) of any lengths, over the ranks of a process group, in one all-reduce.

    Copies of them for the group None, which is this process alone.
    """
    joined = torch.cat(totals)
    if group is not None:
        torch.distributed.all_reduce(joined, group=group)
    return list(joined.split([len(t) for t in totals]))
