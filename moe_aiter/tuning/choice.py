"""Which backend computes a product that torch could compute as well: what was measured decides.

`tables/choice/<GPU>.csv` has a row for each measured case.  The first row that matches is taken: `op`, `bits`
and `layout` match exactly, `n` and `k` too, `rows` up to a power of two; an empty cell matches anything.
Where no row matches, torch computes, unless the op says otherwise.
"""

import csv
import functools
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..files import opened
from ..op import invalidate_decisions
from . import bucket, gpu_table
from .table import TABLES, changing, rewrite

BACKENDS = ("hopper", "triton", "torch")
CHOICES = TABLES / "choice"


class ChoiceKey(NamedTuple):
    """The key of a choice.  In a table, None (an empty cell) matches anything."""

    op: str
    bits: int
    layout: str | None  # of both operands, as the op defines it
    epilogue: str | None
    rows: int | None  # of all matrices, up to a power of two
    n: int | None
    k: int | None


class Choice(NamedTuple):
    case: ChoiceKey
    backend: str

    def matches(self, case: ChoiceKey) -> bool:
        rows = self.case.rows
        near = rows is None or rows // 2 < case.rows <= rows
        others = zip(self.case._replace(rows=None), case, strict=True)
        return near and all(mine in (None, theirs) for mine, theirs in others)


PROVENANCE = ("us", "torch_us", "gpu", "torch", "triton", "commit", "date")
COLUMNS = (*ChoiceKey._fields, "backend", *PROVENANCE)


def choose_backend(
    op: str, x: torch.Tensor, layout: str, epilogue: str, rows: int, n: int, k: int, otherwise: str = "torch"
) -> str:  # fmt: skip
    """hopper, triton or torch, for `rows` rows of all matrices on the GPU of x; `otherwise` without a row."""
    return find_choice(table_of(x.device), case_of(op, x, layout, epilogue, rows, n, k), otherwise)


def case_of(op: str, x: torch.Tensor, layout: str, epilogue: str, rows: int, n: int, k: int) -> ChoiceKey:
    """Return the key of a product of x."""
    return ChoiceKey(op, x.itemsize * 8, layout, epilogue, bucket(rows), n, k)


def measured(op: str, device: torch.device) -> set[str]:
    """Return the backends that were the fastest at an op in any measurement on this GPU."""
    return {choice.backend for choice in load_choices(table_of(device)) if choice.case.op == op}


@functools.cache
def table_of(device: torch.device) -> str:
    return gpu_table(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


@functools.lru_cache(maxsize=4096)
def find_choice(name: str, case: ChoiceKey, otherwise: str = "torch") -> str:
    return next((choice.backend for choice in load_choices(name) if choice.matches(case)), otherwise)


@functools.cache
def load_choices(name: str) -> tuple[Choice, ...]:
    """Every row of the table of that name, in file order; none where there is no such file."""
    path = CHOICES / f"{name}.csv"
    return tuple(choice for choice, _ in read_choices(path)) if path.exists() else ()


def cache_clear() -> None:
    """Read the tables again, and choose again, at the next call."""
    load_choices.cache_clear()
    find_choice.cache_clear()
    invalidate_decisions()


def read_choices(path: pathlib.Path) -> list[tuple[Choice, dict]]:
    """Every row of a table, and its cells.  Raises ValueError, in one line, where there is a mistake."""
    with opened(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has other columns than {', '.join(COLUMNS)}")
        return [(parse_choice(cells, f"{path}, line {reader.line_num}"), cells) for cells in reader]


def parse_choice(cells: dict, where: str) -> Choice:
    if None in cells or None in cells.values():
        raise ValueError(f"{where}: a row has as many cells as there are columns")
    numbers = {}
    for column in ("bits", "rows", "n", "k"):
        text = cells[column]
        if not (text.isdecimal() or (not text and column != "bits")):
            raise ValueError(f"{where}: {column} is {text!r}; it must be a whole number")
        numbers[column] = int(text) if text else None
    if cells["backend"] not in BACKENDS:
        raise ValueError(f"{where}: backend is {cells['backend']!r}; it takes {', '.join(BACKENDS)}")
    if not cells["op"]:
        raise ValueError(f"{where}: op is empty")
    words = {column: cells[column] or None for column in ("op", "layout", "epilogue")}
    return Choice(ChoiceKey(**words, **numbers), cells["backend"])


def write_choices(path: pathlib.Path, new: Iterable[dict]) -> None:
    """Add rows, dicts with COLUMNS, to a table, which need not be there; one of an old case replaces it.

    What has empty cells comes last, as the first that matches is taken.
    """
    with changing(path):
        rows = {choice.case: cells for choice, cells in read_choices(path)} if path.exists() else {}
        for cells in new:
            cells = {column: str(cells[column]) for column in COLUMNS}
            rows[parse_choice(cells, str(path)).case] = cells
        rewrite(path, COLUMNS, [rows[case] for case in sorted(rows, key=lambda case: case.count(None))])
    cache_clear()
