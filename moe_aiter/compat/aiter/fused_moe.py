"""AITER's `aiter.fused_moe`: its `fused_moe` and `moe_sorting`, over `expert_mlp` and `make_plan`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.base.activations import swiglu_limit
from ...kernels.base.check import (
    FLOATS,
    check_device,
    check_flags,
    check_floating,
    check_index,
    check_shape,
    check_size,
    check_sizes,
    check_tensor,
    check_whole_shape,
    renamed,
)
from ...kernels.experts.mlp import expert_mlp
from ...routing import make_plan
from .ops.enum import ActivationType, QuantType

__all__ = ["fused_moe", "moe_sorting"]

BLOCK_SIZE_M = 32
SLOT = 24  # bits of a token's number in `sorted_ids`; the choice is above them
GATED = {ActivationType.Silu: "swiglu", ActivationType.Gelu: "geglu"}
PLAIN = {ActivationType.Silu: "silu", ActivationType.Gelu: "gelu"}


class FusedMoE(NamedTuple):
    """AITER's arguments of `fused_moe`, in its order."""

    hidden_states: Tensor
    w1: Tensor
    w2: Tensor
    topk_weight: Tensor
    topk_ids: Tensor
    expert_mask: Tensor | None = None
    activation: ActivationType = ActivationType.Silu
    quant_type: QuantType = QuantType.No
    doweight_stage1: bool = False
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    block_size_M: int | None = None
    num_local_tokens: Tensor | None = None
    moe_sorting_dispatch_policy: int = 0
    dtype: torch.dtype | None = None
    hidden_pad: int = 0
    intermediate_pad: int = 0
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    splitk: int = 0
    swiglu_limit: float | None = None
    beta: float | None = None
    linear_beta: float | None = None
    gate_mode: str | None = "separated"
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_w1_scale: Tensor | None = None
    shared_w2_scale: Tensor | None = None
    shared_expert_id: int = -1
    stage2_scatter: object = None


class MoESorting(NamedTuple):
    """AITER's arguments of `moe_sorting`, in its order."""

    topk_ids: Tensor
    topk_weights: Tensor
    num_experts: int
    model_dim: int
    moebuf_dtype: torch.dtype
    block_size: int = BLOCK_SIZE_M
    expert_mask: Tensor | None = None
    num_local_tokens: Tensor | None = None
    dispatch_policy: int = 0
    return_local_topk_ids: bool = False
    accumulate: bool = True
    flat: bool = False
    output_aux: bool = False


def takes(arguments: type) -> Callable:
    """Let a function of one tuple be called with its fields as arguments, by position or by name."""

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return fn(arguments(*args, **kwargs))

        run.__signature__ = inspect.signature(arguments)
        return run

    return wrap


def check_defaults(i: tuple, *names: str) -> None:
    """Raise NotImplementedError if one of these arguments is not AITER's default."""
    for name in names:
        given, default = getattr(i, name), inspect.signature(type(i)).parameters[name].default
        if isinstance(given, Tensor) or given != default:
            found = "a tensor" if isinstance(given, Tensor) else repr(given)
            raise NotImplementedError(f"{name} is {found}, but moe_aiter computes only {name}={default!r}")


