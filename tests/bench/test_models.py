"""The table of models agrees with transformers, and the command measures and says what cannot run."""

import csv
import importlib
import pkgutil
import re

import pytest
import torch

from moe_aiter import cli
from moe_aiter.bench import layer, models
from moe_aiter.kernels.base.activations import get_activation

NAMES = (  # what configurations call the sizes
    ("hidden_size", "d_model"),
    ("expert_ffn_hidden_size", "moe_intermediate_size", "intermediate_size"),
    ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k"),
)
# families whose defaults are those of no checkpoint: the rows have the checkpoint's
OTHER_DEFAULTS = {
    *(
        "afmoe",
        "aria",
        "deepseek_v2",
        "dots1",
        "ernie4_5_vl_moe",
        "exaone_moe",
        "gemma4",
        "gpt_oss",
        "granitemoe",
    ),
    *("granitemoehybrid", "hunyuan_v1_moe", "minimax", "nemotron_h", "nllb_moe", "olmoe"),
    *("qwen3_vl_moe", "switch_transformers"),
}
# families of transformers without a row
LEFT_OUT = {
    **dict.fromkeys(
        (
            "axk2",
            "bailing_hybrid",
            "cohere2_moe",
            "dots3_note",
            "flint",
            "glm5_next",
            "granitemoe_swa",
            "hy_v4",
            "hy_v4_vl",
            "inkling2",
            "inkling2_loop",
            "lara_mini",
            "granitemoeshared",
            "kolibri1",
            "qwen4_exp",
            "step3p7",
            "deepseek_ocr2",
            "unlimited_ocr",
            "diffusion_gemma",
        ),
        "the sizes of a checkpoint are not confirmed",
    ),
    "dbrx": "gate, up and down are three tensors, and down lies by columns",
    "muse_spark": "it normalises the output of each expert",
}


def run(*argv):
    return cli.main(["bench", "models", *map(str, argv)])


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def rows():
    return models.models().values()


def test_rows_are_well_formed():
    for model in rows():
        shape = model.shape
        assert shape.top_k <= shape.num_experts
        assert not shape.interleaved or get_activation(shape.activation).gated
        gate = (
            ""
            if not get_activation(shape.activation).gated
            else ("side by side", "interleaved")[shape.interleaved]
        )
        assert model.cells["gate"] == gate and model.cells["layout"] in ("rows", "transposed")
        assert bool(model.cells["checkpoint"]) == bool(model.families)
        assert model.cells["biases"] in ("yes", "no")


def config_classes(family):
    """The configurations of a family that have experts."""
    from transformers import PretrainedConfig

    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    for kind in vars(module).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, PretrainedConfig)
            and kind.__module__ == module.__name__
        ):
            yield kind


def sizes_of(config):
    values = ([getattr(config, name, None) for name in names] for names in NAMES)
    return tuple(next((v for v in found if type(v) is int), None) for found in values)


@pytest.mark.parametrize("family", sorted({family for model in rows() for family in model.families}))
def test_a_row_agrees_with_the_defaults_of_transformers(family):
    pytest.importorskip("transformers")
    there = {model.shape.sizes[1:] for model in rows() if family in model.families}
    try:
        defaults = {sizes_of(kind()) for kind in config_classes(family)}
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {family}")
    assert bool(there & defaults) == (family not in OTHER_DEFAULTS), (there, defaults)


def test_every_family_of_transformers_has_a_row_or_a_reason():
    transformers = pytest.importorskip("transformers.models")
    known = {family for model in rows() for family in model.families}
    assert not known & LEFT_OUT.keys()
    with_experts = set()
    for info in pkgutil.iter_modules(transformers.__path__):
        path = next(iter(transformers.__path__)) + f"/{info.name}/modeling_{info.name}.py"
        try:
            with open(path) as file:
                source = file.read()
        except FileNotFoundError:
            continue
        if re.search(r"^class \w+Experts\(|^@use_experts_implementation", source, re.M):
            with_experts.add(info.name)
    assert with_experts <= known | LEFT_OUT.keys()


def test_flags_of_the_rows_are_those_of_transformers_decorator():
    """A class that has transformers' decorator says whether its weights are transposed and have biases."""
    pytest.importorskip("transformers")
    for model in rows():
        for family in model.families:
            try:
                module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            except ModuleNotFoundError:
                continue
            with open(module.__file__) as file:
                found = re.findall(r"@use_experts_implementation(?:\((.*)\))?\nclass", file.read())
            for flags in found:
                transposed, bias = "is_transposed=True" in flags, "has_bias=True" in flags
                assert (transposed, bias) == (
                    model.shape.transposed,
                    model.shape.bias,
                ) or ", rows" in model.name
                gated = get_activation(model.shape.activation).gated
                assert gated == ("has_gate=False" not in flags)
                assert model.shape.interleaved == ("is_concatenated=False" in flags)


