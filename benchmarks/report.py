"""`python -m benchmarks report`: tables and plots, made from the CSV.

The README gets a summary, between two markers; benchmarks/FIGURES.md gets all, and nothing else is in it.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator

from moe_aiter.bench.layer import ADDED
from moe_aiter.bench.measure import refuse
from moe_aiter.bench.models import PRODUCTS
from moe_aiter.bench.problem import DEFAULT, GROUPS, SHAPES
from moe_aiter.files import need, opened, read_text

from .parallel import SYMMETRIC

CSV = pathlib.Path("benchmarks/results/layer.csv")
MARK = " \\*"
EARLIER = "\\* measured in an earlier run. Machines differ by 10 %: compare figures of one run only.\n"


class Damaged(ValueError):
    """A CSV or a document without what it should have; the message names it."""


@contextlib.contextmanager
def reading(source: pathlib.Path) -> Iterator[None]:
    """Turn errors of the file's rows inside the block into `Damaged`."""
    try:
        yield
    except Damaged:  # of another file
        raise
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise Damaged(f"{source} is damaged: {type(error).__name__}: {error}") from error


def newest(rows: list[dict], key: Callable[[dict], Hashable]) -> list[dict]:
    """The last row with each key in the order of the file, so that the rows of the last run come last."""
    last = {key(row): i for i, row in enumerate(rows)}
    return [rows[i] for i in sorted(last.values())]


def grouped(rows: list[dict], key: Callable[[dict], Hashable]) -> list[tuple]:
    """(key, rows with that key), in the order in which the keys come."""
    return [(value, [r for r in rows if key(r) == value]) for value in dict.fromkeys(map(key, rows))]


def earlier(rows: list[dict]) -> list[bool]:
    """Whether each row is of an earlier run than the last one of its shape."""
    last = {r["shape"]: (r["date"], r["commit"]) for r in rows}
    return [(r["date"], r["commit"]) != last[r["shape"]] for r in rows]


def versions(rows: list[dict]) -> str:
    runs = grouped(rows, lambda r: (r["torch"], r["triton"], r.get("transformers", ""), r["date"]))
    commits = {run: ", ".join(sorted({r["commit"] for r in part})) for run, part in runs}
    texts = (
        f"torch {torch}, Triton {triton}, {f'transformers {hf}, ' if hf else ''}commit {commit}, {date}"
        for (torch, triton, hf, date), commit in sorted(commits.items())
    )
    return "; ".join(texts)


def written(figure: str) -> str:
    """Whole numbers from 10 on, and two digits below."""
    value = float(figure)
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def markdown(table: list[list[str]]) -> str:
    """The first row is the head."""
    head, *rows = table
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


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
PARALLEL = "parallel.png"


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
    rows = []
    if source.exists():
        with opened(source, newline="") as file:
            rows = [
                r for r in csv.DictReader(file) if (r["contender"], r["routing"]) == (SYMMETRIC, "normal")
            ]
    points = newest(
        [r for r in rows if r["ep"] == r["ranks"]], lambda r: (r["device"], r["shape"], r["ranks"])
    )
    devices = [r["device"] for r in points]
    most = max(reversed(devices), key=devices.count, default=None)
    lines = {}
    for r in sorted((r for r in points if r["device"] == most), key=lambda r: int(r["ranks"])):
        lines.setdefault(f"shape {r['shape']}", []).append(r)
    return dict(sorted(lines.items()))


def draw(rows: list[dict], place: pathlib.Path, shares: pathlib.Path) -> None:
    """Write the plots that have figures to `place`/docs; `shares` is the CSV of `parallel`.

    Beside it is that of `bench models`.
    """
    plots = [(name, plot, lines_of(rows, plot)) for name, plot in PLOTS.items()]
    plots.append((PARALLEL, SHARES, lines_of_shares(shares)))
    todo = {
        name: functools.partial(draw_panels, plot=plot, lines=lines) for name, plot, lines in plots if lines
    }
    if speeds := speeds_of_models(shares.with_name(MODELS)):
        todo[MAP] = functools.partial(draw_speeds, speeds=speeds)
    if not todo:
        return
    try:
        drawing = need("matplotlib.figure", "bench")
    except ImportError as error:
        print(f"no plots: {error}", file=sys.stderr)
        return
    import matplotlib

    (place / "docs").mkdir(exist_ok=True)
    for name, paint in todo.items():
        figure = drawing.Figure(figsize=(12, 5), layout="constrained")
        paint(figure)
        always_the_same = {"metadata": {"Date": None}} if name == MAP else {}
        with matplotlib.rc_context({"svg.hashsalt": MAP}):
            figure.savefig(place / "docs" / name, dpi=120, **always_the_same)


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


