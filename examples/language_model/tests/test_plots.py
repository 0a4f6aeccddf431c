"""The pictures show what the rows say."""

import math
import pathlib

import pytest
from language_model.plots import draw_load, draw_loss, save, smooth

from moe_aiter import cli

pytestmark = pytest.mark.full
matplotlib_image = pytest.importorskip("matplotlib.image")
Axes = pytest.importorskip("matplotlib.axes").Axes


def rows(slope: float, layers: int = 2) -> list[dict]:
    return [
        {"step": step, "loss": 5 - slope * step, "load": [[step, 10, 30, 0]] * layers}
        | ({"val_loss": 5 - slope * step} if step % 5 == 0 else {})
        for step in range(1, 41)
    ]


def colours(path) -> int:
    image = matplotlib_image.imread(path)
    return len({tuple(pixel) for pixel in image.reshape(-1, image.shape[-1]).round(2).tolist()})


def test_loss_of_two_runs_differs_from_that_of_one(tmp_path):
    save(draw_loss({"a": rows(0.1)}), tmp_path / "one.png")
    save(draw_loss({"a": rows(0.1), "b": rows(0.05)}), tmp_path / "two.png")
    one, two = (matplotlib_image.imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert one.shape == two.shape and (one != two).any(-1).mean() > 0.005
    assert colours(tmp_path / "two.png") > 20


@pytest.mark.parametrize("losses", [[1.0, math.nan, 2.0, math.inf], [math.nan]])
def test_a_loss_that_is_no_number_is_left_out(losses, tmp_path):
    lines = [{"step": i, "loss": loss} for i, loss in enumerate(losses)]
    save(draw_loss({"a": lines}), tmp_path / "loss.png")
    assert colours(tmp_path / "loss.png") > 5


@pytest.mark.parametrize(
    "paths, labels",
    [
        (["a/run", "b/run", "a/other"], ["a/run", "b/run", "other"]),
        (["a/run", "a/run/"], ["run"]),
        (["a/run/metrics.jsonl", "b/run/metrics.jsonl"], ["a/run/metrics.jsonl", "b/run/metrics.jsonl"]),
        (["_old", "c$\\x$"], ["_old", "c$\\x$"]),
    ],
)
def test_runs_of_one_name_are_both_drawn(paths, labels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in paths:
        run = pathlib.Path(path.removesuffix("/metrics.jsonl"))
        run.mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    drawn = []
    monkeypatch.setattr(Axes, "legend", lambda axis, **_: drawn.extend(axis.get_legend_handles_labels()[1]))
    assert cli.main(["plot", *paths]) == 0
    assert [label.strip().replace(r"\$", "$") for label in drawn] == labels


def test_load_map_has_as_many_colours_as_loads(tmp_path):
    save(draw_load(rows(0.1)), tmp_path / "load.png")
    assert colours(tmp_path / "load.png") > 60


def test_load_map_of_one_row(tmp_path):
    save(draw_load(rows(0.1)[:1]), tmp_path / "load.png")
    assert colours(tmp_path / "load.png") > 20


def test_load_map_grows_with_the_layers(tmp_path):
    for layers in (1, 4):
        save(draw_load(rows(0.1, layers)), tmp_path / f"{layers}.png")
    heights = [matplotlib_image.imread(tmp_path / f"{layers}.png").shape[0] for layers in (1, 4)]
    assert heights[1] > 1.5 * heights[0]


def test_smoothing_keeps_constants_and_damps_jumps():
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smooth([0.0] * 50 + [1.0])[-1] < 0.1
