"""Shares of the rate with normal routing: which rows they are of, and where the report writes them."""

import csv

import pytest

from benchmarks import pages, plots, report, skew, tables
from benchmarks.__main__ import main
from benchmarks.parallel import COMMAND, SYMMETRIC
from moe_aiter.bench import layer

from .test_report import measured, svg

COLLECTIVE = "moe_aiter, collective"
HEAD = "| routing | `guests` | A | B |"


def row(routing, ms, shape="A", guests="0", **cells):
    """A row of `parallel`; a Zipf law is named by its exponent."""
    law = {"routing": "zipf", "skew": routing} if routing[0].isdigit() else {"routing": routing, "skew": ""}
    name = SYMMETRIC if guests == "0" else f"{SYMMETRIC}, guests {guests}"
    cells = law | {"contender": name, "device": "NVIDIA H100", "ranks": "2", "ep": "2"} | cells
    times = {"forward_ms": str(ms / 2), "step_ms": str(ms), "forward_share": "50", "step_share": "60"}
    return dict.fromkeys(COMMAND.fields, "") | measured(shape) | times | cells


def written(path, rows, fields=COMMAND.fields):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def shares(rows):
    return [(r["skew"] or r["routing"], r["step_of_balance"]) for r in tables.of_balance(rows)]


def test_a_share_is_of_one_run_and_one_contender():
    same = [row("normal", 10), row("1", 20), row("one-rank", 40)]
    assert shares(same) == [("1", 50), ("one-rank", 25)]
    assert shares([row("normal", 5), *same]) == shares(same)  # measured twice: the later time
    for other in ("date", "commit", "device", "dtype", "ranks", "ep", "shape", "contender"):
        assert shares([row("normal", 10) | {other: "another"}, row("1", 20)]) == [], other
    assert shares([row("normal", 10), row("1", 20) | {"step_ms": "", "forward_ms": ""}]) == []  # refused


def test_rows_of_before_there_were_exponents(tmp_path):
    rows = [row("normal", 10), row("1", 20), row("one-rank", 40)]
    path = written(tmp_path / "old.csv", rows, [name for name in COMMAND.fields if name != "skew"])
    assert [r["skew"] for r in skew.rows_of_parallel(path)] == ["", "1", ""]
    assert [r["step_of_balance"] for r in skew.skewed(path)] == [50, 25]
    path = written(path, [*rows, row("normal", 10, commit="b"), row("1", 16, commit="b")])
    assert [(r["commit"], r["step_of_balance"]) for r in skew.skewed(path)] == [("b", 62.5), ("one", 25)]


GUESTS = [
    row(law, ms + extra * (guests == "0"), shape, guests)
    for shape in "BA"
    for guests in ("auto", "0", "2")
    for law, ms, extra in (("normal", 10, 0), ("1", 10, 10), ("0.5", 10, 2.5), ("one-rank", 20, 20))
]
EARLIER = [row("normal", 10, ranks="4", ep="4"), row("1", 12.5, ranks="4", ep="4")]
PEER = [row(law, 10, contender=COLLECTIVE) for law in ("normal", "1")]


@pytest.fixture
def everywhere(tmp_path):
    """A function that runs the report with these rows of `parallel`, and returns the folder of documents."""
    blocks = {"speed": report.BLOCKS, "skew": ("skew",)}
    documents = {
        f"docs/{page}.md": "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in names)
        for page, names in blocks.items()
    }
    documents["README.md"] = report.BEGIN + report.END
    (tmp_path / "docs").mkdir()
    for name, text in documents.items():
        (tmp_path / name).write_text(text)
    written(tmp_path / "layer.csv", [measured("A", contender="layer")], layer.COMMAND.fields)

    def run(rows):
        written(tmp_path / "parallel.csv", rows)
        argv = "report", "--csv", tmp_path / "layer.csv", "--readme", tmp_path / "README.md"
        assert main([*map(str, argv)]) == 0
        return tmp_path

    return run


def test_before_guests_are_measured(everywhere):
    folder = everywhere(EARLIER)
    text = (folder / "docs" / "skew.md").read_text()
    assert "A step on 4 H100s, bfloat16, " in text and "| zipf, exponent 1 | 0 | 80 |\n" in text
    assert "![" not in text and not (folder / "docs" / skew.CHART).exists()
    assert "80 % with `guests=0` ([1 layer]" in (folder / "docs" / "speed.md").read_text()


def test_without_skewed_rows(everywhere):
    folder = everywhere([row("normal", 10), row("1", 20, commit="another")])
    assert (folder / "docs" / "skew.md").read_text() == "<!-- skew: begin -->\n<!-- skew: end -->\n"
    assert "Skewed" not in (folder / "docs" / "speed.md").read_text()
    assert "Skewed" not in (folder / report.FIGURES / "parallel.md").read_text()


def test_guests_of_one_kind_of_machine(everywhere):
    pytest.importorskip("matplotlib")
    folder = everywhere([*GUESTS, *EARLIER, *PEER])
    text = (folder / "docs" / "skew.md").read_text()
    assert f"![{skew.TITLE}](./{skew.CHART})\n" in text and "on 2 H100s, bfloat16, " in text
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        HEAD,
        "| --- | --- | --- | --- |",
        "| zipf, exponent 1 | 0 | 50 | 50 |",
        "| zipf, exponent 1 | 2 | 100 | 100 |",
        "| zipf, exponent 1 | auto | 100 | 100 |",
        "| one-rank | 0 | 25 | 25 |",
        "| one-rank | 2 | 50 | 50 |",
        "| one-rank | auto | 50 | 50 |",
    ]
    words = [e.text for e in svg(folder / "docs" / skew.CHART).iter() if e.tag.endswith("}text")]
    assert {"guests=0", "guests=2", 'guests="auto"', "shape A", "shape B"} <= set(words)
    line = '50 % with `guests=0`, 100 % with `guests=2`, 100 % with `guests="auto"` ([2 layers]'
    assert line in (folder / "docs" / "speed.md").read_text()


def test_the_points_of_the_plot(tmp_path):
    path = written(tmp_path / "parallel.csv", [*GUESTS, *EARLIER, *PEER])
    for number, (guests, lines) in zip(("0", "2", "auto"), skew.curves(path).items(), strict=True):
        points = [(0.5, 80), (1, 50)] if number == "0" else [(0.5, 100), (1, 100)]
        assert guests == number and lines == {"shape A": points, "shape B": points}
    assert skew.curves(written(path, EARLIER)) == {}


def test_the_page_has_all_laws_and_contenders(tmp_path):
    path = written(tmp_path / "parallel.csv", [*GUESTS, *EARLIER, *PEER])
    page = pages.product_pages(tmp_path)["parallel.md"]
    tables, part = page.split("## Skewed beside normal routing\n")
    assert part in skew.page_part(path) + "\n"
    assert tables.count("**NVIDIA H100**") == 4 + 2 and "zipf, skew 0.5 (" in tables
    assert f"| zipf, exponent 0.5, {SYMMETRIC} | 80 / 80 | 80 / 80 |" in part
    assert f"| zipf, exponent 1, {COLLECTIVE} | 100 / 100 |" in part
    assert part.count("**NVIDIA H100**, bfloat16, ranks 4, ep 4 (") == 1


def test_a_damaged_time_is_named(tmp_path):
    path = written(tmp_path / "parallel.csv", [row("normal", 10), row("1", 20) | {"step_ms": "many"}])
    with pytest.raises(tables.Damaged, match=r"parallel.csv is damaged: ValueError"):
        skew.sentence(path)
    assert plots.lines_of_shares(path)