HEAD = "model,checkpoint,families,tokens,hidden,intermediate,experts,top_k,layout,gate,biases,activation\n"
TOYS = (
    "plain,a/b,c,64,32,24,5,2,rows,side by side,no,swiglu\n"
    "oai,a/b,c,64,32,24,5,2,transposed,interleaved,yes,swiglu_oai\n"
    "relu2,a/b,c,64,32,24,5,1,rows,,no,relu2\n"
    "relu,a/b,c,64,32,24,5,2,rows,,yes,relu\n"
    "geglu,a/b,c,64,32,24,5,3,transposed,side by side,no,geglu_tanh\n"
)


@pytest.fixture
def toys(tmp_path, monkeypatch):
    path = tmp_path / "toys.csv"
    path.write_text(HEAD + TOYS)
    monkeypatch.setattr(models, "MODELS", path)
    models.models.cache_clear()
    yield
    models.models.cache_clear()


def test_every_contender_has_a_row(toys, tmp_path, capsys):
    path = tmp_path / "models.csv"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = "plain", "oai", "relu2", "relu", "geglu"
    assert run("--device", device, "--model", *words, "--reps", 1, "--no-compile", "--out", path) == 0
    printed = capsys.readouterr().out
    for name, line in zip(words, printed.splitlines()[-len(words) :], strict=True):
        assert re.match(rf"{name}: [\d.]+ times as fast as .*grouped_mm \(.* ms a step\), peak memory ", line)
    found = read(path)
    assert list(dict.fromkeys(row["model"] for row in found)) == list(words)
    for model in words:
        own = [row for row in found if row["model"] == model]
        names = [row["contender"] for row in own]
        assert names[0].startswith("moe_aiter experts, ") and "torch grouped_mm" in names
        assert "matmuls of the same FLOPs" in names[-1]
        if "skipping Hugging Face" not in printed:
            assert any("Hugging Face" in name for name in names)
        for row in own:
            assert list(row) == models.COMMAND.fields
            assert float(row["step_ms"]) > 0 and not row["note"], row
    assert {row["layout"] for row in found if row["model"] == "geglu"} == {"transposed"}


@pytest.mark.full
def test_compiled_code_is_a_contender(toys, tmp_path):
    path = tmp_path / "models.csv"
    assert run("--device", "cpu", "--model", "plain", "--reps", 1, "--only", "compiled", "--out", path) == 0
    assert [(row["contender"], row["note"]) for row in read(path)] == [("torch grouped_mm, compiled", "")]


def test_what_cannot_run_says_so_and_the_rest_goes_on(toys, tmp_path, monkeypatch):
    path, make = tmp_path / "models.csv", models.new_problem

    def scarce(shape, *rest):
        if shape.activation == "relu2":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried")
        return make(shape, *rest)

    def broken(p):
        return layer.Contender("torch grouped_mm", lambda: torch.empty(3) @ torch.empty(4), (p.x,))

    monkeypatch.setattr(models, "new_problem", scarce)
    monkeypatch.setattr(models.layer, "torch_grouped_mm", broken)
    flags = "--device", "cpu", "--reps", 1, "--no-compile", "--only", "torch", "matmuls"
    assert run(*flags, "--model", "relu2", "geglu", "--out", path) == 1
    notes = {(row["model"], row["contender"]): row["note"] for row in read(path)}
    assert notes["relu2", "all"] == "OutOfMemoryError: CUDA out of memory."
    assert notes["geglu", "torch grouped_mm"].startswith("RuntimeError: ")
    assert notes["geglu", "dense matmuls of the same FLOPs"] == ""


@pytest.mark.parametrize(
    "flags, message",
    [
        ((), "all models take hours on a CPU: name some with --model"),
        (("--model", "none such"), "--model: no name contains 'none such'; there are Mixtral 8x7B; "),
        (("--model", "Mixtral", "--tier", "hopper"), "--tier hopper: there is no Hopper GPU"),
    ],
)
def test_mistakes(flags, message, capsys):
    assert run("--device", "cpu", *flags) == 2
    assert message in capsys.readouterr().err


def test_names():
    assert [model.name for model in models.named_models(["gpt-oss-20b"])] == ["gpt-oss-20b"]
    assert len(models.named_models(["GPT-oss"])) == 3
    assert len(models.named_models(None)) == len(models.models())
    words = ["openai/GPT-oss-20b", "mixtral"]
    assert [model.name for model in models.named_models(words)][:2] == ["Mixtral 8x7B", "gpt-oss-20b"]
    for words in (["gpt-oss-20b", "nosuch"], [""]):
        with pytest.raises(ValueError, match=f"no name contains {words[-1]!r}"):
            models.named_models(words)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base", "qwen/qwen3-30b-a3b-instruct"]
)
def test_a_checkpoint_that_was_trained_further_has_the_sizes_of_its_base(name):
    assert [model.name for model in models.named_models([name])] == ["Qwen3-30B-A3B"]
