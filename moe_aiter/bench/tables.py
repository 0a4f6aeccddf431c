"""What tables of figures have in common: rows are those of a CSV, as dicts of text."""

import contextlib
import csv
import pathlib
from collections.abc import Callable, Hashable, Iterator

MARK = " \\*"
EARLIER = "\\* of an earlier run, perhaps on another machine, which differ by 10 %: compare within a run\n"


class Damaged(ValueError):
    """A CSV without the figures that it should have; the message names it."""


@contextlib.contextmanager
def reading(source: pathlib.Path) -> Iterator[None]:
    """Whatever its rows raise inside the block becomes `Damaged`."""
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
    runs = grouped(rows, lambda r: (r["torch"], r["triton"], r["date"]))
    commits = {run: ", ".join(sorted({r["commit"] for r in part})) for run, part in runs}
    texts = (
        f"torch {torch}, Triton {triton}, commit {commits[torch, triton, date]}, {date}"
        for torch, triton, date in sorted(commits)
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
