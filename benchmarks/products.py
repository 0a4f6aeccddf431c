"""Products and how they are timed: by kernels, beside a copy of as many bytes, and held to goals.

A family of `python -m benchmarks gemm` is a module beside this one with a list CASES.  A case makes what is
compared:

    def make(**kind):  # a device and a dtype
        x, w = ...
        contenders = {"moe_aiter": lambda: gemm(x, w), "torch": lambda: x @ w}
        return Compared(contenders, exact=lambda: x.double() @ w.double(), plain=lambda: x @ w)

    CASES = [
        Comparison("2048", "2048x2048x2048", make, flops=2 * 2048**3, bytes=6 * 2048**2, goals={"torch": 1})
    ]

Contenders, exact and plain are functions of nothing that return a tensor or a tuple of them, without gradient
unless they ask for it.  `moe_aiter` is what a user calls, which the goals are about; other names that begin
so are ours as well.  `plain` is plain torch in the dtype, whose error is the bar; without it the bar is the
truth, rounded.  A goal names a contender, and how many times as fast as it `moe_aiter` should be at least;
the contender `copy`, which reads and writes `bytes` altogether, is there where a goal names it.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from moe_aiter.bench.cases import Case, Tunable
from moe_aiter.bench.command import Contest, Error, Judge, errors_of
from moe_aiter.bench.measure import (
    PEER_ERRORS,
    Contender,
    Outputs,
    Times,
    as_tuple,
    captured,
    distances,
    kernel_times,
    time_calls,
)  # fmt: skip

OURS, COPY = "moe_aiter", "copy"
PAGE = 4096  # bytes


@dataclasses.dataclass
class Product(Contender):
    flops: float | None = None  # what has to be multiplied and added
    bytes: int | None = None  # what has to be read and written


class Compared(NamedTuple):
    """Contenders by name, and the truth: functions of nothing."""

    contenders: dict[str, Callable[[], Outputs]]
    exact: Callable[[], Outputs]  # in float64
    plain: Callable[[], Outputs] | None = None  # what torch makes of it in this dtype


@dataclasses.dataclass(frozen=True)
class Comparison(Case):
    """A case with its contenders: `make` returns what is Compared."""

    flops: float | None = None
    bytes: int | None = None  # in the first of `dtypes`
    goals: Mapping[str, float] = dataclasses.field(default_factory=dict)


def compared(case: Case, contenders: Callable[[Tunable], dict], plain: bool = True, **work) -> Comparison:
    """Return a case of `moe-aiter tune` with contenders, made of its operands."""

    def make(*sizes, **kind) -> Compared:
        operands = case.make(*sizes, **kind)
        exact = functools.partial(operands.by_torch, torch.float64)
        return Compared(contenders(operands), exact, operands.by_torch if plain else None)

    return Comparison(**vars(case) | {"make": make} | work)


def contest(case: Comparison, device: torch.device, dtype: torch.dtype) -> Contest:
    """Return the contenders of a case, and a copy if a goal names it."""
    found, exact, plain = case.make(*case.sizes, device=device, dtype=dtype)
    work = {"flops": case.flops, "bytes": case.bytes}
    field = [Product(name, call, ours=name.startswith(OURS), **work) for name, call in found.items()]
    field += [copy_of(case.bytes, device)] if COPY in case.goals else []

    def compare(rows: list[dict]) -> None:
        ours = next((row["us"] for row in rows if row["contender"] == OURS), None)
        for row in rows if ours is not None else ():
            goal = case.goals.get(row["contender"])
            row |= {"ratio": row["us"] / ours} | ({"goal": goal} if goal else {})

    return Contest(field, by_truth(exact, plain), KernelTimer(device), compare)


@torch.no_grad()
def by_truth(exact: Callable[[], Outputs], plain: Callable[[], Outputs] | None) -> Judge:
    """Judge by the exact result and by plain torch."""
    truth = as_tuple(exact())
    bars = None if plain is None else distances(as_tuple(plain()), truth)

    @torch.no_grad()
    def judge(contender: Contender) -> list[Error]:
        return errors_of(as_tuple(contender.run()), truth, bars) if contender.checked else []

    return judge


def copy_of(size: int, device: torch.device, name: str = COPY, **cells) -> Product:
    """Return a contender that copies: it reads and writes `size` bytes in total."""
    how = {"checked": False, "ours": True, "always": name == COPY}
    return Product(name, copier(size, device), bytes=size, cells=cells, **how)


class KernelTimer:
    """Times the kernels of products, as CUDA graphs where that can be; with `host` also the calls."""

    def __init__(self, device: torch.device, host: bool = False) -> None:
        self.on_gpu, self.host = device.type == "cuda", host
        self.field, self.runs, self.lead = [], [], False

    @torch.no_grad()
    def add(self, contender: Product) -> dict:
        run, how = kernels(contender.run, self.on_gpu, contender.ours)
        self.field.append(contender)
        self.runs.append(run)
        self.lead = self.lead or how == "eager"
        return {"launch": how}

    @torch.no_grad()
    def cells(self, reps: int) -> list[dict]:
        """Return the cells that each contender's row gets."""
        times = kernel_times(self.runs, reps, self.lead) if self.on_gpu else time_calls(self.runs, reps)
        hosts = times
        if self.host and self.on_gpu:
            hosts = time_calls([one.run for one in self.field], reps, wait=torch.cuda.synchronize)
        return [self.cells_of(*each) for each in zip(self.field, times, hosts, strict=True)]

    def cells_of(self, product: Product, times: Times, host: Times) -> dict:
        us = times.median
        cells = {"us": us, "host_us": host.median}
        cells |= {"ms": us / 1e3, "p20": times.p20 / 1e3, "p80": times.p80 / 1e3}
        cells |= {"gb_per_s": product.bytes / us / 1e3} if product.bytes else {}
        return cells | ({"tflops": product.flops / us / 1e6} if product.flops else {})


def copier(size: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes altogether, and as many more as fill the last page of each.

    Without these an H200 takes up to 1.5 times as long.
    """
    source, target = torch.empty(2, -(-size // (2 * PAGE)) * PAGE, dtype=torch.int8, device=device)
    return lambda: target.copy_(source)


def never_waits(call: Callable[[], object]) -> bool:
    """Whether a call leaves the host alone.  A capture that failed would leave torch's generator unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that this is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as mistake:
        if "synchronizing" not in str(mistake):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def kernels(call: Callable[[], object], on_gpu: bool, ours: bool) -> tuple[Callable[[], object], str]:
    """Return a function that launches the call's kernels, and how: ours must fit in a CUDA graph."""
    if not on_gpu or not (ours or never_waits(call)):
        return call, "eager"
    try:
        return captured(call).replay, "graph"
    except PEER_ERRORS:
        if ours:
            raise
        torch.cuda.synchronize()
        return call, "eager"
