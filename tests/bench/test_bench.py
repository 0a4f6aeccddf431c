"""The benchmark runs, refuses what is wrong, and the README says what the CSV says."""

import argparse
import csv
import dataclasses
import pathlib
import re
import types

import pytest
import torch

from moe_aiter import bench, cli
from moe_aiter.bench import layer, measure
from moe_aiter.bench.measure import MIB, PASSES, measure_memory, skip
from moe_aiter.bench.problem import DEFAULT, SHAPES, new_problem

from .judge import check

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def problem(device):
    return toy(device)


def toy(device, **sizes):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return new_problem(dataclasses.replace(SHAPES["toy"], **sizes), dtype, device)


def run(*argv):
    return cli.main(["bench", *map(str, argv)])


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("top_k", [1, 2])  # the weight of one expert is not renormalised: it would be 1
def test_every_contender_is_as_good_as_torch(device, top_k):
    problem = toy(device, top_k=top_k)
    field = list(layer.contenders(problem))
    names = [c.name for c in field]
    assert len(names) == len(set(names))
    assert {"layer: moe_aiter MoE", "for-loop over experts"} <= set(names)
    found = check(field, problem)
    assert [(n, f) for n, f in zip(names, found, strict=True) if f["refused"]] == []


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "moe_aiter"])
def test_hugging_face(device, experts, top_k):
    pytest.importorskip("transformers")
    problem = new_problem(dataclasses.replace(SHAPES["toy"], top_k=top_k), torch.bfloat16, device)
    peer = layer.hugging_face(problem, experts)
    assert not check([peer], problem)[0]["refused"]


def test_a_wrong_contender_gets_no_time(problem, capsys):
    good = next(layer.contenders(problem))
    wrong = layer.Contender("off by one percent", lambda: 1.01 * good.run(), good.leaves, routed=True)
    good_row, wrong_row = check([good, wrong], problem)
    assert not good_row["refused"] and wrong_row["refused"]
    assert wrong_row["error"] == pytest.approx(0.01, rel=0.2)
    assert re.search(
        r"off by one percent: refused, the error of its \w+ is 1\.\de-02, torch", capsys.readouterr().out
    )


def test_a_peer_that_cannot_run_is_left_out(problem, monkeypatch, capsys):
    def old_version(p):
        raise AttributeError("no such block")

    monkeypatch.setattr(layer, "peers", lambda p: [("Old", lambda: old_version(p))])
    names = [c.name for c in layer.contenders(problem)]
    assert names[-1] == "for-loop over experts"
    assert "skipping Old: AttributeError: no such block" in capsys.readouterr().out
    broken = layer.Contender("broken", lambda: old_version(problem), (problem.x,))
    assert check([broken], problem) == [{"refused": True, "note": "AttributeError: no such block"}]
    broken.ours = True
    with pytest.raises(AttributeError):
        check([broken], problem)


@pytest.mark.parametrize("word", ["Sonic", "layer: SonicMoE"])
def test_only_may_name_a_skipped_peer(word, monkeypatch, tmp_path, capsys):
    def broken():
        raise ImportError("undefined symbol")

    path = tmp_path / "layer.csv"
    flags = "--device", "cpu", "--shape", "toy", "--reps", 1, "--dtype", "float32", "--out", path
    monkeypatch.setattr(layer, "peers", lambda p: [("SonicMoE", broken)])
    assert run("layer", *flags, "--only", "loop", word) == 0
    assert "skipping SonicMoE: ImportError: undefined symbol" in capsys.readouterr().out
    assert [row["contender"] for row in read(path)] == ["for-loop over experts"]
    assert run("layer", *flags, "--only", word) == 0 and len(read(path)) == 1
    monkeypatch.setattr(layer, "peers", lambda p: [])
    assert run("layer", *flags, "--only", "loop", word) == 2
    assert f"no contender matches {word}; there are" in capsys.readouterr().err


