"""Training from end to end: it learns, repeats itself, and goes on after any interruption as if unbroken."""

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from language_model import UsageError, command, presets, trainer
from language_model.checkpoint import checkpoints
from language_model.metrics import read_metrics
from language_model.starts import read_starts
from language_model.trainer import MONITORED

from moe_aiter import cli, load_statistics

for module in ("tqdm", "safetensors", "plotly"):
    pytest.importorskip(module)
load_file = pytest.importorskip("safetensors.torch").load_file


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a model this small has nothing for a second thread
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(2000)))
    yield
    torch.set_num_threads(threads)


def arguments(*words: str) -> list[str]:
    return ["--preset", "test", "--data", "text.txt", *words]


def train(*words: str, page: bool = False) -> int:
    """Train as `moe-aiter train` does; the page takes longer than the steps, so `page` asks for it."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with contextlib.nullcontext() if page else mock.patch.object(command, "write_page"):
        return command.main(parser.parse_args(words))


def losses(run: str) -> list[tuple]:
    rows = read_metrics(Path(run) / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row.get("val_loss")) for row in rows]


@contextlib.contextmanager
def hangups(action):
    """Inside the block SIGHUP does this, in processes that start there too."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def start(*words: str) -> subprocess.Popen:
    """A training process of its own, which SIGHUP reaches even if the tests run under nohup."""
    with hangups(signal.SIG_DFL):
        return subprocess.Popen(
            [sys.executable, "-m", "moe_aiter.cli", "train", *words],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def wait_for_steps(run: str, count: int, process: subprocess.Popen) -> None:
    """Until metrics.jsonl has so many lines."""
    path = Path(run) / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, "the training process ended too early"
        time.sleep(0.01)


def test_a_run_leaves_everything_and_learns(capsys):
    assert train(*arguments("--out", "run", "--steps", "60"), page=True) == 0
    assert capsys.readouterr().out.endswith("; see run/report.html\n")
    run = Path("run")
    assert sorted(os.listdir(run)) == [
        "checkpoints", "config.json", "metrics.jsonl", "report.html", "sample.txt", "starts.jsonl",
    ]  # fmt: skip
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert rows[-1]["val_loss"] < 5
    assert [row["step"] for row in rows if "val_loss" in row] == list(range(10, 61, 10))
    assert len(rows[0]["load"]) == len(rows[0]["imbalance"]) == 2 and sum(rows[0]["load"][0]) == 4 * 32 * 2
    assert {"lr", "grad_norm", "balance_loss", "z_loss", "seconds", "tokens_per_s"} <= rows[-1].keys()
    for row in rows:
        assert {len(row[name]) for name in MONITORED} == {2}
        if "load" in row:
            assert row["entropy"] == pytest.approx(
                load_statistics(torch.tensor(row["load"])).entropy.tolist()
            )
    assert len((run / "sample.txt").read_text(errors="replace")) > 10
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step-00000050", "step-00000060"]
    assert json.loads((run / "config.json").read_text())["steps"] == 60


def test_each_start_is_noted(monkeypatch):
    monkeypatch.setattr("sys.argv", ["moe-aiter", "train", "--out", "run"])
    assert train(*arguments("--out", "run", "--steps", "4")) == 0
    assert train("--resume", "run", "--steps", "6") == 0
    assert train("--resume", "run") == 0  # nothing left to train
    first, second = read_starts(Path("run"))
    assert (first["step"], second["step"]) == (0, 4)
    assert datetime.datetime.fromisoformat(first["date"]) <= datetime.datetime.fromisoformat(second["date"])
    assert first["parameters"] > first["active_parameters"] > 1000 and first["processes"] == 1
    assert first["versions"]["torch"] == torch.__version__ and first["host_cpus"] == os.cpu_count()
    assert first["command"] == "moe-aiter train --out run" and first["device"].startswith("CPU")
    assert first["commit"] is None or len(first["commit"].removesuffix("-dirty")) == 40


def test_damaged_starts_do_not_stop_a_resume():
    assert train(*arguments("--out", "run", "--steps", "2")) == 0
    Path("run/starts.jsonl").write_text('{bad\n{"step": 0}\n')
    with pytest.warns(UserWarning, match="starts.jsonl begins anew"):
        assert train("--resume", "run", "--steps", "4") == 0
    assert [row["step"] for row in read_starts(Path("run"))] == [2]


@pytest.mark.full
def test_layers_are_written_when_the_steps_are():
    """Of all steps since the last time."""
    assert train(*arguments("--out", "run", "--log-every", "4", "--steps", "8")) == 0
    rows = read_metrics(Path("run/metrics.jsonl"))
    assert [row["step"] for row in rows if "entropy" in row] == [4, 8]
    assert rows[3]["entropy"] != load_statistics(torch.tensor(rows[3]["load"])).entropy.tolist()


@pytest.mark.full
def test_a_live_table_in_place_of_the_bar(capsys):
    pytest.importorskip("rich")
    assert train(*arguments("--out", "run", "--live")) == 0
    assert train(*arguments("--out", "bar")) == 0
    assert losses("run") == losses("bar")
    err = capsys.readouterr().err
    assert "step 20 of 20: loss" in err and "blocks.1.mlp" in err and "MaxVio" in err
    assert train(*arguments("--out", "dense", "--dense", "--live", "--steps", "3")) == 0
    assert "step 3 of 3: loss" in capsys.readouterr().err
    assert train("--resume", "run", "--steps", "21", "--live") == 0
    assert "step 21 of 21: loss" in capsys.readouterr().err


@pytest.mark.full
def test_dense_run_has_no_experts_to_show():
    assert train(*arguments("--out", "run", "--dense"), page=True) == 0
    assert "No layer of experts in these metrics" in Path("run/report.html").read_text(encoding="utf-8")
    assert (
        not {"load", "imbalance", "balance_loss", *MONITORED}
        & read_metrics(Path("run/metrics.jsonl"))[-1].keys()
    )


def test_two_runs_have_the_same_losses_and_seeds_matter():
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert train(*arguments("--out", out, "--seed", seed)) == 0
    assert losses("a") == losses("b") != losses("c")


@pytest.mark.parametrize("flags", [(), ("--dense",), ("--dtype", "bfloat16")], ids=str)
def test_resumed_run_has_the_losses_of_an_unbroken_one(flags):
    """Bit for bit, from a checkpoint in the middle, and without the rows that the first run wrote past it."""
    assert train(*arguments("--out", "whole", *flags)) == 0
    shutil.copytree("whole", "broken")
    shutil.rmtree("broken/checkpoints/step-00000020")
    assert train("--resume", "broken") == 0
    assert losses("broken") == losses("whole") and len(losses("whole")) == 20
    weights = "checkpoints/step-00000020/model.safetensors"
    assert (Path("broken") / weights).read_bytes() == (Path("whole") / weights).read_bytes()


def test_resume_without_a_name_takes_the_newest_run():
    assert train(*arguments("--steps", "10")) == 0
    run = next(Path("runs").iterdir())
    assert train("--resume", "--steps", "12") == 0
    assert len(losses(str(run))) == 12


def test_resume_of_a_finished_run_says_so(capsys):
    assert train(*arguments("--out", "run", "--steps", "4")) == 0
    assert "nothing left to train" not in capsys.readouterr().out
    assert train("--resume", "run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "nothing left to train: the run has made its 4 steps; to continue, raise --steps" in lines
    assert "None" not in lines


def test_resume_refuses_what_would_make_another_run():
    with pytest.raises(UsageError, match="no run with a checkpoint under runs"):
        train("--resume")
    with pytest.raises(UsageError, match="nowhere is not a run folder"):
        train("--resume", "nowhere")
    assert train(*arguments("--out", "run", "--steps", "10")) == 0
    with pytest.raises(UsageError, match="keeps the run's own --top-k, --lr; it takes --steps"):
        train("--resume", "run", "--lr", "1", "--top-k", "1")
    with pytest.raises(UsageError, match="run holds a run already"):
        train(*arguments("--out", "run"))
    Path("text.txt").write_text("other text\n" * 1000)
    with pytest.raises(UsageError, match="was trained on other text"):
        train("--resume", "run", "--steps", "20")


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--log-every", "20"), r"the loss is nan at step 1[67]:"),
        (("--steps", "15"), "the validation loss is nan at step 15:"),
        (("--save-every", "5"), "a weight is not finite at step 15:"),
    ],
)
def test_a_number_that_is_none_ends_the_run_before_it_is_saved(flags, message, monkeypatch):
    """The rate of step 15 is one that no weight survives."""
    monkeypatch.setattr(trainer, "learning_rate", lambda config, step: 1e300 if step == 15 else 1e-3)
    with pytest.raises(UsageError, match=message + " try a smaller --lr"):
        train(*arguments("--out", "run", *flags))
    newest = checkpoints(Path("run/checkpoints"))[-1]
    assert newest.name == "step-00000010"
    weights = load_file(newest / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def cut(path: str, lost: int) -> None:
    os.truncate(path, os.path.getsize(path) - lost)


def test_a_run_with_a_damaged_checkpoint_and_a_cut_line_goes_on(capsys):
    assert train(*arguments("--out", "whole")) == 0
    shutil.copytree("whole", "broken")
    cut("broken/checkpoints/step-00000020/optimizer.safetensors", 100)
    cut("broken/metrics.jsonl", 30)
    assert train("--resume", "broken") == 0
    assert "step-00000020 is damaged" in capsys.readouterr().err
    assert losses("broken") == losses("whole")


@pytest.mark.full
@pytest.mark.parametrize("lost", ["all", "last"])
def test_a_finished_run_without_its_metrics_has_a_sample_still(lost, capsys):
    assert train(*arguments("--out", "run", "--steps", "3")) == 0
    cut("run/metrics.jsonl", 5 if lost == "last" else os.path.getsize("run/metrics.jsonl"))
    assert train("--resume", "run", page=True) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda: cut("run/config.json", 30), "config.json is not the configuration of a run: JSONDecode"),
        (lambda: Path("run/config.json").unlink(), "run is not a run folder: it has no config.json"),
        (lambda: cut("run/checkpoints/step-00000003/state.json", 30), "step-00000003 is damaged"),
        (lambda: shutil.rmtree("run/checkpoints"), "holds no checkpoint to resume from"),
        (lambda: Path("run/metrics.jsonl").write_text("x\n{}\n"), "metrics.jsonl: line 1 is damaged"),
        (lambda: Path("run/metrics.jsonl").unlink(), "run/metrics.jsonl: No such file"),
    ],
)
def test_a_run_that_cannot_go_on_says_why_in_one_line(damage, message, capsys):
    assert train(*arguments("--out", "run", "--steps", "3")) == 0
    damage()
    capsys.readouterr()
    assert cli.main(["train", "--resume", "run", "--steps", "4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-aiter train: error: ") and message in err and err.count("\n") == 1


def test_fewer_steps_than_were_made_are_refused():
    assert train(*arguments("--out", "run", "--steps", "3")) == 0
    with pytest.raises(UsageError, match="--steps is 2 but run has made 3 already"):
        train("--resume", "run", "--steps", "2")


@pytest.mark.parametrize("part", ["config.json", "metrics.jsonl", "checkpoints"])
def test_a_new_run_does_not_mix_with_what_is_left_of_another(part):
    Path("run").mkdir()
    Path("run", part).touch()
    with pytest.raises(UsageError, match="run holds a run already"):
        train(*arguments("--out", "run"))


STOPS = [(signal.SIGINT, 130)]
STOPS += [
    pytest.param(*stop, marks=pytest.mark.full) for stop in ((signal.SIGTERM, 143), (signal.SIGHUP, 129))
]


@pytest.mark.parametrize("number, status", STOPS)
def test_a_signal_saves_and_the_run_goes_on_as_if_unbroken(number, status):
    process = start(*arguments("--out", "run", "--steps", "4000", "--save-every", "4000"))
    wait_for_steps("run", 5, process)
    process.send_signal(number)
    assert process.wait(30) == status
    done = len(losses("run"))
    assert 5 <= done < 4000
    assert [path.name for path in checkpoints(Path("run/checkpoints"))] == [f"step-{done:08d}"]
    assert "report.html" in os.listdir("run")

    process = start("--resume", "run")
    wait_for_steps("run", done + 5, process)
    process.send_signal(number)
    assert process.wait(30) == status
    assert_as_unbroken("run", steps="4000", save_every="4000")


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, loads, given, expected",
    [
        ((), "3.20 1 1 5/90 7", False, 1),
        ((), "0.90 1 1 5/90 7", False, 3),
        ((), "9.00 1 1 1/90 7", False, 4),  # nothing runs any more
        ((), "0.10 1 1 9/90 7", False, 4),
        ((), "9.00 1 1 9/90 7", True, 4),
        (("--threads", "3"), "9.00 1 1 9/90 7", False, 3),
        (("--threads", "2"), "0.00 1 1 1/90 7", True, 2),
    ],
)
def test_threads_are_those_that_are_free(flags, loads, given, expected, monkeypatch, capsys):
    """On four CPUs.  A given number wins."""
    Path("loads").write_text(loads)
    monkeypatch.setattr(presets, "LOADS", Path("loads"))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(4)
    assert train(*arguments("--out", "run", "--steps", "1", *flags)) == 0
    assert torch.get_num_threads() == expected
    said = f"threads  {expected} of 4: other programs use the rest; to choose, add --threads 4\n"
    assert (said in capsys.readouterr().out) == (expected != 4 and not flags)


