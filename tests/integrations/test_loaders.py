"""What vLLM and SGLang make of an exported checkpoint: each tensor of experts has its place in theirs.

Both have `FusedMoE.make_expert_params_mapping(gate, down, up, num_experts)`: `experts.{e}.{gate}.` goes to
`experts.w13_` as shard w1, `{up}` there as w3, `{down}` to `experts.w2_` as w2.  The names here are those
that each model's `load_weights` passes (vllm/model_executor/models, sglang/srt/models, November 2026).
"""

import re

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from integrations.checkpoints import change, change_config, same, save, tensors
from integrations.families import CONVERTED, E, H
from integrations.test_checkpoints import without_unused

from moe_aiter.integrations.checkpoints import CheckpointError, convert

WIDTH = 24
LINEAR = "gate_proj", "down_proj", "up_proj"
LOADERS = {  # the block, and the names of gate, down and up
    "mixtral": ("block_sparse_moe", ("w1", "w2", "w3")),
    "minimax_m2": ("block_sparse_moe", ("w1", "w2", "w3")),
    "nemotron_h": ("mixer", ("up_proj", "down_proj", "")),  # no gate: what the activation sees is w1
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe"), ("mlp", LINEAR)),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "ernie4_5_moe", "longcat_flash"), ("mlp", LINEAR)),
}
STACKED = {  # families whose `load_weights` splits a tensor of all experts: names and shapes
    "gpt_oss": ("mlp", {
        "experts.gate_up_proj": (E, H, 2 * WIDTH), "experts.gate_up_proj_bias": (E, 2 * WIDTH),
        "experts.down_proj": (E, WIDTH, H), "experts.down_proj_bias": (E, H), "router.weight": (E, H),
    }),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), ("block_sparse_moe", {
        "input_linear.weight": (E, 2 * WIDTH, H), "output_linear.weight": (E, H, WIDTH),
        "router.layer.weight": (E, H),
    })),
}  # fmt: skip
REST = {  # what else the block's modules are called there
    "mlp": r"gate\.(weight|e_score_correction_bias)|shared_experts?\.(gate|up|down)_proj\.weight"
           r"|shared_expert_gate\.weight|moe_statics\.e_score_correction_bias"
           r"|router\.(classifier\.weight|e_score_correction_bias)",
    "block_sparse_moe": r"gate\.weight|e_score_correction_bias",
    "mixer": r"gate\.(weight|e_score_correction_bias)|shared_experts\.(up|down)_proj\.weight",
}  # fmt: skip


def mapping(gate: str, down: str, up: str) -> dict[str, tuple[str, int, str]]:
    """The prefix of a key in the checkpoint -> parameter, expert and shard."""
    shards = {"w1": ("w13", gate), "w2": ("w2", down), "w3": ("w13", up)}
    return {
        f"experts.{e}.{name}.": (param, e, shard)
        for e in range(E)
        for shard, (param, name) in shards.items()
        if name
    }


def exported(family, tmp_path, fused, to="hub"):
    """The tensors of each sparse layer's block, by its name and theirs in it."""
    save(tmp_path / "theirs", family, fused=fused)
    if family == "longcat_flash":
        change(tmp_path / "theirs", without_unused)
        change_config(tmp_path / "theirs", zero_expert_type="identity")
    convert(tmp_path / "theirs", tmp_path / "ours", check=False)
    convert(tmp_path / "ours", tmp_path / "out", to=to)
    block = (LOADERS | STACKED)[family][0]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors(tmp_path / "out").items():
        if match := re.fullmatch(rf"((?:model|backbone)\.layers\.\d+)\.{block}\.(.+)", key):
            found.setdefault(match[1], {})[match[2]] = tensor
    layers = {n: t for n, t in found.items() if any("experts" in k or "linear" in k for k in t)}
    return {n: t for n, t in layers.items() if n != "model.layers.0" or "gate_proj.weight" not in t}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", [*LOADERS, *STACKED])
def test_every_expert_has_its_place(family, fused, tmp_path):
    if fused and family in ("gpt_oss", "longcat_flash"):
        pytest.skip("there is no such format of it that we convert")
    layers = exported(family, tmp_path, fused)
    assert layers and {*LOADERS, *STACKED} == {*CONVERTED, "longcat_flash"}
    for block in layers.values():
        if family in STACKED:
            shapes = {name: tuple(t.shape) for name, t in block.items()}
            assert STACKED[family][1].items() <= shapes.items()
            continue
        name, names = LOADERS[family]
        places = mapping(*names)
        for key, tensor in block.items():
            prefix = key.removesuffix("weight")
            if prefix in places:
                shard = places.pop(prefix)[2]
                assert tensor.shape == ((H, WIDTH) if shard == "w2" else (WIDTH, H)), key
            else:
                assert re.fullmatch(REST[name], key), f"{family}: no loader knows {key}"
        assert not places, f"{family}: missing {sorted(places)}"


@pytest.mark.parametrize("family", [family for family in CONVERTED if family != "gpt_oss"])
def test_all_keys_are_those_of_the_hub(family, tmp_path):
    """Also those outside of the experts, of a checkpoint in the fused format."""
    model = save(tmp_path / "theirs", family, fused=True)
    model.save_pretrained(tmp_path / "hub")
    convert(tmp_path / "theirs", tmp_path / "ours", check=False)
    report = convert(tmp_path / "ours", tmp_path / "out", to="hub")
    assert same(tensors(tmp_path / "out"), tensors(tmp_path / "hub")) and report.differences


def test_shards_are_those_of_the_model(tmp_path):
    """Through the fused format and back: gate and up are not exchanged."""
    model = save(tmp_path / "theirs", "mixtral", fused=True)
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "out", to="hub")
    found, experts = tensors(tmp_path / "out"), model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj[3].chunk(2)
    for name, want in (("w1", gate), ("w3", up), ("w2", experts.down_proj[3])):
        assert torch.equal(found[f"model.layers.1.block_sparse_moe.experts.3.{name}.weight"], want)


def test_what_a_loader_refuses(tmp_path):
    """vLLM asserts that config.json has a zero_expert_type, which transformers does not write."""
    save(tmp_path / "theirs", "longcat_flash")
    change(tmp_path / "theirs", without_unused)
    convert(tmp_path / "theirs", tmp_path / "ours", check=False)
    with pytest.raises(
        CheckpointError, match=r"config.json has no zero_expert_type, which vLLM needs: add it"
    ):
        convert(tmp_path / "ours", tmp_path / "out", to="hub")
    assert not (tmp_path / "out").exists()
    save(tmp_path / "plain", "mixtral")
    with pytest.raises(CheckpointError, match="it was not converted by moe_aiter"):
        convert(tmp_path / "plain", tmp_path / "out", to="hub")
