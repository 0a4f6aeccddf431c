"""Who computes a product that torch has as well: a row of the table of choices.

The kernels run with the tiles that won, and torch as the backend of that name does, epilogue included.
"""

import functools
from collections.abc import Callable

from ..tuning import Config
from ..tuning.table import Key
from .products import as_tuple
from .tiles import Kernel, poison
from .timing import time_graphs

CLEAR = 0.99  # of torch's time; between two launches of the same kernel there is less


def choose(kernel: Kernel, tiles: dict[Key, Config], reps: int) -> tuple[dict, list[str]]:
    """The cells of a row, none where torch is alone, and the backends that are not as good as torch."""
    runs, wrong, accept, outs = {}, [], kernel.judge(), as_tuple(kernel.outs)
    for backend, run in launched(kernel, tiles).items():
        poison(outs)
        run()
        if accept(outs):
            runs[backend] = run
        else:
            wrong.append(backend)
    if "torch" not in runs or len(runs) == 1:
        return {}, wrong
    times = dict(zip(runs, time_graphs(list(runs.values()), reps), strict=True))
    backend, us = decided(times)
    print(f"{kernel.name:<35} {words(times)} us -> {backend}", flush=True)
    figures = {"us": f"{us:.1f}", "torch_us": f"{times['torch']:.1f}"}
    cells = {name: "" if cell is None else cell for name, cell in kernel.case._asdict().items()}
    return cells | {"backend": backend} | figures, wrong


def launched(kernel: Kernel, tiles: dict[Key, Config]) -> dict[str, Callable[[], None]]:
    """By backend, each kernel with the tile that won, or that of the tables where none was measured."""
    runs = {}
    for backend, product in kernel.products().items():
        tile = tiles.get(product.key()) if kernel.tiled else None
        runs[backend] = functools.partial(product.run_with, tile) if tile else product.run
    launch, inputs = kernel.launches["torch"]
    return runs | {"torch": functools.partial(launch, kernel.outs, *inputs)}


def decided(times: dict[str, float]) -> tuple[str, float]:
    """The backend that is chosen, and the time of the fastest kernel: only what is clearly faster than torch
    is."""
    best = min((name for name in times if name != "torch"), key=times.__getitem__)
    return best if times[best] <= CLEAR * times["torch"] else "torch", times[best]


def words(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {us:.1f}" for name, us in times.items())
