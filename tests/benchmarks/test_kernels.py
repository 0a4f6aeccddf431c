"""`python -m benchmarks kernels`: what it measures is right, and what is wrong gets no figures."""

import csv

import pytest
import torch

from benchmarks import kernels
from benchmarks.__main__ import main
from moe_aiter.bench.problem import SHAPES
from moe_aiter.config import interpret


def run(*argv):
    return main(["kernels", *map(str, argv)])


@pytest.fixture
def found():
    if not interpret:
        pytest.skip("portable kernels need a GPU or the interpreter")
    return kernels.kernels(SHAPES["toy"], torch.device("cpu"), torch.float16)


@pytest.mark.interpret
def test_kernels_and_their_bytes(found):
    assert all(kernel.check() < 1e-3 for kernel in found)
    (T, H, _, E, k), rows = SHAPES["toy"].sizes, 128
    assert [(kernel.name, kernel.columns, kernel.bytes) for kernel in found] == [
        ("route", "", T * (4 * E + 12 * k)),
        ("plan", "", 16 * rows + 4 * E),
        ("dlogits", "", T * (16 * k + 4 * E)),
        ("weighted sum", H, 2 * H * (rows + T) + 8 * rows),
        ("sum", H, 2 * H * (rows + T) + 4 * rows),
    ]


@pytest.mark.interpret
@pytest.mark.parametrize("i, message", [(1, "plan: integers differ"), (4, "sum: error nan")])
def test_an_output_that_is_not_written_is_refused(i, message, found, monkeypatch):
    monkeypatch.setattr(found[i], "launch", lambda *_: None)
    with pytest.raises(RuntimeError, match=message):
        found[i].check()


@pytest.mark.interpret
@pytest.mark.skipif(not interpret, reason="portable kernels need a GPU or the interpreter")
def test_kernels_that_quantise():
    found = kernels.quantising(SHAPES["toy"], torch.device("cpu"), torch.float16)
    assert not any(kernel.check() for kernel in found) and len({kernel.name for kernel in found}) == 15
    T, H, _, E, k = SHAPES["toy"].sizes
    assert found[-1].bytes == T * H + (T * k // 128 + E) * H * 128


@pytest.mark.parametrize(
    "gpu, argv, message",
    [
        (False, [], "there is no GPU that torch can use"),
        (True, ["nowhere"], "unknown shape nowhere; known: A, B"),
        (True, ["--out", "old.csv"], "old.csv has other columns: shape, us"),
    ],
)
def test_refusals(gpu, argv, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("shape,us\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "k.csv"
    for _ in range(2):
        assert run("cpu", "--reps", 3, "--out", path) == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == kernels.FIELDS and len(rows) == 2 * (8 + 15)
    assert all(float(row["us"]) > 0 and float(row["gb_per_s"]) > 0 for row in rows)
    assert [row["kernel"] for row in rows if row["copy_percent"]] == ["weighted sum", "sum"] * 2
