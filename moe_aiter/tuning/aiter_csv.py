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
import functools
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from ..config import settings
from ..files import opened
from . import bucket
from .store import cache_clear, changing, lines, number, parsed, remembered, rewrite, whole_number, word

log = logging.getLogger("moe_aiter")

UNTUNED = ("M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")
KEY = ("cu_num", *UNTUNED)
MEASURED = ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw")
COLUMNS = ("gfx", *KEY, *MEASURED, "provenance")  # as we write them; AITER passes over the last
NEEDED = (*KEY, "libtype", "us")
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "i8": "int8"}
BOOLS = {"0": False, "false": False, "1": True, "true": True}
DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32")
DTYPES += ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
DTYPES = {name: getattr(torch, name) for name in DTYPES}
NAMES = {"": None, "0": None, "1": "bf16_untuned_gemm.csv"}  # what MOE_AITER_TUNE_GEMM may be but a file
PADDINGS = ((256, 16), (1024, 32), (4096, 64))  # rows up to the first go to multiples of the second


class GemmKey(NamedTuple):
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


class TunedRow(NamedTuple):
    problem: GemmKey
    device: Device
    libtype: str  # in lower case
    us: float
    cells: dict[str, str]  # all of them

    def config(self) -> dict:
        """Return the row as AITER's `get_GEMM_A16W16_config` does."""
        rest = {name: text for name, text in self.cells.items() if name not in ("gfx", *KEY)}
        return {name: PARSERS.get(name, number_or_text)(text) for name, text in rest.items()}


def find_tuned(problem: GemmKey, device: Device) -> TunedRow | None:
    """The row for this product on this device: of its M, or of the M that AITER pads it to; else None.

    Raises FileNotFoundError where none of several files is there, ValueError for a mistake in one of them.
    """
    return find_in(settings.config_gemm_bf16, problem, device)


@remembered
def find_in(paths: str, problem: GemmKey, device: Device) -> TunedRow | None:
    table = load_fastest(paths, device)
    for M in (problem.M, padded_m(problem.M, problem.N, 0), padded_m(problem.M, problem.N, 1)):
        if row := table.get(problem._replace(M=M)):
            return row
    return None


find_tuned.cache_info, find_tuned.cache_clear = find_in.cache_info, cache_clear


def padded_m(rows: int, n: int, level: int) -> int:
    """The M whose row serves this M as well, as AITER has it."""
    if level:
        return 8192 if rows > 8192 and n > 4096 else bucket(rows)
    step = next((step for most, step in PADDINGS if rows <= most), 128)
    return -(-rows // step) * step


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


@remembered
def load_fastest(paths: str, device: Device) -> dict[GemmKey, TunedRow]:
    """The fastest row of each product on this device, of a list of files; a warning says what is left out."""
    rows = [row for path in existing(paths) for row in read(path)]
    # with and without gfx they are the same device
    mine = [row for row in rows if row.device in (device, Device("", device.units))]
    if len(mine) < len(rows):
        text = "%s: %d of %d rows are of other devices than this one, %s with %d units"
        log.warning(text, paths, len(rows) - len(mine), len(rows), *device)
    best: dict[GemmKey, TunedRow] = {}
    several = {}
    for row in mine:
        other = best.setdefault(row.problem, row)
        if other != row:
            several[row.problem] = row
        if row.us <= other.us:
            best[row.problem] = row
    if several:
        text = "%d tuned products have several rows, M=%d, N=%d, K=%d for one: the fastest counts"
        log.warning(text, len(several), *next(iter(several))[:3])
    return best


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


def read(path: pathlib.Path) -> Iterator[TunedRow]:
    """Every row of a file.  Raises ValueError that names the file and the line of a mistake."""
    return (tuned_row(cells, where) for where, cells in lines_of(path, NEEDED))


def read_untuned(path: pathlib.Path) -> list[GemmKey]:
    """The products of a file that AITER has written with `AITER_TUNE_GEMM=1`, each once."""
    parsers = {column: PARSERS[column] for column in UNTUNED}
    products = (parsed(cells, parsers, where) for where, cells in lines_of(path, UNTUNED))
    return list(dict.fromkeys(GemmKey(*product.values()) for product in products))


def lines_of(path: pathlib.Path, needed: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    return lines(path, needed, "{}, line 1: there are no columns {missing}", "{} cells under {} columns")


def tuned_row(cells: dict[str, str], where: str) -> TunedRow:
    values = parsed(cells, PARSERS, where)
    device = Device(cells.get("gfx", "").lower(), values["cu_num"])
    return TunedRow(GemmKey(*map(values.get, UNTUNED)), device, values["libtype"], float(values["us"]), cells)


# cells

Value = TypeVar("Value")


def solution(text: str) -> int:
    """The number of a solution, the first where none is given."""
    return whole_number(text or "0", least=-(2**63))


def time(text: str) -> int | float:
    found = number(text)
    if found is None or not 0 <= found < math.inf:  # NaN either
        raise ValueError(f"{text!r}; it must be a number, 0 or more")
    return found


def figure(text: str) -> int | float:
    """A number, NaN where none is given, as in pandas."""
    found = number(text or "nan")
    if found is None:
        raise ValueError(f"{text!r}; it must be a number")
    return found


def one_of(choices: dict[str, Value], text: str) -> Value:
    name = text.lower().removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in choices:
        raise ValueError(f"{text!r}; it takes {', '.join(choices)}")
    return choices[name]


def number_or_text(text: str) -> int | float | str:
    found = number(text)
    return text if found is None else found


PARSERS = {
    **dict.fromkeys(("cu_num", "M", "N", "K"), whole_number),
    **dict.fromkeys(("bias", "scaleAB", "bpreshuffle"), functools.partial(one_of, BOOLS)),
    **dict.fromkeys(("dtype", "outdtype"), functools.partial(one_of, DTYPES)),
    "libtype": lambda text: word(text).lower(),
    **dict.fromkeys(("solidx", "splitK"), solution),
    "us": time,
    "kernelName": str,
    **dict.fromkeys(("err_ratio", "tflops", "bw"), figure),
}


def to_dtype(name: str, dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, which may be given as rows name it."""
    return parsed({name: str(dtype)}, {name: PARSERS["dtype"]}, "the product")[name]


# what was seen


def record(problem: GemmKey) -> None:
    """Add a product to the file that `MOE_AITER_TUNE_GEMM` names, unless it is there or none is named."""
    name = NAMES.get(settings.tune_gemm, settings.tune_gemm)
    if name is None:
        return
    path = pathlib.Path(name).expanduser()
    seen = recorded_products(path)
    if problem not in seen:
        add_rows(path, [problem.cells()], UNTUNED)
        seen.add(problem)


@remembered
def recorded_products(path: pathlib.Path) -> set[GemmKey]:
    return set(read_untuned(path)) if path.exists() and path.stat().st_size else set()


def add_rows(path: pathlib.Path, rows: Iterable[dict[str, str]], columns: tuple[str, ...]) -> None:
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


def drop(path: pathlib.Path, old: TunedRow) -> None:
    """Take a row out of a file, which keeps its columns and its other rows."""
    with changing(path):
        rewrite(path, list(old.cells), [row.cells for row in read(path) if row != old])
