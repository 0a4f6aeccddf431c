"""`python -m benchmarks parallel` runs on two ranks, and refuses what it cannot measure."""

import argparse
import csv
import functools
import importlib.util
import itertools
import pathlib
import re
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist
from check import few

from benchmarks import parallel
from benchmarks.__main__ import main
from moe_aiter.bench import measure
from moe_aiter.bench.measure import PASSES
from moe_aiter.bench.problem import new_problem, of_sizes
from moe_aiter.distributed.loans import CPU, least_rows, useful_guests
from moe_aiter.integrations.transformers import parallel_interface

from ..distributed import ranks
from ..distributed.shared_memory import use_files

ROOT = pathlib.Path(__file__).parent.parent.parent
TOY = ("--device", "cpu", "--shape", "64,32,24,8,2", "--reps", "1", "--dtype", "float32")
COLLECTIVE, KEPT = "moe_aiter, collective", "moe_aiter, collective, keep_x"
TORCH = "torch all_to_all_single + grouped_mm"


def run(*argv):
    return main(["parallel", *map(str, argv)])


def read(path):
    with open(path, newline="") as file:
        return {row["contender"]: row for row in csv.DictReader(file)}


@pytest.fixture
def alone(monkeypatch):
    """What torchrun tells the one process that it starts."""
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    leave()  # a group of another test's
    yield
    leave()  # after an error


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()


def peers(dtype: str) -> dict[str, str]:
    """The reason why each peer, or our symmetric transport, is left out here; empty where it runs."""
    reasons = {parallel.SYMMETRIC: "RuntimeError: the tokens are on the device cpu"}
    reasons |= dict.fromkeys((parallel.TORCHTITAN, parallel.HUGGING_FACE), "")
    if importlib.util.find_spec("torchtitan") is None:
        reasons[parallel.TORCHTITAN] = "torchtitan is not installed"
    elif dtype != "bfloat16":
        reasons[parallel.TORCHTITAN] = "ValueError: its products are in bfloat16"
    elif not hasattr(torch.compiler, "_is_non_strict_tracing"):
        reasons[parallel.TORCHTITAN] = "ImportError: torchtitan 0.3 needs torch 2.12 or newer"
    if importlib.util.find_spec("transformers") is None:
        reasons[parallel.HUGGING_FACE] = "pip install 'moe-aiter[hf]'"
    elif parallel_interface() is None:
        reasons[parallel.HUGGING_FACE] = "ImportError: ranks with tokens of their own need transformers 5.23"
    return reasons


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], "bfloat16"))
def test_two_ranks(dtype, tmp_path):
    """With all tokens at the experts of one rank: the other one computes no rows."""
    path = tmp_path / "new" / "parallel.csv"
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*start, "-m", "benchmarks", "parallel", *TOY)
    command = (*command, "--routing", "one-rank", "--dtype", dtype, "--out", path)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks, ep 2") == 1  # the first rank alone prints
    reasons = peers(dtype)
    for name, reason in reasons.items():
        assert (f"skipping {name}: {reason}" in done.stdout) == bool(reason), done.stdout
    others = [name for name, reason in reasons.items() if not reason]
    rows = read(path)
    assert list(rows) == [COLLECTIVE, KEPT, parallel.ONE_GPU, TORCH, *others]
    one = rows[parallel.ONE_GPU]
    for row in rows.values():
        assert list(row) == parallel.COMMAND.fields
        assert {f for f in row if not row[f]} <= {"skew", "held_mib", "peak_mib"}
        assert (row["ranks"], row["ep"], row["routing"], row["tokens"]) == ("2", "2", "one-rank", "64")
        assert float(row["error"]) <= 2 * float(row["torch_error"]) + 1e-7
        for name, passes in PASSES.items():
            ms, flops = float(row[f"{name}_ms"]), passes * 6 * 64 * 2 * 32 * 24
            assert float(row[f"{name}_p20"]) <= ms <= float(row[f"{name}_p80"])
            assert float(row[f"{name}_tflops"]) == pytest.approx(flops / ms / 1e9, rel=1e-2)
        for name in ("forward", "step"):
            share = 100 * float(one[f"{name}_ms"]) / float(row[f"{name}_ms"])
            assert float(row[f"{name}_share"]) == pytest.approx(share, rel=1e-2)
    size = 64 * 32 * getattr(torch, dtype).itemsize  # of a rank's tokens
    to_experts = 2 * 2 * size + 8 * 4  # the other rank's choices and their dO, or what they get back
    expected = {
        COLLECTIVE: 5 * size + 4 * 64 * 3 * 2,
        KEPT: 4 * size + 4 * 64 * 4 * 2,
        parallel.ONE_GPU: 0,
        **dict.fromkeys((TORCH, *others), to_experts),
    }
    assert {name: float(row["sent_mb"]) for name, row in rows.items()} == pytest.approx(
        {name: size / 1e6 for name, size in expected.items()}, rel=1e-3
    )


