"""`moe-aiter bench`: measure the layer beside its peers, and turn the figures into tables and plots.

The protocol is in benchmarks/README.md.
"""

import argparse
import pathlib

from .shapes import GROUPS, SHAPES

CSV = pathlib.Path("benchmarks/results/layer.csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar="layer | report")
    layer = commands.add_parser("layer", help="time forward and step of the layer and its peers")
    layer.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, else cpu")
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
    layer.add_argument(
        "--reps", type=count, metavar="N", help="timed runs of each contender: 25 on a GPU, 11 on a CPU"
    )
    layer.add_argument("--out", type=pathlib.Path, metavar="CSV", help="append the figures to this file")
    layer.add_argument("--commit", help="what is measured, where git cannot say")
    report = commands.add_parser("report", help="write tables and plots from the figures")
    report.add_argument("--csv", type=pathlib.Path, default=CSV, help=f"default {CSV}")
    report.add_argument(
        "--readme",
        type=pathlib.Path,
        default=pathlib.Path("README.md"),
        help="default README.md; benchmarks/FIGURES.md and docs/ are beside it",
    )


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Run one of the two commands; 0, or 1 when one of our own contenders was not as good as torch."""
    if args.bench == "report":
        from .report import update

        return update(args.csv, args.readme)
    from .layer import bench_layer

    return bench_layer(args)
