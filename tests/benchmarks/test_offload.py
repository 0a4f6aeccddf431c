"""`python -m benchmarks offload`: rows, bounds, and a refusal of other bits."""

import csv

import pytest
import torch

from benchmarks import offload
from benchmarks.__main__ import main

SIZES = "64,64,64,5,2"


def run(*argv):
    common = "--device", "cpu", "--dtype", "float32", "--reps", "2", "--layers", "4", "--rank", "3"
    return main(["offload", *common, "--shape", SIZES, *argv])


def test_rows(tmp_path):
    path = tmp_path / "offload.csv"
    assert run("--out", str(path)) == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == offload.COMMAND.fields
    for format in (offload.PLAIN, "nf4"):
        on_device, offloaded, copy = (row for row in rows if row["format"] == format)
        assert on_device["contender"] == offload.ON_DEVICE and copy["contender"] == offload.COPY
        assert float(on_device["weights_mib"]) == pytest.approx(2 * float(offloaded["weights_mib"]), rel=1e-3)
        assert float(copy["gb_per_s"]) > 0 and float(offloaded["error"]) == 0
        ratio = float(offloaded["step_ms"]) / float(offloaded["step_bound_ms"])
        assert float(offloaded["step_of_bound"]) == pytest.approx(ratio, rel=1e-2)


@pytest.mark.parametrize("ahead, backward", [(1, 2), (2, 1), (9, 0)])
def test_the_bound_is_of_the_copies_that_are_made(monkeypatch, ahead, backward):
    """A pass finds the layers that the pass before has used last."""
    found = []
    monkeypatch.setattr(offload, "add_bounds", lambda shares, size, rows: found.append((shares, size)))
    assert run("--format", "plain", "--ahead", str(ahead)) == 0
    ((shares, size),) = found
    forward = 1 if backward else 0
    assert shares == {"inference": backward / 4, "forward": forward, "step": forward + backward / 4}
    assert size == 4 * 5 * 3 * 64 * 64 * 4


def test_bounds():
    rows = [
        {"contender": offload.ON_DEVICE, "inference_ms": 3.0, "forward_ms": 4.0, "step_ms": 8.0},
        {"contender": offload.OFFLOADED, "inference_ms": 4.0, "forward_ms": 6.0, "step_ms": 10.0},
        {"contender": offload.COPY, "ms": 5.0},
    ]
    offload.add_bounds({"inference": 0.5, "forward": 1.0, "step": 1.5}, 10**8, rows)
    assert rows[2]["gb_per_s"] == pytest.approx(20)
    assert [rows[1][f"{name}_bound_ms"] for name in ("inference", "forward", "step")] == [3.0, 5.0, 8.0]
    assert rows[1]["step_of_bound"] == 1.25
    few = [{"contender": offload.OFFLOADED}]
    offload.add_bounds({}, 1, few)  # with --only
    assert few == [{"contender": offload.OFFLOADED}]


def test_other_bits_are_refused(monkeypatch, capsys):
    plain = offload.contender

    def wrong(p, model, name, size):
        found = plain(p, model, name, size)
        if name == offload.OFFLOADED:
            run = found.run
            found.run = lambda: run() * (1 + 1e-6)
        return found

    monkeypatch.setattr(offload, "contender", wrong)
    assert run("--format", "plain") == 1
    assert "moe_aiter, offloaded: refused, the error of its output is" in capsys.readouterr().out


def test_mistakes(capsys):
    assert run("--shape", "gpt-oss") == 2
    assert "shape gpt-oss has biases or another activation" in capsys.readouterr().err
    assert run("--shape", "64,65,64,5,2") == 2
    assert "--shape 64,65,64,5,2: with nf4, H and I must be multiples of 64" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(no_debug):
    argv = ["--shape", "256,512,256,16,4", "--layers", "4", "--reps", "3"]
    assert main(["offload", *argv]) == 0
    assert torch.cuda.is_initialized()
