"""benchmarks/figures: all results as tables, on a page for each topic."""

import dataclasses
import pathlib
from collections.abc import Callable

from moe_aiter.bench.measure import PASSES
from moe_aiter.bench.models import PRODUCTS
from moe_aiter.bench.problem import DEFAULT, GROUPS, SHAPES

from . import skew
from .plots import images, map_image
from .speed import FP8, HF_EXPERTS, LAYER, MODELS, OURS, WHOLE, gains_of_models
from .tables import (
    CEILING,
    EARLIER,
    MARK,
    earlier,
    figures_or_note,
    grouped,
    label,
    markdown,
    named_shapes,
    narrow,
    newest,
    place,
    reading,
    rows_of,
    short_name,
    sustained,
    versions,
    waits,
    written,
)

FAMILIES = "products.csv"  # of `gemm`
LAYERS = "layers-{}.md"
HEAD = """# {}

Written by `python -m benchmarks report` ([how we measure](../README.md), [all pages](README.md)). A dash
means that nothing was measured.{}

"""
LAYER_NOTE = """

A shape is (tokens, hidden size, intermediate size, experts, experts for each token). A row that begins
with `layer` includes the router; the other rows get the routing as an input. *Inference* is a forward
pass without gradients, *forward* a forward pass that saves tensors for backward, and *step* forward and
backward. TFLOP/s divide the work by the time of the GPU or of the host, whichever is longer. Where the
host takes longer, the GPU's milliseconds follow in brackets. In a row without the host's time, the host
was not timed, and TFLOP/s use the GPU's time."""
NOTES = {
    "models.md": """

The routing is an input of all rows. The times are those of a step: the GPU's, and the host's behind a
slash. The first table divides the time of other code by ours, each the GPU's or the host's, whichever is
longer. It has both kinds of our kernels: those for Hopper, and the portable ones, which also run on a
Hopper GPU."""
}
INDEX = """# Figures

Written by `python -m benchmarks report` from `benchmarks/results`. [How we measure](../README.md)
explains the words. [Speed](../../docs/speed.md) answers for a model.

"""
ONE_RUN = """
## Our layer beside others

A step, forward and backward, of layers in one run. A shape is (tokens, hidden size, intermediate size,
experts, experts for each token). TFLOP/s divide the work by the time of the GPU or of the host, whichever
is longer. Where the host takes longer, the GPU's milliseconds follow in brackets.

"""
BEST_PEERS = 3  # beside ours
ORDER = {name: i for i, name in enumerate(SHAPES)}
IN_TABLE = {name: group for group in ("paper", "models", "tokens") for name in GROUPS[group]}


@dataclasses.dataclass(frozen=True)
class Report:
    """The columns of one CSV: those with figures, and those that name what was measured."""

    title: str
    page: str
    figures: tuple[str, ...]  # of a cell
    unit: str
    tables: tuple[str, ...]  # what has a table of its own
    subject: str  # what has a row of its own, by its name
    sizes: tuple[str, ...]  # and these beside it
    down: bool = False  # contenders stand in rows, and subjects in columns
    read: Callable[[pathlib.Path], list[dict]] = rows_of
    after: Callable[[pathlib.Path], str] = lambda source: ""  # what follows the tables


