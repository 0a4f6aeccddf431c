"""`moe-aiter bench`: measure the layer and its products beside their peers; figures become tables and plots.

The protocol is in benchmarks/README.md.
"""

import argparse
import importlib
import pathlib

from .measure import add_measurement
from .problem import GROUPS, SHAPES

CSV = pathlib.Path("benchmarks/results/layer.csv")
PRODUCTS = {  # command: (module with add_arguments and run, help)
    "gmm": ("gmm", "time grouped products and their peers"),
    "deepgemm": ("masked", "time masked products of 8 and of 16 bits"),
    "segment": ("segment", "time segment GEMM: LoRA, decoding, dense segments"),
    "gemm": ("products", "time dense and other products, family by family"),
    "lora": ("lora", "time frozen experts with PEFT's adapters"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = " | ".join(["layer", *PRODUCTS, "report"])
    commands = parser.add_subparsers(dest="bench", required=True, metavar=names)
    text = "time forward and step of the layer and its peers"
    add_layer(commands.add_parser("layer", help=text, description=text))
    for name, (module, text) in PRODUCTS.items():
        command = commands.add_parser(name, help=text, description=text)
        importlib.import_module(f"{__name__}.{module}").add_arguments(command)
        add_measurement(command)
    text = "write tables and plots from the figures"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("--csv", type=pathlib.Path, default=CSV, help=f"of bench layer; default {CSV}")
    report.add_argument(
        "--readme",
        type=pathlib.Path,
        default=pathlib.Path("README.md"),
        help="default README.md; benchmarks/FIGURES.md and docs/ are beside it",
    )


def add_layer(layer: argparse.ArgumentParser) -> None:
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


def main(args: argparse.Namespace) -> int:
    """Run one of the commands; 0, or 1 when one of our own contenders was not as good as torch."""
    if args.bench == "report":
        from .report import update

        return update(args.csv, args.readme)
    if args.bench in PRODUCTS:
        return importlib.import_module(f"{__name__}.{PRODUCTS[args.bench][0]}").run(args)
    from .layer import bench_layer

    return bench_layer(args)
