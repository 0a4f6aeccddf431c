"""The store of tables: a file is read and checked once, and its rows are found by key until it changes.

A `Table` is a folder of CSV files, one for each GPU, with tiles (table.py) or backends (choice.py).  The same
functions read, change, remember and forget AITER's files (aiter_csv.py, aiter_json.py).
"""

import contextlib
import csv
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from ..config import SettingError
from ..files import drafted, locked, opened
from ..op import invalidate_decisions

TABLES = pathlib.Path(__file__).parent / "tables"
PROVENANCE = ("gpu", "torch", "triton", "commit", "date")
REMEMBERED: list = []  # functions that keep what they have read of files
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
Parser = Callable[[str], Any]  # the value of a cell; its ValueError says what the cell is, and must be


def remembered(function: Callable) -> Callable:
    """Keep the answers of a function that depends on files until `cache_clear` is called."""
    REMEMBERED.append(kept := functools.lru_cache(maxsize=4096)(function))
    return kept


def cache_clear() -> None:
    """Read every file again, and choose again, at the next call."""
    for kept in REMEMBERED:
        kept.cache_clear()
    invalidate_decisions()


# cells


def parsed(cells: dict[str, str], parsers: dict[str, Parser], where: str) -> dict[str, Any]:
    """Return the value of each column that has a parser.  Raises ValueError that names the place."""
    values = {}
    for column, parse in parsers.items():
        try:
            values[column] = parse(cells.get(column, ""))
        except ValueError as error:
            raise SettingError(f"{where}: {column} is {error}") from error
    return values


def number(text: str) -> int | float | None:
    """Return the number in a cell, or None if the cell holds no number."""
    if not NUMBER.fullmatch(text):
        return None
    return int(text) if text.lstrip("+-").isdecimal() and len(text) < 20 else float(text)


def whole_number(text: str, least: int = 0) -> int:
    """A whole number, which may be spelt as 64.0 or 1e3: that is how pandas writes one."""
    found = number(text)
    if found is None or not least <= found < 2**63 or found != int(found):
        raise ValueError(f"{text!r}; it must be a whole number" + (", 0 or more" if least == 0 else ""))
    return int(found)


def optional(parse: Parser) -> Parser:
    """The parser of cells that may be empty, which is None."""
    return lambda text: parse(text) if text else None


def word(text: str) -> str:
    if not text:
        raise ValueError("empty")
    return text


def member(text: str, choices: Collection[str], words: str = "it takes") -> str:
    if text not in choices:
        raise ValueError(f"{text!r}; {words} {', '.join(choices)}")
    return text


# files


class Row(NamedTuple):
    """One line of a table."""

    key: Any  # with `matches` and `order`; None (an empty cell) in it matches anything
    value: Any
    cells: dict[str, str]


@dataclasses.dataclass(eq=False)
class Table:
    """A CSV file for each GPU in `folder`.  The first row whose key matches is taken."""

    folder: pathlib.Path
    columns: tuple[str, ...]  # of a file that is written
    parsers: dict[str, Parser]
    entry: Callable[[dict[str, Any], str], tuple]  # values, place -> key, value
    needed: tuple[str, ...]  # columns of a file that is read
    lacks: str  # the error of a file without them, see `lines`

    def read(self, path: pathlib.Path) -> list[Row]:
        """Return every row of a file.  Raises ValueError, in one line, where there is a mistake."""
        uneven = "a row has as many cells as there are columns"
        return [self.row(cells, where) for where, cells in lines(path, self.needed, self.lacks, uneven)]

    def row(self, cells: dict[str, str], where: str) -> Row:
        return Row(*self.entry(parsed(cells, self.parsers, where), where), cells)

    def write(self, path: pathlib.Path, new: Iterable[dict], without: Any = None) -> None:
        """Add rows, dicts with all columns, to a file or a new one.  A row replaces that with the same key.

        The row with the key `without` goes.  The most specific row comes first, since the first that matches
        is taken.
        """
        with changing(path):
            old = self.read(path) if path.exists() and path.stat().st_size else []
            if old and tuple(old[0].cells) != self.columns:
                raise ValueError(f"{path} has other columns: {', '.join(old[0].cells)}")
            rows = {row.key: row.cells for row in old if row.key != without}
            for cells in new:
                row = self.row({column: str(cells[column]) for column in self.columns}, str(path))
                rows[row.key] = row.cells
            rewrite(path, self.columns, [rows[key] for key in sorted(rows, key=lambda key: key.order())])
        cache_clear()


@remembered
def load(table: Table, name: str) -> tuple[Row, ...]:
    """Every row of the file of that name, in file order; none where there is no such file."""
    path = table.folder / f"{name}.csv"
    return tuple(table.read(path)) if path.exists() else ()


@remembered
def find_row(table: Table, names: tuple[str, ...], key: Any) -> Row | None:
    """The first row of these files that matches."""
    return next((row for name in names for row in load(table, name) if row.key.matches(key)), None)


def lines(path: pathlib.Path, needed: tuple, lacks: str, uneven: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The place and the cells of each line but the first.

    Raises ValueError that names the place, in the words of the format: `lacks` where columns are missing,
    `uneven` where a row has more or fewer cells.
    """
    try:
        with opened(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            columns = [name.strip() for name in next(reader, [])]
            if missing := [name for name in needed if name not in columns]:
                raise SettingError(lacks.format(path, missing=", ".join(missing), needed=", ".join(needed)))
            for cells in filter(None, reader):
                where = f"{path}, line {reader.line_num}"
                if len(cells) != len(columns):
                    raise SettingError(f"{where}: {uneven.format(len(cells), len(columns))}")
                yield where, dict(zip(columns, map(str.strip, cells), strict=True))
    except (csv.Error, UnicodeError) as error:
        raise SettingError(f"{path} is not a table: {error}") from error


@contextlib.contextmanager
def changing(path: pathlib.Path) -> Iterator[None]:
    """Keep other processes from changing a table from before it is read until after it is written.

    Waits up to a minute for them, then raises BlockingIOError, which names the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock"), seconds=60):
        yield


def rewrite(path: pathlib.Path, columns: Iterable[str], rows: Iterable[dict]) -> None:
    """Replace a file by these rows, inside `changing`."""
    with drafted(path, newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
