"""The families of Hugging Face checkpoints: names of MoE tensors, and what config.json says of the layer.

Names on the hub, and from transformers' save_pretrained.  N is the number of an expert; gate, up and down are
short for gate_proj.weight, up_proj.weight and down_proj.weight:

    family           block             experts                         router and rest
    mixtral          block_sparse_moe  experts.N.{w1,w3,w2}.weight     gate.weight
    minimax_m2       block_sparse_moe  the same                        gate.weight,
                                                                       e_score_correction_bias
    qwen3_moe        mlp               experts.N.{gate,up,down}        gate.weight
    olmoe            mlp               the same                        gate.weight
    qwen2_moe        mlp               the same                        gate.weight,
    qwen3_next                                                         shared_expert.{gate,up,down},
    qwen3_5_moe                                                        shared_expert_gate.weight
    deepseek_v3      mlp               the same                        gate.weight,
    glm4_moe                                                           gate.e_score_correction_bias,
                                                                       shared_experts.{gate,up,down}
    ernie4_5_moe     mlp               the same                        gate.weight, shared_experts and
                                                       moe_statics.e_score_correction_bias (1, E)
    nemotron_h       mixer             experts.N.{up,down}             as deepseek_v3, without gate_proj;
                                       of width L if latent            fc1_latent_proj.weight (L, H),
                                                                       fc2_latent_proj.weight (H, L)
    longcat_flash    mlp               experts.N.{gate,up,down}        router.classifier.weight (E + Z, H),
                                       without those of Z zero experts router.e_score_correction_bias (E + Z)
    granitemoe, and  block_sparse_moe  input_linear.weight (E, 2I, H)  router.layer.weight
    -shared, -hybrid                   output_linear.weight (E, H, I)
    gpt_oss          mlp               experts.gate_up_proj            router.weight, router.bias
                                       (E, H, 2I), gate and up
                                       interleaved, experts.down_proj
                                       (E, I, H), and their _bias
                                       (E, 2I), (E, H)
    deepseek_v4      ffn               experts.N.{w1,w3,w2}.weight     gate.weight, gate.bias,
                                                                       shared_experts.{w1,w3,w2}.weight
    jamba            feed_forward      experts.N.{gate,up,down}        router.weight
    lfm2_moe         feed_forward      experts.N.{w1,w3,w2}.weight     gate.weight, expert_bias
    hunyuan_v1_moe   mlp               experts.N.{gate,up,down}        gate.wg.weight, shared_mlp
    exaone_moe       mlp               the same                        gate.weight, shared_experts,
                                                                       e_score_correction_bias
    afmoe            mlp               the same                        router.gate.weight, expert_bias,
                                                                       shared_experts
    bailing_moe_v2   mlp               the same                        gate.weight, gate.expert_bias,
                                                                       shared_experts
    qwen3_vl_moe     mlp               experts.gate_up_proj            gate.weight
                                       (E, H, 2I), gate first,
                                       experts.down_proj (E, I, H)
    step3p5          the layer         moe.{gate,up}_proj.weight       moe.gate.weight, moe.router_bias,
                                       (E, I, H) and                   share_expert.{gate,up,down}
                                       moe.down_proj.weight (E, H, I)

kimi_k2, deepseek_v2, deepseek_v32, glm4_moe_lite, glm_moe_dsa, dots1, solar_open and mimo_v2 have the names
of deepseek_v3; minimax those of mixtral; flex_olmo, cohere2_moe and qwen3_omni_moe those of olmoe.  The
correction bias and shared experts are there where the family has them.

In memory, and from save_pretrained(save_original_format=False), transformers 5 uses the "fused" format: the
experts are experts.gate_up_proj (E, 2I, H), or experts.up_proj (E, I, H) without a gate, and
experts.down_proj (E, H, I).  In this format, the block of mixtral and minimax_m2 is called mlp, the bias of
ernie4_5_moe and exaone_moe is part of gate, the router of Granite has the key router.weight, and nemotron_h
has model. where the hub has backbone.; deepseek_v4 has the names of deepseek_v3.

`REFUSED` lists the families whose layer `MoE` cannot compute, each with the reason.
"""

from dataclasses import replace

from ...routing.choices import GroupLimit
from ...routing.zero_compute import ZeroCompute
from .family import KINDS, LISTED, OURS, Family, SharedMlp
from .files import CheckpointError

