"""Every token times the matrices of the experts that it chose.

    s[t, j] = x[t] @ w[expert_ids[t, j]] + bias[expert_ids[t, j]]       the products of the k slots of a token
    out[t]  = sum over j of routing_weights[t, j] * s[t, j]             or all of them

T tokens, k slots, E experts, K in, N out.  Rows are sorted by expert, multiplied, and return to token
order.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import INTEGERS, binds, define_op, gradients, takes
from ..base.check import (
    FLOATS,
    Index,
    Operand,
    cast_as_linear,
    check_axes,
    check_device,
    check_float,
    check_index,
    check_shape,
    check_size,
    check_tensor,
    sum_dtype,
)
from ..base.host import HOST_DTYPES, host
from ..rows.permute import (
    TRITON_DTYPES,
    PermuteInputs,
    bind_permute,
    check_values,
    launch_permute_host,
    new_routed,
    permute,
    permute_reference,
    unpermute,
)
from ..rows.sort import sort_by_expert
from .gmm import gmm_op


class PermuteSlotsInputs(NamedTuple):
    """The inputs of the op `permute_slots`: out[rank[t, j]] = x[t, j], and zeros where order is -1."""

    x: Annotated[Operand, "T, k, K"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]

    def as_tokens(self) -> PermuteInputs:
        """Return the inputs of `permute` of slots as tokens; the slots of a token that are one remain one."""
        if self.x.stride(1) == 0:
            return PermuteInputs(self.x[:, 0], self.order, self.rank, None)
        return PermuteInputs(self.x.flatten(0, 1), self.order, self.rank.reshape(-1, 1), None)


# launcher


@binds
@takes(*TRITON_DTYPES)
def bind_permute_slots(i: PermuteSlotsInputs) -> Callable:
    permute = bind_permute(i.as_tokens())
    return lambda out, i: permute(out, i.as_tokens())


@takes(*HOST_DTYPES)
def launch_permute_slots_host(out: Tensor, i: PermuteSlotsInputs) -> None:
    launch_permute_host(out, i.as_tokens())


# op


def backward_permute_slots(ctx, dout):
    order, rank = ctx.saved_tensors
    dx = unpermute(dout, order, rank.reshape(-1, 1))
    return gradients(PermuteSlotsInputs, x=dx.view(*rank.shape, dout.shape[1]))


permute_slots_op = define_op(
    "permute_slots", PermuteSlotsInputs, new=lambda i: new_routed(i, "R", "K"), check_values=check_values,
    reference=lambda i: permute_reference(i.as_tokens()), triton=bind_permute_slots,
    host=host(launch_permute_slots_host), backward=backward_permute_slots,
    save=lambda ctx, i, output: ctx.save_for_backward(i.order, i.rank),
)  # fmt: skip


# public


def grouped_gemm(
    input: Tensor, weights: Tensor, expert_ids: Tensor, topk: int | None = None, *,
    routing_weights: Tensor | None = None, reduce: str | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Multiply each token by the weights of its experts; the result keeps the leading axes of `input`.

    input: (T, K), one row for all slots of a token; the slots' products are summed, and (T, N) is returned.
        Or (T, k, K), one row for each slot; the products are kept apart, and (T, k, N) is returned.
        `x.unsqueeze(1).expand(-1, k, -1)` is not copied.
    weights: (E, K, N), any strides.
    expert_ids: (T, k), int32 or int64; also (T,) for one expert each, or (T * topk,).  If a
        token has the same expert twice, both count.  A negative id drops a slot: it is zeros, adds nothing
        and gets no gradient.
    topk: k, if the shape of `expert_ids` does not contain it; otherwise it must agree.
    routing_weights: (T, k), any floating dtype.  Products are multiplied by them in float32.
    reduce: "sum" or "none", whatever the shape of `input`.
    bias: (E, N), any floating dtype, added to each product.
    out_dtype: dtype of the result [that of `input`].

    Under torch.autocast, input, weights and bias are cast to its dtype.
    Sums are kept in float32, over j = 0..k-1 in this order, and rounded once.  Differentiable in input,
    weights, bias and routing_weights; an expert without tokens gets a gradient of zeros.

    Raises ValueError for shapes, devices and `reduce`, TypeError for dtypes, before anything is launched;
    with MOE_AITER_DEBUG=1 also ValueError for an id of E or more.
    Source: AITER's documentation names this function, which AITER does not have.
    """
    ids, reduce = check_inputs(input, weights, expert_ids, topk, reduce)
    input, weights, bias = cast_as_linear(input, weights, bias)
    check_options(input, weights, ids, routing_weights, bias, out_dtype)
    order, rank, group_sizes = sort_by_expert(ids, weights.shape[0])
    x = permute(input, order, rank) if input.dim() == 2 else permute_slots_op(input, order, rank)
    out_dtype = out_dtype or input.dtype
    finished = routing_weights is None and (reduce == "none" or ids.shape[1] == 1)
    rows = gmm_op(x, weights, group_sizes, bias, out_dtype if finished else sum_dtype(x))
    if reduce == "sum":
        return unpermute(rows, order, rank, routing_weights).to(out_dtype)
    if routing_weights is not None:
        routing_weights = routing_weights.reshape(-1, 1)
    out = unpermute(rows, order, rank.reshape(-1, 1), routing_weights)
    return out.view(*ids.shape, weights.shape[2]).to(out_dtype)


