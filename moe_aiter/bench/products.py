"""Cases: what `moe-aiter bench` measures; contenders of a case are checked, then timed, and become rows.

A family of `moe-aiter bench gemm` is a module beside this one with a list CASES, and a line in FAMILIES.
A case makes a problem:

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

Each of the other commands is a module with a COMMAND, which makes cases of its options; their problems may
have contenders with leaves, a judge and a timer of their own.
"""

import argparse
import collections
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .measure import (
    FLOOR,
    PEER_ERRORS,
    REPS,
    SLACK,
    WHERE,
    Contender,
    KernelTimer,
    Outputs,
    PassTimer,
    add_list,
    append,
    as_tuple,
    columns,
    copier,
    distances,
    progress,
    provenance,
    refuse,
    skipped,
    widen,
)

FAMILIES = {  # name -> module
    "dense": "dense",
    "torchlike": "torchlike",
    "sparse": "sparse",
    "scaled": "scaled",
}
OURS, COPY = "moe_aiter", "copy"


class Error(NamedTuple):
    """The distance of an output from the truth, and that of plain torch's output."""

    part: str
    error: float
    torch_error: float

    @property
    def of_the_bar(self) -> float:
        """More than 1 where it is refused, as is NaN."""
        share = self.error / (SLACK * self.torch_error + FLOOR)
        return share if share == share else float("inf")


Judge = Callable[[Contender], list[Error]]  # runs a contender; no errors of one that is not checked


@dataclasses.dataclass
class Problem:
    """Inputs, inside of these functions."""

    contenders: dict[str, Callable[[], Outputs]] | list[Contender]
    exact: Callable[[], Outputs] | None = None  # in float64
    plain: Callable[[], Outputs] | None = None  # what torch makes of it in this dtype
    kernels: Callable[[], Iterable] | None = None  # those of `moe-aiter tune`: see tiles.py
    judge: Callable[[], Judge] | None = None  # else by `exact` and `plain`
    timer: PassTimer | KernelTimer | None = None  # else of kernels
    compare: Callable[[list[dict]], None] | None = None  # adds to the rows what follows from several
    keeps_refused: bool = False  # whether a contender that is refused has a row


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


class Asked(NamedTuple):
    """A case that the options name, its title, and the cells of all its rows."""

    title: str
    cells: dict
    case: Case


@dataclasses.dataclass(frozen=True)
class Command:
    """The measurements and the output of one command of `moe-aiter bench`."""

    name: str
    fields: list[str]  # columns of the CSV
    line: tuple[str, ...]  # what is printed of a row; a cell that it lacks stays blank
    asked: Callable[[argparse.Namespace, str], Iterable[Asked]]  # for a device; ValueError for a mistake
    head: str = ""  # above the lines of a case
    added: Sequence[str] = ()  # columns that older files may lack
    demands: Callable[[Iterable[bool]], bool] | None = None  # how many words of --only must match: all or any
    reps: Mapping[str, int] = dataclasses.field(default_factory=lambda: REPS)
    goes_on: bool = False  # where one of ours cannot run, or a case does not fit in memory: a row says so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    families = f"families: {', '.join(FAMILIES)} [all]"
    parser.add_argument("--family", nargs="+", choices=FAMILIES, metavar="NAME", help=families)
    parser.add_argument(
        "--shape",
        nargs="+",
        metavar="WORD",
        help="cases with this shape, or with this word in their name, such as toy [all for the device]",
    )
    add_list(parser, lambda: case_names(FAMILIES), of="cases")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="run only contenders whose name contains one of these words"
    )
    parser.add_argument("--dtype", help="dtype [the case's, mostly bfloat16]")