def test_a_wrong_contender_of_ours_fails_the_command(monkeypatch, capsys):
    wrong = layer.contenders

    def spoil(problem):
        for c in wrong(problem):
            if c.ours:
                run = c.run
                c.run = lambda run=run: 1.01 * run()
            yield c

    monkeypatch.setattr(layer, "contenders", spoil)
    assert run("layer", "--device", "cpu", "--shape", "toy", "--reps", 1, "--only", "moe_aiter") == 1
    assert "refused" in capsys.readouterr().out


def test_the_price_of_batch_invariance(tmp_path, capsys):
    path = tmp_path / "layer.csv"
    flags = "--device", "cpu", "--shape", "toy", "--reps", 1, "--dtype", "float32", "--out", path
    assert run("layer", *flags, "--invariant", "--only", "layer: moe_aiter") == 0
    names = [row["contender"] for row in read(path)]
    assert names == ["layer: moe_aiter MoE", "layer: moe_aiter MoE, batch invariant"]
    text = (
        r"batch invariant: times as long as without: inference \d+\.\d\d, forward \d+\.\d\d, step \d+\.\d\d"
    )
    assert re.search(text, capsys.readouterr().out)
    assert run("layer", *flags, "--only", "layer: moe_aiter") == 0 and len(read(path)) == 3


def test_rows_are_appended(tmp_path, capsys):
    path = tmp_path / "new" / "layer.csv"
    flags = (
        "--device",
        "cpu",
        "--shape",
        "toy",
        "--reps",
        2,
        "--only",
        "moe_aiter",
        "loop",
        "--dtype",
        "float32",
    )
    for commit in ("one", "two"):
        assert run("layer", *flags, "--commit", commit, "--out", path) == 0
    rows = read(path)
    assert {r["commit"] for r in rows} == {"one", "two"}
    for row in rows:
        assert list(row) == layer.COMMAND.fields
        empty = {f for f in layer.COMMAND.fields if not row[f]}
        unknown = {"held_mib", "peak_mib"}  # nothing to read them from but on Linux
        if row["device"] not in measure.CEILINGS:
            unknown |= {"forward_roofline", "step_roofline"}
        unknown |= set(layer.HOST)  # on a CPU there is nothing else
        assert empty <= unknown, row["contender"]
        for name in PASSES:
            assert float(row[f"{name}_p20"]) <= float(row[f"{name}_ms"]) <= float(row[f"{name}_p80"])
        assert float(row["forward_ms"]) < float(row["step_ms"])
        flops = 6 * 64 * 2 * 32 * 24
        assert float(row["step_tflops"]) == pytest.approx(3 * flops / float(row["step_ms"]) / 1e9, rel=1e-2)


@pytest.mark.parametrize("lacks", [layer.ADDED, layer.HOST], ids=["all that was added", "the host's"])
def test_a_file_of_before_gets_new_columns(lacks, tmp_path, capsys):
    path = tmp_path / "layer.csv"
    old = [f for f in layer.COMMAND.fields if f not in lacks]
    path.write_text(",".join(old) + "\n" + ",".join(f"old {f}" for f in old) + "\n")
    flags = "--device", "cpu", "--shape", "toy", "--reps", 1, "--only", "host", "loop", "--routing", "zipf"
    assert run("layer", *flags, "--out", path) == 0
    first, *others = read(path)
    assert first == {f: f"old {f}" for f in old} | dict.fromkeys(lacks, "")
    assert others and all(list(r) == layer.COMMAND.fields and r["routing"] == "zipf" for r in others)


@pytest.mark.gpu
def test_the_host_is_timed_beside_a_gpu(tmp_path, capsys):
    path = tmp_path / "layer.csv"
    flags = "--shape", "toy", "--reps", 2, "--only", "moe_aiter MoE", "loop"
    assert run("layer", "--device", "cuda", *flags, "--out", path) == 0
    for row in read(path):
        for name, passes in PASSES.items():
            slower = max(float(row[f"{name}_ms"]), float(row[f"{name}_host_ms"]))
            assert float(row[f"{name}_tflops"]) == pytest.approx(
                passes * 6 * 64 * 2 * 32 * 24 / slower / 1e9, rel=1e-2
            )
        assert float(row["forward_host_ms"]) < float(row["step_host_ms"])