REPORTS = {
    MODELS: Report(
        "Published models",
        "models.md",
        ("step_ms", "step_host_ms"),
        "ms, GPU / host",
        ("device", "dtype"),
        "model",
        ("tokens", "hidden", "intermediate", "experts", "top_k", "layout", "gate", "activation"),
    ),
    WHOLE: Report(
        "Whole models",
        "whole_models.md",
        ("tokens_per_s", "peak_gib"),
        "tokens/s / peak GiB",
        ("device", "dtype", "layers", "tokens", "training"),
        "model",
        ("sequence", "vocabulary", "attention"),
    ),
    "parallel.csv": Report(
        "Expert parallelism",
        "parallel.md",
        ("forward_share", "step_share"),
        "percent of the rate of one GPU that holds all experts, forward / step",
        ("device", "dtype", "ranks", "ep", "routing", "skew"),
        "shape",
        ("tokens", "hidden", "intermediate", "experts", "top_k"),
        down=True,
        read=skew.rows_of_parallel,
        after=skew.page_part,
    ),
    "lora.csv": Report(
        "Frozen experts with adapters",
        "adapters.md",
        ("inference_ms", "forward_ms", "step_ms"),
        "ms, inference / forward / step",
        ("device", "dtype"),
        "shape",
        ("tokens", "hidden", "intermediate", "experts", "top_k", "rank"),
        down=True,
    ),
    "offload.csv": Report(
        "Frozen experts in host memory",
        "adapters.md",
        ("ms", "inference_ms", "step_ms", "step_of_bound"),
        "ms, inference / step / step by its bound; ms of a copy",
        ("device", "dtype", "format", "layers"),
        "shape",
        ("tokens", "hidden", "intermediate", "experts", "top_k", "rank"),
        down=True,
    ),
    "muon.csv": Report(
        "Steps of Muon",
        "muon.md",
        ("ms", "matmul_percent"),
        "ms / percent of the rate of batched matmuls",
        ("device", "dtype"),
        "shape",
        ("hidden", "intermediate", "experts"),
    ),
    "gmm.csv": Report(
        "Grouped products",
        "grouped.md",
        ("tflops",),
        "TFLOP/s",
        ("device", "dtype", "op", "layout"),
        "shape",
        ("m", "k", "n", "g"),
    ),
    "segment.csv": Report(
        "Segments",
        "grouped.md",
        ("us", "host_us"),
        "us, GPU / host",
        ("device", "dtype"),
        "case",
        ("segments", "rows", "d_in", "d_out", "weights"),
    ),
    "masked.csv": Report(
        "Masked products",
        "grouped.md",
        ("us", "tflops", "copy_percent"),
        "us / TFLOP/s / percent of the bandwidth of a copy",
        ("device",),
        "max_m",
        ("groups", "rows", "k", "n"),
    ),
}
TITLES = {  # of the pages with several sections
    "adapters.md": "Adapters on frozen experts",
    "grouped.md": "Grouped, segment and masked products",
    "products.md": "Dense, scaled and sparse products",
}


def pages(rows: list[dict], folder: pathlib.Path) -> dict[str, str]:
    """Name -> text of each page: of `bench layer`'s rows, and of the other results in the folder."""
    last = newest(rows, lambda r: (*kind(r), r["shape"], r["contender"]))
    found = layer_pages(last) | product_pages(folder)
    titles = {name: text.partition("# ")[2].partition("\n")[0] for name, text in found.items()}
    links = "".join(f"* [{title}]({name})\n" for name, title in titles.items())
    plots = "".join(f"\n{image}" for image in images(last, "../../docs"))
    return {"README.md": INDEX + links + beside(rows) + plots} | found


def product_pages(folder: pathlib.Path) -> dict[str, str]:
    """The pages of all results but those of `bench layer`; one that is damaged raises `Damaged`."""
    sections = {}
    for name, report in REPORTS.items():
        source = folder / name
        if source.exists():
            with reading(source):
                parts = [map_section(source)] if name == MODELS else []
                sections.setdefault(report.page, []).extend([*parts, section(report, source)])
    source = folder / FAMILIES
    if source.exists():
        with reading(source):
            sections["products.md"] = [families(source)]
    titles = {report.page: report.title for report in REPORTS.values()} | TITLES
    return {
        page: HEAD.format(titles[page], NOTES.get(page, "")) + "\n".join(filter(None, parts))
        for page, parts in sections.items()
    }


# layers


def kind(row: dict) -> tuple[str, str, str]:
    return row["device"], row["dtype"], row["routing"] or "normal"


def layer_pages(rows: list[dict]) -> dict[str, str]:
    """A page for each GPU, for CPUs, and for other shapes and routings.  Some shapes are only drawn."""
    parts = {}
    for (device, dtype, routing), own in grouped(rows, kind):
        for group, part in grouped(own, lambda r: IN_TABLE.get(r["shape"], "")):
            name = short_name(device)
            page = "other shapes" if name != "CPU" and (group or routing == "zipf") else name
            if group != "tokens":
                skewed = ", Zipf routing" if routing == "zipf" else ""
                parts.setdefault(page, []).append(f"## {device}, {dtype}{skewed}\n")
                parts[page] += [f"{versions(part)}\n", *map(shape_table, by_shape(part))]
                parts[page] += [EARLIER] * any(earlier(part))
    return {
        LAYERS.format(name.lower().replace(" ", "-")): HEAD.format(f"Layers: {name}", LAYER_NOTE)
        + "\n".join(part)
        for name, part in sorted(parts.items(), key=lambda part: ("other" in part[0], part[0] == "CPU"))
    }


def by_shape(rows: list[dict]) -> list[list[dict]]:
    rows = sorted(rows, key=lambda r: ORDER.get(r["shape"], len(ORDER)))
    return [part for _, part in grouped(rows, lambda r: r["shape"])]