@renamed(
    x="hidden_states", gate_up="w1", down="w2", routing_weights="topk_weight", gate_up_bias="bias1",
    down_bias="bias2", expert_ids="topk_ids", gate_max="swiglu_limit",
)  # fmt: skip
@takes(FusedMoE)
def fused_moe(i: FusedMoE) -> Tensor:
    """Send each token through its experts and return the weighted sum of their outputs, (T, H).

    hidden_states: (T, H), w1: (E, 2I, H), gate rows first, or (E, I, H) without a gate, w2: (E, H, I), of one
        floating dtype and any strides; not shuffled.
    topk_weight: (T, k), floating.  topk_ids: (T, k), int32 or int64; a negative id drops the choice.
    expert_mask: (E_global,), int32 or int64, not 0 for the experts whose weights are here, in order;
        `topk_ids` then count all experts, and those of others add nothing.
    activation: Silu; Gelu, exact; Swiglu, that of gpt-oss, with a gate.
    doweight_stage1: multiply the first product by `topk_weight`, not the output.
    num_local_tokens: (1,), int32 or int64, on the device; from this token on, rows of the result are zeros.
    dtype: of the result, that of `hidden_states` unless given.
    bias1: (E, 2I or I), bias2: (E, H), floating.
    swiglu_limit: clamps gate and up of Silu; of Swiglu too, whose limit is 7 unless given.

    Differentiable.  `block_size_M`, `moe_sorting_dispatch_policy` and `splitk` are hints for AITER's kernels
    and have no effect here.  Raises NotImplementedError for each other argument that is not AITER's default,
    for shuffled weights and for other activations, ValueError for shapes and devices, TypeError for dtypes.
    """
    check_defaults(i, "quant_type", "w1_scale", "w2_scale", "a1_scale", "a2_scale", "hidden_pad")
    check_defaults(i, "intermediate_pad", "beta", "linear_beta", "gate_mode", "shared_w1", "shared_w2")
    check_defaults(i, "shared_w1_scale", "shared_w2_scale", "shared_expert_id", "stage2_scatter")
    check_flags(doweight_stage1=i.doweight_stage1)
    check_shape("hidden_states", i.hidden_states, "T", "H")
    dtype = i.hidden_states.dtype if i.dtype is None else i.dtype
    check_dtype(dtype=dtype)
    check_shape("w1", i.w1, "E", "2I or I", "H")
    check_shape("w2", i.w2, "E", "H", "I")
    for name, w in (("w1", i.w1), ("w2", i.w2)):
        if getattr(w, "is_shuffled", False):
            raise NotImplementedError(f"{name} is shuffled: pass unshuffle_weight({name})")
    check_choices(i.topk_ids, i.topk_weight, "topk_weight")
    check_device(hidden_states=i.hidden_states, w1=i.w1, w2=i.w2, topk_ids=i.topk_ids)
    check_size("hidden_states is (T={}, H)", len(i.hidden_states), "topk_ids is (T={}, k)", len(i.topk_ids))
    x, weights, ids = i.hidden_states, i.topk_weight, local_ids(i)
    if i.doweight_stage1:  # each choice is a token of its own, already weighted
        x = (x[:, None] * weights[:, :, None]).to(x.dtype).flatten(0, 1)
        ids = ids.flatten()[:, None]
        weights = torch.ones_like(ids, dtype=weights.dtype)
    biases = {"gate_up_bias": i.bias1, "down_bias": i.bias2}
    plan = make_plan(ids, i.w1.shape[0])
    out = expert_mlp(x, i.w1, i.w2, weights, plan, activation=activation_of(i), **biases)
    if i.doweight_stage1:
        out = out.unflatten(0, i.topk_ids.shape).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
    return out.to(dtype)


def activation_of(i: FusedMoE) -> str:
    """Return the name of `expert_mlp` for an activation of AITER."""
    if isinstance(i.activation, bool) or i.activation not in list(ActivationType):
        raise ValueError(f"activation must be an ActivationType, not {i.activation!r}")
    gated = i.w1.shape[1] != i.w2.shape[2]
    found = (GATED if gated else PLAIN).get(i.activation)
    if i.activation == ActivationType.Swiglu and gated:
        limit = 7.0 if i.swiglu_limit is None else i.swiglu_limit
        return swiglu_limit(limit, limit, 1.702, 1.0)
    if i.swiglu_limit and found == "swiglu":
        return swiglu_limit(i.swiglu_limit, i.swiglu_limit)
    if found is None:
        kind = "with" if gated else "without"
        raise NotImplementedError(f"activation is {i.activation!r}, which moe_aiter lacks {kind} a gate")
    if i.swiglu_limit:
        raise NotImplementedError(f"swiglu_limit is {i.swiglu_limit}, but {found} has no limit")
    return found


def check_dtype(**dtypes: torch.dtype) -> None:
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            raise TypeError(f"{name} must be a floating dtype, not {dtype}")


def check_choices(topk_ids: Tensor, topk_weights: Tensor, name: str) -> None:
    check_shape("topk_ids", topk_ids, "T", "k")
    check_index(topk_ids=topk_ids)
    check_tensor(name, topk_weights)
    check_floating(name, topk_weights, tuple(topk_ids.shape))
    check_device(topk_ids=topk_ids, **{name: topk_weights})


def local_ids(i: FusedMoE | MoESorting) -> Tensor:
    """Return the numbers (T, k) int64 of experts among those of `expert_mask`.

    They are -1 for other experts, and for tokens from `num_local_tokens` on.
    """
    ids, mask, count = i.topk_ids.long(), i.expert_mask, i.num_local_tokens
    if mask is not None:
        check_shape("expert_mask", mask, "E_global")
        check_index(expert_mask=mask)
        check_device(topk_ids=ids, expert_mask=mask)
        local = (mask != 0).cumsum(0).where(mask != 0, 0) - 1
        known = (ids >= 0) & (ids < len(mask))
        ids = torch.where(known, local[ids.where(known, 0)], ids)  # an id past the end stays there
    if count is not None:
        check_whole_shape("num_local_tokens", count, (1,))
        check_index(num_local_tokens=count)
        check_device(topk_ids=ids, num_local_tokens=count)
        ids = ids.masked_fill((torch.arange(len(ids), device=ids.device) >= count)[:, None], -1)
    return ids


