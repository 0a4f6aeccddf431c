"""Choose k of E experts for each of T tokens from the router's logits, and weigh them.

    scores    p = softmax(z) over E, or sigmoid(z)
    chosen    the k highest of p, the lower expert first among equals
    weights   scale * p_j, or with renormalisation scale * p_j / sum of p over the chosen

A renormalised softmax is the softmax of the k chosen logits, and they are chosen by logit: p may underflow.
A sum of sigmoids may be 0, so it gets EPSILON.  One launch forward, one backward.
"""

import torch
from torch import Tensor

from ..backend import copy_into, define_op, takes
from ._check import check_device, check_float, check_shape
from ._groups import sum_dtype, wide
from ._host import HOST_DTYPES, array, ext, host, num_threads
from ._triton import tl, triton
from .topk import NO_KEY, from_key, row_tile, take_highest, to_key, topk_reference

EPSILON = 1e-20


# reference
def route_reference(
    logits: Tensor, top_k: int, sigmoid: bool, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = wide(logits)
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    chosen, ids = topk_reference(logits if renormalize and not sigmoid else scores, top_k)
    return scores, weigh(chosen, sigmoid, renormalize, scale), ids


def weigh(chosen: Tensor, sigmoid: bool, renormalize: bool, scale: float) -> Tensor:
    """The weights of the chosen scores; of the chosen logits, where they are a softmax of these."""
    if renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + EPSILON) if sigmoid else chosen.softmax(1)
    return chosen * scale if scale != 1.0 else chosen


