"""Text from a model, and `moe-aiter sample`."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from language_model.model import Transformer, generate, readable
from language_model.presets import PRESETS
from language_model.tests.test_trainer import arguments, in_a_folder_of_its_own, train  # noqa: F401

from moe_aiter import cli

pytestmark = pytest.mark.full


@pytest.fixture
def model():
    return Transformer(PRESETS["test"]).eval()


def test_length_and_repeatability(model):
    """Longer than the model can see at once."""
    text = generate(model, 40, 1.0, seed=1)
    assert len(text) == 40 > len(model.cos)
    assert text == generate(model, 40, 1.0, seed=1) != generate(model, 40, 1.0, seed=2)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-38, 1e-6])
def test_no_temperature_takes_the_likeliest_byte(model, temperature):
    logits, _ = model(torch.tensor([list(b"abc")]))
    assert generate(model, 1, temperature, seed=1, prompt=b"abc")[0] == logits[0, -1].argmax()


def test_no_byte_reaches_the_terminal_that_could_upset_it():
    assert readable(b"a\0b\tc\x1b[2J\xff\n") == "a\nb\tc\ufffd[2J\ufffd\n"


def test_the_command_repeats_the_sample_of_the_run_and_continues_a_prompt(capsys):
    """From the newest checkpoint, without the training text and without a change of the run."""
    assert train(*arguments("--out", "run")) == 0
    Path("text.txt").unlink()
    Path("run/checkpoints/unfinished-draft").mkdir()
    before = sorted(Path("run").rglob("*"))
    text = {}
    for words in ("", "--prompt 7é", "--prompt 7é --seed 1", "--prompt 7é --temperature 0 --tokens 5"):
        capsys.readouterr()
        assert cli.main(["sample", "run", *words.split()]) == 0
        text[words] = capsys.readouterr().out
    assert cli.main(["sample"]) == 2  # there is none in runs/
    Path("runs").mkdir()
    Path("runs/newest").symlink_to(Path("run").resolve())
    capsys.readouterr()
    assert cli.main(["sample"]) == 0 and capsys.readouterr().out == text[""]
    assert text.pop("") == Path("run/sample.txt").read_text()
    assert len(set(text.values())) == 3 and all(found.startswith("7é") for found in text.values())
    assert sorted(Path("run").rglob("*")) == before


def test_threads(monkeypatch):
    """The flag that the message on a busy CPU names."""
    assert train(*arguments("--out", "run", "--steps", "1")) == 0
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert cli.main(["sample", "run", "--tokens", "1", "--threads", "2"]) == 0
    assert threads == [2]


def test_a_letter_that_the_terminal_lacks_is_escaped(monkeypatch):
    """As on Windows, where the output of a pipe is not UTF-8."""
    assert train(*arguments("--out", "run", "--steps", "1")) == 0
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(["sample", "run", "--prompt", "7é", "--tokens", "0"]) == 0
    stdout.flush()
    assert stdout.buffer.getvalue().decode("ascii").strip() == r"7\xe9"


@pytest.mark.parametrize(
    "words, message",
    [
        ("nowhere", "nowhere is not a run folder: it has no config.json"),
        ("run --tokens -1", "--tokens is -1; it must be at least 0"),
        ("run --tokens 99999999999999", "--tokens is 99999999999999; it must be at least 0 and at most"),
        ("odd", "odd/config.json is not the configuration of a run: top_k is 9 but num_experts is "),
        ("run --temperature nan", "--temperature is nan; it must be at least 0"),
        ("run --device meta", "--device is 'meta'; it takes auto, cpu, cuda or cuda:N"),
        ("damaged", "step-00000001 is damaged, or of another model"),
        ("empty", "empty holds no checkpoint to sample from"),
    ],
)
def test_the_command_refuses(words, message, capsys):
    assert train(*arguments("--out", "run", "--steps", "1")) == 0
    for name in ("damaged", "empty"):
        shutil.copytree("run", name)
    Path("damaged/checkpoints/step-00000001/model.safetensors").write_text("")
    shutil.rmtree("empty/checkpoints")
    Path("odd").mkdir()
    config = json.loads(Path("run/config.json").read_text())
    Path("odd/config.json").write_text(json.dumps(config | {"top_k": 9, "num_experts": 8}))
    capsys.readouterr()
    assert cli.main(["sample", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-aiter sample: error: ") and message in err and err.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main(["sample", "--help"])
    flags = capsys.readouterr().out
    assert all(flag in flags for flag in re.findall("--[a-z-]+", err)), "a flag that the command lacks"
