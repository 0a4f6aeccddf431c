"""Top-k of each row, with ties decided: the higher score first, then the lower expert.

    values[t, j] = scores[t, ids[t, j]],  ids[t] = the first k of a stable descending sort of scores[t]

torch.topk leaves the order of equal scores open, so a router built on it is not reproducible across
devices.  NaN sorts first, as in torch.topk, so a row of NaN still yields k distinct experts.
"""

import torch
from torch import Tensor

from ..backend import define_op, takes
from ._check import check_float, check_shape
from ._groups import wide
from ._host import HOST_DTYPES, array, ext, host, num_threads
from ._triton import tl, triton

NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above the key of +inf
NO_KEY = tl.constexpr(-(2**63))  # below the key of -inf: a column past E, or one already taken


# reference
def topk_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    nan = scores.isnan()
    ids = wide(scores).masked_fill(nan, float("inf")).sort(dim=1, descending=True, stable=True).indices
    # CUDA's sort of what was bfloat16 does not put NaN first, so a second stable sort does
    last = nan.gather(1, ids).logical_not().byte().sort(dim=1, stable=True).indices
    ids = ids.gather(1, last)[:, :k]
    return scores.gather(1, ids), ids


# kernel
@triton.jit
def topk_kernel(
    scores_ptr,  # (T, E)
    values_ptr,  # (T, K)
    ids_ptr,  # (T, K) int64
    T,
    E,
    scores_stride_t,
    scores_stride_e,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    t_mask = t < T
    row_ptrs = scores_ptr + t * scores_stride_t
    mask = t_mask[:, None] & (e < E)[None, :]
    x_ptrs = row_ptrs[:, None] + e.to(tl.int64)[None, :] * scores_stride_e
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)

    # a float is a sign and a magnitude; as an int32 it orders the same, and -0 ties with 0
    bits = x.to(tl.int32, bitcast=True)
    image = tl.where(x != x, NAN_KEY, tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    key = (image.to(tl.int64) << 32) | (E - 1 - e).to(tl.int64)[None, :]
    key = tl.where(mask, key, NO_KEY)

    for j in range(K):
        best = tl.max(key, 1)
        expert = E - 1 - (best & 0xFFFFFFFF)
        # the value is read again, for its own bits: the key has lost the sign of zero
        value = tl.load(row_ptrs + expert * scores_stride_e, mask=t_mask, other=0.0)
        tl.store(values_ptr + t * K + j, value, mask=t_mask)
        tl.store(ids_ptr + t * K + j, expert, mask=t_mask)
        key = tl.where(key == best[:, None], NO_KEY, key)


# launcher
def new_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_shape("scores", scores, "T", "E")
    check_float(scores=scores)
    num_tokens, num_experts = scores.shape
    if not 1 <= k <= num_experts:
        raise ValueError(f"k is {k} but scores is (T, E={num_experts}); k must be from 1 to E")
    return scores.new_empty(num_tokens, k), scores.new_empty(num_tokens, k, dtype=torch.int64)


@takes(torch.float32, torch.bfloat16, torch.float16)
def launch_topk(out: tuple[Tensor, Tensor], scores: Tensor, k: int) -> None:
    values, ids = out
    num_tokens, num_experts = scores.shape
    block_e = triton.next_power_of_2(num_experts)
    # a warp holds 512 keys: 16 in each lane
    block_t = max(1, min(16, 2048 // block_e))
    num_warps = min(16, max(1, block_t * block_e // 512))
    topk_kernel[(triton.cdiv(num_tokens, block_t),)](
        scores, values, ids, num_tokens, num_experts, *scores.stride(),
        K=k, BLOCK_T=block_t, BLOCK_E=block_e, num_warps=num_warps,
    )  # fmt: skip


@takes(*HOST_DTYPES)
def launch_topk_host(out: tuple[Tensor, Tensor], scores: Tensor, k: int) -> None:
    ext.topk(*map(array, (scores, *out)), num_threads())


# op
def save_topk(ctx, inputs, output):
    scores, _ = inputs
    ctx.num_experts = scores.shape[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def backward_topk(ctx, dvalues, dids):
    if dvalues is None:
        return None, None
    (ids,) = ctx.saved_tensors
    # the experts of a row are distinct, so this writes each element once: no order to depend on
    dscores = dvalues.new_zeros(ids.shape[0], ctx.num_experts).scatter(1, ids, dvalues)
    return dscores, None


topk_op = define_op(
    "topk(Tensor scores, int k) -> (Tensor, Tensor)",
    new=new_topk,
    reference=topk_reference,
    triton=launch_topk,
    host=host(launch_topk_host),
    save=save_topk,
    backward=backward_topk,
)


# public
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` highest of each row of `scores` (T, E): values (T, k) in its dtype, and experts (T, k) int64.

    Sorted from high to low; equal scores (0 and -0 are equal) by the lower expert first; NaN above
    everything.  The experts of a row are distinct and within [0, E) whatever the scores are.
    Differentiable in `scores`: float16, bfloat16, float32 or float64, with any strides.
    Raises ValueError unless `scores` has two axes and 1 <= k <= E, TypeError for another dtype.
    """
    return topk_op(scores, k)
