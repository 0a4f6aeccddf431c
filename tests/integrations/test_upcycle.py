"""Dense models with experts: the same function, in either layout."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from check import error
from integrations.checkpoints import change, change_config, same, tensors

from moe_aiter.cli import main
from moe_aiter.integrations.checkpoints import CheckpointError, convert, load_moe, upcycle

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DENSE = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen3": "Qwen3Config"}


def save_dense(folder, kind, dtype=torch.float32, **changes):
    import transformers

    config = getattr(transformers, DENSE[kind])(**SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", DENSE)
def test_transformers_loads_the_same_function(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    dense = save_dense(tmp_path / "dense", kind, rms_norm_eps=1e-3, **theta)
    report = upcycle(tmp_path / "dense", tmp_path / "moe", 4, 2, to="huggingface")
    assert max(report.differences.values()) < 1e-6 and len(report.differences) == 2
    moe, info = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert moe.config.model_type == ("qwen3_moe" if kind == "qwen3" else "mixtral")
    tokens = torch.randint(32, (2, 30))
    with torch.no_grad():
        assert error(moe.eval()(tokens).logits, dense(tokens).logits) < 1e-5


@pytest.mark.parametrize("kind", DENSE)
def test_what_the_dense_configuration_leaves_out_is_written_down(kind, tmp_path):
    """transformers assumes something else of Mixtral than of Llama, as of its rotary embeddings."""
    from transformers import AutoModelForCausalLM

    save_dense(tmp_path / "dense", kind)
    silent = (
        "rms_norm_eps",
        "rope_parameters",
        "sliding_window",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    change_config(tmp_path / "dense", **dict.fromkeys(silent, ...))
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    upcycle(tmp_path / "dense", tmp_path / "moe", 2, 2, to="huggingface")
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    assert moe.config.sliding_window == getattr(dense.config, "sliding_window", None)
    tokens = torch.randint(32, (2, 30))
    with torch.no_grad():
        assert error(moe(tokens).logits, dense(tokens).logits) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_layout_is_the_same_checkpoint(dtype, tmp_path):
    dense = save_dense(tmp_path / "dense", "qwen3", dtype)
    options = {"noise": 0.1, "seed": 3, "router_std": 0.5}
    upcycle(tmp_path / "dense", tmp_path / "theirs", 4, 2, to="huggingface", **options)
    upcycle(tmp_path / "dense", tmp_path / "ours", 4, 2, **options)
    convert(tmp_path / "ours", tmp_path / "back", to="huggingface")
    assert same(tensors(tmp_path / "theirs"), tensors(tmp_path / "back"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back")]
    assert configs[0] == configs[1]
    moe = load_moe(tmp_path / "ours", "model.layers.1.mlp")
    down, router = dense.model.layers[1].mlp.down_proj.weight.data, moe.router.weight.float()
    spread = (moe.experts.down.float() - down.float()).std((1, 2)) / down.float().std()
    assert moe.experts.down.dtype == dtype and ((spread > 0.08) & (spread < 0.12)).all()
    assert 0.4 < router.std() < 0.6
    assert not torch.equal(router, load_moe(tmp_path / "ours", "model.layers.0.mlp").router.weight.float())


def test_noise_and_router_follow_the_seed(tmp_path):
    save_dense(tmp_path / "dense", "llama")
    found = []
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        report = upcycle(tmp_path / "dense", tmp_path / name, 3, 2, seed=seed, noise=0.2)
        assert min(report.differences.values()) > 0.01  # said, not refused
        found.append(tensors(tmp_path / name))
    assert same(found[0], found[1])
    changed = {key for key in found[0] if not torch.equal(found[0][key], found[2][key])}
    assert changed == {key for key in found[0] if ".mlp." in key} and len(changed) == 6


def test_without_noise_each_expert_is_the_mlp(tmp_path):
    dense = save_dense(tmp_path / "dense", "llama", torch.bfloat16)
    upcycle(tmp_path / "dense", tmp_path / "ours", 3, 2)
    moe, mlp = load_moe(tmp_path / "ours", "model.layers.0.mlp"), dense.model.layers[0].mlp
    for e in range(3):
        assert torch.equal(moe.experts.down[e], mlp.down_proj.weight)
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        assert torch.equal(moe.experts.gate_up[e], both)


def test_faults(tmp_path):
    save_dense(tmp_path / "dense", "llama", attention_bias=True)

    def spoil(found):
        found["model.layers.0.mlp.up_proj.bias"] = torch.zeros(24)
        found["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(8)
        del found["model.layers.1.mlp.down_proj.weight"]

    change(tmp_path / "dense", spoil)
    with pytest.raises(CheckpointError) as refusal:
        upcycle(tmp_path / "dense", tmp_path / "ours", 3, 2)
    assert sorted(refusal.value.problems) == sorted(
        [
            "model.layers.0.mlp.up_proj.bias is unknown in the MLP of a layer",
            "model.layers.1.mlp.down_proj.weight is missing",
            *(
                f"model.layers.{n}.self_attn.{m}_proj.bias is unknown to mixtral"
                for n in (0, 1)
                for m in "koqv"
            ),
            "model.layers.0.self_attn.q_norm.weight is unknown to mixtral",
        ]
    )
    change_config(tmp_path / "dense", model_type="gpt2")
    with pytest.raises(CheckpointError, match="model_type is 'gpt2'; dense ones that are known: llama"):
        upcycle(tmp_path / "dense", tmp_path / "ours", 3, 2)
    with pytest.raises(ValueError, match="noise must be at least 0"):
        upcycle(tmp_path / "dense", tmp_path / "ours", 3, 2, noise=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize("experts, top_k", [("0", "1"), ("4", "-1")])
def test_the_command_refuses(experts, top_k, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "dense", "moe", "--upcycle", "--experts", experts, "--top-k", top_k])
    assert "is less than 1" in capsys.readouterr().err


def test_the_command(tmp_path, capsys):
    pytest.importorskip("tqdm")
    save_dense(tmp_path / "dense", "mistral")
    names = [str(tmp_path / name) for name in ("dense", "moe")]
    flags = ["--upcycle", "--experts", "4", "--top-k", "2", "--seed", "7", "--to", "huggingface"]
    assert main(["convert", *names, *flags]) == 0
    assert "6 tensors of MoE layers converted" in capsys.readouterr().out
    upcycle(*names[:1], tmp_path / "same", 4, 2, to="huggingface", seed=7)
    assert same(tensors(tmp_path / "moe"), tensors(tmp_path / "same"))
