"""`python -m benchmarks gemm`: dense, scaled and sparse products, attention, convolution, beside torch's."""

import argparse
import dataclasses
import functools
from collections.abc import Iterator

from moe_aiter.bench.cases import case_names, select
from moe_aiter.bench.command import Asked, Command
from moe_aiter.bench.measure import WHERE, add_contenders, add_list

from . import dense, scaled, sparse, torchlike
from .products import contest

FAMILIES = {
    "dense": dense.CASES,
    "torchlike": torchlike.CASES,
    "sparse": sparse.CASES,
    "scaled": scaled.CASES,
}


def options(parser: argparse.ArgumentParser) -> None:
    families = f"families: {', '.join(FAMILIES)} [all]"
    parser.add_argument("--family", nargs="+", choices=FAMILIES, metavar="NAME", help=families)
    parser.add_argument(
        "--shape",
        nargs="+",
        metavar="WORD",
        help="cases with this shape, or with this word in their name, such as toy [all for the device]",
    )
    add_list(parser, lambda: case_names(FAMILIES), of="cases")
    add_contenders(parser, dtype=None)
    parser.add_argument("--dtype", help="dtype [the case's, mostly bfloat16]")


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    families = {name: FAMILIES[name] for name in args.family or FAMILIES}
    for family, case in select(families, args.shape, args.dtype, kind):
        if kind == "cpu" and kind not in case.devices:  # its goals are a GPU's
            case = dataclasses.replace(case, goals={})
        cells = {"family": family, "case": case.name, "shape": case.shape}
        title = f"{family}, {case.name} ({case.shape}), {args.dtype or case.dtypes[0]}"
        yield Asked(title, cells, functools.partial(contest, case), case.dtypes[0])


def summed_up(found: list[tuple[Asked, list[dict]]]) -> Iterator[str]:
    """A line for each family: how many of its goals were met, and which were missed."""
    missed: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for asked, rows in found:
        family, case = asked.cells["family"], asked.cells["case"]
        for row in rows:
            if goal := row.get("goal"):
                counts[family] = counts.get(family, 0) + 1
                if row["ratio"] < goal:
                    words = f"{case} {row['ratio']:.2f} of {goal} x {row['contender']}"
                    missed.setdefault(family, []).append(words)
    for family, count in counts.items():
        words = missed.get(family, [])
        line = f"{family}: {count - len(words)} of {count} goals met"
        yield f"{line}; missed: {', '.join(words)}" if words else line


COMMAND = Command(
    [
        *WHERE,
        *("family", "case", "shape", "contender"),
        *("launch", "ms", "p20", "p80", "tflops", "gb_per_s", "ratio", "goal", "error", "torch_error"),
    ],
    (
        *("{contender:<32}", "{ms:9.4f} ms", "{tflops:8.2f} TFLOP/s", "{gb_per_s:6.0f} GB/s", "{error:9.1e}"),
        *("ours {ratio:.2f} x", "(goal {goal})"),
    ),
    options,
    asked,
    summed_up=summed_up,
)
