"""Tiny models of transformers' families, with random weights."""

import pytest
import torch

E, H, TOP_K, VOCAB = 6, 16, 2, 32
COMMON = {
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
FAMILIES = {  # the class of the configuration, and what it calls the rest
    "mixtral": ("MixtralConfig", {"num_local_experts": E, "intermediate_size": 24}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": E, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": E, "intermediate_size": 24}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        },
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": E, "intermediate_size": 24, "head_dim": 8}),
}  # fmt: skip


HYBRID = {"layers_block_type": ["moe", "full_attention", "moe"], "num_hidden_layers": None}
LINEAR = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
QWEN = {"num_experts": E, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
CONVERTED = FAMILIES | {  # further ones, of which this package only converts checkpoints
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32, "head_dim": 8,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen2_moe": ("Qwen2MoeConfig", QWEN | {"intermediate_size": 32}),
    "qwen3_next": ("Qwen3NextConfig", QWEN | LINEAR | {"intermediate_size": 32, "head_dim": 8}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", QWEN | LINEAR | {"head_dim": 8}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "num_local_experts": E, "intermediate_size": 24, "head_dim": 8, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig", {"num_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "n_routed_experts": E, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
            "head_dim": 8, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, **HYBRID,
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": E, "intermediate_size": 24}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": E, "intermediate_size": 24, "shared_intermediate_size": 40},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": E, "intermediate_size": 24, "shared_intermediate_size": 40,
            "layer_types": ["full_attention"] * 2, "mamba_n_heads": 4,
        },
    ),
}  # fmt: skip

FUSED = {  # further ones, whose gates have limits or the tanh approximation of GELU
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            "num_local_experts": E, "intermediate_size": 24, "head_dim": 8, "qk_rope_head_dim": 4,
            "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 8,
            "swiglu_limit": 0.5,
        },
    ),
    "hy_v4": (
        "HYV4Config",
        {
            "num_local_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32, "head_dim": 8,
            "swiglu_limit": 0.5, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "enable_moe_block": True, "num_experts": E, "top_k_experts": TOP_K, "moe_intermediate_size": 24,
            "intermediate_size": 32, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip


LONGCAT = {  # its checkpoints alone, as published
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            "num_hidden_layers": None, "num_layers": 2, "n_routed_experts": E, "zero_expert_num": 3,
            "moe_topk": 4, "num_experts_per_tok": None, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 32,
            "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
            "v_head_dim": 8, "head_dim": 4,
        },
    ),
}  # fmt: skip

MLA = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
ROUTED = {"n_routed_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
MORE = {  # further ones, of which test_more_families.py converts checkpoints
    "deepseek_v2": (
        "DeepseekV2Config",
        ROUTED | MLA | {
            "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        ROUTED | MLA | INDEXER | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", ROUTED | MLA),
    "glm_moe_dsa": ("GlmMoeDsaConfig", ROUTED | MLA | INDEXER | {"mlp_layer_types": ["sparse", "dense"]}),
    "dots1": ("Dots1Config", ROUTED | {"n_shared_experts": 2, "norm_topk_prob": True}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {"num_experts": E, "moe_topk": [TOP_K] * 2, "intermediate_size": 24, "head_dim": 8},
    ),
    "jamba": (
        "JambaConfig",
        {
            "num_experts": E, "intermediate_size": 24, "attn_layer_period": 2, "attn_layer_offset": 1,
            "use_mamba_kernels": False, "num_hidden_layers": 3, "expert_layer_offset": 1,
        },
    ),
    "mimo_v2_flash": ("MiMoV2FlashConfig", ROUTED | {"head_dim": 8, "v_head_dim": 8}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "num_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32, "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": E, "intermediate_size": 24}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            "num_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32, "num_shared_experts": 2,
            "head_dim": 8,
        },
    ),
    "solar_open": ("SolarOpenConfig", ROUTED | {"head_dim": 8, "routed_scaling_factor": 1.5}),
    "afmoe": (
        "AfmoeConfig",
        {
            "num_experts": E, "moe_intermediate_size": 24, "intermediate_size": 32, "num_dense_layers": 1,
            "head_dim": 8, "route_scale": 1.5,
        },
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            "num_experts": E, "intermediate_size": 24, "num_shared_experts": 2, "head_dim": 8,
            "shared_expert_combination_strategy": "sum", "mlp_layer_types": ["dense", "sparse"],
            "prefix_dense_intermediate_size": 32,
        },
    ),
    "minimax": ("MiniMaxConfig", {"num_local_experts": E, "intermediate_size": 24, "head_dim": 8}),
}  # fmt: skip

LAYOUTS = {  # further ones, with other layouts of experts
    "llama4_text": (
        "Llama4TextConfig",
        {"num_local_experts": E, "intermediate_size": 24, "intermediate_size_mlp": 32, "head_dim": 8},
    ),
    "aria_text": ("AriaTextConfig", {"moe_num_experts": E, "intermediate_size": 24, "moe_topk": 2}),
    "jetmoe": (
        "JetMoeConfig",
        {"num_local_experts": E, "intermediate_size": 24, "kv_channels": 8, "num_attention_heads": None},
    ),
    "dbrx": ("DbrxConfig", {"d_model": H, "n_heads": 2, "n_layers": 2, "attn_config": {"rope_theta": 1e4}}),
}


# two families of widths that NF4 and MXFP4 take
WIDE_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "vocab_size": 32, "max_position_embeddings": 32, "pad_token_id": 0,
    "head_dim": 8,
}  # fmt: skip
WIDE_FAMILIES = {
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64},
}


def tiny_config(family: str, **changes):
    import transformers

    kind, sizes = (CONVERTED | FUSED | LONGCAT | LAYOUTS | MORE)[family]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    sizes = COMMON | sizes | changes
    return getattr(transformers, kind)(**{k: v for k, v in sizes.items() if v is not None})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, experts: str = "eager", **changes):
    """A causal language model; all parameters random, those that begin as zeros or ones included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype)
    for name, p in model.named_parameters():
        p.data = p.data + 0.1 * torch.randn_like(p)
        if "experts" in name and "bias" not in name:
            p.data *= 3  # far enough from zero that a gate bends
    model.set_experts_implementation(experts)
    return model


def experts_of(model) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, "_apply_gate")]
