"""`moe-aiter bench segment`: segment GEMM beside its peers, for LoRA, decoding and dense segments.

Every contender is checked against float64 first, then all are timed in turn, on a GPU with nothing in the L2
cache: as a CUDA graph or, if that cannot be, launched one by one while the GPU waits.  The host's time stands
beside.  So does a copy that reads and writes as many bytes as the product must.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.grouped.segment_gmm import segment_gmm_reference
from ..layers.segment import SegmentGEMMWrapper
from .measure import (
    FLOOR,
    PEER_ERRORS,
    REPS,
    SLACK,
    append,
    columns,
    copier,
    distances,
    kernels,
    provenance,
    refuse,
    time_calls,
    time_kernels,
)

FIELDS = [
    *("date", "commit", "device", "torch", "triton", "dtype"),
    *("case", "segments", "rows", "d_in", "d_out", "weights"),
    *("contender", "launch", "us", "host_us", "tflops", "gb_per_s", "copy_percent", "error"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """`segments` of `length` rows on average, half of it at least, through `weights` in turn."""

    segments: int
    length: int
    d_in: int
    d_out: int
    weights: int

    @property
    def lens(self) -> list[int]:
        """Ragged, but as many rows in all whatever the seed."""
        half = self.length // 2
        more = torch.randint(0, half + 1, (self.segments // 2,), generator=torch.Generator().manual_seed(0))
        pairs = torch.stack([self.length - more, self.length + more], 1).flatten().tolist()
        return pairs + [self.length] * (self.segments % 2)


CASES = {
    "lora-shrink": Case(64, 64, 4096, 16, 64),
    "lora-expand": Case(64, 64, 16, 4096, 64),
    "decode-shrink": Case(256, 1, 4096, 64, 256),
    "decode-expand": Case(256, 1, 64, 4096, 256),
    "dense": Case(8, 1000, 4096, 4096, 8),
    "dense-shared": Case(8, 1000, 4096, 4096, 2),
    "dense-many": Case(128, 256, 2048, 2048, 128),
    "toy": Case(5, 3, 24, 8, 5),  # for tests
    "toy-shared": Case(5, 3, 70, 8, 2),
}
REAL = [name for name in CASES if not name.startswith("toy")]
DEFAULT = {"cuda": REAL, "cpu": [name for name in REAL if not name.startswith("dense")]}


@dataclasses.dataclass
class Problem:
    """The tensors of a case: weights (W, d_out, d_in), and the segments on the device and on the host."""

    case: Case
    x: Tensor
    weights: Tensor
    indptr: Tensor
    numbers: Tensor | None  # the weight of each segment, where weights are shared

    @property
    def bytes(self) -> int:
        """What has to be read and written, each weight once."""
        return (self.x.numel() + self.weights.numel() + len(self.x) * self.case.d_out) * self.x.element_size()

    @property
    def flops(self) -> int:
        return 2 * len(self.x) * self.case.d_in * self.case.d_out

    def reference(self, dtype: torch.dtype) -> Tensor:
        weights = self.weights.to(dtype).mT
        return segment_gmm_reference(self.x.to(dtype), weights, None, self.indptr, self.numbers)


def new_problem(case: Case, device: torch.device, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(sum(case.lens), case.d_in, device=device, dtype=dtype)
    weights = torch.randn(case.weights, case.d_out, case.d_in, device=device, dtype=dtype)
    indptr = torch.tensor([0, *case.lens], device=device).cumsum(0)
    shared = case.weights != case.segments
    numbers = torch.arange(case.segments, device=device) % case.weights if shared else None
    return Problem(case, x, weights.mul_(case.d_in**-0.5), indptr, numbers)


def contenders(p: Problem) -> dict[str, Callable[[], Tensor]]:
    """Name -> the product; the copy computes nothing."""
    workspace = torch.empty(2**20, dtype=torch.int8, device=p.x.device)
    call = (p.x, p.weights, p.case.segments, True, None, p.indptr, p.numbers)
    lens, w = p.case.lens, p.weights.mT
    order = range(len(lens)) if p.numbers is None else p.numbers.tolist()
    found = {
        "moe_aiter": functools.partial(SegmentGEMMWrapper(workspace).run, *call),
        "torch loop": lambda: torch.cat([r @ w[i] for i, r in zip(order, p.x.split(lens), strict=True)]),
    }
    if p.numbers is None:
        ends = p.indptr[1:].int()
        found["torch._grouped_mm"] = lambda: torch._grouped_mm(p.x, w, offs=ends)
    if p.x.is_cuda:
        found["flashinfer"] = flashinfer(call, p.x)
    return found | {"copy": copier(p.bytes, p.x.device)}


def flashinfer(call: tuple, x: Tensor) -> Callable[[], Tensor]:
    """Imported at the first call, with its output given, as in its own benchmark."""

    @functools.cache
    def made() -> tuple:
        from flashinfer import SegmentGEMMWrapper as Theirs

        workspace = torch.empty(32 * 2**20, dtype=torch.int8, device=x.device)
        return Theirs(workspace, backend="auto"), x.new_empty(len(x), call[1].shape[1])

    def run() -> Tensor:
        wrapper, out = made()
        *head, lens, indptr, numbers = call
        named = {"seg_lens": lens, "seg_indptr": indptr, "weight_indices": numbers}
        return wrapper.run(*head, out=out, **named)

    return run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = f"of {', '.join(CASES)}; on a GPU all but toys, on a CPU those of lora and decode unless given"
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="NAME", help=names)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float16")


def run(args: argparse.Namespace) -> int:
    """Measure every case asked for; 1 if ours was not as good as torch."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        return refuse("bench segment", "there is no GPU that torch can use")
    if args.out and args.out.is_file() and columns(args.out) != FIELDS:
        return refuse("bench segment", f"{args.out} has other columns: {', '.join(columns(args.out))}")
    device, dtype = torch.device(kind), getattr(torch, args.dtype)
    where = provenance(device, args.dtype, args.commit)
    print(", ".join(f"{k} {v}" for k, v in where.items()))
    wrong = False
    for name in args.case or DEFAULT[kind]:
        case = CASES[name]
        print(f"\n{name}: {case}")
        rows = measure(new_problem(case, device, dtype), args.reps or REPS[kind])
        wrong = wrong or not any(row["contender"] == "moe_aiter" for row in rows)
        sizes = {"segments": case.segments, "rows": sum(case.lens), "d_in": case.d_in, "d_out": case.d_out}
        about = where | {"case": name} | sizes | {"weights": case.weights}
        if args.out:
            append(args.out, [about | row for row in rows], FIELDS)
    return int(wrong)


