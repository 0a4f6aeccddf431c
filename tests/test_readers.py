"""Every reader of a file refuses what is no plain file, in one line and at once, and runs no pickle."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import types

import pytest
import torch
from hostile import error_of, no_file, pickles
from test_house import BENCHMARKS, FILES, nodes

from benchmarks import report
from moe_aiter import MoE, cli, files
from moe_aiter.bench import measure, tune_gemm
from moe_aiter.distributed import load_sharded, save_sharded
from moe_aiter.training import metrics
from moe_aiter.training.checkpoint import OPTIMIZER, STATE, load_checkpoint, save_checkpoint, write_state
from moe_aiter.training.command import continued
from moe_aiter.training.model import Transformer
from moe_aiter.training.presets import PRESETS, TrainConfig
from moe_aiter.training.report import read_settings
from moe_aiter.training.sharded import save_shards
from moe_aiter.training.trainer import make_optimizer
from moe_aiter.tuning import aiter_csv, aiter_json
from moe_aiter.tuning.choice import CHOICES
from moe_aiter.tuning.table import TILES

for package in ("safetensors", "tqdm", "matplotlib"):
    pytest.importorskip(package, reason=f"{package} is not installed")

SMALL = PRESETS["test"]
STEP = "run/checkpoints/step-00000001"
KINDS = ["pipe", "link to a pipe", "device", "folder", "socket"]


def make(folder: pathlib.Path) -> None:
    """What the readers need, beside the file that each reads."""
    torch.manual_seed(0)
    model = Transformer(SMALL)
    optimizer = make_optimizer(model, SMALL)
    model(torch.randint(256, (2, 8)))[0].square().mean().backward()
    optimizer.step()
    for run in ("run", "shards"):
        (folder / run / "checkpoints").mkdir(parents=True)
        SMALL.save(folder / run / "config.json")
        (folder / run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    save_checkpoint(folder / "run" / "checkpoints", 1, model, optimizer)
    path, state = folder / "shards" / "checkpoints" / "step-00000001", {"step": 1, "fingerprint": None}
    save_shards(path, model, optimizer, lambda draft: write_state(draft, state))
    save_sharded(folder / "sharded", MoE(8, 4, num_experts=2, top_k=1))
    for name in ("theirs", "adapter"):
        (folder / name).mkdir()
    (folder / "theirs" / "config.json").write_text('{"model_type": "mixtral"}')
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(LORA))
    (folder / "given.csv").touch()


def load(run: str):
    model = Transformer(SMALL)
    load_checkpoint(pathlib.Path(run), model, make_optimizer(model, SMALL))


def shard():
    load_sharded("sharded", MoE(8, 4, num_experts=2, top_k=1))


def launched(name: str = "run"):
    launch = types.SimpleNamespace(restarts=1, name="call")
    args = types.SimpleNamespace(resume=None, out=pathlib.Path(name))
    continued(args, types.SimpleNamespace(launch=launch, first=True))


def adapter():
    from moe_aiter.integrations.lora import load_lora

    load_lora(torch.nn.Linear(1, 1), "adapter")


def at(call, path: str = "file"):
    return path, lambda: call(pathlib.Path(path))


LORA = {"peft_type": "LORA", "target_parameters": ["experts.down_proj"], "r": 1, "lora_alpha": 1}
TABLE = aiter_csv.UNTUNED
READERS = {  # name: (the file, a call that reads it)
    "read_text": at(files.read_text),
    "read_bytes": at(files.read_bytes),
    "read_json": at(files.read_json),
    "locked": at(lambda path: files.locked(path).__enter__()),
    "TrainConfig.load": at(TrainConfig.load, "run/config.json"),
    "read_settings": at(read_settings, "run/config.json"),
    "read_metrics": at(metrics.read_metrics, "run/metrics.jsonl"),
    "Metrics": at(lambda path: metrics.Metrics(path, 1, 1.0, None).write([{}]), "run/metrics.jsonl"),
    "state.json": at(lambda path: load(STEP), f"{STEP}/{STATE}"),
    "model.safetensors": at(lambda path: load(STEP), f"{STEP}/model.safetensors"),
    "optimizer.safetensors": at(lambda path: load(STEP), f"{STEP}/{OPTIMIZER}"),
    ".metadata of a run": at(
        lambda path: load(STEP.replace("run", "shards")), "shards/checkpoints/step-00000001/.metadata"
    ),
    "a shard of a run": at(
        lambda path: load(STEP.replace("run", "shards")), "shards/checkpoints/step-00000001/__0_0.distcp"
    ),
    ".metadata": at(lambda path: shard(), "sharded/.metadata"),
    "a shard": at(lambda path: shard(), "sharded/__0_0.distcp"),
    "launch": at(lambda path: launched(), "run/launch"),
    "resume: config.json": at(lambda path: cli.main(["train", "--resume", "run"]), "run/config.json"),
    "resume: lock": at(lambda path: cli.main(["train", "--resume", "run"]), "run/lock"),
    "sample": at(lambda path: cli.main(["sample", "run"]), f"{STEP}/model.safetensors"),
    "plot": at(lambda path: cli.main(["plot", "run"]), "run/metrics.jsonl"),
    "report": at(lambda path: cli.main(["report", "run"]), "run/metrics.jsonl"),
    "report: config.json": at(lambda path: cli.main(["report", "run"]), "run/config.json"),
    "data": at(lambda path: cli.main(["train", "--preset", "test", "--data", "file"])),
    "convert: config.json": at(lambda path: cli.main(["convert", "theirs", "ours"]), "theirs/config.json"),
    "convert: weights": at(lambda path: cli.main(["convert", "theirs", "ours"]), "theirs/model.safetensors"),
    "convert: index": at(
        lambda path: cli.main(["convert", "theirs", "ours"]), "theirs/model.safetensors.index.json"
    ),
    "TILES.read": at(TILES.read),
    "CHOICES.read": at(CHOICES.read),
    "aiter_csv.read": at(lambda path: list(aiter_csv.read(path))),
    "read_untuned": at(aiter_csv.read_untuned),
    "aiter_csv.append": at(lambda path: aiter_csv.append(path, [dict.fromkeys(TABLE, "1")], TABLE)),
    "aiter_json.read": at(aiter_json.read.__wrapped__),
    "model_sizes": at(tune_gemm.model_sizes),
    "bench report: csv": at(lambda path: report.update(path, path)),
    "bench report: document": at(lambda path: report.update(path.with_name("given.csv"), path)),
    "bench: columns": at(measure.columns),
    "bench: append": at(lambda path: measure.append(path, [], [])),
}
if importlib.util.find_spec("transformers"):
    READERS |= {
        "load_lora: config": at(lambda path: adapter(), "adapter/adapter_config.json"),
        "load_lora: weights": at(lambda path: adapter(), "adapter/adapter_model.safetensors"),
    }
TAKE_FOLDERS = {"data", "model_sizes"}
LINK = "a link out of the folder|Too many levels"
SAYS = {
    "pipe": "it is a pipe, not a plain file|no text file there",
    "link to a pipe": f"it is a pipe, not a plain file|no text file there|{LINK}",
    "device": f"it is a device, not a plain file|no text file there|{LINK}",
    "folder": "Is a directory",
    "socket": "it is a socket, not a plain file|no text file there|No such device or address",
}
READ_AS_TEXT = {
    "read_text",
    "read_bytes",
    "read_metrics",
    "Metrics",
    "locked",
    "launch",
    "resume: lock",
    "data",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_is_refused_at_once(kind, folder, capsys):
    for name, (path, call) in READERS.items():
        if kind == "folder" and name in TAKE_FOLDERS:
            continue
        path = folder / path
        if os.path.lexists(path):
            path.rename(folder / "aside")
        with no_file(kind, path):
            error = error_of(call, path)
        printed = capsys.readouterr().err.strip()
        message = printed if error is None else str(error)
        assert re.search(SAYS[kind], message), f"{name}: {error!r} {printed}"
        assert "\n" not in message, f"{name}: {message}"
        files.remove(path)
        if (folder / "aside").exists():
            (folder / "aside").rename(path)


@pytest.mark.parametrize("how", ["plain", "sums"])
def test_no_pickle_is_run(how, folder, capsys):
    """Not even one whose SHA-256 sum is right."""
    mark = folder / "mark"
    for name, (path, call) in READERS.items():
        whole = (folder / path).read_bytes() if (folder / path).exists() else None
        for kind, content in pickles(mark).items():
            (folder / path).write_bytes(content)
            step = (folder / path).parent
            if how == "sums" and (step / STATE).exists() and path != f"{STEP}/{STATE}":
                (step / STATE).unlink()
                write_state(step, {"step": 1, "fingerprint": None})
            error = error_of(call, folder / path)
            assert not mark.exists(), f"{name} has run a {kind}"
            message = str(error or capsys.readouterr().err.strip())
            assert message or name in READ_AS_TEXT or name.startswith("bench"), f"{name} has read a {kind}"
            assert "weights_only" not in message and "\n" not in message, f"{name}: {message}"
        (folder / path).unlink(missing_ok=True)
        if whole is not None:
            (folder / path).write_bytes(whole)


RUNS_CODE = {"eval", "exec", "compile"}
UNPICKLES = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "dcp.load_state_dict",
    "np.load",
    "numpy.load",
}
OPENS = {"open", "read_text", "read_bytes", "fromfile", "memmap", "safe_open", "load_file"}


def opens(call: ast.Call) -> bool:
    """Whether a call opens a file in a way that `files` does not check."""
    name = ast.unparse(call.func)
    owner, _, last = name.rpartition(".")
    if last not in OPENS or owner == "self" or name in ("read_text", "read_bytes"):
        return False
    given = (
        call.args[1] if len(call.args) > 1 and not owner else call.args[0] if owner and call.args else None
    )
    if last == "open" and isinstance(given, ast.Constant) and given.value in ("w", "wb"):
        return False  # it writes a new file
    checked = call.args and isinstance(call.args[0], ast.Call) and ast.unparse(call.args[0].func) == "plain"
    return not checked and ast.unparse(call.args[0] if call.args else call) != "os.devnull"


def test_every_file_is_opened_by_one_that_checks_it():
    """`files.opened`, `read_text`, `read_bytes`, `read_json`; `plain` for what opens a path by itself."""
    found = []
    for path in FILES + BENCHMARKS:
        for call in nodes(path, ast.Call):
            name = ast.unparse(call.func)
            if path.name == "files.py" and path.parent.name == "moe_aiter":
                continue
            safe = name != "torch.load" or any(
                k.arg == "weights_only" and k.value.value for k in call.keywords
            )
            if opens(call) or not safe or name in RUNS_CODE | UNPICKLES:
                found.append(f"{path}:{call.lineno}: {ast.unparse(call)}")
    assert not found, "\n".join(found)
