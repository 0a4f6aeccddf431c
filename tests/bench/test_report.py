"""The README says what the CSV says, and the plots are drawn from it."""

import pathlib
import sys

import pytest

from moe_aiter import bench, cli
from moe_aiter.bench import layer, plots, report
from moe_aiter.bench.shapes import GROUPS, SHAPES

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(*argv):
    return cli.main(["bench", *map(str, argv)])


def row(**cells):
    cells = {
        "device": "Abacus",
        "dtype": "bfloat16",
        "torch": "2",
        "triton": "3",
        "date": "2026-01-01",
    } | cells
    shape = {"tokens": "64", "hidden": "32", "intermediate": "24", "experts": "5", "top_k": "2"}
    return dict.fromkeys(layer.FIELDS, "") | shape | cells


def test_the_report_takes_the_last_row_of_each_contender(tmp_path):
    path, document = tmp_path / "layer.csv", tmp_path / "README.md"
    cells = {
        "forward_tflops": "1.234",
        "step_ms": "5",
        "step_tflops": "123.4",
        "held_mib": "10.2",
        "peak_mib": "20.9",
    }
    rows = [
        row(commit="older", shape="A", contender="peer", forward_tflops="9", step_ms="5", step_tflops="9"),
        row(commit="old", shape="A", contender="peer", **cells),
        row(commit="new", shape="A", contender="layer", **cells),
        row(commit="new", shape="B", contender="wrong", error="0.3"),
    ]
    layer.append(path, rows)
    document.write_text(f"head\n{report.BEGIN}\nstale\n{report.END}\ntail\n")
    assert run("report", "--csv", path, "--readme", document) == 0
    text = document.read_text()
    assert text.startswith("head\n") and text.endswith("tail\n")
    assert "stale" not in text and "older" not in text and "commit new, old, " in text
    assert r"| peer | – / 1.2 / 123 \* | – |" in text and r"\* of an earlier run" in text
    assert "| layer | – / 1.2 / 123 | – |" in text and "| layer | 10 / 21 | – |" in text
    assert "| wrong | – | error 0.3 |" in text
    once = text
    assert run("report", "--csv", path, "--readme", document) == 0
    assert document.read_text() == once


def test_the_report_says_what_is_missing(tmp_path, capsys):
    document = tmp_path / "README.md"
    document.write_text("no markers\n")
    assert run("report", "--csv", tmp_path / "none.csv", "--readme", document) == 2
    layer.append(tmp_path / "layer.csv", [row(shape="A", contender="layer")])
    for text in ("no markers\n", f"{report.END}\n{report.BEGIN}\nthe rest\n"):
        document.write_text(text)
        assert run("report", "--csv", tmp_path / "layer.csv", "--readme", document) == 2
        assert "lacks <!-- bench: begin -->" in capsys.readouterr().err
        assert document.read_text() == text


@pytest.mark.parametrize("text", ["", ",".join(layer.FIELDS) + "\n", "a,b\n1,2\n", "\0\n\n", 200_000 * "x"])
def test_a_damaged_csv_leaves_the_document_alone(text, tmp_path, capsys):
    path, document = tmp_path / "layer.csv", tmp_path / "README.md"
    path.write_text(text)
    document.write_text(f"{report.BEGIN}\nfigures\n{report.END}\n")
    assert run("report", "--csv", path, "--readme", document) == 2
    assert "layer.csv is damaged: " in capsys.readouterr().err
    assert "figures" in document.read_text()


