"""Plots of a run: loss curves, and the load of every expert over time."""

import collections
import math
from pathlib import Path

from moe_aiter.files import drafted

from . import UsageError, need
from .metrics import read_metrics, with_load


def new_figure(rows: int = 1, height: float = 4.5):
    """A figure without a window, so that it needs no display, and its axes."""
    figure = need("matplotlib.figure").Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def draw_loss(runs: dict[str, list[dict]]):
    """Training loss (smoothed, thin) and validation loss (points) of one or more runs, label -> rows."""
    figure, (axis,) = new_figure()
    settled = []  # without the first steep tenth, which would flatten the rest
    for number, (label, rows) in enumerate(runs.items()):
        rows = [row for row in rows if math.isfinite(row.get("loss", math.nan))]
        colour = f"C{number}"
        steps, losses = [row["step"] for row in rows], smooth([row["loss"] for row in rows])
        axis.plot(steps, losses, color=colour, alpha=0.4, linewidth=1)
        settled += losses[len(losses) // 10 :]
        validated = [row for row in rows if "val_loss" in row]
        name = plain(label) + (f": {validated[-1]['val_loss']:.3f}" if validated else "")
        points = [row["step"] for row in validated], [row["val_loss"] for row in validated]
        axis.plot(*points, color=colour, marker="o", markersize=3, label=name)
    axis.set(xlabel="step", ylabel="loss, nats per byte", title="points: validation; thin line: training")
    if settled:
        axis.set_ylim(0.95 * min(settled), 1.05 * max(settled))
    axis.grid(alpha=0.3)
    validated = any("val_loss" in row for rows in runs.values() for row in rows)
    axis.legend(title="last validation loss" if validated else None)
    return figure


def plain(label: str) -> str:
    """The label as it stands: matplotlib would hide one that begins with _, and read a formula between $."""
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def smooth(values: list[float], decay: float = 0.95) -> list[float]:
    """A running mean that forgets, without its bias towards zero at the start."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def draw_load(rows: list[dict]):
    """A heat map for each layer: experts upwards, steps to the right, load as a multiple of the mean."""
    layers = len(rows[0]["load"])
    figure, axes = new_figure(layers, height=1 + 1.4 * layers)
    first, last = rows[0]["step"], rows[-1]["step"]
    for layer, axis in enumerate(axes):
        columns = [row["load"][layer] for row in rows]  # each (E,)
        shares = [[load * len(column) / max(sum(column), 1) for load in column] for column in columns]
        extent = (first, max(last, first + 1), -0.5, len(columns[0]) - 0.5)
        image = axis.imshow(
            list(zip(*shares, strict=True)), aspect="auto", origin="lower", extent=extent, vmin=0, vmax=2,
            cmap="viridis", interpolation="nearest",
        )  # fmt: skip
        axis.set_ylabel(f"layer {layer}\nexpert")
    axes[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(axes), label="load, 1 at balance", extend="max")
    return figure


def save(figure, out: Path) -> None:
    with drafted(out, "wb") as file:
        figure.savefig(file, dpi=150, format=out.suffix[1:].lower())


def plot_run(run: Path) -> None:
    """Draw `loss.png`, and `load.png` where there are experts, from a run's metrics."""
    rows = read_metrics(run / "metrics.jsonl")
    save(draw_loss({run.name: rows}), run / "loss.png")
    if loads := with_load(rows):
        save(draw_load(loads), run / "load.png")


def add_arguments(parser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders or metrics.jsonl files"
    )
    parser.add_argument("--out", type=Path, default=Path("loss.png"), help="image to write [loss.png]")
    parser.add_argument("--force", action="store_true", help="replace an existing image")


def main(args) -> int:
    """`moe-aiter plot`: the loss curves of several runs in one picture."""
    supported = new_figure()[0].canvas.get_supported_filetypes()
    if args.out.suffix[1:].lower() not in supported:
        raise UsageError(
            f"--out is {args.out}; its name must end with one of .{', .'.join(sorted(supported))}"
        )
    refuse_existing(args.out, args.force)
    names = collections.Counter(map(name, set(args.runs)))
    runs = {str(run) if names[name(run)] > 1 else name(run): rows_of(run) for run in args.runs}
    save(draw_loss(runs), args.out)
    print(args.out)
    return 0


def refuse_existing(out: Path, force: bool) -> None:
    """Raise UsageError if something is at `out` that the command must not replace."""
    if out.exists() and not (force and out.is_file()):
        how = "--force replaces it, --out" if out.is_file() else "--out"
        raise UsageError(f"{out} is there already: {how} names another")


def name(run: Path) -> str:
    """Return the run's name in the legend, if no other run has the same name."""
    return run.absolute().name.removesuffix(".jsonl")


def rows_of(run: Path) -> list[dict]:
    """The rows of a run folder or of a metrics file; there is at least one."""
    metrics = run / "metrics.jsonl" if run.is_dir() else run.resolve() if run.is_symlink() else run
    if not metrics.exists():
        raise UsageError(f"{run} is neither a run folder nor a metrics file")
    rows = read_metrics(metrics)
    if not rows:
        raise UsageError(f"{metrics} holds no step to draw")
    return rows
