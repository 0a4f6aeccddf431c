"""`moe-aiter info --model`: which kernels compute the products of a model's experts, and why.

With `--memory`, what a layer of these sizes takes: `memory.py`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from .. import tuning
from ..config import SettingError, say
from ..integrations.checkpoints.families import FAMILIES
from ..integrations.checkpoints.family import ACTIVATIONS, MOST, PLAIN, oai_activation
from ..integrations.checkpoints.files import CheckpointError, read_json_object
from ..kernels.base.activations import get_activation, swiglu_limit
from ..kernels.experts.tiers import products, tier
from ..kernels.rows.sort import MOST as MOST_ROWS
from . import memory
from .measure import count
from .models import Model, inputs, models, named_models
from .problem import Shape

HOPPER = "sm_90"
TARGETS = {
    "sm_80": "A100", "sm_86": "RTX 30", "sm_89": "RTX 40", HOPPER: "H100, H200", "sm_100": "B200",
    "sm_103": "B300", "sm_120": "RTX 50", "gfx942": "MI300", "gfx950": "MI350",
}  # fmt: skip
TOKENS = 8192
MOST_NUMBERS = 2**58  # of a tensor, whose bytes torch counts in 63 bits
INNER = "text_config", "thinker_config"  # entries of config.json that may have what config.json has not
HIDDEN = "moe_latent_size", "hidden_size", "d_model"
EXPERTS = "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
TOP_K = "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"
WIDTH = "moe_intermediate_size"  # of most families that `convert` does not know; the others:
WIDTHS = {name: family.width for name, family in FAMILIES.items()} | {
    **dict.fromkeys(
        (
            "aria", "flex_olmo", "hunyuan_v1_moe", "jamba", "jetmoe", "llama4", "minimax", "minimax_m3_vl",
            "openai_privacy_filter", "phimoe",
        ),
        "intermediate_size",
    ),
    "nllb_moe": "encoder_ffn_dim", "switch_transformers": "d_ff",
}  # fmt: skip
ACT = "hidden_act"  # likewise; None: it is always the row's
ACTS = {name: family.act for name, family in FAMILIES.items()} | {
    "gemma4": "hidden_activation", "jetmoe": "activation_function", "nllb_moe": "activation_function",
    "switch_transformers": "dense_act_fn", "aria": None, "lfm2_moe": None,
}  # fmt: skip
FIXED_TOP_K = "nllb_moe", "switch_transformers"  # whose config.json does not say it
ALIASES = {"granitemoeshared": "granitemoe", "inkling_mm_model": "inkling"}
TWO_KINDS = "ernie4_5_vl_moe"  # experts of text and of images, whose widths are a list; info shows text's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "config.json of a model of transformers, its folder, or a published model of `bench models`, as "
    text += "openai/gpt-oss-20b: print the kernels of its experts instead"
    parser.add_argument("--model", help=text)
    names = "; ".join(f"{target}: {gpus}" for target, gpus in TARGETS.items())
    text = f"with --model or --memory: GPU to print it for, which need not be there ({names}) [{HOPPER}]"
    parser.add_argument("--target", choices=TARGETS, help=text)
    text = f"with --model: number of tokens of a step [{TOKENS}; of a published model as in `bench models`]"
    parser.add_argument("--tokens", type=count, metavar="T", help=text)
    text = (
        "print the memory of one MoE layer on a GPU, held and peak, by option, for T tokens, hidden size H, "
    )
    text += "intermediate size I, E experts and k experts for each token, as --memory 32768 2048 768 128 8; "
    text += "with --model, without sizes: those of the model"
    parser.add_argument("--memory", type=count, nargs="*", metavar="T H I E k", help=text)
    text = f"with --memory: dtype of inputs and weights [{memory.DTYPES[0]}]"
    parser.add_argument("--dtype", choices=memory.DTYPES, help=text)
    text = "with --memory: also what each of N ranks has, which share the experts"
    parser.add_argument("--ranks", type=count, metavar="N", help=text)
    text = "with --memory: also what L such layers take in forward and backward"
    parser.add_argument("--layers", type=count, metavar="L", help=text)


def main(args: argparse.Namespace) -> int:
    target = args.target or HOPPER
    try:
        name, shape = asked(args)
        if problems := complaints(shape, args.ranks or 1):
            raise CheckpointError(name, problems)
        if args.memory is not None:
            dtype = getattr(torch, args.dtype or memory.DTYPES[0])
            with tuning.tables_of((tiles_table(target),)):
                lines = memory.report_lines(name, shape, dtype, target, why_portable(target))
                if args.layers:
                    lines += memory.lines_of_layers(shape, dtype, why_portable(target), args.layers)
            if args.ranks:
                lines += memory.lines_of_ranks(shape, dtype, args.ranks)
        else:
            lines = report_lines(name, shape, target)
        say(*lines)
        if not args.target:
            print(
                f"without --target: as on {HOPPER} ({TARGETS[HOPPER]}), whatever GPU is here", file=sys.stderr
            )
    except CheckpointError as error:
        print(f"moe-aiter info: error: {error}", file=sys.stderr)
        return 2
    return 0


def asked(args: argparse.Namespace) -> tuple[str, Shape]:
    """Return the name and the experts that the options ask for."""
    if args.memory is None and (args.dtype or args.ranks or args.layers):
        raise SettingError("--dtype, --ranks and --layers need --memory")
    if args.model is not None:
        if args.memory:
            raise SettingError("--memory takes its sizes from --model: leave the sizes or --model out")
        return find_model(args.model, args.tokens)
    if args.tokens:
        raise SettingError("--tokens needs --model: T is the first size of --memory")
    if len(args.memory) != 5:
        raise SettingError("--memory takes 5 sizes, T H I E k: tokens, hidden, intermediate, experts, top-k")
    return "MoE", Shape(*args.memory)


def find_model(model: str, tokens: int | None) -> tuple[str, Shape]:
    """Return the name and the experts of a file, a folder, or a published model."""
    path = Path(model)
    if model and path.is_dir():
        path /= "config.json"
    elif not (model and path.exists()):
        try:
            rows = named_models([model])
        except ValueError as error:
            text = "there is no such file or folder, and `moe-aiter bench models --list` has no such model"
            raise CheckpointError(shown(model), [text]) from error
        if len({row.cells["checkpoint"] for row in rows}) > 1:
            text = f"that could be {'; '.join(row.name for row in rows)}"
            raise CheckpointError(shown(model), [text])
        row = rows[0]
        return row.name, replace(row.shape, num_tokens=tokens or row.shape.num_tokens)
    return experts_of_config(read_json_object(path), tokens or TOKENS)


def experts_of_config(config: dict, tokens: int) -> tuple[str, Shape]:
    """Return the family of a configuration, and its experts; weights lie as transformers has them in memory.

    The family is one of models.csv.  config.json has the sizes, and the activation unless the family has one;
    the family's row has gate, layout and biases.
    """
    outer = config
    while (row := row_of_family(config.get("model_type"))) is None:
        if (part := inner(config)) is None:
            known = ", ".join(sorted(families()))
            text = f"model_type is {shown(outer.get('model_type'))}; known: {known}"
            raise CheckpointError("config.json", [text])
        config = part
    family, model = row
    name = config["model_type"]
    while not any(config.get(key) for key in EXPERTS) and (part := inner(config)) is not None:
        config = part
    if config.get("enable_moe_block") is False:
        raise CheckpointError("config.json", ["enable_moe_block is false, so the model has no experts"])
    return name, published(family, model.shape, config, tokens)


def families() -> dict[str, Model]:
    """By family, the first row that names it."""
    return {family: model for model in reversed(models().values()) for family in model.families}


def row_of_family(kind: object) -> tuple[str, Model] | None:
    """The family of a model_type, which need not be a string, and its row."""
    kind = str(kind).replace("-", "_")
    family = ALIASES.get(kind, kind.removesuffix("_text"))
    return (family, families()[family]) if family in families() else None


def inner(config: dict) -> dict | None:
    return next((config[name] for name in INNER if isinstance(config.get(name), dict)), None)


def published(family: str, shape: Shape, config: dict, tokens: int) -> Shape:
    """`shape`, of a checkpoint of the family, with the sizes and the activation of config.json."""
    problems, sizes = [], {}
    fixed = shape.top_k if family in FIXED_TOP_K else None
    keys = HIDDEN, (WIDTHS.get(family, WIDTH),), EXPERTS, TOP_K
    for size, names in zip(("hidden", "intermediate", "num_experts", "top_k"), keys, strict=True):
        name = next((name for name in names if config.get(name) is not None), None)
        value = config[name] if name else fixed if size == "top_k" else None
        if isinstance(value, list) and value and (value == value[:1] * len(value) or family == TWO_KINDS):
            value = value[0]
        if value is None:
            problems.append(f"it has no {' or '.join(names)}")
        elif not (type(value) is int and 1 <= value <= MOST):
            problems.append(f"{name} is {shown(value)}; it should be a whole number from 1 to {MOST}")
        sizes[size] = value
    try:
        activation = activation_of(family, shape.activation, config)
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    if problems:
        raise CheckpointError("config.json", problems)
    return replace(shape, num_tokens=tokens, activation=activation, **sizes)


def activation_of(family: str, activation: str, config: dict) -> str:
    """The activation of a configuration; `activation` is that of a checkpoint of the family."""
    if activation == "swiglu_oai":
        return oai_activation(config)
    if activation.startswith("swiglu_limit"):
        limit = config.get("swiglu_limit")
        return activation if limit is None else swiglu_limit(limit, limit)
    name = ACTS.get(family, ACT)
    act, known = config.get(name), ACTIVATIONS if get_activation(activation).gated else PLAIN
    if act is None:
        return activation
    if act not in list(known):
        raise ValueError(f"{name} is {shown(act)}; known: {', '.join(known)}")
    return known[act]


def complaints(shape: Shape, ranks: int = 1) -> list[str]:
    """What keeps a step from running anywhere, if so many ranks share the experts."""
    found = []
    if ranks > shape.num_experts:
        found.append(f"{ranks} ranks cannot share {shape.num_experts} experts")
    if shape.top_k > shape.num_experts:
        found.append(f"a token cannot go to {shape.top_k} of {shape.num_experts} experts")
    if shape.num_experts * shape.hidden * shape.intermediate >= MOST_NUMBERS:
        found.append(f"{shape.num_experts} experts of {shape.hidden} x {shape.intermediate} are too large")
    if shape.num_tokens * shape.top_k * max(shape.hidden, shape.intermediate) >= MOST_NUMBERS:
        found.append(f"{shape.num_tokens} tokens of such experts are too many")
    if shape.num_tokens * shape.top_k >= MOST_ROWS:
        found.append(
            f"{shape.num_tokens} tokens with {shape.top_k} experts each are {MOST_ROWS} rows or more"
        )
    return found


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def report_lines(name: str, shape: Shape, target: str) -> list[str]:
    """Return a head, and for each product of a training step its sizes, its tier and why not a better one."""
    flags = {
        "transposed weights": shape.transposed,
        "interleaved gate": shape.interleaved,
        "biases": shape.bias,
    }
    words = [shape.activation, *(word for word, holds in flags.items() if holds)]
    table = [("product", "rows", "columns", "sum over", "kernels")]
    with tuning.tables_of((tiles_table(target),)):
        why_not = why_portable(target)
        for part, product in products(inputs(shape)).items():
            table.append((part, *map(str, product[2:]), str(tier(product, why_not))))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in table]
    return [f"{name} on {target}, bfloat16: T, H, I, E, k = {shape}; {', '.join(words)}", *rows]


def why_portable(target: str) -> str:
    return "" if target == HOPPER else f"{target} is no Hopper GPU"


def tiles_table(target: str) -> str:
    """Return the name of the table of tiles that serves a target."""
    maker, _, number = target.partition("_")
    return tuning.table_name("cuda", int(number)) if maker == "sm" else tuning.table_name("hip", target)
