"""README and the pages of figures say what the CSV says, and the plots are drawn from it."""

import csv
import importlib.metadata
import pathlib
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from benchmarks import plots, report, segment, skew, speed, tables
from benchmarks.__main__ import main
from docs import drawings
from moe_aiter.bench import layer, measure
from moe_aiter.bench.problem import GROUPS, SHAPES

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(*argv):
    return main([*map(str, argv)])


def row(**cells):
    cells = {
        "device": "Abacus",
        "dtype": "bfloat16",
        "torch": "2",
        "triton": "3",
        "date": "2026-01-01",
    } | cells
    shape = {"tokens": "64", "hidden": "32", "intermediate": "24", "experts": "5", "top_k": "2"}
    return dict.fromkeys(layer.COMMAND.fields, "") | shape | cells


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
    measure.append(path, rows, layer.COMMAND.fields)
    document.write_text(f"head\n{report.BEGIN}\nstale\n{report.END}\ntail\n")
    assert run("report", "--csv", path, "--readme", document) == 0
    page = tmp_path / report.FIGURES / "layers-abacus.md"
    once = [document.read_text(), page.read_text()]
    assert once[0].startswith("head\n") and once[0].endswith("tail\n") and "stale" not in once[0]
    text = once[1]
    assert text.startswith("# Layers: Abacus\n")
    assert "older" not in text and "commit new, old, " in text
    assert r"| peer \* | 1.2 | 123 | 5 | 10 | 21 |" in text and r"\* measured in an earlier run" in text
    assert "| layer | 1.2 | 123 | 5 | 10 | 21 |" in text
    assert "| wrong | error 0.3 |" in text
    assert run("report", "--csv", path, "--readme", document) == 0
    assert [document.read_text(), page.read_text()] == once


def test_the_report_says_what_is_missing(tmp_path, capsys):
    document = tmp_path / "README.md"
    document.write_text("no markers\n")
    assert run("report", "--csv", tmp_path / "none.csv", "--readme", document) == 2
    measure.append(tmp_path / "layer.csv", [row(shape="A", contender="layer")], layer.COMMAND.fields)
    for text in ("no markers\n", f"{report.END}\n{report.BEGIN}\nthe rest\n"):
        document.write_text(text)
        assert run("report", "--csv", tmp_path / "layer.csv", "--readme", document) == 2
        assert "lacks <!-- bench: begin -->" in capsys.readouterr().err
        assert document.read_text() == text


@pytest.mark.parametrize(
    "text", ["", ",".join(layer.COMMAND.fields) + "\n", "a,b\n1,2\n", "\0\n\n", 200_000 * "x"]
)
def test_a_damaged_csv_leaves_both_documents_alone(text, tmp_path, capsys):
    (tmp_path / "layer.csv").write_text(text)
    refused(tmp_path)
    assert "layer.csv is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize("name, column", [("C-512", "step_tflops"), ("dsv3", "peak_mib"), ("A", "held_mib")])
def test_a_damaged_figure_leaves_both_documents_alone(name, column, tmp_path, capsys):
    """Also where it is only in a plot, or not in the README."""
    pytest.importorskip("matplotlib")
    rows = [measured(n, contender="layer") for n in ("A", "dsv3", *GROUPS["tokens"])]
    next(r for r in rows if r["shape"] == name)[column] = "many"
    measure.append(tmp_path / "layer.csv", rows, layer.COMMAND.fields)
    refused(tmp_path)
    assert "layer.csv is damaged: ValueError: could not convert" in capsys.readouterr().err


def test_a_damaged_csv_of_products_is_named(tmp_path, capsys):
    measure.append(tmp_path / "layer.csv", [measured("A", contender="layer")], layer.COMMAND.fields)
    older = [name for name in segment.COMMAND.fields if name != "host_us"]
    measure.append(tmp_path / "segment.csv", [dict.fromkeys(older, "1")], older)
    refused(tmp_path)
    assert f"{tmp_path / 'segment.csv'} is damaged: KeyError: 'host_us'" in capsys.readouterr().err


def test_a_csv_of_products_is_not_the_one_to_name(tmp_path, capsys):
    measure.append(
        tmp_path / "segment.csv", [dict.fromkeys(segment.COMMAND.fields, "1")], segment.COMMAND.fields
    )
    assert run("report", "--csv", tmp_path / "segment.csv", "--readme", tmp_path / "README.md") == 2
    assert "--csv is that of `bench layer`; segment.csv beside it" in capsys.readouterr().err


