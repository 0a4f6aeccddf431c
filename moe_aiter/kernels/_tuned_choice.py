"""Who multiplies for `tuned_gemm`: the row of a user's file says, or else the house's own table."""

import functools
from collections.abc import Callable

import torch

from ..config import settings
from ..op import IMPLS, ORDER, forced, log, pick, runs
from ..tuning.aiter_csv import Problem, Row, current_device, find, record, this_device
from ..tuning.candidates import Config, candidates
from ..tuning.choice import choose_backend
from . import hopper
from ._gemm_choice import FEW, unmeasured

LIBRARIES = {  # what AITER calls `libtype`, and who multiplies here
    "torch": "torch",
    "hipblaslt": "torch",
    "asm": "torch",
    "skinny": "torch",
    "flydsl": "torch",
    "opus": "torch",
    "triton": "triton",
    "hopper": "hopper",
}
# whose tile a row may name: the `tiles` of the launchers
TILED = ("gemm", "gemm_row", "hopper_gemm", "hopper_few_rows")
DEFAULT = {"solidx": 0, "splitK": 0, "kernelName": ""}  # beside the libtype, where there is no row


def choose(problem: Problem, inputs: tuple) -> str:
    """Who multiplies `inputs`, those of the op `gemm`: torch, triton or hopper, maybe with "/" and a tile."""
    device = inputs[0].device
    row = find(problem, this_device(device)) if forced() == "auto" else None
    record(problem)
    if row is not None:
        backend = named(row.libtype, inputs) + tile_of(row)
    elif problem.shuffled:  # a copy in the usual order is for those who say that it is faster
        backend = "triton" if forced() != "torch" and is_here("triton", inputs) else "torch"
    else:
        implementation = pick("gemm", *inputs)
        backend = next(name for name, impl in IMPLS["gemm"].items() if impl is implementation)
    if settings.log_tuned_config:
        said = "no row" if row is None else f"the row of M={row.problem.M} says {row.libtype}"
        log.info("%s on %s: %s, %s multiplies", words(problem), device, said, backend)
    return backend


def named(libtype: str, inputs: tuple) -> str:
    """Our name for AITER's library, or torch where there is no such thing here."""
    backend = LIBRARIES.get(libtype, "torch")
    backend = backend if is_here(backend, inputs) else "torch"
    if backend != libtype:
        note(libtype, backend)
    return backend


def tile_of(row: Row) -> str:
    """The tile that a row of ours names, or nothing."""
    name = row.cells.get("kernelName", "")
    return f"/{name}" if any(named_tile(op, name) for op in TILED) else ""


@functools.lru_cache(maxsize=1024)
def named_tile(op: str, tile: str) -> Config | None:
    return next((config for config in candidates(op) if str(config) == tile), None) if op in TILED else None


def tile_option(launch: Callable, tile: str) -> dict[str, Config]:
    """What else a launcher of `gemm` is called with for the tile of that name; nothing where it has none.

    An argument, as nobody else's product, in another thread say, may have that tile.
    """
    configs = (named_tile(op, tile) for op in getattr(launch, "tiles", ()) if tile)
    return next(({"config": config} for config in configs if config), {})


def is_here(backend: str, inputs: tuple) -> bool:
    """Whether this implementation of `gemm` takes these inputs."""
    usable = backend in (*ORDER.get(inputs[0].device.type, ()), "torch")
    return usable and backend in IMPLS["gemm"] and runs(IMPLS["gemm"][backend], *inputs)


@functools.cache
def note(libtype: str, backend: str) -> None:
    log.warning("tuned products of %s are computed by %s here", libtype, backend)


def words(problem: Problem) -> str:
    M, N, K, *_ = problem
    flags = [name for name in ("bias", "scaled", "shuffled") if getattr(problem, name)]
    return ", ".join([f"M={M}, N={N}, K={K}", f"{problem.dtype} -> {problem.out_dtype}", *flags])


def tuned_config(problem: Problem) -> dict:
    """The cells of this device's row for a product, or the `libtype` that it gets without one; a dict of the
    caller's own."""
    device = current_device()
    row = find(problem, this_device(device))
    return {"libtype": usual(problem, device), **DEFAULT} if row is None else row.config()


def usual(problem: Problem, device: torch.device) -> str:
    """Who multiplies where no row says so."""
    if device.type == "cpu" or torch.float64 in (problem.dtype, problem.out_dtype):
        return "torch"
    if problem.shuffled or problem.dtype != problem.out_dtype:
        return "triton"
    M, N, K, bias, *_ = problem
    x = torch.empty(0, dtype=problem.dtype, device=device)
    epilogue, otherwise = "bias" if bias else "none", unmeasured((M, K), N * K, x.itemsize)
    backend = choose_backend("gemm", x, "nt", epilogue, M, N, K, otherwise)
    fits = hopper.is_hopper(device) and K % 8 == 0 and (M <= FEW or N % 8 == 0)
    return backend if backend != "hopper" or fits else "torch"
