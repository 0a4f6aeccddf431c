"""`moe-aiter bench gemm`: products by family, beside their baselines: each is checked, then timed.

A family is a module beside this one with a list CASES, and a line in FAMILIES.  A case makes a problem:

    def make(device, dtype, seed):
        x, w = ...
        return Problem(
            {"moe_aiter": lambda: gemm(x, w), "torch": lambda: x @ w},
            exact=lambda: x.double() @ w.double(),
            plain=lambda: x @ w,
        )

    CASES = [Case("2048", "2048x2048x2048", make, flops=2 * 2048**3, bytes=6 * 2048**2, goals={"torch": 1})]

Contenders, exact and plain are functions of nothing that return a tensor or a tuple of them, without gradient
unless they ask for it.  `moe_aiter` is what a user calls, which the goals are about; other names that begin
so are ours as well: those that are inaccurate make the command fail.  `plain` is plain torch in the dtype,
whose error is the bar; without it the bar is the truth, rounded.  A goal names a contender, and how many
times as fast as it `moe_aiter` should be at least; the contender `copy`, which reads and writes `bytes`
altogether, is there where a goal names it.
"""

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .measure import (
    FLOOR,
    PEER_ERRORS,
    REPS,
    SLACK,
    append,
    call_times,
    columns,
    copier,
    distances,
    kernel_times,
    kernels,
    provenance,
    refuse,
)

FAMILIES = {  # name -> module
    "dense": "dense",
    "torchlike": "torchlike",
    "sparse": "sparse",
    "scaled": "scaled",
}
OURS, COPY = "moe_aiter", "copy"
FIELDS = [
    *(
        "date",
        "commit",
        "device",
        "torch",
        "triton",
        "dtype",
        "family",
        "case",
        "shape",
        "contender",
        "launch",
    ),
    *("ms", "p20", "p80", "tflops", "gb_per_s", "ratio", "goal", "error", "torch_error"),
]
Outputs = Tensor | tuple[Tensor, ...]


@dataclasses.dataclass
class Problem:
    """Inputs, inside of these functions."""

    contenders: dict[str, Callable[[], Outputs]]
    exact: Callable[[], Outputs]  # in float64
    plain: Callable[[], Outputs] | None = None  # what torch makes of it in this dtype
    kernels: Callable[[], Iterable] | None = None  # those of `moe-aiter tune`: see tiles.py


@dataclasses.dataclass(frozen=True)
class Case:
    name: str  # of which a family has one
    shape: str  # MxNxK, say
    make: Callable[[torch.device, torch.dtype, int], Problem]  # with the seed of the inputs
    flops: float | None = None  # what has to be multiplied and added
    bytes: int | None = None  # what has to be read and written, in the first of `dtypes`
    goals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")  # torch's names, the usual one first
    devices: tuple[str, ...] = ("cuda",)  # where it is measured without being asked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    families = f"of {', '.join(FAMILIES)}; default all"
    parser.add_argument("--family", nargs="+", choices=FAMILIES, metavar="NAME", help=families)
    parser.add_argument(
        "--shape",
        nargs="+",
        metavar="WORD",
        help="cases whose name contains one of these words (toy, say), or whose shape is one; "
        "default: those meant for the device",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="contenders whose name contains one of these"
    )
    parser.add_argument("--dtype", help="default: that of the case, bfloat16 for most")