def refused(tmp_path):
    """The report of layer.csv is, and the documents stay as they were."""
    page = report.FIGURES / "README.md"
    before = {"README.md": f"{report.BEGIN}\nfigures\n{report.END}\n", page: "others\n"}
    (tmp_path / report.FIGURES).mkdir(parents=True)
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    assert run("report", "--csv", tmp_path / "layer.csv", "--readme", tmp_path / "README.md") == 2
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_the_documents_hold_the_figures_of_the_csv():
    documents = report.documents(ROOT / report.CSV, ROOT / "README.md")
    written = {ROOT / name for name in ("README.md", report.SPEED, report.SKEW, report.RL)}
    assert written | {*(ROOT / report.FIGURES).iterdir()} == documents.keys()
    for path, text in documents.items():
        assert path.read_text() == text, "run `python -m benchmarks report`"


def test_the_plots_are_those_of_the_csv(tmp_path):
    pytest.importorskip("matplotlib")
    rows, folder = report.read(ROOT / report.CSV), (ROOT / report.CSV).parent
    gains = speed.gains_of_models(folder / speed.MODELS)
    plots.draw(report.last(rows), gains, tmp_path, folder / "parallel.csv")
    for path in tmp_path.iterdir():
        same(ROOT / "docs" / path.name, path, "run `python -m benchmarks report`")
    drawn = {path.name for path in tmp_path.iterdir()}
    others = {plots.PARALLEL, plots.MAP, skew.CHART, *plots.PLOTS} - drawn
    assert {plots.PARALLEL, plots.MAP} <= drawn and not [n for n in others if (ROOT / "docs" / n).exists()]


def test_the_drawings_are_those_of_their_code(tmp_path):
    pytest.importorskip("matplotlib")
    drawings.main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"flow.svg", *drawings.LOSSES}
    for path in tmp_path.iterdir():
        same(ROOT / "docs" / path.name, path, "run `python -m docs.drawings`")


def same(there, drawn, remedy):
    """Assert that two drawings are equal; of two versions of matplotlib, that their words are."""
    if f"Matplotlib v{importlib.metadata.version('matplotlib')}," in there.read_text():
        assert there.read_text() == drawn.read_text(), remedy
    words = [re.findall(r">([^<>]+)</text>", path.read_text()) for path in (there, drawn)]
    assert words[0] == words[1], remedy


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_suits_any_page(path):
    svg(path)


