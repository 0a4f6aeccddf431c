"""Tile configurations, looked up by op, GPU, dtype and shape.

Tuning is data: `tables/<arch>.csv`, one row a choice, the most specific row first.  An empty cell matches
anything, `rows` (rows of a group, on average) and `k` match up to their value, `n` matches exactly.
Nothing is tuned while a model trains.
"""

import csv
import dataclasses
import functools
import pathlib

import torch

from ..config import interpret

TABLES = pathlib.Path(__file__).parent / "tables"


@dataclasses.dataclass(frozen=True)
class Config:
    """One kernel's tile: rows x columns x contraction, and how the compiler may schedule it."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 1  # row tiles that walk the columns together, so that weights stay in L2
    num_warps: int = 4
    num_stages: int = 2


TOY = Config(block_m=16, block_n=32, block_k=16, group_m=2)  # the interpreter: several tiles at small sizes
FIELDS = [f.name for f in dataclasses.fields(Config)]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: what it matches, and the configuration it names."""

    op: str
    bits: int
    rows: int | None
    n: int | None
    k: int | None
    config: Config

    def matches(self, op: str, bits: int, rows: int, n: int, k: int) -> bool:
        return (
            (self.op, self.bits) == (op, bits)
            and (self.rows is None or rows <= self.rows)
            and (self.n is None or n == self.n)
            and (self.k is None or k <= self.k)
        )


@functools.cache
def load(arch: str) -> tuple[Row, ...]:
    """Every row of the table of one architecture, in file order."""
    with open(TABLES / f"{arch}.csv", newline="") as file:
        rows = [
            {k: int(v) if v.isdecimal() else v or None for k, v in r.items()} for r in csv.DictReader(file)
        ]
    keys = ("op", "bits", "rows", "n", "k")
    return tuple(Row(*(r[key] for key in keys), Config(*(r[f] for f in FIELDS))) for r in rows)


def table_name(backend: str, arch: int | str) -> str:
    """The table that serves a Triton target: its own, or that of the oldest GPU of its maker."""
    if backend == "hip":
        return arch if arch in ("gfx942", "gfx950") else "gfx942"
    # sm_86, sm_89 and sm_12x have the 99 KiB of shared memory that the sm_80 table stays below
    return {90: "sm90", 100: "sm100", 103: "sm100"}.get(arch, "sm80")


def lookup(op: str, dtype: torch.dtype, m: int, n: int, k: int, groups: int) -> Config:
    """The tile of `op` for M rows in `groups` groups, N columns, and K to sum over."""
    if interpret:
        return TOY
    import triton

    target = triton.runtime.driver.active.get_current_target()
    rows = bucket(triton.cdiv(m, max(groups, 1)))
    return find(table_name(target.backend, target.arch), op, dtype.itemsize * 8, rows, n, k)


@functools.lru_cache(maxsize=4096)
def find(table: str, op: str, bits: int, rows: int, n: int, k: int) -> Config:
    """The first row of a table that matches."""
    for row in load(table):
        if row.matches(op, bits, rows, n, k):
            return row.config
    raise LookupError(f"no row of {table}.csv matches {op}, {bits} bits, rows={rows}, n={n}, k={k}")


def bucket(m: int) -> int:
    """Round a row count up to a power of two, so that batches of similar size share a configuration."""
    return 1 << max(0, m - 1).bit_length()


def num_dies() -> int:
    """Chiplets with an L2 cache of their own: 8 on MI300 and MI350, 1 elsewhere."""
    if interpret:
        return 1
    import triton

    return 8 if triton.runtime.driver.active.get_current_target().backend == "hip" else 1
