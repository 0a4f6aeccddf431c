"""AITER's tuned products: its CSV files, read as they are.

    gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,...

A row says which library was the fastest for x (M, K) times weight (N, K) on a GPU with `cu_num` compute
units (multiprocessors); `gfx`, its architecture, is missing from older files.  Other columns are kept, and
none of them is needed but those of the key, `libtype` and `us`.

`MOE_AITER_CONFIG_GEMM_BF16`, or else AITER's own `AITER_CONFIG_GEMM_BF16`, lists the files.  They are merged
in memory, and never written to: of rows for the same key the lowest `us` counts, and the later path for the
same `us`.
"""

import csv
import dataclasses
import functools
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ..config import SettingError, settings
from ..files import opened
from ..op import invalidate_decisions
from . import bucket
from .table import changing, rewrite

log = logging.getLogger("moe_aiter")

UNTUNED = ("M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")
KEY = ("cu_num", *UNTUNED)
MEASURED = ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw")
COLUMNS = ("gfx", *KEY, *MEASURED, "provenance")  # as we write them; AITER passes over the last
NEEDED = (*KEY, "libtype", "us")
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "i8": "int8"}
WORDS = ("libtype", "kernelName")
WHOLE, FLOATS = ("solidx", "splitK"), ("us", "err_ratio", "tflops", "bw")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
BOOLS = {"0": False, "false": False, "1": True, "true": True}
NAMES = {"": None, "0": None, "1": "bf16_untuned_gemm.csv"}  # what MOE_AITER_TUNE_GEMM may be but a file
PADDINGS = ((256, 16), (1024, 32), (4096, 64))  # rows up to the first go to multiples of the second


class Problem(NamedTuple):
    """A product: what a row is looked up by, on one device."""

    M: int
    N: int
    K: int
    bias: bool
    dtype: torch.dtype
    out_dtype: torch.dtype
    scaled: bool = False
    shuffled: bool = False

    def cells(self) -> dict[str, str]:
        return dict(zip(UNTUNED, map(str, self), strict=True))


class Device(NamedTuple):
    """The device that a row was measured on; `gfx` is empty if the row does not say."""

    gfx: str
    units: int


@dataclasses.dataclass(frozen=True)
class Row:
    problem: Problem
    device: Device
    libtype: str  # in lower case
    us: float
    cells: dict[str, str]  # all of them

    def config(self) -> dict:
        """Return the row as AITER's `get_GEMM_A16W16_config` does."""
        rest = {name: text for name, text in self.cells.items() if name not in ("gfx", *KEY)}
        return {name: value(name, text) for name, text in rest.items()} | {"libtype": self.libtype}


def find(problem: Problem, device: Device) -> Row | None:
    """The row for this product on this device: of its M, or of the M that AITER pads it to; else None.

    Raises FileNotFoundError where none of several files is there, ValueError for a mistake in one of them.
    """
    return cached(problem, device, settings.config_gemm_bf16)


@functools.lru_cache(maxsize=4096)
def cached(problem: Problem, device: Device, paths: str) -> Row | None:
    table = load(paths, device)
    for M in (problem.M, padded(problem.M, problem.N, 0), padded(problem.M, problem.N, 1)):
        if row := table.get(problem._replace(M=M)):
            return row
    return None


