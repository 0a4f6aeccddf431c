"""Every reader of a run refuses what is no plain file, in one line and at once, and runs no pickle."""

import dataclasses
import pathlib
import types

import pytest
import torch
from hostile import KINDS, Readers, assert_no_file_is_refused, assert_no_pickle_is_run
from language_model import metrics
from language_model.checkpoint import OPTIMIZER, STATE, load_checkpoint, save_checkpoint, write_state
from language_model.command import continued
from language_model.model import Transformer
from language_model.presets import PRESETS, TrainConfig
from language_model.report import read_settings
from language_model.sharded import save_shards
from language_model.starts import STARTS
from language_model.trainer import make_optimizer

from moe_aiter import cli

for package in ("safetensors", "tqdm", "plotly"):
    pytest.importorskip(package, reason=f"{package} is not installed")

SMALL = PRESETS["test"]
STEP = "run/checkpoints/step-00000001"
SHARDS = STEP.replace("run", "shards")


def make(folder: pathlib.Path) -> None:
    """A run of one process and a run of several, after a step."""
    torch.manual_seed(0)
    model = Transformer(SMALL)
    optimizer = make_optimizer(model, SMALL)
    model(torch.randint(256, (2, 8)))[0].square().mean().backward()
    optimizer.step()
    (folder / "text.txt").write_text("a line of text\n" * 100)
    for run in ("run", "shards"):
        (folder / run / "checkpoints").mkdir(parents=True)
        dataclasses.replace(SMALL, data=("text.txt",)).save(folder / run / "config.json")
        (folder / run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    save_checkpoint(folder / "run" / "checkpoints", 1, model, optimizer)
    state = {"step": 1, "fingerprint": None}
    save_shards(folder / SHARDS, model, optimizer, lambda draft: write_state(draft, state))


def load(step: str):
    model = Transformer(SMALL)
    load_checkpoint(pathlib.Path(step), model, make_optimizer(model, SMALL))


def launched(name: str = "run"):
    launch = types.SimpleNamespace(restarts=1, name="call")
    args = types.SimpleNamespace(resume=None, out=pathlib.Path(name))
    continued(args, types.SimpleNamespace(launch=launch, first=True))


def command(words: str, path: str):
    return path, lambda: cli.main(words.split())


def at(call, path: str):
    return path, lambda: call(pathlib.Path(path))


READERS: Readers = {
    "TrainConfig.load": at(TrainConfig.load, "run/config.json"),
    "read_settings": at(read_settings, "run/config.json"),
    "read_metrics": at(metrics.read_metrics, "run/metrics.jsonl"),
    "Metrics": at(lambda path: metrics.Metrics(path, 1, 1.0, None).write([{}]), "run/metrics.jsonl"),
    "state.json": at(lambda path: load(STEP), f"{STEP}/{STATE}"),
    "model.safetensors": at(lambda path: load(STEP), f"{STEP}/model.safetensors"),
    "optimizer.safetensors": at(lambda path: load(STEP), f"{STEP}/{OPTIMIZER}"),
    ".metadata of a run": at(lambda path: load(SHARDS), f"{SHARDS}/.metadata"),
    "a shard of a run": at(lambda path: load(SHARDS), f"{SHARDS}/__0_0.distcp"),
    "launch": at(lambda path: launched(), "run/launch"),
    "resume: config.json": command("train --resume run", "run/config.json"),
    "resume: lock": command("train --resume run", "run/lock"),
    "sample": command("sample run", f"{STEP}/model.safetensors"),
    "report": command("report run", "run/metrics.jsonl"),
    "report: config.json": command("report run", "run/config.json"),
    "report: starts.jsonl": command("report run", f"run/{STARTS}"),
    "report: sample.txt": command("report run", "run/sample.txt"),
    "data": command("train --preset test --data file", "file"),
}
TAKE_FOLDERS = {"data"}
SILENT = {
    "read_metrics",
    "Metrics",
    "launch",
    "resume: lock",
    "report: starts.jsonl",
    "report: sample.txt",
    "data",
}


def mend_sums(path: pathlib.Path) -> None:
    """Write the SHA-256 sum of a changed file of a checkpoint."""
    state = path.with_name(STATE)
    if state.exists() and path != state:
        state.unlink()
        write_state(path.parent, {"step": 1, "fingerprint": None})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_is_refused_at_once(kind, folder, capsys):
    readers = {k: v for k, v in READERS.items() if kind != "folder" or k not in TAKE_FOLDERS}
    assert_no_file_is_refused(readers, kind, folder, capsys)


@pytest.mark.parametrize("then", [lambda path: None, mend_sums], ids=["plain", "sums"])
def test_no_pickle_is_run(then, folder, capsys):
    """Not even one whose SHA-256 sum is right."""
    assert_no_pickle_is_run(READERS, folder, capsys, SILENT, then)
