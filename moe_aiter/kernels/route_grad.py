"""The gradient of `route`: of the weights and the scores to the logits.

It needs (T, k) numbers where the weights are a softmax of the chosen logits, else the (T, E) scores.
"""

import torch
from torch import Tensor

from ..op import define_op, takes
from ._check import check_device, check_float, check_shape
from ._host import host
from ._triton import jit_kernel, next_power_of_2, tl
from .topk import row_tile

EPSILON = 1e-20  # added to a sum of sigmoids, which may be 0


# reference
def route_backward_reference(
    dlogits: Tensor,
    weights: Tensor,
    ids: Tensor,
    scores: Tensor | None,
    dweights: Tensor | None,
    dscores: Tensor | None,
    num_experts: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> None:
    dlogits.zero_()
    if dweights is not None:
        dchosen = dweights * scale if scale != 1.0 else dweights
        if scores is None:
            dchosen = softmax_backward(dchosen, weights * inverse(scale))
        elif renormalize:
            total = (dweights * weights).sum(1, keepdim=True)
            dchosen = (dchosen - total) / (scores.gather(1, ids).sum(1, keepdim=True) + EPSILON)
        # the experts of a row are distinct, so this writes each element once: no order to depend on
        dlogits.scatter_(1, ids, dchosen)
    if scores is not None:
        if dscores is not None:
            dlogits += dscores
        backward = torch.ops.aten.sigmoid_backward if sigmoid else softmax_backward
        dlogits.copy_(backward(dlogits, scores))


def softmax_backward(dscores: Tensor, scores: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(dscores, scores, 1, scores.dtype)


def inverse(scale: float) -> float:
    """1 / scale; 0 for 0, whose weights and gradients are all 0."""
    return 1 / scale if scale else 0.0


# kernel
@jit_kernel
def route_backward_kernel(
    weights_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    scores_ptr,  # (T, E) or None: the weights are a softmax of the chosen logits
    dweights_ptr,  # (T, K) or None
    dscores_ptr,  # (T, E) or None
    dlogits_ptr,  # (T, E)
    T,
    E,
    scale,
    inverse_scale,
    dweights_strides,  # t, j
    dscores_strides,  # t, e
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e, slot = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    t_mask = t < T
    mask, k_mask = t_mask[:, None] & (e < E), t_mask[:, None] & (slot < K)

    # what the weights give the chosen, in its expert's column: the gradient of the logits or of the scores
    d = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if dweights_ptr is not None:
        w_ptrs, dw_ptrs = weights_ptr + t * K, dweights_ptr + t * dweights_strides[0]
        if RENORMALIZE:
            w = tl.load(w_ptrs[:, None] + slot, mask=k_mask, other=0.0)
            dw = tl.load(dw_ptrs[:, None] + slot * dweights_strides[1], mask=k_mask, other=0.0)
            total = tl.sum(w * dw, 1)
        if RENORMALIZE and SIGMOID:
            ids = tl.load(ids_ptr + t[:, None] * K + slot, mask=k_mask, other=0)
            size = tl.sum(tl.load(scores_ptr + t[:, None] * E + ids, mask=k_mask, other=0.0), 1) + EPSILON
        for j in range(K):
            expert = tl.load(ids_ptr + t * K + j, mask=t_mask, other=0).to(tl.int32)
            part = tl.load(dw_ptrs + j * dweights_strides[1], mask=t_mask, other=0.0)
            if scores_ptr is None and K == 1:
                part = tl.zeros_like(part)  # a single weight is constant; rounding would say otherwise
            elif scores_ptr is None:
                part = tl.load(w_ptrs + j, mask=t_mask, other=0.0) * (part - total * inverse_scale)
            elif RENORMALIZE:
                part = (part * scale - total) / size
            else:
                part *= scale
            d = tl.where(e == expert[:, None], part[:, None], d)

    if scores_ptr is not None:
        if dscores_ptr is not None:
            dp_ptrs = dscores_ptr + t[:, None] * dscores_strides[0] + e.to(tl.int64) * dscores_strides[1]
            d += tl.load(dp_ptrs, mask=mask, other=0.0)
        p = tl.load(scores_ptr + t[:, None] * E + e, mask=mask, other=0.0)
        d = d * p * (1 - p) if SIGMOID else p * (d - tl.sum(p * d, 1)[:, None])
    tl.store(dlogits_ptr + t[:, None] * E + e, d, mask=mask)


# launcher
def row_tile_of_k(num_tokens: int, num_experts: int, top_k: int) -> tuple[tuple[int], dict]:
    grid, tile = row_tile(num_tokens, num_experts)
    return grid, tile | {"K": top_k, "BLOCK_K": next_power_of_2(top_k), "EPSILON": EPSILON}


def new_route_backward(
    weights: Tensor,
    ids: Tensor,
    scores: Tensor | None,
    dweights: Tensor | None,
    dscores: Tensor | None,
    num_experts: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> Tensor:
    check_shape("weights", weights, "T", "k")
    check_float(weights=weights, scores=scores, dweights=dweights, dscores=dscores)
    check_device(weights=weights, expert_ids=ids, scores=scores, dweights=dweights, dscores=dscores)
    if dweights is None and dscores is None:
        raise ValueError("there is neither dweights nor dscores")
    if (scores is None) != (renormalize and not sigmoid) or (scores is None and dscores is not None):
        raise ValueError("scores belong to every mode but the renormalised softmax, which takes no dscores")
    dlogits = weights.new_empty(weights.shape[0], num_experts)
    for name, x, like in (
        ("expert_ids", ids, weights),
        ("scores", scores, dlogits),
        ("dweights", dweights, weights),
        ("dscores", dscores, dlogits),
    ):
        if x is not None and x.shape != like.shape:
            raise ValueError(f"{name} is {tuple(x.shape)} but it needs {tuple(like.shape)}")
    return dlogits


@takes(torch.float32)
def launch_route_backward(
    dlogits, weights, ids, scores, dweights, dscores, num_experts, sigmoid, renormalize, scale
):
    num_tokens, top_k = weights.shape
    grid, tile = row_tile_of_k(num_tokens, num_experts, top_k)
    strides = [(0, 0) if d is None else d.stride() for d in (dweights, dscores)]
    route_backward_kernel[grid](
        weights.contiguous(), ids.contiguous(), None if scores is None else scores.contiguous(),
        dweights, dscores, dlogits, num_tokens, num_experts, scale, inverse(scale), *strides,
        SIGMOID=sigmoid, RENORMALIZE=renormalize, **tile,
    )  # fmt: skip


# op
route_backward_op = define_op(
    "route_backward(Tensor weights, Tensor expert_ids, Tensor? scores, Tensor? dweights, Tensor? dscores,"
    " int num_experts, bool sigmoid, bool renormalize, float scale) -> Tensor",
    new=new_route_backward,
    torch=route_backward_reference,
    triton=launch_route_backward,
    host=host(route_backward_reference),
)
