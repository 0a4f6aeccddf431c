"""Figures of the report of runs, by plotly: curves, and the load of the experts."""

import dataclasses
import html
import math

from . import UsageError, need
from .metrics import damaged, is_number

COLOURS = "#3b82f6", "#e8590c", "#2f9e44", "#9c5bd6", "#d6336c", "#0c8599"  # on white and on black
SCALE = [[0, "#3b82f6"], [0.5, "#9c5bd6"], [1, "#e8590c"]]  # from the first layer to the last
DEAD = "#ffd800"
MOST_POINTS = 4000  # of a curve
MOST_NAMES = 12  # in a legend or a box of values
STEEP = "loss", "bits_per_byte"  # drawn without the first tenth, which would flatten the rest
SHARE = 0.98  # of the experts' loads that the colours tell apart


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of a run; `starts` has a row for each start of its training, `settings` may be None."""

    name: str
    rows: list[dict]
    settings: dict | None = None
    starts: list[dict] = dataclasses.field(default_factory=list)
    sample: str = ""


def numbers(rows: list[dict], key: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have it."""
    for row in rows:
        if key in row and not is_number(row[key]):
            raise damaged(key, row, "a number")
    return [(row["step"], finite(row[key])) for row in rows if key in row]


def finite(value: float | None) -> float:
    """A gap in a curve instead of what cannot be drawn."""
    return value if value is not None and math.isfinite(value) else math.nan


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and its neighbours, up to 20 before and 20 after it; a NaN stays out of it."""
    reach = min(20, len(values) // 50)
    out = []
    for i, value in enumerate(values):
        near = values[max(0, i - reach) : i + reach + 1]
        if math.isnan(sum(near)):
            near = [v for v in near if not math.isnan(v)]
        out.append(math.nan if math.isnan(value) else sum(near) / len(near))
    return out


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points of a curve; of many, the lowest and the highest of each stretch, which may be all NaN."""
    size = math.ceil(2 * len(points) / MOST_POINTS)
    if size <= 2:
        return points
    parts = (points[i : i + size] for i in range(0, len(points), size))
    parts = ([p for p in part if not math.isnan(p[1])] or part[:1] for part in parts)  # no order has a NaN
    ends = ([pick(part, key=lambda point: point[1]) for pick in (min, max)] for part in parts)
    return [point for pair in ends for point in sorted(pair)]


def line(run: int, name: str, points: list[tuple[int, float]], **options):
    """A curve of the run of that number.  `options` are those of plotly's Scatter."""
    points = thin(points)
    steps, values = [step for step, _ in points], [None if math.isnan(v) else v for _, v in points]
    options = {"mode": "lines+markers" if len(points) == 1 else "lines"} | options
    return need("plotly.graph_objects").Scatter(x=steps, y=values, name=plain(name), meta=run, **options)


def plain(text: str) -> str:
    """The text as it stands: plotly would read tags, a formula between $, and a place for a value after %."""
    return html.escape(text, quote=False).replace("$", "&#36;").replace("%", "&#37;")