def test_a_damaged_plot_leaves_the_document_alone(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, document = tmp_path / "layer.csv", tmp_path / "README.md"
    rows = [measured(name, contender="layer") for name in GROUPS["tokens"]]
    layer.append(path, [*rows[1:], rows[0] | {"step_tflops": "many"}])
    document.write_text(f"{report.BEGIN}\nfigures\n{report.END}\n")
    assert run("report", "--csv", path, "--readme", document) == 2
    assert "layer.csv is damaged: ValueError: could not convert" in capsys.readouterr().err
    assert "figures" in document.read_text()


def test_the_readme_holds_the_figures_of_the_csv():
    text, source = (ROOT / "README.md").read_text(), ROOT / bench.CSV
    tables = report.report(report.figures(source)) if source.exists() else ""
    assert report.BEGIN in text and report.END in text
    assert report.replaced(text, tables) == text, "run `moe-aiter bench report`"


FIGURES = {
    "step_ms": "5",
    "forward_tflops": "20",
    "step_tflops": "30",
    "forward_roofline": "61.2",
    "step_roofline": "70.4",
    "held_mib": "100",
    "peak_mib": "200",
}


def measured(name, **cells):
    shape = {size: str(n) for size, n in layer.shape_cells(name, SHAPES[name]).items()}
    return row(commit="one", **FIGURES) | shape | cells


def document_of(rows, tmp_path):
    document = tmp_path / "README.md"
    document.write_text(f"{report.BEGIN}\n{report.END}\n")
    layer.append(tmp_path / "layer.csv", rows)
    assert run("report", "--csv", tmp_path / "layer.csv", "--readme", document) == 0
    return document.read_text()


def test_groups_and_routings_have_tables_of_their_own(tmp_path):
    rows = [measured(name, contender="layer") for name in ("dsv3", "30B-512", "E", "A", "1.4B-256", "C-512")]
    rows += [
        measured("A", contender="skewed", routing="zipf"),
        measured("A", contender="old", dtype="float16"),
    ]
    rows[3]["routing"] = "normal"  # the same as none
    text = document_of(rows, tmp_path)
    heads = [line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| TFLOP/s")]
    names = [[cell.split()[0] for cell in head] for head in heads]
    assert sorted(names) == sorted([["dsv3"], ["1.4B-256", "30B-512"], ["A", "E"], ["A"], ["A"]])
    assert text.count("Zipf routing") == 1 and "C-512" not in text
    assert "| Share of the roofline in percent, forward / step | A" in text and "| skewed | 61 / 70 |" in text


def test_no_table_of_the_roofline_where_it_is_not_known(tmp_path):
    unknown = {"forward_roofline": "", "step_roofline": ""}
    assert "roofline" not in document_of([measured("A", contender="layer", **unknown)], tmp_path)


@pytest.mark.parametrize("group, name", [("tokens", "tflops.png"), ("top-k", "memory.png")])
def test_plots(group, name, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    rows = [measured(n, contender=c) for n in GROUPS[group] for c in ("layer", "peer", "_refused")]
    for r in rows:
        if r["contender"] == "_refused":
            r |= dict.fromkeys(FIGURES, "")
    rows += [measured(n, contender="skewed", routing="zipf") for n in GROUPS[group]]
    rows += [measured(GROUPS[group][0], contender="alone", device="one shape only")]
    text = document_of(rows, tmp_path)
    assert text.count("![") == 1 and f"(docs/{name})" in text
    assert [path.name for path in (tmp_path / "docs").iterdir()] == [name]
    picture = image.imread(tmp_path / "docs" / name)
    assert picture.shape[0] > 400 and picture.std() > 0.01
    lines = plots.lines_of(rows, plots.PLOTS[name])
    xs = [[int(r[plots.PLOTS[name].x]) for r in line] for line in lines.values()]
    assert list(lines) == ["layer", "peer"] and all(x == sorted(set(x)) and len(x) > 2 for x in xs)


def test_no_plots_before_there_are_figures(tmp_path):
    assert "![" not in document_of([measured("A", contender="layer")], tmp_path)
    assert not (tmp_path / "docs").exists()


def test_a_report_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "tflops.png" in document_of([measured(n, contender="x") for n in GROUPS["tokens"]], tmp_path)
    assert "no plots: matplotlib is not installed" in capsys.readouterr().err
