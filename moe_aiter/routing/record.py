"""What a monitor keeps of the routing of one layer, on its device: sums that a call adds to.

`totals` (2E + 5,) float64, in which whole numbers are exact up to 2^53:

    choices (E,)   of each expert, before any is dropped
    dropped (E,)   of these, over the capacity
    tokens         without padding
    seen           tokens whose logits were there to be summed
    norm           sum over these of the Euclidean norm of a token's logits
    logsumexp      sum over these of log sum_e exp(z_e)
    largest        of all |z|, a maximum instead of a sum
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.base.check import check_device, check_shape, check_size
from ..op import Written, define_inplace_op
from ..private_api import graph_task

SCALARS = 5


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
    if graph_task() != -1:
        return  # inside a backward pass the forward pass is a repetition, by activation checkpointing
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
    totals: Tensor,
    expert_ids: Tensor,
    group_sizes: Tensor,
    kept: Tensor,
    logits: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Add a call's routing to `totals` (2E + 5,) float64, whose parts the head of this file names.

    expert_ids (T, k); group_sizes (E,), the choices of each expert; kept (E,), those left by the capacity;
    logits (T, E), or None where there are none; mask (T,) bool, False at padding, whose logits are not
    looked at.  No gradient, no synchronisation; nothing is added where a forward pass runs again within a
    backward pass.  An op, so that a compiled graph asks each time it runs.
    """
    logits = None if logits is None else logits.detach()
    record_op(totals, expert_ids, group_sizes, kept, logits, mask)