EXPERTS = "num_experts", "num_local_experts"
ROUTED = "n_routed_experts", "num_local_experts"
DEEPSEEK = {  # what GLM and Nemotron took from it
    "correction": ("gate.e_score_correction_bias",) * 2, "score": "sigmoid", "renormalizes": True,
}  # fmt: skip
MIXTRAL = {"blocks": ("block_sparse_moe", OURS), "matrices": ("w1", "w3", "w2")}
QWEN_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
QWEN2_SHARED = SharedMlp(
    "shared_expert", "shared_expert_intermediate_size", 5632, counts=False, gate="shared_expert_gate"
)
QWEN_SHARED = QWEN2_SHARED._replace(default=512)
DEEPSEEK_SHARED = SharedMlp("shared_experts", "n_shared_experts", 1)
NEMOTRON_SHARED = SharedMlp("shared_experts", "moe_shared_expert_intermediate_size", 7688, counts=False)
COHERE_SCORES = {"softmax": "topk_softmax", "sigmoid": "sigmoid"}
KINDS_FROM = {"mlp_layer_types": None, "first_k_dense_replace": 1}
MIMO = Family(  # no shared expert
    "mimo_v2", "", "MiMoV2ForCausalLM", ROUTED, "moe_intermediate_size", **DEEPSEEK, scale=1.0, groups=(1, 1),
    layers=KINDS_FROM, renames=True,
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None},
)  # fmt: skip
QWEN_OMNI = Family(
    "qwen3_omni_moe", "", "Qwen3OmniMoeForConditionalGeneration", EXPERTS, "moe_intermediate_size",
    inner="thinker_config.text_config", renormalizes=True, layers=QWEN_LAYERS, renames=True,
)  # fmt: skip


def average_of_shared(config: dict) -> str | None:
    """Cohere's way to add the shared experts, whose default is one that MoE has not."""
    how = config.get("shared_expert_combination_strategy")
    if not config.get("num_shared_experts") or how == "sum":
        return None
    text = f"shared_expert_combination_strategy is {how or 'average'!r}; only 'sum' is known"
    return f"{text}: MoE adds the output of the shared experts"


def no_kinds(config: dict) -> str | None:
    """Without the setting, others disagree which of Step's layers have experts."""
    return None if config.get(KINDS) is not None else "config.json has no moe_layers_enum"


def greedy_methods(config: dict) -> str | None:
    known, method = ("greedy", "group_limited_greedy"), config.get("topk_method")
    return None if method in (None, *known) else f"topk_method is {method!r}; known: {', '.join(known)}"


