"""The shared part of all benchmarks: options, contenders, memory, times, the roofline, rows of a CSV."""

import argparse
import contextlib
import csv
import ctypes
import dataclasses
import datetime
import gc
import importlib.util
import pathlib
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..config import say
from ..files import opened, read_text, version
from ..op import use
from .problem import Problem, Shape, listed


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    if int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return int(text)


def add_contenders(parser: argparse.ArgumentParser, dtype: str | None = "bfloat16") -> None:
    if dtype:
        text, choices = f"dtype of inputs and weights [{dtype}]", ("bfloat16", "float16", "float32")
        parser.add_argument("--dtype", choices=choices, default=dtype, help=text)
    text = "run only contenders whose name contains one of these words"
    parser.add_argument("--only", nargs="+", metavar="WORD", help=text)


class ListNames(argparse.Action):
    """`--list`: print what `const` returns, a line or more for each part, and exit."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        for part in self.const().split("; "):
            print(textwrap.fill(part, 110, subsequent_indent="  ", break_on_hyphens=False))
        parser.exit()


def add_list(parser: argparse.ArgumentParser, names: Callable[[], str], of: str = "shapes") -> None:
    """Add `--list`; `names` is called only then."""
    parser.add_argument("--list", action=ListNames, nargs=0, const=names, help=f"print the names of {of}")


def add_shapes(parser: argparse.ArgumentParser, default: str, plain: bool = False) -> None:
    """Add `--shape`, whose words `named` reads, and `--list`."""
    names = "shapes or groups that --list prints, or sizes T,H,I,E,k"
    parser.add_argument("--shape", nargs="+", metavar="NAME", help=f"{names} [{default}]")
    add_list(parser, lambda: listed(plain), of="shapes and groups")


def add_measurement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device [cuda if there is a GPU, else cpu]")
    text = "[25 on a GPU, 5 for models; 11 on a CPU, 3 for lora, models, muon, offload]"
    parser.add_argument("--reps", type=count, metavar="N", help=f"timed runs of each contender {text}")
    text = "append the results to this file [none]"
    parser.add_argument("--out", type=pathlib.Path, metavar="CSV", help=text)
    parser.add_argument("--commit", help="commit to record [the one that git reports]")
    parser.set_defaults(prog=parser.prog)


def refuse(args: argparse.Namespace, mistake: str) -> int:
    """Say what is wrong with a command in one line; its status."""
    say(f"{args.prog}: error: {mistake}", file=sys.stderr)
    return 2


Outputs = Tensor | tuple[Tensor, ...]
PASSES = {"inference": 1, "forward": 1, "step": 3}  # of a layer, and their products, in forward passes


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclasses.dataclass
class Contender:
    """A function without arguments from the current inputs of a problem to its outputs."""

    name: str
    run: Callable[[], Outputs]
    leaves: tuple[Tensor, ...] = ()  # whose gradients a step computes; none where there is only a product
    routed: bool = False  # it chooses the experts itself
    expert_ids: Callable[[], Tensor] | None = None  # what it chooses, if not what problem.expert_ids says
    checked: bool = True  # False for a yardstick that computes something else
    ours: bool = False
    graphed: bool = False  # it runs from a CUDA graph, which keeps memory of its own
    backend: str | None = None  # forced, forward and backward
    around: Callable[[], contextlib.AbstractContextManager] | None = None  # what is entered before, untimed
    dout: tuple[Tensor, ...] | None = None  # if not problem.dout
    as_ours: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple  # its gradients -> as in leaves
    errors: tuple[type[Exception], ...] = ()  # that it raises, beside PEER_ERRORS
    always: bool = False  # whatever --only says
    cells: dict = dataclasses.field(default_factory=dict)  # of its row

    @property
    def passes(self) -> dict[str, int]:
        return PASSES if self.leaves else {"": 1}

    def results(self, p: Problem) -> list[Tensor]:
        """The outputs, and the gradients in our order."""
        with self.context():
            out = self.run()
            gradients = self.gradients(out, p)
        return [*(t.detach() for t in as_tuple(out)), *self.as_ours(gradients)]

    def gradients(self, out: Outputs, p: Problem) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, p.dout if self.dout is None else self.dout)

    def context(self) -> contextlib.AbstractContextManager:
        if self.around is not None:
            return self.around()
        return use(self.backend) if self.backend else contextlib.nullcontext()


def progress(items: Iterable, what: str, name: Callable[..., str] = str) -> Iterator:
    """Iterate with a progress bar on a terminal, if tqdm is installed, that shows the name of each item."""
    if importlib.util.find_spec("tqdm") is None:
        yield from items
        return
    from tqdm import tqdm

    with tqdm(items, desc=what, disable=None, leave=False) as bar:
        for item in bar:
            bar.set_postfix_str(name(item))
            yield item


EXTRAS = {"transformers": "hf", "peft": "peft"}  # the extra that installs a package


skipped: set[str] = set()  # the peers that `skip` named in this run; --only may name them


def skip(peer: str, error: Exception) -> None:
    """Print why a peer is not measured: a package is missing, or something else."""
    skipped.add(peer)
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        reason = f"{package} is not installed"
        if package in EXTRAS:
            reason += f": pip install '.[{EXTRAS[package]}]' in the source tree"
    print(f"skipping {peer}: {reason}")


PEER_ERRORS = (
    *(RuntimeError, ImportError, AttributeError, TypeError, ValueError),
    *(AssertionError, ArithmeticError, LookupError),
)


def built(peers: Iterable[tuple[str, Callable[[], Contender]]]) -> Iterator[Contender]:
    """Yield the contenders that can be built here, by name; print a line for each of the others."""
    for name, build in peers:
        try:
            yield build()
        except PEER_ERRORS as error:
            skip(name, error)


def parameter(x: Tensor) -> torch.nn.Parameter:
    """Return a parameter with the memory of `x`."""
    return torch.nn.Parameter(x.detach())


MIB = 2**20
STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def measure_memory(contender: Contender, problem: Problem) -> tuple[float, float] | None:
    """(held after forward, peak over forward and backward) in MiB, or None where nothing can tell.

    On a GPU what torch's allocator has given out.  On the CPU the resident memory of the process, which
    includes what the C++ extension and the matrix library take, after freed memory went back to the system.
    """
    cuda = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats
    gauge = cuda if problem.x.is_cuda else resident_gauge()
    if gauge is None:
        return None
    now, peak, reset = gauge
    gc.collect()
    reset()
    before = now()
    with contender.context():
        out = contender.run()
        held = now() - before
        gradients = contender.gradients(out, problem) if contender.leaves else ()
    highest = peak() - before
    del out, gradients
    return held / MIB, highest / MIB


def resident_gauge():
    """Functions for the bytes in use, the most since the reset, and the reset; None on systems but Linux."""
    if sys.platform != "linux" or not CLEAR.exists():
        return None

    def reset() -> None:
        hand_back()
        CLEAR.write_text("5")  # the high-water mark starts again

    return lambda: status_bytes("VmRSS"), lambda: status_bytes("VmHWM"), reset


def hand_back() -> None:
    """Return freed memory to the system, if the C library can: the next contender must not reuse it."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def status_bytes(field: str) -> int:
    line = next(line for line in read_text(STATUS).splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


L2_BYTES = 256 * 2**20  # more than any GPU's L2 cache
WARMUP = 2
LEAD_CYCLES = 12_000_000  # some 6 ms in which the GPU waits for the host, which is ahead in training as well
HOST_REPS = 5
SLOW, SLOW_MS, SPARSE = 4, 50, 5  # on a GPU, where time is dear: see `who_is_slow`


@dataclasses.dataclass(frozen=True)
class Times:
    """Median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def quantiles(samples: list[float]) -> Times:
    quantiles = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8]).double())
    return Times(*quantiles.tolist())


def time_all(
    contenders: list[Contender],
    problem: Problem,
    reps: int,
    align: Callable[[], object] = int,
    agree: Callable[[dict[int, tuple]], dict[int, tuple]] = dict,
) -> list[dict[str, Times]]:
    """The passes of each contender, in ms; each round has new inputs, and another order.

    Where contenders have a step, the host is ahead of the GPU, as in training.  Several ranks that measure
    together `align` before each pass, and `agree` on the times of each round.
    """
    measure, flush = measure_cpu, lambda: (hand_back(), align())
    if problem.x.is_cuda:
        flush_l2 = l2_flush(problem.x.device)
        lead = LEAD_CYCLES * any(contender.leaves for contender in contenders)
        measure, flush = measure_gpu, lambda: (torch.cuda._sleep(lead), flush_l2(), align())
    samples: list[list[tuple[float, ...]]] = [[] for _ in contenders]
    slow: set[int] = set()
    for round in progress(range(WARMUP + reps), "timing all", lambda round: f"round {round + 1}"):
        problem.renew(round)
        results = []
        for turn in order_of(len(contenders), round):
            if turn in slow and (round - WARMUP) % SPARSE:
                continue
            with contenders[turn].context():
                results.append((turn, measure(contenders[turn], problem, flush)))
        # read only now: a wait between contenders would time the host's launches, which training overlaps
        times = agree({turn: elapsed() for turn, elapsed in results})
        if round == WARMUP - 1 and problem.x.is_cuda:
            slow = who_is_slow(contenders, {turn: step for turn, (*_, step) in times.items()})
        elif round >= WARMUP:
            for turn, passes in times.items():
                samples[turn].append(passes)
    return [
        dict(zip(contender.passes, map(quantiles, zip(*s, strict=True)), strict=True))
        for contender, s in zip(contenders, samples, strict=True)
    ]


def order_of(count: int, round: int) -> list[int]:
    """Return all contenders in an order of this round: a GPU's clock depends on what ran just before."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(round)).tolist()


def l2_flush(device: torch.device) -> Callable:
    return torch.empty(L2_BYTES, dtype=torch.int8, device=device).zero_


def who_is_slow(contenders: list[Contender], steps: dict[int, float]) -> set[int]:
    """Return the contenders that take SLOW times the fastest's time, at least SLOW_MS: these run rarely."""
    fastest = min((step for i, step in steps.items() if contenders[i].checked), default=0)
    return {i for i, step in steps.items() if step > max(SLOW * fastest, SLOW_MS)}


def run_passes(contender: Contender, problem: Problem, flush: Callable, mark: Callable) -> None:
    """Inference, then forward and backward if there are leaves, with a mark before and after each."""
    flush()
    mark()
    with torch.no_grad():
        contender.run()
    mark()
    if not contender.leaves:
        return
    flush()
    mark()
    out = contender.run()
    mark()
    contender.gradients(out, problem)
    mark()


def measure_cpu(contender: Contender, problem: Problem, flush: Callable) -> Callable[[], tuple]:
    marks: list[float] = []
    run_passes(contender, problem, flush, lambda: marks.append(1e3 * time.perf_counter()))
    return lambda: tuple(end - start for start, end in pairs_of(marks))


def measure_gpu(contender: Contender, problem: Problem, flush: Callable) -> Callable[[], tuple]:
    marks: list[torch.cuda.Event] = []
    run_passes(contender, problem, flush, lambda: marks.append(event_now()))

    def elapsed() -> tuple:
        marks[-1].synchronize()
        return tuple(start.elapsed_time(end) for start, end in pairs_of(marks))

    return elapsed


def pairs_of(marks: list) -> list[tuple]:
    """Start and end of each pass; forward and step start together."""
    return list(zip(marks[:3:2] + marks[2:3], marks[1:2] + marks[3:], strict=True))


def time_host(contender: Contender, problem: Problem) -> dict[str, Times]:
    """Time the host for each of the PASSES, from an idle GPU to the return of the last call."""
    with contender.context():
        samples = [measure_cpu(contender, problem, torch.cuda.synchronize)() for _ in range(HOST_REPS)]
    torch.cuda.synchronize()
    return dict(zip(PASSES, map(quantiles, zip(*samples, strict=True)), strict=True))


def event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_calls(runs: list[Callable[[], object]], reps: int, wait: Callable[[], object] = int) -> list[Times]:
    """Microseconds until each call returns, all in turn, after a `wait` for those before."""
    samples: list[list[float]] = [[] for _ in runs]
    for round in range(WARMUP + reps):
        for turn in order_of(len(runs), round):
            wait()
            start = time.perf_counter()
            runs[turn]()
            if round >= WARMUP:
                samples[turn].append(1e6 * (time.perf_counter() - start))
    return [quantiles(s) for s in samples]


def time_graphs(runs: list[Callable[[], object]], reps: int) -> list[float]:
    """Microseconds of kernels that have run before: the median of each, with nothing in the L2 cache.

    Each is replayed as a CUDA graph: a small one takes less time than Python needs to launch it.
    """
    times = kernel_times([captured(run).replay for run in runs], reps, lead=False)
    return [t.median for t in times]


def kernel_times(runs: list[Callable[[], object]], reps: int, lead: bool) -> list[Times]:
    """Microseconds of what `runs` launch, with a `lead` if the host needs longer than the GPU."""
    flush = l2_flush(torch.device("cuda"))
    marks: list[list[tuple]] = [[] for _ in runs]
    for round in range(reps):
        for turn in order_of(len(runs), round):
            if lead:
                torch.cuda._sleep(LEAD_CYCLES)
            flush()
            start = event_now()
            runs[turn]()
            marks[turn].append((start, event_now()))
        torch.cuda.synchronize()
    return [quantiles([1e3 * start.elapsed_time(end) for start, end in pairs]) for pairs in marks]


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


class PassTimer:
    """Times each pass in rounds with new inputs and, where there is a step, the host and the memory."""

    def __init__(self, problem: Problem, flops: float) -> None:
        self.problem, self.flops, self.field = problem, flops, []

    def add(self, contender: Contender) -> dict:
        """Return the cells that the contender's row gets at once."""
        self.field.append(contender)
        return {}

    def cells(self, reps: int) -> list[dict]:
        """Return the cells that each contender's row gets."""
        return [self.cells_of(*pair) for pair in zip(self.field, self.times(reps), strict=True)]

    def times(self, reps: int) -> list[dict[str, Times]]:
        return time_all(self.field, self.problem, reps)

    def host(self, contender: Contender) -> dict[str, Times]:
        return time_host(contender, self.problem) if self.problem.x.is_cuda else {}

    def memory(self, contender: Contender) -> Sequence[float] | None:
        return measure_memory(contender, self.problem) if contender.leaves else None

    def cells_of(self, contender: Contender, times: dict[str, Times]) -> dict:
        row, trains = {}, bool(contender.leaves)
        host = self.host(contender) if trains else {}
        for name, t in times.items():
            prefix = f"{name}_" if name else ""
            row |= {f"{prefix}ms": t.median, f"{prefix}p20": t.p20, f"{prefix}p80": t.p80}
            row |= {f"{prefix}host_ms": host[name].median} if host else {}
            row[f"{prefix}tflops"] = contender.passes[name] * self.flops / sustained(row, prefix) / 1e9
        memory = None if contender.graphed else self.memory(contender)
        return row | (dict(zip(("held_mib", "peak_mib"), memory, strict=True)) if memory else {})


def sustained(row: dict, prefix: str) -> float:
    """Milliseconds of a pass when many follow each other: of the GPU, or of the host where it is slower."""
    return max(row[f"{prefix}ms"], row.get(f"{prefix}host_ms", 0.0))


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """The rates that a device reaches if nothing else slows it down, measured on one device."""

    flops: float  # each second, in a large dense product of bfloat16
    bytes: float  # each second, read and written by a copy


CEILINGS = {"NVIDIA H200": Ceiling(790e12, 4.3e12)}


def floors(shape: Shape, device: str) -> dict[str, float]:
    """Milliseconds of forward and of step on a device that we know; empty for others.

    16-bit numbers, every operand once, for the kernels of a layer that gathers as it multiplies and keeps X
    and Z only.  Router and plan are not counted.
    """
    ceiling = CEILINGS.get(device)
    if ceiling is None:
        return {}
    T, H, width, E, k = shape.sizes
    x, z, a, w = T * k * H, 2 * T * k * width, T * k * width, E * H * width  # numbers of each
    product, gather_sum = 2 * T * k * H * width, (T * k * H, x + T * H)
    forward = [
        (2 * product, x + 2 * w + z + a),  # up
        (product, a + w + x),  # down
        gather_sum,
    ]
    backward = [
        (product, x + w + 2 * z + a),  # dz, weighted activations and the gradient of routing weights
        (product, x + a + w),  # ddown
        (2 * product, z + 2 * w + x),  # rows of dx
        (2 * product, x + z + 2 * w),  # dgate_up
        gather_sum,
    ]

    def ms(kernels: list[tuple[int, int]]) -> float:
        return 1e3 * sum(max(f / ceiling.flops, 2 * n / ceiling.bytes) for f, n in kernels)

    return {"forward": ms(forward), "step": ms(forward + backward)}


REPS = {"cuda": 25, "cpu": 11}


SLACK, FLOOR = 2.0, 1e-7  # an error may be twice that of plain torch in the same dtype


def distances(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The relative distance of each tensor from the truth, in the Frobenius norm."""
    return [
        ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(got, exact, strict=True)
    ]


WHERE = ("date", "commit", "device", "torch", "triton", "dtype")  # columns of every CSV


def provenance(device: torch.device, dtype: str, commit: str | None = None) -> dict:
    """Return the cells that say how the figures were measured: date, commit, device, versions, dtype."""
    day, commit = datetime.date.today().isoformat(), commit or git_commit()
    cells = day, commit, device_name(device), torch.__version__, version("triton", "none"), dtype
    return dict(zip(WHERE, cells, strict=True))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    lines = read_text(info).splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def git_commit() -> str:
    """The short hash of the source tree, with + where it has been changed; unknown outside git."""
    here = pathlib.Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def check_columns(path: pathlib.Path | None, fields: list[str], added: Sequence[str] = ()) -> None:
    """Give an older file those of the `added` columns that it lacks, empty.

    Raises ValueError if a file has other columns.
    """
    if path is None or not path.exists():
        return
    try:
        with opened(path, newline="") as file:
            rows = list(reader := csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from None
    if (there := reader.fieldnames or []) == fields:
        return
    if there != [f for f in fields if f in there or f not in added]:
        raise ValueError(f"{path} has other columns: {', '.join(there)}")
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def append(path: pathlib.Path, rows: list[dict], fields: list[str]) -> None:
    """Add rows to a CSV, with its header where it is new; four digits say enough."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with opened(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
