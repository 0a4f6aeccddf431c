"""The tables of tiles: `tables/<GPU or architecture>.csv`, a row a choice."""

import dataclasses
from typing import NamedTuple

from .candidates import OPS, Config, is_legal, rule
from .cost import cheapest
from .store import PROVENANCE, TABLES, Table, find_row, member, optional, remembered, whole_number

FIELDS = tuple(f.name for f in dataclasses.fields(Config))
SIZES = ("block_m", "block_n", "block_k")


class Key(NamedTuple):
    """The key of a configuration.  In a table, None (an empty cell) matches anything."""

    op: str
    bits: int
    rows: int | None  # of a group, on average
    n: int | None
    k: int | None

    def matches(self, key: "Key") -> bool:
        """Whether a row with this key is the choice for `key`."""
        if self[:2] != key[:2] or self.n not in (None, key.n):
            return False
        # a row that names rows, n and k was measured there, and says nothing about much smaller products
        near = None not in self
        return reaches(self.rows, key.rows, near) and reaches(self.k, key.k, near)

    def order(self) -> tuple:
        cells = (self.n, self.k, self.rows)
        return self.op, self.bits, cells.count(None), *((cell is None, cell or 0) for cell in cells)


def reaches(limit: int | None, value: int, near: bool) -> bool:
    return limit is None or (limit // 2 if near else -1) < value <= limit


@remembered
def find_tile(names: tuple[str, ...], key: Key) -> Config:
    """The first row of these tables that matches, or what the rule says, or the tile that costs least.

    The last table is that of the architecture.
    """
    if row := find_row(TILES, names, key):
        return row.value
    if config := rule(key.op, key.n, key.k, key.rows) or cheapest(names[-1], *key):
        return config
    raise LookupError(f"no row of {' or '.join(names)} matches {key}")


def at_least_1(text: str) -> int:
    if text in ("", "0"):
        raise ValueError(f"{text!r}; it must be at least 1")
    return whole_number(text)


def entry(values: dict, where: str) -> tuple[Key, Config]:
    key = Key(*(values[column] for column in Key._fields))
    config = Config(**{column: values[column] for column in FIELDS if values[column] is not None})
    if not is_legal(key.op, config):
        raise ValueError(f"{where}: {key.op} has no tile {config}")
    return key, config


TILES = Table(
    TABLES,
    columns=(*Key._fields, *FIELDS, "us", "default_us", *PROVENANCE),
    parsers={
        **dict.fromkeys((*Key._fields, *FIELDS), optional(whole_number)),
        **dict.fromkeys(("bits", *SIZES), at_least_1),
        "op": lambda text: member(text, OPS, "known:"),
    },
    entry=entry,
    needed=(*Key._fields, *SIZES),
    lacks="{} lacks the columns {missing}",
)
