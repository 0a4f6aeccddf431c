"""`moe-aiter info --model`: the tiers of a model's products, without a GPU."""

import json

import pytest

from moe_aiter import cli

OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "intermediate_size": 2880}
QWEN = {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}
COMMON = {"hidden_size": 2880, "num_experts_per_tok": 4, "num_hidden_layers": 2}
PARTS = ["up", "down", "down_grad", "dW_down", "dx", "dW_up"]


@pytest.fixture
def info(tmp_path, capsys):
    def run(config, *flags, status=0):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(COMMON | config))
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
        ({"model_type": "llama4"}, "model_type is 'llama4': it multiplies the input of an expert"),
        ({"model_type": "dense"}, "model_type is 'dense'; known: mixtral, "),
        (QWEN | {"num_experts": None}, "config.json has no num_experts"),
        (QWEN | {"hidden_act": "elu"}, "hidden_act is 'elu'; known: silu, "),
    ],
)
def test_mistakes(config, message, info):
    (line,) = info(config, status=2)
    assert line.startswith("moe-aiter info: error: config.json: ") and message in line


def test_no_file(tmp_path, capsys):
    assert cli.main(["info", "--model", str(tmp_path / "none.json")]) == 2
    assert "there is no none.json" in capsys.readouterr().err
