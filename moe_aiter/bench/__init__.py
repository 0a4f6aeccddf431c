"""`moe-aiter bench`: measure the layer and the experts of published models beside other code.

benchmarks/README.md of the source tree has the protocol, and benchmarks/ further measurements.
"""

import argparse
import importlib
import shlex

from .measure import refuse

COMMANDS = {
    "layer": "MoE layers: forward pass and training step",
    "models": "experts of published models: a training step, by tier of kernels",
}
MOVED = "gmm", "deepgemm", "segment", "gemm", "lora", "offload", "muon", "parallel", "report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar=" | ".join(COMMANDS))
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        importlib.import_module(f"{__name__}.{name}").COMMAND.add_arguments(command)
    for name in MOVED:
        command = commands.add_parser(name, prefix_chars="\0", add_help=False)  # which takes any words
        command.add_argument("words", nargs="*")
        command.set_defaults(prog=command.prog)


def main(args: argparse.Namespace) -> int:
    """Run one of the commands; 0, or 1 when one of our own contenders was not as good as torch."""
    if args.bench in MOVED:
        again = shlex.join(["python", "-m", "benchmarks", args.bench, *args.words])
        return refuse(args, f"it has moved out of the package: in the source tree, run {again}")
    return importlib.import_module(f"{__name__}.{args.bench}").COMMAND.main(args)