def test_laws_beside_normal_routing(alone, tmp_path, capsys):
    """Each exponent is a problem, and the last lines have the shares of the rate with normal routing."""
    path, old = tmp_path / "parallel.csv", [f for f in parallel.COMMAND.fields if f != "skew"]
    path.write_text(",".join(old) + "\n" + ",".join(f"old {f}" for f in old) + "\n")
    assert run(*TOY, "--skew", 0.5, 1, 0.5, "--only", COLLECTIVE, "--out", path) == 0
    with open(path, newline="") as file:
        first, *rows = csv.DictReader(file)
    assert first == {f: f"old {f}" for f in old} | {"skew": ""}
    ran = [(row["routing"], row["skew"]) for row in rows if row["contender"] == COLLECTIVE]
    assert ran == [("normal", ""), ("zipf", "0.5"), ("zipf", "1")]
    printed = re.findall(r"64,32,24,8,2, zipf (\S+), (.*): (\S+) / (\S+) % of its", capsys.readouterr().out)
    assert [law for law, name, *_ in printed if name == COLLECTIVE] == ["0.5", "1"]
    ms = {(row["skew"], row["contender"]): float(row["step_ms"]) for row in rows}
    for law, name, _, share in printed:
        assert float(share) == pytest.approx(100 * ms["", name] / ms[law, name], abs=1)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", ["normal"]),
        ("--routing zipf one-rank", ["zipf 1", "one-rank"]),
        ("--routing zipf --skew 2", ["zipf 2"]),
        ("--skew 0 1e-1", ["normal", "zipf 0", "zipf 0.1"]),
    ],
)
def test_routings(flags, expected):
    parser = argparse.ArgumentParser()
    parallel.options(parser)
    found = parallel.routings(parser.parse_args(flags.split()))
    assert [" ".join(part).strip() for part in found] == expected


def test_a_wrong_contender_fails_the_command(alone, monkeypatch, capsys):
    right = parallel.ours

    def wrong(p, name, style):
        contender = right(p, name, style)
        if style is None:
            return contender
        contender.as_ours = functools.partial(spoil, contender.as_ours)
        return contender

    def spoil(as_ours, gradients):
        dx, dgate_up, *rest = as_ours(gradients)
        return dx, 0.5 * dgate_up, *rest

    monkeypatch.setattr(parallel, "ours", wrong)
    assert run(*TOY) == 1
    printed = capsys.readouterr().out
    assert f"{COLLECTIVE}: refused, the error of its dgate_up is 5.0e-01" in printed
    assert f"{parallel.ONE_GPU}: refused" not in printed


def test_ranks_agree_on_who_is_slow(monkeypatch):
    """Each rank measures other times, but leaves out the same contenders."""
    calls = [0, 0]

    def here(contender, problem, flush):
        calls[int(contender.name)] += 1
        return lambda: (1.0, 1.0, 2.0)

    monkeypatch.setattr(measure, "measure_gpu", here)
    problem = types.SimpleNamespace(
        x=types.SimpleNamespace(is_cuda=True, device="cpu"), renew=lambda round: None
    )
    field = [measure.Contender(str(i), None, (problem.x,)) for i in range(2)]
    agreed = {0: (1.0, 1.0, 2.0), 1: (1.0, 1.0, 300.0)}  # the slowest rank's
    measured = measure.time_all(field, problem, 10, agree=lambda times: {i: agreed[i] for i in times})
    assert calls == [measure.WARMUP + 10, measure.WARMUP + 2]
    assert [times["step"].median for times in measured] == [2.0, 300.0]


