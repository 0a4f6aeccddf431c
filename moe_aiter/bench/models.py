"""`moe-aiter bench models`: a step of published models' experts, by tier of kernels, beside other code.

models.csv names the checkpoints: sizes, how weights lie in memory, gate, biases and activation.  Routing is
given, and the weights of a model are allocated once, for all contenders.
"""

import argparse
import contextlib
import csv
import dataclasses
import functools
import gc
import importlib
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..files import opened
from ..kernels import hopper
from ..kernels.experts.tiers import HOPPER, PORTABLE, meta_experts, products, tier
from . import layer
from .command import Asked, Command, Contest
from .measure import (
    PASSES,
    WHERE,
    Contender,
    PassTimer,
    add_contenders,
    add_list,
    built,
    device_name,
)
from .problem import Problem, Shape, new_problem

MODELS = pathlib.Path(__file__).with_name("models.csv")
TIERS = (HOPPER, PORTABLE)
PRODUCTS = ("up", "down", "down_grad", "dW_down", "dx", "dW_up")  # of a step, as `products` names them
CHECKED = 2**28  # numbers in the weights whose gradients are compared: the map is large
ABOUT = ("checkpoint", "layout", "gate", "biases", "activation")


class Model(NamedTuple):
    """A row of models.csv: a checkpoint, its sizes under tensor parallelism, or sizes of no checkpoint."""

    name: str
    families: tuple[str, ...]  # of transformers, whose checkpoints have these experts
    shape: Shape
    cells: dict  # of its rows


@functools.cache
def models() -> dict[str, Model]:
    """The rows of models.csv by name."""
    with opened(MODELS, newline="") as file:
        return {row["model"]: model_of(row) for row in csv.DictReader(file)}


def model_of(row: dict) -> Model:
    shape = Shape(
        *(int(row[size]) for size in layer.SIZES),
        bias=row["biases"] == "yes",
        activation=row["activation"],
        interleaved=row["gate"] == "interleaved",
        transposed=row["layout"] == "transposed",
        checked=CHECKED,
    )
    cells = {name: row[name] for name in ("model", *layer.SIZES, *ABOUT)}
    return Model(row["model"], tuple(row["families"].split()), shape, cells)


def plain(checkpoint: str) -> str:
    """Models that were trained further have the sizes of the base."""
    return re.sub(r"-(base|instruct|chat|it|hf)$", "", checkpoint)


def named_models(words: list[str] | None) -> list[Model]:
    """The models that the words name, in the table's order; all without words.

    A word is a name, a checkpoint with or without "-Base", or else a part of names, in any case.  Raises
    ValueError for one that names no model.
    """
    chosen = set(models()) if words is None else set()
    for word in words or ():
        text = word.lower()
        exact = [m.name for m in models().values() if text == m.name.lower()]
        of_checkpoint = [
            m.name for m in models().values() if text and plain(text) == plain(m.cells["checkpoint"].lower())
        ]
        parts = [name for name in models() if text and text in name.lower()]
        if not (found := exact or of_checkpoint or parts):
            raise ValueError(f"--model: no name contains {word[:80]!r}; there are {'; '.join(models())}")
        chosen.update(found)
    return [model for name, model in models().items() if name in chosen]


def model_options(parser: argparse.ArgumentParser) -> None:
    text = "models by name or checkpoint, or all whose name contains the word; --list prints the names [all]"
    parser.add_argument("--model", nargs="+", metavar="NAME", help=text)
    add_list(parser, lambda: "; ".join(models()), of="models")
    parser.add_argument("--tier", choices=TIERS, help="our kernels to time [all that run here]")
    text = "leave out torch.compile, which is slow to compile"
    parser.add_argument("--no-compile", action="store_true", help=text)
    add_contenders(parser, dtype=None)


