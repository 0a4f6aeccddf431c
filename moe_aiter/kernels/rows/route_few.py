"""Route few tokens and sort their choices in one launch, without gradients.

    scores    p = softmax(z) over E, or sigmoid(z)
    chosen    the k highest of p, or of p + selection_bias; the lower expert first among equals
    weights   those of `route`
    plan      order, rank and group_sizes of `sort_by_expert`

`route`, `topk` and `sort_by_expert` need two to five launches for this, each of which takes longer than the
work for a few tokens.  Here one program has all of it in registers.  The formulas are those of `route`, and
so are the bits, but where the layouts of the tiles differ: then the terms of a sum are added up in another
order, which rounds weights and the scores of a softmax otherwise.  Under batch invariance, both kernels add
up pairs, in one order for any layout.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ...invariance import batch_invariant
from ...op import IMPLS, binds, define_op, forced, pick, takes
from ..base.check import check_size
from ..base.fixed_rows import each_number
from ..base.gemm_row import LONGEST as LONGEST_ROW
from ..base.gemm_row import GemmInputs, bind_one_row
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl
from ..base.tile import in_units, unit_of
from .route import EPSILON, RouteInputs, new_route, route_reference, softmax, weigh_in_row
from .sort import SortInputs, new_sort, sort_reference
from .topk import NO_KEY, TopkInputs, take_expert, take_highest, to_key, topk_reference

MOST_SCORES = 8192  # that a program has in its registers
MOST_CHOICES = 128  # each pair of which it compares
MOST_TOKENS = 8
AT_ONCE = 4096  # numbers of a row of the router's weight that a program loads


class RouteFewInputs(NamedTuple):
    """The inputs of the op `route_few`: the weights and numbers of the chosen experts, and their plan."""

    logits: Annotated[Tensor, "T, E"]
    selection_bias: Tensor | None  # (E,) float32, for sigmoids
    top_k: int
    sigmoid: bool
    renormalize: bool
    scale: float

    def route(self) -> RouteInputs:
        return RouteInputs(self.logits, self.top_k, self.sigmoid, self.renormalize, self.scale, False)


# reference
def route_few_reference(i: RouteFewInputs) -> tuple[Tensor, ...]:
    inputs = i.route()
    if i.selection_bias is not None:
        ranked = each_number(torch.sigmoid, i.logits) + i.selection_bias
        inputs = inputs._replace(fixed_ids=topk_reference(TopkInputs(ranked, i.top_k))[1])
    _, weights, ids = route_reference(inputs)
    return weights, ids, *sort_reference(SortInputs(ids, i.logits.shape[1]))


# kernel
@jit_kernel
def route_few_kernel(
    logits_ptr,  # (T, E)
    bias_ptr,  # (E,) or None
    weights_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    order_ptr,  # (T * K,)
    rank_ptr,  # (T, K)
    group_sizes_ptr,  # (E,)
    T, E, scale,
    logits_strides,  # t, e
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, IN_PAIRS: tl.constexpr, EPSILON: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t, e = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)[None, :]
    mask = (t < T) & (e < E)[None, :]
    z_ptrs = logits_ptr + t.to(tl.int64) * logits_strides[0] + e.to(tl.int64)[None, :] * logits_strides[1]
    p = tl.load(z_ptrs, mask=mask, other=float("-inf"))
    if SIGMOID:
        p = tl.sigmoid(p)
    elif not RENORMALIZE:
        p = softmax(p, IN_PAIRS)
    key = tl.where(mask, to_key(p), NO_KEY)
    left = key
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
        left = tl.where(mask, to_key(p + bias), NO_KEY)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    keys = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for j in range(K):
        best, expert, left = take_highest(left, e, BLOCK_E)
        if bias_ptr is not None:
            best = take_expert(key, e, expert)
        ids = tl.where(slot == j, expert[:, None], ids)
        keys = tl.where(slot == j, best[:, None], keys)
    weights = weigh_in_row(keys, slot < K, SIGMOID, RENORMALIZE, IN_PAIRS, EPSILON)
    live = (t < T) & (slot < K)
    tl.store(weights_ptr + t * K + slot, weights * scale, mask=live)
    tl.store(ids_ptr + t * K + slot, ids.to(tl.int64), mask=live)
    taken = mask & (left == NO_KEY)  # which no score that is there has as its key
    tl.store(group_sizes_ptr + e, tl.sum(taken.to(tl.int32), 0), mask=e < E)

    # a choice has as many rows before it as there are choices of lower experts, or earlier ones of its own
    CHOICES: tl.constexpr = BLOCK_T * BLOCK_K
    c = tl.arange(0, CHOICES)
    place = tl.reshape(tl.where(live, ids, BLOCK_E), (CHOICES,)) * CHOICES + c
    rank = tl.sum((place[None, :] < place[:, None]).to(tl.int32), 1)
    choice, live = c // BLOCK_K * K + c % BLOCK_K, (c // BLOCK_K < T) & (c % BLOCK_K < K)
    tl.store(rank_ptr + choice, rank, mask=live)
    tl.store(order_ptr + rank, choice, mask=live)


# launcher
def new_route_few(i: RouteFewInputs) -> tuple[Tensor, ...]:
    _, weights, ids = new_route(i.route())
    if i.selection_bias is not None:
        if not i.sigmoid:
            raise ValueError("selection_bias is for sigmoids, but the scores are a softmax")
        check_size(
            "logits is (T, E={})", i.logits.shape[1], "selection_bias is (E={},)", len(i.selection_bias)
        )
    return weights, ids, *new_sort(SortInputs(ids, i.logits.shape[1]))


def fits_program(i: RouteFewInputs) -> bool:
    """Whether the registers of one program have room for all scores and choices."""
    (T, E), top_k = i.logits.shape, i.top_k
    blocks = next_power_of_2(T), next_power_of_2(E), next_power_of_2(top_k)
    return blocks[0] * blocks[1] <= MOST_SCORES and blocks[0] * blocks[2] <= MOST_CHOICES


@binds
@takes(torch.float32)
def bind_route_few(i: RouteFewInputs) -> Callable:
    (T, E), top_k = i.logits.shape, i.top_k
    block_t, block_e, block_k = map(next_power_of_2, (T, E, top_k))
    numbers = max(block_t * block_e, (block_t * block_k) ** 2 // 4)
    how = {"SIGMOID": i.sigmoid, "RENORMALIZE": i.renormalize, "IN_PAIRS": batch_invariant()}
    kernel = bind_kernel(
        route_few_kernel, (1,), **how, EPSILON=EPSILON, K=top_k, BLOCK_K=block_k, BLOCK_T=block_t,
        BLOCK_E=block_e, num_warps=min(8, max(1, numbers // 512)),
    )  # fmt: skip
    numbers = T, E, i.scale, i.logits.stride()

    def launch(out, i):
        bias = None if i.selection_bias is None else i.selection_bias.contiguous()
        kernel(i.logits, bias, *out, *numbers)

    return launch


bind_route_few.fits = fits_program


# op
route_few_op = define_op(
    "route_few", RouteFewInputs, outputs=5, new=new_route_few, reference=route_few_reference,
    triton=bind_route_few,
)  # fmt: skip

REPLACED = "route", "topk", "sort_by_expert"  # the ops whose kernels it takes the place of


def route_impls() -> set[Callable]:
    return {impl for op in REPLACED for impl in IMPLS[op].values()}


OURS = route_impls()


def takes_few(i: RouteFewInputs) -> bool:
    """Whether one launch routes so few tokens, and no one has registered another kernel for the ops it does
    the work of."""
    few = 0 < i.logits.shape[0] <= MOST_TOKENS and fits_program(i) and forced() != "host"
    return few and pick("route_few", i) is bind_route_few and route_impls() == OURS


# logits
def takes_few_logits(i) -> bool:
    """Whether programs of one number each compute the logits of x (T, H) by a router's weight (E, H)."""
    (T, K), E = i.x.shape, i.weight.shape[0]
    few = i.x.is_cuda and 0 < T <= MOST_TOKENS and 0 < K < LONGEST_ROW and T * E <= MOST_SCORES
    return few and i.x.itemsize <= 4 and i.weight.itemsize <= 4 and i.x.stride(1) == 1 == i.weight.stride(1)


