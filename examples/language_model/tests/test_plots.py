"""The figures of a report say what the rows say."""

import math

import pytest
from language_model import plots
from language_model.plots import (
    Run,
    colour_range,
    draw_curve,
    draw_layers,
    draw_load,
    draw_load_at_end,
    smooth,
)

pytest.importorskip("plotly")


def rows(slope: float, layers: int = 2) -> list[dict]:
    return [
        {"step": step, "loss": 5 - slope * step, "load": [[step, 10, 30, 0]] * layers}
        | ({"val_loss": 5 - slope * step} if step % 5 == 0 else {})
        for step in range(1, 41)
    ]


def names(figure) -> list[str]:
    return [trace.name for trace in figure.data if trace.showlegend]


def test_a_curve_has_its_parts():
    resumed = [{"step": 0}, {"step": 20}]
    raw, smoothed, validation, mark = draw_curve([Run("a", rows(0.1), starts=resumed)], "loss").data
    assert (raw.name, smoothed.name) == ("training", "training, smoothed")
    assert list(raw.y) == [row["loss"] for row in rows(0.1)] and list(smoothed.y) == smooth(list(raw.y))
    assert list(validation.x) == list(range(5, 41, 5)) and validation.mode == "markers"
    assert list(mark.x) == [20] and mark.y[0] == smoothed.y[19]
    assert draw_curve([Run("a", rows(0.1))], "lr") is None


def test_the_steep_start_of_a_loss_does_not_flatten_the_rest():
    lines = [{"step": i, "loss": 100.0 if i < 5 else 1.0 + i / 100} for i in range(100)]
    low, high = draw_curve([Run("a", lines)], "loss").layout.yaxis.range
    assert low < 1.1 and 1.99 < high < 3
    assert draw_curve([Run("a", [{"step": 1, "lr": 100.0}])], "lr").layout.yaxis.range is None


def test_runs_have_a_colour_and_a_name_each():
    figure = draw_curve([Run("a", rows(0.1)), Run("<b>", rows(0.05))], "loss")
    assert names(figure) == ["a", "&lt;b&gt;"]
    colours = {(trace.meta, (trace.line.color or trace.marker.color)) for trace in figure.data}
    assert len(colours) == len({colour for _, colour in colours}) == 2


@pytest.mark.parametrize("losses", [[1.0, math.nan, 2.0, math.inf], [math.nan]])
def test_a_loss_that_is_no_number_is_a_gap(losses):
    figure = draw_curve([Run("a", [{"step": i, "loss": loss} for i, loss in enumerate(losses)])], "loss")
    for trace in figure.data:
        assert [value is not None for value in trace.y] == [math.isfinite(loss) for loss in losses]


@pytest.mark.parametrize(
    "values, log", [([1.0, 0.5], True), ([1.0, 0.0], False), ([-1.0], False), ([], False)]
)
def test_a_logarithm_needs_values_above_0(values, log):
    figure = plots.new_figure([plots.line(0, "a", list(enumerate(values)))])
    assert figure.layout.meta == {"log": log}


def test_a_long_curve_keeps_its_extremes(monkeypatch):
    monkeypatch.setattr(plots, "MOST_POINTS", 100)
    points = [(step, math.nan if step == 7 else math.sin(step)) for step in range(10_000)]
    points[5000] = 5000, 99.0
    found = plots.thin(points)
    assert len(found) <= 100 and (5000, 99.0) in found and found == sorted(found)
    assert plots.thin(points[:100]) == points[:100]
    points[4800], points[4900] = (4800, math.nan), (4900, 77.0)  # the first of its stretch hides no other
    assert (4900, 77.0) in plots.thin(points)
    assert all(map(math.isnan, dict(plots.thin([(step, math.nan) for step in range(1000)])).values()))


def test_of_many_layers_the_first_and_the_last_are_named():
    def drawn(layers, runs=1):
        found = [(step, [float(step)] * layers) for step in (1, 2)]
        return draw_layers([Run(str(i), []) for i in range(runs)], [found] * runs, legend=True)

    assert names(drawn(3)) == ["layer 0", "layer 1", "layer 2"]
    assert names(drawn(30)) == ["layer 0", "layer 29"] and len(drawn(30).data) == 30
    assert names(drawn(2, runs=2)) == ["0", "1"]
    assert (drawn(3).layout.hovermode, drawn(30).layout.hovermode) == ("x unified", "closest")


def test_the_load_is_a_map_around_the_mean():
    figure = draw_load_at_end({"step": 9, "load": [[4, 2, 2, 0], [1, 1, 1, 1]]}, 2.0)
    live, dead, crosses = figure.data
    assert [*live.z] == [[1.0, 0.0, 0.0, None], [0.0, 0.0, 0.0, 0.0]]  # of each layer, log2 of load / mean
    assert [*live.customdata] == [[2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    assert [*dead.z] == [[None, None, None, 0], [None] * 4] and (crosses.x, crosses.y) == ((3,), (0,))
    axis = figure.layout.coloraxis
    assert (axis.cmin, axis.cmax) == (-2, 2) and axis.colorbar.ticktext == ("1/4", "1/2", "1", "2", "4")


def test_layers_may_differ_in_their_experts():
    live, dead = draw_load_at_end({"step": 9, "load": [[2, 2], [1]]}, 1.0).data
    assert [*live.z] == [[0.0, 0.0], [0.0, None]] and [*dead.z] == [[None, None], [None, None]]


def test_the_colours_end_near_the_extremes():
    few = {"load": [[1, 1, 1, 1, 0]]}
    assert colour_range([few]) == (1.0, 1.25, 1.25)
    end, least, most = colour_range([few] * 20 + [{"load": [[1, 10**6]]}])
    assert end == 1.0 and least == pytest.approx(2e-6) and most == pytest.approx(2)
    assert colour_range([{"load": [[1, 16, 1, 16]]}])[0] == pytest.approx(math.log2(8.5))
    assert colour_range([{"load": [[0, 0]]}]) == (1.0, 1.0, 1.0)


def test_the_maps_over_steps_grow_with_the_layers():
    one, four = (draw_load(3, rows(0.1, layers), 1.0) for layers in (1, 4))
    assert four.layout.height > 1.5 * one.layout.height and len(four.data) == 8
    assert list(one.data[0].x) == list(range(1, 41)) and one.data[0].meta == 3
    assert len(one.data[0].z) == 4 and set(one.data[1].z[3]) == {0}  # the last expert is dead
    assert len(draw_load(0, rows(0.1)[:1], 1.0).data[0].z[0]) == 1


def test_smoothing_keeps_constants_and_damps_jumps():
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smooth([0.0] * 1000 + [1.0])[-1] < 0.1 and smooth([1.0, 2.0]) == [1.0, 2.0]
    line = [float(i) for i in range(100)]
    assert smooth(line)[2:-2] == line[2:-2]  # nothing lags
    assert smooth([2.0, math.nan, 2.0]) == pytest.approx([2.0, math.nan, 2.0], nan_ok=True)