@pytest.mark.full
def test_nohup_keeps_a_run_going():
    with hangups(signal.SIG_IGN):
        with trainer.Stop() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.status == 0 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_the_first_checkpoint_comes_early(monkeypatch):
    """One more than the later ones, and the same losses."""
    assert train(*arguments("--out", "late")) == 0
    saved, save = [], trainer.save_checkpoint
    monkeypatch.setattr(trainer, "FIRST_SAVE", 0)
    monkeypatch.setattr(trainer, "save_checkpoint", lambda *a, **k: saved.append(a[1]) or save(*a, **k))
    assert train(*arguments("--out", "early")) == 0
    assert saved == [1, 10, 20] and losses("early") == losses("late")


@pytest.mark.full
def test_a_second_interrupt_does_not_wait_for_the_step():
    process = start(*arguments("--out", "run", "--layers", "300"))  # a step of seconds
    wait_for_steps("run", 1, process)
    for _ in range(100):  # two that come before Python looks are one
        time.sleep(0.2)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGINT)
    assert process.wait(30) == -signal.SIGINT
    assert not Path("run/checkpoints").exists()


@pytest.mark.full
def test_a_run_killed_again_and_again_comes_to_the_same_losses():
    """SIGKILL at random moments of a run that saves after every step."""
    draw = random.Random(0)
    done = 0
    for attempt in range(5):
        if attempt == 0:
            words = arguments("--out", "run", "--steps", "4000", "--save-every", "1")
        else:
            words = ["--resume", "run"]
        process = start(*words)
        wait_for_steps("run", done + 3, process)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.wait()
        newest = checkpoints(Path("run/checkpoints"))[-1]
        done = json.loads((newest / "state.json").read_text())["step"]
    assert done >= 10
    assert_as_unbroken("run", steps="4000", save_every="1")


def assert_as_unbroken(run: str, steps: str, save_every: str) -> None:
    """The rows of a broken run are those of a new one that is stopped behind them."""
    broken = losses(run)
    assert [row[0] for row in broken] == list(range(1, len(broken) + 1))
    process = start(*arguments("--out", f"{run}-unbroken", "--steps", steps, "--save-every", "4000"))
    wait_for_steps(f"{run}-unbroken", len(broken), process)
    process.kill()
    process.wait()
    assert losses(f"{run}-unbroken")[: len(broken)] == broken