MODELS, MAP = "models.csv", "models.svg"  # of `bench models`, and its figure
MAP_TITLE = (
    "Speed of a step of published models' experts, forward and backward, as a multiple of torch's grouped_mm"
)
BARS = {  # by the end of a contender's name: its label
    ", hopper": "Hopper kernels",
    ", triton": "portable kernels",
}
YARDSTICKS = {"torch": "torch grouped_mm", "bmm": "batched matmuls of the same FLOPs"}


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Our speeds for one model, from its last run with both tiers' or one tier's time."""

    model: str
    device: str
    by: dict[str, dict[str, float]]  # yardstick -> label of our kernels -> how many times as fast they are
    why: str  # which products are portable on a Hopper GPU


def speeds_of_models(source: pathlib.Path) -> list[Speeds]:
    """The speeds of each model, of the last device in the file, as models.csv lists them; none without it."""
    if not source.exists():
        return []
    with reading(source), opened(source, newline="") as file:
        rows = list(csv.DictReader(file))
        rows = [row for row in rows if row["device"] == rows[-1]["device"]]
        found = []
        for model, part in grouped(rows, lambda row: row["model"]):
            part = [
                row for row, old in zip(part, earlier(named_shapes(part, "model")), strict=True) if not old
            ]
            ms = {row["contender"]: float(row["step_ms"]) for row in part if row["step_ms"]}
            ours = {text: t for end, text in BARS.items() for name, t in ms.items() if name.endswith(end)}
            by = {
                name: {text: ms[contender] / t for text, t in ours.items()}
                for name, contender in YARDSTICKS.items()
                if contender in ms
            }
            why = [
                f"{p}: {row[p].partition(': ')[2]}" for row in part for p in PRODUCTS if is_portable(row, p)
            ]
            found.append(Speeds(model, part[0]["device"], by, "; ".join(why)))
    return [speeds for speeds in found if any(speeds.by.values())]


def is_portable(row: dict, product: str) -> bool:
    """Whether the product of this row, of our kernels for Hopper, is not one of them."""
    return row["contender"].endswith(", hopper") and row[product].startswith("portable")


def named_shapes(rows: list[dict], subject: str) -> list[dict]:
    return [row | {"shape": row[subject]} for row in rows]


def draw_speeds(figure, speeds: list[Speeds]) -> None:
    """Draw two bars for each model: our times as fast as torch, by tier."""
    figure.set_size_inches(9, 1.5 + 0.17 * len(speeds))
    axis, height = figure.subplots(), 0.8 / len(BARS)
    for number, text in enumerate(BARS.values()):
        points = [
            (place + number * height, s.by["torch"][text])
            for place, s in enumerate(speeds)
            if text in s.by.get("torch", {})
        ]
        if points:
            axis.barh(*zip(*points, strict=True), height=height, color=f"C{number}", label=text)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks([place + height / 2 for place in range(len(speeds))], labels=[s.model for s in speeds])
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=7)
    axis.margins(y=0.01)
    axis.grid(axis="x", alpha=0.3)
    figure.suptitle(f"{MAP_TITLE}\n{speeds[0].device}, bfloat16", fontsize=10)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(BARS))


def map_image(speeds: list[Speeds], folder: str) -> list[str]:
    return [f"![{MAP_TITLE}]({folder}/{MAP})\n"] * bool(speeds)


def map_section(speeds: list[Speeds]) -> str:
    """The figure and a table: how many times as fast our kernels are, and what no Hopper kernel computes."""
    pairs = [(text, name) for name in YARDSTICKS for text in BARS.values()]
    table = [["a step", *(f"{text}, by {name}" for text, name in pairs), "portable on a Hopper GPU"]]
    for s in speeds:
        cells = (s.by.get(name, {}).get(text) for text, name in pairs)
        table.append([s.model, *(f"{cell:.2f}" if cell else "–" for cell in cells), s.why or "–"])
    return "\n".join(["", *map_image(speeds, "../docs"), markdown(table)]) if speeds else ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The columns of one CSV: those with figures, and those that name what was measured."""

    title: str
    figures: tuple[str, ...]  # of a cell
    unit: str
    tables: tuple[str, ...]  # what has a table of its own
    subject: str  # what has a row of its own, by its name
    sizes: tuple[str, ...]  # and these beside it


