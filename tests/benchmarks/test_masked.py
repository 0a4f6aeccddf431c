"""`python -m benchmarks deepgemm` runs, and gives no figures to what is wrong."""

import csv

import pytest
import torch

from benchmarks import masked
from benchmarks.__main__ import main
from moe_aiter import tuning
from moe_aiter.kernels import hopper
from moe_aiter.tuning.candidates import candidates

TOY = ("--device", "cpu", "--groups", "2", "--n", "32", "--k", "64", "--max-m", "8", "140", "--reps", "1")


def run(*argv):
    return main(["deepgemm", *map(str, argv)])


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_appended(tmp_path, capsys):
    path = tmp_path / "new" / "masked.csv"
    for commit in ("one", "two"):
        assert run(*TOY, "--commit", commit, "--out", path) == 0
    rows = read(path)
    assert list(rows[0]) == masked.COMMAND.fields and {r["commit"] for r in rows} == {"one", "two"}
    of_one = [r for r in rows if r["commit"] == "one"]
    names = ["bfloat16", "8 bits", "8 bits, shuffled", "copy of 4096 bytes", "copy of 8192 bytes"]
    assert [r["contender"] for r in of_one] == 2 * names
    for row in of_one[:3]:
        assert (row["groups"], row["max_m"], row["n"], row["k"]) == ("2", "8", "32", "64")
        assert 12 <= int(row["rows"]) <= 16 and float(row["error"]) < 3e-3
        assert float(row["us"]) > 0 and float(row["copy_percent"]) > 0 and float(row["times_bf16"]) > 0
    printed = capsys.readouterr().out
    assert "2 groups of up to 140 rows, K 64, N 32" in printed and "x bfloat16" in printed


@pytest.mark.parametrize("spoil", [lambda out: out.mul_(1.01), lambda out: out.nan_to_num_(0)])
def test_what_is_wrong_gets_no_time(spoil, monkeypatch, capsys):
    right = masked.masked_gmm

    def wrong(out, x, *rest, **flags):
        right(out, x, *rest, **flags)
        if x.dtype == torch.bfloat16:
            spoil(out)

    monkeypatch.setattr(masked, "masked_gmm", wrong)
    assert run(*TOY) == 1
    printed = capsys.readouterr().out
    assert "bfloat16: refused, the error of its " in printed and "x bfloat16" not in printed


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--device", "cuda"), "there is no GPU that torch can use"),
        (("--device", "cpu", "--tiles"), "only a GPU has tiles"),
        (("--out", "old.csv"), "old.csv has other columns: date"),
        (("--out", "image.csv"), "image.csv is not a CSV file: 'utf-8' codec"),
        (("--n", "0"), "argument --n: 0 is less than 1"),
    ],
)
def test_refusals(flags, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("date\n")
    (tmp_path / "image.csv").write_bytes(b"\xff\xd8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = run(*flags)
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("max_m, tiers", [(64, ["triton"]), (256, ["hopper", "triton"])])
def test_tiles_of_every_backend(max_m, tiers, monkeypatch):
    """Those of Hopper's kernel, where it runs, and those of the portable one."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setitem(masked.ORDER, "cpu", ("hopper", "triton", "torch"))
    ops = {"hopper": "hopper_masked", "triton": "masked"}
    keys = {name: tuning.Key(op, 8, 64, 32, 64) for name, op in ops.items()}
    monkeypatch.setattr(masked.tiles.Product, "key", lambda product: keys[product.name.split(", ")[-1]])
    monkeypatch.setattr(masked, "fits", lambda run: True)
    found = masked.contest(2, max_m, 32, 64, True, torch.device("cpu"), torch.bfloat16).contenders
    for name in ("bfloat16", "8 bits", "8 bits, shuffled"):
        these = [b for b in tiers if b == "triton" or "shuffled" not in name]
        expected = [(name, "")]
        for b in these:
            expected += [(f"{name}, {b}", str(c or "")) for c in (None, *candidates(ops[b]))]
        mine = [c for c in found if c.name in {name, *(f"{name}, {b}" for b in ops)}]
        assert [(c.name, c.cells["tile"]) for c in mine] == expected


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, no_debug):
    path = tmp_path / "m.csv"
    flags = "--groups", 2, "--n", 256, "--k", 512, "--max-m", 16, 256, "--reps", 2
    assert run(*flags, "--tiles", "--out", path) == 0
    assert {r["contender"] for r in read(path)} >= {"bfloat16", "8 bits", "8 bits, shuffled"}
    assert sum(bool(r["tile"]) for r in read(path)) > 8
