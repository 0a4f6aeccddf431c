"""`--resume`: the run's own flags are accepted, another process is locked out, and links are not followed."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from language_model import UsageError, presets, trainer
from language_model.command import paced
from language_model.metrics import read_metrics, truncate_metrics
from language_model.tests.test_trainer import arguments, in_a_folder_of_its_own, losses, train  # noqa: F401

from moe_aiter import cli
from moe_aiter.files import locked


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
        "metrics.draft",
        "metrics.jsonl.draft",
        "report.html",
        "report.html.draft",
    )
    for name in names:
        Path("run", name).unlink(missing_ok=True)
        Path("run", name).symlink_to(Path("mine").resolve())
    assert train("--resume", "run", "--steps", "3", page=True) == 0
    assert cli.main(["report", "run", "--force"]) == 0
    assert Path("mine").read_text() == "mine" and not Path("run/sample.txt").is_symlink()
    Path("new").mkdir()
    Path("new/metrics.jsonl").symlink_to(Path("nowhere").resolve())
    with pytest.raises(UsageError, match="new holds a run already"):
        train(*arguments("--out", "new"))


def test_the_name_of_the_launch_is_not_written_through_a_link(monkeypatch):
    variables = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "TORCHELASTIC_RUN_ID": "job",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    Path("mine").write_text("mine")
    Path("run").mkdir()
    Path("run/launch").symlink_to(Path("mine").resolve())
    assert train(*arguments("--out", "run", "--steps", "1")) == 0
    assert Path("mine").read_text() == "mine" and Path("run/launch").read_text().startswith("job ")


def test_a_full_disk_leaves_the_metrics_as_they_were(monkeypatch):
    Path("metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    before = sorted(os.listdir())

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        truncate_metrics(Path("metrics.jsonl"), 1)
    assert Path("metrics.jsonl").read_text().count("\n") == 2 and sorted(os.listdir()) == before


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_link_out_of_the_run_is_not_read(name, capsys):
    assert train(*arguments("--out", "run", "--steps", "2", "--sample-bytes", "0")) == 0
    Path("run", name).rename("elsewhere")
    Path("run", name).symlink_to("../elsewhere")
    assert cli.main(["train", "--resume", "run", "--steps", "3"]) == 2
    message = f"run/{name}: it is a link out of the folder, to {Path('elsewhere').resolve()}\n"
    assert capsys.readouterr().err.endswith(message)
    assert cli.main(["report", "run"]) == 2
    assert capsys.readouterr().err.endswith(message)


def rates(run: str) -> list[float]:
    return [row["lr"] for row in read_metrics(Path(run) / "metrics.jsonl")]


def test_the_learning_rate_of_a_finished_run_does_not_jump(capsys):
    """It stays where it ended, in further calls too, unless --decay-steps asks for another course."""
    assert train(*arguments("--out", "run")) == 0
    shutil.copytree("run", "other")
    last = rates("run")[-1]
    for steps in ("40", "50"):
        assert train("--resume", "run", "--steps", steps) == 0
        text = (
            "0.00015 after step 20, and --min-lr from step 20 on, where it was to end; with --decay-steps 40 "
        )
        assert (text + "it would jump to 0.0016" in capsys.readouterr().out) == (steps == "40")
    assert rates("run")[20:] == [last] * 30
    assert train("--resume", "other", "--steps", "40", "--decay-steps", "40") == 0
    assert rates("other")[20] > 9 * last and rates("other")[-1] == last
    assert "it would jump" not in capsys.readouterr().out


def test_a_course_beyond_the_run_is_that_of_a_longer_run(capsys):
    """--decay-steps may lie behind --steps, and counts where --resume repeats it."""
    assert train(*arguments("--out", "long", "--steps", "24", "--decay-steps", "24")) == 0
    assert train(*arguments("--out", "run", "--steps", "9", "--decay-steps", "24")) == 0
    shutil.copytree("run", "other")
    assert train("--resume", "run", "--steps", "24", "--decay-steps", "24") == 0
    assert train("--resume", "other", "--steps", "24") == 0
    assert rates("run") == rates("other") == rates("long") and "it would jump" not in capsys.readouterr().out
    assert train(*arguments("--out", "short", "--steps", "9")) == 0
    assert train("--resume", "short", "--steps", "24", "--decay-steps", "24") == 0
    assert rates("short")[9:] == rates("long")[9:]


def test_more_steps_early_in_a_run_change_the_course():
    own = presets.PRESETS["test"]
    longer = dataclasses.replace(own, steps=40)
    assert paced(own, longer, 2) == longer
    assert paced(own, longer, 15) == dataclasses.replace(longer, decay_steps=20)
    assert paced(own, dataclasses.replace(own, steps=18), 15).decay_steps == own.decay_steps


@pytest.mark.parametrize("metrics", [True, False])
def test_a_run_that_ended_in_a_nan_says_what_to_do(metrics, monkeypatch, capsys):
    monkeypatch.setattr(trainer, "learning_rate", lambda config, step: 1e300 if step == 15 else 1e-3)
    own = arguments("--out", "run", *(["--log-every", "20"] if metrics else ["--save-every", "5"]))
    what = "the loss is nan at step 1[67]" if metrics else "a weight is not finite at step 15"
    how = "try a smaller --lr, or a longer --warmup, in a new run"
    with pytest.raises(UsageError, match=f"{what}: {how}; --resume would repeat these steps"):
        train(*own)
    capsys.readouterr()
    with pytest.raises(UsageError, match=what):
        train("--resume", "run")
    err = capsys.readouterr().err
    found = re.search(f"warning: run ended because {what}, and the same steps follow: {how}", err)
    assert bool(found) == metrics
    with pytest.raises(UsageError, match=r"--resume keeps the run's own --lr; .*; --out starts another run"):
        train("--resume", "run", "--lr", "1e-4")


@pytest.mark.parametrize("name", ["loss", "val_loss", "val_bits_per_byte", "seconds"])
def test_a_line_of_the_metrics_with_another_type_is_found_before_a_step(name):
    assert train(*arguments("--out", "run", "--steps", "2", "--sample-bytes", "0")) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    lines[0][name] = "1"
    Path("run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        UsageError, match=f"metrics.jsonl: line 1 is damaged: TypeError: its {name} is no number"
    ):
        train("--resume", "run", "--steps", "3")
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 10**5, "config.json is not the configuration of a run: ValueError: it is nested too deeply"),
        ('{"data": ["a\\u0000b"]}', r"--data a\x00b: no such file or folder"),
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
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1
