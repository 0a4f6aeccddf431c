"""The counts of a layer on its device: choices, which move the selection bias, and a monitor's counts.

Wang et al. 2024, arXiv 2408.15664, as DeepSeek-V3 (arXiv 2412.19437, 2.1.2) uses it: experts are chosen by
score + bias and weighed by the score alone, and with c[e] the choices of expert e since the last step,

    v[e] = mean(c) - c[e]                    the violation
    bias[e] += rate * sign(v[e])             rule="sign"
    bias[e] += rate * v[e] / mean(c)         rule="proportional"

with the mean of what is added taken off first where `zero_mean`.  Where there are experts without weights,
`ZeroCompute` says what takes the place of mean(c), and their bias gets nothing.

A monitor keeps `totals` (2E + 5,) float64 of a layer, in which whole numbers are exact up to 2^53:

    choices (E,)   of each expert, before any is dropped
    dropped (E,)   of these, over the capacity
    tokens         without padding
    seen           tokens whose logits were there to be summed
    norm           sum over these of the Euclidean norm of a token's logits
    logsumexp      sum over these of log sum_e exp(z_e)
    largest        of all |z|, a maximum instead of a sum

Both are ops, so that a compiled graph asks each time it runs whether to count.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.base.check import check_axes, check_device, check_positive, check_shape, check_size
from ..op import Written, define_inplace_op
from ..private_api import graph_task
from .zero_compute import ZeroCompute, real_experts

RATES = {"sign": 1e-3, "proportional": 1e-3, "quantile": 1.0}  # by rule, the default
SCALARS = 5


def repeats() -> bool:
    """Whether a backward pass runs this forward pass again, as activation checkpointing does."""
    return graph_task() != -1


class CountInputs(NamedTuple):
    """The inputs of the op `count_choices`: see the function of this name."""

    total: Written  # (E,)
    group_sizes: Tensor  # (E,)


def check_total(i: CountInputs) -> None:
    check_axes(total=(i.total, "E"), group_sizes=(i.group_sizes, "E"))
    check_device(**i._asdict())


def count_reference(i: CountInputs) -> None:
    if not repeats():
        i.total.add_(i.group_sizes)


count_op = define_inplace_op("count_choices", CountInputs, check=check_total, reference=count_reference)


def count_choices(total: Tensor, group_sizes: Tensor) -> None:
    """Add `group_sizes` (E,) to `total` (E,), except where a backward pass repeats the forward pass."""
    count_op(total, group_sizes)


class RecordInputs(NamedTuple):
    """The inputs of the op `record_routing`: see the function of this name."""

    totals: Written  # (2E + 5,) float64
    expert_ids: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)
    kept: Tensor  # (E,)
    logits: Tensor | None  # (T, E)
    mask: Tensor | None  # (T,) bool


def check_record(i: RecordInputs) -> None:
    check_shape("totals", i.totals, "2E + 5")
    check_shape("expert_ids", i.expert_ids, "T", "k")
    for name, sizes in (("group_sizes", i.group_sizes), ("kept", i.kept)):
        check_shape(name, sizes, "E")
        num_experts = (i.totals.shape[0] - SCALARS) // 2
        check_size(f"{name} is (E={{}},)", sizes.shape[0], "the monitor counts E={} experts", num_experts)
    for name, t, axes in (("logits", i.logits, ("T", "E")), ("mask", i.mask, ("T",))):
        if t is not None:
            check_shape(name, t, *axes)
            what = f"{name} is ({', '.join(('T={}', *axes[1:]))})"
            check_size(what, t.shape[0], "expert_ids is (T={}, k)", i.expert_ids.shape[0])
    check_device(**i._asdict())


def record_reference(i: RecordInputs) -> None:
    if repeats():
        return
    choices, dropped, scalars = i.totals.split([len(i.group_sizes), len(i.group_sizes), SCALARS])
    choices += i.group_sizes
    dropped += i.group_sizes - i.kept
    tokens = i.expert_ids.shape[0] if i.mask is None else i.mask.sum()
    scalars[0] += tokens
    if i.logits is None or not i.logits.numel():
        return
    scalars[1] += tokens
    z = i.logits.to(torch.promote_types(i.logits.dtype, torch.float32))
    of_tokens = torch.stack([z.norm(dim=1), z.logsumexp(1), z.abs().amax(1)])  # (3, T)
    if i.mask is not None:
        of_tokens = of_tokens.masked_fill(~i.mask, 0)
    scalars[2:4] += of_tokens[:2].sum(1, dtype=scalars.dtype)
    torch.maximum(scalars[4], of_tokens[2].amax(), out=scalars[4])


record_op = define_inplace_op("record_routing", RecordInputs, check=check_record, reference=record_reference)


def record_routing(
    totals: Tensor, expert_ids: Tensor, group_sizes: Tensor, kept: Tensor, logits: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:  # fmt: skip
    """Add a call's routing to `totals` (2E + 5,) float64; the head of this file lists its entries.

    expert_ids (T, k); group_sizes (E,), the choices of each expert; kept (E,), those left by the capacity;
    logits (T, E), or None where there are none; mask (T,) bool, False at padding, whose logits are not
    looked at.  No gradient, no synchronisation; nothing is added where a forward pass runs again within a
    backward pass.
    """
    logits = None if logits is None else logits.detach()
    record_op(totals, expert_ids, group_sizes, kept, logits, mask)


def selection_bias_step(
    selection_bias: Tensor, load: Tensor, rate: float, rule: str = "sign", zero_mean: bool = False,
    zero_compute: ZeroCompute | None = None,
) -> Tensor:  # fmt: skip
    """Return the step of `selection_bias` (E,) after the choices `load` (E,); see the head of this file.

    Float32, zeros for a load of zeros.  Raises ValueError for an unknown `rule`.
    """
    if rule == "quantile":
        raise ValueError("rule='quantile' needs more than the load: see quantile_bias")
    check_rule(rate, rule)
    check_axes(selection_bias=(selection_bias, "E"), load=(load, "E"))
    # whole numbers are subtracted: a mean in float32 would not find a perfect balance
    num_experts = real_experts(load.shape[0], zero_compute)
    numerator, denominator = (1, 1) if zero_compute is None else zero_compute.share(num_experts)
    total = load.sum() * numerator
    violation = (total - load * (num_experts * denominator)).float()  # times E * denominator
    step = violation.sign() if rule == "sign" else violation / total.clamp_min(1)
    if zero_compute is not None:
        step = step * (torch.arange(len(step), device=step.device) < num_experts)
    return rate * (step - step.mean() if zero_mean else step)


def check_rule(rate: float | None, rule: str) -> float:
    """Return the rate, or the default of `rule` for None."""
    if rule not in RATES:
        raise ValueError(f"unknown rule {rule!r}; known: {', '.join(RATES)}")
    rate = RATES[rule] if rate is None else rate
    check_positive(rate=rate)
    if rule == "quantile" and rate > 1:
        raise ValueError(
            f"rate is {rate}, but at most 1 for rule='quantile': a part of the way to the new bias"
        )
    return rate


def sum_over_ranks(totals: list[Tensor], group: "torch.distributed.ProcessGroup | None") -> list[Tensor]:
    """The sums of `totals`, all (E,) of any lengths, over the ranks of a process group, in one all-reduce.

    Copies of them for the group None, which is this process alone.
    """
    joined = torch.cat(totals)
    if group is not None:
        torch.distributed.all_reduce(joined, group=group)
    return list(joined.split([len(t) for t in totals]))
