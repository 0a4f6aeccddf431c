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

import torch
from torch import Tensor

from ..kernels.base.check import check_device, check_shape, check_size
from ..op import define_inplace_op
from ..private_api import graph_task

SCALARS = 5


def check_record(
    totals: Tensor,
    expert_ids: Tensor,
    group_sizes: Tensor,
    kept: Tensor,
    logits: Tensor | None,
    mask: Tensor | None,
) -> None:
    check_shape("totals", totals, "2E + 5")
    check_shape("expert_ids", expert_ids, "T", "k")
    for name, sizes in (("group_sizes", group_sizes), ("kept", kept)):
        check_shape(name, sizes, "E")
        num_experts = (totals.shape[0] - SCALARS) // 2
        check_size(f"{name} is (E={{}},)", sizes.shape[0], "the monitor counts E={} experts", num_experts)
    for name, t, axes in (("logits", logits, ("T", "E")), ("mask", mask, ("T",))):
        if t is not None:
            check_shape(name, t, *axes)
            what = f"{name} is ({', '.join(('T={}', *axes[1:]))})"
            check_size(what, t.shape[0], "expert_ids is (T={}, k)", expert_ids.shape[0])
    check_device(
        totals=totals, expert_ids=expert_ids, group_sizes=group_sizes, kept=kept, logits=logits, mask=mask
    )


def record_reference(
    totals: Tensor,
    expert_ids: Tensor,
    group_sizes: Tensor,
    kept: Tensor,
    logits: Tensor | None,
    mask: Tensor | None,
) -> None:
    if graph_task() != -1:
        return  # inside a backward pass the forward pass is a repetition, by activation checkpointing
    choices, dropped, scalars = totals.split([len(group_sizes), len(group_sizes), SCALARS])
    choices += group_sizes
    dropped += group_sizes - kept
    tokens = expert_ids.shape[0] if mask is None else mask.sum()
    scalars[0] += tokens
    if logits is None or not logits.numel():
        return
    scalars[1] += tokens
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_tokens = torch.stack([z.norm(dim=1), z.logsumexp(1), z.abs().amax(1)])  # (3, T)
    if mask is not None:
        of_tokens = of_tokens.masked_fill(~mask, 0)
    scalars[2:4] += of_tokens[:2].sum(1, dtype=scalars.dtype)
    torch.maximum(scalars[4], of_tokens[2].amax(), out=scalars[4])


record_op = define_inplace_op(
    "record_routing(Tensor(a!) totals, Tensor expert_ids, Tensor group_sizes, Tensor kept, Tensor? logits,"
    " Tensor? mask) -> ()",
    check=check_record,
    reference=record_reference,
)


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
