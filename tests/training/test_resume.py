"""`--resume`: the run's own flags are accepted, another process is locked out, and links are not followed."""

import json
import os
from pathlib import Path

import pytest
from training.test_trainer import arguments, in_a_folder_of_its_own, losses, train  # noqa: F401

from moe_aiter import cli
from moe_aiter.files import locked
from moe_aiter.training import UsageError, presets
from moe_aiter.training.metrics import truncate_metrics


def test_the_runs_own_flags_may_be_given_again(monkeypatch):
    monkeypatch.setattr(presets, "pick_dtype", lambda device: "float32")  # of "auto", on any machine
    own = arguments(
        "--out",
        "run",
        "--steps",
        "3",
        "--lr",
        "0.002",
        "--seed",
        "5",
        "--dtype",
        "auto",
        "--sample-bytes",
        "0",
    )
    assert train(*own) == 0
    own[own.index("--steps") + 1] = "4"
    assert train(*own, "--resume") == 0
    assert [step for step, *_ in losses("run")] == [1, 2, 3, 4]
    assert train("--resume", "./run", "--out", "run", "--lr", "0.002", "--steps", "5") == 0
    assert json.loads(Path("run/config.json").read_text())["lr"] == 0.002
    for words, message in {
        ("--lr", "0.003"): "keeps the run's own --lr; it takes --steps",
        ("--preset", "test"): "keeps the run's own --lr, --seed; it takes --steps",
        ("--dtype", "bfloat16", "--lr", "0.002"): "keeps the run's own --dtype;",
        ("--out", "other"): "--resume names run but --out names other",
    }.items():
        if words[0] == "--preset":
            words += "--data", "text.txt"
        with pytest.raises(UsageError, match=message):
            train("--resume", "run", *words)
    with pytest.raises(UsageError, match="other is not a run folder"):
        train("--resume", "--out", "other")


def test_two_trainers_in_one_folder(capsys):
    """The second ends at once, and names the process of the first; the files stay those of the first."""
    message = f"moe-aiter train: error: run/lock: in use by process {os.getpid()}\n"
    Path("run").mkdir()
    with locked(Path("run/lock")):
        assert cli.main(["train", *arguments("--out", "run", "--steps", "2")]) == 2
        assert capsys.readouterr().err == message
    assert train(*arguments("--out", "run", "--steps", "2")) == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    with locked(Path("run/lock")):
        assert cli.main(["train", "--resume", "run", "--steps", "3"]) == 2
        assert capsys.readouterr().err == message
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert train("--resume", "run", "--steps", "3") == 0


def test_links_and_files_among_what_is_unfinished_do_not_block():
    assert train(*arguments("--out", "run", "--steps", "2")) == 0
    Path("mine").mkdir()
    Path("mine/part").touch()
    for folder in ("run", "run/checkpoints"):
        Path(folder, "unfinished-link").symlink_to(Path("mine").resolve())
        Path(folder, "unfinished-file").touch()
        Path(folder, "unfinished-folder").mkdir()
    assert train("--resume", "run", "--steps", "3") == 0
    assert os.listdir("mine") == ["part"]
    assert not [path for path in Path("run").rglob("*") if path.name.startswith("unfinished")]


def test_nothing_is_written_through_a_link():
    assert train(*arguments("--out", "run", "--steps", "2")) == 0
    Path("mine").write_text("mine")
    names = (
        "sample.txt",
        "loss.png",
        "load.png",
        "metrics.draft",
        "metrics.jsonl.draft",
        "report.html",
        "report.html.draft",
    )
    for name in names:
        Path("run", name).unlink(missing_ok=True)
        Path("run", name).symlink_to(Path("mine").resolve())
    assert train("--resume", "run", "--steps", "3") == 0
    assert cli.main(["report", "run", "--force"]) == 0
    assert Path("mine").read_text() == "mine" and not Path("run/sample.txt").is_symlink()
    Path("new").mkdir()
    Path("new/metrics.jsonl").symlink_to(Path("nowhere").resolve())
    with pytest.raises(UsageError, match="new holds a run already"):
        train(*arguments("--out", "new"))


def test_a_full_disk_leaves_the_metrics_as_they_were(monkeypatch):
    Path("metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    before = sorted(os.listdir())

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        truncate_metrics(Path("metrics.jsonl"), 1)
    assert Path("metrics.jsonl").read_text().count("\n") == 2 and sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 10**5, "config.json is not the configuration of a run: ValueError: it is nested too deeply"),
        ('{"data": ["a\\u0000b"]}', "--data a\x00b: no such file or folder"),
    ],
)
def test_a_hostile_configuration_is_one_line(text, message, capsys):
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/config.json").write_text(text)
    assert cli.main(["train", "--resume", "run"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_zero_byte_in_an_argument_is_one_line(capsys):
    for words in (
        ["report", "a\0b"],
        ["train", "--resume", "a\0b"],
        ["convert", "a\0b", "c"],
        ["plot", "\0"],
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1
