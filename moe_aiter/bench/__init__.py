"""`moe-aiter bench`: measure the layer and its products beside their peers; figures become tables and plots.

The protocol is in benchmarks/README.md.
"""

import argparse
import importlib
import pathlib

from .measure import add_measurement

CSV = pathlib.Path("benchmarks/results/layer.csv")
COMMANDS = {  # command: (module with add_arguments and COMMAND, perhaps a main of its own; help)
    "layer": ("layer", "MoE layers: forward pass and training step"),
    "models": ("models", "experts of published models: a training step, by tier of kernels"),
    "gmm": ("gmm", "grouped products"),
    "deepgemm": ("masked", "masked products in 8 and 16 bits"),
    "segment": ("segment", "segment products: LoRA, decoding, dense segments"),
    "gemm": ("products", "dense, scaled and sparse products"),
    "lora": ("lora", "frozen experts with LoRA adapters"),
    "offload": ("offload", "frozen experts in host memory, compared with their copies and products alone"),
    "muon": ("muon", "optimizer steps of Muon for stacked experts"),
    "parallel": ("parallel", "expert parallelism on several ranks, under torchrun"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar=" | ".join([*COMMANDS, "report"]))
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        importlib.import_module(f"{__name__}.{module}").add_arguments(command)
        add_measurement(command)
    text = "write tables and plots from the results"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("--csv", type=pathlib.Path, default=CSV, help=f"results of bench layer [{CSV}]")
    report.add_argument(
        "--readme",
        type=pathlib.Path,
        default=pathlib.Path("README.md"),
        help="file to update, beside benchmarks/FIGURES.md and docs/ [README.md]",
    )


def main(args: argparse.Namespace) -> int:
    """Run one of the commands; 0, or 1 when one of our own contenders was not as good as torch."""
    if args.bench == "report":
        from .report import update

        return update(args.csv, args.readme)
    from .products import run

    module = importlib.import_module(f"{__name__}.{COMMANDS[args.bench][0]}")
    return module.main(args) if hasattr(module, "main") else run(module.COMMAND, args)
