"""metrics.jsonl: one line a step, and only whole lines count."""

import math
import time

import pytest
import torch
from language_model import UsageError
from language_model.metrics import Metrics, peak_flops, read_metrics, truncate_metrics


def write(path, steps):
    metrics = Metrics(path, tokens_per_step=100, flops_per_step=1e9, peak=1e12)
    for step in steps:
        tensors = {"loss": torch.tensor(2.0 / step), "imbalance": torch.tensor([0.5, 0.25])}
        metrics.add({"step": step}, tensors)
    rows = metrics.collect()
    metrics.write(rows)
    return rows[-1]


def test_rows_hold_numbers_tensors_and_rates(tmp_path):
    last = write(tmp_path / "m.jsonl", [1, 2])
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and rows[-1] == last
    assert rows[0]["loss"] == 2.0 and rows[0]["bits_per_byte"] == pytest.approx(2 / math.log(2))
    assert rows[0]["imbalance"] == [0.5, 0.25]
    assert rows[1]["tokens_per_s"] > 0
    assert rows[1]["mfu"] == pytest.approx(rows[1]["tokens_per_s"] / 100 * 1e9 / 1e12, rel=0.01, abs=1e-4)


def test_time_between_the_clocks_restart_and_a_step_counts_for_nothing(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl", tokens_per_step=1000, flops_per_step=1, peak=None)
    time.sleep(0.2)
    metrics.restart_clock()
    metrics.add({"step": 1}, {"loss": torch.tensor(1.0)})
    (row,) = metrics.collect()
    assert row["tokens_per_s"] > 1000 / 0.2 and row["seconds"] >= 0.2 and "mfu" not in row


def test_seconds_go_on_after_a_pause(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "seconds": 50.0}\n')
    assert write(path, [2])["seconds"] >= 50


def test_a_line_without_its_end_is_no_row(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize(
    "line", ["{", "", "[]", "7", '{"loss": 2}', '{"step": "1"}', '{"step": 1, "loss": "2"}']
)
def test_another_line_that_is_damaged_is_named(line, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"m.jsonl: line 2 is damaged: "):
        read_metrics(path)
    path.write_text('{"step": 1}\n' + line)
    assert read_metrics(path) == [{"step": 1}]


def test_rows_past_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("name, tflops", [("NVIDIA H200", 989), ("AMD Instinct MI300X", 1307), ("T4", None)])
def test_peak_by_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)
    assert peak_flops(torch.device("cpu")) is None
