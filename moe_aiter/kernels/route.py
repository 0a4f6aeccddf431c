"""Choose k of E experts for each of T tokens from the router's logits, and weigh them.

    scores    p = softmax(z) over E, or sigmoid(z)
    chosen    the k highest of p, the lower expert first among equals
    weights   scale * p_j, or with renormalisation scale * p_j / sum of p over the chosen

A sum of sigmoids may be 0, so it gets EPSILON.  A renormalised softmax is the softmax of the k chosen logits,
and they are chosen by logit: p may underflow.  Its backward keeps (T, k) numbers; the (T, E) scores are kept
by a node of their own, only as long as somebody has them.  One launch forward, one backward.
"""

import torch
from torch import Tensor

from ..backend import define_op, takes
from ._check import check_device, check_float, check_shape
from ._groups import wide
from ._host import array, ext, host, num_threads
from ._triton import tl, triton
from .topk import NO_KEY, from_key, row_tile, take_highest, to_key, topk_reference

EPSILON = 1e-20


# reference
def route_reference(
    logits: Tensor, top_k: int, sigmoid: bool, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    chosen, ids = topk_reference(logits if renormalize and not sigmoid else scores, top_k)
    return scores, weigh(chosen, sigmoid, renormalize, scale), ids


def weigh(chosen: Tensor, sigmoid: bool, renormalize: bool, scale: float) -> Tensor:
    """The weights of the chosen scores; of the chosen logits, where they are a softmax of these."""
    if renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + EPSILON) if sigmoid else chosen.softmax(1)
    return chosen * scale if scale != 1.0 else chosen


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
    z = tl.load(z_ptrs, mask=mask, other=float("-inf"))
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
def new_route(
    logits: Tensor, top_k: int, sigmoid: bool, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    check_shape("logits", logits, "T", "E")
    if logits.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logits must be float32 or float64, not {logits.dtype}")
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k} but logits is (T, E={num_experts}); top_k must be from 1 to E")
    scores, weights = logits.new_empty(logits.shape), logits.new_empty(num_tokens, top_k)
    return scores, weights, logits.new_empty(num_tokens, top_k, dtype=torch.int64)


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


def row_tile_of_k(num_tokens: int, num_experts: int, top_k: int) -> tuple[tuple[int], dict]:
    grid, tile = row_tile(num_tokens, num_experts)
    return grid, tile | {"K": top_k, "BLOCK_K": triton.next_power_of_2(top_k), "EPSILON": EPSILON}


@takes(torch.float32)
def launch_route(out, logits, top_k, sigmoid, renormalize, scale):
    grid, tile = row_tile_of_k(*logits.shape, top_k)
    route_kernel[grid](
        logits, *out, *logits.shape, scale, logits.stride(),
        SIGMOID=sigmoid, RENORMALIZE=renormalize, **tile,
    )  # fmt: skip


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


@takes(torch.float32)
def launch_route_host(out, logits, top_k, sigmoid, renormalize, scale):
    """torch's scores, and the extension's choice."""
    scores, weights, ids = out
    if sigmoid:
        torch.sigmoid(logits, out=scores)
    else:
        torch.softmax(logits, 1, out=scores)
    ext.topk(*map(array, (logits if renormalize and not sigmoid else scores, weights, ids)), num_threads())
    weights.copy_(weigh(weights, sigmoid, renormalize, scale))


# op
def save_route(ctx, inputs, output):
    logits, _, *ctx.how = inputs
    scores, weights, ids = output
    sigmoid, renormalize, _ = ctx.how
    ctx.num_experts = logits.shape[1]
    if renormalize and not sigmoid:
        ctx.save_for_backward(weights, ids, None)
        ctx.mark_non_differentiable(scores, ids)  # see SoftmaxScores
    else:
        ctx.save_for_backward(weights, ids, scores)
        ctx.mark_non_differentiable(ids)
    ctx.set_materialize_grads(False)


def backward_route(ctx, dscores, dweights, dids):
    dlogits = None
    if dscores is not None or dweights is not None:
        grads = dweights, dscores, ctx.num_experts
        dlogits = route_backward_op(*ctx.saved_tensors, *grads, *ctx.how)
    return dlogits, None, None, None, None


class SoftmaxScores(torch.autograd.Function):
    """Scores that are known to be the softmax of these logits, with that gradient."""

    @staticmethod
    def forward(ctx, logits, scores):
        ctx.save_for_backward(scores)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, dscores):
        (scores,) = ctx.saved_tensors
        return softmax_backward(dscores, scores), None


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
    "route_backward(Tensor weights, Tensor expert_ids, Tensor? scores, Tensor? dweights, Tensor? dscores,"
    " int num_experts, bool sigmoid, bool renormalize, float scale) -> Tensor",
    new=new_route_backward,
    torch=route_backward_reference,
    triton=launch_route_backward,
    host=host(route_backward_reference),
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
    check_float(logits=logits)
    logits = wide(logits)
    scores, weights, ids = route_op(logits, top_k, sigmoid, renormalize, scale)
    if renormalize and not sigmoid:
        scores = SoftmaxScores.apply(logits, scores)
    return scores, weights, ids
