"""The table in the terminal, drawn into a string."""

import io
import sys

import numpy as np
import pytest
import torch
from torch import nn

from moe_aiter import Capacity, LiveTable, MoE, Monitor
from moe_aiter.layers.monitor import BARS, bars

pytest.importorskip("rich", reason="rich is not installed")


def read(**options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"[red]blocks": MoE(16, 8, 6, 2, **options), "last": MoE(16, 8, 40, 2)})
    with Monitor(model) as monitor:
        for moe in model.values():
            moe(torch.randn(50, 16))
        return monitor.read()


def lines_of(statistics, monkeypatch, columns="120", title="step 3 [bold]"):
    monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    with LiveTable(file) as table:
        table.show(statistics, "an earlier one")
        table.show(statistics, title)
    return [line.strip() for line in file.getvalue().splitlines() if line.strip()]


def test_a_row_for_each_layer(monkeypatch):
    statistics = read(selection_bias=True, capacity=Capacity(0.8))
    title, head, _, *rows = lines_of(statistics, monkeypatch)
    assert title == "step 3 [bold]", "where there is no terminal the last one alone"
    assert head.split() == [
        "layer",
        "load",
        "entropy",
        "MaxVio",
        "dead",
        "dropped",
        "bias",
        "norm",
        "|logit|",
    ]
    first, last = statistics.values()
    want = [f"{first.entropy:.3f}", f"{first.max_violation:.2f}", "0", f"{first.drop_rate:.1%}"]
    want += ["+0.000", "+0.000", f"{first.logit_norm:.2f}", f"{first.logit_max:.2f}"]
    assert rows[0].split()[0] == "[red]blocks" and rows[0].split()[2:] == want and first.drop_rate > 0
    assert len(rows) == 2 and rows[1].startswith("last") and str(last.dead_experts) in rows[1].split()
    assert bars(last.load, 32) in rows[1]


def test_what_no_layer_has_takes_no_room(monkeypatch):
    statistics = {name: s._replace(logit_norm=None) for name, s in read().items()}
    head = lines_of(statistics, monkeypatch)[1].split()
    assert "bias" not in head and "norm" not in head and "|logit|" in head


def test_the_mismatch_of_replayed_routes(monkeypatch):
    statistics = read()
    assert "mismatch" not in lines_of(statistics, monkeypatch)[1]
    statistics["last"] = statistics["last"]._replace(mismatch_rate=0.125)
    _, head, _, *rows = lines_of(statistics, monkeypatch)
    assert "mismatch" in head.split() and "12.5%" in rows[1].split()


def test_a_narrow_terminal_cuts_no_number(monkeypatch):
    statistics = read(selection_bias=True)
    text = "\n".join(lines_of(statistics, monkeypatch, "80"))
    assert "…" not in text and all(f"{s.logit_max:.2f}" in text for s in statistics.values())


def test_without_a_layer_there_is_the_title(monkeypatch):
    assert lines_of({}, monkeypatch) == ["step 3 [bold]"]


def test_bars():
    load = np.array([0, 0.001, 1, 2, 3, 1.5, 0.5, 0]) / 8
    assert bars(load, 32) == " ▁▄██▆▂ "
    assert bars(load, 32, ascii_only=True) == " .=@@*: "
    assert len(bars(np.full(100, 0.01), 16)) == 16 and set(bars(np.full(100, 0.01), 16)) == {"▄"}
    assert bars(np.zeros(3), 16) == "   " and len(BARS[0]) == len(BARS[1])


def test_a_terminal_of_ascii_gets_nothing_else(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with LiveTable(file) as table:
        table.show(read())
    file.flush()
    assert b"[red]blocks" in raw.getvalue()


def test_without_rich_it_says_so(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match="LiveTable needs the package rich: pip install rich"):
        LiveTable()
