"""Choose k of E experts for each of T tokens from the router's logits, and weigh them.

    scores    p = softmax(z) over E, or sigmoid(z)
    chosen    the k highest of p, the lower expert first among equals
    weights   scale * p_j, or with renormalisation scale * p_j / sum of p over the chosen

A sum of sigmoids may be 0, so EPSILON is added to it.  A renormalised softmax is the softmax of the k chosen
logits; there `route` chooses by logit, because p may underflow.  If the experts are `given` (T, k), by an
earlier run of the same pass, `route` weighs these; equal logits then give the same weights to the bit.

`route_backward` computes the gradient of the logits from those of the weights and of the scores.  It needs
(T, k) numbers for a renormalised softmax, else the (T, E) scores.  A separate autograd node keeps the scores,
so they are freed as soon as nothing refers to them.  Forward and backward take one launch each.

`decide` keeps whole numbers that a forward pass decides once, for the repetition of that pass by activation
checkpointing; see replay.py.  In a compiled graph it is an op.
"""

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...invariance import batch_invariant
from ...op import IMPLS, binds, bound, define_op, extended, gradients, is_transformed, takes
from ...private_api import is_exporting, softmax_gradient
from ...replay import always_save, current_pass
from ...torch_ops import NAMESPACE
from ..base.check import Operand, check_fields, check_finite, check_float, check_whole_shape, wide
from ..base.fixed_rows import each_number
from ..base.host import array, ext, host, num_threads
from ..base.launch import bind_kernel, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import dense
from .topk import NO_KEY, TopkInputs, from_key, row_tile, take_expert, take_highest, to_key, topk_reference

EPSILON = 1e-20  # added to a sum of sigmoids, which may be 0
NEARLY_ALL = 0.75  # of a token's weights: above a half one expert has it


class RouteBackwardInputs(NamedTuple):
    """The inputs of the op `route_backward`: the gradient of the logits (T, E)."""

    weights: Annotated[Operand, "T, k"]
    expert_ids: Tensor  # (T, k)
    scores: Operand | None  # (T, E); None for a renormalised softmax
    dweights: Operand | None  # (T, k)
    dscores: Operand | None  # (T, E)
    num_experts: int
    sigmoid: bool
    renormalize: bool
    scale: float


class RouteInputs(NamedTuple):
    """The inputs of the op `route`: the scores, and the weights and numbers of the chosen experts."""

    logits: Annotated[Tensor, "T, E"]
    top_k: int
    sigmoid: bool
    renormalize: bool
    scale: float
    need_scores: bool
    fixed_ids: Tensor | None = None  # (T, k), the experts instead of the highest


# the inputs of the op `route_once`, which looks up `fixed_ids` itself
RouteOnceInputs = extended("RouteOnceInputs", RouteInputs, fixed_ids=None)


class DecideInputs(NamedTuple):
    """The inputs of the op `decide`: `made`, or what was decided before."""

    made: Tensor
    what: str
    below: int


# route_backward: reference
def fill_route_backward(dlogits: Tensor, i: RouteBackwardInputs) -> None:
    dlogits.zero_()
    if i.dweights is not None:
        if i.renormalize:
            of = None if i.scores is None else i.scores.gather(1, i.expert_ids)
            dchosen = shares_backward(i.dweights, i.weights, i.scale, of)
        else:
            dchosen = i.dweights * i.scale
        # the experts of a row are distinct, so this writes each element once: no order to depend on
        dlogits.scatter_(1, i.expert_ids, dchosen)
    if i.scores is not None:
        if i.dscores is not None:
            dlogits += i.dscores
        backward = torch.ops.aten.sigmoid_backward if i.sigmoid else shares_backward
        dlogits.copy_(backward(dlogits, i.scores))


def shares_backward(
    dweights: Tensor, weights: Tensor, scale: float = 1.0, of: Tensor | None = None
) -> Tensor:
    """The gradient of the logits, whose softmax times `scale` are `weights` (T, n), or of the scores `of`.

    d - sum(shares * d) is taken by differences, which are as small as the result.
    """
    shares = weights * inverse(scale) if scale != 1.0 else weights
    nearly_all = dweights.where(shares > NEARLY_ALL, 0).sum(1, keepdim=True)
    d = dweights - nearly_all
    mean = (shares * d).sum(1, keepdim=True)
    d = d - mean
    d = d - (shares * d).sum(1, keepdim=True)
    if of is None:
        return weights * d
    total = of.sum(1, keepdim=True) + EPSILON
    return (d + (nearly_all + mean) * (EPSILON / total)) * (scale / total)


