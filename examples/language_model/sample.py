"""`moe-aiter sample`: continue a text with the newest checkpoint of a run."""

import argparse
import os

from . import UsageError
from .checkpoint import checkpoints, load_checkpoint
from .command import newest_run
from .model import Transformer
from .presets import TrainConfig, add_flags, check, flag_values, make_config, path, set_threads
from .trainer import sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=path, metavar="RUN", help="run folder [the newest in runs/]")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue [the start of a file]")
    parser.add_argument(
        "--tokens", type=int, metavar="INT", help="length in bytes [the run's --sample-bytes]"
    )
    texts = {
        "seed": "random seed of the sample [the run's]",
        "device": "cpu, cuda, cuda:N or auto (a GPU if there is one) [auto]",
        "threads": "CPU threads [the run's]",
        "temperature": "sampling temperature; 0 takes the most likely byte [the run's]",
    }
    add_flags(parser, texts)


def main(args: argparse.Namespace) -> int:
    run = args.run or newest_run()
    own = TrainConfig.load(run / "config.json")
    if args.tokens is not None:
        check(TrainConfig.__dataclass_fields__["sample_bytes"], args.tokens, "--tokens")
    length = own.sample_bytes if args.tokens is None else args.tokens
    values = {"device": "auto", "sample_bytes": length} | flag_values(args)
    config = make_config("cpu", vars(own) | values)
    found = checkpoints(run / "checkpoints")
    if not found:
        raise UsageError(f"{run} holds no checkpoint to sample from")
    set_threads(config)
    model = Transformer(config)
    load_checkpoint(found[-1], model, None)
    print(sample(model.to(config.device), config, os.fsencode(args.prompt)))
    return 0
