"""`moe-aiter bench`: measure the layer and its products beside their peers; the README's tables.

The protocol is in benchmarks/README.md.
"""

import argparse
import pathlib

from .shapes import GROUPS, MASKED, MAX_M, SHAPES

CSV = pathlib.Path("benchmarks/results/layer.csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar="layer | deepgemm | report")
    layer = commands.add_parser("layer", help="time forward and step of the layer and its peers")
    names = (
        f"of {', '.join(SHAPES)}; or a group: {', '.join(GROUPS)}; A to E on a GPU, cpu on a CPU unless given"
    )
    layer.add_argument("--shape", nargs="+", choices=[*SHAPES, *GROUPS], metavar="NAME", help=names)
    layer.add_argument(
        "--routing", choices=("normal", "zipf"), default="normal", help="normal logits, or skewed experts"
    )
    layer.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    layer.add_argument(
        "--only", nargs="+", metavar="WORD", help="contenders whose name holds one of these words"
    )
    add_measurement(layer)
    deepgemm = commands.add_parser("deepgemm", help="time masked products of 8 and of 16 bits")
    add_sizes(deepgemm)
    add_measurement(deepgemm)
    report = commands.add_parser("report", help="write the README's tables and plots from the figures")
    report.add_argument("--csv", type=pathlib.Path, default=CSV, help=f"default {CSV}")
    report.add_argument(
        "--readme", type=pathlib.Path, default=pathlib.Path("README.md"), help="default README.md"
    )


def add_measurement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, else cpu")
    parser.add_argument(
        "--reps", type=count, metavar="N", help="timed runs of each contender: 25 on a GPU, 11 on a CPU"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="CSV", help="append the figures to this file")
    parser.add_argument("--commit", help="what is measured, where git cannot say")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Those of a masked product."""
    for name, *sizes in zip(("groups", "n", "k"), *MASKED.values(), strict=True):
        default = "default {} on a GPU, {} on a CPU".format(*sizes)
        parser.add_argument(f"--{name}", type=count, metavar="N", help=default)
    rows = ", ".join(map(str, MAX_M))
    parser.add_argument(
        "--max-m", nargs="+", type=count, default=MAX_M, metavar="M", help=f"rows of a group; default {rows}"
    )
    parser.add_argument("--tiles", action="store_true", help="try every candidate for a table, on a GPU")


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Run one of the commands; 0, or 1 when one of our own contenders was not as good as torch."""
    if args.bench == "report":
        from .report import update

        return update(args.csv, args.readme)
    if args.bench == "deepgemm":
        from .masked import bench_masked

        return bench_masked(args)
    from .layer import bench_layer

    return bench_layer(args)
