"""`moe-aiter train` on several ranks has the losses of one, also after an interruption."""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from language_model import UsageError, presets
from language_model.checkpoint import checkpoints, read_state
from language_model.command import LAUNCH, continued
from language_model.metrics import read_metrics
from language_model.presets import PRESETS
from language_model.ranks import Ranks, check_ranks
from language_model.sharded import largest_ep
from language_model.tests.test_trainer import arguments, in_a_folder_of_its_own, train, wait_for_steps  # noqa: F401

from moe_aiter import cli
from moe_aiter.config import Launch, interpret

pytestmark = pytest.mark.full
if interpret:
    pytest.skip("nothing here runs Triton", allow_module_level=True)
for module in ("tqdm", "safetensors", "plotly"):
    pytest.importorskip(module)

FLOATS = "loss", "val_loss", "balance_loss", "z_loss", "grad_norm"
COUNTS = "step", "imbalance", "load"


def on_rank(rank: int, world: int, ports: list[int], commands: list[list[str]]) -> None:
    """Run `moe-aiter train` several times on one of the ranks, and write the statuses and what is printed."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    statuses = []
    with Path(f"rank-{rank}.txt").open("w") as sys.stdout, Path(f"rank-{rank}.err").open("w") as sys.stderr:
        for port, words in zip(ports, commands, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            statuses.append(cli.main(["train", *words]))
    Path(f"rank-{rank}.json").write_text(json.dumps(statuses))
    os._exit(0)  # gloo's threads may abort a process whose interpreter ends


def run_on(world: int, *commands: list[str]) -> list[int]:
    """Run the commands, one after the other, on so many ranks.  Return the statuses, those of each rank."""
    # a port that the system gives is one that it may give to other connections before a command needs it
    ports = random.SystemRandom().sample(range(10_000, 32_768), len(commands))
    forked.call(on_rank, world, world, ports, commands)
    statuses = [json.loads(Path(f"rank-{rank}.json").read_text()) for rank in range(world)]
    assert all(found == statuses[0] for found in statuses)
    assert not any(Path(f"rank-{rank}.txt").read_text() for rank in range(1, world))
    return statuses[0]


def rows_of(run: str) -> list[dict]:
    return read_metrics(Path(run) / "metrics.jsonl")


def assert_same_curve(run: str, other: str) -> None:
    rows, others = rows_of(run), rows_of(other)
    assert len(rows) == len(others) > 0
    for row, expected in zip(rows, others, strict=True):
        for names, close in ((FLOATS, 1e-4), (COUNTS, 1e-6)):
            found, wanted = ({n: r[n] for n in names if n in r} for r in (row, expected))
            assert found.keys() == wanted.keys()
            for name in found:
                message = f"{name} of {run} at step {row['step']}"
                assert torch.allclose(*map(torch.tensor, (found[name], wanted[name])), close, 0), message


def copy_until_10(run: str, to: str) -> None:
    shutil.copytree(run, to)
    shutil.rmtree(f"{to}/checkpoints/step-00000020")


def test_the_curve_of_one_process():
    assert train(*arguments("--out", "one")) == train(*arguments("--out", "dense-one", "--dense")) == 0
    shutil.copytree("one", "from-one")  # from its step 10
    os.truncate("from-one/checkpoints/step-00000020/model.safetensors", 100)
    both = ["--ep", "0", "--fsdp"]
    new = {"two": both, "whole": ["--ep", "0"], "ep-1": ["--fsdp"], "plain": []}
    new |= {"dense": ["--dense"], "dense-fsdp": ["--dense", "--fsdp"]}
    new["two-again"] = [*both, "--log-every", "7", "--val-every", "20"]
    wrong = [["--out", "two"], ["--out", "b", "--batch", "5"], ["--out", "c", "--data", "nowhere"]]
    wrong += [["--out", "d", "--lr", "1e30", "--warmup", "0"], ["--resume", "from-one", "--lr", "1"]]
    statuses = run_on(
        2,
        *(arguments("--out", run, *flags) for run, flags in new.items()),
        ["--resume", "from-one"],
        *(arguments(*words) if words[0] == "--out" else words for words in wrong),
    )
    assert statuses == [0] * len([*new, "from-one"]) + [2] * len(wrong)
    for run in ("two", "whole", "ep-1", "plain", "from-one"):
        assert_same_curve(run, "one")
    for run in ("dense", "dense-fsdp"):
        assert_same_curve(run, "dense-one")
    assert [row["loss"] for row in rows_of("two")] == [row["loss"] for row in rows_of("two-again")]
    errors = [line for line in Path("rank-0.err").read_text().splitlines() if line.startswith("moe-aiter")]
    assert "from-one/checkpoints/step-00000020 is damaged" in errors[0] and len(errors) == 6
    for line, words in zip(
        errors[1:],
        ["two holds a run already", "--batch is 5, which 2 processes", "no such file", "is nan at step",
         "keeps the run's own --lr"],
        strict=True,
    ):  # fmt: skip
        assert line.startswith("moe-aiter train: error: ") and words in line
    assert "moe-aiter" not in Path("rank-1.err").read_text()
    assert not Path("b").exists() and not Path("c").exists()
    files = {path.name for path in checkpoints(Path("two/checkpoints"))[-1].iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"}
    assert Path("two/sample.txt").read_bytes() == Path("two-again/sample.txt").read_bytes()

    # other numbers of ranks go on from these shards
    for run in ("to-one", "to-four", "damaged"):
        copy_until_10("two", run)
    shutil.copytree("two/checkpoints/step-00000020", "damaged/checkpoints/step-00000020")
    os.truncate("damaged/checkpoints/step-00000020/__1_0.distcp", 1000)
    assert train("--resume", "to-one") == train("--resume", "damaged") == 0
    assert cli.main(["sample", "two", "--tokens", "5"]) == 0
    assert run_on(4, arguments("--out", "four"), ["--resume", "to-four", "--ep", "2"]) == [0, 0]
    for run in ("to-one", "damaged", "four", "to-four"):
        assert_same_curve(run, "one")


def start(*words: str, restarts: int = 0) -> subprocess.Popen:
    """Two ranks of torchrun."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", str(restarts), "-m", "moe_aiter.cli", "train"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *words],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def send(number: int, rank: int, process: subprocess.Popen) -> None:
    """Send a signal to one of the ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    named = f"\0RANK={rank}\0".encode()
    (pid,) = [int(c) for c in children if named in b"\0" + Path(f"/proc/{c}/environ").read_bytes()]
    os.kill(pid, number)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the ranks of torchrun")
def test_ranks_that_end_and_a_run_that_goes_on():
    flags = arguments("--steps", "60", "--save-every", "5")
    process = start("--out", "run", *flags, restarts=1)
    wait_for_steps("run", 12, process)
    send(signal.SIGKILL, 1, process)
    wait_for_steps("run", 25, process)  # torchrun has started both again
    send(signal.SIGTERM, 1, process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("exitcode  : 143") == 2
    done = len(rows_of("run"))
    newest = checkpoints(Path("run/checkpoints"))[-1]
    assert 25 <= done < 60 and newest.name == f"step-{done:08d}" and read_state(newest)["step"] == done

    process = start("--resume", "run")
    wait_for_steps("run", done + 7, process)
    send(signal.SIGKILL, 0, process)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - began < 30
    newest = checkpoints(Path("run/checkpoints"))[-1]
    assert read_state(newest)["step"] >= done + 5 - done % 5
    assert train("--resume", "run") == train("--out", "unbroken", *flags) == 0
    assert_same_curve("run", "unbroken")


def ranks(restarts: int = 0, world: int = 2, local: int = 2) -> Ranks:
    """The first of several ranks, none of which is there."""
    found = Ranks(Launch(0, 1, 0, local, restarts, "mine"))
    found.size = world
    return found


def test_only_a_restart_goes_on_with_a_run_and_only_with_its_own():
    args = argparse.Namespace(out=Path("run"), resume=None)
    Path("run/checkpoints/step-00000005").mkdir(parents=True)
    for name, restarts in (("mine", 0), ("other", 1)):
        Path("run", LAUNCH).write_text(name)
        assert continued(args, ranks(restarts)) == args
    Path("run", LAUNCH).write_text("mine")
    assert continued(args, ranks(1)).resume == Path("run")
    Path("runs").mkdir()
    Path("run").rename("runs/one")  # without --out
    args = argparse.Namespace(out=None, resume=None)
    assert continued(args, ranks(1)).resume == Path("runs/one")
    shutil.rmtree("runs/one/checkpoints")
    Path("runs/one/metrics.jsonl").touch()
    found = continued(args, ranks(1))
    assert (found.out, found.resume) == (Path("runs/one"), None) and os.listdir("runs/one") == [LAUNCH]


@pytest.mark.parametrize(
    "world, local, experts, expected",
    [(2, 2, 16, 2), (8, 8, 4, 4), (16, 8, 32, 8), (6, 3, 16, 1), (4, 2, 6, 2)],
)
def test_the_experts_of_a_layer_stay_on_a_machine(world, local, experts, expected):
    config = dataclasses.replace(PRESETS["test"], num_experts=experts)
    assert largest_ep(config, ranks(world=world, local=local)) == expected


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"batch": 3}, "--batch is 3, which 2 processes do not divide evenly"),
        ({"ep": 3}, "--ep is 3; it must divide the number of processes, 2, and --num-experts, 4"),
        ({"ep": 4}, "--ep is 4; it must divide"),
        ({"device": "cuda:1"}, "--device is cuda:1, but each of 2 processes needs a GPU: use cuda"),
        ({"device": "cuda"}, "there are 2 processes on this machine, but torch sees 1 GPUs"),
    ],
)
def test_a_run_that_cannot_be_divided(flags, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=message):
        check_ranks(dataclasses.replace(PRESETS["test"], **flags), ranks())


def test_ranks_share_the_free_threads(monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for loads, expected in (("0.10 1 1 3/90 7", 4), ("4.00 1 1 6/90 7", 2), ("9.00 1 1 20/90 7", 1)):
        Path("loads").write_text(loads)
        monkeypatch.setattr(presets, "LOADS", Path("loads"))
        torch.set_num_threads(8)
        presets.set_threads(PRESETS["test"], Launch(1, 2, 1, 2))
        assert torch.get_num_threads() == expected
    assert not capsys.readouterr().out  # the first rank says it
