"""`python -m benchmarks segment`: what it measures is right, and what is wrong gets no figures."""

import csv

import pytest
import torch

from benchmarks import segment
from benchmarks.__main__ import main


def run(*argv):
    return main(["segment", "--device", "cpu", "--dtype", "float32", "--reps", "2", *argv])


def test_rows_and_what_is_printed(tmp_path, capsys):
    path = tmp_path / "s.csv"
    assert run("--case", "toy", "toy-shared", "--out", str(path)) == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == segment.COMMAND.fields
    by_case = {
        case: [row["contender"] for row in rows if row["case"] == case] for case in ("toy", "toy-shared")
    }
    assert by_case["toy-shared"] == ["moe_aiter", "torch loop", "copy"]
    assert set(by_case["toy-shared"]) <= set(by_case["toy"]) <= {*by_case["toy-shared"], "torch._grouped_mm"}
    assert all(float(row["us"]) > 0 and float(row["gb_per_s"]) > 0 for row in rows)
    assert all(float(row["error"]) < 1e-6 for row in rows if row["contender"] != "copy")
    assert "100 % of a copy" in capsys.readouterr().out


@pytest.mark.parametrize("name", segment.SEGMENTS)
def test_cases(name):
    case = segment.SEGMENTS[name]
    assert len(case.lens) == case.segments and sum(case.lens) == case.segments * case.length
    assert min(case.lens) >= case.length // 2


def test_a_wrong_result_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(
        segment.SegmentGEMMWrapper, "run", lambda self, x, w, *_: x.new_ones(len(x), w.shape[1])
    )
    assert run("--case", "toy") == 1
    assert "moe_aiter: refused, the error of its output" in capsys.readouterr().out


def test_refusals(tmp_path, capsys, monkeypatch):
    path = tmp_path / "old.csv"
    path.write_text("case,us\n")
    assert run("--case", "toy", "--out", str(path)) == 2
    assert "old.csv has other columns: case, us" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["segment", "--device", "cuda"]) == 2
    assert "there is no GPU that torch can use" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, no_debug):
    path = tmp_path / "s.csv"
    assert main(["segment", "--case", "toy", "toy-shared", "--reps", "3", "--out", str(path)]) == 0
