"""Hugging Face's checkpoints in our layout: the layers compute the same, and the way back is exact."""

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from check import error
from integrations.checkpoints import CHANGES, change, change_config, save, tensors
from integrations.checkpoints import same as identical
from integrations.families import CONVERTED, E, H, tiny_config, tiny_model

from moe_aiter import MoE, ZeroCompute
from moe_aiter.cli import main
from moe_aiter.integrations.checkpoints import (
    convert,
    load_moe,
    moe_from_huggingface,
    state_dict_to_huggingface,
)
from moe_aiter.integrations.transformers import names_of

FUSED = {family: [False] if family == "gpt_oss" else [False, True] for family in CONVERTED}
CASES = [(family, fused) for family in CONVERTED for fused in FUSED[family]]
IDS = [f"{family}{'-fused' * fused}" for family, fused in CASES]


def blocks(model) -> dict[str, torch.nn.Module]:
    """transformers' blocks of experts, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "experts")}


def layer_of(name: str, family: str, fused: bool) -> str:
    """Our name of a block of transformers."""
    if family == "nemotron_h" and not fused:
        name = name.replace("model.", "backbone.", 1)
    return re.sub("block_sparse_moe|mixer", "mlp", name)


def run(block, x):
    out = block(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("family, fused", CASES, ids=IDS)
def test_each_layer_computes_what_transformers_block_does(family, fused, tmp_path):
    model = save(tmp_path / "theirs", family, fused=fused)
    report = convert(tmp_path / "theirs", tmp_path / "ours", shard_bytes=30_000)
    found = {layer_of(name, family, fused): block for name, block in blocks(model).items()}
    assert len(report.files) > 1 and list(report.differences) == list(found)
    assert max(report.differences.values()) < 1e-6
    x = torch.randn(2, 20, H)
    for name, block in found.items():
        moe = load_moe(tmp_path / "ours", name)
        with torch.no_grad():
            assert error(moe(x), run(block, x)) < 1e-6
    assert (tmp_path / "ours" / "generation_config.json").exists()


@pytest.mark.parametrize("family, fused", CASES, ids=IDS)
def test_the_way_back_is_exact(family, fused, tmp_path):
    dtype = torch.float16 if fused else torch.bfloat16  # and float32 below
    save(tmp_path / "theirs", family, dtype, fused=fused)
    there = convert(tmp_path / "theirs", tmp_path / "ours", shard_bytes=9000)
    back = convert(tmp_path / "ours", tmp_path / "back", to="huggingface", shard_bytes=20_000)
    before, after = tensors(tmp_path / "theirs"), tensors(tmp_path / "back")
    assert identical(before, after)
    assert there.converted + there.copied == back.written == len(before)
    assert back.converted + back.copied == there.written == len(tensors(tmp_path / "ours"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back")]
    assert configs[0] == configs[1]
    assert back.differences.keys() == there.differences.keys() != set()


@pytest.mark.parametrize("family", CONVERTED)
def test_transformers_loads_what_came_back(family, tmp_path):
    from transformers import AutoModelForCausalLM

    model = save(tmp_path / "theirs", family)
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="huggingface")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert identical(dict(model.state_dict()), dict(loaded.state_dict()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_language_model_within_another_model(fused, tmp_path):
    """Qwen3.5 with its vision tower, whose config.json describes the language model in an entry."""
    import transformers

    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
    vision = {"depth": 1, "hidden_size": H, "intermediate_size": H, "num_heads": 2, "out_hidden_size": H}
    config = transformers.Qwen3_5MoeConfig(
        text_config=tiny_config("qwen3_5_moe_text").to_dict(),
        vision_config=vision | {"num_position_embeddings": 16},
        **dict(zip(names, range(3, 7), strict=True)),
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(tmp_path / "theirs", save_original_format=not fused)
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert list(report.differences) == list(blocks(model))
    x = torch.randn(2, 20, H)
    for name, block in blocks(model).items():
        with torch.no_grad():
            assert error(load_moe(tmp_path / "ours", name)(x), run(block, x)) < 1e-6
    convert(tmp_path / "ours", tmp_path / "back", to="huggingface")
    assert identical(tensors(tmp_path / "theirs"), tensors(tmp_path / "back"))


@pytest.mark.parametrize("numbers", [{"swiglu_limit": 0.5}, {"swiglu_alpha": 3.0}])
def test_other_limits_of_gpt_oss(numbers, tmp_path):
    model = tiny_model("gpt_oss", **numbers)
    model.save_pretrained(tmp_path / "theirs")
    assert max(convert(tmp_path / "theirs", tmp_path / "ours").differences.values()) < 1e-6
    x = torch.randn(2, 20, H)
    for name, block in blocks(model).items():
        moe, same, other = (
            load_moe(tmp_path / "ours", name),
            moe_from_huggingface(block),
            copy.deepcopy(block),
        )
        other.experts.limit, other.experts.alpha = 7.0, 1.702
        with torch.no_grad():
            assert max(error(moe(x), run(block, x)), error(same(x), run(block, x))) < 1e-6
            assert error(run(other, x), run(block, x)) > 1e-3


def test_every_other_key_is_unchanged(tmp_path):
    save(tmp_path / "theirs", "deepseek_v3")
    convert(tmp_path / "theirs", tmp_path / "ours")
    theirs, ours = tensors(tmp_path / "theirs"), tensors(tmp_path / "ours")
    rest = {k: v for k, v in theirs.items() if ".mlp." not in k or k.startswith("model.layers.0.")}
    assert len(rest) == 24 and identical(rest, {k: ours[k] for k in rest})
    prefix = "model.layers.1.mlp."
    assert {k.removeprefix(prefix): tuple(v.shape) for k, v in ours.items() if k not in rest} == {
        "router.weight": (E, H),
        "router.selection_bias": (E,),
        "experts.gate_up": (E, 48, H),
        "experts.down": (E, H, 24),
        "shared.gate_up.weight": (96, H),
        "shared.down.weight": (H, 48),
    }


@pytest.mark.parametrize("family", CONVERTED)
def test_blocks_in_memory_are_shared(family):
    model = tiny_model(family, **CHANGES.get(family, {}))
    for block in blocks(model).values():
        block.eval()
        moe = moe_from_huggingface(block)
        assert not moe.training
        x = torch.randn(30, H)
        with torch.no_grad():
            assert error(moe(x), run(block, x[None])[0]) < 1e-6
            experts = block.experts
            assert moe.experts.gate_up.data_ptr() == getattr(experts, names_of(experts)[0]).data_ptr()
            assert moe.experts.down.data_ptr() == experts.down_proj.data_ptr()
            back = state_dict_to_huggingface(moe, family)
            assert identical(back, dict(block.state_dict()))
            assert back["experts.down_proj"].data_ptr() == experts.down_proj.data_ptr()
            moe.experts.down.mul_(2)
            assert error(moe(x), run(block, x[None])[0]) < 1e-6


def test_what_is_no_known_block_is_refused():
    block = next(iter(blocks(tiny_model("mixtral")).values()))
    with pytest.raises(TypeError, match="block is a MixtralExperts; known: MixtralSparseMoeBlock"):
        moe_from_huggingface(block.experts)
    with pytest.raises(ValueError, match="an MoE of deepseek_v3 has"):
        state_dict_to_huggingface(moe_from_huggingface(block), "deepseek_v3")
    with pytest.raises(ValueError, match="unknown model_type 'dbrx'"):
        state_dict_to_huggingface(moe_from_huggingface(block), "dbrx")
    block.jitter_noise = 0.1
    with pytest.raises(ValueError, match="jitter_noise"):
        moe_from_huggingface(block)
    block.jitter_noise = 0.0
    block.experts._apply_gate = lambda z: z
    with pytest.raises(ValueError, match="a gate of their own"):
        moe_from_huggingface(block)
    block = next(iter(blocks(tiny_model("longcat_flash")).values()))
    with pytest.raises(TypeError, match="block is a LongcatFlashMoE; known: "):
        moe_from_huggingface(block)
    with pytest.raises(ValueError, match="unknown model_type 'longcat_flash'"):
        state_dict_to_huggingface(MoE(H, 24, E, 2), "longcat_flash")


def latent_checkpoint(folder, fused=False, **changes):
    model = tiny_model("nemotron_h", moe_latent_size=8, **changes)
    model.save_pretrained(folder, save_original_format=not fused)
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_latent_experts(fused, tmp_path):
    """Nemotron 3 Super and Ultra."""
    model = latent_checkpoint(tmp_path / "theirs", fused)
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert len(report.differences) == 2 and max(report.differences.values()) < 1e-6
    x = torch.randn(2, 20, H)
    for name, block in blocks(model).items():
        moe, shared = (
            load_moe(tmp_path / "ours", layer_of(name, "nemotron_h", fused)),
            moe_from_huggingface(block),
        )
        with torch.no_grad():
            assert error(moe(x), run(block, x)) < 1e-6 and error(shared(x), run(block, x)) < 1e-6
        assert moe.to_latent.weight.shape == (8, H)
        assert shared.to_latent.weight.data_ptr() == block.fc1_latent_proj.weight.data_ptr()
        assert identical(state_dict_to_huggingface(shared, "nemotron_h"), dict(block.state_dict()))
    convert(tmp_path / "ours", tmp_path / "back", to="huggingface")
    assert identical(tensors(tmp_path / "theirs"), tensors(tmp_path / "back"))
    with pytest.raises(ValueError, match="an MoE of nemotron_h has"):
        state_dict_to_huggingface(MoE(H, 24, E, 2, latent=8), "nemotron_h")


def test_latent_experts_that_do_not_fit(tmp_path):
    latent_checkpoint(tmp_path / "theirs")
    change_config(tmp_path / "theirs", moe_latent_size=None)
    with pytest.raises(ValueError, match=r"fc1_latent_proj.weight is unknown in the MLP of a layer"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    change_config(tmp_path / "theirs", moe_latent_size=9)
    with pytest.raises(ValueError, match=r"fc1_latent_proj.weight is \(8, 16\); it should be \(9, 16\)"):
        convert(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identity_experts(dtype, tmp_path):
    """LongCat-Flash, whose published checkpoints have no weights for experts that use none."""
    model = save(tmp_path / "theirs", "longcat_flash", dtype)
    change(tmp_path / "theirs", without_unused)
    if dtype != torch.float32:  # as in the published checkpoint
        change(
            tmp_path / "theirs", lambda t: t.update({k: v.float() for k, v in t.items() if "classifier" in k})
        )
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert list(report.differences) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    x = torch.randn(2, 50, H)
    for name, block in blocks(model).items() if dtype == torch.float32 else ():
        moe = load_moe(tmp_path / "ours", name)
        assert moe.zero_compute == ZeroCompute(identity=3) and moe.router.weight.shape == (E + 3, H)
        with torch.no_grad():
            assert error(moe(x), run(block, x)) < 1e-6
    convert(tmp_path / "ours", tmp_path / "back", to="huggingface")
    assert identical(tensors(tmp_path / "theirs"), tensors(tmp_path / "back"))
    change_config(tmp_path / "theirs", zero_expert_type="drop")
    with pytest.raises(ValueError, match="zero_expert_type is 'drop'; only 'identity' is known: MoE has"):
        convert(tmp_path / "theirs", tmp_path / "other")


def without_unused(found: dict) -> None:
    for key in [key for key in found if re.search(rf"experts\.[{E}-9]\.", key)]:
        del found[key]


@pytest.mark.parametrize("fused", [False, True])
def test_weights_of_identity_experts_are_refused(fused, tmp_path):
    """transformers 5 has gate and up weights for them too, and uses none."""
    save(tmp_path / "theirs", "longcat_flash", fused=fused)
    text = (
        "gate_up_proj is (9, 48, 16); it should be (6"
        if fused
        else "experts.6.gate_proj.weight is unknown in"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_the_command_goes_there_and_back(tmp_path, capsys):
    pytest.importorskip("tqdm")
    save(tmp_path / "theirs", "olmoe")
    names = [str(tmp_path / name) for name in ("theirs", "ours", "back")]
    assert main(["convert", *names[:2], "--shard-size", "20KB"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.1.mlp" in out and "38 tensors of MoE layers converted and 19 copied" in out
    assert main(["convert", *names[1:], "--no-check"]) == 0
    assert "difference" not in capsys.readouterr().out
    assert identical(tensors(tmp_path / "theirs"), tensors(tmp_path / "back"))
    assert main(["convert", *names[:2]]) == 2
    assert "the folder is not empty: choose a new or empty one" in capsys.readouterr().err


MEMORY = """
import json, pathlib, sys, threading, torch
from safetensors.torch import save_file
from moe_aiter.integrations.checkpoints import convert

