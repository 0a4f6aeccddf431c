"""`moe-aiter info --model`: which kernels compute the products of a model's experts, and why."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from .. import tuning
from ..integrations.checkpoints.families import ACTIVATIONS, FAMILIES, MOST, PLAIN, Family
from ..integrations.checkpoints.files import CheckpointError, read_json
from ..kernels.base.activations import get_activation
from ..kernels.experts.tiers import products, tier
from .measure import count
from .models import inputs, models
from .problem import Shape

HOPPER = "sm_90"
TARGETS = {
    "sm_80": "A100", "sm_86": "RTX 30", "sm_89": "RTX 40", HOPPER: "H100, H200", "sm_100": "B200",
    "sm_103": "B300", "sm_120": "RTX 50", "gfx942": "MI300", "gfx950": "MI350",
}  # fmt: skip
TOKENS = 8192
INNER = "text_config", "thinker_config"  # entries of config.json that have the experts' sizes, if it has none
SIZES = {  # what config.json calls them; where a family has two, the experts' own is first
    "hidden size": ("hidden_size", "d_model"),
    "intermediate size": (
        *("expert_ffn_hidden_size", "moe_intermediate_size", "intermediate_size"),
        *("encoder_ffn_dim", "d_ff"),
    ),
    "number of experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "number of experts per token": (
        *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
        *("moe_topk", "moe_k", "top_k"),
    ),
}
COUNTED = SIZES["number of experts"]
FIELDS = "hidden", "intermediate", "num_experts", "top_k"  # of Shape, in the order of SIZES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "config.json of a model of transformers, its folder, or a name that `moe-aiter bench models --list` "
    )
    text += "prints: print the kernels of its experts instead"
    parser.add_argument("--model", metavar="PATH", help=text)
    names = "; ".join(f"{target}: {gpus}" for target, gpus in TARGETS.items())
    text = f"with --model: GPU to print the kernels for, which need not be there ({names}) [{HOPPER}]"
    parser.add_argument("--target", choices=TARGETS, help=text)
    text = f"with --model: number of tokens of a step [{TOKENS}]"
    parser.add_argument("--tokens", type=count, metavar="T", help=text)


def main(args: argparse.Namespace) -> int:
    try:
        name, shape = find(args.model, args.tokens or TOKENS)
        print("\n".join(lines(name, shape, args.target or HOPPER)))
    except CheckpointError as error:
        print(f"moe-aiter info: error: {error}", file=sys.stderr)
        return 2
    return 0


def find(model: str, tokens: int) -> tuple[str, Shape]:
    """Return the name and the experts of a file, a folder, or a published model by its name or checkpoint."""
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    elif not path.exists():
        for row in models().values():
            if model in (row.name, row.cells["checkpoint"]):
                return row.name, replace(row.shape, num_tokens=tokens)
        text = "there is no such file or folder, and `moe-aiter bench models --list` has no such model"
        raise CheckpointError(model, [text])
    return experts_of(read_json(path), tokens)


def experts_of(config: dict, tokens: int) -> tuple[str, Shape]:
    """Return the family of a configuration, and its experts; weights lie as transformers has them in memory.

    A family that `convert` knows is read as there.  Of another one that models.csv names, config.json has the
    sizes, and the row has gate, layout, biases, and what else the configuration does not say.
    """
    kind = config.get("model_type")
    if kind in list(FAMILIES):  # it need not be a string
        return kind, converted(FAMILIES[kind], config, tokens)
    family = str(kind).replace("-", "_").removesuffix("_text").removesuffix("_mm_model")
    row = next((model for model in models().values() if family in model.families), None)
    if row is None:
        known = ", ".join(sorted({*FAMILIES, *(name for m in models().values() for name in m.families)}))
        raise CheckpointError("config.json", [f"model_type is {kind!r}; known: {known}"])
    return kind, published(row.shape, inner(config), tokens)


def converted(family: Family, config: dict, tokens: int) -> Shape:
    settings = family.settings(config)
    if problems := family.problems(settings):
        raise CheckpointError("config.json", problems)
    how = family.moe_kwargs(settings)
    sizes = how.get("latent") or how["hidden"], how["intermediate"], how["num_experts"], how["top_k"]
    options = {name: how.get(name, False) for name in ("interleaved", "bias")}
    return Shape(tokens, *sizes, activation=how["activation"], transposed=family.always_fused, **options)


def inner(config: dict) -> dict:
    """The part of a configuration that has the experts' sizes."""
    while not any(config.get(name) for name in COUNTED):
        parts = (config[name] for name in INNER if isinstance(config.get(name), dict))
        if (part := next(parts, None)) is None:
            break
        config = part
    return config


def published(shape: Shape, config: dict, tokens: int) -> Shape:
    """`shape` with the sizes and the activation of config.json; a family may fix the experts per token."""
    problems, sizes = [], []
    for (what, names), default in zip(SIZES.items(), (None, None, None, shape.top_k), strict=True):
        name = next((name for name in names if config.get(name) is not None), None)
        value = config[name] if name else default
        value = value[0] if isinstance(value, list) and value else value  # one for each layer or modality
        if value is None:
            problems.append(f"it has no {what}: none of {', '.join(names)}")
        elif not (type(value) is int and 1 <= value <= MOST):
            problems.append(f"{name} is {value!r}; it should be a whole number from 1 to {MOST}")
        sizes.append(value)
    known = ACTIVATIONS if get_activation(shape.activation).gated else PLAIN
    act, activation = config.get("hidden_act") or config.get("hidden_activation"), shape.activation
    if act is not None and activation in known.values():
        if act in list(known):
            activation = known[act]
        else:
            problems.append(f"hidden_act is {act!r}; known: {', '.join(known)}")
    if problems:
        raise CheckpointError("config.json", problems)
    return replace(shape, num_tokens=tokens, activation=activation, **dict(zip(FIELDS, sizes, strict=True)))


def lines(name: str, shape: Shape, target: str) -> list[str]:
    """Return a head, and for each product of a training step its sizes, its tier and why not a better one."""
    flags = {
        "transposed weights": shape.transposed,
        "interleaved gate": shape.interleaved,
        "biases": shape.bias,
    }
    words = [shape.activation, *(word for word, holds in flags.items() if holds)]
    table = [("product", "rows", "columns", "sum over", "kernels")]
    with tuning.tables_of((table_of(target),)):
        why_not = "" if target == HOPPER else f"{target} is no Hopper GPU"
        for part, product in products(inputs(shape)).items():
            table.append((part, *map(str, product[2:]), str(tier(product, why_not))))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in table]
    return [f"{name} on {target}, bfloat16: T, H, I, E, k = {shape}; {', '.join(words)}", *rows]


def table_of(target: str) -> str:
    """Return the name of the table of tiles that serves a target."""
    maker, _, number = target.partition("_")
    return tuning.table_name("cuda", int(number)) if maker == "sm" else tuning.table_name("hip", target)