def shape_table(rows: list[dict]) -> str:
    """All figures of one shape, a row for each contender."""
    passes = (f"{name} TFLOP/s" for name in PASSES)
    head = ["contender", *passes, "step, GPU ms", "step, host ms", "roofline %", "held MiB", "peak MiB"]
    table = [head]
    for r, old in sorted(zip(rows, earlier(rows), strict=True), key=lambda pair: place(pair[0]["contender"])):
        line = [label(r) + MARK * old]
        if r["step_ms"]:
            line += [rate(r, name) if r[f"{name}_tflops"] else "–" for name in ("inference", "forward")]
            names = "step_tflops", "step_ms", "step_host_ms", "step_roofline", "held_mib", "peak_mib"
            line += [written(r[name]) if r[name] else "–" for name in names]
        else:
            line += [f"error {float(r['error']):.2g}" if r["error"] else "–", *["–"] * (len(head) - 2)]
        table.append(line)
    return f"### {rows[0]['shape']} ({sizes(rows[0])})\n\n{narrow(table)}"


def rate(row: dict, name: str) -> str:
    """TFLOP/s of a pass, and the GPU's milliseconds in brackets where the host takes longer."""
    gpu = f" ({written(row[f'{name}_ms'])} ms)" if row[f"{name}_ms"] and waits(row, name) else ""
    return written(row[f"{name}_tflops"]) + gpu


def sizes(row: dict) -> str:
    return ", ".join(row[size] for size in ("tokens", "hidden", "intermediate", "experts", "top_k"))


def beside(rows: list[dict]) -> str:
    """A table of one run: a row for each contender, a column for each shape."""
    rows = of_one_run(rows)
    if not rows:
        return ""
    shapes = [part[0] for part in by_shape(rows)]
    cells = {(label(r), r["shape"]): rate(r, "step") for r in rows}
    table = [["TFLOP/s of a step", *(f"{row['shape']} ({sizes(row)})" for row in shapes)]]
    names = dict.fromkeys(label(r) for r in sorted(rows, key=lambda r: place(r["contender"])))
    table += [[name, *(cells.get((name, row["shape"]), "–") for row in shapes)] for name in names]
    device, dtype, _ = kind(rows[0])
    return f"{ONE_RUN}**{device}**, {dtype} ({versions(rows)})\n\n{narrow(table)}"


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
    fp8 = [name for name in names if name == FP8][:1]
    totals = dict.fromkeys(names, 0.0)
    for r in run:
        totals[r["contender"]] += float(r["step_tflops"])
    peers = {}
    for name in sorted(names, key=totals.get, reverse=True):
        if "moe_aiter" not in name and CEILING not in name:
            peers.setdefault(name.removesuffix(", compiled"), name)
    return [n for n in names if n == LAYER or n in fp8 or CEILING in n], list(peers.values())


# other results


def section(report: Report, source: pathlib.Path) -> str:
    # one name for what has a row; tiles beside the chosen one are trials
    rows = named_shapes([row for row in report.read(source) if not row.get("tile")], report.subject)
    rows = newest(rows, lambda row: tuple(row[name] for name in (*report.tables, "shape", "contender")))
    lines = [f"## {report.title}\n"]
    for values, part in grouped(rows, lambda row: tuple(row[name] for name in report.tables)):
        named = [pair for pair in zip(report.tables[1:], values[1:], strict=True) if pair[1]]
        others = "".join(f", {f'{name} {value}' if value[0].isdigit() else value}" for name, value in named)
        lines += [f"**{values[0]}**{others} ({versions(part)})\n", *tables_of(report, part)]
        lines += [EARLIER] * any(earlier(part))
    return "\n".join([*lines, report.after(source)]).rstrip("\n") + "\n"


def tables_of(report: Report, rows: list[dict]) -> list[str]:
    """The tables of one part: of published models, the sizes and the memory stand in tables of their own."""
    if report.page != "models.md":
        return [table_of(report, report.unit, report.figures, rows)]
    about = [["model", "T, H, I, E, k", "layout", "gate", "activation"]]
    for r in newest(rows, lambda row: row["shape"]):
        activation = r["activation"].partition("(")[0]
        about.append([r["shape"], sizes(r), r["layout"], r["gate"] or "none", activation])
    bare = dataclasses.replace(report, sizes=())
    figures = (report.unit, report.figures), ("peak MiB", ("peak_mib",))
    return [*(table_of(bare, *part, rows) for part in figures), narrow(about)]


