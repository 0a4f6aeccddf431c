"""The benchmark of grouped products runs, and refuses what is wrong."""

import csv

import pytest
import torch

from benchmarks import gmm as bench
from benchmarks.__main__ import main


def run(*argv):
    return main(["gmm", "--shape", "toy", "--device", "cpu", *map(str, argv)])


@pytest.mark.parametrize("layout", [(), ("--transposed",)], ids=["plain", "transposed"])
def test_rows_are_appended(tmp_path, layout, capsys):
    path = tmp_path / "new" / "gmm.csv"
    for commit in ("one", "two"):
        assert run("--dtype", "float32", "--reps", 2, "--commit", commit, "--out", path, *layout) == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {r["commit"] for r in rows} == {"one", "two"} and {r["op"] for r in rows} == {"gmm", "ptgmm"}
    names = {r["contender"] for r in rows}
    assert {"moe_aiter gmm, torch", "moe_aiter ptgmm, torch", "moe_aiter nptgmm, torch"} <= names
    for row in rows:
        assert list(row) == bench.COMMAND.fields and all(row.values())
        assert float(row["p20"]) <= float(row["ms"]) <= float(row["p80"])
        flops = 2 * 50 * 16 * 24
        assert float(row["tflops"]) == pytest.approx(flops / float(row["ms"]) / 1e9, rel=1e-2)
    assert ("transposed" if layout else "plain") == rows[0]["layout"]


def test_groups_are_uneven_and_some_are_empty():
    product = bench.Product("gmm", (5000, 2, 2, 40), torch.float32, torch.device("cpu"), False)
    seen = []
    for seed in range(3):
        product.renew(seed)
        seen.append(product.group_sizes.tolist())
        assert sum(seen[-1]) == 5000 == product.ends[-1] and 0 in seen[-1]
    assert seen[0] != seen[1]


def test_a_wrong_contender_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(bench, "gmm", lambda *a: 1.01 * torch.ops.moe_aiter.gmm(*a, None))
    assert run("--op", "gmm", "--only", "moe_aiter", "--reps", 1, "--dtype", "float32") == 1
    assert "refused, the error of its output is 1.0e-02" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message", [(("--only", "zzz"), "no contender matches zzz"), (("--reps", "0"), "0 is less than 1")]
)
def test_flags_that_make_no_sense(flags, message, capsys):
    try:
        status = run(*flags)
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err


def test_other_columns_are_left_alone(tmp_path, capsys):
    path = tmp_path / "gmm.csv"
    path.write_text("date,ms\n")
    assert run("--out", path) == 2
    assert "other columns" in capsys.readouterr().err and path.read_text() == "date,ms\n"


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("op", bench.OPS)
def test_every_contender_on_a_gpu_is_as_good_as_torch(op, transposed):
    product = bench.Product(op, (3000, 256, 512, 9), torch.bfloat16, torch.device("cuda", 0), transposed)
    judge = bench.by_group(product)
    for runner in bench.runners(product):
        if runner.ours:
            assert judge(runner)[0].of_the_bar <= 1, runner.name