REPORTS = {
    MODELS: Report(
        "Published models",
        ("step_ms", "step_host_ms", "peak_mib"),
        "ms of a step, GPU / host / peak MiB",
        ("device", "dtype"),
        "model",
        ("tokens", "hidden", "intermediate", "experts", "top_k", "layout", "gate", "activation"),
    ),
    "gmm.csv": Report(
        "Grouped products",
        ("tflops",),
        "TFLOP/s",
        ("device", "dtype", "op", "layout"),
        "shape",
        ("m", "k", "n", "g"),
    ),
    "segment.csv": Report(
        "Segments",
        ("us", "host_us"),
        "us, GPU / host",
        ("device", "dtype"),
        "case",
        ("segments", "rows", "d_in", "d_out", "weights"),
    ),
    "masked.csv": Report(
        "Masked products",
        ("us", "tflops", "copy_percent"),
        "us / TFLOP/s / percent of the bandwidth of a copy",
        ("device",),
        "max_m",
        ("groups", "rows", "k", "n"),
    ),
    "lora.csv": Report(
        "Frozen experts with adapters",
        ("inference_ms", "forward_ms", "step_ms"),
        "ms, inference / forward / step",
        ("device", "dtype"),
        "shape",
        ("tokens", "hidden", "intermediate", "experts", "top_k", "rank"),
    ),
    "whole_model.csv": Report(
        "Whole models",
        ("tokens_per_s", "peak_gib"),
        "tokens/s / peak GiB",
        ("device", "dtype", "layers", "tokens", "training"),
        "model",
        ("sequence", "vocabulary", "attention"),
    ),
    "offload.csv": Report(
        "Frozen experts in host memory",
        ("ms", "inference_ms", "step_ms", "step_of_bound"),
        "ms, inference / step / step by its bound; ms of a copy",
        ("device", "dtype", "format", "layers"),
        "shape",
        ("tokens", "hidden", "intermediate", "experts", "top_k", "rank"),
    ),
    "muon.csv": Report(
        "Steps of Muon",
        ("ms", "matmul_percent"),
        "ms / percent of the rate of batched matmuls",
        ("device", "dtype"),
        "shape",
        ("hidden", "intermediate", "experts"),
    ),
    "parallel.csv": Report(
        "Expert parallelism",
        ("forward_share", "step_share"),
        "percent of the rate of one GPU that holds all experts, forward / step",
        ("device", "dtype", "ranks", "ep", "routing"),
        "shape",
        ("tokens", "hidden", "intermediate", "experts", "top_k"),
    ),
}
FAMILIES = "products.csv"  # of `gemm`
OURS = "moe_aiter"


def products(folder: pathlib.Path) -> str:
    """All that there are in a folder of results; one that is damaged raises `Damaged`."""
    sections = []
    for source in (folder / name for name in REPORTS):
        if source.exists():
            with reading(source):
                sections.append(section(REPORTS[source.name], source))
            if source.name == MODELS:
                sections.append(map_section(speeds_of_models(source)))
    if (source := folder / FAMILIES).exists():
        with reading(source):
            sections.append(families(source))
    return "".join(sections)


def section(report: Report, source: pathlib.Path) -> str:
    with opened(source, newline="") as file:
        # one name for what has a row; tiles beside the chosen one are trials
        rows = named_shapes([row for row in csv.DictReader(file) if not row.get("tile")], report.subject)
    rows = newest(rows, lambda row: tuple(row[name] for name in (*report.tables, "shape", "contender")))
    lines = [f"\n## {report.title}\n"]
    for values, part in grouped(rows, lambda row: tuple(row[name] for name in report.tables)):
        named = zip(report.tables[1:], values[1:], strict=True)
        others = "".join(f", {f'{name} {value}' if value.isdigit() else value}" for name, value in named)
        lines.append(f"**{values[0]}**{others} ({versions(part)})\n")
        lines.append(table_of(report, part))
        lines += [EARLIER] * any(earlier(part))
    return "\n".join(lines)