QWEN3_5 = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeForCausalLM", EXPERTS,
    "moe_intermediate_size", shared=QWEN_SHARED,
)  # fmt: skip
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "mixtral", "MixtralSparseMoeBlock", "MixtralForCausalLM", EXPERTS[::-1], "intermediate_size",
            **MIXTRAL,
        ),
        Family(
            "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeForCausalLM", EXPERTS, "moe_intermediate_size",
            renormalizes=False, layers=QWEN_LAYERS,
        ),
        Family(
            "olmoe", "OlmoeSparseMoeBlock", "OlmoeForCausalLM", EXPERTS, "intermediate_size",
            renormalizes=False,
        ),
        Family(
            "deepseek_v3", "DeepseekV3MoE", "DeepseekV3ForCausalLM", ROUTED, "moe_intermediate_size",
            **DEEPSEEK, scale=2.5, groups=(8, 4), shared=DEEPSEEK_SHARED, further=True,
            layers={"first_k_dense_replace": 3, "moe_layer_freq": 1},
            only={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        ),
        Family(
            "deepseek_v2", "DeepseekV2Moe", "DeepseekV2ForCausalLM", ROUTED, "moe_intermediate_size",
            renormalizes=False, scale=1.0, groups=(1, 1), group_score="max", refuses=greedy_methods,
            group_method="group_limited_greedy", shared=DEEPSEEK_SHARED._replace(default=2),
            layers={"first_k_dense_replace": 0, "moe_layer_freq": 1},
            only={"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False},
        ),
        Family(
            "deepseek_v32", "DeepseekV32MoE", "DeepseekV32ForCausalLM", ROUTED, "moe_intermediate_size",
            **DEEPSEEK, scale=2.5, groups=(8, 4), shared=DEEPSEEK_SHARED, further=True,
            layers={"mlp_layer_types": None, "first_k_dense_replace": 3, "moe_layer_freq": 1},
            only={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        ),
        Family(
            "deepseek_v4", "DeepseekV4SparseMoeBlock", "DeepseekV4ForCausalLM", ROUTED,
            "moe_intermediate_size", blocks=("ffn", OURS), matrices=MIXTRAL["matrices"],
            correction=("gate.bias", "gate.e_score_correction_bias"), score="sqrt_softplus", scale=1.5,
            limit=10.0, shared=DEEPSEEK_SHARED, renames=True,
            layers={"mlp_layer_types": None, "num_hash_layers": 3},
            keeps="they choose experts by the id of a token, which MoE does not see",
            only={"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "n_shared_experts": 1,
                  "hidden_act": "silu", "mlp_bias": False},
        ),
        Family(
            "gpt_oss", "GptOssMLP", "GptOssForCausalLM", EXPERTS[::-1], "intermediate_size",
            routers=("router", "router"), always_fused=True, score="topk_softmax",
        ),
        Family(
            "glm4_moe", "Glm4MoeMoE", "Glm4MoeForCausalLM", ROUTED, "moe_intermediate_size", **DEEPSEEK,
            scale=1.0, groups=(1, 1), shared=DEEPSEEK_SHARED, further=True,
            layers={"first_k_dense_replace": 1},
        ),
        Family(
            "qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeForCausalLM", EXPERTS, "moe_intermediate_size",
            renormalizes=False, layers=QWEN_LAYERS, shared=QWEN2_SHARED,
        ),
        Family(
            "qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextForCausalLM", EXPERTS,
            "moe_intermediate_size", renormalizes=True, layers=QWEN_LAYERS, shared=QWEN_SHARED,
        ),
        QWEN3_5,
        replace(QWEN3_5, name="qwen3_5_moe", inner="text_config"),
        Family(
            "minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2ForCausalLM", EXPERTS[::-1],
            "intermediate_size", **MIXTRAL, score="sigmoid", correction=("e_score_correction_bias",) * 2,
            only={"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0},
        ),
        Family(
            "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeForCausalLM",
            ("moe_num_experts", *EXPERTS), "moe_intermediate_size", top_k=("moe_k", "num_experts_per_tok"),
            correction=tuple(f"{name}moe_statics.e_score_correction_bias" for name in ("", "gate.")),
            correction_shape=(1,),
            shared=SharedMlp("shared_experts", "moe_num_shared_experts", 2, always=False),
            layers={"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
            only={"use_bias": False, "moe_norm_min": 1e-12},
        ),
        Family(
            "nemotron_h", "NemotronHMoE", "NemotronHForCausalLM", ROUTED,
            "moe_intermediate_size", act="mlp_hidden_act", blocks=("mixer", "mixer"),
            roots=("backbone.", "model."),
            matrices=("up_proj", "down_proj"), **DEEPSEEK, scale=1.0, groups=(1, 1), shared=NEMOTRON_SHARED,
            latent=("fc1_latent_proj", "fc2_latent_proj"), layers=dict.fromkeys(LISTED),
            only={"mlp_bias": False},
        ),
        Family(
            "longcat_flash", "", "LongcatFlashForCausalLM", ROUTED,
            "expert_ffn_hidden_size", top_k=("moe_topk", "num_experts_per_tok"),
            depth=("num_layers", "num_hidden_layers"), routers=("router.classifier",) * 2,
            correction=("router.e_score_correction_bias",) * 2, renormalizes=False, scale=6.0,
            zero_experts=256, loaders_need=("zero_expert_type",),
            only={"router_bias": False, "norm_topk_prob": False, "zero_expert_type": "identity"},
        ),
        Family(
            "glm4_moe_lite", "Glm4MoeLiteMoE", "Glm4MoeLiteForCausalLM", ROUTED, "moe_intermediate_size",
            **DEEPSEEK, scale=1.8, groups=(1, 1), shared=DEEPSEEK_SHARED, further=True, layers=KINDS_FROM,
        ),
        Family(
            "glm_moe_dsa", "GlmMoeDsaMoE", "GlmMoeDsaForCausalLM", ROUTED, "moe_intermediate_size",
            **DEEPSEEK, scale=2.5, groups=(1, 1), shared=DEEPSEEK_SHARED, further=True,
            layers=KINDS_FROM | {"first_k_dense_replace": 3},
        ),
        Family(
            "dots1", "Dots1MoE", "Dots1ForCausalLM", ROUTED, "moe_intermediate_size",
            **(DEEPSEEK | {"renormalizes": False}), scale=1.0, groups=(1, 1),
            shared=DEEPSEEK_SHARED._replace(default=0), layers={"first_k_dense_replace": 0},
        ),
        Family(
            "solar_open", "SolarOpenMoE", "SolarOpenForCausalLM", ROUTED, "moe_intermediate_size",
            **DEEPSEEK, scale=1.0, groups=(1, 1), shared=DEEPSEEK_SHARED,
        ),
        MIMO,
        replace(
            MIMO, name="mimo_v2_flash", block_class="MiMoV2FlashMoE", architecture="MiMoV2FlashForCausalLM"
        ),
        Family(
            "bailing_moe_v2", "", "BailingMoeV2ForCausalLM", EXPERTS, "moe_intermediate_size",
            correction=("gate.expert_bias",) * 2, score="sigmoid", scale=2.5, groups=(8, 4),
            shared=SharedMlp("shared_experts", "num_shared_experts", 1), further=True,
            layers={"first_k_dense_replace": 1},
            only={"score_function": "sigmoid", "norm_topk_prob": True, "moe_router_enable_expert_bias": True},
        ),
        Family(
            "exaone_moe", "ExaoneMoeSparseMoEBlock", "ExaoneMoeForCausalLM", EXPERTS, "moe_intermediate_size",
            **(DEEPSEEK | {"correction": tuple(f"{at}e_score_correction_bias" for at in ("", "gate."))}),
            scale=2.5, groups=(1, 1), shared=SharedMlp("shared_experts", "num_shared_experts", 1),
            layers=KINDS_FROM,
        ),
        Family(
            "afmoe", "AfmoeSparseMoeBlock", "AfmoeForCausalLM", EXPERTS, "moe_intermediate_size",
            routers=("router.gate",) * 2, correction=("expert_bias",) * 2, score="sigmoid", scale=1.0,
            scale_key="route_scale", shared=SharedMlp("shared_experts", "num_shared_experts", 2),
            layers={"num_dense_layers": 1},
            only={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
        ),
        Family(
            "step3p5", "", "Step3p5ForCausalLM", ("moe_num_experts", "n_routed_experts"),
            "moe_intermediate_size", top_k=("moe_top_k", "num_experts_per_tok"), blocks=("", OURS),
            stacked=tuple(f"moe.{matrix}_proj.weight" for matrix in ("gate", "up", "down")),
            routers=("moe.gate",) * 2, correction=("moe.router_bias",) * 2, score="sigmoid", scale=1.0,
            scale_key="moe_router_scaling_factor", renames=True, refuses=no_kinds,
            keeps="their experts have limits, and all MoE layers of a checkpoint have one activation",
            shared=SharedMlp("share_expert", "share_expert_dim", 1280, counts=False),
            layers={"mlp_layer_types": None},
            only={"moe_router_activation": "sigmoid", "norm_expert_weight": True, "use_moe_router_bias": True,
                  "mlp_bias": False},
        ),
        Family(
            "lfm2_moe", "Lfm2MoeSparseMoeBlock", "Lfm2MoeForCausalLM", EXPERTS, "moe_intermediate_size",
            blocks=("feed_forward",) * 2, matrices=MIXTRAL["matrices"], correction=("expert_bias",) * 2,
            correction_if="use_expert_bias", score="sigmoid", renormalizes=True, added=1e-6, scale=1.0,
            layers={"num_dense_layers": 2},
        ),
        Family(
            "jamba", "JambaSparseMoeBlock", "JambaForCausalLM", EXPERTS, "intermediate_size",
            blocks=("feed_forward",) * 2, routers=("router",) * 2, renormalizes=False,
            layers={"expert_layer_period": 2}, only={"norm_topk_prob": False},
        ),
        Family(
            "hunyuan_v1_moe", "HunYuanMoEV1Moe", "HunYuanMoEV1ForCausalLM", EXPERTS, "intermediate_size",
            top_k=("moe_topk", "num_experts_per_tok"), routers=("gate.wg",) * 2,
            shared=SharedMlp("shared_mlp", "num_shared_expert", 1),
        ),
        Family(
            "flex_olmo", "FlexOlmoSparseMoeBlock", "FlexOlmoForCausalLM", EXPERTS, "intermediate_size",
            renormalizes=False,
        ),
        Family(
            "cohere2_moe", "Cohere2MoeSparseMoeBlock", "Cohere2MoeForCausalLM", EXPERTS, "intermediate_size",
            score="topk_softmax", scores=("expert_selection_fn", COHERE_SCORES),
            renormalizes=True, shared=SharedMlp("shared_experts", "num_shared_experts", 0, always=False),
            layers=KINDS_FROM | {"first_k_dense_replace": 0}, refuses=average_of_shared,
        ),
        Family(
            "minimax", "MiniMaxSparseMoeBlock", "MiniMaxForCausalLM", EXPERTS[::-1], "intermediate_size",
            **MIXTRAL, only={"shared_intermediate_size": 0},
        ),
        Family(
            "qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock", "Qwen3VLMoeForConditionalGeneration", EXPERTS,
            "moe_intermediate_size", inner="text_config", layers=QWEN_LAYERS, transposed=True,
            stacked=("experts.gate_up_proj", "experts.down_proj"), only={"norm_topk_prob": True},
        ),
        QWEN_OMNI,
        replace(
            QWEN_OMNI, name="qwen3_omni_moe_thinker", inner="text_config",
            block_class="Qwen3OmniMoeThinkerTextSparseMoeBlock",
            architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
        ),
        *(
            Family(
                f"granitemoe{kind.lower()}", f"GraniteMoe{kind}MoE", f"GraniteMoe{kind}ForCausalLM",
                EXPERTS[::-1], "intermediate_size", blocks=("block_sparse_moe",) * 2,
                routers=("router.layer", "router"), score="topk_softmax",
                stacked=("input_linear.weight", "output_linear.weight"),
            )
            for kind in ("", "Shared", "Hybrid")
        ),
    )
}  # fmt: skip
FAMILIES["kimi_k2"] = replace(FAMILIES["deepseek_v3"], name="kimi_k2", block_class="")
LLAMA4 = "it multiplies the input of an expert by the routing weight, and MoE the output"
GEMMA4 = "its router has a norm, a scale and a factor for each expert of its own, and MoE has none of them"
ERNIE_VL = "each layer has one router and other experts for text and for images, and MoE has one of each"
PHI = "its router, SparseMixer, weighs a choice by a softmax of the logits near it, and MoE has no such score"
REFUSED = {
    "llama4": LLAMA4, "llama4_text": LLAMA4, "gemma4": GEMMA4, "gemma4_text": GEMMA4,
    "ernie4_5_vl_moe": ERNIE_VL, "phimoe": PHI,
}  # fmt: skip


def family_of(config: dict) -> Family:
    kind = config.get("model_type")
    if kind in list(REFUSED):
        raise CheckpointError("config.json", [f"model_type is {kind!r}: {REFUSED[kind]}"])
    if kind not in list(FAMILIES):  # it need not be a string
        families = ", ".join(FAMILIES)
        raise CheckpointError(
            "config.json", [f"model_type is {kind!r}; known: {families}; dense ones are for --upcycle"]
        )
    return FAMILIES[kind]


def to_json(kwargs: dict) -> dict:
    """`kwargs` of an MoE as config.json holds them."""
    kwargs = dict(kwargs)
    if choice := kwargs.get("choice"):
        kwargs["choice"] = {name: getattr(choice, name) for name in ("num_groups", "top_groups", "score")}
    if zero := kwargs.get("zero_compute"):
        kwargs["zero_compute"] = {"identity": zero.identity}
    return kwargs


def from_json(kwargs: dict) -> dict:
    kinds = {"choice": GroupLimit, "zero_compute": ZeroCompute}
    made = {name: kind(**kwargs[name]) for name, kind in kinds.items() if kwargs.get(name) is not None}
    return {"renormalize": True} | kwargs | made  # the default when the first checkpoints were converted