def route_backward_reference(
    scores: Tensor,
    weights: Tensor,
    ids: Tensor,
    dscores: Tensor | None,
    dweights: Tensor | None,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> Tensor:
    if dweights is None:
        return score_backward(dscores, scores, sigmoid)
    dchosen = weigh_backward(dweights, scores, weights, ids, sigmoid, renormalize, scale)
    # the experts of a row are distinct, so this writes each element once: no order to depend on
    dchosen = torch.zeros_like(scores).scatter_(1, ids, dchosen)
    if renormalize and not sigmoid:
        return dchosen if dscores is None else dchosen + score_backward(dscores, scores, sigmoid)
    return score_backward(dchosen if dscores is None else dchosen + dscores, scores, sigmoid)


def weigh_backward(
    dweights: Tensor,
    scores: Tensor,
    weights: Tensor,
    ids: Tensor,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """The gradient of what `weigh` was given."""
    if not renormalize:
        return dweights * scale
    total = (dweights * weights).sum(1, keepdim=True)
    if sigmoid:
        return (dweights * scale - total) / (scores.gather(1, ids).sum(1, keepdim=True) + EPSILON)
    return weights * (dweights - total * inverse(scale))


def score_backward(dscores: Tensor, scores: Tensor, sigmoid: bool) -> Tensor:
    """The gradient of the logits, as autograd has it."""
    if sigmoid:
        return torch.ops.aten.sigmoid_backward(dscores, scores)
    return torch.ops.aten._softmax_backward_data(dscores, scores, 1, scores.dtype)


def inverse(scale: float) -> float:
    """1 / scale; 0 for 0, whose weights and gradients are all 0."""
    return 1 / scale if scale else 0.0


# kernel
@triton.jit
def route_kernel(
    logits_ptr,  # (T, E)
    scores_ptr,  # (T, E)
    weights_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    T,
    E,
    scale,
    logits_strides,  # t, e
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    OF_LOGITS: tl.constexpr = RENORMALIZE and not SIGMOID
    NOTHING: tl.constexpr = float("-inf") if OF_LOGITS else 0.0  # adds nothing to a sum
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    e, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)[None, :]
    mask = (t < T) & (e < E)[None, :]
    z_ptrs = logits_ptr + t * logits_strides[0] + e.to(tl.int64)[None, :] * logits_strides[1]
    z = tl.load(z_ptrs, mask=mask, other=float("-inf")).to(tl.float32)
    p = tl.sigmoid(z) if SIGMOID else softmax(z)
    tl.store(scores_ptr + t * E + e[None, :], p, mask=mask)

    key = tl.where(mask, to_key(z if OF_LOGITS else p), NO_KEY)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    keys = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in range(K):
        best, expert, key = take_highest(key, e, BLOCK_E)
        ids = tl.where(slot == j, expert[:, None], ids)
        keys = tl.where(slot == j, best[:, None], keys)
    chosen = tl.where(slot < K, from_key(keys), NOTHING)
    if OF_LOGITS:
        chosen = softmax(chosen)
    elif RENORMALIZE:
        chosen = chosen / (tl.sum(chosen, 1)[:, None] + EPSILON)
    mask = (t < T) & (slot < K)
    tl.store(weights_ptr + t * K + slot, chosen * scale, mask=mask)
    tl.store(ids_ptr + t * K + slot, ids.to(tl.int64), mask=mask)


@triton.jit
def softmax(z):
    """Of each row.  A row with a NaN or +inf, or of -inf alone, becomes NaN."""
    p = tl.exp(z - tl.max(z, 1)[:, None])
    return p * (1 / tl.sum(p, 1))[:, None]


@triton.jit
def route_backward_kernel(
    scores_ptr,  # (T, E)
    weights_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    dscores_ptr,  # (T, E) or None
    dweights_ptr,  # (T, K) or None
    dlogits_ptr,  # (T, E)
    T,
    E,
    scale,
    inverse_scale,
    dscores_strides,  # t, e
    dweights_strides,  # t, j
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    OF_LOGITS: tl.constexpr = RENORMALIZE and not SIGMOID
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e, slot = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    t_mask = t < T
    mask = t_mask[:, None] & (e < E)
    p_ptrs = scores_ptr + t[:, None] * E + e

    # what the weights give the chosen, laid out by expert: the gradient of the logits or of the scores
    dchosen = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if dweights_ptr is not None:
        s_ptrs, dw_ptrs = weights_ptr + t * K, dweights_ptr + t * dweights_strides[0]
        if RENORMALIZE:
            k_mask = t_mask[:, None] & (slot < K)
            dw = tl.load(dw_ptrs[:, None] + slot * dweights_strides[1], mask=k_mask, other=0.0)
            total = tl.sum(dw * tl.load(s_ptrs[:, None] + slot, mask=k_mask, other=0.0), 1)
        if RENORMALIZE and SIGMOID:
            ids = tl.load(ids_ptr + t[:, None] * K + slot, mask=k_mask, other=0)
            chosen = tl.load(scores_ptr + t[:, None] * E + ids, mask=k_mask, other=0.0)
            size = tl.sum(chosen, 1) + EPSILON
        for j in range(K):
            expert = tl.load(ids_ptr + t * K + j, mask=t_mask, other=0).to(tl.int32)
            d = tl.load(dw_ptrs + j * dweights_strides[1], mask=t_mask, other=0.0)
            if OF_LOGITS:
                d = tl.load(s_ptrs + j, mask=t_mask, other=0.0) * (d - total * inverse_scale)
            else:
                d *= scale
                if RENORMALIZE:
                    d = (d - total) / size
            dchosen = tl.where(e == expert[:, None], d[:, None], dchosen)

    dscores = dchosen
    if dscores_ptr is not None:
        ds_ptrs = dscores_ptr + t[:, None] * dscores_strides[0] + e.to(tl.int64) * dscores_strides[1]
        dscores = tl.load(ds_ptrs, mask=mask, other=0.0)
        if not OF_LOGITS:
            dscores += dchosen
    dlogits = dchosen
    if dscores_ptr is not None or not OF_LOGITS:
        p = tl.load(p_ptrs, mask=mask, other=0.0)
        dlogits = dscores * p * (1 - p) if SIGMOID else p * (dscores - tl.sum(p * dscores, 1)[:, None])
        if OF_LOGITS:
            dlogits += dchosen
    tl.store(dlogits_ptr + t[:, None] * E + e, dlogits, mask=mask)


# launcher
def new_route(
    logits: Tensor, top_k: int, sigmoid: bool, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    check_shape("logits", logits, "T", "E")
    check_float(logits=logits)
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k} but logits is (T, E={num_experts}); top_k must be from 1 to E")
    scores = logits.new_empty(logits.shape, dtype=sum_dtype(logits))
    weights = scores.new_empty(num_tokens, top_k)
    return scores, weights, scores.new_empty(num_tokens, top_k, dtype=torch.int64)


def new_route_backward(
    scores: Tensor,
    weights: Tensor,
    ids: Tensor,
    dscores: Tensor | None,
    dweights: Tensor | None,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
) -> Tensor:
    check_float(scores=scores, weights=weights, dscores=dscores, dweights=dweights)
    check_device(scores=scores, weights=weights, expert_ids=ids, dscores=dscores, dweights=dweights)
    if dscores is None and dweights is None:
        raise ValueError("there is neither dscores nor dweights")
    for name, x, like in (
        ("expert_ids", ids, weights),
        ("dweights", dweights, weights),
        ("dscores", dscores, scores),
    ):
        if x is not None and x.shape != like.shape:
            raise ValueError(f"{name} is {tuple(x.shape)} but it needs {tuple(like.shape)}")
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def row_tile_of_k(num_tokens: int, num_experts: int, top_k: int) -> tuple[tuple[int], dict]:
    grid, tile = row_tile(num_tokens, num_experts)
    return grid, tile | {"K": top_k, "BLOCK_K": triton.next_power_of_2(top_k), "EPSILON": EPSILON}


@takes(torch.float32, torch.bfloat16, torch.float16)
def launch_route(out, logits, top_k, sigmoid, renormalize, scale):
    grid, tile = row_tile_of_k(*logits.shape, top_k)
    route_kernel[grid](
        logits, *out, *logits.shape, scale, logits.stride(),
        SIGMOID=sigmoid, RENORMALIZE=renormalize, **tile,
    )  # fmt: skip


@takes(torch.float32)
def launch_route_backward(dlogits, scores, weights, ids, dscores, dweights, sigmoid, renormalize, scale):
    grid, tile = row_tile_of_k(*scores.shape, weights.shape[1])
    strides = [(0, 0) if d is None else d.stride() for d in (dscores, dweights)]
    route_backward_kernel[grid](
        scores.contiguous(), weights.contiguous(), ids.contiguous(), dscores, dweights, dlogits,
        *scores.shape, scale, inverse(scale), *strides,
        SIGMOID=sigmoid, RENORMALIZE=renormalize, **tile,
    )  # fmt: skip


@takes(*HOST_DTYPES)
def launch_route_host(out, logits, top_k, sigmoid, renormalize, scale):
    """torch's scores, and the extension's choice."""
    (scores, weights, ids), logits = out, wide(logits)
    if sigmoid:
        torch.sigmoid(logits, out=scores)
    else:
        torch.softmax(logits, 1, out=scores)
    ext.topk(*map(array, (logits if renormalize and not sigmoid else scores, weights, ids)), num_threads())
    weights.copy_(weigh(weights, sigmoid, renormalize, scale))


def launch_route_backward_host(dlogits, *inputs):
    copy_into(dlogits, route_backward_reference(*inputs))


# op
def save_route(ctx, inputs, output):
    logits, _, *ctx.how = inputs
    ctx.dtype = logits.dtype
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def backward_route(ctx, dscores, dweights, dids):
    nothing = [None] * 4
    if dscores is None and dweights is None:
        return None, *nothing
    dlogits = route_backward_op(*ctx.saved_tensors, dscores, dweights, *ctx.how)
    return dlogits.to(ctx.dtype), *nothing


route_op = define_op(
    "route(Tensor logits, int top_k, bool sigmoid, bool renormalize, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    new=new_route,
    reference=route_reference,
    triton=launch_route,
    host=host(launch_route_host),
    save=save_route,
    backward=backward_route,
)
route_backward_op = define_op(
    "route_backward(Tensor scores, Tensor weights, Tensor expert_ids, Tensor? dscores, Tensor? dweights,"
    " bool sigmoid, bool renormalize, float scale) -> Tensor",
    new=new_route_backward,
    reference=route_backward_reference,
    triton=launch_route_backward,
    host=host(launch_route_backward_host),
)


# public
def choose_experts(
    logits: Tensor, top_k: int, *, sigmoid: bool = False, renormalize: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (T, E), weights (T, k) and experts (T, k) int64, the best first, for `logits` (T, E).

    The floats are float32, float64 for float64 logits.  Differentiable once in `logits`: float16, bfloat16,
    float32 or float64, with any strides.  NaN is chosen first; the experts of a row are distinct and within
    [0, E) whatever the logits are.
    Raises ValueError unless `logits` has two axes and 1 <= top_k <= E, TypeError for another dtype.
    """
    return route_op(logits, top_k, sigmoid, renormalize, scale)
