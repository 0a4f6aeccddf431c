"""The tables of `bench gmm`, `deepgemm`, `segment`, `lora` and `gemm`, from the CSV of each."""

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
FAMILIES = "products.csv"  # of `bench gemm`
OURS = "moe_aiter"
HEADLINES = {  # for the README: the cases, by the names of who is beside them there
    "square-4096": "torch",
    "gelu-1024": "torch, unfused",
    "gelu-4096": "torch, unfused",
    "decode-4096-1": "torch",
    "decode-4096-16": "torch",
    "batched-64": "torch",
    "grouped-aiter": "torch, loop over experts",
    "grouped-C": "torch, loop over experts",
    "int8-8192": "torch, bfloat16",
    "fp8-8192": "torch, bfloat16",
    "experts-fp8-8192": "bfloat16",
    "block64-90": "torch, dense",
    "block64-90-step": "torch, dense",
    "csr-99": "torch.sparse.mm",
    "attention, window": "torch",
}


def products(folder: pathlib.Path) -> str:
    """All that there are in a folder of results; one that is damaged raises `Damaged`."""
    parts = []
    for source in (folder / name for name in REPORTS):
        if source.exists():
            with reading(source):
                parts.append(section(REPORTS[source.name], source))
    if (source := folder / FAMILIES).exists():
        with reading(source):
            parts.append(families(source))
    return "".join(parts)


def headlines(folder: pathlib.Path) -> str:
    """For the README: a row for each of HEADLINES that was measured, for each device; nothing without any."""
    source = folder / FAMILIES
    if not source.exists():
        return ""
    with reading(source), open(source, newline="") as file:
        rows = [row for row in csv.DictReader(file) if HEADLINES.get(row["case"]) == row["contender"]]
        rows = newest(rows, lambda row: (*about(row), row["case"]))
        parts = []
        for (device,), part in grouped(rows, lambda row: (row["device"],)):
            table = [["product", "dtype", "us", "beside", "its us", "times as fast"]]
            for row in sorted(part, key=lambda row: list(HEADLINES).index(row["case"])):
                us, ratio = 1e3 * float(row["ms"]), float(row["ratio"])
                case = f"{row['case']} ({row['shape']})"
                cells = [
                    case,
                    row["dtype"],
                    written(us / ratio),
                    row["contender"],
                    written(us),
                    f"{ratio:.2f}",
                ]
                table.append(cells)
            parts += [f"**{device}**, products ({versions(part)})\n", markdown(table)]
    return "\n".join(parts)


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


def families(source: pathlib.Path) -> str:
    """A table for each family, a row for each case."""
    with open(source, newline="") as file:
        rows = newest(list(csv.DictReader(file)), lambda row: (*about(row), row["case"], row["contender"]))
    parts = ["\n## Products by family\n"]
    for (device, family, dtype), part in grouped(rows, about):
        parts.append(f"**{device}**, {family}, {dtype} ({versions(part)})\n")
        cases = grouped(part, lambda row: (row["case"], row["shape"]))
        head = ["case", "ms", "TFLOP/s", "GB/s", "times as fast as", "goal"]
        parts.append(markdown([head, *(case_row(f"{case} ({shape})", own) for (case, shape), own in cases)]))
    return "\n".join(parts)


def about(row: dict) -> tuple[str, str, str]:
    return row["device"], row["family"], row["dtype"]


def case_row(case: str, rows: list[dict]) -> list[str]:
    """What ours takes, and beside whom; a figure of an earlier run than the last is left out."""
    rows = [row for row, old in zip(rows, earlier(rows), strict=True) if not old]
    ours = next((row for row in rows if row["contender"] == OURS), None)
    figures = [written(ours[f]) if ours and ours[f] else "–" for f in ("ms", "tflops", "gb_per_s")]
    others = [row for row in rows if row is not ours and row["ratio"]]
    beside = "; ".join(f"{row['contender']} {float(row['ratio']):.2f}" for row in others)
    goals = [(float(row["goal"]), float(row["ratio"]), row["contender"]) for row in others if row["goal"]]
    verdicts = [f"{name} {goal:g}: {'met' if ratio >= goal else 'missed'}" for goal, ratio, name in goals]
    return [case, *figures, beside or "–", "; ".join(verdicts) or "–"]


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
