"""Plots of the results as SVG, whose text and lines have the colour of the page around them.

matplotlib draws, and the file is then changed: ids are unique on a page with several plots, the size is that
of the space that there is, and the ink is `currentColor`.  As an image of its own, a file sets that colour
itself, for a light and for a dark scheme; inside a page, the page does.
"""

import contextlib
import dataclasses
import functools
import io
import pathlib
import re
import sys
from collections.abc import Iterator

from moe_aiter.bench.problem import GROUPS
from moe_aiter.files import need

from . import skew
from .parallel import SYMMETRIC
from .speed import BASELINE, Gain
from .tables import newest, rows_of, short_name

INK = "#010203"  # drawn in place of currentColor
COLOURS = ("#0d8a80", "#c2620a", "#7c5cd6", "#3b7dd8", "#d6336c", "#5f8a0a", "#b35fb3", "#7d8590")
LIGHT, DARK = "#1f2328", "#e6edf3"  # ink on white and on a dark page
STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "legend.edgecolor"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "legend.framealpha": 0,
    "svg.fonttype": "none",
}


@dataclasses.dataclass(frozen=True)
class Plot:
    """A line for each contender over the shapes of a group, in two panels."""

    title: str
    group: str
    x: str  # the column of the horizontal axis
    x_label: str
    panels: dict[str, str]  # column -> label of the vertical axis


PLOTS = {
    "tflops.svg": Plot(
        "TFLOP/s against the number of tokens, H = 2048, I = 768, E = 128, k = 8",
        "tokens",
        "tokens",
        "T, tokens",
        {"forward_tflops": "forward, TFLOP/s", "step_tflops": "step, TFLOP/s"},
    ),
    "memory.svg": Plot(
        "Memory against k, the experts of each token; T = 32768, H = 4096, I = 4096 / k, E = 16 k",
        "top-k",
        "top_k",
        "k, experts of each token",
        {"held_mib": "held after forward, MiB", "peak_mib": "peak over forward and backward, MiB"},
    ),
}
SHARES = Plot(  # a line for each shape
    "Experts shared by R GPUs, in percent of the rate of one GPU that holds all of them",
    "",
    "ranks",
    "R, GPUs",
    {"forward_share": "forward, percent", "step_share": "step, percent"},
)
PARALLEL = "parallel.svg"
MAP = "models.svg"
MAP_TITLE = f"A training step of each model's experts: times as fast as {BASELINE}"


def images(rows: list[dict], folder: str) -> list[str]:
    return [f"![{plot.title}]({folder}/{name})\n" for name, plot in PLOTS.items() if lines_of(rows, plot)]


def map_image(gains: list[Gain], folder: str) -> list[str]:
    return [f"![{MAP_TITLE}]({folder}/{MAP})\n"] * bool(gains)


def lines_of(rows: list[dict], plot: Plot) -> dict[str, list[dict]]:
    """Contender -> its rows, sorted along the axis, from the last device that has two shapes of the group.
    A contender that has one shape draws no line."""
    rows = [r for r in rows if r["shape"] in GROUPS[plot.group] and r["routing"] != "zipf"]
    rows = [r for r in rows if any(r[column] for column in plot.panels)]
    kinds = {}
    for r in rows:
        kinds.setdefault((r["device"], r["dtype"]), []).append(r)
    rows = next((some for some in reversed(kinds.values()) if len({r["shape"] for r in some}) > 1), [])
    lines = {}
    for r in sorted(rows, key=lambda r: int(r[plot.x])):
        lines.setdefault(r["contender"], []).append(r)
    return {contender: points for contender, points in lines.items() if len(points) > 1}


def lines_of_shares(source: pathlib.Path) -> dict[str, list[dict]]:
    """Shape -> the newest rows of our layer for each number of ranks, of the device with most of them."""
    rows = [r for r in rows_of(source) if (r["contender"], r["routing"]) == (SYMMETRIC, "normal")]
    points = newest(
        [r for r in rows if r["ep"] == r["ranks"]], lambda r: (r["device"], r["shape"], r["ranks"])
    )
    devices = [r["device"] for r in points]
    most = max(reversed(devices), key=devices.count, default=None)
    lines = {}
    for r in sorted((r for r in points if r["device"] == most), key=lambda r: int(r["ranks"])):
        lines.setdefault(f"shape {r['shape']}", []).append(r)
    return dict(sorted(lines.items()))


def draw(rows: list[dict], gains: list[Gain], folder: pathlib.Path, shares: pathlib.Path) -> None:
    """Write the plots that have figures to `folder`; `shares` is the CSV of `parallel`."""
    plots = [(name, plot, lines_of(rows, plot)) for name, plot in PLOTS.items()]
    plots.append((PARALLEL, SHARES, lines_of_shares(shares)))
    todo = {
        name: (plot.title, functools.partial(draw_panels, plot=plot, lines=lines))
        for name, plot, lines in plots
        if lines
    }
    if curves := skew.curves(shares):
        title = f"{skew.TITLE}; {skew.machine(shares)}"
        todo[skew.CHART] = title, functools.partial(draw_skew, title=title, curves=curves)
    if gains:
        todo[MAP] = MAP_TITLE, functools.partial(draw_map, gains=gains)
    try:
        for name, (title, paint) in todo.items():
            with figure_of(folder / name, title) as figure:
                paint(figure)
    except ImportError as error:
        print(f"no plots: {error}", file=sys.stderr)


