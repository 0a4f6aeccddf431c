"""What the commands that measure ask for alike."""

import argparse
import pathlib
import sys


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def add_measurement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one, else cpu")
    parser.add_argument(
        "--reps",
        type=count,
        metavar="N",
        help="timed runs of each contender; default 25 on a GPU, 11 on a CPU (lora: 3)",
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="CSV", help="append the figures to this file")
    parser.add_argument("--commit", help="the commit to note, where git cannot tell")


def refuse(command: str, mistake: str) -> int:
    """Say what is wrong with a command in one line; its status."""
    print(f"moe-aiter {command}: error: {mistake}", file=sys.stderr)
    return 2