def asked_models(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    if kind == "cpu" and not args.model:
        raise ValueError("all models take hours on a CPU: name some with --model")
    if args.tier == HOPPER and not (kind == "cuda" and hopper.is_hopper(torch.device("cuda", 0))):
        raise ValueError("--tier hopper: there is no Hopper GPU")
    chosen = named_models(args.model)
    freeze(not args.no_compile)
    for model in chosen:
        make = functools.partial(model_contest, model.shape, args.tier, not args.no_compile)
        yield Asked(f"{model.name}: T, H, I, E, k = {model.shape}", model.cells, make)


# as layer.RIVALS
RIVALS = (
    ("moe_aiter experts", "Hugging Face experts, grouped_mm"),
    ("moe_aiter experts", "torch grouped_mm"),
    ("moe_aiter experts", "torch grouped_mm, compiled"),
)


def freeze(compiles: bool) -> None:
    """Exempt what contenders import from garbage collection, which each measurement of memory runs."""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.integrations.moe")
    if compiles:
        torch.compiler.reset()  # which imports the compiler
    gc.freeze()


COMMAND = Command(
    [
        *(*WHERE, "model", *layer.SIZES, *ABOUT, "contender"),
        *(f"{name}_{figure}" for name in PASSES for figure in ("ms", "p20", "p80", "tflops")),
        *(*layer.HOST, "held_mib", "peak_mib", "error", "torch_error", "note", *PRODUCTS),
    ],
    (
        *("{contender:<42}", "{step_ms:9.3f} ms", "{step_tflops:7.4g} TFLOP/s"),
        *("host {step_host_ms:7.2f} ms", "{peak_mib:8.0f} MiB", "{error:9.1e}"),
    ),
    model_options,
    asked_models,
    demands=any,
    reps={"cuda": 5, "cpu": 3},
    goes_on=True,
    summed_up=lambda found: layer.answers(found, "model", RIVALS),
)


def model_contest(
    shape: Shape, only_tier: str | None, compiles: bool, device: torch.device, dtype: torch.dtype
) -> Contest:
    if compiles:
        torch.compiler.reset()  # it holds the model before
    gc.collect()
    p = new_problem(shape, dtype, device)
    field, timer = list(model_contenders(p, only_tier, compiles)), PassTimer(p, shape.forward_flops)
    return Contest(field, layer.by_loop(p), timer, keeps_refused=True)


def model_contenders(p: Problem, only_tier: str | None, compiles: bool) -> Iterator[Contender]:
    """Yield our experts on each tier, the peers that can run here, and plain products."""
    for ours in layer.our_experts(p):
        name = HOPPER if HOPPER in ours.name else PORTABLE
        if only_tier in (None, name):
            yield dataclasses.replace(ours, cells=tiers(p, name))
    peers = {"torch grouped_mm": lambda: layer.torch_grouped_mm(p)}
    if compiles:
        peers["torch grouped_mm, compiled"] = lambda: layer.torch_compiled(layer.torch_grouped_mm(p))
    peers["Hugging Face experts"] = lambda: layer.hugging_face_experts(p)
    if p.x.is_cuda and p.shape.plain:
        peers["SonicMoE"] = lambda: layer.sonicmoe(p)
    for peer in built(peers.items()):
        # not checked with biases: they round z twice, and may add up the gradient of a bias in 16 bits
        yield dataclasses.replace(peer, checked=not p.shape.bias)
    yield layer.matmuls(p)


def tiers(p: Problem, name: str) -> dict[str, str]:
    """The tier of each product, and why not Hopper's: of our experts that run on the tier `name`."""
    if not p.x.is_cuda:
        return {}
    why_not = ""
    if name == PORTABLE:
        why_not = "forced" if hopper.is_hopper(p.x.device) else f"{device_name(p.x.device)} is no Hopper GPU"
    return {part: str(tier(product, why_not)) for part, product in products(inputs(p.shape)).items()}


def inputs(shape: Shape):
    """The inputs of a step's products, without memory."""
    how = {"interleaved": shape.interleaved, "bias": shape.bias, "transposed": shape.transposed}
    return meta_experts(shape.sizes, shape.activation, **how)
