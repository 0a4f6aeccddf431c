"""A valid call of each name of compat, and of the modules' forward passes: the rest of callables.py."""

import io

import torch
from callables import (
    BF16,
    F32,
    FP8,
    OURS,
    WHERE,
    E,
    H,
    K,
    N,
    T,
    attended,
    bytes_of,
    experts_of,
    ids,
    mask,
    products,
    rand,
    sizes,
    small_moe,
    used,
)
from torch import nn

import moe_aiter as ours
from moe_aiter.compat import aiter, flashinfer
from moe_aiter.compat.aiter import fused_moe, tuned_gemm
from moe_aiter.compat.aiter.ops.triton import gmm as triton_gmm
from moe_aiter.compat.aiter.ops.triton.utils import gmm_common
from moe_aiter.layers.attention import attention_backend

MODULES = aiter, flashinfer, fused_moe, tuned_gemm, triton_gmm, gmm_common
# a look-up whose errors are in tests/tuning/test_aiter_json.py, and enumerations
ELSEWHERE = {"ActivationType", "QuantType", "get_config"}

# of compat and of methods: (function, arguments)


def adapted_linear() -> ours.LoRALinear:
    return ours.LoRALinear(nn.Linear(H, N), 4, rank=2)


def adapted_experts() -> ours.LoRAExperts:
    return ours.LoRAExperts(ours.Experts(E, H, 4), 3, rank=2)