@contextlib.contextmanager
def figure_of(path: pathlib.Path, title: str, size: tuple[float, float] = (9, 4.2)) -> Iterator:
    """An empty figure, which is written to `path` after the block."""
    drawing = need("matplotlib.figure", "bench")
    import matplotlib

    salted = STYLE | {"svg.hashsalt": path.stem}
    with matplotlib.rc_context(salted | {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        figure = drawing.Figure(figsize=size, layout="constrained")
        yield figure
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Title": title})
    path.parent.mkdir(exist_ok=True)
    path.write_text(themed(text.getvalue(), path.stem))


def themed(svg: str, name: str) -> str:
    """Return a drawing of matplotlib for use on any page; `name` tells its ids from those of others."""
    svg = svg[svg.index("<svg") :]
    root, rest = re.match(r"<svg.*?>", svg, re.S)[0], svg.partition(">")[2]
    root = re.sub(r'\s(?:width|height)="[^"]*"', "", root).replace("<svg", f'<svg id="{name}"', 1)
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r'(url\(|href=")#', rf"\1#{name}-", rest)
    rest = rest.replace(">*{", f">#{name} *{{").replace(INK, "currentColor")
    rest = re.sub(r"'DejaVu Sans'(?:, '[^']*')*, sans-serif", "sans-serif", rest)
    colours = (
        f"svg:root {{color: {LIGHT}}} @media (prefers-color-scheme: dark) {{svg:root {{color: {DARK}}}}}"
    )
    text = f"{root}\n <style>{colours}</style>{rest}"
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def draw_panels(figure, plot: Plot, lines: dict[str, list[dict]]) -> None:
    axes = figure.subplots(1, len(plot.panels))
    for axis, (column, label) in zip(axes, plot.panels.items(), strict=True):
        draw_lines(
            axis,
            {
                name: [(int(r[plot.x]), float(r[column])) for r in rows if r[column]]
                for name, rows in lines.items()
            },
        )
        ticks = sorted({int(r[plot.x]) for rows in lines.values() for r in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, labels=map(str, ticks))
        axis.minorticks_off()
        axis.set(xlabel=plot.x_label, ylabel=label)
    any_row = next(iter(lines.values()))[0]
    name_all(figure, axes, f"{plot.title}; {short_name(any_row['device'])}, {any_row['dtype']}")


def draw_lines(axis, lines: dict[str, list[tuple[float, float]]]) -> None:
    for number, (name, points) in enumerate(lines.items()):
        style = {"marker": "osv^DPX"[number % 7], "color": COLOURS[number % 8], "fillstyle": "none"}
        # two lines in one place are both seen: through the gaps, and within the marks of the other
        style |= {"linestyle": ["-", "--", "-.", ":"][number % 4], "markersize": 10 - number % 7}
        axis.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.2)


def name_all(figure, axes, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)


def draw_skew(figure, title: str, curves: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    """Draw a panel for each number of guests, a line for each shape."""
    shapes = sorted({shape for lines in curves.values() for shape in lines})
    axes = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    points = [point for lines in curves.values() for line in lines.values() for point in line]
    for axis, (guests, lines) in zip(axes, curves.items(), strict=True):
        draw_lines(axis, {shape: lines.get(shape, []) for shape in shapes})
        axis.axhline(100, color=INK, linewidth=1)
        axis.set(xlabel="exponent of the Zipf law", xticks=sorted({x for x, _ in points}))
        axis.set_ylim(0, 1.05 * max(100, *(y for _, y in points)))
        axis.set_title(skew.option(guests), fontsize=9)
    axes[0].set_ylabel("percent of the rate with normal routing")
    name_all(figure, axes, title)


def draw_map(figure, gains: list[Gain]) -> None:
    """Draw a bar for each model and device, with its figure behind it."""
    models = list(dict.fromkeys(gain.model for gain in gains))
    devices = list(dict.fromkeys(gain.device for gain in gains))
    figure.set_size_inches(8, 1 + 0.155 * len(models))
    axis, height = figure.subplots(), 0.76 / len(devices)
    for number, device in enumerate(devices):
        own = [(models.index(g.model) + number * height, g.times) for g in gains if g.device == device]
        bars = axis.barh(
            *zip(*own, strict=True), height=height, color=COLOURS[number], label=short_name(device)
        )
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axis.axvline(1, color=INK, linewidth=1)
    middle = height * (len(devices) - 1) / 2
    axis.set_yticks([place + middle for place in range(len(models))], labels=models)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8, length=0)
    axis.tick_params(axis="x", labelsize=8, top=True, labeltop=True)
    axis.margins(y=0.01)
    axis.grid(axis="x", alpha=0.2)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.legend(loc="lower right")
    figure.suptitle(MAP_TITLE, fontsize=10)
