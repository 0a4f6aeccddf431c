"""AITER's `aiter.ops.moe_op`: its `topk_softmax`, over `route`."""

import torch
from torch import Tensor

from ....kernels.base.check import (
    check_device,
    check_index,
    check_shape,
    check_sizes,
    check_whole_shape,
    renamed,
)
from .topk import NAMES, choose

__all__ = ["topk_softmax"]


@renamed(**NAMES, topk_ids="topk_indices")
@torch.no_grad()
def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, gating_output: Tensor,
    need_renorm: bool, num_shared_experts: int = 0, shared_expert_scoring_func: str = "",
) -> None:  # fmt: skip
    """Write the k highest of softmax(gating_output), with `need_renorm` over their sum, and their experts.

    gating_output: (T, E), any floating dtype and strides.  With `num_shared_experts` = S above 0 it is
        (T, E + S), and `shared_expert_scoring_func` must be "sigmoid": the last S columns do not compete.
    topk_weights: (T, k + S), floating; the last S columns get the sigmoid of the shared experts' logits.
    topk_indices: (T, k), int32 or int64, the best first, the lower expert first among equals.
    token_expert_indices: (T, k), int32 or int64, gets j * T + t for choice j of token t.

    Outputs may have any strides.  Without gradient.  Raises ValueError for shapes, devices and numbers that
    do not fit, TypeError for dtypes; nothing is written then.
    """
    if num_shared_experts != 0:
        check_sizes(num_shared_experts=num_shared_experts)
    known = ("sigmoid",) if num_shared_experts else ("", "sigmoid")
    if shared_expert_scoring_func not in known:
        raise ValueError(f"shared_expert_scoring_func must be 'sigmoid', not {shared_expert_scoring_func!r}")
    check_shape("gating_output", gating_output, "T", "E")
    check_shape("topk_indices", topk_indices, "T", "k")
    (num_tokens, num_experts), top_k = gating_output.shape, topk_indices.shape[1]
    check_whole_shape("topk_weights", topk_weights, (num_tokens, top_k + num_shared_experts))
    check_whole_shape("token_expert_indices", token_expert_indices, topk_indices.shape)
    check_index(token_expert_indices=token_expert_indices)
    check_device(gating_output=gating_output, token_expert_indices=token_expert_indices)
    if num_shared_experts >= num_experts:
        raise ValueError(
            f"num_shared_experts is {num_shared_experts} but gating_output is (T, {num_experts})"
        )
    logits, shared = gating_output.tensor_split([num_experts - num_shared_experts], 1)
    choose(logits, topk_weights[:, :top_k], topk_indices, need_renorm, "softmax")
    topk_weights[:, top_k:] = shared.float().sigmoid()
    choices = torch.arange(top_k * num_tokens, device=gating_output.device)
    token_expert_indices.copy_(choices.view(top_k, num_tokens).T)
