"""Which backend computes a product that torch could compute as well: what was measured decides.

`tables/choice/<GPU>.csv` has a row for each measured case.  The first row that matches is taken: `op`, `bits`
and `layout` match exactly, `n` and `k` too, `rows` up to a power of two; an empty cell matches anything.
Where no row matches, torch computes, unless the op says otherwise.
"""

import functools
from typing import NamedTuple

import torch

from . import bucket, gpu_table
from .store import PROVENANCE, TABLES, Table, find_row, load, member, optional, whole_number, word


class ChoiceKey(NamedTuple):
    """The key of a choice.  In a table, None (an empty cell) matches anything."""

    op: str
    bits: int
    layout: str | None  # of both operands, as the op defines it
    epilogue: str | None
    rows: int | None  # of all matrices, up to a power of two
    n: int | None
    k: int | None

    def matches(self, case: "ChoiceKey") -> bool:
        """Whether a row with this key is about `case`."""
        near = self.rows is None or self.rows // 2 < case.rows <= self.rows
        others = zip(self._replace(rows=None), case, strict=True)
        return near and all(mine in (None, theirs) for mine, theirs in others)

    def order(self) -> int:
        return self.count(None)


COLUMNS = (*ChoiceKey._fields, "backend", "us", "torch_us", *PROVENANCE)
CHOICES = Table(
    TABLES / "choice",
    COLUMNS,
    parsers={
        **dict.fromkeys(("rows", "n", "k"), optional(whole_number)),
        **dict.fromkeys(("layout", "epilogue"), optional(word)),
        "op": word,
        "bits": whole_number,
        "backend": lambda text: member(text, ("hopper", "triton", "torch")),
    },
    entry=lambda values, _: (ChoiceKey(*map(values.get, ChoiceKey._fields)), values["backend"]),
    needed=COLUMNS,
    lacks="{} has other columns than {needed}",
)


def choose_backend(
    op: str, x: torch.Tensor, layout: str, epilogue: str, rows: int, n: int, k: int, otherwise: str = "torch"
) -> str:  # fmt: skip
    """hopper, triton or torch, for `rows` rows of all matrices on the GPU of x; `otherwise` without a row."""
    row = find_row(CHOICES, (table_of_choices(x.device),), case_of(op, x, layout, epilogue, rows, n, k))
    return otherwise if row is None else row.value


def case_of(op: str, x: torch.Tensor, layout: str, epilogue: str, rows: int, n: int, k: int) -> ChoiceKey:
    """Return the key of a product of x."""
    return ChoiceKey(op, x.itemsize * 8, layout, epilogue, bucket(rows), n, k)


def measured(op: str, device: torch.device) -> set[str]:
    """Return the backends that were the fastest at an op in any measurement on this GPU."""
    return {row.value for row in load(CHOICES, table_of_choices(device)) if row.key.op == op}


@functools.cache
def table_of_choices(device: torch.device) -> str:
    return gpu_table(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