def test_other_columns_are_left_alone(tmp_path, capsys):
    path = tmp_path / "layer.csv"
    path.write_text("date,forward_ms\n")
    assert run("layer", "--device", "cpu", "--shape", "toy", "--out", path) == 2
    assert "other columns" in capsys.readouterr().err and path.read_text() == "date,forward_ms\n"


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--only", "zzz"), "no contender matches zzz; there are 'layer: moe_aiter MoE', "),
        (("--only", "loop", "zzz"), "no contender matches zzz; there are "),
        (("--reps", "0"), "argument --reps: 0 is less than 1"),
        (("--reps", str(2**31)), "argument --reps: 2147483648 is too large"),
        (("--reps", "-1"), "argument --reps: -1 is less than 1"),
        (("--reps", "1", "--out", "."), ".: Is a directory"),
    ],
)
def test_flags_that_make_no_sense(flags, message, capsys):
    try:
        status = run("layer", "--device", "cpu", "--shape", "toy", *flags)
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2 and message in printed.err and printed.err.count("\n") == 1
    assert " ms " not in printed.out


@pytest.mark.parametrize("is_cuda, slow_runs", [(True, 3), (False, 11)])
def test_the_slow_run_less_often_on_a_gpu(is_cuda, slow_runs, monkeypatch):
    steps = {"slow": 90.0, "twice": 40.0, "fast": 20.0, "yardstick": 1.0}
    calls = dict.fromkeys(steps, 0)

    def fixed(contender, problem, flush):
        calls[contender.name] += 1
        return lambda: (1.0, 1.0, steps[contender.name])

    monkeypatch.setattr(measure, "measure_cpu", fixed)
    monkeypatch.setattr(measure, "measure_gpu", fixed)
    x = types.SimpleNamespace(is_cuda=is_cuda, device="cpu")
    problem = types.SimpleNamespace(x=x, renew=lambda round: None)
    field = [layer.Contender(name, None, (x,), checked=name != "yardstick") for name in steps]
    times = measure.time_all(field, problem, 11)
    assert [t["step"].median for t in times] == list(steps.values())
    assert calls == dict.fromkeys(steps, measure.WARMUP + 11) | {"slow": measure.WARMUP + slow_runs}


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("layer", "--device", "cuda") == 2
    assert "no GPU" in capsys.readouterr().err


