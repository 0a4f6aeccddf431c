"""Milliseconds of each pass: contenders in turn, medians with the 20th and 80th percentiles."""

import dataclasses
import time
import warnings
from collections.abc import Callable

import torch

from .contender import PEER_ERRORS, Contender
from .memory import hand_back
from .problem import Problem

L2_BYTES = 256 * 2**20  # more than any GPU's L2 cache
PAGE = 4096  # bytes
WARMUP = 2
LEAD_CYCLES = 12_000_000  # some 6 ms in which the GPU waits for the host, which is ahead in training as well
HOST_REPS = 5
SLOW, SLOW_MS, SPARSE = 4, 50, 5  # on a GPU, where time is dear: see `who_is_slow`
PASSES = {"inference": 1, "forward": 1, "step": 3}  # and their products, in forward passes


@dataclasses.dataclass(frozen=True)
class Times:
    """Median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def summary(samples: list[float]) -> Times:
    quantiles = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8]).double())
    return Times(*quantiles.tolist())


def time_all(contenders: list[Contender], problem: Problem, reps: int) -> list[dict[str, Times]]:
    """The PASSES of each contender; each round has new inputs, and another order."""
    measure, flush = measure_cpu, hand_back
    if problem.x.is_cuda:
        flush_l2 = l2_flush(problem.x.device)
        measure, flush = measure_gpu, lambda: (torch.cuda._sleep(LEAD_CYCLES), flush_l2())
    samples: list[list[tuple[float, ...]]] = [[] for _ in contenders]
    slow: set[int] = set()
    for round in range(WARMUP + reps):
        problem.renew(round)
        results = []
        for turn in turns(len(contenders), round):
            if turn in slow and (round - WARMUP) % SPARSE:
                continue
            with contenders[turn].context():
                results.append((turn, measure(contenders[turn], problem, flush)))
        # read only now: a wait between contenders would time the host's launches, which training overlaps
        times = {turn: elapsed() for turn, elapsed in results}
        if round == WARMUP - 1 and problem.x.is_cuda:
            slow = who_is_slow(contenders, {turn: step for turn, (*_, step) in times.items()})
        elif round >= WARMUP:
            for turn, passes in times.items():
                samples[turn].append(passes)
    return [dict(zip(PASSES, map(summary, zip(*s, strict=True)), strict=True)) for s in samples]


def turns(count: int, round: int) -> list[int]:
    """Everyone once, in an order of each round's own: the clock of a GPU depends on who ran just before."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(round)).tolist()


def l2_flush(device: torch.device) -> Callable:
    return torch.empty(L2_BYTES, dtype=torch.int8, device=device).zero_


def who_is_slow(contenders: list[Contender], steps: dict[int, float]) -> set[int]:
    """Who takes SLOW times as long as the fastest, and SLOW_MS at least: one round in SPARSE is enough."""
    fastest = min((step for i, step in steps.items() if contenders[i].checked), default=0)
    return {i for i, step in steps.items() if step > max(SLOW * fastest, SLOW_MS)}


def run_passes(contender: Contender, problem: Problem, flush: Callable, mark: Callable) -> None:
    """Inference, then forward and backward, with a mark before and after each of the three."""
    flush()
    mark()
    with torch.no_grad():
        contender.run()
    mark()
    flush()
    mark()
    out = contender.run()
    mark()
    contender.gradients(out, problem)
    mark()


def measure_cpu(contender: Contender, problem: Problem, flush: Callable) -> Callable[[], tuple]:
    marks: list[float] = []
    run_passes(contender, problem, flush, lambda: marks.append(1e3 * time.perf_counter()))
    inference, inferred, start, forward, step = marks
    return lambda: (inferred - inference, forward - start, step - start)


def measure_gpu(contender: Contender, problem: Problem, flush: Callable) -> Callable[[], tuple]:
    marks: list[torch.cuda.Event] = []
    run_passes(contender, problem, flush, lambda: marks.append(recorded()))
    inference, inferred, start, forward, step = marks

    def elapsed() -> tuple:
        step.synchronize()
        return inference.elapsed_time(inferred), start.elapsed_time(forward), start.elapsed_time(step)

    return elapsed


def time_host(contender: Contender, problem: Problem) -> dict[str, Times]:
    """How long the host takes for each of the PASSES, from an idle GPU to the return of the last call."""
    with contender.context():
        samples = [measure_cpu(contender, problem, torch.cuda.synchronize)() for _ in range(HOST_REPS)]
    torch.cuda.synchronize()
    return dict(zip(PASSES, map(summary, zip(*samples, strict=True)), strict=True))


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_calls(runs: list[Callable[[], object]], reps: int, wait: Callable[[], object] = int) -> list[float]:
    """The median of `call_times`."""
    return [times.median for times in call_times(runs, reps, wait)]


def call_times(runs: list[Callable[[], object]], reps: int, wait: Callable[[], object] = int) -> list[Times]:
    """Microseconds until each call returns, all in turn, after a `wait` for those before."""
    samples: list[list[float]] = [[] for _ in runs]
    for round in range(WARMUP + reps):
        for turn in turns(len(runs), round):
            wait()
            start = time.perf_counter()
            runs[turn]()
            if round >= WARMUP:
                samples[turn].append(1e6 * (time.perf_counter() - start))
    return [summary(s) for s in samples]


def time_graphs(runs: list[Callable[[], object]], reps: int) -> list[float]:
    """Microseconds of kernels that have run before: the median of each, with nothing in the L2 cache.

    Each is replayed as a CUDA graph: a small one takes less time than Python needs to launch it.
    """
    return time_kernels([captured(run).replay for run in runs], reps, lead=False)


def time_kernels(runs: list[Callable[[], object]], reps: int, lead: bool) -> list[float]:
    """The same of whatever launches them, with a `lead` if the host needs longer than the GPU."""
    return [times.median for times in kernel_times(runs, reps, lead)]


def kernel_times(runs: list[Callable[[], object]], reps: int, lead: bool) -> list[Times]:
    """Microseconds, with more than the median; see `time_kernels`."""
    flush = l2_flush(torch.device("cuda"))
    marks: list[list[tuple]] = [[] for _ in runs]
    for round in range(reps):
        for turn in turns(len(runs), round):
            if lead:
                torch.cuda._sleep(LEAD_CYCLES)
            flush()
            start = recorded()
            runs[turn]()
            marks[turn].append((start, recorded()))
        torch.cuda.synchronize()
    return [summary([1e3 * start.elapsed_time(end) for start, end in pairs]) for pairs in marks]


def copier(size: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes altogether, and as many more as fill the last page of each.

    Without these an H200 takes up to 1.5 times as long.
    """
    source, target = torch.empty(2, -(-size // (2 * PAGE)) * PAGE, dtype=torch.int8, device=device)
    return lambda: target.copy_(source)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


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
    """What launches the kernels of a call, and how: ours must be what a CUDA graph can hold."""
    if not on_gpu or not (ours or never_waits(call)):
        return call, "eager"
    try:
        return captured(call).replay, "graph"
    except PEER_ERRORS:
        if ours:
            raise
        torch.cuda.synchronize()
        return call, "eager"
