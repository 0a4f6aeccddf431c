"""The plots of the report: TFLOP/s against T, and memory against k."""

import dataclasses
import importlib
import pathlib
import sys

from .shapes import GROUPS


@dataclasses.dataclass(frozen=True)
class Plot:
    """A line for each contender over the shapes of a group, in two panels."""

    title: str
    group: str
    x: str  # the column of the horizontal axis
    x_label: str
    panels: dict[str, str]  # column -> label of the vertical axis


PLOTS = {
    "tflops.png": Plot(
        "TFLOP/s against the number of tokens, H = 2048, I = 768, E = 128, k = 8",
        "tokens",
        "tokens",
        "T, tokens",
        {"forward_tflops": "forward, TFLOP/s", "step_tflops": "step, TFLOP/s"},
    ),
    "memory.png": Plot(
        "Memory against the number of experts a token, T = 32768, H = 4096, I = 4096 / k, E = 16 k",
        "top-k",
        "top_k",
        "k, experts of each token",
        {"held_mib": "held after forward, MiB", "peak_mib": "peak over forward and backward, MiB"},
    ),
}


def lines_of(rows: list[dict], plot: Plot) -> dict[str, list[dict]]:
    """Contender -> its rows, sorted along the axis, from the last device that has two shapes of the group."""
    rows = [r for r in rows if r["shape"] in GROUPS[plot.group] and r["routing"] != "zipf"]
    rows = [r for r in rows if any(r[column] for column in plot.panels)]
    kinds = {}
    for r in rows:
        kinds.setdefault((r["device"], r["dtype"]), []).append(r)
    rows = next((some for some in reversed(kinds.values()) if len({r["shape"] for r in some}) > 1), [])
    lines = {}
    for r in sorted(rows, key=lambda r: int(r[plot.x])):
        lines.setdefault(r["contender"], []).append(r)
    return lines


def draw(rows: list[dict], place: pathlib.Path) -> None:
    """Write the plots for which there are figures to `place`/docs."""
    todo = {name: (plot, lines) for name, plot in PLOTS.items() if (lines := lines_of(rows, plot))}
    if not todo:
        return
    try:
        matplotlib_figure = importlib.import_module("matplotlib.figure")
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return
    (place / "docs").mkdir(exist_ok=True)
    for name, (plot, lines) in todo.items():
        figure = matplotlib_figure.Figure(figsize=(12, 5), layout="constrained")
        draw_panels(figure, plot, lines)
        figure.savefig(place / "docs" / name, dpi=120)


def draw_panels(figure, plot: Plot, lines: dict[str, list[dict]]) -> None:
    axes = figure.subplots(1, len(plot.panels))
    for axis, (column, label) in zip(axes, plot.panels.items(), strict=True):
        for number, (contender, rows) in enumerate(lines.items()):
            points = [(int(r[plot.x]), float(r[column])) for r in rows if r[column]]
            style = {"marker": "osv^DPX"[number % 7], "color": f"C{number % 10}", "fillstyle": "none"}
            # two lines in one place are both seen: through the gaps, and within the marks of the other
            style |= {"linestyle": ["-", "--", "-.", ":"][number % 4], "markersize": 10 - number % 7}
            axis.plot(*zip(*points, strict=True) if points else ([], []), label=contender, **style)
        ticks = sorted({int(r[plot.x]) for rows in lines.values() for r in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, labels=map(str, ticks))
        axis.minorticks_off()
        axis.set(xlabel=plot.x_label, ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    any_row = next(iter(lines.values()))[0]
    figure.suptitle(f"{plot.title}\n{any_row['device']}, {any_row['dtype']}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
