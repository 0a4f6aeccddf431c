"""The tables: `tables/<GPU or architecture>.csv`, a row a choice."""

import contextlib
import csv
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..files import drafted, locked, opened
from ..op import invalidate_decisions
from .candidates import OPS, Config, is_legal, rule
from .cost import cheapest

TABLES = pathlib.Path(__file__).parent / "tables"
FIELDS = [f.name for f in dataclasses.fields(Config)]


class Key(NamedTuple):
    """The key of a configuration.  In a table, None (an empty cell) matches anything."""

    op: str
    bits: int
    rows: int | None  # of a group, on average
    n: int | None
    k: int | None


PROVENANCE = ["us", "default_us", "gpu", "torch", "triton", "commit", "date"]
COLUMNS = [*Key._fields, *FIELDS, *PROVENANCE]  # of a table that `moe-aiter tune` writes


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: what it matches, and the configuration it names."""

    key: Key
    config: Config

    def matches(self, key: Key) -> bool:
        mine = self.key
        if (mine.op, mine.bits) != (key.op, key.bits) or mine.n not in (None, key.n):
            return False
        # a row that names rows, n and k was measured there, and says nothing about much smaller products
        near = None not in mine
        return reaches(mine.rows, key.rows, near) and reaches(mine.k, key.k, near)


def reaches(limit: int | None, value: int, near: bool) -> bool:
    return limit is None or (limit // 2 if near else -1) < value <= limit


@functools.cache
def load(name: str) -> tuple[Row, ...]:
    """Every row of the table of that name, in file order; none where there is no such file."""
    path = TABLES / f"{name}.csv"
    return tuple(row for row, _ in read(path)) if path.exists() else ()


@functools.lru_cache(maxsize=4096)
def find(names: tuple[str, ...], key: Key) -> Config:
    """The first row of these tables that matches, or what the rule says, or the tile that costs least.

    The last table is that of the architecture.
    """
    if row := find_row(names, key):
        return row.config
    if config := rule(key.op, key.n, key.k, key.rows) or cheapest(names[-1], *key):
        return config
    raise LookupError(f"no row of {' or '.join(names)} matches {key}")


def find_row(names: tuple[str, ...], key: Key) -> Row | None:
    return next((row for name in names for row in load(name) if row.matches(key)), None)


def cache_clear() -> None:
    """Read the tables again, and choose tiles again, at the next call."""
    load.cache_clear()
    find.cache_clear()
    invalidate_decisions()


def read(path: pathlib.Path) -> list[tuple[Row, dict]]:
    """Every row of a table, and its cells.  Raises ValueError, in one line, where there is a mistake."""
    try:
        with opened(path, newline="") as file:
            reader = csv.DictReader(file)
            needed = [*Key._fields, "block_m", "block_n", "block_k"]
            if missing := [c for c in needed if c not in (reader.fieldnames or ())]:
                raise ValueError(f"{path} lacks the columns {', '.join(missing)}")
            return [(parse(cells, f"{path}, line {reader.line_num}"), cells) for cells in reader]
    except (csv.Error, UnicodeError) as error:
        raise ValueError(f"{path} is not a table: {error}") from error


def parse(cells: dict, where: str) -> Row:
    if None in cells or None in cells.values():
        raise ValueError(f"{where}: a row has as many cells as there are columns")
    numbers = {}
    for column in (*Key._fields[1:], *FIELDS):
        text = cells.get(column, "")
        if text and not text.isdecimal():
            raise ValueError(f"{where}: {column} is {text!r}; it must be a whole number or empty")
        if text:
            numbers[column] = int(text)
    if cells["op"] not in OPS:
        raise ValueError(f"{where}: op is {cells['op']!r}; known: {', '.join(OPS)}")
    for column in ("bits", "block_m", "block_n", "block_k"):
        if not numbers.get(column):
            raise ValueError(f"{where}: {column} is {cells[column]!r}; it must be at least 1")
    key = Key(cells["op"], *(numbers.get(column) for column in Key._fields[1:]))
    config = Config(**{column: numbers[column] for column in FIELDS if column in numbers})
    if not is_legal(key.op, config):
        raise ValueError(f"{where}: {key.op} has no tile {config}")
    return Row(key, config)


def write(path: pathlib.Path, new: Iterable[dict], without: Key | None = None) -> None:
    """Add rows, dicts with COLUMNS, to a table, which need not be there; one with an old key replaces it.
    The row with the key `without` goes.

    The most specific comes first, as the first that matches is taken.
    """
    with changing(path):
        old = read(path) if path.exists() and path.stat().st_size else []
        if old and list(old[0][1]) != COLUMNS:
            raise ValueError(f"{path} has other columns: {', '.join(old[0][1])}")
        rows = {row.key: cells for row, cells in old if row.key != without}
        for cells in new:
            cells = {column: str(cells[column]) for column in COLUMNS}
            rows[parse(cells, str(path)).key] = cells
        rewrite(path, COLUMNS, [rows[key] for key in sorted(rows, key=specific_first)])
    cache_clear()


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


def specific_first(key: Key) -> tuple:
    cells = (key.n, key.k, key.rows)
    return key.op, key.bits, cells.count(None), *((cell is None, cell or 0) for cell in cells)
