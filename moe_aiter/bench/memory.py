"""Memory above what was there before: inputs, weights and dO are, the output and the gradients are not."""

import ctypes
import gc
import pathlib
import sys

import torch

from .contender import Contender
from .problem import Problem

MIB = 2**20
STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def measure_memory(contender: Contender, problem: Problem) -> tuple[float, float] | None:
    """(held after forward, peak over forward and backward) in MiB, or None where nothing can tell.

    On a GPU what torch's allocator has given out.  On the CPU the resident memory of the process, which
    includes what the C++ extension and the matrix library take, after freed memory went back to the system.
    """
    gauge = cuda_gauge() if problem.x.is_cuda else resident_gauge()
    if gauge is None:
        return None
    now, peak, reset = gauge
    gc.collect()
    reset()
    before = now()
    with contender.context():
        out = contender.run()
        held = now() - before
        gradients = contender.gradients(out, problem)
    highest = peak() - before
    del out, gradients
    return held / MIB, highest / MIB


def cuda_gauge():
    """Functions for the bytes in use, the most since the reset, and the reset."""
    return torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats


def resident_gauge():
    """The same from Linux; None elsewhere."""
    if sys.platform != "linux" or not CLEAR.exists():
        return None

    def reset() -> None:
        hand_back()
        CLEAR.write_text("5")  # the high-water mark starts again

    return lambda: status_bytes("VmRSS"), lambda: status_bytes("VmHWM"), reset


def hand_back() -> None:
    """Freed memory goes back to the system, where the C library can do that: who comes next finds none."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])