def bind_few_logits(i) -> Callable:
    """Return `launch(logits, i)` for what `takes_few_logits` lets through, summed up in float32.

    It is a product of one row for each token, all by one matrix.
    """
    block_k = min(next_power_of_2(i.x.shape[1]), AT_ONCE)
    tile = tuning.Config(1, 1, block_k, num_warps=max(1, block_k // 512))

    def inputs(i) -> GemmInputs:
        w = i.weight.T.expand(len(i.x), -1, -1)
        return GemmInputs(i.x[:, None], w, i.bias, None, "", 1.0, 0.0, torch.float32, False)

    product = bind_one_row(inputs(i), tile)
    return lambda out, i: product((out[:, None], None), inputs(i))


# logits by parts
SPLIT_ROWS = 256  # up to which one launch takes less time than the launches of parts
SPLIT_TILE = {"BLOCK": 16, "BLOCK_K": 128, "num_warps": 2, "num_stages": 4}


@jit_kernel
def split_logits_kernel(
    x_ptr,  # (T, K) bfloat16
    weight_ptr,  # (E, K) float32
    out_ptr,  # (T, E)
    T, E, K,
    x_strides,  # t, k
    weight_strides,  # e, k
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A float32 weight as the sum of three parts of bfloat16, each multiplied by tensor cores."""
    K, x_strides, weight_strides = in_units((K, x_strides, weight_strides), UNIT)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    weight_rows = tl.minimum(e, E - 1).to(tl.int64) * weight_strides[0]  # past the end: never stored
    x_rows = tl.minimum(t, T - 1).to(tl.int64) * x_strides[0]
    weight_ptrs = weight_ptr + weight_rows[:, None] + (k.to(tl.int64) * weight_strides[1])[None, :]
    x_ptrs = x_ptr + x_rows[None, :] + (k.to(tl.int64) * x_strides[1])[:, None]
    high = tl.zeros((BLOCK, BLOCK), tl.float32)
    middle, low = high, high
    for first in range(0, K, BLOCK_K):
        mask = k < K - first
        w = tl.load(weight_ptrs, mask=mask[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=mask[:, None], other=0.0)
        part = w.to(tl.bfloat16)
        high = tl.dot(part, x, high)
        w -= part.to(tl.float32)
        part = w.to(tl.bfloat16)
        middle = tl.dot(part, x, middle)
        w -= part.to(tl.float32)
        low = tl.dot(w.to(tl.bfloat16), x, low)
        weight_ptrs += BLOCK_K * weight_strides[1]
        x_ptrs += BLOCK_K * x_strides[1]
    out_ptrs = out_ptr + t.to(tl.int64)[None, :] * E + e[:, None]
    tl.store(out_ptrs, high + (middle + low), mask=(t < T)[None, :] & (e < E)[:, None])


def takes_split_logits(i) -> bool:
    """Whether this multiplies some rows by a float32 weight in three parts, with the bits of three products:
    of Triton's, where all matrix instructions add up in one order."""
    some = i.x.is_cuda and 0 < i.x.shape[0] <= SPLIT_ROWS and i.weight.numel() > 0
    return some and forced() not in ("host", "torch") and tuning.has_one_order()


def bind_split_logits(i) -> Callable:
    """Return `launch(logits, i)` for what `takes_split_logits` lets through, without the bias."""
    (T, K), E, block = i.x.shape, i.weight.shape[0], SPLIT_TILE["BLOCK"]
    unit = unit_of((K,), i.x.stride(), i.weight.stride())
    kernel = bind_kernel(split_logits_kernel, (cdiv(E, block), cdiv(T, block)), UNIT=unit, **SPLIT_TILE)
    numbers = T, E, K, i.x.stride(), i.weight.stride()
    return lambda out, i: kernel(i.x, i.weight, out, *numbers)
