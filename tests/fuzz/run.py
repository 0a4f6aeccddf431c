"""Case after case, in a process of their own: `make fuzz`."""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch

from moe_aiter.config import interpret

from . import adapters, layers, narrow, products, routes, segments
from .hold import TARGETS, Ambiguous, run_case

# the interpreter takes 10 ms for each of a case's many launches: these are for one case in 8 of another
OFTEN, MANY_LAUNCHES = 8, {
    "balance_step", "experts", "grouped_gemm", "lora_experts", "lora_linear", "main_grad_step", "moe",
    "moe_as_given", "optimized", "permute", "quantized",
}  # fmt: skip
MODULES = adapters, layers, narrow, products, routes, segments  # which fill TARGETS
# everything that a case could raise: it becomes the line that repeats the case
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, NotImplementedError,
    RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip


def case_number(i: int) -> tuple[str, int]:
    """The name and the seed of case `i`: all targets in turn; in the interpreter some of them less often."""
    names = list(TARGETS)
    if interpret:
        once = [(name, 0) for name in names]
        names = once + [(name, n) for n in range(1, OFTEN) for name in names if name not in MANY_LAUNCHES]
        name, more = names[i % len(names)]
        return name, i // len(names) * (1 if name in MANY_LAUNCHES else OFTEN) + more
    return names[i % len(names)], i // len(names)


def line(name: str, seed: int, why: str) -> str:
    """What is wrong, and the command that repeats it."""
    how = "TRITON_INTERPRET=1 " if interpret else ""
    return (
        f"{name}:{seed} {why.splitlines()[0] if why else 'failed'}; repeat: {how}make fuzz CASE={name}:{seed}"
    )


def try_case(name: str, seed: int) -> str | None:
    """None for a case that is right, else the line that says what is wrong."""
    try:
        run_case(name, seed)
    except Ambiguous:
        return None
    except FAILURES as failure:
        kind = "" if isinstance(failure, AssertionError) else f"{type(failure).__name__}: "
        return line(name, seed, f"{kind}{failure}")
    return None


def work(first: int, end: int, until: float, progress: str) -> int:
    """Run the cases [first, end) and keep in `progress` the next one and the number of failures."""
    failures = 0
    with open(progress, "w") as file:
        for i in range(first, end):
            os.pwrite(file.fileno(), f"{i:12} {failures:12}".encode(), 0)
            if time.time() > until:
                return failures
            if wrong := try_case(*case_number(i)):
                failures += 1
                print(wrong, flush=True)
        os.pwrite(file.fileno(), f"{end:12} {failures:12}".encode(), 0)
    return failures


def watch(first: int, cases: int, seconds: float) -> int:
    """Let another process run the cases; one that dies takes its case along, and no other."""
    began, last, failures = time.time(), first + cases, 0
    until = began + seconds
    with tempfile.NamedTemporaryFile("r") as progress:
        done = first
        while done < last and time.time() < until:
            numbers = map(str, (done, min(done + 2000, last), until))
            given = [sys.executable, "-m", "tests.fuzz.run", "--work", *numbers, progress.name]
            child = subprocess.run(given)
            progress.seek(0)
            place, found = map(int, progress.read().split() or (done, 0))
            failures += found
            if child.returncode:
                failures += 1
                print(line(*case_number(place), f"ended with status {child.returncode}"), flush=True)
                place += 1
            done = place
            passed = time.time() - began
            print(f"{done - first} cases in {passed:.0f} s, {failures} failures", flush=True)
    return int(failures > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--case", help="NAME:SEED of one case, whose error is shown in full")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long [no end]")
    parser.add_argument("--cases", type=int, default=10**9, help="how many [no end]")
    parser.add_argument("--first", type=int, default=None, help="number of the first case [by the clock]")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.work:
        first, end, until, progress = given.work
        work(int(first), int(end), float(until), progress)
        return 0
    if given.case:
        name, _, seed = given.case.partition(":")
        run_case(name, int(seed))
        print(f"{given.case} is right")
        return 0
    first = int(time.time()) * 1000 if given.first is None else given.first
    return watch(first, given.cases, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
