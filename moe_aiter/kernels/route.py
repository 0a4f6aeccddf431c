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
from ._check import check_float, check_shape
from ._groups import wide
from ._host import array, ext, host, num_threads
from ._triton import jit_kernel, tl, triton
from .route_grad import EPSILON, route_backward_op, row_tile_of_k, softmax_backward
from .topk import NO_KEY, from_key, take_highest, to_key, topk_reference


# reference
def route_reference(
    logits: Tensor, top_k: int, sigmoid: bool, renormalize: bool, scale: float, need_scores: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    chosen, ids = topk_reference(logits if renormalize and not sigmoid else scores, top_k)
    scores = scores if writes_scores(sigmoid, renormalize, need_scores) else scores[:0]
    return scores, weigh(chosen, sigmoid, renormalize, scale), ids


def writes_scores(sigmoid: bool, renormalize: bool, need_scores: bool) -> bool:
    """Every mode but the renormalised softmax needs them for its own backward pass."""
    return need_scores or sigmoid or not renormalize


def weigh(chosen: Tensor, sigmoid: bool, renormalize: bool, scale: float) -> Tensor:
    """The weights of the chosen scores; of the chosen logits, where they are a softmax of these."""
    if renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + EPSILON) if sigmoid else chosen.softmax(1)
    return chosen * scale if scale != 1.0 else chosen


# kernel
@jit_kernel
def route_kernel(
    logits_ptr,  # (T, E)
    scores_ptr,  # (T, E) or None
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
    ranked = z
    if scores_ptr is not None:
        p = tl.sigmoid(z) if SIGMOID else softmax(z)
        tl.store(scores_ptr + t * E + e[None, :], p, mask=mask)
        ranked = z if OF_LOGITS else p

    key = tl.where(mask, to_key(ranked), NO_KEY)
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


# launcher
def new_route(
    logits: Tensor, top_k: int, sigmoid: bool, renormalize: bool, scale: float, need_scores: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_shape("logits", logits, "T", "E")
    if logits.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logits must be float32 or float64, not {logits.dtype}")
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k} but logits is (T, E={num_experts}); top_k must be from 1 to E")
    written = num_tokens if writes_scores(sigmoid, renormalize, need_scores) else 0
    scores, weights = logits.new_empty(written, num_experts), logits.new_empty(num_tokens, top_k)
    return scores, weights, logits.new_empty(num_tokens, top_k, dtype=torch.int64)


@takes(torch.float32)
def launch_route(out, logits, top_k, sigmoid, renormalize, scale, need_scores):
    scores, weights, ids = out
    grid, tile = row_tile_of_k(*logits.shape, top_k)
    route_kernel[grid](
        logits, scores if scores.numel() else None, weights, ids, *logits.shape, scale, logits.stride(),
        SIGMOID=sigmoid, RENORMALIZE=renormalize, **tile,
    )  # fmt: skip


@takes(torch.float32)
def launch_route_host(out, logits, top_k, sigmoid, renormalize, scale, need_scores):
    """torch's scores, and the extension's choice."""
    scores, weights, ids = out
    if sigmoid:
        torch.sigmoid(logits, out=scores)
    elif scores.numel():
        torch.softmax(logits, 1, out=scores)
    ext.topk(*map(array, (logits if renormalize and not sigmoid else scores, weights, ids)), num_threads())
    weights.copy_(weigh(weights, sigmoid, renormalize, scale))


# op
def save_route(ctx, inputs, output):
    logits, _, *ctx.how, _ = inputs
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
    return dlogits, None, None, None, None, None


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
    "route(Tensor logits, int top_k, bool sigmoid, bool renormalize, float scale, bool need_scores)"
    " -> (Tensor, Tensor, Tensor)",
    new=new_route,
    reference=route_reference,
    triton=launch_route,
    host=host(launch_route_host),
    save=save_route,
    backward=backward_route,
)


# public
def choose_experts(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    renormalize: bool = True,
    scale: float = 1.0,
    need_scores: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Scores (T, E), weights (T, k) and experts (T, k) int64, the best first, for `logits` (T, E).

    The floats are float32, float64 for float64 logits.  Differentiable once in `logits`: float16, bfloat16,
    float32 or float64, with any strides.  NaN is chosen first; the experts of a row are distinct and within
    [0, E) whatever the logits are.  A renormalised softmax without `need_scores` gives None for them.
    Raises ValueError unless `logits` has two axes and 1 <= top_k <= E, TypeError for another dtype.
    """
    check_float(logits=logits)
    logits = wide(logits)
    scores, weights, ids = route_op(logits, top_k, sigmoid, renormalize, scale, need_scores)
    if not writes_scores(sigmoid, renormalize, need_scores):
        scores = None
    elif renormalize and not sigmoid:
        scores = SoftmaxScores.apply(logits, scores)
    return scores, weights, ids