def families(source: pathlib.Path) -> str:
    """A table for each family, a row for each case."""
    with opened(source, newline="") as file:
        rows = newest(list(csv.DictReader(file)), lambda row: (*about(row), row["case"], row["contender"]))
    lines = ["\n## Products by family\n"]
    for (device, family, dtype), part in grouped(rows, about):
        lines.append(f"**{device}**, {family}, {dtype} ({versions(part)})\n")
        cases = grouped(part, lambda row: (row["case"], row["shape"]))
        head = ["case", "ms", "TFLOP/s", "GB/s", "times as fast as", "goal"]
        lines.append(markdown([head, *(case_row(f"{case} ({shape})", own) for (case, shape), own in cases)]))
    return "\n".join(lines)


def about(row: dict) -> tuple[str, str, str]:
    return row["device"], row["family"], row["dtype"]


def case_row(case: str, rows: list[dict]) -> list[str]:
    """Return one line: our time beside the peers' times.  Figures of earlier runs are left out."""
    rows = [row for row, old in zip(rows, earlier(rows), strict=True) if not old]
    ours = next((row for row in rows if row["contender"] == OURS), None)
    figures = [written(ours[f]) if ours and ours[f] else "–" for f in ("ms", "tflops", "gb_per_s")]
    others = [row for row in rows if row is not ours and row["ratio"]]
    beside = "; ".join(f"{row['contender']} {float(row['ratio']):.2f}" for row in others)
    goals = [(float(row["goal"]), float(row["ratio"]), row["contender"]) for row in others if row["goal"]]
    verdicts = [f"{name} {goal:g}: {'met' if ratio >= goal else 'missed'}" for goal, ratio, name in goals]
    return [case, *figures, beside or "–", "; ".join(verdicts) or "–"]


def table_of(report: Report, rows: list[dict]) -> str:
    """A row for each shape, a column for each contender."""
    sizes = {row["shape"]: ", ".join(row[size] for size in report.sizes if row[size]) for row in rows}
    names = sorted({row["contender"]: None for row in rows}, key=lambda name: "moe_aiter" not in name)
    cells = {
        (row["contender"], row["shape"]): figures_or_note(row, report.figures) + MARK * old
        for row, old in zip(rows, earlier(rows), strict=True)
    }
    head = [f"{report.unit}, of {report.subject} ({', '.join(report.sizes)})", *names]
    table = [[f"{s} ({sizes[s]})", *(cells.get((name, s), "–") for name in names)] for s in sizes]
    return markdown([head, *table])


def figures_or_note(row: dict, figures: tuple[str, ...]) -> str:
    return " / ".join(written(row[f]) for f in figures if row[f]) or row.get("note", "").replace("|", "/")


WHOLE = "whole_model.csv"
WHOLE_MARKS = "<!-- whole models: begin -->", "<!-- whole models: end -->"
SETTING = "device", "dtype", "layers", "tokens", "date", "commit"


def whole_models(source: pathlib.Path) -> str:
    """Return a table for the README's first lines: full training on a GPU, in the last run of whole_model.py.

    A row for each model that ran with our experts and with grouped_mm; "" if no run has one.
    """
    if not source.exists():
        return ""
    with reading(source), opened(source, newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["training"] == "full" and r["peak_gib"]]
        runs = [run for _, run in grouped(rows, lambda r: tuple(r[n] for n in SETTING)) if pairs(run)]
        if not runs:
            return ""
        table = [["tokens/s / peak GiB", "moe_aiter", "grouped_mm", "times as fast"]]
        for model, pair in pairs(runs[-1]).items():
            ours, theirs = (float(r["tokens_per_s"]) for r in pair)
            cells = (figures_or_note(r, REPORTS[WHOLE].figures) for r in pair)
            table.append([model, *cells, f"{ours / theirs:.2f}"])
        device, dtype, layers, tokens, *_ = (runs[-1][0][name] for name in SETTING)
        return (
            f"Whole models in transformers, {layers} layers of the published widths: a training step with "
            f"AdamW, {tokens} tokens, on one {device}, {dtype} ({versions(runs[-1])}; "
            f"[more]({FIGURES.as_posix()}#whole-models)).\n\n{markdown(table)}"
        )


def pairs(rows: list[dict]) -> dict[str, list[dict]]:
    """Model -> its last rows with our experts and with grouped_mm, if there are both."""
    last = {(r["model"], r["contender"]): r for r in rows}
    found = {r["model"]: [last.get((r["model"], name)) for name in (OURS, "grouped_mm")] for r in rows}
    return {model: pair for model, pair in found.items() if all(pair)}


BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
TFLOPS = "TFLOP/s, inference / forward / step"
MEMORY = "MiB, held after forward / peak over forward and backward"
TABLES = {  # title: the figures of a cell
    TFLOPS: ("inference_tflops", "forward_tflops", "step_tflops"),
    "The device's ms, inference / forward / step": ("inference_ms", "forward_ms", "step_ms"),
    "The host's ms, inference / forward / step": ("inference_host_ms", "forward_host_ms", "step_host_ms"),
    "Share of the roofline in percent, forward / step": ("forward_roofline", "step_roofline"),
    MEMORY: ("held_mib", "peak_mib"),
}
LAYER, FP8, CEILING = "layer: moe_aiter MoE", "layer: moe_aiter MoE, FP8", "matmuls of the same FLOPs"
BEST_PEERS = 3  # in the README
FIGURES = pathlib.Path("benchmarks", "FIGURES.md")
ALL = f"All figures, with other shapes and routings: [{FIGURES.as_posix()}]({FIGURES.as_posix()})\n"
HEAD = """# Figures

Written by `python -m benchmarks report` from what `make bench` measured, as [README.md](README.md) says; a
shape is (tokens, hidden, intermediate, experts, experts for each token), and – was not measured. A rate of a
row without the host's ms counts the device's time alone.

"""
ORDER = {name: i for i, name in enumerate(SHAPES)}
IN_TABLE = {name: group for group in ("paper", "models", "tokens") for name in GROUPS[group]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=pathlib.Path, default=CSV, help=f"results of bench layer [{CSV}]")
    parser.add_argument(
        "--readme",
        type=pathlib.Path,
        default=pathlib.Path("README.md"),
        help="file to update, beside benchmarks/FIGURES.md and docs/ [README.md]",
    )
    parser.set_defaults(prog=parser.prog)


def main(args: argparse.Namespace) -> int:
    """Rewrite `--readme` between its markers, FIGURES and the plots; 2 where that is not possible."""
    try:
        update(args.csv, args.readme)
    except Damaged as error:
        return refuse(args, str(error))
    return 0


def update(source: pathlib.Path, document: pathlib.Path) -> None:
    if not source.exists():
        raise Damaged(f"there is no {source}; `make bench` writes it")
    if source.name in REPORTS:
        raise Damaged(f"--csv is that of `bench layer`; {source.name} beside it is read too")
    text = read_text(document)
    if END not in text.partition(BEGIN)[2]:
        raise Damaged(f"{document} lacks {BEGIN} and, behind it, {END}")
    with reading(source):
        rows = read(source)
        last = figures(rows)
        short, full = summary(rows, source.parent), whole(last) + products(source.parent)
        models = whole_models(source.with_name(WHOLE))
        draw(last, document.parent, source.with_name("parallel.csv"))
    figures_document = document.parent / FIGURES
    figures_document.parent.mkdir(exist_ok=True)
    figures_document.write_text(full)
    text = replaced(text, short)
    if WHOLE_MARKS[0] in text:
        text = replaced(text, models, *WHOLE_MARKS)
    document.write_text(text)


