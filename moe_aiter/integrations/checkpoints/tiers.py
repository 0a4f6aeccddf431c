"""`moe-aiter info --model config.json`: which kernels compute the products of a model's experts, and why."""

import argparse
import sys
from pathlib import Path

from ... import tuning
from ...kernels.experts.tiers import meta_experts, products, tier
from .command import count
from .families import family_of
from .files import CheckpointError, read_json

HOPPER = "sm_90"
TARGETS = ("sm_80", "sm_86", "sm_89", HOPPER, "sm_100", "sm_103", "sm_120", "gfx942", "gfx950")
TOKENS = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "config.json of a model of transformers, or its folder: print the kernels of its experts instead"
    parser.add_argument("--model", type=Path, metavar="PATH", help=text)
    text = f"with --model: GPU to print the kernels for, which need not be there [{HOPPER}]"
    parser.add_argument("--target", choices=TARGETS, default=HOPPER, help=text)
    text = f"with --model: number of tokens of a step [{TOKENS}]"
    parser.add_argument("--tokens", type=count, default=TOKENS, metavar="T", help=text)


def main(args: argparse.Namespace) -> int:
    path = args.model / "config.json" if args.model.is_dir() else args.model
    try:
        print("\n".join(lines(read_json(path), args.target, args.tokens)))
    except CheckpointError as error:
        print(f"moe-aiter info: error: {error}", file=sys.stderr)
        return 2
    return 0


def lines(config: dict, target: str, tokens: int) -> list[str]:
    """Return a head, and for each product of a training step its sizes, its tier and why not a better one.

    The weights are bfloat16 and lie in memory as transformers has them.  Raises CheckpointError for a
    configuration that `convert` refuses as well.
    """
    family = family_of(config)
    settings = family.settings(config)
    if problems := family.problems(settings):
        raise CheckpointError("config.json", problems)
    how = family.moe_kwargs(settings)
    sizes = how.get("latent") or how["hidden"], how["intermediate"], how["num_experts"], how["top_k"]
    options = {name: how.get(name, False) for name in ("interleaved", "bias")}
    transposed, activation = family.always_fused, how["activation"]
    flags = {
        "transposed weights": transposed,
        "interleaved gate": options["interleaved"],
        "biases": options["bias"],
    }
    words = [activation, *(word for word, holds in flags.items() if holds)]
    heads = "T, H, I, E, k = " + ", ".join(map(str, (tokens, *sizes)))
    i = meta_experts((tokens, *sizes), activation, transposed=transposed, **options)
    table = [("product", "rows", "columns", "sum over", "kernels")]
    with tuning.tables_of((table_of(target),)):
        why_not = "" if target == HOPPER else f"{target} is no Hopper GPU"
        for name, product in products(i).items():
            table.append((name, *map(str, product[2:]), str(tier(product, why_not))))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in table]
    return [f"{family.name} on {target}, bfloat16: {heads}; {', '.join(words)}", *rows]


def table_of(target: str) -> str:
    """Return the name of the table of tiles that serves a target."""
    maker, _, number = target.partition("_")
    return tuning.table_name("cuda", int(number)) if maker == "sm" else tuning.table_name("hip", target)
