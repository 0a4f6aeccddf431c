"""Commands that measure: contenders are checked, then timed, and become rows of a CSV.

A command is a module with a COMMAND, which makes contests of its options.  Contenders of ours, by name or by
the flag `ours`, that are less accurate than plain torch make the command fail.
"""

import argparse
import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .measure import (
    FLOOR,
    PEER_ERRORS,
    REPS,
    SLACK,
    Contender,
    PassTimer,
    add_measurement,
    append,
    check_columns,
    distances,
    progress,
    provenance,
    refuse,
    skipped,
)  # fmt: skip


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
class Contest:
    """Contenders with the same inputs, and how they are judged and timed."""

    contenders: list[Contender]
    judge: Judge
    timer: PassTimer
    compare: Callable[[list[dict]], None] | None = None  # adds to the rows what follows from several
    keeps_refused: bool = False  # whether a contender that is refused has a row


class Asked(NamedTuple):
    """A contest that the options name: its title, the cells of all its rows, and what makes it."""

    title: str
    cells: dict
    make: Callable[[torch.device, torch.dtype], Contest]
    dtype: str = "bfloat16"  # if no option says another


@dataclasses.dataclass(frozen=True)
class Command:
    """The measurements and the output of one command."""

    fields: list[str]  # columns of the CSV
    line: tuple[str, ...]  # what is printed of a row; a cell that it lacks stays blank
    options: Callable[[argparse.ArgumentParser], None]
    asked: Callable[[argparse.Namespace, str], Iterable[Asked]]  # for a device; ValueError for a mistake
    head: str = ""  # above the lines of a contest
    added: Sequence[str] = ()  # columns that older files may lack
    demands: Callable[[Iterable[bool]], bool] | None = None  # how many words of --only must match: all or any
    reps: Mapping[str, int] = dataclasses.field(default_factory=lambda: REPS)
    goes_on: bool = False  # where one of ours cannot run, or does not fit in memory: a row says so
    summed_up: Callable[[list[tuple[Asked, list[dict]]]], Iterable[str]] = lambda found: ()  # the last lines

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.options(parser)
        add_measurement(parser)

    def main(self, args: argparse.Namespace) -> int:
        """Measure all that is asked for; 1 if one of ours was not as good as torch."""
        kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        only, any_dtype = getattr(args, "only", None), getattr(args, "dtype", None)
        skipped.clear()
        try:
            contests = ready(self, args, kind)
        except ValueError as mistake:
            return refuse(args, str(mistake))
        torch.backends.cuda.matmul.allow_tf32 = False
        device, reps = torch.device(kind), args.reps or self.reps[kind]
        where = provenance(device, any_dtype or "", args.commit)
        print(", ".join(f"{k} {v}" for k, v in where.items() if v))
        wrong, found = False, []
        for asked in contests:
            print(f"\n{asked.title}")
            dtype, contest = any_dtype or asked.dtype, None
            torch.manual_seed(0)
            try:
                contest = asked.make(device, getattr(torch, dtype))
                if mistake := strangers(self, contest, only):
                    return refuse(args, mistake)
                rows, bad = measure(contest, only=only, reps=reps, goes_on=self.goes_on)
            except torch.OutOfMemoryError as error:
                if not self.goes_on:
                    raise
                rows, bad = [{"contender": "all", "refused": True, "note": said(error)}], True
            del contest  # before the next one is made
            wrong = wrong or bad
            found.append((asked, rows))
            show(self, rows)
            if args.out:
                about = where | {"dtype": dtype} | asked.cells
                rows = [about | {name: row[name] for name in self.fields if name in row} for row in rows]
                append(args.out, rows, self.fields)
        for line in self.summed_up(found):
            print(line)
        return int(wrong)


def ready(command: Command, args: argparse.Namespace, kind: str) -> list[Asked]:
    """What is asked for, where the device is there and the file takes its rows; else ValueError."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU that torch can use")
    check_columns(args.out, command.fields, command.added)
    contests = list(command.asked(args, kind))
    if args.out:
        append(args.out, [], command.fields)  # a place that cannot be written shows before the measurement
    return contests


def strangers(command: Command, contest: Contest, only: list[str] | None) -> str:
    """Return the complaint about words of --only that match no contender and no skipped peer, or ""."""
    names = [contender.name for contender in contest.contenders]
    unknown = [word for word in only or () if not any(word in name for name in [*names, *skipped])]
    unknown = [word for word in unknown if not any(peer in word for peer in skipped)]  # as with "layer: "
    if not unknown or not command.demands or command.demands(word not in unknown for word in only):
        return ""
    return f"--only: no contender matches {', '.join(unknown)}; there are {', '.join(map(repr, names))}"


def measure(
    contest: Contest, *, only: list[str] | None, reps: int, goes_on: bool = False
) -> tuple[list[dict], bool]:
    """A row for each contender that is as good as torch, and whether one of ours is not."""
    field = [c for c in contest.contenders if c.always or not only or any(word in c.name for word in only)]
    rows = check_all(field, contest.judge, contest.timer.add, goes_on)
    timed = [row for row in rows if not row["refused"]]
    for row, cells in zip(timed, contest.timer.cells(reps), strict=True):
        row |= cells
    if contest.compare:
        contest.compare(timed)
    wrong = any(c.ours and row["refused"] for c, row in zip(field, rows, strict=True))
    return rows if contest.keeps_refused else timed, wrong


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
