"""The map of published models: the README's first figure, and tables in FIGURES."""

import re

import pytest

from benchmarks import report
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
TORCH, BMM = report.YARDSTICKS.values()


def rows_of(model, **changes):
    """One run of a model, where the torch contender takes 8 ms."""
    cells = RUN | SIZES | {"model": model, "layout": "rows", "activation": "swiglu"} | changes
    for contender, ms in ((HOPPER, 2), (PORTABLE, 4), (TORCH, 8), (BMM, 1)):
        row = dict.fromkeys(models.COMMAND.fields, "") | cells
        row |= {"contender": contender, "step_ms": ms, "step_host_ms": "0.5", "peak_mib": "100"}
        yield row | ({"up": "hopper", "dx": "portable: K = 720"} if contender == HOPPER else {})


def documents_of(rows, tmp_path):
    """README and FIGURES."""
    head = dict.fromkeys(layer.COMMAND.fields, "") | RUN | SIZES
    figures = {"shape": "A", "contender": report.LAYER, "step_ms": "5", "step_tflops": "30"}
    measure.append(tmp_path / "layer.csv", [head | figures], layer.COMMAND.fields)
    measure.append(tmp_path / "models.csv", rows, models.COMMAND.fields)
    document = tmp_path / "README.md"
    document.write_text(f"{report.BEGIN}\n{report.END}\n")
    assert main(["report", "--csv", str(tmp_path / "layer.csv"), "--readme", str(document)]) == 0
    return document.read_text(), (tmp_path / report.FIGURES).read_text()


def test_the_map_is_the_first_figure(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [*rows_of("one"), *rows_of("two, half", gate="interleaved")]
    readme, figures = documents_of(rows, tmp_path)
    first, *_ = re.findall(r"!\[(.*)\]\((.*)\)", readme)
    assert first == (report.MAP_TITLE, "docs/models.svg") and "(../docs/models.svg)" in figures
    drawing = (tmp_path / "docs" / "models.svg").read_text()
    assert "<svg" in drawing and "<dc:date>" not in drawing
    (tmp_path / "again").mkdir()
    documents_of(rows, tmp_path / "again")
    assert (tmp_path / "again" / "docs" / "models.svg").read_text() == drawing
    assert "## Published models" in figures
    assert (
        "| one (64, 32, 24, 5, 2, rows, swiglu) | 2 / 0.5 / 100 | 4 / 0.5 / 100 | 8 / 0.5 / 100 | " in figures
    )
    assert "| two, half | 4.00 | 2.00 | 0.50 | 0.25 | dx: K = 720 |" in figures


def test_what_could_not_run_stands_in_the_table(tmp_path):
    rows = list(rows_of("one"))
    rows[1] |= {"step_ms": "", "step_host_ms": "", "peak_mib": "", "note": "OutOfMemoryError: a | b"}
    _, figures = documents_of(rows, tmp_path)
    assert "OutOfMemoryError: a / b" in figures and "| one | 4.00 | – | 0.50 | – | dx: K = 720 |" in figures


def test_figures_of_one_run_are_compared(tmp_path):
    old, new = list(rows_of("one")), list(rows_of("one", commit="two"))
    new[2]["step_ms"] = 6
    path = tmp_path / "models.csv"
    measure.append(path, [*old, *rows_of("other", device="Slide rule"), *new[:3]], models.COMMAND.fields)
    (speeds,) = report.speeds_of_models(path)
    assert speeds.by == {"torch": {"Hopper kernels": 3.0, "portable kernels": 1.5}}


def test_without_results_there_is_no_map(tmp_path):
    readme, figures = documents_of([], tmp_path)
    assert report.MAP not in readme + figures and not (tmp_path / "docs" / report.MAP).exists()