@renamed(expert_ids="topk_ids")
@takes(MoESorting)
def moe_sorting(i: MoESorting) -> tuple[Tensor, ...]:
    """Sort choices by expert, each expert's padded to whole blocks of `block_size` rows, as AITER's kernels
    read them.  With T tokens, k choices each, E = `num_experts` and B = `block_size`, returns

        sorted_ids         (T * k + E * B - k,) int32: choice << 24 | token; k << 24 | T is padding
        sorted_weights     the same shape, float32: of `topk_weights`; 0 in padding
        sorted_expert_ids  (blocks,) int32: each block's expert; -1 past the last
        num_valid_ids      (2,) int32: padded rows of all experts, and tokens
        moe_buf            (T, model_dim) zeros in `moebuf_dtype`

    and with `return_local_topk_ids` the numbers of the chosen experts, in the shape and dtype of `topk_ids`.
    `moe_buf` is (0, 0) without `accumulate` and `expert_mask`.  An expert without rows has no block.

    topk_ids: (T, k), int32 or int64; a negative id drops the choice.  topk_weights: (T, k), floating.
    expert_mask: (E,), int32 or int64: experts that are not here, of 0, are left out, and those that are here
        are counted from 0.
    num_local_tokens: (1,), int32 or int64, on the device; later tokens are left out.

    `dispatch_policy` chooses among AITER's kernels and has no effect here.  No synchronisation.  Raises
    NotImplementedError for `flat` and `output_aux`, which prepare inputs of single kernels of AITER,
    ValueError for shapes, devices and 2^24 tokens or more, TypeError for dtypes.
    """
    check_defaults(i, "flat", "output_aux")
    check_flags(return_local_topk_ids=i.return_local_topk_ids, accumulate=i.accumulate)
    check_dtype(moebuf_dtype=i.moebuf_dtype)
    check_sizes(num_experts=i.num_experts, model_dim=i.model_dim, block_size=i.block_size)
    check_choices(i.topk_ids, i.topk_weights, "topk_weights")
    (num_tokens, top_k), device = i.topk_ids.shape, i.topk_ids.device
    if num_tokens >= 1 << SLOT:
        raise ValueError(f"topk_ids has {num_tokens} tokens, but sorted_ids has room for {1 << SLOT} - 1")
    ids = local_ids(i)
    if i.expert_mask is not None:
        check_size("expert_mask is ({},)", len(i.expert_mask), "num_experts is {}", i.num_experts)
    _, rank, group_sizes = make_plan(ids, i.num_experts)
    blocks = -(-group_sizes // i.block_size)
    ends = blocks.cumsum(0)  # of each expert, in blocks
    before = group_sizes.cumsum(0) - group_sizes  # rows of the experts before
    shift = (ends - blocks) * i.block_size - before
    length = max(num_tokens * top_k + i.num_experts * i.block_size - top_k, 0)
    place = rank + shift[ids.clamp(0, i.num_experts - 1)]
    place = place.where(rank >= 0, length).flatten()  # a dropped choice: behind the end
    choice = torch.arange(top_k, device=device) << SLOT | torch.arange(num_tokens, device=device)[:, None]
    sorted_ids = torch.full((length + 1,), top_k << SLOT | num_tokens, dtype=torch.int32, device=device)
    sorted_ids[place] = choice.flatten().int()
    sorted_weights = torch.zeros(length + 1, device=device)
    sorted_weights[place] = i.topk_weights.detach().float().flatten()
    expert = torch.arange(-(-length // i.block_size), device=device)
    expert = torch.searchsorted(ends, expert, right=True)
    expert = expert.where(expert < i.num_experts, -1).int()
    valid = torch.full((2,), num_tokens, dtype=torch.int32, device=device)
    valid[:1] = ends[-1:] * i.block_size
    if i.num_local_tokens is not None:
        valid[1:] = i.num_local_tokens
    shape = (num_tokens, i.model_dim) if i.accumulate or i.expert_mask is not None else (0, 0)
    moe_buf = torch.zeros(shape, dtype=i.moebuf_dtype, device=device)
    found = sorted_ids[:length], sorted_weights[:length], expert, valid, moe_buf
    return (*found, ids.to(i.topk_ids.dtype)) if i.return_local_topk_ids else found
