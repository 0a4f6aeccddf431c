"""The map of published models: the chart of the README and docs/speed.md, and the page of models."""

import re

import pytest

from benchmarks import plots, report, speed, tables
from benchmarks.__main__ import main
from moe_aiter.bench import layer, measure, models

RUN = {
    "device": "Abacus",
    "dtype": "bfloat16",
    "torch": "2",
    "triton": "3",
    "date": "2026-01-01",
    "commit": "one",
}
SIZES = {"tokens": "64", "hidden": "32", "intermediate": "24", "experts": "5", "top_k": "2"}
HOPPER, PORTABLE = "moe_aiter experts, hopper", "moe_aiter experts, triton"
TORCH, BMM = "torch grouped_mm", f"batched {tables.CEILING}"


def rows_of(model, **changes):
    """One run of a model, where Hugging Face takes 10 ms and torch 8 ms."""
    cells = RUN | SIZES | {"model": model, "checkpoint": model, "layout": "rows", "activation": "relu(1)"}
    for contender, ms in ((HOPPER, 2), (PORTABLE, 4), (TORCH, 8), (speed.HF_EXPERTS, 10), (BMM, 1)):
        row = dict.fromkeys(models.COMMAND.fields, "") | cells | changes
        row |= {"contender": contender, "step_ms": ms, "step_host_ms": "0.5", "peak_mib": 1000 * ms}
        yield row | ({"up": "hopper", "dx": "portable: K = 720"} if contender == HOPPER else {})


def documents_of(rows, tmp_path):
    """README and the page of models, or ""."""
    head = dict.fromkeys(layer.COMMAND.fields, "") | RUN | SIZES
    figures = {"shape": "A", "contender": speed.LAYER, "step_ms": "5", "step_tflops": "30"}
    measure.append(tmp_path / "layer.csv", [head | figures], layer.COMMAND.fields)
    measure.append(tmp_path / "models.csv", rows, models.COMMAND.fields)
    document = tmp_path / "README.md"
    document.write_text(f"{report.BEGIN}\n{report.END}\n")
    assert main(["report", "--csv", str(tmp_path / "layer.csv"), "--readme", str(document)]) == 0
    page = tmp_path / report.FIGURES / "models.md"
    return document.read_text(), page.read_text() if page.exists() else ""


def test_the_map_is_the_first_figure(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [*rows_of("one"), *rows_of("two, half", gate="interleaved")]
    readme, figures = documents_of(rows, tmp_path)
    first, *_ = re.findall(r"!\[(.*)\]\((.*)\)", readme)
    assert first == (plots.MAP_TITLE, "docs/models.svg") and "(../../docs/models.svg)" in figures
    drawing = (tmp_path / "docs" / "models.svg").read_text()
    assert re.findall(r">(one|two, half|5\.0|Abacus)<", drawing) == [
        "one",
        "two, half",
        "5.0",
        "5.0",
        "Abacus",
    ]
    (tmp_path / "again").mkdir()
    documents_of(rows, tmp_path / "again")
    assert (tmp_path / "again" / "docs" / "models.svg").read_text() == drawing


def test_each_device_has_a_colour(tmp_path):
    pytest.importorskip("matplotlib")
    documents_of([*rows_of("one"), *rows_of("one", device="NVIDIA H7 80GB")], tmp_path)
    drawing = (tmp_path / "docs" / "models.svg").read_text()
    assert re.findall(r">(one|Abacus|H7)<", drawing) == ["one", "Abacus", "H7"]
    assert [colour in drawing for colour in plots.COLOURS[:3]] == [True, True, False]


def test_the_page_of_models(tmp_path):
    _, figures = documents_of([*rows_of("one"), *rows_of("two, half", gate="interleaved")], tmp_path)
    assert "## Published models" in figures
    assert "| one | 2 / 0.5 | 4 / 0.5 | 8 / 0.5 | 10 / 0.5 | 1 / 0.5 |" in figures
    assert "| one | 2000 | 4000 | 8000 | 10000 | 1000 |" in figures
    assert "| two, half | 64, 32, 24, 5, 2 | rows | interleaved | relu |" in figures
    assert "| two, half | 5.00 | 4.00 | 0.50 | 2.00 | 0.25 |" in figures
    assert "| two, half | dx: K = 720 |" in figures


def test_what_could_not_run_stands_in_the_table(tmp_path):
    rows = list(rows_of("one"))
    rows[1] |= {"step_ms": "", "step_host_ms": "", "peak_mib": "", "note": "OutOfMemoryError: a | b"}
    _, figures = documents_of(rows, tmp_path)
    assert "OutOfMemoryError: a / b" in figures and "| one | 5.00 | 4.00 | 0.50 |\n" in figures


def gains_of(rows, tmp_path):
    measure.append(tmp_path / "models.csv", rows, models.COMMAND.fields)
    return speed.gains_of_models(tmp_path / "models.csv")


def test_figures_of_one_run_are_compared(tmp_path):
    new = list(rows_of("one", commit="two"))
    new[3]["step_ms"] = 6
    (gain,) = gains_of([*rows_of("one"), *new[:4]], tmp_path)
    assert gain.times == 3 and gain.other["contender"] == TORCH


def test_other_dtypes_are_not_compared(tmp_path):
    other = [row | {"dtype": "float32", "step_ms": 90} for row in rows_of("one")]
    (gain,) = gains_of([*rows_of("one"), *other, *rows_of("one", dtype="float32", commit="two")], tmp_path)
    assert gain.times == 5 and gain.ours["dtype"] == "bfloat16"


def test_a_gain_is_that_of_the_longer_time(tmp_path):
    rows = list(rows_of("one"))
    rows[0]["step_host_ms"] = 4
    (gain,) = gains_of(rows, tmp_path)
    assert gain.times == 2.5


def test_each_device_has_a_bar_and_each_checkpoint_one(tmp_path):
    half = rows_of("one, half", checkpoint="one")
    gains = gains_of(
        [*rows_of("one"), *half, *rows_of("one", device="H7"), *rows_of("no", checkpoint="")], tmp_path
    )
    assert [(gain.model, gain.device) for gain in gains] == [("one", "Abacus"), ("one", "H7")]


def test_without_results_there_is_no_map(tmp_path):
    readme, figures = documents_of([], tmp_path)
    assert plots.MAP not in readme + figures and not (tmp_path / "docs" / plots.MAP).exists()
