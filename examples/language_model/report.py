"""`moe-aiter report`: one HTML page about one or more runs, which needs no other file and no network."""

import collections
import html
import json
import math
import os
from pathlib import Path

import torch

from moe_aiter import load_statistics
from moe_aiter.cli import summary
from moe_aiter.config import say
from moe_aiter.files import drafted, read_json, read_text

from . import UsageError, need
from .metrics import damaged, is_number, read_metrics, with_load
from .plots import (
    Run,
    colour_range,
    draw_curve,
    draw_layers,
    draw_load,
    draw_load_at_end,
    finite,
    numbers,
    ratios,
)
from .starts import STARTS, read_starts

HERE = Path(__file__).parent
READ = "metrics.jsonl", "config.json", STARTS, "sample.txt"  # files of a run that the page shows
SECTIONS = {  # of curves: a number in each line of metrics.jsonl -> what it is
    "Loss": {"loss": "Loss, nats per byte", "bits_per_byte": "Bits per byte"},
    "Auxiliary losses": {"balance_loss": "Load-balance loss, 1 at balance", "z_loss": "Router z-loss"},
    "Speed and optimizer": {
        "tokens_per_s": "Tokens per second",
        "mfu": "Model FLOP utilisation",
        "grad_norm": "Norm of the gradient, before it is clipped",
        "lr": "Learning rate",
    },
}
EXACT = "lr", "mfu"  # drawn without a smoothed curve
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
    "mismatch_rate": "share of replayed choices that the router would not make",
    "token_mismatch_rate": "share of tokens with such a choice",
}
LEGEND = "Thin: each step. Thick: smoothed. Diamonds: validation. Upright lines: where the run was resumed."
MISSING = "–"
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
CONTROLS = """<fieldset id="controls"><legend>Axes</legend>
<label>x <select id="x">{}</select></label>
<label><input type="checkbox" id="log"> logarithmic y</label></fieldset>"""


def add_arguments(parser) -> None:
    text = "run folders or metrics.jsonl files"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=text)
    text = "file to write [report.html in the run's folder; of several runs, in the current folder]"
    parser.add_argument("--out", type=Path, help=text)
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def main(args) -> int:
    paths = list(dict.fromkeys(args.runs))
    folders = [path if path.is_dir() else path.parent for path in paths]
    out = args.out or (folders[0] if len(paths) == 1 else Path()) / "report.html"
    names = collections.Counter(map(name_of, paths))
    runs = [read_run(path, str(path) if names[name_of(path)] > 1 else name_of(path)) for path in paths]
    inputs = paths + [folder / name for folder in folders for name in READ]
    if out.resolve() in [path.resolve() for path in inputs]:
        raise UsageError(f"{out.resolve()} is what the page is about: --out names another")
    refuse_existing(out, args.force)
    write_page(out, runs)
    say(str(out))
    return 0


def refuse_existing(out: Path, force: bool) -> None:
    """Raise UsageError if something is at `out` that the command must not replace."""
    if out.exists() and not (force and out.is_file()):
        how = "--force replaces it, --out" if out.is_file() else "--out"
        raise UsageError(f"{out} is there already: {how} names another")


def name_of(path: Path) -> str:
    """Return the run's name in the legend, if no other run has the same name."""
    return path.absolute().name.removesuffix(".jsonl")


def read_run(path: Path, name: str) -> Run:
    """Read a run folder, or a metrics file and what else is in its folder; there is at least one step."""
    folder = path if path.is_dir() else path.parent
    metrics = path / "metrics.jsonl" if path.is_dir() else path.resolve() if path.is_symlink() else path
    if not metrics.exists():
        raise UsageError(f"{path} is neither a run folder nor a metrics file")
    rows = read_metrics(metrics)
    if not rows:
        raise UsageError(f"{metrics} holds no step to draw")
    sample = folder / "sample.txt"
    text = read_text(sample, folder, errors="replace") if os.path.lexists(sample) else ""
    return Run(name, rows, read_settings(folder / "config.json"), read_starts(folder), text)


def write_page(out: Path, runs: list[Run]) -> None:
    text = page(runs)
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