def padded(rows: int, n: int, level: int) -> int:
    """The M whose row serves this M as well, as AITER has it."""
    if level:
        return 8192 if rows > 8192 and n > 4096 else bucket(rows)
    step = next((step for most, step in PADDINGS if rows <= most), 128)
    return -(-rows // step) * step


def cache_clear() -> None:
    """Forget what was read, and which sizes were recorded."""
    cached.cache_clear()
    load.cache_clear()
    recorded.cache_clear()
    invalidate_decisions()


find.cache_info, find.cache_clear = cached.cache_info, cache_clear


def this_device(device: torch.device) -> Device:
    """Return the device as a row names it: `cpu` with its threads, `sm90` or `gfx942` with its units."""
    return gpu(device) if device.type == "cuda" else Device(device.type, torch.get_num_threads())


@functools.cache
def gpu(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    name = f"sm{properties.major}{properties.minor}"
    if torch.version.hip:
        name = properties.gcnArchName.partition(":")[0]
    return Device(name, properties.multi_processor_count)


def current_device() -> torch.device:
    """Return the device on which a product would run."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# files


@functools.cache
def load(paths: str, device: Device) -> dict[Problem, Row]:
    """The rows of a list of files that are about this device."""
    files = existing(paths)
    rows = merge(row for path in files for row in read(path))
    mine = [row for (_, where), row in rows.items() if where in (device, Device("", device.units))]
    if len(mine) < len(rows):
        log.warning(
            "%s: %d of %d rows are of other devices than this one, %s with %d units",
            paths, len(rows) - len(mine), len(rows), *device,
        )  # fmt: skip
    # with and without gfx they are the same device: the faster one counts
    return {row.problem: row for row in sorted(mine, key=lambda row: -row.us)}


def existing(paths: str) -> list[pathlib.Path]:
    """Return the files of a list that exist."""
    files = [pathlib.Path(part.strip()).expanduser() for part in paths.split(os.pathsep) if part.strip()]
    found = [path for path in files if path.exists()]
    if len(files) > 1 and not found:
        raise FileNotFoundError(f"none of these files of tuned products is there: {paths}")
    for path in files:
        if path not in found:
            log.warning("there is no %s: it is left out", path)
    return found


def merge(rows: Iterable[Row]) -> dict[tuple[Problem, Device], Row]:
    """One row for each product and device; one warning says how many had several that differ."""
    best: dict[tuple[Problem, Device], Row] = {}
    several = {}
    for row in rows:
        key = row.problem, row.device
        if key in best and best[key] != row:
            several[key] = row
        if key not in best or row.us <= best[key].us:
            best[key] = row
    if several:
        (problem, _), *_ = several
        text = "%d tuned products have several rows, M=%d, N=%d, K=%d for one: the fastest counts"
        log.warning(text, len(several), *problem[:3])
    return best


def read(path: pathlib.Path) -> Iterator[Row]:
    """Every row of a file.  Raises ValueError that names the file and the line of a mistake."""
    for line, cells in lines(path, NEEDED):
        yield parse(cells, f"{path}, line {line}")


def read_untuned(path: pathlib.Path) -> list[Problem]:
    """The products of a file that AITER has written with `AITER_TUNE_GEMM=1`, each once."""
    found = [parse_problem(cells, f"{path}, line {line}") for line, cells in lines(path, UNTUNED)]
    return list(dict.fromkeys(found))


def lines(path: pathlib.Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """The number and the cells of each line but the first."""
    try:
        with opened(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            columns = [name.strip() for name in next(reader, [])]
            if missing := [name for name in needed if name not in columns]:
                raise SettingError(f"{path}, line 1: there are no columns {', '.join(missing)}")
            for cells in reader:
                if len(cells) != len(columns) and cells:
                    sizes = f"{len(cells)} cells under {len(columns)} columns"
                    raise SettingError(f"{path}, line {reader.line_num}: {sizes}")
                if cells:
                    yield reader.line_num, dict(zip(columns, map(str.strip, cells), strict=True))
    except (csv.Error, UnicodeError) as error:
        raise SettingError(f"{path} is not a table: {error}") from error


def parse(cells: dict[str, str], where: str) -> Row:
    device = Device(cells.get("gfx", "").lower(), whole(cells, "cu_num", where))
    us = number(cells["us"])
    if us is None or not 0 <= us < math.inf:  # NaN either
        raise SettingError(f"{where}: us is {cells['us']!r}; it must be a number, 0 or more")
    for column in WHOLE:
        if cells.get(column):
            whole(cells, column, where, least=-(2**63))
    for column in FLOATS:
        if cells.get(column) and number(cells[column]) is None:
            raise SettingError(f"{where}: {column} is {cells[column]!r}; it must be a number")
    if not cells["libtype"]:
        raise SettingError(f"{where}: libtype is empty")
    return Row(parse_problem(cells, where), device, cells["libtype"].lower(), float(us), cells)


def parse_problem(cells: dict[str, str], where: str) -> Problem:
    sizes = [whole(cells, column, where) for column in ("M", "N", "K")]
    bias, scaled, shuffled = (
        chosen(cells, column, where, BOOLS) for column in ("bias", "scaleAB", "bpreshuffle")
    )
    dtype, out_dtype = (chosen(cells, column, where, dtypes()) for column in ("dtype", "outdtype"))
    return Problem(*sizes, bias, dtype, out_dtype, scaled, shuffled)


def whole(cells: dict[str, str], column: str, where: str, least: int = 0) -> int:
    """A whole number, which may be spelt as 64.0 or 1e3: that is how pandas writes one."""
    found = number(cells[column])
    if found is None or not least <= found < 2**63 or found != int(found):
        words = "it must be a whole number" + (", 0 or more" if least == 0 else "")
        raise SettingError(f"{where}: {column} is {cells[column]!r}; {words}")
    return int(found)


def chosen(cells: dict[str, str], column: str, where: str, choices: dict):
    text = cells[column].lower().removeprefix("torch.")
    text = ALIASES.get(text, text)
    if text not in choices:
        raise SettingError(f"{where}: {column} is {cells[column]!r}; it takes {', '.join(choices)}")
    return choices[text]


def to_dtype(name: str, dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, which may be given as rows name it."""
    if isinstance(dtype, torch.dtype):
        if dtype not in dtypes().values():
            raise ValueError(f"{name} is {dtype}; it takes {', '.join(dtypes())}")
        return dtype
    return chosen({name: dtype}, name, "the product", dtypes())


@functools.cache
def dtypes() -> dict[str, torch.dtype]:
    """The dtypes of products, by torch's names."""
    names = ("bfloat16", "float16", "float32", "float64", "int8", "int32")
    names += ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    return {name: getattr(torch, name) for name in names}


def number(text: str) -> int | float | None:
    """Return the number in a cell, or None if the cell holds no number."""
    if not NUMBER.fullmatch(text):
        return None
    return int(text) if text.lstrip("+-").isdecimal() and len(text) < 20 else float(text)


def value(column: str, text: str) -> int | float | str:
    """Return a cell's value.  An empty cell of a number is the first solution, or NaN, as in pandas."""
    if column in WORDS:
        return text
    if column in WHOLE:
        return whole({column: text or "0"}, column, "the row", least=-(2**63))
    if column in FLOATS and not text:
        return math.nan
    found = number(text)
    return text if found is None else found


# what was seen


def record(problem: Problem) -> None:
    """Add a product to the file that `MOE_AITER_TUNE_GEMM` names, unless it is there or none is named."""
    name = NAMES.get(settings.tune_gemm, settings.tune_gemm)
    if name is None:
        return
    path = pathlib.Path(name).expanduser()
    seen = recorded(path)
    if problem not in seen:
        append(path, [problem.cells()], UNTUNED)
        seen.add(problem)


@functools.cache
def recorded(path: pathlib.Path) -> set[Problem]:
    return set(read_untuned(path)) if path.exists() and path.stat().st_size else set()


def append(path: pathlib.Path, rows: Iterable[dict[str, str]], columns: tuple[str, ...]) -> None:
    """Add rows at the end of a file, in the order of its own columns, or make one with these.

    Raises ValueError where the file lacks one of them that a row has.
    """
    rows = list(rows)
    with changing(path), opened(path, "a+", newline="") as file:
        file.seek(0)
        text = file.read()
        there = [name.strip() for name in next(csv.reader(text.removeprefix("\ufeff").splitlines()), [])]
        if there and (missing := {name for row in rows for name in row} - set(there)):
            raise ValueError(f"{path}, line 1: there are no columns {', '.join(sorted(missing))}")
        if text and not text.endswith("\n"):
            file.write("\n")
        writer = csv.DictWriter(file, there or columns, restval="", lineterminator="\n")
        if not there:
            writer.writeheader()
        writer.writerows(rows)


def drop(path: pathlib.Path, old: Row) -> None:
    """Take a row out of a file, which keeps its columns and its other rows."""
    with changing(path):
        rows = [cells for line, cells in lines(path, NEEDED) if parse(cells, f"{path}, line {line}") != old]
        rewrite(path, list(old.cells), rows)
