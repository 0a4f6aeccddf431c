"""`moe-aiter bench`: measure the layer and its products beside their peers; figures become tables and plots.

The protocol is in benchmarks/README.md.
"""

import argparse
import importlib
import pathlib

from .measure import add_measurement

CSV = pathlib.Path("benchmarks/results/layer.csv")
COMMANDS = {  # command: (module with add_arguments and COMMAND, help)
    "layer": ("layer", "time forward and step of the layer and its peers"),
    "gmm": ("gmm", "time grouped products and their peers"),
    "deepgemm": ("masked", "time masked products of 8 and of 16 bits"),
    "segment": ("segment", "time segment GEMM: LoRA, decoding, dense segments"),
    "gemm": ("products", "time dense and other products, family by family"),
    "lora": ("lora", "time frozen experts with PEFT's adapters"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar=" | ".join([*COMMANDS, "report"]))
    for name, (module, text) in COMMANDS.items():
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


def main(args: argparse.Namespace) -> int:
    """Run one of the commands; 0, or 1 when one of our own contenders was not as good as torch."""
    if args.bench == "report":
        from .report import update

        return update(args.csv, args.readme)
    from .products import run

    return run(importlib.import_module(f"{__name__}.{COMMANDS[args.bench][0]}").COMMAND, args)