def run(args: argparse.Namespace) -> int:
    """Measure every case asked for; 1 if one of ours was not as good as torch."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        return refuse("bench gemm", "there is no GPU that torch can use")
    if args.out and args.out.is_file() and columns(args.out) != FIELDS:
        return refuse("bench gemm", f"{args.out} has other columns: {', '.join(columns(args.out))}")
    if args.out:
        append(args.out, [], FIELDS)  # a place that cannot be written shows now, not after the measurement
    found = list(chosen(args, kind))
    if not found:
        return refuse("bench gemm", no_case(args))
    device, reps = torch.device(kind), args.reps or REPS[kind]
    print(", ".join(f"{k} {v}" for k, v in provenance(device, "", args.commit).items() if v))
    wrong, verdicts = False, []
    for family, case in found:
        dtype = args.dtype or case.dtypes[0]
        print(f"\n{family}, {case.name} ({case.shape}), {dtype}")
        problem = case.make(device, getattr(torch, dtype), 0)
        if kind == "cpu" and kind not in case.devices:  # its goals are a GPU's
            case = dataclasses.replace(case, goals={})
        rows, bad = measure(case, problem, device, only=args.only, reps=reps)
        del problem  # before the next one is made
        wrong = wrong or bad
        verdicts += [(family, *verdict) for verdict in judged(case, rows)]
        about = provenance(device, dtype, args.commit) | {"family": family, "case": case.name}
        if args.out:
            append(args.out, [about | {"shape": case.shape} | row for row in rows], FIELDS)
    for family in dict.fromkeys(family for family, *_ in verdicts):
        print(summed_up(family, [verdict for name, *verdict in verdicts if name == family]))
    return int(wrong)


def cases(families: list[str] | None) -> Iterator[tuple[str, Case]]:
    """(family, case) of those families, or of all."""
    for family in families or FAMILIES:
        for case in importlib.import_module(f"{__package__}.{FAMILIES[family]}").CASES:
            yield family, case


def no_case(args: argparse.Namespace) -> str:
    """What --shape and --dtype could have named."""
    dtypes, named = {}, {}
    for family, case in cases(args.family):
        dtypes |= dict.fromkeys(case.dtypes)
        named.setdefault(family, []).append(case.name)
    if args.dtype not in (None, *dtypes):
        return f"there is no such case: --dtype is {args.dtype!r}; it takes {', '.join(dtypes)}"
    known = "; ".join(f"{family}: {', '.join(names)}" for family, names in named.items())
    return f"there is no such case{f' of {args.dtype}' if args.dtype else ''}; there are, of {known}"


def chosen(args: argparse.Namespace, kind: str) -> Iterator[tuple[str, Case]]:
    """(family, case): those that --shape names, or those for this device; of them those that take --dtype."""
    for family, case in cases(args.family):
        wanted = kind in case.devices
        if args.shape:
            wanted = any(word in (case.name, case.shape) or word in case.name for word in args.shape)
        if wanted and args.dtype in (None, *case.dtypes):
            yield family, case


@torch.no_grad()
def measure(
    case: Case, problem: Problem, device: torch.device, *, only: list[str] | None, reps: int
) -> tuple[list[dict], bool]:
    """A row and a line for each contender that is as good as torch, and whether one of ours is not."""
    exact = as_tuple(problem.exact())
    rows, runs, wrong = [], [], False
    bars = None if problem.plain is None else distances(as_tuple(problem.plain()), exact)
    contenders = {n: c for n, c in problem.contenders.items() if not only or any(word in n for word in only)}
    for name, call in contenders.items():
        try:
            got = as_tuple(call())
            far, bar = worst(got, exact, bars)
            if not far <= SLACK * bar + FLOOR:
                print(f"{name}: refused, its error is {far:.1e}, torch's {bar:.1e}")
                wrong = wrong or is_ours(name)
                continue
            launched, how = kernels(call, device.type == "cuda", is_ours(name))
        except PEER_ERRORS as mistake:
            if is_ours(name):
                raise
            print(f"{name} cannot run here: {type(mistake).__name__}: {mistake}")
            continue
        del got
        runs.append(launched)
        rows.append({"contender": name, "launch": how, "error": far, "torch_error": bar})
    if COPY in case.goals:
        launched, how = kernels(copier(case.bytes, device), device.type == "cuda", True)
        runs.append(launched)
        rows.append({"contender": COPY, "launch": how})
    lead = any(row["launch"] == "eager" for row in rows)
    times = kernel_times(runs, reps, lead=lead) if device.type == "cuda" else call_times(runs, reps)
    ours = next((t.median for row, t in zip(rows, times, strict=True) if row["contender"] == OURS), None)
    for row, t in zip(rows, times, strict=True):
        row |= {"ms": t.median / 1e3, "p20": t.p20 / 1e3, "p80": t.p80 / 1e3}
        row |= figures(case, row["contender"], t.median)
        if ours is not None:
            row |= {"ratio": t.median / ours, "goal": case.goals.get(row["contender"], "")}
        show(row)
    return rows, wrong


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def worst(got: tuple, exact: tuple, bars: list[float] | None) -> tuple[float, float]:
    """The error of the output that is the furthest from its bar, or NaN if any is, and that bar."""
    for ours, truth in zip(got, exact, strict=True):
        if ours.shape != truth.shape:
            raise ValueError(f"an output is {tuple(ours.shape)} instead of {tuple(truth.shape)}")
    if bars is None:
        bars = distances([truth.to(ours.dtype) for ours, truth in zip(got, exact, strict=True)], exact)
    pairs = list(zip(distances(got, exact), bars, strict=True))
    return max(pairs, key=lambda pair: float("inf") if pair[0] != pair[0] else pair[0] - SLACK * pair[1])


def figures(case: Case, name: str, us: float) -> dict:
    """TFLOP/s and GB/s, where the case says what there is to do."""
    rates = {"gb_per_s": case.bytes / us / 1e3} if case.bytes else {}
    return rates | ({"tflops": case.flops / us / 1e6} if case.flops and name != COPY else {})


def show(row: dict) -> None:
    cells = [f"{row['contender']:<32} {row['ms']:9.4f} ms"]
    cells += [f"{row['tflops']:8.2f} TFLOP/s"] if "tflops" in row else []
    cells += [f"{row['gb_per_s']:6.0f} GB/s"] if "gb_per_s" in row else []
    cells += [f"{row['error']:9.1e}"] if "error" in row else []
    cells += [f"ours {row['ratio']:.2f} x"] if "ratio" in row else []
    cells += [f"(goal {row['goal']})"] if row.get("goal") else []
    print(" ".join(cells), flush=True)


def judged(case: Case, rows: list[dict]) -> Iterator[tuple[str, bool]]:
    """Each goal in words, and whether it was met; none where it was not measured."""
    for row in rows:
        if row.get("goal"):
            words = f"{case.name} {row['ratio']:.2f} of {row['goal']} x {row['contender']}"
            yield words, row["ratio"] >= row["goal"]


def summed_up(family: str, verdicts: list[tuple[str, bool]]) -> str:
    missed = [words for words, met in verdicts if not met]
    head = f"{family}: {len(verdicts) - len(missed)} of {len(verdicts)} goals met"
    return "; missed: ".join([head, *([", ".join(missed)] if missed else [])])