@torch.no_grad()
def measure(p: Problem, reps: int) -> list[dict]:
    """A row for each contender that is right, and for the copy; a line of each is printed."""
    exact = p.reference(torch.float64)
    (bar,) = distances([p.reference(p.x.dtype)], [exact])
    rows, runs, calls = [], [], []
    for name, call in contenders(p).items():
        row = {"contender": name}
        try:
            got = call()
            run, row["launch"] = kernels(call, p.x.is_cuda, name == "moe_aiter")
        except PEER_ERRORS as error:
            if name == "moe_aiter":
                raise
            print(f"{name} cannot run here: {error}")
            continue
        if name != "copy":
            (row["error"],) = distances([got], [exact])
            if not row["error"] <= SLACK * bar + FLOOR:
                print(f"{name}: error {row['error']:.1e}, torch {bar:.1e}")
                continue
        rows.append(row)
        runs.append(run)
        calls.append(call)
    del exact
    if p.x.is_cuda:
        times = time_kernels(runs, reps, lead=True)
        hosts = time_calls(calls, reps, wait=torch.cuda.synchronize)
    else:
        times = hosts = time_calls(calls, reps)
    for row, us, host in zip(rows, times, hosts, strict=True):
        row |= {"us": us, "host_us": host, "gb_per_s": p.bytes / us / 1e3}
        row["copy_percent"] = 100 * times[-1] / us
        if row["contender"] != "copy":
            row["tflops"] = p.flops / us / 1e6
        print(
            f"{row['contender']:<18} {us:9.1f} us, host {host:7.1f} us, {row.get('tflops', 0):7.2f} TFLOP/s, "
            f"{row['gb_per_s']:5.0f} GB/s, {row['copy_percent']:3.0f} % of a copy, {row['launch']}"
        )
    return rows
