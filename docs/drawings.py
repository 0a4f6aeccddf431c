"""Draw the pictures of the guides that show no results of benchmarks: `python -m docs.drawings`.

flow.svg is the way of a token through `MoE`.  The others are the losses of the runs in docs/runs.
"""

import json
import pathlib

from benchmarks.plots import COLOURS, INK, figure_of
from moe_aiter.files import read_text

DOCS = pathlib.Path(__file__).parent
STEPS = [  # what runs, and what it writes
    ("", "x   (T, H)"),
    ("router: scores, top k", "expert_ids, routing_weights   (T, k)"),
    ("sort by expert", "plan: order (R,), rank (T, k), group_sizes (E,)"),
    ("gather rows of x, multiply by gate_up", "z   (R, 2I)"),
    ("activation, in the same kernel", "a   (R, I)"),
    ("multiply by down, in column chunks", "y   (R, H)"),
    ("weighted sum of each token's rows", "out   (T, H)"),
]
KEPT = {"x", "expert_ids,", "plan:", "z"}  # by the first word
LOSSES = {  # picture -> runs
    "loss.svg": ("moe", "dense"),
    "loss_fp8.svg": ("gpu-bfloat16", "gpu-e4m3", "gpu-e4m3_all"),
}
POINTS = 150  # of a line, at most


def main(out: pathlib.Path = DOCS) -> None:
    with figure_of(out / "flow.svg", "From x to out: what runs, and what it writes", (6, 6.2)) as figure:
        draw_flow(figure)
    for name, runs in LOSSES.items():
        title = f"Loss of {', '.join(runs)}: each step, and on validation data"
        with figure_of(out / name, title, (8, 4)) as figure:
            draw_losses(figure, runs)


def draw_flow(figure) -> None:
    axes = figure.subplots()
    for row, (kernel, tensor) in enumerate(STEPS):
        kept = tensor.split()[0] in KEPT
        box = {"boxstyle": "round,pad=0.5", "linewidth": 1.2, "edgecolor": COLOURS[0] if kept else INK}
        box["facecolor"] = (COLOURS[0], 0.25) if kept else "none"
        axes.text(0, -row, tensor, ha="center", va="center", fontsize=11, bbox=box)
        if kernel:
            arrow = {"arrowstyle": "->", "color": INK}
            axes.annotate("", (0, -row + 0.25), (0, -row + 0.75), arrowprops=arrow)
            axes.text(0.04, -row + 0.5, kernel, va="center", fontsize=10, style="italic")
    axes.text(0, -len(STEPS) + 0.4, "green: kept for backward", ha="center", va="center")
    axes.set(xlim=(-1, 1), ylim=(-len(STEPS) + 0.2, 0.4))
    axes.set_axis_off()


def draw_losses(figure, runs: tuple[str, ...]) -> None:
    """Training loss, smoothed, as a thin line; validation loss as points on a line."""
    axes, settled = figure.subplots(), []  # without the first steep tenth, which would flatten the rest
    for run, colour in zip(runs, COLOURS, strict=False):
        lines = read_text(DOCS / "runs" / run / "metrics.jsonl").splitlines()
        rows = [json.loads(line) for line in lines]
        steps, losses = [row["step"] for row in rows], smooth([row["loss"] for row in rows])
        some = slice(None, None, max(1, len(rows) // POINTS))
        axes.plot(steps[some], losses[some], color=colour, alpha=0.5, linewidth=1)
        settled += losses[len(losses) // 10 :]
        validated = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
        label = f"{run}: {[*validated.values()][-1]:.3f}"
        axes.plot([*validated], [*validated.values()], color=colour, marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="points: validation; thin line: training")
    axes.set_ylim(0.95 * min(settled), 1.05 * max(settled))
    axes.grid(alpha=0.2)
    axes.legend(title="last validation loss")


def smooth(values: list[float], decay: float = 0.95) -> list[float]:
    """A running mean that forgets, without its bias towards zero at the start."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


if __name__ == "__main__":
    main()