def choose(rank, world, folder):
    """Groups of one rank each, of which the last may have no symmetric memory."""
    mesh = parallel.expert_mesh("cpu", 1)["ep"]
    problem = new_problem(of_sizes("8,32,24,4,2", True), torch.float32, torch.device("cpu"))
    p = parallel.RankProblem(**vars(problem), mesh=mesh)
    for reason, third in (("no memory", parallel.ONE_GPU), ("", parallel.SYMMETRIC)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel, "why_not_symmetric", lambda *_, reason=reason: reason * rank)
            names = [contender.name for contender in itertools.islice(parallel.contenders(p), 3)]
        assert names == [COLLECTIVE, KEPT, third]


def lend(rank, world, folder):
    """A contender for each number of guests, as exact as without; the pool has their slots."""
    shape = of_sizes("64,32,24,8,2", True)
    problem = new_problem(shape, torch.float32, torch.device("cpu"), "one-rank")
    p = parallel.RankProblem(**vars(problem), mesh=parallel.expert_mesh("cpu", 2)["ep"])
    p.renew(0)
    with pytest.MonkeyPatch.context() as patch:
        use_files(folder, patch)
        patch.setattr(parallel, "why_not_symmetric", lambda *_: "")
        field = list(itertools.islice(parallel.contenders(p, (0, 2, "auto")), 5))[2:]
        judge = parallel.by_all_ranks(p)
        assert all(error.of_the_bar <= 1 for contender in field for error in judge(contender))
    name = parallel.SYMMETRIC
    assert [c.name for c in field] == [name, f"{name}, guests 2", f"{name}, guests auto"]
    pools = [c.cells["pool_mib"] * 2**20 for c in field]
    weights = gradients = 3 * 32 * 24 * 4
    auto = useful_guests(64 * 2, least_rows(weights, weights // 4, CPU), 4, weights + gradients)
    assert [pool - pools[0] for pool in pools] == [n * (weights + gradients) for n in (0, 2, auto)]
    loans = [(c.cells["sent_mb"] - field[0].cells["sent_mb"]) * 1e6 / (2 * weights) for c in field]
    assert loans == pytest.approx(list(map(round, loans)))
    assert loans[0] == 0 < loans[1] <= min(2, loans[2]) and loans[2] <= auto, loans


def test_contenders_with_guests(tmp_path):
    ranks.run(2, lend, tmp_path)


def test_all_ranks_leave_out_symmetric_memory(tmp_path):
    ranks.run(2, choose, tmp_path)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--ep 2", "ep=2 does not divide the world of 1 ranks"),
        ("--ep 0", "argument --ep: 0 is less than 1"),
        ("--skew nan", "argument --skew: nan is no exponent: give a number from 0 on"),
        ("--guests 2 -1", "argument --guests: -1 is negative"),
        ("--guests 1", "guests=1, but the other ranks have only 0 experts to lend"),
        ("--guests some", "argument --guests: invalid slots value: 'some'"),
        ("--routing other", "argument --routing: invalid choice: 'other'"),
        ("--shape Z", "there is no shape 'Z'; shapes: A, B"),
        ("--shape toy-oai", "shape toy-oai has biases or another activation"),
        ("--shape 64,3,24,5,2 --routing zipf", "64,3,24,5,2 has more experts than hidden sizes"),
        ("--only zzz", "no contender matches zzz; there are 'moe_aiter, collective', "),
        ("--out .", ".: Is a directory"),
    ],
)
def test_refusals(flags, message, alone, capsys):
    try:
        status = run(*TOY, *flags.split())
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2 and message in printed.err and printed.err.count("\n") == 1
    assert " ms " not in printed.out


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--shape 64,32,24,5,2", "has 5 experts, which --ep 2 does not divide"),
        ("--routing one-rank --shape 64,32,24,4,3", "a rank has 2 experts, a token needs 3"),
    ],
)
def test_refusals_of_several_ranks(flags, message, alone, monkeypatch, capsys):
    monkeypatch.setattr(parallel, "expert_mesh", lambda kind, ep: {"ep": None})
    assert run(*TOY, "--ep", 2, *flags.split()) == 2
    assert message in capsys.readouterr().err


def test_without_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert run(*TOY) == 2
    assert capsys.readouterr().err == (
        f"python -m benchmarks parallel: error: it needs torchrun: {parallel.START}\n"
    )


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert run("--device", "cuda") == 2
    assert "rank 0 of this machine has no GPU" in capsys.readouterr().err
