"""Every reader of a file refuses what is no plain file, in one line and at once, and runs no pickle."""

import ast
import importlib.util
import json
import pathlib

import pytest
import torch
from hostile import KINDS, Readers, assert_no_file_is_refused, assert_no_pickle_is_run
from test_house import BENCHMARKS, EXAMPLE, FILES, nodes

from benchmarks import report
from moe_aiter import MoE, cli, files
from moe_aiter.bench import measure, tune_gemm
from moe_aiter.distributed import load_sharded, save_sharded
from moe_aiter.tuning import aiter_csv, aiter_json
from moe_aiter.tuning.choice import CHOICES
from moe_aiter.tuning.table import TILES

for package in ("safetensors", "tqdm", "matplotlib"):
    pytest.importorskip(package, reason=f"{package} is not installed")


def make(folder: pathlib.Path) -> None:
    """What the readers need, beside the file that each reads."""
    torch.manual_seed(0)
    save_sharded(folder / "sharded", MoE(8, 4, num_experts=2, top_k=1))
    for name in ("theirs", "adapter"):
        (folder / name).mkdir()
    (folder / "theirs" / "config.json").write_text('{"model_type": "mixtral"}')
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(LORA))
    (folder / "given.csv").touch()


def shard():
    load_sharded("sharded", MoE(8, 4, num_experts=2, top_k=1))


def adapter():
    from moe_aiter.integrations.lora import load_lora

    load_lora(torch.nn.Linear(1, 1), "adapter")


def at(call, path: str = "file"):
    return path, lambda: call(pathlib.Path(path))


LORA = {"peft_type": "LORA", "target_parameters": ["experts.down_proj"], "r": 1, "lora_alpha": 1}
TABLE = aiter_csv.UNTUNED
READERS: Readers = {
    "read_text": at(files.read_text),
    "read_json": at(files.read_json),
    "locked": at(lambda path: files.locked(path).__enter__()),
    ".metadata": at(lambda path: shard(), "sharded/.metadata"),
    "a shard": at(lambda path: shard(), "sharded/__0_0.distcp"),
    "convert: config.json": at(lambda path: cli.main(["convert", "theirs", "ours"]), "theirs/config.json"),
    "convert: weights": at(lambda path: cli.main(["convert", "theirs", "ours"]), "theirs/model.safetensors"),
    "convert: index": at(
        lambda path: cli.main(["convert", "theirs", "ours"]), "theirs/model.safetensors.index.json"
    ),
    "TILES.read": at(TILES.read),
    "CHOICES.read": at(CHOICES.read),
    "aiter_csv.read": at(lambda path: list(aiter_csv.read(path))),
    "read_untuned": at(aiter_csv.read_untuned),
    "aiter_csv.add_rows": at(lambda path: aiter_csv.add_rows(path, [dict.fromkeys(TABLE, "1")], TABLE)),
    "aiter_json.read_configs": at(aiter_json.read_configs.__wrapped__),
    "model_sizes": at(tune_gemm.model_sizes),
    "bench report: csv": at(lambda path: report.update(path, path)),
    "bench report: document": at(lambda path: report.update(path.with_name("given.csv"), path)),
    "bench: columns": at(lambda path: measure.check_columns(path, [])),
    "bench: append": at(lambda path: measure.append(path, [], [])),
}
if importlib.util.find_spec("transformers"):
    READERS |= {
        "load_lora: config": at(lambda path: adapter(), "adapter/adapter_config.json"),
        "load_lora: weights": at(lambda path: adapter(), "adapter/adapter_model.safetensors"),
    }
TAKE_FOLDERS = {"model_sizes"}
SILENT = {"read_text", "locked", *(name for name in READERS if name.startswith("bench"))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_is_refused_at_once(kind, folder, capsys):
    readers = {k: v for k, v in READERS.items() if kind != "folder" or k not in TAKE_FOLDERS}
    assert_no_file_is_refused(readers, kind, folder, capsys)


def test_no_pickle_is_run(folder, capsys):
    assert_no_pickle_is_run(READERS, folder, capsys, SILENT)


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
    """`files.opened`, `read_text`, `read_json`; `plain` for what opens a path by itself."""
    found = []
    for path in FILES + BENCHMARKS + EXAMPLE:
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
