"""`moe-aiter info --model`: the tiers of a model's products, without a GPU."""

import importlib
import json
import re

import pytest
import torch
from bench.test_models import config_classes

from moe_aiter import cli
from moe_aiter.bench import info as command

OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "intermediate_size": 2880}
QWEN = {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}
JAMBA = {"model_type": "jamba", "num_experts": 16, "intermediate_size": 1440, "num_experts_per_tok": 2}
DENSE = {"enable_moe_block": False, "num_experts": 8}
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
        ({"model_type": "llama4"}, "it has no n_routed_experts or num_local_experts or num_experts or "),
        (JAMBA | {"num_experts": 2.5}, "num_experts is 2.5; it should be a whole number"),
        (JAMBA | {"num_experts": [True]}, "num_experts is True; it should be a whole number"),
        (JAMBA | {"num_experts": [4, 16]}, "num_experts is [4, 16]; it should be a whole number"),
        (JAMBA | {"intermediate_size": []}, "intermediate_size is []; it should be a whole number"),
        (JAMBA | {"num_experts_per_tok": 17}, "a token cannot go to 17 of 16 experts"),
        (JAMBA | {"hidden_act": ["silu"]}, "hidden_act is ['silu']; known: silu, "),
        (JAMBA | {"hidden_act": ""}, "hidden_act is ''; known: silu, "),
        ({"model_type": "dense"}, "model_type is 'dense'; known: afmoe, "),
        ({"model_type": ["jamba"]}, "model_type is ['jamba']; known: afmoe, "),
        ({"model_type": "x" * 10_000}, "xxx...; known: afmoe, "),
        ({"model_type": "aria", "text_config": {}}, "it has no n_routed_experts or "),
        (
            {"model_type": "deepseek_v2", "n_routed_experts": 64, "intermediate_size": 8},
            "no moe_intermediate_size",
        ),
        (JAMBA | {"num_experts_per_tok": None}, "it has no num_experts_per_tok or "),
        (DENSE | {"model_type": "gemma4_text"}, "the model has no experts"),
        ({"model_type": "gemma4", "text_config": DENSE}, "the model has no experts"),
        (OSS | {"swiglu_limit": "7"}, "str"),
        ({"model_type": "deepseek_v4", "swiglu_limit": -1}, "-1"),
        (QWEN | {"num_experts": None}, "it has no n_routed_experts or num_local_experts or num_experts or "),
        (QWEN | {"hidden_act": "elu"}, "hidden_act is 'elu'; known: silu, "),
    ],
)
def test_mistakes(config, message, info):
    text = "\n".join(info(config, status=2))
    assert text.startswith("moe-aiter info: error: ") and message in text and len(text) < 2000


