"""Further families: each layer computes what transformers' block does, and the way back is exact."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from check import error
from integrations.checkpoints import change, randomize_biases, tensors
from integrations.checkpoints import same as identical
from integrations.families import CONVERTED, MORE, E, H, tiny_model
from integrations.test_checkpoints import blocks, run
from safetensors.torch import save_file

from moe_aiter.cli import main
from moe_aiter.integrations.checkpoints import (
    CheckpointError,
    convert,
    load_moe,
    moe_from_huggingface,
    state_dict_to_huggingface,
)
from moe_aiter.integrations.checkpoints.families import FAMILIES
from moe_aiter.integrations.checkpoints.family import COUNTS

CASES = [(family, {}) for family in MORE] + [
    ("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe"]}),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 3}),
    ("glm_moe_dsa", {"n_group": 3, "topk_group": 2, "mlp_layer_types": ["dense", "sparse"]}),
    ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0}),
    *(  # a shared expert of width 0, whose tensors transformers saves
        (family, {FAMILIES[family].shared.size: 0})
        for family in (CONVERTED | MORE)
        if (shared := FAMILIES[family].shared) and shared.always and COUNTS[shared.size] == 0
    ),
]  # fmt: skip
IDS = [f"{family}{'-'.join(['', *changes])}" for family, changes in CASES]


def save_both(folder, model):
    """The checkpoint in the hub's format, and in transformers' own."""
    randomize_biases(model)
    model.eval()
    model.save_pretrained(folder / "hub", max_shard_size="20KB")
    model.save_pretrained(folder / "fused", save_original_format=False)


def check_both(folder, family, model, layer_of=lambda name, fused: name.replace("feed_forward", "mlp")):
    """Convert both formats, compare every layer, and convert back."""
    x = torch.randn(2, 20, H)
    found = {name: block for name, block in blocks(model).items() if not getattr(block, "is_hash", False)}
    assert found
    for source in ("hub", "fused"):
        report = convert(folder / source, folder / f"{source}.ours", shard_bytes=30_000)
        names = {layer_of(name, source == "fused"): block for name, block in found.items()}
        assert report.kept.keys() == {"model.layers.0"} if family == "deepseek_v4" else not report.kept
        assert list(report.differences) == list(names) and max(report.differences.values()) < 1e-5
        for name, block in names.items():
            moe = load_moe(folder / f"{source}.ours", name)
            with torch.no_grad():
                assert error(moe(x), run(block, x)) < 1e-5
        convert(folder / f"{source}.ours", folder / f"{source}.back", to="huggingface", check=False)
        assert identical(tensors(folder / source), tensors(folder / f"{source}.back"))
    if FAMILIES[family].renames:
        with pytest.raises(CheckpointError, match="save it with save_original_format=True"):
            convert(folder / "fused.ours", folder / "out", to="hub")
    else:
        convert(folder / "fused.ours", folder / "out", to="hub", check=False)
        assert identical(tensors(folder / "hub"), tensors(folder / "out"))
    return found


@pytest.mark.parametrize("family, changes", CASES, ids=IDS)
def test_both_ways(family, changes, tmp_path):
    model = tiny_model(family, **changes)
    save_both(tmp_path, model)
    found = check_both(tmp_path, family, model)
    x = torch.randn(30, H)
    for block in found.values():
        moe = moe_from_huggingface(block)
        with torch.no_grad():
            assert error(moe(x), run(block, x[None])[0]) < 1e-5
        if changes.get("shared_expert_intermediate_size") == 0:
            block.shared_expert_gate.weight.data.zero_()  # its values have no effect
        assert identical(state_dict_to_huggingface(moe, family), dict(block.state_dict()))


TEXT = {
    "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "vocab_size": 32, "num_experts": E, "head_dim": 8, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": H, "intermediate_size": H, "num_heads": 2, "out_hidden_size": H,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
AUDIO = {
    "d_model": H, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": H,
    "num_mel_bins": 8, "output_dim": H, "downsample_hidden_size": 8, "n_window": 2,
}  # fmt: skip


def randomized(model):
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("width", [8, 16])
def test_qwen3_vl(width, tmp_path):
    """Its experts are transposed on the hub, which neither names nor square matrices say."""
    import transformers

    if not hasattr(transformers, "Qwen3VLMoeConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Qwen3-VL-MoE")
    config = transformers.Qwen3VLMoeConfig(
        text_config=TEXT | {"moe_intermediate_size": width}, vision_config=VISION,
        image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6,
    )  # fmt: skip
    model = randomized(transformers.Qwen3VLMoeForConditionalGeneration(config))
    save_both(tmp_path, model)
    # save_pretrained writes what it has in memory, and reads either
    change(tmp_path / "hub", lambda found: found.update(
        {key: found[key].mT.contiguous() for key in found if ".experts." in key}
    ))  # fmt: skip
    (block,) = check_both(tmp_path, "qwen3_vl_moe", model).values()
    moe = moe_from_huggingface(block)
    assert identical(state_dict_to_huggingface(moe, "qwen3_vl_moe"), dict(block.state_dict()))


@pytest.mark.parametrize("whole", [False, True])
def test_qwen3_omni(whole, tmp_path):
    """The thinker alone, and within the model whose talker has experts of its own, which stay."""
    import transformers

    if not hasattr(transformers, "Qwen3OmniMoeConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Qwen3-Omni-MoE")
    parts = {"text_config": TEXT | {"moe_intermediate_size": 24}, "vision_config": VISION}
    kind, config = "Thinker", parts | {"audio_config": AUDIO}
    if whole:
        kind, config = "", {"thinker_config": config, "enable_audio_output": False}
    kind = f"Qwen3OmniMoe{kind}"
    config = getattr(transformers.models.qwen3_omni_moe, f"{kind}Config")(**config)
    model = randomized(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    save_both(tmp_path, model)
    talker = {"talker.model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(3, 5)}
    if whole:
        for source in ("hub", "fused"):
            change(tmp_path / source, lambda found: found.update(talker))
    check_both(
        tmp_path, config.model_type, model,
        lambda name, fused: name if fused else name.replace("language_model.", ""),
    )  # fmt: skip
    kept = {k: v for k, v in tensors(tmp_path / "hub.ours").items() if k.startswith("talker.")}
    assert identical(kept, talker if whole else {})


SIZES = {"hidden_size": H, "moe_intermediate_size": 24, "num_hidden_layers": 2}
NO_CLASS = {  # as published: config.json, the block, and its names of gate, up and down
    "kimi_k2": (
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        },
        {
            "gate": "mlp.gate.weight", "bias": "mlp.gate.e_score_correction_bias",
            "shared": "mlp.shared_experts",
        },
    ),
    "bailing_moe_v2": (
        {
            "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "n_group": 4,
            "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "score_function": "sigmoid",
            "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
        },
        {"gate": "mlp.gate.weight", "bias": "mlp.gate.expert_bias", "shared": "mlp.shared_experts"},
    ),
    "mimo_v2": (
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": None, "n_group": 1,
            "topk_group": 1, "moe_layer_freq": [0, 1], "norm_topk_prob": True, "routed_scaling_factor": None,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        },
        {"gate": "mlp.gate.weight", "bias": "mlp.gate.e_score_correction_bias"},
    ),
    "step3p5": (
        {
            "moe_num_experts": 8, "moe_top_k": 3, "share_expert_dim": 40, "moe_layers_enum": "1",
            "norm_expert_weight": True, "moe_router_activation": "sigmoid", "use_moe_router_bias": True,
            "moe_router_scaling_factor": 3.0, "swiglu_limits": [0.0, 0.0],
        },
        {"gate": "moe.gate.weight", "bias": "moe.router_bias", "shared": "share_expert"},
    ),
}  # fmt: skip


def mlp(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT


def published(family, dtype=torch.float32):
    """A checkpoint with the published names, and its second layer as a function."""
    config, names = NO_CLASS[family]
    config = config | SIZES | {"model_type": family}
    stacked, width = family == "step3p5", config.get("share_expert_dim", 24)
    shapes = {"gate_proj": (24, H), "up_proj": (24, H), "down_proj": (H, 24)}
    experts = {name: 0.3 * torch.randn(8, *shape) for name, shape in shapes.items()}
    found = {names["gate"]: torch.randn(8, H), names["bias"]: torch.randn(8)}
    shared = {name: torch.randn(*(width if n == 24 else n for n in shape)) for name, shape in shapes.items()}
    if "shared" in names:
        found |= {f"{names['shared']}.{name}.weight": t for name, t in shared.items()}
    for name, tensor in experts.items():
        each = {f"moe.{name}.weight": tensor} if stacked else {
            f"mlp.experts.{e}.{name}.weight": tensor[e].clone() for e in range(8)
        }  # fmt: skip
        found |= each
    found = {f"model.layers.1.{name}": tensor.to(dtype) for name, tensor in found.items()}
    found |= {f"model.layers.0.mlp.{name}.weight": torch.randn(*shape) for name, shape in shapes.items()}

    def layer(x):
        scores = (x @ found[f"model.layers.1.{names['gate']}"].mT).sigmoid()
        ranked = scores + found[f"model.layers.1.{names['bias']}"]
        if config.get("topk_group", 1) < config.get("n_group", 1):
            best = ranked.unflatten(1, (4, 2)).sum(2).topk(2).indices  # 2 of 4 groups of 2 experts
            allowed = torch.zeros(len(x), 4).scatter(1, best, 1).repeat_interleave(2, 1)
            ranked = ranked.masked_fill(allowed == 0, -torch.inf)
        ids = ranked.topk(3).indices
        weights = scores.gather(1, ids)
        scale = config.get("routed_scaling_factor") or config.get("moe_router_scaling_factor") or 1
        weights = scale * weights / weights.sum(1, keepdim=True)
        each = torch.stack([mlp(x, *(t[e] for t in experts.values())) for e in range(8)], 1)
        out = (each.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)
        return out + mlp(x, *shared.values()) if "shared" in names else out

    return config, found, layer


def write(folder, config, found):
    folder.mkdir()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", NO_CLASS)
def test_families_that_transformers_has_not(family, tmp_path):
    config, found, layer = published(family)
    write(tmp_path / "theirs", config, found)
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert list(report.differences) == ["model.layers.1.mlp"] and report.copied == 3
    x = torch.randn(50, H)
    with torch.no_grad():
        assert error(load_moe(tmp_path / "ours", "model.layers.1.mlp")(x), layer(x)) < 1e-5
    convert(tmp_path / "ours", tmp_path / "back", to="hub")
    assert identical(found, tensors(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


@pytest.mark.parametrize("name", ["swiglu_limits", "swiglu_limits_shared"])
def test_layers_with_limits_stay_as_they_are(name, tmp_path, capsys):
    """Step 3.5 Flash has limits in two layers."""
    pytest.importorskip("tqdm")
    config, found, _ = published("step3p5")
    limits = {"num_hidden_layers": 3, "moe_layers_enum": "1,2", name: [0, 0, 7.0]}
    further = {
        key.replace("layers.1.", "layers.2."): t.clone() for key, t in found.items() if "layers.1." in key
    }
    write(tmp_path / "theirs", config | limits, found | further)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert "because their experts have limits, and all MoE layers of" in (out := capsys.readouterr().out)
    assert ": model.layers.2\n" in out and "model.layers.1.mlp" in out
    ours = tensors(tmp_path / "ours")
    assert identical(further, {key: ours.get(key) for key in further}) and not any(
        "layers.2.mlp" in key for key in ours
    )
    assert convert(tmp_path / "ours", tmp_path / "back", to="hub").kept.keys() == {"model.layers.2"}
    assert identical(found | further, tensors(tmp_path / "back"))


@pytest.mark.parametrize(
    "family, setting",
    [
        ("exaone_moe", {"is_moe_layer": [True, False, True]}),
        ("mimo_v2", {"moe_layer_freq": [1, 0, 1]}),
        ("step3p5", {"moe_layers_enum": "0,2"}),
        ("jamba", {"expert_layer_period": 2, "expert_layer_offset": 0}),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 3}),
    ],
)
def test_which_layers_have_experts(family, setting):
    settings = FAMILIES[family].settings(setting | {"num_hidden_layers": 3})
    assert [FAMILIES[family].is_sparse(settings, layer) for layer in range(3)] == [True, False, True]


REFUSED = [
    ("kimi_k2", {"model_type": "phimoe"}, "its router, SparseMixer, weighs a choice"),
    ("kimi_k2", {"model_type": "ernie4_5_vl_moe"}, "other experts for text and for images"),
    ("kimi_k2", {"model_type": "deepseek_v2", "scoring_func": "softmax"}, "norm_topk_prob is True; only"),
    ("kimi_k2", {"moe_layer_freq": [0, 1]}, "moe_layer_freq is [0, 1]: one value for all layers is known"),
    (
        "kimi_k2",
        {"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": False},
        "topk_method is 'noaux_tc'; known: greedy, group_limited_greedy",
    ),
    ("bailing_moe_v2", {"score_function": "softmax"}, "score_function is 'softmax'; only 'sigmoid'"),
    ("step3p5", {"swiglu_limits": 7.0}, "swiglu_limits is 7.0; it should be of type list"),
    ("step3p5", {"moe_layers_enum": None}, "config.json has no moe_layers_enum"),
    (
        "bailing_moe_v2",
        {"model_type": "cohere2_moe", "intermediate_size": 24, "n_group": None},
        "shared_expert_combination_strategy is 'average'; only 'sum' is known",
    ),
    (
        "bailing_moe_v2",
        {"model_type": "cohere2_moe", "intermediate_size": 24, "expert_selection_fn": "tanh"},
        "expert_selection_fn is 'tanh'; known: softmax, sigmoid",
    ),
    (
        "bailing_moe_v2",
        {"model_type": "hunyuan_v1_moe", "intermediate_size": 24, "moe_topk": [3, 2]},
        "moe_topk is [3, 2]: one value for all layers is known",
    ),
    ("mimo_v2", {"model_type": "deepseek_v4", "scoring_func": "softmax"}, "scoring_func is 'softmax'; only"),
]  # fmt: skip


@pytest.mark.parametrize("family, changes, reason", REFUSED)
def test_what_the_layer_cannot_compute_is_refused(family, changes, reason, tmp_path):
    config, found, _ = published(family)
    write(tmp_path / "theirs", config | changes, found)
    with pytest.raises(CheckpointError) as refusal:
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert any(reason in problem for problem in refusal.value.problems), refusal.value.problems
    assert not (tmp_path / "ours").exists()


def test_what_a_block_cannot_give(tmp_path):
    block = next(iter(blocks(tiny_model("deepseek_v4", mlp_layer_types=["hash_moe"] * 2)).values()))
    with pytest.raises(ValueError, match="the block chooses experts by the token's id"):
        moe_from_huggingface(block)
    model = tiny_model("cohere2_moe", shared_expert_combination_strategy="average")
    with pytest.raises(ValueError, match="only 'sum' is known"):
        moe_from_huggingface(next(iter(blocks(model).values())))