def run(command: Command, args: argparse.Namespace) -> int:
    """Measure every case asked for; 1 if one of ours was not as good as torch."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    only, any_dtype = getattr(args, "only", None), getattr(args, "dtype", None)
    skipped.clear()
    try:
        cases = ready(command, args, kind)
    except ValueError as mistake:
        return refuse(f"bench {command.name}", str(mistake))
    torch.backends.cuda.matmul.allow_tf32 = False
    device, reps = torch.device(kind), args.reps or command.reps[kind]
    where = provenance(device, any_dtype or "", args.commit)
    print(", ".join(f"{k} {v}" for k, v in where.items() if v))
    wrong, verdicts = False, []
    for title, cells, case in cases:
        print(f"\n{title}")
        dtype, problem = any_dtype or case.dtypes[0], None
        if kind == "cpu" and kind not in case.devices:  # its goals are a GPU's
            case = dataclasses.replace(case, goals={})
        try:
            problem = case.make(device, getattr(torch, dtype), 0)
            if mistake := strangers(command, problem, only):
                return refuse(f"bench {command.name}", mistake)
            rows, bad = measure(case, problem, device, only=only, reps=reps, goes_on=command.goes_on)
        except torch.OutOfMemoryError as error:
            if not command.goes_on:
                raise
            rows, bad = [{"contender": "all", "refused": True, "note": said(error)}], True
        del problem  # before the next one is made
        wrong = wrong or bad
        verdicts += [(cells.get("family"), *verdict) for verdict in judged(case, rows)]
        show(command, rows)
        if args.out:
            about = where | {"dtype": dtype} | cells
            rows = [about | {name: row[name] for name in command.fields if name in row} for row in rows]
            append(args.out, rows, command.fields)
    for family in dict.fromkeys(family for family, *_ in verdicts):
        print(summed_up(family, [verdict for name, *verdict in verdicts if name == family]))
    return int(wrong)


def ready(command: Command, args: argparse.Namespace, kind: str) -> list[Asked]:
    """The cases asked for, where the device is there and the file takes their rows; else ValueError."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU that torch can use")
    if args.out and args.out.is_file():
        widen(args.out, command.fields, command.added)
        if columns(args.out) != command.fields:
            raise ValueError(f"{args.out} has other columns: {', '.join(columns(args.out))}")
    cases = list(command.asked(args, kind))
    if args.out:
        append(args.out, [], command.fields)  # a place that cannot be written shows before the measurement
    return cases


def strangers(command: Command, problem: Problem, only: list[str] | None) -> str:
    """Return the complaint about words of --only that match no contender and no skipped peer, or ""."""
    names = [getattr(contender, "name", contender) for contender in problem.contenders]
    unknown = [word for word in only or () if not any(word in name for name in [*names, *skipped])]
    unknown = [word for word in unknown if not any(peer in word for peer in skipped)]  # as with "layer: "
    if not unknown or not command.demands or command.demands(word not in unknown for word in only):
        return ""
    return f"--only: no contender matches {', '.join(unknown)}; there are {', '.join(map(repr, names))}"


def cases(families: list[str] | None) -> Iterator[tuple[str, Case]]:
    """(family, case) of those families, or of all."""
    for family in families or FAMILIES:
        for case in importlib.import_module(f"{__package__}.{FAMILIES[family]}").CASES:
            yield family, case


def case_names(families: Iterable[str]) -> str:
    """The names of all cases, by family."""
    return "; ".join(f"{f}: {', '.join(case.name for _, case in cases([f]))}" for f in families)


def no_case(args: argparse.Namespace) -> str:
    """Return the message for an unknown case, with what --shape and --dtype can name."""
    dtypes = {dtype: None for _, case in cases(args.family) for dtype in case.dtypes}
    if args.dtype not in (None, *dtypes):
        return f"there is no such case: --dtype is {args.dtype!r}; it takes {', '.join(dtypes)}"
    available = case_names(args.family or FAMILIES)
    return f"there is no such case{f' of {args.dtype}' if args.dtype else ''}; there are, of {available}"


def chosen(args: argparse.Namespace, kind: str) -> Iterator[tuple[str, Case]]:
    """(family, case): those that --shape names, or those for this device; of them those that take --dtype."""
    for family, case in cases(args.family):
        wanted = kind in case.devices
        if args.shape:
            wanted = any(word in (case.name, case.shape) or word in case.name for word in args.shape)
        if wanted and args.dtype in (None, *case.dtypes):
            yield family, case


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    found = list(chosen(args, kind))
    if not found:
        raise ValueError(no_case(args))
    for family, case in found:
        cells = {"family": family, "case": case.name, "shape": case.shape}
        yield Asked(f"{family}, {case.name} ({case.shape}), {args.dtype or case.dtypes[0]}", cells, case)


COMMAND = Command(
    "gemm",
    [
        *WHERE,
        *("family", "case", "shape", "contender"),
        *("launch", "ms", "p20", "p80", "tflops", "gb_per_s", "ratio", "goal", "error", "torch_error"),
    ],
    (
        *("{contender:<32}", "{ms:9.4f} ms", "{tflops:8.2f} TFLOP/s", "{gb_per_s:6.0f} GB/s", "{error:9.1e}"),
        *("ours {ratio:.2f} x", "(goal {goal})"),
    ),
    asked,
)