def test_memory_counts_what_a_contender_takes(problem):
    hoard = []

    def take():
        hoard.append(torch.ones(64 * MIB // 4, device=problem.x.device))
        torch.ones(32 * MIB // 4, device=problem.x.device)
        return problem.x * 2

    greedy = layer.Contender("greedy", take, (problem.x,))
    measured = measure_memory(greedy, problem)
    if measured is None:
        pytest.skip("this system does not tell the memory of a process")
    held, peak = measured
    slop = 1 if problem.x.is_cuda else 8
    assert held == pytest.approx(64, abs=slop)
    assert peak == pytest.approx(96, abs=slop)


def test_shapes_are_known():
    assert set(DEFAULT["cpu"] + DEFAULT["cuda"]) <= set(SHAPES)
    protocol = (ROOT / "benchmarks" / "README.md").read_text()
    for name in ("B", "C", "D", "E"):
        assert str(SHAPES[name]) in protocol


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--shape Z", "there is no shape 'Z'; shapes: A, B"),
        (
            "--shape toy 64,32,24,5",
            "there is no shape '64,32,24,5': it has 4 of 5 sizes; give T,H,I,E,k, as in",
        ),
        ("--shape 64 32 24 5 2", "there is no shape '64': it has 1 of 5 sizes; give T,H,I,E,k, as in 4096,"),
        ("--shape 64,32,24,5,2,1", "there is no shape '64,32,24,5,2,1': it has 6 of 5 sizes; give T,H,I,E,k"),
        (
            "--shape 64,32,24,0,2",
            "there is no shape '64,32,24,0,2': a size is 0; give T,H,I,E,k, as in 4096,",
        ),
        ("--shape 64,32,24,2,5", "a token cannot go to 5 of 2 experts"),
        ("--shape 64,3,24,5,2 --routing zipf", "64,3,24,5,2 has more experts than hidden sizes"),
    ],
)
def test_shapes_are_refused(flags, message, capsys):
    assert run("layer", "--device", "cpu", *flags.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["33,20,7,5,2", "1,1,1,1,1"])
def test_sizes_of_your_own(sizes, tmp_path, capsys):
    flags = "--device", "cpu", "--reps", 1, "--only", "moe_aiter MoE", "loop"
    assert run("layer", "--shape", sizes, *flags, "--out", tmp_path / "layer.csv") == 0
    rows = read(tmp_path / "layer.csv")
    assert rows and all(",".join(row[size] for size in layer.SIZES) == sizes == row["shape"] for row in rows)


def test_arguments_have_help():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert "layer | models ..." in " ".join(parser.format_help().split())  # argparse breaks the line


NO_TRANSFORMERS = "transformers is not installed: pip install '.[hf]' in the source tree"


@pytest.mark.parametrize(
    "error, reason",
    [
        (ModuleNotFoundError(name="transformers.models"), NO_TRANSFORMERS),
        (ModuleNotFoundError(name="scattermoe"), "scattermoe is not installed"),
        (ValueError("no such GPU"), "ValueError: no such GPU"),
    ],
)
def test_a_skipped_peer_says_what_to_install(error, reason, capsys):
    skip("Peer", error)
    assert capsys.readouterr().out == f"skipping Peer: {reason}\n"


@pytest.mark.parametrize("command", ["bench layer", "bench models", "tune"])
def test_lists_of_names(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--list"])
    assert capsys.readouterr().out


def measured(contender, step_ms, **cells):
    return {"contender": contender, "step_ms": step_ms, "peak_mib": 1000 * step_ms} | cells


OURS, THEIRS = layer.RIVALS[0]


def test_the_last_line_compares_ours_with_hugging_face():
    graph = measured(f"{OURS}, CUDA graph", 1)
    rows = [graph, measured(OURS, 2.0, step_host_ms=2.5), measured(THEIRS, 5, step_host_ms=3)]
    assert layer.answer(rows, layer.RIVALS) == (
        "2.0 times as fast as Hugging Face Qwen3-MoE, grouped_mm (2.5 instead of 5 ms a step), "
        "peak memory 2.1 instead of 5.2 GB"
    )
    rows[2] |= {"peak_mib": 20}
    rows[1] |= {"peak_mib": 10}
    assert layer.answer(rows, layer.RIVALS).endswith("peak memory 10 instead of 21 MB")
    del rows[2]["peak_mib"]
    assert layer.answer(rows, layer.RIVALS).endswith("(2.5 instead of 5 ms a step)")


def test_the_last_line_names_what_was_not_measured():
    refused = {"contender": THEIRS, "refused": True}
    left_out = f"{THEIRS!r} not measured (left out, not installed or refused)"
    assert layer.answer([measured(OURS, 2), refused], layer.RIVALS) == f"no comparison: {left_out}"
    experts = [measured(f"moe_aiter experts, {backend}", ms) for backend, ms in (("host", 4), ("torch", 2))]
    line = layer.answer([measured(OURS, 2), *experts, measured("for-loop over experts", 8)], layer.RIVALS)
    assert line.startswith(
        "moe_aiter experts, host is 2.0 times as fast as for-loop over experts (4 instead of"
    )
    assert line.endswith(f"; {left_out}")


@pytest.mark.parametrize("only", [(), ("--only", "loop", "experts, host", "torch")])
def test_the_command_ends_with_a_line_for_each_shape(only, capsys):
    flags = "--device", "cpu", "--reps", 1, "--dtype", "float32"
    assert run("layer", *flags, "--shape", "toy", "64,8,8,2,1", *only) == 0
    *_, first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("toy: ") and last.startswith("64,8,8,2,1: ")
    assert all(
        re.search(r"\d times as fast as .* ms a step\), peak memory .* [MG]B", line) for line in (first, last)
    )
