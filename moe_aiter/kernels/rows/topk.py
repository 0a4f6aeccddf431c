"""Top-k of each row, with ties decided: the higher score first, then the lower expert.

    values[t, j] = scores[t, ids[t, j]],  ids[t] = the first k of a stable descending sort of scores[t]

torch.topk leaves the order of equal scores open, so a router built on it is not reproducible across
devices.  NaN sorts first, as in torch.topk, so a row of NaN still yields k distinct experts.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import binds, define_op, gradients, takes
from ..base.check import Operand, check_fields, wide
from ..base.host import HOST_DTYPES, array, ext, host, num_threads
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton

NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above the key of +inf
NO_KEY = tl.constexpr(-(2**31))  # below the key of -inf: a column past E, or one already taken


class TopkInputs(NamedTuple):
    """The inputs of the op `topk`: values and experts (T, k) of the k highest scores of each row."""

    scores: Annotated[Operand, "T, E"]
    k: int


# reference
def topk_reference(i: TopkInputs) -> tuple[Tensor, Tensor]:
    scores, nan = i.scores, i.scores.isnan()
    ids = wide(scores).masked_fill(nan, float("inf")).sort(dim=1, descending=True, stable=True).indices
    # CUDA's sort of what was bfloat16 does not put NaN first, so a second stable sort does
    last = nan.gather(1, ids).logical_not().byte().sort(dim=1, stable=True).indices
    ids = ids.gather(1, last)[:, : i.k]
    return scores.gather(1, ids), ids


# kernel
@triton.jit
def to_key(x):
    """float32 -> an int32 that orders the same, with NaN above all; -0 ties with 0."""
    # a float is a sign and a magnitude
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits))


@triton.jit
def from_key(key):
    """The float32 that has this key, but for the sign of zero."""
    return tl.where(key < 0, NO_KEY - key, key).to(tl.float32, bitcast=True)


@triton.jit
def take_highest(key, e, BLOCK_E: tl.constexpr):
    """Return each row's highest key, the lowest expert with this key, and the keys without that expert's.

    Two reductions of 32 bits: on NVIDIA each is one instruction of a warp, unlike one of 64 bits.
    """
    best = tl.max(key, 1)
    expert = tl.min(tl.where(key == best[:, None], e[None, :], BLOCK_E), 1)
    return best, expert, tl.where(e[None, :] == expert[:, None], NO_KEY, key)


@triton.jit
def take_expert(key, e, expert):
    """Return the key of one expert in each row."""
    return tl.max(tl.where(e[None, :] == expert[:, None], key, NO_KEY), 1)


@jit_kernel
def topk_kernel(
    scores_ptr,  # (T, E)
    values_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    T, E, scores_stride_t, scores_stride_e, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    t_mask = t < T
    row_ptrs = scores_ptr + t * scores_stride_t
    mask = t_mask[:, None] & (e < E)[None, :]
    x_ptrs = row_ptrs[:, None] + e.to(tl.int64)[None, :] * scores_stride_e
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    key = tl.where(mask, to_key(x), NO_KEY)
    for j in range(K):
        _, expert, key = take_highest(key, e, BLOCK_E)
        # the value is read again, for its own bits: the key has lost the sign of zero
        value = tl.load(row_ptrs + expert.to(tl.int64) * scores_stride_e, mask=t_mask, other=0.0)
        tl.store(values_ptr + t * K + j, value, mask=t_mask)
        tl.store(ids_ptr + t * K + j, expert.to(tl.int64), mask=t_mask)


# launcher
def new_topk(i: TopkInputs) -> tuple[Tensor, Tensor]:
    check_fields(i)
    (num_tokens, num_experts), k = i.scores.shape, i.k
    if not 1 <= k <= num_experts:
        raise ValueError(f"k is {k} but scores is (T, E={num_experts}); k must be from 1 to E")
    return i.scores.new_empty(num_tokens, k), i.scores.new_empty(num_tokens, k, dtype=torch.int64)


def row_tile(num_tokens: int, num_experts: int) -> tuple[tuple[int], dict]:
    """The grid of a kernel that works on whole rows, and the launch arguments that say a program's share."""
    block_e = next_power_of_2(num_experts)
    # a warp holds 512 elements: 16 in each lane
    block_t = max(1, min(16, 2048 // block_e))
    num_warps = min(16, max(1, block_t * block_e // 512))
    grid = (cdiv(num_tokens, block_t),)
    return grid, {"BLOCK_T": block_t, "BLOCK_E": block_e, "num_warps": num_warps}


@binds
@takes(torch.float32, torch.bfloat16, torch.float16)
def bind_topk(i: TopkInputs) -> Callable:
    grid, tile = row_tile(*i.scores.shape)
    kernel = bind_kernel(topk_kernel, grid, K=i.k, **tile)
    numbers = *i.scores.shape, *i.scores.stride()
    return lambda out, i: kernel(i.scores, *out, *numbers)


@takes(*HOST_DTYPES)
def launch_topk_host(out: tuple[Tensor, Tensor], i: TopkInputs) -> None:
    ext.topk(*map(array, (i.scores, *out)), num_threads())


# op
def save_topk(ctx, i, output):
    ctx.num_experts = i.scores.shape[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def backward_topk(ctx, dvalues, dids):
    dscores = None
    if dvalues is not None:
        (ids,) = ctx.saved_tensors
        # the experts of a row are distinct, so this writes each element once: no order to depend on
        dscores = dvalues.new_zeros(ids.shape[0], ctx.num_experts).scatter(1, ids, dvalues)
    return gradients(TopkInputs, scores=dscores)


topk_op = define_op(
    "topk", TopkInputs, outputs=2, new=new_topk, reference=topk_reference, triton=bind_topk,
    host=host(launch_topk_host), save=save_topk, backward=backward_topk,
)  # fmt: skip


# public
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` highest of each row of `scores` (T, E): values (T, k), and their experts (T, k) int64.

    Values have the dtype of `scores` and are sorted from high to low.  Equal scores (0 and -0 are equal) go
    to the lower expert first; NaN is above everything.  The experts of a row are distinct and within [0, E)
    whatever the scores are.  Differentiable in `scores`: float16, bfloat16, float32 or float64, with any
    strides.
    Raises ValueError unless `scores` has two axes and 1 <= k <= E, TypeError for another dtype.
    """
    return topk_op(scores, k)