def table_of(report: Report, unit: str, figures: tuple[str, ...], rows: list[dict]) -> str:
    """A row for each shape, a column for each contender, or the other way round."""
    sized = {row["shape"]: ", ".join(row[size] for size in report.sizes if row[size]) for row in rows}
    shapes = {shape: f"{shape} ({text})" if text else shape for shape, text in sized.items()}
    names = sorted({row["contender"]: None for row in rows}, key=lambda name: "moe_aiter" not in name)
    cells = {
        (row["contender"], row["shape"]): figures_or_note(row, figures) + MARK * old
        for row, old in zip(rows, earlier(rows), strict=True)
    }
    head = f"{unit}, of {report.subject}" + f" ({', '.join(report.sizes)})" * bool(report.sizes)
    table = [[head, *names]]
    table += [[text, *(cells.get((name, s), "–") for name in names)] for s, text in shapes.items()]
    return narrow(list(map(list, zip(*table, strict=True))) if report.down else table)


HEADS = "by Hugging Face", "by torch", "by matmuls", "portable, by torch", "portable, by matmuls"


def map_section(source: pathlib.Path) -> str:
    """The chart, and how many times as fast both tiers are, on the last device in the file."""
    table, why = [["times as fast, a step", *HEADS]], [["portable on a Hopper GPU", "products"]]
    rows = named_shapes([row for row in rows_of(source) if row["step_ms"]], "model")
    for model, part in grouped([row for row in rows if row["device"] == rows[-1]["device"]], by_name):
        part = [row for row, old in zip(part, earlier(part), strict=True) if not old]
        ms = {row["contender"]: sustained(row) for row in part}
        hopper, triton = (ms.get(f"moe_aiter experts, {tier}") for tier in ("hopper", "triton"))
        peers = [ms.get(name) for name in (HF_EXPERTS, "torch grouped_mm", f"batched {CEILING}")]
        compared = [*((peer, hopper) for peer in peers), *((peer, triton) for peer in peers[1:])]
        table.append([model, *(f"{a / b:.2f}" if a and b else "–" for a, b in compared)])
        reasons = [f"{p}: {r[p].partition(': ')[2]}" for r in part for p in PRODUCTS if is_portable(r, p)]
        why += [[model, "; ".join(reasons)]] * bool(reasons)
    parts = [
        *map_image(gains_of_models(source), "../../docs"),
        narrow(table),
        *[markdown(why)] * (len(why) > 1),
    ]
    return "\n".join(parts) if len(table) > 1 else ""


def by_name(row: dict) -> str:
    return row["shape"]


def is_portable(row: dict, product: str) -> bool:
    """Whether the product of this row, of our kernels for Hopper, is not one of them."""
    return row["contender"].endswith(", hopper") and row[product].startswith("portable")


def families(source: pathlib.Path) -> str:
    """A table for each family, a row for each case."""
    rows = newest(rows_of(source), lambda row: (*about(row), row["case"], row["contender"]))
    lines = []
    for (device, family, dtype), part in grouped(rows, about):
        lines.append(f"## {family.capitalize()}, {dtype}\n\n**{device}** ({versions(part)})\n")
        cases = grouped(part, lambda row: (row["case"], row["shape"]))
        head = ["case", "ms", "TFLOP/s", "GB/s", "times as fast as"]
        lines.append(narrow([head, *(case_row(f"{case}<br>({shape})", own) for (case, shape), own in cases)]))
    return "\n".join(lines)


def about(row: dict) -> tuple[str, str, str]:
    return row["device"], row["family"], row["dtype"]


def case_row(case: str, rows: list[dict]) -> list[str]:
    """Return one line: our time beside the peers' times.  Figures of earlier runs are left out."""
    rows = [row for row, old in zip(rows, earlier(rows), strict=True) if not old]
    ours = next((row for row in rows if row["contender"] == OURS), None)
    figures = [written(ours[f]) if ours and ours[f] else "–" for f in ("ms", "tflops", "gb_per_s")]
    others = [row for row in rows if row is not ours and row["ratio"]]
    return [case, *figures, "<br>".join(map(ratio, others)) or "–"]


def ratio(row: dict) -> str:
    value, goal = float(row["ratio"]), row["goal"] and float(row["goal"])
    verdict = f" (goal {goal:g}: {'met' if value >= goal else 'missed'})" if goal else ""
    return f"{row['contender']} {value:.2f}{verdict}"