def test_what_is_neither_a_file_nor_a_model(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for model, message in (
        (str(tmp_path / "none.json"), "there is no such file or folder, and "),
        ("openai/gpt-oss-21b", "openai/gpt-oss-21b': there is no such file or folder, and "),
        ("", "there is no such file or folder, and "),
        ("Qwen3", "that could be Qwen3-30B-A3B; Qwen3-Next"),
        (str(tmp_path / "empty"), "there is no config.json"),
    ):
        assert cli.main(["info", "--model", model]) == 2
        assert message in capsys.readouterr().err


def test_more_rows_than_kernels_count(capsys):
    assert cli.main(["info", "--model", "gpt-oss-20b", "--tokens", str(2**29)]) == 2
    assert "536870912 tokens with 4 experts each are 2147483648 rows or more" in capsys.readouterr().err


def test_options_that_need_a_model(capsys):
    assert cli.main(["info", "--target", "sm_80"]) == 2 and cli.main(["info", "--tokens", "3"]) == 2
    assert capsys.readouterr().err.count("--target needs --model or --memory, --tokens needs --model") == 2


def test_tokens_of_a_published_model_are_those_of_its_row(capsys):
    assert cli.main(["info", "--model", "mixtral"]) == 0
    assert "= 4096, 4096, 14336, 8, 2; swiglu" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt-oss-20b", "GPT-OSS", "openai/gpt-oss-20b"])
def test_a_published_model_by_name(name, info, capsys):
    assert cli.main(["info", "--model", name, "--tokens", "64"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "without --target: as on sm_90 (H100, H200), whatever GPU is here\n"
    head, *rest = printed.out.splitlines()
    assert head.startswith(
        "gpt-oss-20b on sm_90, bfloat16: T, H, I, E, k = 64, 2880, 2880, 32, 4; swiglu_oai, "
    )
    assert rest == info(OSS, "--tokens", "64")[1:]


# no module of theirs has weights (E, rows, columns), or it takes another configuration
OTHER_MODULES = {"jetmoe", "nllb_moe", "switch_transformers", command.TWO_KINDS}
WIDTHS = ["intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"]


@pytest.mark.parametrize("family", sorted(set(command.families()) - OTHER_MODULES))
def test_sizes_and_layout_are_those_of_transformers_experts(family, info):
    """Each size that a configuration has is another number; the module made from it has the truth."""
    pytest.importorskip("transformers")
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {family}")
    configs = (kind() for kind in config_classes(family))
    config = next(config for config in configs if {*command.EXPERTS} & vars(text_of(config)).keys())
    text = text_of(config)
    numbers = dict.fromkeys(command.EXPERTS, 48) | dict.fromkeys(command.TOP_K, 3) | {"zero_expert_num": 0}
    numbers |= {name: 1024 + 64 * i for i, name in enumerate(["hidden_size", *WIDTHS])}
    for name in numbers.keys() & vars(text).keys():
        setattr(text, name, numbers[name])
    if family == "gemma4":
        text.enable_moe_block = True
    (name,) = (name for name in vars(module) if re.fullmatch(r"(?!.*(Shared|Talker)).*Experts", name))
    with torch.device("meta"):
        experts = getattr(module, name)(text)
    head, lie = info(config.to_dict(), common={})[0].split("; ")
    hidden, width, E, _ = map(int, head.split(" = 8192, ")[1].split(", "))
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    first = next(shape for name, shape in shapes.items() if re.match("gate_up_proj$|up_proj$", name))
    rows = width * (1 if first is shapes.get("up_proj") else 2)
    assert first == ((E, hidden, rows) if "transposed weights" in lie else (E, rows, hidden))
    assert ("biases" in lie) == any("bias" in name for name in shapes)


def text_of(config):
    for name in command.INNER[::-1]:
        config = getattr(config, name, config)
    return config


@pytest.mark.parametrize(
    "config, sizes",
    [
        ({"model_type": "jetmoe", "num_local_experts": 8, "intermediate_size": 56}, "2880, 56, 8, 4; swiglu"),
        (
            {
                "model_type": "jetmoe",
                "num_local_experts": 8,
                "intermediate_size": 56,
                "activation_function": "gelu",
            },
            "2880, 56, 8, 4; geglu",
        ),
        (
            {"model_type": "nllb-moe", "d_model": 64, "num_experts": 8, "encoder_ffn_dim": 56},
            "64, 56, 8, 2; relu",
        ),
        (
            {"model_type": "switch_transformers", "d_model": 64, "num_experts": 8, "d_ff": 56, "top_k": 50},
            "64, 56, 8, 1; relu",
        ),
        (
            {"model_type": "mistral3", "text_config": QWEN | {"model_type": "mistral4"} | COMMON},
            "2880, 768, 128, 4; swiglu",
        ),
        (
            {
                "model_type": "ernie4_5_vl_moe",
                "moe_num_experts": 64,
                "moe_intermediate_size": [1536, 512],
                "moe_k": 6,
            }
            | {"hidden_size": 64},
            "64, 1536, 64, 6; swiglu",
        ),
        (
            {"model_type": "hunyuan_v1_moe", "hidden_size": 64, "num_experts": 8, "moe_topk": [2, 2]}
            | {"intermediate_size": 56, "moe_intermediate_size": [40, 40]},
            "64, 56, 8, 2; swiglu",
        ),
        (
            {
                "model_type": "nemotron_h",
                "n_routed_experts": 8,
                "moe_intermediate_size": 56,
                "moe_latent_size": 96,
            },
            "96, 56, 8, 4; relu2",
        ),
        (
            OSS | {"swiglu_limit": 5.0},
            "2880, 2880, 32, 4; swiglu_limit(5.0, 5.0, 1.702, 1.0), transposed weights, ",
        ),
        (
            QWEN | {"model_type": "deepseek_v4", "swiglu_limit": 7},
            "2880, 768, 128, 4; swiglu_limit(7.0, 7.0, 1.0, 0.0)",
        ),
        (QWEN | {"model_type": "lfm2_moe", "hidden_act": "gelu"}, "2880, 768, 128, 4; swiglu"),
    ],
)
def test_what_families_call_it(config, sizes, info):
    whole = {"d_model", "text_config", "moe_k", "moe_topk"} & config.keys()
    assert f"= 8192, {sizes}" in info(config, common={} if whole else COMMON)[0]