def draw_curve(runs: list[Run], key: str, smoothed: bool = True):
    """A number of each step: raw (thin), smoothed (thick), of the validation (points), and resumed runs.

    None if no run has it.
    """
    raws, lines, settled = [], [], []  # raw curves are behind the others
    for number, run in enumerate(runs):
        points = numbers(run.rows, key)
        if not points:
            continue
        colour, name = COLOURS[number % len(COLOURS)], "" if len(runs) == 1 else f"{run.name}: "
        group = {"showlegend": True} if len(runs) == 1 else {"showlegend": False, "legendgroup": str(number)}
        steps, values = zip(*points, strict=True)
        mean = list(zip(steps, smooth(values) if smoothed else values, strict=True))
        if smoothed:
            raw = {"color": colour, "width": 1}
            raws.append(line(number, f"{name}training", points, line=raw, opacity=0.4, **group))
        label = f"{name}training{', smoothed' if smoothed else ''}" if len(runs) == 1 else run.name
        lines.append(line(number, label, mean, line={"color": colour}, **group | {"showlegend": True}))
        if validated := numbers(run.rows, f"val_{key}"):
            dots = {"mode": "markers", "marker": {"color": colour, "size": 7, "symbol": "diamond"}}
            lines.append(line(number, f"{name}validation", validated, **dots, **group))
        if marks := [point for point in mean if point[0] in resumed(run)]:
            mark = {"color": colour, "size": 28, "symbol": "line-ns-open", "line": {"width": 2}}
            lines.append(line(number, f"{name}resumed", marks, mode="markers", marker=mark, **group))
        settled += [value for _, value in points[len(points) // 10 :] + validated]
    if not lines:
        return None
    figure = new_figure(raws + lines)
    if key in STEEP and (settled := [value for value in settled if not math.isnan(value)]):
        figure.update_yaxes(range=[0.95 * min(settled), 1.05 * max(settled)])
    return figure


def resumed(run: Run) -> list[int]:
    """Return the steps after which the run was resumed."""
    return [row["step"] for row in run.starts if row["step"] > 0]


def draw_layers(runs: list[Run], curves: list[list[tuple[int, list[float]]]], legend: bool):
    """A curve for each layer; `curves` has (step, a value for each layer) of each run."""
    lines, several = [], len(runs) > 1
    for number, (run, found) in enumerate(zip(runs, curves, strict=True)):
        count = len(found[0][1]) if found else 0
        ends = range(count) if count <= MOST_NAMES else (0, count - 1)
        for layer in range(count):
            (shade,) = need("plotly.colors").sample_colorscale(SCALE, [layer / max(1, count - 1)])
            look = {"line": {"width": 1.5, "color": shade}}
            if several:
                look["line"]["color"] = COLOURS[number % len(COLOURS)]
                look |= {"legendgroup": str(number), "text": plain(f"{run.name}, layer {layer}")}
                look |= {"hovertemplate": "%{y}<extra>%{text}</extra>"}
            label, shown = (run.name, layer == 0) if several else (f"layer {layer}", layer in ends)
            points = [(step, values[layer]) for step, values in found]
            lines.append(line(number, label, points, showlegend=legend and shown, **look))
    return new_figure(lines)


def new_figure(lines: list):
    """Curves over steps; report.js sets colours and axes.  A logarithm needs values above 0."""
    values = [value for each in lines for value in each.y if value is not None]
    few = len(lines) <= MOST_NAMES
    return need("plotly.graph_objects").Figure(
        lines,
        {
            "height": 300, "margin": {"l": 50, "r": 10, "t": 30, "b": 40}, "xaxis": {"title": "step"},
            "hovermode": "x unified" if few else "closest",
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom"},
            "meta": {"log": min(values, default=0) > 0}, "template": "none",
        },
    )  # fmt: skip


def ratios(row: dict) -> list[list[float]]:
    """The load of each expert of each layer, as a multiple of the layer's mean; 0 without tokens."""
    return [[n * len(layer) / max(sum(layer), 1) for n in layer] for layer in row["load"]]


def colour_range(rows: list[dict]) -> tuple[float, float, float]:
    """The logarithm to base 2 at which the colours end, and the smallest and largest load of a live expert.

    The colours reach at least from a half to double, and tell all but a few extreme loads apart.
    """
    live = sorted(ratio for row in rows for layer in ratios(row) for ratio in layer if ratio > 0) or [1.0]
    sizes = sorted(abs(math.log2(ratio)) for ratio in live)
    return max(1.0, sizes[int(SHARE * (len(sizes) - 1))]), live[0], live[-1]


def heat(x: list, columns: list[list[float]], where: str):
    """Two maps of columns of loads: of experts that work, and of dead ones."""
    rows = list(zip(*columns, strict=True))
    logs = [[round(math.log2(v), 3) if v > 0 else None for v in row] for row in rows]
    shown = [[float(f"{v:.3g}") for v in row] for row in rows]
    dead = [[0 if v == 0 else None for v in row] for row in rows]
    Heatmap = need("plotly.graph_objects").Heatmap
    plain = {"colorscale": [[0, DEAD], [1, DEAD]], "showscale": False}
    return [
        Heatmap(
            x=x, z=logs, customdata=shown, coloraxis="coloraxis", hoverongaps=False,
            hovertemplate=f"{where}: %{{customdata}} times the mean<extra></extra>",
        ),
        Heatmap(x=x, z=dead, hoverongaps=False, hovertemplate=f"{where}: dead<extra></extra>", **plain),
    ]  # fmt: skip


def draw_load_at_end(row: dict, end: float):
    """Layers upwards, experts to the right: the load at the last step, a cross at dead experts."""
    last = ratios(row)
    most = max(map(len, last))
    rows = [layer + [math.nan] * (most - len(layer)) for layer in last]
    figure = need("plotly.graph_objects").Figure(
        heat(list(range(most)), list(zip(*rows, strict=True)), "layer %{y}, expert %{x}"),
        load_layout(len(last) * 20, end),
    )
    crosses = [(x, y) for y, layer in enumerate(last) for x, ratio in enumerate(layer) if ratio == 0]
    if crosses:
        x, y = zip(*crosses, strict=True)
        marker = {"symbol": "x", "color": "#000", "size": 7}
        figure.add_scatter(x=x, y=y, mode="markers", marker=marker, hoverinfo="skip", showlegend=False)
    sides = {"showgrid": False, "zeroline": False}
    figure.update_xaxes(sides, title={"text": "expert", "standoff": 34}, range=[-0.5, most - 0.5])
    rows = {"title": "layer", "range": [-0.5, len(last) - 0.5], "dtick": math.ceil(len(last) / 10)}
    return figure.update_yaxes(sides | rows)


def draw_load(run: int, rows: list[dict], end: float):
    """A map for each layer: experts upwards, steps to the right."""
    loads, steps = [ratios(row) for row in rows], [row["step"] for row in rows]
    layers = len(loads[0])
    space = min(0.15 / layers, 0.05)
    figure = need("plotly.subplots").make_subplots(layers, shared_xaxes=True, vertical_spacing=space)
    for layer in range(layers):
        maps = heat(steps, [row[layer] for row in loads], f"step %{{x}}, layer {layer}, expert %{{y}}")
        for each in maps:
            figure.add_trace(each.update(meta=run), layer + 1, 1)
        figure.update_yaxes(title=f"layer {layer}", row=layer + 1)
    figure.update_layout(load_layout(layers * 130, end))
    figure.update_xaxes(showgrid=False).update_xaxes(title={"text": "step", "standoff": 34}, row=layers)
    return figure.update_yaxes(showgrid=False)


def load_layout(height: int, end: float) -> dict:
    whole = range(-math.floor(end), math.floor(end) + 1)
    text = [f"1/{2**-n}" if n < 0 else str(2**n) for n in whole]
    bar = {"orientation": "h", "y": 1, "yanchor": "bottom", "thickness": 10, "tickvals": list(whole)}
    bar |= {"ticktext": text, "title": {"text": "load / mean", "side": "top"}, "len": 0.8}
    axis = {"cmin": -end, "cmax": end, "autocolorscale": True, "colorbar": bar}
    margin = {"l": 60, "r": 10, "t": 90, "b": 55, "autoexpand": False}
    return {"height": height + 145, "margin": margin, "coloraxis": axis, "template": "none"}


def add_arguments(parser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders")
    parser.add_argument("--out", help="no longer used")
    parser.add_argument("--force", action="store_true", help="no longer used")


def main(args) -> int:
    """Name the command that replaces `moe-aiter plot`."""
    raise UsageError("moe-aiter report RUN [RUN ...] replaces it, and each plot there has a button for a PNG")