def write(folder, E, H, I, layers):
    folder.mkdir()
    places = {}
    for n in range(layers):
        block = f"model.layers.{n}.mlp"
        shapes = {f"{block}.gate.weight": (E, H)}
        for e in range(E):
            for name, shape in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
                shapes[f"{block}.experts.{e}.{name}_proj.weight"] = shape
        save_file({k: torch.randn(s).bfloat16() for k, s in shapes.items()}, folder / f"{n}.safetensors")
        places |= {k: f"{n}.safetensors" for k in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {"model_type": "qwen3_moe", "hidden_size": H, "moe_intermediate_size": I, "num_experts": E}
    config |= {"num_experts_per_tok": 2, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))

def held():
    status = dict(line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024

def watch():
    while not done.wait(0.001):
        seen.append(held())

here = pathlib.Path(sys.argv[1])
torch.set_num_threads(1)
if sys.argv[2] == "write":
    write(here / "small", 4, 64, 64, 1)
    write(here / "large", 8, 1024, 1024, 5)
else:
    convert(here / "small", here / "small.ours")  # what is loaded once
    convert(here / "small.ours", here / "small.back", to="huggingface")
    seen, done = [held()], threading.Event()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    convert(here / "large", here / "large.ours", shard_bytes=60_000_000)
    convert(here / "large.ours", here / "large.back", to="huggingface", shard_bytes=60_000_000)
    done.set()
    watcher.join()
    print(max(seen) - seen[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_stays_below_a_shard_and_a_layer(tmp_path):
    """Five layers of 50 MB, a file each, there and back, checks included, in a process of its own.

    What is read lies in files that are mapped: those pages the system takes back when it needs them.
    """
    root = Path(__file__).parents[2]
    for task in ("write", "convert"):
        command = [sys.executable, "-c", MEMORY, str(tmp_path), task]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    layer = 3 * 8 * 1024 * 1024 * 2
    written = sum(path.stat().st_size for path in (tmp_path / "large.ours").iterdir())
    assert written > 5 * layer
    assert 0 < int(done.stdout) < 60_000_000 + layer
    assert math.isclose(written, sum(p.stat().st_size for p in (tmp_path / "large").iterdir()), rel_tol=1e-3)


@pytest.mark.parametrize("there", [False, True])
def test_a_link_to_an_empty_folder_is_that_folder(there, tmp_path):
    save(tmp_path / "theirs", "mixtral")
    if there:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert(tmp_path / "theirs", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real", "theirs"]


def test_names_with_digits_of_any_kind(tmp_path):
    """Of other writing systems, and more than an int has."""
    odd = {"1²3": torch.ones(2), f"model.layers.{'9' * 5000}.mlp.x": torch.ones(2), "٣": torch.ones(2)}
    save(tmp_path / "theirs", "mixtral")
    change(tmp_path / "theirs", lambda found: found.update(odd))
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert identical({k: v for k, v in tensors(tmp_path / "ours").items() if k in odd}, odd)