def replaced(text: str, part: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with another part between its markers."""
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{part}{end}{rest.partition(end)[2]}"


def read(source: pathlib.Path) -> list[dict]:
    with opened(source, newline="") as file:
        rows = [dict.fromkeys(ADDED, "") | row for row in csv.DictReader(file)]
    if not rows:
        raise ValueError("no figures")
    return rows


def figures(rows: list[dict]) -> list[dict]:
    """The last row of each contender for each device, dtype, routing and shape."""
    return newest(rows, lambda r: (*kind(r), r["shape"], r["contender"]))


def summary(rows: list[dict], folder: pathlib.Path) -> str:
    """For the README: the figure of models, if there are results in the folder; a few rows of one run, the
    plots, and a link to the rest."""
    first = map_image(speeds_of_models(folder / MODELS), "docs")
    return "\n".join([*first, *tables(of_one_run(rows), [TFLOPS]), *images(figures(rows), "docs"), ALL])


def of_one_run(rows: list[dict]) -> list[dict]:
    """Our layer, our layer in FP8, the best peers and the ceiling, at the default shapes.

    The run is the newest of those that measured all of them, at the most shapes; or else the newest of those
    with the most peers.
    """
    measured = [r for r in rows if r["step_ms"] and kind(r)[-1] == "normal"]
    for device in ("cuda", "cpu"):
        runs = []
        part = [r for r in measured if r["shape"] in DEFAULT[device]]
        for _, run in grouped(part, lambda r: (*kind(r), r["date"], r["commit"])):
            names, peers = chosen(run)
            complete = len(names) == 3 and len(peers) >= BEST_PEERS
            names += peers[:BEST_PEERS]
            there = [{r["contender"] for r in run if r["shape"] == s} for s in {r["shape"] for r in run}]
            shapes = sum(contenders.issuperset(names) for contenders in there)
            row = (complete, shapes if complete else len(peers), len(runs))
            if LAYER in names:
                runs.append((row, [r for r in run if r["contender"] in names]))
        if runs:
            return max(runs, key=lambda run: run[0])[1]
    return []


def chosen(run: list[dict]) -> tuple[list[str], list[str]]:
    """Return those of our layer, its first FP8 and the ceiling that a run has, and its peers, fastest first.

    A peer counts once, compiled or not, by the sum of its TFLOP/s over all shapes.
    """
    names = list(dict.fromkeys(r["contender"] for r in run))
    fp8 = [name for name in names if name.startswith(FP8)][:1]
    totals = dict.fromkeys(names, 0.0)
    for r in run:
        totals[r["contender"]] += float(r["step_tflops"])
    peers = {}
    for name in sorted(names, key=totals.get, reverse=True):
        if "moe_aiter" not in name and CEILING not in name:
            peers.setdefault(name.removesuffix(", compiled"), name)
    return [n for n in names if n == LAYER or n in fp8 or CEILING in n], list(peers.values())


def whole(rows: list[dict]) -> str:
    """All of FIGURES.  The shapes of a group have tables of their own, but for those that are only drawn."""
    lines = []
    for _, section in grouped(rows, kind):
        for group, part in grouped(section, lambda r: IN_TABLE.get(r["shape"], "")):
            if group != "tokens":
                lines += tables(part, TABLES)
    return HEAD + "\n".join([*lines, *images(rows, "../docs")])


def tables(rows: list[dict], titles: Iterable[str]) -> list[str]:
    """Return tables of one device, dtype and routing: a row for each contender, a column for each shape."""
    if not rows:
        return []
    device, dtype, routing = kind(rows[0])
    skewed = ", Zipf routing" if routing == "zipf" else ""
    lines = [f"**{device}**, {dtype}{skewed} ({versions(rows)})\n"]
    lines += [table for title in titles if (table := written_table(title, rows))]
    return lines + [EARLIER] * any(earlier(rows))


def images(rows: list[dict], folder: str) -> list[str]:
    return [f"![{plot.title}]({folder}/{name})\n" for name, plot in PLOTS.items() if lines_of(rows, plot)]


def kind(row: dict) -> tuple[str, str, str]:
    return row["device"], row["dtype"], row["routing"] or "normal"


def written_table(title: str, rows: list[dict]) -> str:
    """Return one table in Markdown, or "" if no row has its figures."""
    columns = TABLES[title]
    if not any(r[columns[-1]] for r in rows):
        return ""
    shapes = {r["shape"]: r for r in sorted(rows, key=lambda r: ORDER.get(r["shape"], len(ORDER)))}
    table = [[title, *(f"{name} ({sizes(row)})" for name, row in shapes.items())]]
    cells = {
        (r["contender"], r["shape"]): text + MARK * old
        for r, old in zip(rows, earlier(rows), strict=True)
        if (text := cell(r, columns))
    }
    contenders = sorted(dict.fromkeys(name for name, _ in cells), key=place)
    table += [[c, *(cells.get((c, name), "–") for name in shapes)] for c in contenders]
    return markdown(table)


def place(contender: str) -> tuple[bool, ...]:
    """Ours before peers, whole layers before experts alone, and the ceiling last."""
    return CEILING in contender, "moe_aiter" not in contender, not contender.startswith("layer")


def sizes(row: dict) -> str:
    return ", ".join(row[size] for size in ("tokens", "hidden", "intermediate", "experts", "top_k"))


def cell(row: dict, figures: tuple[str, ...]) -> str:
    """The figures that there are, or why there are none."""
    if not row["step_ms"]:
        return f"error {row['error']}"
    return " / ".join(written(row[f]) if row[f] else "–" for f in figures) if row[figures[-1]] else ""
