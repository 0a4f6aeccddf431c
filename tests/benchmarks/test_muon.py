"""`python -m benchmarks muon`: rows, the FLOPs that are counted, and refusals of other updates."""

import csv
import re

import pytest
import torch
from check import error
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import muon
from benchmarks.__main__ import main
from moe_aiter.bench.problem import Shape

CONTENDERS = [muon.OURS, muon.LOOP, muon.MATMULS]


def run(*argv, shape="toy"):
    return main(["muon", "--device", "cpu", "--reps", "2", "--shape", shape, *argv])


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", ["toy", "1,8,24,2,1", "1,1,1,1,1"])
def test_rows(shape, dtype, tmp_path):
    path = tmp_path / "muon.csv"
    assert run("--dtype", dtype, "--out", str(path), shape=shape) == 0
    rows = read(path)
    assert list(rows[0]) == muon.COMMAND.fields and [r["contender"] for r in rows] == CONTENDERS
    ours, loop, matmuls = ({k: float(v) for k, v in r.items() if k in ("ms", "tflops")} for r in rows)
    assert float(rows[0]["matmul_percent"]) == pytest.approx(100 * matmuls["ms"] / ours["ms"], rel=1e-2)
    assert float(rows[0]["times_torch"]) == pytest.approx(loop["ms"] / ours["ms"], rel=1e-2)
    assert all(0 < float(r["error"]) < 0.1 for r in rows[:2]) and not rows[2]["error"]


def test_the_flops_are_those_of_the_matmuls_and_of_a_step():
    shape = Shape(1, 16, 24, 3, 1)
    p = muon.contest(shape, torch.device("cpu"), torch.float32)
    for contender in p.contenders[1:]:  # ours is in ops that the counter does not look into
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            contender.run()
        assert counter.get_total_flops() == p.timer.flops > 0, contender.name


@pytest.mark.parametrize("size", [(8, 24), (24, 8), (16, 16)])
def test_newton_schulz_keeps_the_singular_vectors(size):
    u = torch.randn(3, *size, dtype=torch.float64)
    x = muon.newton_schulz(u)
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    inner = left.mT @ x @ right.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert error(inner, values.diag_embed()) < 1e-9
    assert values.min() > 0.3 and values.max() < 1.3


def test_another_update_is_refused(monkeypatch, capsys):
    """Gate and up as one matrix."""
    plain = muon.Muon
    monkeypatch.setattr(muon, "Muon", lambda stacks, **how: plain([s["params"][0] for s in stacks], **how))
    assert run() == 1
    assert re.search(f"{muon.OURS}: refused, the error of its (gate|up) is", capsys.readouterr().out)


def test_with_few_contenders(capsys):
    assert run("--only", "moe_aiter") == 0
    out = capsys.readouterr().out
    assert muon.OURS in out and "% of matmuls" not in out and "x torch" not in out


def test_mistakes(capsys):
    assert run("--only", "Adam") == 2
    assert "no contender matches Adam" in capsys.readouterr().err
    assert run(shape="models") == 2
    assert "shape gpt-oss has biases or another activation" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, no_debug):
    """A first step holds the momentum, and nothing else."""
    path, shape = tmp_path / "muon.csv", "1,512,256,16,1"
    assert main(["muon", "--shape", shape, "toy", "--reps", "3", "--out", str(path)]) == 0
    for row in read(path)[:2]:
        assert float(row["held_mib"]) == pytest.approx(2 * 3 * 16 * 512 * 256 / 2**20, rel=1e-2)
        assert float(row["peak_mib"]) > float(row["held_mib"])