def routed(shared: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(T, K + shared), ids()


def grouped_routing() -> dict:
    outputs = dict(zip(("topk_weights", "topk_ids"), routed(), strict=True))
    numbers = {"num_expert_group": 2, "topk_group": 1, "need_renorm": True, "routed_scaling_factor": 2.0}
    return {"gating_output": rand(T, E), **outputs, **numbers}


SCALING = {"alpha": 3.0, "rslora": True}
FOUR = {"M": 7, "K": H, "N": N, "G": 3}
DRAWN = {"group_sizes_dtype": torch.int64, "device": "cpu", "rng_seed": 3}
LAYOUT = {"alt_trans": True, "unif_group_sizes": True}
SEVERAL = {"num_group_sizes": 2, "input_type": BF16, "output_type": BF16, "use_bias": True}
UNUSED = {"unused_tokens_prob": 0.1, "unused_experts_prob": 0.1}
BOTH = {"trans_lhs": True, "trans_rhs": True}
EXISTING = {"device": "cpu", "preferred_element_type": BF16}
PATTERN = ours.SparsePattern.from_dense(torch.eye(4, 6), (2, 2))
PRODUCT = {"input": (T, H), "weight": (N, H)}
MORE = {
    "use": (used, lambda: {"backend": "torch"}),
    "MoE.forward": (
        small_moe(),
        lambda: {
            "x": rand(T, H),
            "mask": mask(),
            "cu_seqlens": sizes(0, T),
            "expert_ids": ids(),
            "routing_weights": rand(T, K),
            "return_routing": True,
        },
    ),
    "Experts.forward": (ours.Experts(E, H, 4), experts_of),
    "Router.forward": (ours.Router(H, E, K), lambda: {"x": rand(T, H), "need_scores": True, "mask": mask()}),
    "LoRAExperts.forward": (adapted_experts(), lambda: experts_of(adapter_ids=torch.arange(T) % 4 - 1)),
    "LoRALinear.forward": (
        adapted_linear(),
        lambda: {"x": rand(6, H), "adapter_ids": torch.arange(4), "seg_lens": sizes()},
    ),
    "LoRALinear.merge": (lambda adapter: adapted_linear().merge(adapter), lambda: {"adapter": 1}),
    "LoRALinear.peft_state_dict": (adapted_linear().peft_state_dict, lambda: {"adapter": 1, "prefix": "a."}),
    "LoRALinear.load_peft_state_dict": (
        adapted_linear().load_peft_state_dict,
        lambda: {"state": adapted_linear().peft_state_dict(), "adapter": 1, **SCALING},
    ),
    "LoRAExperts.merge": (lambda adapter: adapted_experts().merge(adapter), lambda: {"adapter": 1}),
    "LoRAExperts.peft_state_dict": (
        adapted_experts().peft_state_dict,
        lambda: {"prefix": "a.", "adapter": 1},
    ),
    "LoRAExperts.load_peft_state_dict": (
        adapted_experts().load_peft_state_dict,
        lambda: {"state": adapted_experts().peft_state_dict(), "adapter": 1, **SCALING},
    ),
    "LiveTable.show": (
        ours.LiveTable(io.StringIO()).show,
        lambda: {"statistics": ours.Monitor(small_moe()).read(), "title": "step 1"},
    ),
    "Monitor.log": (
        ours.Monitor(small_moe()).log,
        lambda: {"sink": lambda *_: None, "step": 3, "prefix": "moe"},
    ),
    "OptimizedMoELayer.forward": (
        ours.OptimizedMoELayer(H, E, 4, **WHERE),
        lambda: {"x": rand(T, H), "expert_ids": ids(), "routing_weights": rand(T, K)},
    ),
    "SegmentGEMMWrapper.run": (
        ours.SegmentGEMMWrapper(torch.ones(3, dtype=torch.uint8)).run,
        lambda: {
            "x": rand(6, H),
            "weights": rand(4, H, N),
            "batch_size": 3,
            "weight_column_major": False,
            "seg_lens": sizes(1, 2, 3),
            "weight_indices": sizes(2, 0, 1),
            "out": torch.zeros(6, N),
        },
    ),
    "SparsePattern.from_mask": (
        ours.SparsePattern.from_mask,
        lambda: {"mask": torch.eye(4, 6), "blocksize": (2, 4), "shape": (8, 24)},
    ),
    "SparsePattern.from_dense": (
        ours.SparsePattern.from_dense,
        lambda: {"w": torch.eye(4, 6), "blocksize": (1, 1)},
    ),
    "SparsePattern.take": (PATTERN.take, lambda: {"w": rand(4, 6)}),
    "SparsePattern.to": (PATTERN.to, lambda: {"device": "cpu"}),
    "SparsePattern.to_dense": (PATTERN.to_dense, lambda: {"values": rand(2, 2, 2)}),
    "SparsePattern.to_sparse": (PATTERN.to_sparse, lambda: {"values": rand(2, 2, 2)}),
    "aiter.attention": (aiter.attention, lambda: attended(dropout_p=0.0, window=(3, 0), backend="math")),
    "attention_backend": (attention_backend, lambda: attended(dropout_p=0.0, window=(3, 0), backend="math")),
    "aiter.batched_gemm": (
        aiter.batched_gemm,
        lambda: {"a": rand(2, H, T), "b": rand(2, N, H), "transpose_a": True, "transpose_b": True},
    ),
    "aiter.conv2d": (
        aiter.conv2d,
        lambda: {
            "input": rand(2, 4, 7, 9),
            "weight": rand(6, 2, 3, 3),
            "bias": rand(6),
            "stride": 2,
            "padding": (1, 0),
            "dilation": 1,
            "groups": 2,
        },
    ),
    "aiter.cutlass_gemm": (
        aiter.cutlass_gemm,
        lambda: {"a": rand(T, H), "b": rand(H, N), "alpha": 2.0, "beta": 0.5, "c": rand(T, N)},
    ),
    "aiter.deepgemm": (
        aiter.deepgemm,
        lambda: {
            "XQ": rand(2, 5, 32).to(FP8),
            "WQ": rand(2, 16, 32).to(FP8),
            "Y": torch.zeros(2, 5, 16, dtype=BF16),
            "group_layout": sizes(2, 4),
            "x_scale": rand(2, 5),
            "w_scale": rand(2, 16),
            "weight_shuffled": True,
        },
    ),
    "aiter.enable_dynamic_shapes": (aiter.enable_dynamic_shapes, lambda: {"on": False}),
    "aiter.enable_fusion": (aiter.enable_fusion, lambda: {"on": True}),
    "aiter.enable_tensor_cores": (aiter.enable_tensor_cores, lambda: {"on": True}),
    "aiter.gelu": (aiter.gelu, lambda: {"input": rand(T, H), "approximate": "tanh"}),
    "aiter.gemm_a8w8": (
        aiter.gemm_a8w8,
        lambda: {
            **bytes_of(XQ=(T, H), WQ=(N, H)),
            "x_scale": rand(T),
            "w_scale": rand(N),
            "bias": rand(N),
            "dtype": BF16,
            "splitK": 2,
        },
    ),
    "aiter.gemm_bias": (
        aiter.gemm_bias,
        lambda: {"input": rand(T, H), "weight": rand(N, H), "bias": rand(N), "transpose_weight": True},
    ),
    "aiter.gemm_gelu": (
        aiter.gemm_gelu,
        lambda: {
            "input": rand(T, H),
            "weight": rand(N, H),
            "bias": rand(N),
            "transpose_weight": True,
            "approximate": "tanh",
        },
    ),
    "aiter.gemm_relu": (
        aiter.gemm_relu,
        lambda: {"input": rand(T, H), "weight": rand(N, H), "bias": rand(N), "transpose_weight": True},
    ),
    "aiter.get_kernel": (aiter.get_kernel, lambda: {"name": "known"}),
    "aiter.grouped_gemm": (aiter.grouped_gemm, OURS["grouped_gemm"]),
    "aiter.int8_gemm": (
        aiter.int8_gemm,
        lambda: {**bytes_of(**PRODUCT), "input_scale": rand(T), "weight_scale": rand(N), "output_dtype": F32},
    ),
    "aiter.linear": (aiter.linear, lambda: {"input": rand(T, H), "weight": rand(N, H), "bias": rand(N)}),
    "aiter.matmul": (aiter.matmul, lambda: {"x": rand(T, H), "y": rand(H, N)}),
    "aiter.register_kernel": (aiter.register_kernel, lambda: {"name": "known"}),
    "aiter.set_cache_size": (aiter.set_cache_size, lambda: {"mb": 1024}),
    "aiter.set_default_precision": (aiter.set_default_precision, lambda: {"precision": None}),
    "aiter.set_log_level": (aiter.set_log_level, lambda: {"level": "WARNING"}),
    "aiter.shuffle_weight": (
        aiter.shuffle_weight,
        lambda: {"x": rand(16, 32), "layout": (16, 16), "use_int4": True},
    ),
    "aiter.sparse_gemm": (aiter.sparse_gemm, OURS["sparse_gemm"]),
    "aiter.unshuffle_weight": (
        aiter.unshuffle_weight,
        lambda: {"x": rand(16, 32), "layout": (16, 16), "use_int4": True},
    ),
    "aiter.AITERAttention": (
        aiter.AITERAttention,
        lambda: {"hidden_size": H, "num_heads": 2, "dropout_prob": 0.1, **WHERE},
    ),
    "aiter.AITERConv2d": (
        aiter.AITERConv2d,
        lambda: {
            "in_channels": 4,
            "out_channels": 6,
            "kernel_size": 3,
            "stride": 2,
            "padding": (1, 0),
            "dilation": 1,
            "groups": 2,
            "bias": True,
            **WHERE,
        },
    ),
    "aiter.AITERLinear": (
        aiter.AITERLinear,
        lambda: {"in_features": H, "out_features": N, "bias": True, **WHERE},
    ),
    "aiter.AITERConv2d.forward": (aiter.AITERConv2d(4, 6, 3), lambda: {"input": rand(2, 4, 5, 5)}),
    "aiter.AITERLinear.forward": (aiter.AITERLinear(H, N), lambda: {"input": rand(T, H)}),
    "aiter.ShuffledWeight": (
        aiter.ShuffledWeight,
        lambda: {"weight": rand(16, 32), "layout": (16, 16), "use_int4": True},
    ),
    "tuned_gemm.gemm_a16w16": (
        tuned_gemm.gemm_a16w16,
        lambda: {"A": rand(T, H), "B": rand(N, H), "bias": rand(N), "otype": F32, "is_shuffled": False},
    ),
    "tuned_gemm.tgemm.mm": (
        tuned_gemm.tgemm.mm,
        lambda: {"inp": rand(T, H), "weights": rand(N, H), "bias": rand(N), "otype": F32},
    ),
    "tuned_gemm.get_GEMM_A16W16_config": (
        tuned_gemm.get_GEMM_A16W16_config,
        lambda: {
            "M": 4,
            "N": 8,
            "K": 8,
            "bias": True,
            "dtype": BF16,
            "otype": BF16,
            "scaleAB": True,
            "bpreshuffle": True,
        },
    ),
    "gmm_common.gen_uniform_group_sizes": (
        gmm_common.gen_uniform_group_sizes,
        lambda: {"M": 7, "G": 3, "group_sizes_dtype": torch.int64, "device": "cpu"},
    ),
    "gmm_common.gen_group_sizes": (
        gmm_common.gen_group_sizes,
        lambda: {"M": 7, "G": 3, **DRAWN, **UNUSED},
    ),
    "gmm_common.gen_multiple_group_sizes": (
        gmm_common.gen_multiple_group_sizes,
        lambda: {
            "num_group_sizes": 2,
            "M": 7,
            "G": 3,
            **DRAWN,
            **UNUSED,
            "group_sizes_0": sizes().long()[:3],
        },
    ),
    "gmm_common.gen_gmm_input": (
        gmm_common.gen_gmm_input,
        lambda: {**FOUR, "preferred_element_type": BF16, **DRAWN, "trans_rhs": True, **LAYOUT},
    ),
    "gmm_common.gen_tgmm_input": (
        gmm_common.gen_tgmm_input,
        lambda: {**FOUR, "preferred_element_type": BF16, **DRAWN, "trans_lhs": True, **LAYOUT},
    ),
    "gmm_common.gen_gmm_tensors": (
        gmm_common.gen_gmm_tensors,
        lambda: {**FOUR, **SEVERAL, **DRAWN, **BOTH, **LAYOUT},
    ),
    "gmm_common.gen_tgmm_tensors": (
        gmm_common.gen_tgmm_tensors,
        lambda: {**FOUR, **SEVERAL, **DRAWN, **BOTH, **LAYOUT},
    ),
    "gmm_common.gen_gmm_output": (gmm_common.gen_gmm_output, lambda: {"M": 7, "N": N, **EXISTING}),
    "gmm_common.gen_tgmm_output": (
        gmm_common.gen_tgmm_output,
        lambda: {"K": H, "N": N, "G": 3, **EXISTING},
    ),
    "gmm_common.gen_tgmm_bias_grad": (
        gmm_common.gen_tgmm_bias_grad,
        lambda: {"K": H, "G": 3, "device": "cpu", "with_bias_grad": True},
    ),
    "gmm_common.get_gmm_output": (
        gmm_common.get_gmm_output,
        lambda: {"M": 7, "N": N, **EXISTING, "existing_out": rand(7, N, dtype=BF16)},
    ),
    "gmm_common.get_tgmm_output": (
        gmm_common.get_tgmm_output,
        lambda: {"K": H, "N": N, "G": 3, **EXISTING, "existing_out": rand(3, H, N, dtype=BF16)},
    ),
    "gmm_common.get_tgmm_bias_grad": (
        gmm_common.get_tgmm_bias_grad,
        lambda: {"K": H, "G": 3, "device": "cpu", "existing_bias_grad": rand(3, H)},
    ),
    "gmm_common.get_gmm_shape": (gmm_common.get_gmm_shape, products),
    "gmm_common.get_tgmm_shape": (
        gmm_common.get_tgmm_shape,
        lambda: {"lhs": rand(H, 6), "rhs": rand(6, N), "group_sizes": sizes()},
    ),
    "gmm_common.get_gmm_transposition": (
        gmm_common.get_gmm_transposition,
        lambda: {"lhs": rand(6, H), "rhs": rand(4, H, N), "out": rand(6, N)},
    ),
    "gmm_common.get_tgmm_transposition": (
        gmm_common.get_tgmm_transposition,
        lambda: {"lhs": rand(H, 6), "rhs": rand(6, N), "out": rand(4, H, N)},
    ),
    "gmm_common.check_input_device_dtype": (
        gmm_common.check_input_device_dtype,
        lambda: products(bias=rand(4, N)),
    ),
    "gmm_common.check_bias_shape_stride": (
        gmm_common.check_bias_shape_stride,
        lambda: {"bias": rand(4, N), "G": 4, "N": N},
    ),
    "gmm_common.check_group_sizes_dtype": (
        gmm_common.check_group_sizes_dtype,
        lambda: {"dtype": torch.int64},
    ),
    "gmm_common.dtype_from_str": (gmm_common.dtype_from_str, lambda: {"dtype_str": "bf16"}),
    "gmm_common.str_from_dtype": (gmm_common.str_from_dtype, lambda: {"dtype": BF16}),
    "gmm_common.group_sizes_dtype_from_str": (
        gmm_common.group_sizes_dtype_from_str,
        lambda: {"dtype_str": "int64"},
    ),
    "gmm_common.str_from_group_sizes_dtype": (
        gmm_common.str_from_group_sizes_dtype,
        lambda: {"dtype": torch.int64},
    ),
    "gmm_common.is_power_of_2": (gmm_common.is_power_of_2, lambda: {"x": 4}),
    "fused_moe.fused_moe": (
        fused_moe.fused_moe,
        lambda: {
            "hidden_states": rand(T, H),
            "w1": rand(E, 8, H),
            "w2": rand(E, H, 4),
            "topk_weight": rand(T, K),
            "topk_ids": ids(),
            "expert_mask": sizes(1, 0, 1, 1, 1),
            "doweight_stage1": True,
            "num_local_tokens": sizes(5),
            "dtype": BF16,
            "bias1": rand(E, 8),
            "bias2": rand(E, H),
            "swiglu_limit": 7.0,
        },
    ),
    "fused_moe.moe_sorting": (
        fused_moe.moe_sorting,
        lambda: {
            "topk_ids": ids(),
            "topk_weights": rand(T, K),
            "num_experts": E,
            "model_dim": H,
            "moebuf_dtype": BF16,
            "block_size": 4,
            "expert_mask": sizes(1, 0, 1, 1),
            "num_local_tokens": sizes(5),
            "return_local_topk_ids": True,
            "accumulate": False,
        },
    ),
    "aiter.topk_softmax": (
        aiter.topk_softmax,
        lambda: {
            **dict(zip(("topk_weights", "topk_indices"), routed(1), strict=True)),
            "token_expert_indices": ids(),
            "gating_output": rand(T, E + 1),
            "need_renorm": True,
            "num_shared_experts": 1,
            "shared_expert_scoring_func": "sigmoid",
        },
    ),
    "aiter.biased_grouped_topk": (
        aiter.biased_grouped_topk,
        lambda: {**grouped_routing(), "correction_bias": rand(E)},
    ),
    "aiter.grouped_topk": (aiter.grouped_topk, lambda: {**grouped_routing(), "is_softmax": False}),
    "flashinfer.grouped_mm_bf16": (
        flashinfer.grouped_mm_bf16,
        lambda: {
            "a": rand(6, H, dtype=BF16),
            "b": rand(4, N, H, dtype=BF16),
            "m_indptr": sizes(0, 2, 2, 5, 6),
            "out_dtype": BF16,
            "backend": "cudnn",
        },
    ),
    "flashinfer.bmm_fp8": (
        flashinfer.bmm_fp8,
        lambda: {
            "A": rand(2, T, H).to(FP8),
            "B": rand(2, H, N).to(FP8),
            "A_scale": rand(1),
            "B_scale": 0.5,
            "dtype": BF16,
            "out": torch.zeros(2, T, N, dtype=BF16),
            "backend": "cublas",
        },
    ),
}
