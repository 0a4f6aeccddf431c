"""`moe-aiter bench report`: tables and plots, made from the CSV.

The README gets a summary, between two markers; benchmarks/FIGURES.md gets all, and nothing else is in it.
"""

import csv
import pathlib
from collections.abc import Iterable

from .arguments import refuse
from .layer import ADDED
from .plots import PLOTS, draw, lines_of
from .product_report import REPORTS, headlines, products
from .shapes import DEFAULT, GROUPS, SHAPES
from .tables import EARLIER, MARK, Damaged, earlier, grouped, markdown, newest, reading, versions, written

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
TFLOPS = "TFLOP/s, inference / forward / step"
MEMORY = "MiB, held after forward / peak over forward and backward"
TABLES = {  # title: the figures of a cell
    TFLOPS: ("inference_tflops", "forward_tflops", "step_tflops"),
    "The host's ms, inference / forward / step": ("inference_host_ms", "forward_host_ms", "step_host_ms"),
    "Share of the roofline in percent, forward / step": ("forward_roofline", "step_roofline"),
    MEMORY: ("held_mib", "peak_mib"),
}
SUMMARY = {"cuda": (TFLOPS, MEMORY), "cpu": (TFLOPS,)}  # whose default shapes: the tables of the README
REFERENCE = "moe_aiter experts, torch"  # on a GPU a loop over the experts, left out of the README
FIGURES = pathlib.Path("benchmarks", "FIGURES.md")
ALL = f"All figures, with other shapes and routings: [{FIGURES.as_posix()}]({FIGURES.as_posix()})\n"
HEAD = """# Figures

Written by `moe-aiter bench report` from what `make bench` measured, as [README.md](README.md) says; a shape
is (tokens, hidden, intermediate, experts, experts for each token), and – was not measured.

"""
ORDER = {name: i for i, name in enumerate(SHAPES)}
IN_TABLE = {name: group for group in ("paper", "models", "tokens") for name in GROUPS[group]}


def update(source: pathlib.Path, document: pathlib.Path) -> int:
    """Rewrite `document` between its markers, FIGURES and the plots; 2 where that is not possible."""
    if not source.exists():
        return refuse("bench report", f"there is no {source}; `make bench` writes it")
    if source.name in REPORTS:
        return refuse("bench report", f"--csv is that of `bench layer`; {source.name} beside it is read too")
    text = document.read_text()
    if END not in text.partition(BEGIN)[2]:
        return refuse("bench report", f"{document} lacks {BEGIN} and, behind it, {END}")
    try:
        with reading(source):
            rows = figures(source)
            short, full = summary(rows, headlines(source.parent)), whole(rows) + products(source.parent)
            draw(rows, document.parent)
    except Damaged as error:
        return refuse("bench report", str(error))
    figures_document = document.parent / FIGURES
    figures_document.parent.mkdir(exist_ok=True)
    figures_document.write_text(full)
    document.write_text(replaced(text, short))
    return 0


def replaced(text: str, part: str) -> str:
    """`text` with another part between its markers."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{part}{END}{rest.partition(END)[2]}"


def figures(source: pathlib.Path) -> list[dict]:
    """The last row of each contender for each device, dtype, routing and shape."""
    with open(source, newline="") as file:
        rows = [dict.fromkeys(ADDED, "") | row for row in csv.DictReader(file)]
    if not rows:
        raise ValueError("no figures")
    return newest(rows, lambda r: (*kind(r), r["shape"], r["contender"]))


def summary(rows: list[dict], products: str = "") -> str:
    """For the README: the default shapes, normal routing, products, the plots, and a link to the rest."""
    parts = []
    for (*_, routing), section in grouped(rows, kind):
        for device, titles in SUMMARY.items() if routing == "normal" else ():
            part = [r for r in section if r["shape"] in DEFAULT[device]]
            parts += tables([r for r in part if device == "cpu" or r["contender"] != REFERENCE], titles)
    return "\n".join([*parts, *[products] * bool(products), *images(rows, "docs"), ALL])


def whole(rows: list[dict]) -> str:
    """All of FIGURES.  The shapes of a group have tables of their own, but for those that are only drawn."""
    parts = []
    for _, section in grouped(rows, kind):
        for group, part in grouped(section, lambda r: IN_TABLE.get(r["shape"], "")):
            if group != "tokens":
                parts += tables(part, TABLES)
    return HEAD + "\n".join([*parts, *images(rows, "../docs")])


def tables(rows: list[dict], titles: Iterable[str]) -> list[str]:
    """Of one device, dtype and routing: a row for each contender, a column for each shape, below what ran."""
    if not rows:
        return []
    device, dtype, routing = kind(rows[0])
    skewed = ", Zipf routing" if routing == "zipf" else ""
    parts = [f"**{device}**, {dtype}{skewed} ({versions(rows)})\n"]
    parts += [table for title in titles if (table := written_table(title, rows))]
    return parts + [EARLIER] * any(earlier(rows))


def images(rows: list[dict], folder: str) -> list[str]:
    return [f"![{plot.title}]({folder}/{name})\n" for name, plot in PLOTS.items() if lines_of(rows, plot)]


def kind(row: dict) -> tuple[str, str, str]:
    return row["device"], row["dtype"], row["routing"] or "normal"


def written_table(title: str, rows: list[dict]) -> str:
    """One table in Markdown; empty where nobody has its figures."""
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
    for contender in sorted(dict.fromkeys(name for name, _ in cells), key=place):
        table.append([contender, *(cells.get((contender, name), "–") for name in shapes)])
    return markdown(table)


def place(contender: str) -> tuple[bool, bool]:
    """Ours before peers, and whole layers before experts alone."""
    return "moe_aiter" not in contender, not contender.startswith("layer")


def sizes(row: dict) -> str:
    return ", ".join(row[size] for size in ("tokens", "hidden", "intermediate", "experts", "top_k"))


def cell(row: dict, figures: tuple[str, ...]) -> str:
    """The figures that there are, or why there are none."""
    if not row["step_ms"]:
        return f"error {row['error']}"
    return " / ".join(written(row[f]) if row[f] else "–" for f in figures) if row[figures[-1]] else ""
