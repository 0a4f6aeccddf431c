"""The page of a run: what it shows, that it is whole, and what it says of a run that is damaged."""

import html.parser
import json
import math
import os
import pathlib
import re

import pytest
import torch
from language_model.plots import Run
from language_model.report import OF_LAYERS, page
from language_model.starts import STARTS

from moe_aiter import cli, load_statistics

get_plotlyjs = pytest.importorskip("plotly.offline").get_plotlyjs
ROOT = pathlib.Path(__file__).parents[3]
VOID = {"meta", "input"}


class Page(html.parser.HTMLParser):
    """Headings, captions and cells of a page whose tags all close, and the data of its figures."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.captions, self.rows, self.tags, self.data = [], [], [], [], set(), ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)
        if self.open and self.open[-1] == "script" and data.startswith('{"runs":'):
            self.data = json.loads(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def rows(layers=2, experts=4, count=6):
    return [
        {
            "step": step, "loss": 5.0 / step, "lr": 0.1, "grad_norm": 1.0,
            "tokens_per_s": 100.0 * step, "seconds": step,
            "load": [[step, 2, 3, 0][:experts]] * layers, "imbalance": [0.5] * layers,
            "entropy": [0.25 * i for i in range(layers)], "dead_experts": list(range(layers)),
            "logit_norm": [None] + [step + 0.5] * (layers - 1),
        }
        for step in range(1, count + 1)
    ]  # fmt: skip


def write(run, lines, settings=None):
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if settings is not None:
        (run / "config.json").write_text(json.dumps(settings))
    return run


def report(run, *words):
    return cli.main(["report", str(run), *words])


@pytest.mark.full
def test_a_page_has_every_part(tmp_path, capsys):
    run = write(tmp_path / "run", rows(), {"layers": 2, "data": ["a", "b"], "dense": False, "lr": 0.003})
    assert report(run) == 0 and capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    shown = Page(text)
    parts = ["Loss", "Load of the experts", "Layers", "Layers at the end", "Speed and optimizer", "Settings"]
    assert shown.headings == ["run", *parts]
    assert shown.captions[0] == "Loss, nats per byte" and OF_LAYERS["entropy"] in shown.captions
    assert len(shown.captions) == len(shown.data["figures"]) == 10
    raw, smoothed = shown.data["figures"][0]["data"]
    assert (raw["name"], smoothed["name"]) == ("training", "training, smoothed")
    assert raw["x"] == [1, 2, 3, 4, 5, 6] and raw["y"] == [5.0 / step for step in raw["x"]]
    at_end = shown.rows[next(i for i, row in enumerate(shown.rows) if OF_LAYERS["entropy"] in row) :]
    assert at_end[0] == [
        "layer",
        *(OF_LAYERS[k] for k in ("imbalance", "entropy", "dead_experts", "logit_norm")),
    ]
    assert at_end[1] == ["layer 0", "0.5", "0", "0", "–"]
    assert at_end[2] == ["layer 1", "0.5", "0.25", "1", "6.5"]
    assert (
        ["data", '["a", "b"]'] in shown.rows
        and ["lr", "0.003"] in shown.rows
        and ["steps", "6"] in shown.rows
    )


def test_a_page_asks_nothing_of_the_network(tmp_path):
    """`docs/screenshots.py` sees what plotly asks for; here is what the page itself says."""
    text = page([Run("run", rows(), {"data": []})]).replace(get_plotlyjs(), "")
    assert len(text) < 60_000 and not re.search(r"https?:|@import|<link|<img|<iframe|\bsrc=|\bhref=", text)
    assert "modeBarButtons:" in text and 'plotlyServerURL: ""' in text  # no button sends the data away


@pytest.mark.full
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_runs_of_before_there_was_a_monitor(kind, tmp_path):
    """What their counts tell of the layers is there all the same."""
    run, out = ROOT / "docs" / "runs" / kind, tmp_path / "page.html"
    before = sorted(run.iterdir())
    assert report(run, "--out", str(out)) == 0 and sorted(run.iterdir()) == before
    shown = Page(out.read_text(encoding="utf-8"))
    assert ("Load of the experts" in shown.headings) == ("Layers" in shown.headings) == (kind == "moe")
    if kind == "moe":
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = torch.tensor([line for line in lines if "load" in line][-1]["load"])
        table = [row for row in shown.rows if row[0].startswith("layer ")]
        entropy = [float(row[2]) for row in table]
        assert entropy == pytest.approx(load_statistics(last).entropy.tolist(), rel=1e-5)
        assert len(table) == 4 and len(table[0]) == 4


def test_text_of_a_run_is_text(tmp_path):
    name = "<b>run</b> & $x"
    evil = "</script></pre></table><script>alert(1)</script>"
    settings = {"<script>": evil, "quote": '"'}
    shown = Page(page([Run(name, rows(), settings, [{"step": 2, "commit": evil}], evil), Run(evil, rows())]))
    assert shown.tags.isdisjoint({"b", "i"}) and shown.headings[0] == f"{name}, {evil}"
    assert ["<script>", evil, "–"] in shown.rows and ["commit", evil, "–"] in shown.rows
    labels = {trace["name"] for trace in shown.data["figures"][0]["data"]}
    assert "&lt;b&gt;run&lt;/b&gt; &amp; &#36;x" in labels and not any("<" in label for label in labels)


def test_the_header_says_where_and_how_a_run_was_made():
    first = {
        "step": 0, "date": "2026-01-02 03:04:05+00:00", "device": "GPU", "processes": 2, "host_cpus": 16,
        "versions": {"torch": "3.0", "Python": "4.0"}, "commit": "abc", "command": "moe-aiter train",
        "parameters": 12345, "active_parameters": 678,
    }  # fmt: skip
    again = first | {"step": 4, "date": "2026-01-03", "command": "moe-aiter train --resume run"}
    known = Run("known", rows(), {"batch": 16, "sequence": 128}, [first, again], "once upon")
    shown = Page(page([known, Run("old", rows())]))
    for row in [
        ["date", "2026-01-02 03:04:05+00:00", "–"],
        ["machine", "GPU, processes: 2, CPUs of the host: 16", "–"],
        ["versions", "torch 3.0, Python 4.0", "–"],
        ["commit", "abc", "–"],
        ["command", "moe-aiter train", "–"],
        ["parameters", "12,345, 678 active", "–"],
        ["tokens", "12,288", "–"],
        ["resumed after", "step 4 (2026-01-03)", "–"],
    ]:
        assert row in shown.rows
    assert "Text sample" in shown.headings and "once upon" in page([known])
    marks = [trace for trace in shown.data["figures"][0]["data"] if "resumed" in trace["name"]]
    assert [(mark["name"], mark["x"]) for mark in marks] == [("known: resumed", [4])]


@pytest.mark.parametrize("odd", [{"versions": 3}, {"parameters": "many"}, {"device": None}, {"date": [1]}])
def test_a_header_of_another_kind_is_shown_all_the_same(odd):
    assert Page(page([Run("run", rows(), {"batch": "x", "sequence": None}, [{"step": 0} | odd])])).headings


def test_the_choices_of_x_are_those_that_all_runs_have():
    def choices(*runs):
        return re.findall("<option>(.*?)</option>", page([*runs]))

    whole = Run(
        "whole", [row | {"seconds": 100 * row["step"]} for row in rows()], {"batch": 2, "sequence": 8}
    )
    text = page([whole])
    assert choices(whole) == ["step", "tokens", "minutes"]
    assert Page(text).data["runs"] == [{"tokens": 16, "times": [[s, round(s / 0.6, 4)] for s in range(1, 7)]}]
    assert choices(whole, Run("old", rows())) == ["step", "minutes"]
    assert choices(whole, Run("short", [{"step": 1, "loss": 2.0}])) == ["step"]


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_a_time_that_is_no_number_is_a_gap(time):
    text = page(
        [Run("run", [*rows(), {"step": 7, "loss": 1.0, "seconds": time}], {"batch": 2, "sequence": 8})]
    )
    assert [step for step, _ in Page(text).data["runs"][0]["times"]] == [1, 2, 3, 4, 5, 6]
    assert not re.search("NaN|Infinity", text.partition('id="data">')[2].partition("</script>")[0])


@pytest.mark.full
def test_several_runs_are_in_one_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path in ("a/run", "b/run", "other"):
        write(tmp_path / path, rows(layers=1 + (path == "other")))
    assert cli.main(["report", "a/run", "b/run", "other", "other"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    shown = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert shown.headings[0] == "a/run, b/run, other" and ["steps", "6", "6", "6"] in shown.rows
    loss = shown.data["figures"][0]["data"]
    assert [trace["name"] for trace in loss if trace["showlegend"]] == ["a/run", "b/run", "other"]
    assert ["other, layer 1", "0.5", "0.25", "1", "6.5"] in shown.rows
    assert cli.main(["report", "a/run", "other", "--out", "other/metrics.jsonl", "--force"]) == 2


@pytest.mark.full
def test_a_page_is_replaced_only_with_force(tmp_path, capsys):
    run = write(tmp_path / "run", rows())
    (run / "report.html").write_text("mine")
    assert report(run) == 2
    err = capsys.readouterr().err
    assert "report.html is there already: --force replaces it, --out names another" in err
    assert (run / "report.html").read_text() == "mine"
    assert report(run, "--force") == 0
    assert "<h1>run</h1>" in (run / "report.html").read_text()


@pytest.mark.parametrize("out", ["metrics.jsonl", "config.json", STARTS, "sample.txt", "folder"])
def test_nothing_but_a_page_is_replaced(out, tmp_path, capsys):
    run = write(tmp_path / "run", rows(), {})
    (run / "folder").mkdir()
    for name in (STARTS, "sample.txt"):
        (run / name).write_text("")
    before = {path: path.is_dir() or path.read_bytes() for path in run.iterdir()}
    assert report(run, "--out", str(run / out), "--force") == 2
    assert capsys.readouterr().err.endswith(": --out names another\n")
    assert {path: path.is_dir() or path.read_bytes() for path in run.iterdir()} == before


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path, monkeypatch):
    run = write(tmp_path / "run", rows())
    (run / "report.html").write_text("mine")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert report(run, "--force") == 2
    assert (run / "report.html").read_text() == "mine" and len(list(run.iterdir())) == 2


def test_settings_of_any_size(tmp_path):
    run = write(tmp_path / "run", rows(), {"big": 10**400})
    assert report(run) == 0
    assert str(10**400) in (run / "report.html").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 1}],
        [{"step": 1, "loss": float("nan")}],
        [{"step": 1, "loss": 2.0, "load": [[0, 0], [0, 0]], "entropy": [None, None]}],
        rows(count=1),
        rows(layers=1, experts=1),
        rows(layers=30, count=2),
    ],
    ids=["nothing", "no number", "no tokens", "one step", "one expert", "many layers"],
)
def test_runs_with_little_to_draw(lines, tmp_path):
    run = write(tmp_path / "run", lines)
    assert report(run / "metrics.jsonl") == 0
    assert Page((run / "report.html").read_text(encoding="utf-8")).headings[-1] == "Settings"
    assert "No config.json here" in (run / "report.html").read_text()


@pytest.mark.full
def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    run = write(tmp_path / "run", rows())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert report(run) == 0
    assert ["steps", "6"] in Page((run / "report.html").read_text(encoding="utf-8")).rows


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lr": "fast"}, "the metrics are damaged: lr of step 2 is not a number"),
        ({"entropy": 3}, "entropy of step 2 is not a list of numbers"),
        ({"entropy": [0.5, "x"]}, "entropy of step 2 is not a list of numbers"),
        ({"entropy": [0.5]}, "entropy of step 2 is not of as many layers as before"),
        ({"load": [[1, 2, 3, 4]]}, "load of step 2 is not of as many layers and experts as before"),
        ({"load": [[1, 2], 3]}, "load of step 2 is not a list of counts for each layer"),
        ({"load": [[1, 2, 3, -4]] * 2}, "load of step 2 is not a list of counts for each layer"),
        ({"load": [[1e-320, 0, 0, 0]] * 2}, "load of step 2 is not a list of counts for each layer"),
        ({"lr": 10**400}, "lr of step 2 is not a number"),
        ({"entropy": [0.5, 10**400]}, "entropy of step 2 is not a list of numbers"),
        ({"load": [[10**400, 2, 3, 4]] * 2}, "load of step 2 is not a list of counts for each layer"),
        ({"loss": 10**400}, "metrics.jsonl: line 2 is damaged"),
        ({"step": 10**20}, "metrics.jsonl: line 2 is damaged"),
    ],
)
def test_damaged_rows_are_refused(change, message, tmp_path, capsys):
    lines = rows()
    lines[1] |= change
    run = write(tmp_path / "run", lines)
    assert report(run) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-aiter report: error: ") and message in err and err.count("\n") == 1
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "is neither a run folder nor a metrics file"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl holds no step to draw"),
        (lambda run: (run / "metrics.jsonl").write_text("x\n{}\n"), "metrics.jsonl: line 1 is damaged"),
        (lambda run: (run / STARTS).write_text("x\n{}\n"), "starts.jsonl: line 1 is damaged"),
        (lambda run: (run / "config.json").write_text("{"), "config.json is not the configuration of a run"),
        (lambda run: (run / "config.json").write_text("[]"), "config.json is not the configuration of a run"),
        (lambda run: (run / "config.json").write_text("[" * 10**5), "config.json is not the configuration"),
        (lambda run: (run / "metrics.jsonl").write_text("[" * 10**5 + "\n{}\n"), "line 1 is damaged"),
    ],
)
def test_damaged_runs_are_refused(damage, message, tmp_path, capsys):
    run = write(tmp_path / "run", rows(), {})
    damage(run)
    assert report(run) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not (run / "report.html").exists()
