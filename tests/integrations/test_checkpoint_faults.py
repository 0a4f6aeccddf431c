"""A checkpoint with a fault is refused, with every fault in a list, and nothing is left behind."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from integrations.checkpoints import (
    INDEX,
    change,
    change_config,
    same,
    save,
    tensors,
)

from moe_aiter.cli import main
from moe_aiter.integrations.checkpoints import CheckpointError, convert, files, load_moe
from moe_aiter.integrations.checkpoints.formula import Formula

MIXTRAL = "model.layers.{}.block_sparse_moe."
DEEPSEEK = "model.layers.1.mlp."


def refused(folder: Path, to: str = "moe_aiter", source: str = "theirs") -> list[str]:
    """The problems; and that the folder is as it was, however far the conversion went."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(CheckpointError) as refusal:
        convert(folder / source, folder / "ours", to)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert all(problem in str(refusal.value) for problem in refusal.value.problems[:50])
    return refusal.value.problems


def test_a_full_disk_names_the_path_and_the_size(tmp_path, monkeypatch, capsys):
    """Where the first tensor is written, and where the first other file is copied."""
    save(tmp_path / "theirs", "mixtral", shard="1GB")
    (tmp_path / "theirs" / "notes.txt").write_text("a note")
    size = sum(path.stat().st_size for path in (tmp_path / "theirs").iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1234))
    for owner, name in ((files, "write_piece"), (shutil, "copyfile"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        found = re.fullmatch(
            f"moe-aiter convert: error: {tmp_path}/ours: No space left on device: the new checkpoint takes "
            r"([\d,]+) bytes, and 1,234 are free there",
            last,
        )
        assert found, last
        assert abs(int(found[1].replace(",", "")) - size) < 0.1 * size
        assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_one_number_of_any_stride_is_written(tmp_path):
    """As a slice of every second row of a weight of two is."""
    with open(tmp_path / "piece", "wb") as file:
        assert files.write_piece(file, torch.tensor([[1.5], [2.5]])[::2][:, 0], lambda size: None) == 4
    assert (tmp_path / "piece").read_bytes() == torch.tensor(1.5).numpy().tobytes()


def test_every_fault_is_listed_at_once(tmp_path):
    save(tmp_path / "theirs", "mixtral")
    zero, one = MIXTRAL.format(0), MIXTRAL.format(1)

    def spoil(found):
        del found[f"{zero}experts.3.w2.weight"]
        found[f"{zero}experts.1.w1.weight"] = found[f"{zero}experts.1.w1.weight"].T.contiguous()
        found[f"{one}gate.weight"] = found[f"{one}gate.weight"].bfloat16()
        found[f"{one}experts.6.w1.weight"] = torch.zeros(24, 16)
        found["model.layers.7.mlp.experts.0.w1.weight"] = torch.zeros(1)

    change(tmp_path / "theirs", spoil)
    assert sorted(refused(tmp_path)) == [
        f"{zero}experts.1.w1.weight is (16, 24); it should be (24, 16)",
        f"{zero}experts.3.w2.weight is missing",
        f"{one}experts.6.w1.weight is unknown in the MLP of a layer",
        f"{one}gate.weight is BF16, but most of {one[:-1]} is F32",
        "model.layers.7.mlp.experts.0.w1.weight belongs to experts, where config.json has none",
    ]


def test_a_layer_without_any_expert_is_missing(tmp_path):
    save(tmp_path / "theirs", "mixtral")
    change(tmp_path / "theirs", lambda found: [found.pop(k) for k in list(found) if MIXTRAL.format(1) in k])
    assert refused(tmp_path) == [f"{MIXTRAL.format(1)[:-1]} has none of its 19 tensors"]


def test_experts_in_a_layer_that_should_be_dense(tmp_path):
    save(tmp_path / "theirs", "olmoe")
    change_config(tmp_path / "theirs", num_hidden_layers=1)
    problems = refused(tmp_path)
    assert len(problems) == 19 and all("layers.1.mlp." in problem for problem in problems)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_for_further_tokens_may_be_there_or_not(family, tmp_path):
    """DeepSeek-V3's layer 61, past the last."""
    save(tmp_path / "theirs", family)

    def add(found):
        for key in [key for key in found if key.startswith("model.layers.1.")]:
            found[key.replace("layers.1.", "layers.2.")] = found[key].clone()

    change(tmp_path / "theirs", add)
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert list(report.differences) == ["model.layers.1.mlp", "model.layers.2.mlp"]


@pytest.mark.parametrize(
    "family, names, dtype",
    [
        ("gpt_oss", ["experts.gate_up_proj_blocks", "experts.gate_up_proj_scales"], torch.uint8),
        ("deepseek_v3", ["experts.0.up_proj.weight_scale_inv"], torch.float32),
    ],
)
def test_quantised_weights_are_refused_by_name(family, names, dtype, tmp_path):
    save(tmp_path / "theirs", family)

    def quantise(found):
        found.pop(DEEPSEEK + "experts.gate_up_proj", None)
        found.update({DEEPSEEK + name: torch.zeros(1, dtype=dtype) for name in names})

    change(tmp_path / "theirs", quantise)
    problems = refused(tmp_path)
    assert [problem.split()[0] for problem in problems] == [DEEPSEEK + name for name in names]
    assert all("belongs to quantised weights: save it dequantised" in problem for problem in problems)


def test_layers_for_further_tokens_beside_the_others_stay_as_they_are(tmp_path):
    """Those of Qwen3-Next, which may also be in the other format."""
    save(tmp_path / "theirs", "qwen3_next")
    extra = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(6, 48, 16), "mtp.fc.weight": torch.ones(2)}
    change(tmp_path / "theirs", lambda found: found.update(extra))
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert list(report.differences) == ["model.layers.1.mlp"]
    assert same(extra, {k: v for k, v in tensors(tmp_path / "ours").items() if k in extra})


def test_a_router_may_be_float32_in_a_16_bit_model(tmp_path):
    save(tmp_path / "theirs", "minimax_m2", torch.bfloat16)

    def widen(found):
        found.update({k: v.float() for k, v in found.items() if k.endswith((".gate.weight", "_bias"))})

    change(tmp_path / "theirs", widen)
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    assert same(tensors(tmp_path / "theirs"), tensors(tmp_path / "back"))
    moe = load_moe(tmp_path / "ours", "model.layers.0.mlp")
    assert moe.router.weight.dtype == torch.float32 and moe.experts.down.dtype == torch.bfloat16


def test_a_shared_gate_has_the_dtype_of_its_expert(tmp_path):
    save(tmp_path / "theirs", "qwen2_moe", torch.bfloat16)
    key = "model.layers.1.mlp.shared_expert_gate.weight"
    change(tmp_path / "theirs", lambda found: found.update({key: found[key].float()}))
    assert refused(tmp_path) == [f"{key} is F32, but most of model.layers.1.mlp is BF16"]


def test_dtypes_that_no_layer_has_are_refused(tmp_path):
    save(tmp_path / "theirs", "olmoe")

    def cast(found):
        for key in [key for key in found if "layers.0.mlp" in key]:
            found[key] = found[key].to(torch.float8_e4m3fn)

    change(tmp_path / "theirs", cast)
    problems = refused(tmp_path)
    assert len(problems) == 19 and all("is F8_E4M3; known: F32, BF16, F16" in text for text in problems)


@pytest.mark.parametrize(
    "family, changes, problem",
    [
        ("mixtral", {"model_type": "dbrx"}, "model_type is 'dbrx'; known: mixtral, qwen3_moe,"),
        ("mixtral", {"num_local_experts": ...}, "config.json has no num_local_experts"),
        ("mixtral", {"num_experts_per_tok": 7}, "top_k is 7 but num_experts is 6"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is not 0"),
        ("mixtral", {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ("mixtral", {"hidden_act": []}, "hidden_act is []"),
        ("mixtral", {"model_type": {}}, "model_type is {}; known: mixtral, qwen3_moe,"),
        ("mixtral", {"num_hidden_layers": "3"}, "num_hidden_layers is '3'; it should be a whole number"),
        ("mixtral", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it should be"),
        ("mixtral", {"num_local_experts": 6.0}, "num_local_experts is 6.0; it should be a whole number"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it should be a whole number"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3; it should be of type list"),
        ("qwen3_moe", {"norm_topk_prob": "false"}, "norm_topk_prob is 'false'; it should be of type bool"),
        ("deepseek_v3", {"topk_group": 0}, "topk_group is 0; it should be a whole number from 1"),
        ("deepseek_v3", {"routed_scaling_factor": True}, "routed_scaling_factor is True; it should be of"),
        ("deepseek_v3", {"routed_scaling_factor": 10**400}, "routed_scaling_factor is 10"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_alpha make no activation: gate_max must be above 0"),
        (
            "gpt_oss",
            {"swiglu_alpha": "1"},
            "swiglu_alpha make no activation: alpha must be a number, not str",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"n_group": 4}, "which 4 groups cannot share evenly"),
        ("mixtral", {"model_type": "llama4"}, "model_type is 'llama4': it multiplies the input of an expert"),
        ("mixtral", {"model_type": "gemma4"}, "model_type is 'gemma4': its router has a norm, a scale and"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size is 0; it should be a whole number from 1"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias is True; only False is known: MoE has biases in"),
        ("nemotron_h", {"layers_block_type": ...}, "config.json has no num_hidden_layers"),
        ("nemotron_h", {"layers_block_type": "moe"}, "layers_block_type is 'moe'; it should be of type list"),
        ("nemotron_h", {"mlp_hidden_act": "gelu_new"}, "mlp_hidden_act is 'gelu_new'; known: relu2, silu,"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True; only False is known: MoE has biases in"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1; only 1e-12 is known"),
        ("ernie4_5_moe", {"moe_k": 1}, "moe_k is 1 and weights sum to 1"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is known"),
        ("granitemoe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1 and weights sum to 1"),
    ],
)
def test_configurations_that_are_something_else(family, changes, problem, tmp_path):
    save(tmp_path / "theirs", family)
    change_config(tmp_path / "theirs", **changes)
    (found,) = refused(tmp_path)
    assert problem in found


def cut(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def lose(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def move(folder):
    """One key to another file, in the index alone."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00004-of-00005.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def leave(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "damage, problems",
    [
        (cut, ["model-00002-of-00005.safetensors is missing or damaged: "]),
        (lose, ["model-00002-of-00005.safetensors is missing or damaged: "]),
        (move, ["lm_head.weight is in model-0000", "lm_head.weight is not in model-00004-of-00005"]),
        (leave, ["it has no weight_map of names to files"]),
        (lambda folder: (folder / INDEX).write_text("{"), ["it is not JSON"]),
        (lambda folder: (folder / INDEX).unlink(), ["there is neither model.safetensors nor model.safe"]),
        (lambda folder: (folder / "config.json").unlink(), ["there is no config.json"]),
        (shutil.rmtree, ["there is no such folder"]),
        (lambda folder: (folder / "config.json").write_text("[]"), ["it is not a JSON object"]),
        (lambda folder: (folder / "config.json").write_text("[" * 10**5), ["it is not JSON: "]),
    ],
    ids=["cut", "lose", "move", "leave", "index", "no-index", "no-config", "no-folder", "config", "deep"],
)
def test_damaged_files(damage, problems, tmp_path):
    save(tmp_path / "theirs", "mixtral")
    damage(tmp_path / "theirs")
    found = sorted(refused(tmp_path))
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True)), found


def test_a_target_that_is_not_empty_is_left_alone(tmp_path):
    save(tmp_path / "theirs", "mixtral")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    assert refused(tmp_path) == ["the folder is not empty: choose a new or empty one"]
    (tmp_path / "ours" / "notes.txt").unlink()
    convert(tmp_path / "theirs", tmp_path / "ours")  # an empty folder is as good as none
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file"):
        convert(tmp_path / "theirs", tmp_path / "file")


def test_a_shared_expert_that_the_configuration_has_not(tmp_path):
    save(tmp_path / "theirs", "deepseek_v3")
    change_config(tmp_path / "theirs", n_shared_experts=0)
    assert refused(tmp_path) == [
        f"model.layers.1.mlp.shared_experts.{name}_proj.weight is unknown in the MLP of a layer"
        for name in ("down", "gate", "up")
    ]


def test_the_way_back_has_its_own_faults(tmp_path):
    save(tmp_path / "theirs", "mixtral")
    assert "was not converted by moe_aiter" in refused(tmp_path, "huggingface")[0]
    convert(tmp_path / "theirs", tmp_path / "converted")
    assert refused(tmp_path, "moe_aiter", "converted") == ["it has the layout of moe_aiter already"]
    with pytest.raises(CheckpointError, match=r"there is no layer 'model.layers.2.mlp'"):
        load_moe(tmp_path / "converted", "model.layers.2.mlp")

    def spoil(found):
        found["model.layers.0.mlp.shared.down.weight"] = torch.zeros(1)
        found["model.layers.0.mlp.experts.down"] = found["model.layers.0.mlp.experts.down"][:5].clone()
        del found["model.layers.1.mlp.router.weight"]

    change(tmp_path / "converted", spoil)
    assert sorted(refused(tmp_path, "huggingface", "converted")) == [
        "model.layers.0.mlp.experts.down is (5, 16, 24); it should be (6, 16, 24)",
        "model.layers.0.mlp.shared.down.weight is unknown in the MLP of a layer",
        "model.layers.1.mlp.router.weight is missing",
    ]
    record = json.loads((tmp_path / "converted" / "config.json").read_text())["moe_aiter"]
    change_config(tmp_path / "converted", moe_aiter=record | {"moe": record["moe"] | {"top_k": 7}})
    assert "is damaged: ValueError: top_k is 7" in refused(tmp_path, "huggingface", "converted")[0]
    change_config(tmp_path / "converted", moe_aiter=record | {"moe": record["moe"] | {"num_experts": 10**9}})
    assert (
        "is damaged: ValueError: num_experts is 1000000000"
        in refused(tmp_path, "huggingface", "converted")[0]
    )
    change_config(tmp_path / "converted", moe_aiter=record | {"moe": None})
    assert "is damaged: AttributeError" in refused(tmp_path, "huggingface", "converted")[0]
    change_config(tmp_path / "converted", moe_aiter={"version": 2})
    assert "is damaged: ValueError: version 2" in refused(tmp_path, "huggingface", "converted")[0]


@pytest.mark.parametrize("fault", ["gate and up", "two experts", "scale"])
def test_a_wrong_layer_is_found_and_nothing_kept(fault, tmp_path, monkeypatch):
    """The formula is changed here, which is as far from what was written as if that were wrong."""
    save(tmp_path / "theirs", "deepseek_v3")
    read = Formula.__new__

    def wrong(kind, family, fused, config, get):
        swap = {"gate and up": ("gate_proj", "up_proj"), "two experts": ("experts.4.", "experts.5.")}
        a, b = swap.get(fault, ("", ""))
        config = config | {"routed_scaling_factor": 2.4} if fault == "scale" else config

        def other(name, place=()):
            swapped = name.replace(a, "\0").replace(b, a).replace("\0", b) if a else name
            return get(swapped, place)

        return read(kind, family, fused, config, other)

    monkeypatch.setattr(Formula, "__new__", wrong)
    (problem,) = refused(tmp_path)
    assert problem.startswith("model.layers.1.mlp differs from the formula of deepseek_v3 by ")


def test_weights_that_are_not_numbers_fail_the_check(tmp_path):
    save(tmp_path / "theirs", "olmoe")
    change(
        tmp_path / "theirs",
        lambda found: found["model.layers.1.mlp.experts.5.up_proj.weight"].fill_(torch.nan),
    )
    (problem,) = refused(tmp_path)
    assert problem.startswith("model.layers.1.mlp differs from the formula of olmoe by nan")


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    save(tmp_path / "theirs", "olmoe")

    def stop(what, done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "theirs", tmp_path / "ours", progress=stop)
    assert os.listdir(tmp_path) == ["theirs"]


def test_other_weights_in_the_folder_are_named_and_left_out(tmp_path):
    save(tmp_path / "theirs", "olmoe")
    (tmp_path / "theirs" / "consolidated.safetensors").write_bytes(b"")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    report = convert(tmp_path / "theirs", tmp_path / "ours")
    assert report.left_out == ["consolidated.safetensors"]
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "ours" / "consolidated.safetensors").exists()


@pytest.mark.parametrize("package", ["safetensors", "tqdm"])
def test_a_missing_package_says_how_to_install_it(package, tmp_path):
    """In a process of its own, where it cannot be imported; what needs none of them still can."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    (tmp_path / "theirs" / "model.safetensors").write_text("")
    code = (
        f"import sys; sys.modules['{package}'] = sys.modules['transformers'] = None\n"
        "import moe_aiter.integrations.checkpoints\n"
        "from moe_aiter.cli import main\n"
        "sys.exit(main(['convert', sys.argv[1], sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "theirs"), str(tmp_path / "ours")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"moe-aiter convert: error: {package} is missing: pip install '.[convert]' in the source tree\n"
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--shard-size 0", "'0' is not a size such as 500MB or 5GB"),
        ("--to olmoe", "invalid choice"),
        ("--noise 1", "need --upcycle"),
        ("--upcycle --top-k 2", "--upcycle needs --experts and --top-k"),
        ("--upcycle --experts 2 --top-k 3", "--top-k is 3 but --experts is 2"),
        ("--upcycle --experts 2 --top-k 1 --noise -1", "-1 must be at least 0 and finite"),
        ("--upcycle --experts 2 --top-k 1 --seed 99999999999999999999", "must be at least 0 and below 2^63"),
    ],
)
def test_the_command_refuses(flags, message, tmp_path, capsys):
    pytest.importorskip("tqdm")
    (tmp_path / "theirs").mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    import safetensors.torch

    safetensors.torch.save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "theirs/model.safetensors")
    try:
        status = main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), *flags.split()])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["theirs"]


@pytest.mark.parametrize(
    "name, value", [("latent", 8), ("selection_bias", True), ("shared_intermediate", 8), ("intermediate", 1)]
)
def test_damaged_record(name, value, tmp_path):
    save(tmp_path / "theirs", "mixtral")
    convert(tmp_path / "theirs", tmp_path / "ours", check=False)
    record = json.loads((tmp_path / "ours" / "config.json").read_text())["moe_aiter"]
    record["moe"][name] = value
    change_config(tmp_path / "ours", moe_aiter=record)
    for run in (
        lambda: load_moe(tmp_path / "ours", "model.layers.1.mlp"),
        lambda: convert(tmp_path / "ours", tmp_path / "x", to="hub"),
    ):
        with pytest.raises(CheckpointError):
            run()


def test_more_layers_than_tensors(tmp_path):
    save(tmp_path / "theirs", "mixtral")
    change_config(tmp_path / "theirs", num_hidden_layers=2**20)
    with pytest.raises(CheckpointError, match="1048576 layers, but there are only"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_settings_changed_since(tmp_path):
    save(tmp_path / "theirs", "deepseek_v3")
    convert(tmp_path / "theirs", tmp_path / "ours", check=False)
    change_config(tmp_path / "ours", n_group=2**20)
    with pytest.raises(CheckpointError, match="groups cannot share evenly"):
        convert(tmp_path / "ours", tmp_path / "x", to="huggingface")


EVIL = "\x1b[31mEVIL\x1b]0;owned\x07\nmoe-aiter: ok, converted"


def test_names_of_strangers_are_shown_without_commands_to_the_terminal(tmp_path, capsys):
    save(tmp_path / "theirs", "mixtral", shard="1GB")
    (tmp_path / "theirs" / f"{EVIL}.bin").write_bytes(b"")
    command = ["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert r"\x1b[31mEVIL\x1b]0;owned\x07\nmoe-aiter: ok, converted.bin" in out
    assert all(line.isprintable() for line in out.splitlines())
    shutil.rmtree(tmp_path / "ours")
    layer = MIXTRAL.format(0)
    change(tmp_path / "theirs", lambda t: t.update({f"{layer}{EVIL}": t[f"{layer}gate.weight"].clone()}))
    problems = refused(tmp_path)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.endswith(f"theirs: {problems[0]}") and line.isprintable() and "EVIL" in line
    change(tmp_path / "theirs", lambda t: t.update({f"{layer}{EVIL} 2": t[f"{layer}gate.weight"].clone()}))
    refused(tmp_path)
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-3:]
    assert "2 problems" in said[0] and all(line.isprintable() for line in said)