def measure(
    case: Case,
    problem: Problem,
    device: torch.device,
    *,
    only: list[str] | None,
    reps: int,
    goes_on: bool = False,
) -> tuple[list[dict], bool]:
    """A row for each contender that is as good as torch, and whether one of ours is not."""
    field = contenders(case, problem, device)
    field = [c for c in field if not only or c.name == COPY or any(word in c.name for word in only)]
    timer = problem.timer or KernelTimer(device)
    rows = check_all(field, problem.judge() if problem.judge else by_truth(problem), timer.add, goes_on)
    timed = [(c, row) for c, row in zip(field, rows, strict=True) if not row["refused"]]
    for (contender, row), cells in zip(timed, timer.cells(reps), strict=True):
        row |= cells
        if "us" in row:
            row |= rates(contender, row["us"])
    wrong = any(c.ours and row["refused"] for c, row in zip(field, rows, strict=True))
    good = [row for _, row in timed]
    ours = next((row["us"] for row in good if row["contender"] == OURS), None)
    for row in good if ours is not None else ():
        goal = case.goals.get(row["contender"])
        row |= {"ratio": row["us"] / ours} | ({"goal": goal} if goal else {})
    if problem.compare:
        problem.compare(good)
    return rows if problem.keeps_refused else good, wrong


def contenders(case: Case, problem: Problem, device: torch.device) -> list[Contender]:
    """Return the contenders of a problem, and a copy if a goal names it."""
    if not isinstance(problem.contenders, dict):
        return problem.contenders
    found = [
        Contender(name, call, ours=name.startswith(OURS), flops=case.flops, bytes=case.bytes)
        for name, call in problem.contenders.items()
    ]
    return [*found, copy_of(case.bytes, device)] if COPY in case.goals else found


def copy_of(size: int, device: torch.device, name: str = COPY, **cells) -> Contender:
    """Return a contender that copies: it reads and writes `size` bytes in total."""
    return Contender(name, copier(size, device), checked=False, ours=True, bytes=size, cells=cells)


def check_all(
    field: list[Contender], judge: Judge, prepare: Callable[[Contender], dict], goes_on: bool = False
) -> list[dict]:
    """The worst error of each contender, whether it is refused and why; what `prepare` says of the others.

    An error that one of ours raises is raised, unless the command `goes_on`.
    """
    rows = []
    for contender in progress(field, "checking", lambda contender: contender.name):
        row = {"contender": contender.name, "refused": True} | contender.cells
        rows.append(row)
        try:
            errors = judge(contender)
            if errors:
                worst = max(errors, key=lambda error: error.of_the_bar)
                row |= {"error": worst.error, "torch_error": worst.torch_error}
                if worst.of_the_bar > 1:
                    far = f"{worst.error:.1e}, torch's {worst.torch_error:.1e}"
                    row["note"] = f"the error of its {worst.part} is {far}"
                    print(f"{contender.name}: refused, {row['note']}")
                    continue
            row |= prepare(contender)
        except (*PEER_ERRORS, *contender.errors) as mistake:
            if contender.ours and not goes_on:
                raise
            row["note"] = said(mistake)
            print(f"{contender.name} cannot run here: {row['note']}")
            continue
        row["refused"] = False
    return rows


def said(mistake: Exception) -> str:
    """The kind of an error and what it says first."""
    return f"{type(mistake).__name__}: {str(mistake).partition(chr(10))[0]}"


@torch.no_grad()
def by_truth(problem: Problem) -> Judge:
    """Judge by the problem's exact result and by plain torch."""
    exact = as_tuple(problem.exact())
    bars = None if problem.plain is None else distances(as_tuple(problem.plain()), exact)

    @torch.no_grad()
    def judge(contender: Contender) -> list[Error]:
        return errors_of(as_tuple(contender.run()), exact, bars) if contender.checked else []

    return judge


def errors_of(
    got: Sequence[Tensor], exact: Sequence[Tensor], bars: list[float] | None, output_names: Sequence[str] = ()
) -> list[Error]:
    """The error of each output, by name; without bars they are those of the truth, rounded."""
    for ours, truth in zip(got, exact, strict=True):
        if ours.shape != truth.shape:
            raise ValueError(f"an output is {tuple(ours.shape)} instead of {tuple(truth.shape)}")
    if bars is None:
        bars = distances([truth.to(ours.dtype) for ours, truth in zip(got, exact, strict=True)], exact)
    names = output_names or ["output"] * len(bars)
    return [Error(*each) for each in zip(names, distances(got, exact), bars, strict=False)]


def rates(contender: Contender, us: float) -> dict:
    """TFLOP/s and GB/s, if the work is known."""
    rates = {"gb_per_s": contender.bytes / us / 1e3} if contender.bytes else {}
    return rates | ({"tflops": contender.flops / us / 1e6} if contender.flops else {})


def show(command: Command, rows: list[dict]) -> None:
    """The head, and a line for each row."""
    if command.head:
        print(command.head)
    for row in rows:
        line = ["no time: see above"] if row["refused"] else [cell(text, row) for text in command.line[1:]]
        print(" ".join([cell(command.line[0], row), *line]).rstrip(), flush=True)


def cell(text: str, row: dict) -> str:
    """Formatted, or as many blanks."""
    try:
        return text.format_map(row)
    except KeyError:
        return " " * len(text.format_map(collections.defaultdict(float)))


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