def test_figures_link_to_what_is_there():
    for document in (ROOT / report.FIGURES).iterdir():
        for link in re.findall(r"\]\(([^)#]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_no_table_is_wider_than_a_page():
    for document in (ROOT / report.FIGURES).iterdir():
        for table in re.findall(r"(?:^\|.*\n)+", document.read_text(), re.M):
            head, _, *rows = (line[2:-2].split(" | ") for line in table.splitlines())
            widths = map(tables.characters, zip(head, *rows, strict=True))
            assert sum(widths) <= tables.WIDTH or len(head) == 2, f"{document.name}: {head}"


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


def documents_of(rows, tmp_path):
    """README and the pages of figures in one text."""
    document = tmp_path / "README.md"
    document.write_text(f"{report.BEGIN}\n{report.END}\n")
    measure.append(tmp_path / "layer.csv", rows, layer.COMMAND.fields)
    assert run("report", "--csv", tmp_path / "layer.csv", "--readme", document) == 0
    return document.read_text(), "".join(path.read_text() for path in (tmp_path / report.FIGURES).iterdir())


OURS, FP8 = speed.LAYER, speed.FP8
CEILING = f"batched {tables.CEILING}"


def run_of(commit, **tflops):
    """Rows of one run at A, from (contender, TFLOP/s of a step)."""
    names = {"ours": OURS, "fp8": FP8, "ceiling": CEILING}
    return [
        measured("A", contender=names.get(n, n), step_tflops=str(v)) | {"commit": commit}
        for n, v in tflops.items()
    ]


def table_of_one_run(rows, tmp_path):
    """What ran, and the first cell of each row of the one table on the page with links."""
    documents_of(rows, tmp_path)
    text = (tmp_path / report.FIGURES / "README.md").read_text()
    ((head, body),) = re.findall(r"^(\*\*.*)\n\n\|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.M)
    return head, [line.split(" | ")[0][2:] for line in body.splitlines()]


PEERS = {"slow": 10, "fast": 90, "fast, compiled": 95, "middle": 50, "third": 30}


def test_six_rows_of_one_run(tmp_path):
    whole = run_of("whole", ours=99, fp8=120, ceiling=130, **PEERS, **{f"{FP8}, later micro-batch": 125})
    partial = run_of("partial", ours=99, fp8=120, ceiling=130, more=1, **PEERS)[1:]
    later = run_of("later", ours=100, fp8=121)
    skewed = [row | {"routing": "zipf", "commit": "skewed"} for row in whole]
    others = [row | {"shape": "dsv3", "commit": "others"} for row in whole]
    whole += [row | {"shape": "B"} for row in whole]
    one_shape = [row | {"commit": "one shape"} for row in whole if row["shape"] == "B"]
    head, names = table_of_one_run([*whole, *partial, *later, *skewed, *others, *one_shape], tmp_path)
    assert "commit whole, " in head
    assert names == [OURS, FP8, "fast, compiled", "middle", "third", CEILING]


def test_without_a_whole_run_it_is_the_newest_with_the_most_peers(tmp_path):
    rows = [
        *run_of("old", ours=90, fast=1, middle=2),
        *run_of("most", ours=91, fast=3, middle=2),
        *run_of("new", ours=92, fp8=120, ceiling=130, fast=80),
    ]
    head, names = table_of_one_run(rows, tmp_path)
    assert "commit most, " in head and names == [OURS, "fast", "middle"]


def test_the_readme_has_one_picture_and_a_small_table():
    text = (ROOT / "README.md").read_text().partition(report.BEGIN)[2].partition(report.END)[0]
    assert text.count("![") == 1 and 3 <= len(re.findall(r"^\| .*$", text, re.M)) - 2 <= 6


def test_groups_and_routings_have_tables_of_their_own(tmp_path):
    rows = [measured(name, contender="layer") for name in ("dsv3", "30B-512", "E", "A", "1.4B-256", "C-512")]
    rows += [
        measured("A", contender="skewed", routing="zipf"),
        measured("A", contender="old", dtype="float16"),
    ]
    rows[3]["routing"] = "normal"  # the same as none
    _, text = documents_of(rows, tmp_path)
    figures = {path.name: path.read_text() for path in (tmp_path / report.FIGURES).glob("layers*")}
    names = {name: re.findall(r"^### (\S+)", page, re.M) for name, page in figures.items()}
    assert names == {
        "layers-abacus.md": ["A", "E", "A"],
        "layers-other-shapes.md": ["dsv3", "1.4B-256", "30B-512", "A"],
    }
    assert "## Abacus, float16" in text and "C-512" not in text
    assert text.count("Zipf routing") == 1 and "| skewed | 20 | 30 | 5 | 70 | 100 | 200 |" in text


def test_where_the_host_decides_the_gpu_s_time_is_there(tmp_path):
    slow = {"forward_ms": "1.5", "forward_host_ms": "2.5", "step_host_ms": "7"}
    _, text = documents_of([measured("A", contender=OURS, **slow)], tmp_path)
    assert f"| {OURS} | 20 (1.5 ms) | 30 | 5 | 7 |" in text  # its page: the step's times have columns
    assert f"| {OURS} | 30 (5 ms) |" in text  # beside others


@pytest.mark.parametrize("date, quack", [("2026-11-25", "QuACK 3d0ab3e"), ("2026-11-26", "QuACK 0.4.1")])
def test_sonicmoe_s_row_has_its_versions(date, quack, tmp_path):
    _, text = documents_of([measured("A", contender="layer: SonicMoE 1", date=date, torch="2.9")], tmp_path)
    assert f"| layer: SonicMoE 1<br>(torch 2.9, {quack}) | " in text
    assert (
        quack.replace("QuACK", "quack").replace("quack 0", "quack-kernels 0")
        in (ROOT / "benchmarks" / "README.md").read_text()
    )


def test_no_table_of_the_roofline_where_it_is_not_known(tmp_path):
    unknown = {"forward_roofline": "", "step_roofline": ""}
    assert "roofline" not in documents_of([measured("A", contender="layer", **unknown)], tmp_path)[1]


def svg(path):
    """The root of a drawing and the ids in it, where it suits any page."""
    root = ET.parse(path).getroot()
    text, ids = path.read_text(), [e.get("id") for e in root.iter() if e.get("id")]
    assert not {"width", "height"} & set(root.keys()) and root.get("viewBox") and "currentColor" in text
    assert ids[0] == path.stem and all(name.startswith(f"{path.stem}-") for name in ids[1:])
    assert {link[1:] for link in re.findall(r'(?:href="|url\()(#[^")]+)', text)} <= set(ids)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"#0{3,6}\b|black|white|\d(?:pt|in)\b", text) and plots.INK not in text
    return root


@pytest.mark.parametrize("group, name", [("tokens", "tflops.svg"), ("top-k", "memory.svg")])
def test_plots(group, name, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [measured(n, contender=c) for n in GROUPS[group] for c in ("layer", "peer", "_refused")]
    for r in rows:
        if r["contender"] == "_refused":
            r |= dict.fromkeys(FIGURES, "")
    rows += [measured(n, contender="skewed", routing="zipf") for n in GROUPS[group]]
    rows += [measured(GROUPS[group][1], contender="a single point")]
    rows += [measured(GROUPS[group][0], contender="alone", device="one shape only")]
    _, figures = documents_of(rows, tmp_path)
    assert figures.count("![") == 1 and f"(../../docs/{name})" in figures
    assert [path.name for path in (tmp_path / "docs").iterdir()] == [name]
    words = [e.text for e in svg(tmp_path / "docs" / name).iter() if e.tag.endswith("}text")]
    assert {"layer", "peer"} <= set(words) and not {"_refused", "skewed", "alone"} & set(words)
    lines = plots.lines_of(rows, plots.PLOTS[name])
    xs = [[int(r[plots.PLOTS[name].x]) for r in line] for line in lines.values()]
    assert list(lines) == ["layer", "peer"] and all(x == sorted(set(x)) and len(x) > 2 for x in xs)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_are_seen_on_light_and_dark_pages():
    assert contrast(plots.LIGHT, "#ffffff") > 7 and contrast(plots.DARK, "#1e2129") > 7
    for colour in plots.COLOURS:
        assert min(contrast(colour, page) for page in ("#ffffff", "#1e2129")) >= 3, colour


def test_a_plot_of_shares(tmp_path):
    """The newest figures of our layer over the number of ranks, a line for each shape, of one device."""
    pytest.importorskip("matplotlib")
    documents_of([measured("A", contender="layer")], tmp_path)
    assert not plots.lines_of_shares(tmp_path / "parallel.csv")
    names = ["device", "dtype", "contender", "routing", "ranks", "ep", "shape", "forward_share", "step_share"]
    kinds = [(c, r) for c in (plots.SYMMETRIC, "peer") for r in ("normal", "zipf")]
    rows = [
        ("GPU", "b", *kind, n, n, shape, 50, 1000 // n) for kind in kinds for n in (4, 2) for shape in "BA"
    ]
    rows += [
        ("GPU", "b", plots.SYMMETRIC, "normal", 2, 2, "A", 50, 60),
        ("GPU", "b", *kinds[0], 4, 2, "A", 1, 1),
    ]
    with open(tmp_path / "parallel.csv", "w", newline="") as file:
        csv.writer(file).writerows([names, ("old", *rows[0][1:]), *rows, ("new", *rows[0][1:])])
    found = plots.lines_of_shares(tmp_path / "parallel.csv")
    assert {name: [(r["ranks"], r["step_share"]) for r in line] for name, line in found.items()} == {
        "shape A": [("2", "60"), ("4", "250")],
        "shape B": [("2", "500"), ("4", "250")],
    }
    plots.draw([], [], tmp_path, tmp_path / "parallel.csv")
    words = [e.text for e in svg(tmp_path / plots.PARALLEL).iter() if e.tag.endswith("}text")]
    assert {"shape A", "shape B"} <= set(words)


def test_no_plots_before_there_are_figures(tmp_path):
    assert "![" not in "".join(documents_of([measured("A", contender="layer")], tmp_path))
    assert not (tmp_path / "docs").exists()


def test_a_report_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = [measured(n, contender="x") for n in GROUPS["tokens"]]
    assert "tflops.svg" in documents_of(rows, tmp_path)[1]
    assert "no plots: matplotlib is missing: pip install '.[bench]'" in capsys.readouterr().err
