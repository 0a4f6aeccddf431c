"""`moe-aiter convert`: its flags, its progress bar and its final report."""

import argparse
import contextlib
import math
import re
import sys
from pathlib import Path

from ...config import say
from .convert import LAYOUTS, SHARD, Report, convert
from .files import CheckpointError, need, read_config
from .plan import RECORD
from .upcycle import upcycle

UPCYCLE_ONLY = "--experts, --top-k, --noise, --router-std and --seed need --upcycle"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("target", type=Path, help="folder to write, new or empty")
    text = "layout to write, hub for vLLM and SGLang [the one that the source does not have]"
    parser.add_argument("--to", choices=LAYOUTS, help=text)
    text = "maximum size of a file [5GB]; a larger tensor gets a separate file"
    parser.add_argument("--shard-size", type=shard_size, default=SHARD, metavar="SIZE", help=text)
    text = "do not compare the outputs of the converted layers with the source"
    parser.add_argument("--no-check", action="store_true", help=text)
    text = "turn a dense Llama, Mistral or Qwen3 into an MoE whose experts are copies of each MLP"
    parser.add_argument("--upcycle", action="store_true", help=text)
    group = parser.add_argument_group("with --upcycle")
    group.add_argument("--experts", type=count, metavar="E", help="number of experts (required)")
    group.add_argument("--top-k", type=count, metavar="K", help="experts for each token (required)")
    text = "noise on the experts' weights, in standard deviations of each matrix [0]"
    group.add_argument("--noise", type=amount, help=text)
    group.add_argument("--router-std", type=amount, help="standard deviation of the router's weights [0.02]")
    group.add_argument("--seed", type=seed, help="random seed for noise and router [0]")


def shard_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([KMG]B)?", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(match[1]) * UNITS[match[2] or ""]


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def amount(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and finite")
    return value


def seed(text: str) -> int:
    if not 0 <= (value := int(text)) < 2**63:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 2^63")
    return value


def main(args: argparse.Namespace) -> int:
    try:
        print_report(args.target, run_conversion(args))
    except (CheckpointError, ImportError) as error:
        print(f"moe-aiter convert: error: {error}", file=sys.stderr)
        return 2
    return 0


def run_conversion(args: argparse.Namespace) -> Report:
    options = {name: getattr(args, name) for name in ("noise", "router_std", "seed")}
    options = {name: value for name, value in options.items() if value is not None}
    common = {"shard_bytes": args.shard_size, "check": not args.no_check}
    if not args.upcycle:
        if options or args.experts is not None or args.top_k is not None:
            raise CheckpointError("wrong options", [UPCYCLE_ONLY])
        to = args.to or LAYOUTS[RECORD in read_config(args.source)]
        with contextlib.closing(Bar()) as bar:
            return convert(args.source, args.target, to, **common, progress=bar)
    if args.experts is None or args.top_k is None:
        raise CheckpointError("wrong options", ["--upcycle needs --experts and --top-k"])
    if args.top_k > args.experts:
        raise CheckpointError("wrong options", [f"--top-k is {args.top_k} but --experts is {args.experts}"])
    with contextlib.closing(Bar()) as bar:
        common |= {"to": args.to or LAYOUTS[0], "progress": bar}
        return upcycle(args.source, args.target, args.experts, args.top_k, **options, **common)


class Bar:
    """Progress by tqdm: a bar for the bytes written, then one for the layers checked."""

    def __init__(self):
        self.tqdm, self.bar = need("tqdm").tqdm, None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.bar is None or self.bar.desc.strip(": ") != what:
            self.close()
            scale = what == "bytes"
            self.bar = self.tqdm(total=total, desc=what, unit="B" if scale else "", unit_scale=scale)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def print_report(target: Path, report: Report) -> None:
    for layer, difference in report.differences.items():
        say(f"  {layer:<40} relative difference {difference:.1e}")
    for reason in sorted(set(report.kept.values())):
        layers = ", ".join(layer for layer, why in report.kept.items() if why == reason)
        say(f"layers that stay as they are, because {reason}: {layers}")
    if report.left_out:
        say(f"not copied, because the checkpoint does not use them: {', '.join(report.left_out)}")
    say(f"{report.converted} tensors of MoE layers converted and {report.copied} copied:"
        f" {report.written} tensors in {len(report.files)} files in {target}/")  # fmt: skip
