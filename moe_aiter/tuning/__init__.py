"""Tile configurations, looked up by kernel, GPU, dtype and shape.

Tuning is data.  First comes the table of that GPU, `tables/h200.csv`, which `moe-aiter tune` writes; then
that of its architecture, `tables/sm90.csv`; then, for a Hopper kernel, the rule in `candidates.py`, or, for
a portable 16-bit product of experts, the tile that costs least by `cost.py`.  In a
table the first row that matches is taken: `n` matches exactly, `rows` (of a group on average, up to a power
of two) and `k` match up to their value, an empty cell matches anything.  A row without empty cells was
measured there, and reaches only down to half of its `rows` and `k`.  A row of the portable `up` or `gmm` for
few `rows` also decides that they run instead of Hopper's.  Nothing is tuned while a model trains.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable

import torch

from ..config import interpret
from ..invariance import batch_invariant
from ..op import SCOPES, decisions, log
from ..private_api import Scoped
from .candidates import Config, candidates, of_few_rows
from .store import find_row
from .table import TILES, Key, find_tile

FIXED_ROWS = 1024  # of a group, for which a tile is chosen where it must not depend on the batch
FEWEST_COLUMNS = 64  # that weights as the left operand of Hopper's instructions have
TOY = Config(block_m=16, block_n=32, block_k=16, group_m=2)  # the interpreter: several tiles at small sizes

_choose = Scoped("tile", None)  # a function that is asked before the tables
SCOPES.append(_choose)
_tables = Scoped("tables", ())


def lookup(op: str, dtype: torch.dtype, m: int, n: int, k: int, groups: int) -> Config:
    """The tile of `op` for M rows in `groups` groups, N columns, and K to sum over.

    Under batch invariance M counts only where every tile gives the same bits.
    """
    key = key_of(op, dtype, m, n, k, groups)
    if batch_invariant() and not keeps_bits(key):
        key = key._replace(rows=FIXED_ROWS)
    choice = _choose.get()
    config = None if choice is None else choice(key)
    if config is None and interpret:
        config = TOY
    elif config is None:
        config = find_tile(served(), key)
    log.debug("%s: tile %s", key, config)
    return config


def prefers_portable(op: str, dtype: torch.dtype, m: int, n: int, k: int, groups: int) -> bool:
    """Whether a table has a tile of the portable kernel `op` for so few rows of each group.

    Such rows are in a table because the tile is faster than the Hopper kernel.
    """
    key = key_of(op, dtype, m, n, k, groups)
    if not of_few_rows(op, key.rows):
        return False
    row = find_row(TILES, served(), key)
    return row is not None and of_few_rows(op, row.key.rows)


def keeps_bits(key: Key) -> bool:
    """Whether all tiles that rows of a group choose from give each sum the same bits.

    Hopper's kernels sum in one order, whatever their tile.  So do portable products of 16 bits where
    `has_one_order`.  `down_grad` also adds up partial sums of its columns, one for each column tile.
    Gradients of weights sum over the batch in any case.
    """
    if key.op.startswith("hopper_") or "tgmm" in key.op:
        return True
    same = key.op in ("up", "gmm") and key.bits == 16 and key.n >= FEWEST_COLUMNS
    return same and has_one_order()


def has_one_order() -> bool:
    """Whether matrix instructions for tiles of any size add up products of 16 bits in one order.

    Those of NVIDIA's GPUs before Blackwell do.
    """
    return not interpret and served()[-1] in ("sm80", "sm90")


def key_of(op: str, dtype: torch.dtype, m: int, n: int, k: int, groups: int) -> Key:
    """Return the key of a table for these sizes."""
    return Key(op, dtype.itemsize * 8, bucket(-(-m // max(groups, 1))), n, k)


@contextlib.contextmanager
def choose(function: Callable[[Key], Config | None]):
    """Inside the block `function` is asked first, and its choice is taken unless it is None.

    Only in this thread, and in the backward passes that it starts.  Each block asks anew.
    """
    with _choose.set(functools.partial(function)):
        yield


def decided_by() -> tuple:
    """Return what `lookup` depends on beside its arguments: a part of each key that keeps an answer."""
    return decisions(), _choose.get(), batch_invariant()


def default(key: Key) -> Config:
    """The choice where the table of this very GPU has none."""
    return find_tile(served()[-1:], key)


def to_try(key: Key) -> list[Config]:
    """The default, and then the other candidates."""
    arch = served()[-1]
    return list(dict.fromkeys([default(key), *candidates(key.op, key.rows, arch)]))


def served() -> tuple[str, ...]:
    """The tables of the current device, or inside `tables_of` those that it names."""
    if names := _tables.get():
        return names
    import triton

    return tables(triton.runtime.driver.active.get_current_device())


tables_of = _tables.set  # `with tables_of(("sm90",)):` looks up what another GPU would


@functools.cache
def tables(device: int) -> tuple[str, ...]:
    """The tables that serve a device, the one of its own first."""
    import triton

    target = triton.runtime.driver.active.get_current_target()
    arch = table_name(target.backend, target.arch)
    if device >= torch.cuda.device_count():  # a target to compile for, and no GPU that is there
        return (arch,)
    return gpu_table(torch.cuda.get_device_name(device)), arch


def gpu_table(name: str) -> str:
    """The table of a GPU by the name that torch gives it: NVIDIA H200 -> h200."""
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "_".join(word for word in words if word not in ("nvidia", "amd", "instinct")) or "unknown"


def table_name(backend: str, arch: int | str) -> str:
    """The table that serves a Triton target: its own, or that of the oldest GPU of its maker."""
    if backend == "hip":
        return arch if arch in ("gfx942", "gfx950") else "gfx942"
    # sm_86, sm_89 and sm_12x have the 99 KiB of shared memory that the sm_80 table stays below
    return {90: "sm90", 100: "sm100", 103: "sm100"}.get(arch, "sm80")


def has_gpu() -> bool:
    """Whether there is a GPU, or a stand-in for one, that Triton compiles for."""
    if interpret or importlib.util.find_spec("triton") is None:
        return False
    import triton

    try:
        return bool(triton.runtime.driver.active.get_current_target())
    except RuntimeError:  # no driver
        return False


def arch() -> str:
    """The GPU's architecture, gfx942 or sm90 say; cpu where there is none."""
    if not has_gpu():
        return "cpu"
    import triton

    target = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "hip" else f"sm{target.arch}"


def default_tile(op: str, dtype: torch.dtype, m: int, n: int, k: int, groups: int) -> Config:
    """`lookup`, and without a GPU the tile that fits all of them."""
    if interpret or has_gpu():
        return lookup(op, dtype, m, n, k, groups)
    return find_tile(("sm80",), key_of(op, dtype, m, n, k, groups))


def num_units() -> int:
    """Multiprocessors of the current GPU; where there is none, of what its name stands for, or of an H200."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return {"gfx942": 304, "gfx950": 256}.get(arch(), 132)


def bucket(m: int) -> int:
    """Round a row count up to a power of two, so that batches of similar size share a configuration."""
    return 1 << max(0, m - 1).bit_length()