class Page:
    """The parts of a page, and the figures that its script draws."""

    def __init__(self):
        self.body, self.figures = [], []

    def heading(self, text: str, level: int = 2) -> None:
        self.body.append(f"<h{level}>{html.escape(text)}</h{level}>")

    def text(self, text: str) -> None:
        self.body.append(f"<p>{html.escape(text)}</p>")

    def table(self, title: str, rows: dict, head: list[str]) -> None:
        """A table of the cells of each row; with more than one column it may be wider than the window."""
        lines = ["<tr>" + "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head) + "</tr>"]
        if len(head) == 2:  # of one run, whose name is the title of the page
            lines.clear()
        for name, cells in rows.items():
            lines.append(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(map(cell, cells))}</tr>')
        attributes = f'class="wide" role="region" tabindex="0" aria-label="{html.escape(title)}"'
        self.body.append(f"<div {attributes}><table>\n" + "\n".join(lines) + "\n</table></div>")

    def grid(self, figures: dict) -> None:
        """Figures beside each other as far as there is room; title -> figure."""
        self.body.append('<div class="grid">')
        for title, figure in figures.items():
            text, place = html.escape(title), f'<div class="plot" id="plot{len(self.figures)}"></div>'
            self.body.append(f"<figure><figcaption>{text}</figcaption>{place}</figure>")
            self.figures.append(figure)
        self.body.append("</div>")


def page(runs: list[Run]) -> str:
    """The HTML of runs, each of which has at least one row."""
    title, out = ", ".join(run.name for run in runs), Page()
    names = [run.name for run in runs]
    out.heading(title, 1)
    facts = [overview(run) for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each)
    out.table("Facts", {key: [each.get(key, MISSING) for each in facts] for key in keys}, ["fact", *names])
    axes, clocks = x_axes(runs)
    out.body.append(CONTROLS.format("".join(f"<option>{axis}</option>" for axis in axes)))
    for section, labels in SECTIONS.items():
        if section == "Speed and optimizer":
            add_layers(out, runs)
        drawn = {text: draw_curve(runs, key, key not in EXACT) for key, text in labels.items()}
        if drawn := {text: figure for text, figure in drawn.items() if figure}:
            out.heading(section)
            if section == "Loss":
                out.text(LEGEND)
            out.grid(drawn)
    if samples := [run for run in runs if run.sample]:
        out.heading("Text sample")
        for run in samples:
            if len(runs) > 1:
                out.heading(run.name, 3)
            out.body.append(f"<pre>{html.escape(run.sample)}</pre>")
    out.heading("Settings")
    if not any(run.settings is not None for run in runs):
        out.text("No config.json here.")
    else:
        settings = [run.settings or {} for run in runs]
        keys = dict.fromkeys(key for each in settings for key in each)
        rows = {key: [each.get(key, MISSING) for each in settings] for key in keys}
        out.table("Settings", rows, ["setting", *names])
    return document(title, out, clocks)


def add_layers(out: Page, runs: list[Run]) -> None:
    """Maps of the load, curves of each layer, and a table of the layers at the end."""
    loads, figures, tables = [with_load(run.rows) for run in runs], {}, {}
    if any(loads):
        out.heading("Load of the experts")
    for number, (run, rows) in enumerate(zip(runs, loads, strict=True)):
        if not rows:
            continue
        if len(runs) > 1:
            out.heading(run.name, 3)
        end, least, most = colour_range(rows)
        text = (
            f"The load of experts that are not dead is {least:.3g} to {most:.3g} times their layer's mean. "
        )
        out.text(f"{text}The colours end at {2**-end:.3g} and {2**end:.3g}. {dead_text(rows[-1])}")
        step = rows[-1]["step"]
        out.grid({
            f"At step {step}, layers upwards": draw_load_at_end(rows[-1], end),
            "Over the steps, experts upwards": draw_load(number, rows, end),
        })  # fmt: skip
    for key, text in OF_LAYERS.items():
        found = [lists(run.rows, key) or from_loads(rows, key) for run, rows in zip(runs, loads, strict=True)]
        if any(found):
            figures[text] = draw_layers(runs, found, legend=not figures)
            tables[text] = [each[-1][1] if each else [] for each in found]
    if not figures:
        out.text("No layer of experts in these metrics.")
        return
    out.heading("Layers")
    out.grid(figures)
    out.heading("Layers at the end")
    for number, run in enumerate(runs):
        lasts = [values[number] for values in tables.values()]
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        rows = {
            f"{prefix}layer {i}": [last[i] if i < len(last) else "" for last in lasts]
            for i in range(max(map(len, lasts)))
        }
        out.table(f"Layers at the end, {run.name}", rows, ["layer", *tables])


def dead_text(row: dict) -> str:
    """Name the dead experts of each layer."""
    dead = [[str(expert) for expert, ratio in enumerate(layer) if ratio == 0] for layer in ratios(row)]
    found = [f"layer {i}: {', '.join(experts)}" for i, experts in enumerate(dead) if experts]
    text = "; ".join(found) or "none"
    return f"Dead experts at step {row['step']} (yellow, with a cross): {text}."


def x_axes(runs: list[Run]) -> tuple[list[str], list[dict]]:
    """Return the axes that all runs have, and for each run its tokens in a step, and its time by step."""
    tokens = [tokens_per_step(run.settings) for run in runs]
    clocks = [[point for point in numbers(run.rows, "seconds") if math.isfinite(point[1])] for run in runs]
    whole = max((value for clock in clocks for _, value in clock), default=0)
    unit, seconds = next(((u, s) for u, s in UNITS.items() if whole >= 2 * s), ("seconds", 1))
    axes = ["step"] + ["tokens"] * all(tokens) + [unit] * all(clocks)
    times = [[(step, round(value / seconds, 4)) for step, value in clock] for clock in clocks]
    return axes, [{"tokens": n, "times": pairs} for n, pairs in zip(tokens, times, strict=True)]


def tokens_per_step(settings: dict | None) -> int | None:
    sizes = [(settings or {}).get(name) for name in ("batch", "sequence")]
    return math.prod(sizes) if all(type(size) is int and is_number(size) for size in sizes) else None


def overview(run: Run) -> dict:
    """What the header says of a run."""
    last = {key: found[-1] for key in ("loss", "val_loss", "seconds") if (found := numbers(run.rows, key))}
    start, now = (run.starts[0], run.starts[-1]) if run.starts else ({}, {})
    steps, each = run.rows[-1]["step"], tokens_per_step(run.settings)
    machine = [("{}", "device"), ("processes: {}", "processes"), ("CPUs of the host: {}", "host_cpus")]
    sizes = [("{:,}", "parameters"), ("{:,} active", "active_parameters")]
    versions = now.get("versions")
    versions = [f"{k} {v}" for k, v in versions.items()] if isinstance(versions, dict) else []
    out = {
        "date": start.get("date"),
        "machine": told(now, machine),
        "versions": ", ".join(versions),
        "commit": now.get("commit"),
        "command": start.get("command"),
        "parameters": told(now, sizes),
        "tokens": f"{steps * each:,}" if each else None,
        "steps": steps,
    }
    again = [f"step {row['step']} ({row.get('date', MISSING)})" for row in run.starts if row["step"] > 0]
    if again:
        out["resumed after"] = ", ".join(again)
    if "loss" in last:
        out["training loss, last step"] = last["loss"][1]
    if "val_loss" in last:
        step, value = last["val_loss"]
        out["validation loss"] = f"{value:.4f} at step {step}"
        if bits := dict(numbers(run.rows, "val_bits_per_byte")).get(step):
            out["validation bits per byte"] = f"{bits:.4f}"
    if "seconds" in last:
        out["seconds"] = last["seconds"][1]
    return {key: MISSING if value in (None, "") else value for key, value in out.items()}


def told(row: dict, parts: list[tuple[str, str]]) -> str:
    """Join what is there; a number where the format needs one."""
    return ", ".join(
        form.format(row[key])
        for form, key in parts
        if key in row and ("," not in form or is_number(row[key]))
    )


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


def cell(value) -> str:
    if is_number(value):
        text = MISSING if math.isnan(value) else f"{value:.6g}" if isinstance(value, float) else str(value)
        return f'<td class="number">{text}</td>'
    return f"<td>{html.escape(value if isinstance(value, str) else json.dumps(value))}</td>"


def document(title: str, out: Page, clocks: list[dict]) -> str:
    """The whole file: styles, plotly, the page, its figures as JSON, and the script that draws them."""
    figures = ",".join(figure.to_json() for figure in out.figures)
    data = f'{{"runs":{json.dumps(clocks, allow_nan=False)},"figures":[{figures}]}}'.replace("<", "\\u003c")
    style, script = (read_text(HERE / name, HERE) for name in ("report.css", "report.js"))
    lines = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>\n{style}</style>",
        f"<script>{need('plotly.offline').get_plotlyjs()}</script></head>",
        "<body><main>",
        *out.body,
        f'</main><script type="application/json" id="data">{data}</script>',
        f"<script>\n{script}</script></body></html>\n",
    ]
    return "\n".join(lines)