def inverse(scale: float) -> float:
    """1 / scale; 0 for 0, whose weights and gradients are all 0."""
    return 1 / scale if scale else 0.0


# route_backward: kernel
@jit_kernel
def route_backward_kernel(
    weights_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    scores_ptr,  # (T, E) or None: the weights are a softmax of the chosen logits
    dweights_ptr,  # (T, K) or None
    dscores_ptr,  # (T, E) or None
    dlogits_ptr,  # (T, E)
    T, E, scale, inverse_scale,
    dweights_strides,  # t, j
    dscores_strides,  # t, e
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, NEARLY_ALL: tl.constexpr, EPSILON: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e, slot = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    t_mask = t < T
    mask, k_mask = t_mask[:, None] & (e < E), t_mask[:, None] & (slot < K)

    # what the weights give the chosen, in its expert's column: the gradient of the logits or of the scores
    d = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if dweights_ptr is not None:
        w_ptrs, dw_ptrs = weights_ptr + t * K, dweights_ptr + t * dweights_strides[0]
        if RENORMALIZE:
            w = tl.load(w_ptrs[:, None] + slot, mask=k_mask, other=0.0) * inverse_scale
            dw = tl.load(dw_ptrs[:, None] + slot * dweights_strides[1], mask=k_mask, other=0.0)
            nearly_all, mean, rest = steps_to_mean(dw, w, NEARLY_ALL)
        if RENORMALIZE and SIGMOID:
            ids = tl.load(ids_ptr + t[:, None] * K + slot, mask=k_mask, other=0)
            p_ptrs = scores_ptr + t[:, None] * E + ids
            size = tl.sum(tl.load(p_ptrs, mask=k_mask & (ids >= 0) & (ids < E), other=0.0), 1) + EPSILON
            rest -= (nearly_all + mean) * (EPSILON / size)
        for j in range(K):
            expert = known(tl.load(ids_ptr + t * K + j, mask=t_mask, other=0), E)
            part = tl.load(dw_ptrs + j * dweights_strides[1], mask=t_mask, other=0.0)
            if RENORMALIZE:
                part = part - nearly_all - mean - rest
            if scores_ptr is None:
                part *= tl.load(w_ptrs + j, mask=t_mask, other=0.0)
            elif RENORMALIZE:
                part *= scale / size
            else:
                part *= scale
            d = tl.where(e == expert[:, None], part[:, None], d)

    if scores_ptr is not None:
        if dscores_ptr is not None:
            dp_ptrs = dscores_ptr + t[:, None] * dscores_strides[0] + e.to(tl.int64) * dscores_strides[1]
            d += tl.load(dp_ptrs, mask=mask, other=0.0)
        p = tl.load(scores_ptr + t[:, None] * E + e, mask=mask, other=0.0)
        if SIGMOID:
            d = d * p * (1 - p)
        else:
            nearly_all, mean, rest = steps_to_mean(d, p, NEARLY_ALL)
            d = p * (d - nearly_all[:, None] - mean[:, None] - rest[:, None])
    tl.store(dlogits_ptr + t[:, None] * E + e, d, mask=mask)


@triton.jit
def known(expert, E):
    """The numbers of experts, of any integer dtype, as int32; -1 for one that is none."""
    return tl.where((expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit
def steps_to_mean(d, shares, NEARLY_ALL: tl.constexpr):
    """The mean of each row of d, in three parts to subtract one after the other: see `shares_backward`."""
    nearly_all = tl.sum(tl.where(shares > NEARLY_ALL, d, 0.0), 1)
    d -= nearly_all[:, None]
    mean = tl.sum(shares * d, 1)
    return nearly_all, mean, tl.sum(shares * (d - mean[:, None]), 1)


# route_backward: launcher
def row_tile_of_k(num_tokens: int, num_experts: int, top_k: int) -> tuple[tuple[int], dict]:
    grid, tile = row_tile(num_tokens, num_experts)
    return grid, tile | {"K": top_k, "BLOCK_K": next_power_of_2(top_k), "EPSILON": EPSILON}


def new_route_backward(i: RouteBackwardInputs) -> Tensor:
    check_fields(i)
    if i.dweights is None and i.dscores is None:
        raise ValueError("there is neither dweights nor dscores")
    if (i.scores is None) != (i.renormalize and not i.sigmoid) or (
        i.scores is None and i.dscores is not None
    ):
        raise ValueError("scores belong to every mode but the renormalised softmax, which takes no dscores")
    dlogits = i.weights.new_empty(i.weights.shape[0], i.num_experts)
    for name, x, like in (
        ("expert_ids", i.expert_ids, i.weights),
        ("scores", i.scores, dlogits),
        ("dweights", i.dweights, i.weights),
        ("dscores", i.dscores, dlogits),
    ):
        if x is not None and x.shape != like.shape:
            raise ValueError(f"{name} is {tuple(x.shape)} but it needs {tuple(like.shape)}")
    return dlogits


@binds
@takes(torch.float32)
def bind_route_backward(i: RouteBackwardInputs) -> Callable:
    num_tokens, top_k = i.weights.shape
    grid, tile = row_tile_of_k(num_tokens, i.num_experts, top_k)
    kernel = bind_kernel(
        route_backward_kernel, grid, **tile,
        SIGMOID=i.sigmoid, RENORMALIZE=i.renormalize, NEARLY_ALL=NEARLY_ALL,
        enable_fp_fusion=False,  # or each lane's mean is another, and the third step can't make up for it
    )  # fmt: skip
    strides = [(0, 0) if d is None else d.stride() for d in (i.dweights, i.dscores)]
    numbers = num_tokens, i.num_experts, i.scale, inverse(i.scale), *strides

    def launch(dlogits, i):
        saved = dense(i.weights, i.expert_ids, i.scores)
        kernel(*saved, i.dweights, i.dscores, dlogits, *numbers)

    return launch


# route_backward: op
route_backward_op = define_op(
    "route_backward", RouteBackwardInputs, new=new_route_backward, torch=fill_route_backward,
    triton=bind_route_backward, host=host(fill_route_backward),
)  # fmt: skip


# route: reference
def route_reference(i: RouteInputs) -> tuple[Tensor, Tensor, Tensor]:
    scores = each_number(torch.sigmoid, i.logits) if i.sigmoid else i.logits.softmax(1)
    ranked = i.logits if i.renormalize and not i.sigmoid else scores
    if i.fixed_ids is None:
        chosen, ids = topk_reference(TopkInputs(ranked, i.top_k))
    else:
        ids = i.fixed_ids.long()
        chosen = ranked.gather(1, ids)
    scores = scores if writes_scores(i.sigmoid, i.renormalize, i.need_scores) else scores[:0]
    return scores, weigh(chosen, i.sigmoid, i.renormalize, i.scale), ids


def writes_scores(sigmoid: bool, renormalize: bool, need_scores: bool) -> bool:
    """Every mode but the renormalised softmax needs them for its own backward pass."""
    return need_scores or sigmoid or not renormalize


def weigh(chosen: Tensor, sigmoid: bool, renormalize: bool, scale: float) -> Tensor:
    """The weights of the chosen scores; of the chosen logits, where they are a softmax of these."""
    if renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + EPSILON) if sigmoid else chosen.softmax(1)
    return chosen * scale if scale != 1.0 else chosen


# route: kernel
@jit_kernel
def route_kernel(
    logits_ptr,  # (T, E)
    scores_ptr,  # (T, E) or None
    weights_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    fixed_ids_ptr,  # (T, K) or None
    T, E, scale,
    logits_strides,  # t, e
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, IN_PAIRS: tl.constexpr, EPSILON: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    OF_LOGITS: tl.constexpr = RENORMALIZE and not SIGMOID
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    e, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)[None, :]
    mask = (t < T) & (e < E)[None, :]
    z_ptrs = logits_ptr + t * logits_strides[0] + e.to(tl.int64)[None, :] * logits_strides[1]
    z = tl.load(z_ptrs, mask=mask, other=float("-inf"))
    ranked = z
    if scores_ptr is not None:
        p = tl.sigmoid(z) if SIGMOID else softmax(z, IN_PAIRS)
        tl.store(scores_ptr + t * E + e[None, :], p, mask=mask)
        ranked = z if OF_LOGITS else p

    key = tl.where(mask, to_key(ranked), NO_KEY)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    keys = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in range(K):
        if fixed_ids_ptr is None:
            best, expert, key = take_highest(key, e, BLOCK_E)
        else:
            expert = known(tl.load(fixed_ids_ptr + t * K + j, mask=t < T, other=0).reshape(BLOCK_T), E)
            best = take_expert(key, e, expert)
        ids = tl.where(slot == j, expert[:, None], ids)
        keys = tl.where(slot == j, best[:, None], keys)
    used = (slot < K) & (ids >= 0)
    chosen = weigh_in_row(keys, used, SIGMOID, RENORMALIZE, IN_PAIRS, EPSILON)
    mask = (t < T) & (slot < K)
    tl.store(weights_ptr + t * K + slot, chosen * scale, mask=mask)
    tl.store(ids_ptr + t * K + slot, ids.to(tl.int64), mask=mask)


@triton.jit
def weigh_in_row(
    keys, used, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, IN_PAIRS: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """The weights, but for the scale, of the experts of each row whose scores or logits have these keys."""
    OF_LOGITS: tl.constexpr = RENORMALIZE and not SIGMOID
    NOTHING: tl.constexpr = float("-inf") if OF_LOGITS else 0.0  # adds nothing to a sum
    chosen = tl.where(used, from_key(keys), NOTHING)
    if OF_LOGITS:
        chosen = softmax(chosen, IN_PAIRS)
    elif RENORMALIZE:
        chosen = chosen / (row_sum(chosen, IN_PAIRS)[:, None] + EPSILON)
    return chosen


@triton.jit
def softmax(z, IN_PAIRS: tl.constexpr):
    """The softmax of each row.  A row with a NaN or +inf, or of -inf alone, becomes NaN."""
    p = tl.exp(z - tl.max(z, 1)[:, None])
    return p * (1 / row_sum(p, IN_PAIRS))[:, None]


@triton.jit
def row_sum(x, IN_PAIRS: tl.constexpr):
    """The sum of each row of x.  With IN_PAIRS neighbours are added up, then neighbouring sums, and so on:
    otherwise the order depends on the layout of x, and so on its number of rows."""
    if not IN_PAIRS:
        return tl.sum(x, 1)
    elif x.shape[1] == 1:
        return tl.reshape(x, (x.shape[0],))
    else:
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        return row_sum(left + right, IN_PAIRS)


# route: launcher
def new_route(i: RouteInputs) -> tuple[Tensor, Tensor, Tensor]:
    check_fields(i)
    if i.logits.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logits must be float32 or float64, not {i.logits.dtype}")
    check_finite(scale=i.scale)
    (num_tokens, num_experts), top_k = i.logits.shape, i.top_k
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k} but logits is (T, E={num_experts}); top_k must be from 1 to E")
    if i.fixed_ids is not None:
        check_whole_shape("fixed_ids", i.fixed_ids, (num_tokens, top_k))
    written = num_tokens if writes_scores(i.sigmoid, i.renormalize, i.need_scores) else 0
    scores, weights = i.logits.new_empty(written, num_experts), i.logits.new_empty(num_tokens, top_k)
    return scores, weights, i.logits.new_empty(num_tokens, top_k, dtype=torch.int64)


@binds
@takes(torch.float32)
def bind_route(i: RouteInputs) -> Callable:
    grid, tile = row_tile_of_k(*i.logits.shape, i.top_k)
    how = {"SIGMOID": i.sigmoid, "RENORMALIZE": i.renormalize, "IN_PAIRS": batch_invariant()}
    kernel = bind_kernel(route_kernel, grid, **how, **tile)
    numbers = *i.logits.shape, i.scale, i.logits.stride()

    def launch(out, i):
        scores, weights, ids = out
        fixed_ids = None if i.fixed_ids is None else i.fixed_ids.contiguous()
        kernel(i.logits, scores if scores.numel() else None, weights, ids, fixed_ids, *numbers)

    return launch


@takes(torch.float32)
def launch_route_host(out: tuple[Tensor, Tensor, Tensor], i: RouteInputs) -> None:
    """torch's scores, and the extension's choice."""
    scores, weights, ids = out
    if i.sigmoid:
        scores.copy_(each_number(torch.sigmoid, i.logits))
    elif scores.numel():
        torch.softmax(i.logits, 1, out=scores)
    ranked = i.logits if i.renormalize and not i.sigmoid else scores
    if i.fixed_ids is None:
        ext.topk(*map(array, (ranked, weights, ids)), num_threads())
    else:
        torch.gather(ranked, 1, ids.copy_(i.fixed_ids), out=weights)
    weights.copy_(weigh(weights, i.sigmoid, i.renormalize, i.scale))


def check_fixed_ids(i: RouteInputs) -> None:
    ids, num_experts = i.fixed_ids, i.logits.shape[1]
    if ids is not None and ((ids < 0) | (ids >= num_experts)).any():
        raise ValueError(f"fixed_ids holds {ids.min()} to {ids.max()} but num_experts is {num_experts}")


# route: op
def save_route(ctx, i, output):
    scores, weights, ids = output
    ctx.inputs, ctx.num_experts, ctx.how = type(i), i.logits.shape[1], (i.sigmoid, i.renormalize, i.scale)
    if i.renormalize and not i.sigmoid:
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
    return gradients(ctx.inputs, logits=dlogits)


class SoftmaxScores(torch.autograd.Function):
    """Scores that are known to be the softmax of these logits, with that gradient."""

    @staticmethod
    def forward(ctx, logits, scores):
        ctx.save_for_backward(scores)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, dscores):
        (scores,) = ctx.saved_tensors
        return softmax_gradient(dscores, scores, 1, scores.dtype), None


def needs_own_gradient() -> bool:
    """Whether scores need torch's gradient: torch.func knows no other, torch.export drops ours."""
    return is_exporting() or (not torch.compiler.is_compiling() and is_transformed())


route_op = define_op(
    "route", RouteInputs, outputs=3, new=new_route, check_values=check_fixed_ids, reference=route_reference,
    triton=bind_route, host=host(launch_route_host), save=save_route, backward=backward_route,
)  # fmt: skip


def for_graphs(impl: Callable) -> Callable:
    """Return an implementation of `route` as one of `route_once`, for a compiled graph.

    Nothing but its ops runs in one, so the op has to see for itself whether it is a repetition.
    """

    @binds
    @functools.wraps(impl)  # and what it takes
    def bind(i: RouteOnceInputs) -> Callable:
        first, repeated = (bound(impl, RouteInputs(*i)) for _ in range(2))

        def launch(out, i):
            here, ids = current_pass(), out[-1]
            recorded = here.recall("experts", *ids.shape)
            (first if recorded is None else repeated)(out, RouteInputs(*i, recorded))
            here.keep("experts", ids, i.logits.shape[1])

        return launch

    return bind


route_once_op = define_op(
    "route_once", RouteOnceInputs, outputs=3, new=lambda i: new_route(RouteInputs(*i)), save=save_route,
    backward=backward_route, **{backend: for_graphs(impl) for backend, impl in IMPLS["route"].items()},
)  # fmt: skip
always_save(f"{NAMESPACE}::route_once")


# route: public
def choose_experts(
    logits: Tensor, top_k: int, *, sigmoid: bool = False, renormalize: bool = True, scale: float = 1.0,
    need_scores: bool = True, fixed_ids: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Scores (T, E), weights (T, k) and experts (T, k) int64, the best first, for `logits` (T, E).

    The floats are float32, float64 for float64 logits.  Differentiable once in `logits`: float16, bfloat16,
    float32 or float64, with any strides.  NaN is chosen first; the experts of a row are distinct and within
    [0, E) whatever the logits are.  A renormalised softmax without `need_scores` gives None for them.
    `fixed_ids` (T, k), of any integer dtype and within [0, E), are taken instead of the highest experts.  On
    a GPU another number becomes -1, of weight 0; with MOE_AITER_DEBUG=1 and on a CPU it raises an error.
    Raises ValueError unless `logits` has two axes and 1 <= top_k <= E, TypeError for another dtype.
    """
    check_float(logits=logits)
    logits = wide(logits)
    how = top_k, sigmoid, renormalize, scale, need_scores
    if torch.compiler.is_compiling() and fixed_ids is None:
        scores, weights, ids = route_once_op(logits, *how)
    else:
        scores, weights, ids = route_op(logits, *how, fixed_ids)
    if not writes_scores(sigmoid, renormalize, need_scores):
        scores = None
    elif renormalize and not sigmoid and needs_own_gradient():
        scores = logits.softmax(1)
    elif renormalize and not sigmoid:
        scores = SoftmaxScores.apply(logits, scores)
    return scores, weights, ids


# decide: reference
def decide_reference(i: DecideInputs) -> Tensor:
    here = current_pass()
    decision = here.recall(i.what, *i.made.shape)
    decision = i.made if decision is None else decision
    here.keep(i.what, decision, i.below)
    return decision


# decide: op
def new_decision(i: DecideInputs) -> Tensor:
    if i.made.dtype != torch.int64:
        raise TypeError(f"a decision must be int64, not {i.made.dtype}")
    return torch.empty_like(i.made)


decide_op = define_op("decide", DecideInputs, new=new_decision, reference=decide_reference)
always_save(f"{NAMESPACE}::decide")


# decide: public
def decide(what: str, make: Callable[[], Tensor], rows: int, below: int = 2**63 - 1) -> Tensor:
    """`make()` (rows, ...) int64, or what it gave when activation checkpointing ran this forward pass first.

    `what` tells decisions of one kind from those of another; each is below `below`, which saves memory.
    """
    if torch.compiler.is_compiling():
        return decide_op(make(), what, below)
    here = current_pass()
    decision = here.recall(what, rows)
    decision = make() if decision is None else decision.long()
    here.keep(what, decision, below)
    return decision
