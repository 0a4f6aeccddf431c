"""`moe-aiter report`: one HTML page about a run, which needs no other file and no network."""

import base64
import html
import io
import json
import math
from pathlib import Path

import torch

from moe_aiter import load_statistics
from moe_aiter.cli import summary
from moe_aiter.files import drafted, read_json

from . import UsageError
from .metrics import damaged, is_number, with_load
from .plots import draw_load, draw_loss, name, new_figure, refuse_existing, rows_of

CURVES = {  # a number in each line of metrics.jsonl -> what it is
    "lr": "learning rate",
    "grad_norm": "norm of the gradient, before it is clipped",
    "tokens_per_s": "tokens per second",
}
OF_LAYERS = {  # lists in some lines, a number for each layer; of the step, or of all since the last such line
    "imbalance": "MaxVio of a step: the largest load over the mean, minus 1",
    "max_violation": "MaxVio: the largest load over the mean, minus 1",
    "entropy": "entropy of the load, over log E",
    "dead_experts": "dead experts",
    "drop_rate": "share of the choices that is dropped",
    "bias_min": "smallest selection bias",
    "bias_max": "largest selection bias",
    "logit_norm": "norm of a token's logits, mean",
    "logit_max": "largest |logit|",
    "logsumexp": "log-sum-exp of a token's logits, mean",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; display: block; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: 0.2rem 0.8rem; border-bottom: 1px solid #ccc; text-align: left; }
td:first-child { white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def add_arguments(parser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder or a metrics.jsonl file")
    parser.add_argument("--out", type=Path, help="file to write [report.html in the run's folder]")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def main(args) -> int:
    folder = args.run if args.run.is_dir() else args.run.parent
    out = (args.out or folder / "report.html").resolve()
    rows, settings = rows_of(args.run), read_settings(folder / "config.json")
    if out in [path.resolve() for path in (args.run, folder / "metrics.jsonl", folder / "config.json")]:
        raise UsageError(f"{out} is what the page is about: --out names another")
    refuse_existing(out, args.force)
    write_page(out, name(args.run), rows, settings)
    print(args.out or folder / "report.html")
    return 0


def write_page(out: Path, title: str, rows: list[dict], settings: dict | None) -> None:
    text = page(title, rows, settings)
    with drafted(out, errors="replace") as file:
        file.write(text)


def read_settings(path: Path) -> dict | None:
    """Return the settings in config.json of any version; None if there is no such file."""
    if not path.exists():
        return None
    try:
        settings = read_json(path, path.parent)
        if not isinstance(settings, dict):
            raise TypeError("it holds no settings")
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is not the configuration of a run: {summary(error)}") from error
    return settings


def page(title: str, rows: list[dict], settings: dict | None) -> str:
    """The HTML of a run's rows, of which there is at least one."""
    curves = {key: found for key in CURVES if (found := numbers(rows, key))}
    loads = with_load(rows)
    layers = {key: found for key in OF_LAYERS if (found := lists(rows, key) or from_loads(loads, key))}
    body = [f"<h1>{html.escape(title)}</h1>", table(overview(rows).items())]
    if numbers(rows, "loss"):
        body += [heading("Loss"), picture(draw_loss({title: rows}), "the loss by step")]
    if curves:
        text = ", ".join(CURVES[key] for key in curves)
        body += [heading("Speed and optimizer"), picture(draw_curves(curves, CURVES), f"{text}, by step")]
    if loads:
        body += [heading("Load of the experts"), picture(draw_load(loads), "load by layer, expert and step")]
    if layers:
        text = ", ".join(OF_LAYERS[key] for key in layers)
        body += [heading("Layers"), picture(draw_curves(layers, OF_LAYERS), f"{text}, by step and layer")]
        body += [heading("Layers at the end"), table(*last_of_layers(layers))]
    else:
        body.append("<p>No layer of experts in these metrics.</p>")
    body.append(heading("Settings"))
    body.append("<p>No config.json here.</p>" if settings is None else table(settings.items()))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def overview(rows: list[dict]) -> dict:
    last = {key: found[-1] for key in ("loss", "val_loss", "seconds") if (found := numbers(rows, key))}
    out = {"steps": rows[-1]["step"]}
    if "loss" in last:
        out["training loss of the last step"] = last["loss"][1]
    if "val_loss" in last:
        out["validation loss"] = "{1:.4f} at step {0}".format(*last["val_loss"])
    if "seconds" in last:
        out["seconds"] = last["seconds"][1]
    return out


def finite(value: float | None) -> float:
    """A gap in a curve instead of what cannot be drawn."""
    return value if value is not None and math.isfinite(value) else math.nan


def numbers(rows: list[dict], key: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have it."""
    for row in rows:
        if key in row and not is_number(row[key]):
            raise damaged(key, row, "a number")
    return [(row["step"], finite(row[key])) for row in rows if key in row]


def lists(rows: list[dict], key: str) -> list[tuple[int, list[float]]]:
    """(step, a value for each layer) of the rows that have it."""
    rows = [row for row in rows if key in row]
    for row in rows:
        values = row[key]
        if not isinstance(values, list) or not all(v is None or is_number(v) for v in values):
            raise damaged(key, row, "a list of numbers")
        if len(values) != len(rows[0][key]) or not values:
            raise damaged(key, row, "of as many layers as before")
    return [(row["step"], [finite(v) for v in row[key]]) for row in rows]


def from_loads(rows: list[dict], key: str) -> list[tuple[int, list[float]]]:
    """Return the figures that follow from the counts alone, for a run whose lines lack them."""
    if key not in ("entropy", "dead_experts"):
        return []
    field = "idle" if key == "dead_experts" else key
    found = [[load_statistics(torch.tensor(layer)) for layer in row["load"]] for row in rows]
    values = [[getattr(layer, field).item() for layer in layers] for layers in found]
    return list(zip([row["step"] for row in rows], values, strict=True))


def draw_curves(series: dict[str, list], labels: dict[str, str]):
    """A panel for each name: a curve, or one for each layer."""
    figure, axes = new_figure(len(series), height=0.6 + 1.9 * len(series))
    for axis, (key, found) in zip(axes, series.items(), strict=True):
        steps, values = zip(*found, strict=True)
        several = isinstance(values[0], list)
        lines = axis.plot(steps, values, linewidth=1, marker="." if len(steps) == 1 else None)
        axis.set_title(labels[key], fontsize="medium", loc="left")
        axis.grid(alpha=0.3)
        if several and axis is axes[0]:
            shown = lines if len(lines) <= 12 else [lines[0], lines[-1]]  # a model of many layers
            axis.legend(shown, [f"layer {lines.index(line)}" for line in shown], fontsize="small", ncols=4)
    axes[-1].set_xlabel("step")
    return figure


def last_of_layers(layers: dict[str, list]) -> tuple[list, list[str]]:
    """The rows and the head of the table: what each layer was at the last step that has it."""
    lasts = [found[-1][1] for found in layers.values()]
    count = max(map(len, lasts))
    rows = [[f"layer {i}", *(last[i] if i < len(last) else "" for last in lasts)] for i in range(count)]
    return rows, ["", *(OF_LAYERS[key] for key in layers)]


def picture(figure, text: str) -> str:
    """The figure as an image in the page, and what it shows for those who cannot see it."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    data = base64.b64encode(svg.getvalue()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{data}">'


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def table(rows, head: list[str] | None = None) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)] if head else []
    lines += ["".join(map(cell, row)) for row in rows]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def cell(value) -> str:
    if is_number(value):
        text = "–" if math.isnan(value) else f"{value:.6g}" if isinstance(value, float) else str(value)
        return f'<td class="number">{text}</td>'
    return f"<td>{html.escape(value if isinstance(value, str) else json.dumps(value))}</td>"
