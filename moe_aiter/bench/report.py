"""`moe-aiter bench report`: the tables between two markers of a document, made from the CSV."""

import csv
import pathlib
import sys

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
TABLES = {  # title: the figures of a cell
    "TFLOP/s, inference / forward / step": ("inference_tflops", "forward_tflops", "step_tflops"),
    "MiB, held after forward / peak over forward and backward": ("held_mib", "peak_mib"),
}


def update(source: pathlib.Path, document: pathlib.Path) -> int:
    """Rewrite the part of `document` between the markers; 2 if it has none, or there are no figures."""
    if not source.exists():
        print(f"moe-aiter bench report: error: there is no {source}; `make bench` writes it", file=sys.stderr)
        return 2
    text = document.read_text()
    if BEGIN not in text or END not in text:
        print(f"moe-aiter bench report: error: {document} lacks {BEGIN} and {END}", file=sys.stderr)
        return 2
    try:
        tables = report(source)
    except (KeyError, TypeError, ValueError) as error:
        name = type(error).__name__
        print(f"moe-aiter bench report: error: {source} is damaged: {name}: {error}", file=sys.stderr)
        return 2
    document.write_text(replaced(text, tables))
    return 0


def replaced(text: str, tables: str) -> str:
    """`text` with other tables between its markers."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{tables}{END}{rest.partition(END)[2]}"


def report(source: pathlib.Path) -> str:
    """Two tables for each device and dtype in the CSV: a row for each contender, a column for each shape."""
    with open(source, newline="") as file:
        rows = newest(list(csv.DictReader(file)))
    if not rows:
        raise ValueError("no figures")
    parts = []
    for device, dtype in dict.fromkeys((r["device"], r["dtype"]) for r in rows):
        parts += section(device, dtype, [r for r in rows if (r["device"], r["dtype"]) == (device, dtype)])
    return "\n".join(parts)


def newest(rows: list[dict]) -> list[dict]:
    """The rows of the last run of each device, dtype and shape."""
    last = {(r["device"], r["dtype"], r["shape"]): (r["date"], r["commit"]) for r in rows}
    rows = [r for r in rows if last[r["device"], r["dtype"], r["shape"]] == (r["date"], r["commit"])]
    unique = {(r["device"], r["dtype"], r["shape"], r["contender"]): r for r in rows}
    return list(unique.values())


def section(device: str, dtype: str, rows: list[dict]) -> list[str]:
    shapes = {r["shape"]: r for r in rows}
    versions = sorted(
        {f"torch {r['torch']}, Triton {r['triton']}, commit {r['commit']}, {r['date']}" for r in rows}
    )
    lines = [f"**{device}**, {dtype} ({'; '.join(versions)})\n"]
    for title, figures in TABLES.items():
        heads = [f"{name} ({sizes(row)})" for name, row in sorted(shapes.items())]
        table = [[title, *heads], ["---"] * (len(shapes) + 1)]
        for contender in dict.fromkeys(r["contender"] for r in rows):
            by_shape = {r["shape"]: r for r in rows if r["contender"] == contender}
            cells = [cell(by_shape[name], figures) if name in by_shape else "" for name in sorted(shapes)]
            table.append([contender, *cells])
        lines += ["".join(f"| {' | '.join(row)} |\n" for row in table)]
    return lines


def sizes(row: dict) -> str:
    return ", ".join(row[size] for size in ("tokens", "hidden", "intermediate", "experts", "top_k"))


def cell(row: dict, figures: tuple[str, ...]) -> str:
    """The figures that there are, or why there are none."""
    if not row["step_ms"]:
        return f"error {row['error']}"
    return " / ".join(written(row[f]) if row[f] else "–" for f in figures) if row[figures[-1]] else ""


def written(figure: str) -> str:
    """Whole numbers from 10 on, and two digits below."""
    value = float(figure)
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
