"""`moe-aiter info --model`: the tiers of a model's products, without a GPU."""

import json

import pytest
from bench.test_models import config_classes

from moe_aiter import cli
from moe_aiter.bench.info import INNER, SIZES
from moe_aiter.bench.models import models

OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "intermediate_size": 2880}
QWEN = {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}
JAMBA = {"model_type": "jamba", "num_experts": 16, "intermediate_size": 1440, "num_experts_per_tok": 2}
COMMON = {"hidden_size": 2880, "num_experts_per_tok": 4, "num_hidden_layers": 2}
PARTS = ["up", "down", "down_grad", "dW_down", "dx", "dW_up"]


@pytest.fixture
def info(tmp_path, capsys):
    def run(config, *flags, status=0, common=COMMON):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(common | config))
        assert cli.main(["info", "--model", str(path), *flags]) == status
        out = capsys.readouterr()
        return (out.err if status else out.out).splitlines()

    return run


def kernels(lines):
    """By product, the sizes and the last column."""
    cells = [line.split(maxsplit=4) for line in lines[2:]]
    assert [row[0] for row in cells] == PARTS
    return {name: (tuple(map(int, sizes)), text) for name, *sizes, text in cells}


def test_each_product_has_sizes_and_a_tier(info):
    lines = info(QWEN)
    assert lines[0] == "qwen3_moe on sm_90, bfloat16: T, H, I, E, k = 8192, 2880, 768, 128, 4; swiglu"
    found = kernels(lines)
    assert {text for _, text in found.values()} == {"hopper"}
    assert found["up"][0] == (32768, 1536, 2880) and found["dx"][0] == (32768, 2880, 1536)
    assert kernels(info(QWEN, "--tokens", "10"))["dW_up"][0] == (2880, 1536, 40)


def test_reasons(info):
    found = kernels(info(QWEN | {"moe_intermediate_size": 356}))
    assert found["up"][1] == "portable: I = 356 is no multiple of 8"
    assert kernels(info(QWEN, "--tokens", "64"))["down"][1].startswith(
        "portable: it is faster for so few rows"
    )


def test_weights_lie_as_transformers_has_them(info):
    head = info(OSS)[0]
    assert head.endswith("swiglu_oai, transposed weights, interleaved gate, biases")


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942", "gfx950"])
def test_other_gpus_have_portable_kernels(target, info):
    found = kernels(info(OSS, "--target", target))
    assert {text for _, text in found.values()} == {f"portable: {target} is no Hopper GPU"}


def test_the_folder_of_a_checkpoint(info, tmp_path, capsys):
    lines = info(QWEN)
    assert cli.main(["info", "--model", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "llama4"}, "it has no number of experts: none of n_routed_experts, "),
        (JAMBA | {"num_experts": 2.5}, "num_experts is 2.5; it should be a whole number"),
        (JAMBA | {"num_experts": [True]}, "num_experts is True; it should be a whole number"),
        (JAMBA | {"intermediate_size": []}, "intermediate_size is []; it should be a whole number"),
        (JAMBA | {"hidden_act": ["silu"]}, "hidden_act is ['silu']; known: silu, "),
        ({"model_type": "dense"}, "model_type is 'dense'; known: afmoe, "),
        ({"model_type": ["jamba"]}, "model_type is ['jamba']; known: afmoe, "),
        ({"model_type": "aria", "text_config": {}}, "it has no number of experts"),
        (QWEN | {"num_experts": None}, "config.json has no num_experts"),
        (QWEN | {"hidden_act": "elu"}, "hidden_act is 'elu'; known: silu, "),
    ],
)
def test_mistakes(config, message, info):
    text = "\n".join(info(config, status=2))
    assert text.startswith("moe-aiter info: error: config.json: ") and message in text


def test_what_is_neither_a_file_nor_a_model(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for model, message in (
        (str(tmp_path / "none.json"), "there is no such file or folder, and "),
        ("openai/gpt-oss-21b", "openai/gpt-oss-21b: there is no such file or folder, and "),
        (str(tmp_path / "empty"), "there is no config.json"),
    ):
        assert cli.main(["info", "--model", model]) == 2
        assert message in capsys.readouterr().err


def test_options_that_need_a_model(capsys):
    assert cli.main(["info", "--target", "sm_80"]) == 2 and cli.main(["info", "--tokens", "3"]) == 2
    assert capsys.readouterr().err.count("--target and --tokens need --model") == 2


@pytest.mark.parametrize("name", ["gpt-oss-20b", "openai/gpt-oss-20b"])
def test_a_published_model_by_name(name, info, capsys):
    assert cli.main(["info", "--model", name, "--tokens", "64"]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith(
        "gpt-oss-20b on sm_90, bfloat16: T, H, I, E, k = 64, 2880, 2880, 32, 4; swiglu_oai, "
    )
    assert rest == info(OSS, "--tokens", "64")[1:]


@pytest.mark.parametrize(
    "family", sorted({family for model in models().values() for family in model.families})
)
def test_every_family_of_the_map(family, info):
    """With a configuration of transformers, but for the sizes, which are those of the row."""
    pytest.importorskip("transformers")
    model = next(model for model in models().values() if family in model.families)
    try:
        texts = [kind().to_json_string(use_diff=False) for kind in config_classes(family)]
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {family}")
    names = SIZES["number of experts"]
    config = text = json.loads([text for text in texts if any(f'"{name}"' in text for name in names)][-1])
    while not {"hidden_size", "d_model"} & text.keys():
        text = text[next(name for name in INNER if name in text)]
    for names, size in zip(SIZES.values(), model.shape.sizes[1:], strict=True):
        there = [name for name in names if name in text]
        text[(there or names)[0]] = size
    text.pop("moe_latent_size", None)
    head, lie = info(config, common={})[0].split("; ")
    assert head.endswith(f"T, H, I, E, k = 8192, {', '.join(map(str, model.shape.sizes[1:]))}")
    assert lie.split(", ")[0] == model.shape.activation.split(", ")[0]
    assert ("transposed weights" in lie, "interleaved gate" in lie, "biases" in lie) == (
        model.shape.transposed,
        model.shape.interleaved,
        model.shape.bias,
    )
