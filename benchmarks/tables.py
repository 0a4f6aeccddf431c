"""Rows of results, and tables of them in Markdown."""

import contextlib
import csv
import pathlib
import re
from collections.abc import Callable, Hashable, Iterator

from moe_aiter.files import opened

MARK = " \\*"
EARLIER = "\\* measured in an earlier run. Machines differ by 10 %: compare figures of one run only.\n"
CEILING = "matmuls of the same FLOPs"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
WIDTH = 105  # characters of a page
QUACK = (  # under SonicMoE, as benchmarks/README.md says; the newest first, with its first date
    ("2026-11-26", "QuACK 0.4.1"),
    ("", "QuACK 3d0ab3e"),
)


class Damaged(ValueError):
    """A CSV or a document without what it should have; the message names it."""


@contextlib.contextmanager
def reading(source: pathlib.Path) -> Iterator[None]:
    """Turn errors of the file's rows inside the block into `Damaged`."""
    try:
        yield
    except Damaged:  # of another file
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError, csv.Error) as error:
        raise Damaged(f"{source} is damaged: {type(error).__name__}: {error}") from error


def rows_of(source: pathlib.Path) -> list[dict]:
    """The rows of a CSV; none where there is no file."""
    if not source.exists():
        return []
    with opened(source, newline="") as file:
        return list(csv.DictReader(file))


def newest(rows: list[dict], key: Callable[[dict], Hashable]) -> list[dict]:
    """The last row with each key in the order of the file, so that the rows of the last run come last."""
    last = {key(row): i for i, row in enumerate(rows)}
    return [rows[i] for i in sorted(last.values())]


def grouped(rows: list[dict], key: Callable[[dict], Hashable]) -> list[tuple]:
    """(key, rows with that key), in the order in which the keys come."""
    return [(value, [r for r in rows if key(r) == value]) for value in dict.fromkeys(map(key, rows))]


def run_of(row: dict) -> tuple[str, str]:
    return row["date"], row["commit"]


def earlier(rows: list[dict]) -> list[bool]:
    """Whether each row is of an earlier run than the last one of its shape."""
    last = {r["shape"]: run_of(r) for r in rows}
    return [run_of(r) != last[r["shape"]] for r in rows]


def of_balance(rows: list[dict]) -> list[dict]:
    """Return the rows of `parallel` with skewed routing whose run timed the contender with normal routing.

    `forward_of_balance` and `step_of_balance` are their rates in percent of those with normal routing.
    """
    about = *("date", "commit", "device", "dtype", "ranks", "ep"), "shape", "contender"
    timed, found = [row for row in rows if row.get("step_ms")], []
    for _, same in grouped(timed, lambda row: tuple(row.get(name) for name in about)):
        balanced = [row for row in same if row["routing"] == "normal"][-1:]
        for row in (row for row in same if row["routing"] != "normal" and balanced):
            times = {name: [float(r[f"{name}_ms"]) for r in (*balanced, row)] for name in ("forward", "step")}
            found.append(row | {f"{name}_of_balance": 100 * a / b for name, (a, b) in times.items()})
    return found


def named_shapes(rows: list[dict], subject: str) -> list[dict]:
    return [row | {"shape": row[subject]} for row in rows]


def versions(rows: list[dict]) -> str:
    runs = grouped(rows, lambda r: (r["torch"], r["triton"], r.get("transformers", ""), r["date"]))
    commits = {run: ", ".join(sorted({r["commit"] for r in part})) for run, part in runs}
    texts = (
        f"torch {torch}, Triton {triton}, {f'transformers {hf}, ' if hf else ''}commit {commit}, {date}"
        for (torch, triton, hf, date), commit in sorted(commits.items())
    )
    return "; ".join(texts)


def written(figure: str | float) -> str:
    """Whole numbers from 10 on, and two digits below."""
    value = float(figure)
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def sustained(row: dict, name: str = "step") -> float:
    """Milliseconds of a pass: of the GPU, or of the host where it takes longer."""
    return max(float(row[f"{name}_ms"]), float(row.get(f"{name}_host_ms") or 0))


def waits(row: dict, name: str = "step") -> bool:
    """Whether the GPU waits for the host in a pass."""
    return sustained(row, name) > float(row[f"{name}_ms"])


def label(row: dict) -> str:
    """The contender; SonicMoE with the versions that it ran on, long names in two lines."""
    name = row["contender"]
    if "SonicMoE" in name:
        return f"{name}<br>(torch {row['torch']}, {quack(row)})"
    return name.replace(", later micro-batch", ",<br>later micro-batch")


def quack(row: dict) -> str:
    """The version of QuACK under SonicMoE in this row."""
    return next(version for date, version in QUACK if row["date"] >= date)


def place(contender: str) -> tuple[bool, ...]:
    """Ours before peers, whole layers before experts alone, and the ceiling last."""
    return CEILING in contender, "moe_aiter" not in contender, not contender.startswith("layer")


def short_name(device: str) -> str:
    """H200 of "NVIDIA H200", CPU of a CPU."""
    if device.endswith("threads"):
        return "CPU"
    return next((word for word in device.split() if any(map(str.isdigit, word))), device)


def figures_or_note(row: dict, figures: tuple[str, ...]) -> str:
    return " / ".join(written(row[f]) for f in figures if row[f]) or row.get("note", "").replace("|", "/")


def markdown(table: list[list[str]]) -> str:
    """The first row is the head."""
    head, *rows = table
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def narrow(table: list[list[str]], width: int = WIDTH) -> str:
    """As `markdown`, in as many tables as are needed so that none is wider than a page.

    The first column is repeated.  A column or a row without figures is left out.
    """
    first, *columns = zip(*table, strict=True)
    parts, left = [], 0
    for column in columns:
        if set(column[1:]) <= {"–"}:
            continue
        if not parts or characters(column) > left:
            parts.append([first])
            left = width - characters(first)
        parts[-1].append(column)
        left -= characters(column)
    return "\n".join(markdown(with_figures(part)) for part in parts)


def with_figures(columns: list[tuple[str, ...]]) -> list[list[str]]:
    return [[*row] for row in zip(*columns, strict=True) if set(row[1:]) != {"–"}]


def characters(column: tuple[str, ...]) -> int:
    """The width of a column: its head may wrap between words, a cell only where it has a break."""
    head, *cells = column
    lines = [line for cell in cells for line in cell.split("<br>")]
    return max((len(line.replace("\\", "")) for line in [*re.split(r"\s", head), *lines]), default=0)


def replaced(text: str, part: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with another part between its markers."""
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{part}{end}{rest.partition(end)[2]}"