def check_inputs(
    input: Tensor, weights: Tensor, expert_ids: Tensor, topk: int | None, reduce: str | None
) -> tuple[Tensor, str]:
    """The ids as (T, k), and whether slots are summed."""
    for name, x in (("input", input), ("expert_ids", expert_ids)):
        check_tensor(name, x)
    check_shape("weights", weights, "E", "K", "N")
    if not weights.shape[0]:
        raise ValueError(f"weights must be of at least 1 expert, but it has shape {tuple(weights.shape)}")
    if input.dim() not in (2, 3):
        raise ValueError(f"input must be (T, K) or (T, k, K), but it has shape {tuple(input.shape)}")
    check_index(expert_ids=expert_ids)
    ids = expert_ids
    if topk is not None and (not isinstance(topk, INTEGERS) or topk < 1):
        raise ValueError(f"topk must be an int of at least 1, not {topk!r}")
    if ids.dim() == 1 and (topk is None or ids.shape[0] % topk == 0):
        ids = ids.view(-1, topk or 1) if ids.is_contiguous() else ids.reshape(-1, topk or 1)
    check_shape("expert_ids", ids, "T", "k")
    if topk is not None:
        check_size("topk is {}", topk, "expert_ids is (T, k={})", ids.shape[1])
    axes = "T, K" if input.dim() == 2 else "T, k, K"
    check_axes(input=(input, axes), expert_ids=(ids, "T, k"), weights=(weights, "E, K, N"))
    if reduce not in (None, "sum", "none"):
        raise ValueError(f"reduce must be 'sum', 'none' or None, not {reduce!r}")
    return ids, reduce or ("sum" if input.dim() == 2 else "none")


def check_options(
    input: Tensor, weights: Tensor, ids: Tensor, routing_weights: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    check_float(input=input, weights=weights)
    expected = {"routing_weights": (routing_weights, "(T, k)", tuple(ids.shape))}
    expected["bias"] = bias, "(E, N)", (weights.shape[0], weights.shape[2])
    for name, (x, axes, shape) in expected.items():
        if x is not None:
            check_tensor(name, x)
            if x.shape != shape:
                raise ValueError(f"{name} must be {axes} = {shape}, but it has shape {tuple(x.shape)}")
            if x.dtype not in FLOATS:
                raise TypeError(f"{name} must be floating, not {x.dtype}")
    check_device(input=input, weights=weights, expert_ids=ids, routing_weights=routing_weights, bias=bias)
    if out_dtype not in (None, *FLOATS):
        raise TypeError(f"out_dtype must be a floating dtype, not {out_dtype}")
