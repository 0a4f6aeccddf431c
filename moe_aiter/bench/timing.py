"""Milliseconds of forward and step: contenders in turn, medians with the 20th and 80th percentiles."""

import dataclasses
import time
from collections.abc import Callable

import torch

from .contenders import Contender
from .problem import Problem

L2_BYTES = 256 * 2**20  # more than any GPU's L2 cache
WARMUP = 2


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds: median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def summary(samples: list[float]) -> Times:
    quantiles = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8]).double())
    return Times(*quantiles.tolist())


def time_all(contenders: list[Contender], problem: Problem, reps: int) -> list[tuple[Times, Times]]:
    """(forward, step) of each contender; each round has new inputs, and starts with another contender."""
    measure = measure_gpu if problem.x.is_cuda else measure_cpu
    flushed = problem.x.new_empty(L2_BYTES if problem.x.is_cuda else 0, dtype=torch.int8)
    samples: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for round in range(WARMUP + reps):
        problem.renew(round)
        results = []
        for i in range(len(contenders)):
            turn = (i + round) % len(contenders)
            flushed.zero_()
            with contenders[turn].context():
                results.append((turn, measure(contenders[turn], problem)))
        # read only now: a wait between contenders would time the host's launches, which training overlaps
        for turn, elapsed in results:
            if round >= WARMUP:
                samples[turn].append(elapsed())
    return [tuple(map(summary, zip(*s, strict=True))) for s in samples]


def measure_cpu(contender: Contender, problem: Problem) -> Callable[[], tuple[float, float]]:
    start = time.perf_counter()
    out = contender.run()
    forward = time.perf_counter()
    contender.gradients(out, problem)
    step = time.perf_counter()
    return lambda: (1e3 * (forward - start), 1e3 * (step - start))


def measure_gpu(contender: Contender, problem: Problem) -> Callable[[], tuple[float, float]]:
    start, forward, step = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    out = contender.run()
    forward.record()
    contender.gradients(out, problem)
    step.record()

    def elapsed() -> tuple[float, float]:
        step.synchronize()
        return start.elapsed_time(forward), start.elapsed_time(step)

    return elapsed
