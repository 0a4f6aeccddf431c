"""The tables of `bench gmm`, `deepgemm`, `segment` and `lora`, from the CSV of each."""

import csv
import dataclasses
import pathlib

from .tables import EARLIER, MARK, earlier, grouped, markdown, newest, reading, versions, written


@dataclasses.dataclass(frozen=True)
class Report:
    """What the figures of one CSV are, and which of its columns say whose they are."""

    title: str
    figures: tuple[str, ...]  # of a cell
    unit: str
    tables: tuple[str, ...]  # what has a table of its own
    subject: str  # what has a row of its own, by its name
    sizes: tuple[str, ...]  # and these beside it


REPORTS = {
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
}


def products(folder: pathlib.Path) -> str:
    """All that there are in a folder of results; one that is damaged raises `Damaged`."""
    parts = []
    for source in (folder / name for name in REPORTS):
        if source.exists():
            with reading(source):
                parts.append(section(REPORTS[source.name], source))
    return "".join(parts)


def section(report: Report, source: pathlib.Path) -> str:
    with open(source, newline="") as file:
        # one name for what has a row; tiles beside the chosen one are trials
        rows = [row | {"shape": row[report.subject]} for row in csv.DictReader(file) if not row.get("tile")]
    rows = newest(rows, lambda row: tuple(row[name] for name in (*report.tables, "shape", "contender")))
    parts = [f"\n## {report.title}\n"]
    for names, part in grouped(rows, lambda row: tuple(row[name] for name in report.tables)):
        device, *others = names
        parts.append(f"**{device}**{''.join(f', {name}' for name in others)} ({versions(part)})\n")
        parts.append(written_table(report, part))
        parts += [EARLIER] * any(earlier(part))
    return "\n".join(parts)


def written_table(report: Report, rows: list[dict]) -> str:
    """A row for each shape, a column for each contender."""
    sizes = {row["shape"]: ", ".join(row[size] for size in report.sizes if row[size]) for row in rows}
    names = sorted({row["contender"]: None for row in rows}, key=lambda name: "moe_aiter" not in name)
    cells = {
        (row["contender"], row["shape"]): " / ".join(written(row[f]) for f in report.figures if row[f])
        + MARK * old
        for row, old in zip(rows, earlier(rows), strict=True)
    }
    head = [f"{report.unit}, of {report.subject} ({', '.join(report.sizes)})", *names]
    table = [[f"{s} ({sizes[s]})", *(cells.get((name, s), "–") for name in names)] for s in sizes]
    return markdown([head, *table])
