"""`python -m benchmarks`: our kernels, layers and optimizers beside their peers; figures become tables."""

from moe_aiter import cli

COMMANDS = {  # as in moe_aiter.cli
    "gmm": ("benchmarks.gmm:COMMAND", "grouped products", " --shape C-up"),
    "deepgemm": ("benchmarks.masked:COMMAND", "masked products in 8 and 16 bits", " --max-m 64"),
    "segment": (
        "benchmarks.segment:COMMAND",
        "segment products: LoRA, decoding, dense segments",
        " --case dense",
    ),
    "gemm": ("benchmarks.gemm:COMMAND", "dense, scaled and sparse products", " --family sparse"),
    "lora": ("benchmarks.lora:COMMAND", "frozen experts with LoRA adapters", " --shape C"),
    "offload": (
        "benchmarks.offload:COMMAND",
        "frozen experts in host memory, compared with their copies and products alone",
        " --layers 4",
    ),
    "muon": ("benchmarks.muon:COMMAND", "optimizer steps of Muon for stacked experts", " --shape C"),
    "parallel": (
        "benchmarks.parallel",
        "expert parallelism on several ranks, under torchrun",
        " --shape C",
    ),
    "kernels": (
        "benchmarks.kernels",
        "kernels without tiles: routing, sums of each token's rows, quantisation",
        " A B",
    ),
    "whole_model": (
        "benchmarks.whole_model",
        "training steps of whole models of transformers",
        " --model OLMoE-1B-7B",
    ),
    "report": ("benchmarks.report", "write tables and plots from the results", ""),
}


def main(argv: list[str] | None = None) -> int:
    return cli.main(argv, COMMANDS, "python -m benchmarks", "Measure kernels and layers beside their peers.")


if __name__ == "__main__":
    cli.leave(main())
