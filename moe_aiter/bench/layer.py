"""`moe-aiter bench layer`: forward and step of our layer and of its peers."""

import argparse
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from . import products
from .contenders import contenders
from .measure import (
    PASSES,
    WHERE,
    Contender,
    PassTimer,
    add_contenders,
    device_name,
    distances,
    floors,
    sustained,
)
from .problem import DEFAULT, GROUPS, SHAPES, Problem, Shape, checked_experts, named, new_problem, truth
from .products import Asked, Case, Command, Error, Judge, errors_of

PARTS = ("output", "dx", "dgate_up", "ddown", "drouting", "dgate_up_bias", "ddown_bias")
PER_EXPERT = ("dgate_up", "ddown", "dgate_up_bias", "ddown_bias")
SIZES = ("tokens", "hidden", "intermediate", "experts", "top_k")
HOST = [f"{name}_host_ms" for name in PASSES]
ADDED = ["routing", "forward_roofline", "step_roofline", *HOST]  # columns that older files may lack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (
        f"of {', '.join(SHAPES)}; or a group: {', '.join(GROUPS)}; A to E on a GPU, cpu on a CPU unless given"
    )
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, *GROUPS], metavar="NAME", help=names)
    parser.add_argument(
        "--routing", choices=("normal", "zipf"), default="normal", help="normal logits, or skewed experts"
    )
    add_contenders(parser)


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    for name in named(args.shape or DEFAULT[kind]):
        shape = SHAPES[name]
        title = f"shape {name}: T, H, I, E, k = {shape}; {args.routing} routing"
        cells = shape_cells(name, shape) | {"routing": args.routing}
        yield Asked(title, cells, Case(name, str(shape), functools.partial(problem, shape, args.routing)))


COMMAND = Command(
    "layer",
    [
        *WHERE,
        "shape",
        *SIZES,
        "contender",
        *(f"{name}_{figure}" for name in PASSES for figure in ("ms", "p20", "p80", "tflops")),
        *("held_mib", "peak_mib", "error", "torch_error"),
        *ADDED,
    ],
    (
        "{contender:<40}",
        *(f"{{{name}_ms:13.2f}} {{{name}_tflops:7.2f}}" for name in PASSES),
        *("{step_host_ms:6.2f}", "{forward_roofline:5.0f}", "{step_roofline:5.0f}"),
        *("{held_mib:8.0f}", "{peak_mib:8.0f}", "{error:9.1e}"),
    ),
    asked,
    head=f"{'':<40}{''.join(f'{name} ms, TFLOP/s'.rjust(22) for name in PASSES)} "
    f"{'host':>6} {'roofline %':>11} {'held':>8} {'peak MiB':>9} {'error':>9}",
    added=ADDED,
    demands=all,
)


def problem(
    shape: Shape, routing: str, device: torch.device, dtype: torch.dtype, seed: int
) -> products.Problem:
    p = new_problem(shape, dtype, device, routing)
    floor = floors(shape, device_name(device))  # of what is checked, which computes the same

    def compare(rows: list[dict]) -> None:
        for row in rows:
            row |= shares(row, floor) if "error" in row else {}

    return products.Problem(
        list(contenders(p)),
        judge=functools.partial(by_loop, p),
        timer=PassTimer(p, shape.forward_flops),
        compare=compare,
        keeps_refused=True,
    )


def by_loop(p: Problem) -> Judge:
    """By the plain loop in float64, and in the dtype; each is computed when it is first asked for."""

    @functools.cache
    def known(routed: bool) -> tuple[list[Tensor], list[float]]:
        exact = truth(p, p.expert_ids, routed, torch.float64)
        return exact, distances(truth(p, p.expert_ids, routed, p.x.dtype), exact)

    def judge(contender: Contender) -> list[Error]:
        got = contender.results(p)
        if not contender.checked:
            return []
        exact, torch_errors = known(contender.routed)
        if contender.expert_ids and not torch.equal(contender.expert_ids(), p.expert_ids):
            exact = truth(p, contender.expert_ids(), contender.routed, torch.float64)
        return errors_of(comparable(got, p.shape), exact, torch_errors, PARTS)

    return judge


def comparable(got: list[Tensor], shape: Shape) -> list[Tensor]:
    """What the truth has: of the weights' gradients, those of `checked_experts`."""
    experts = checked_experts(shape)
    if len(experts) == shape.num_experts:
        return got
    return [t[experts] if part in PER_EXPERT else t for part, t in zip(PARTS, got, strict=False)]


def shape_cells(name: str, shape: Shape) -> dict:
    return {"shape": name} | dict(zip(SIZES, shape.sizes, strict=True))


def shares(row: dict, floor: dict[str, float]) -> dict:
    """How near each pass came to its floor, in percent."""
    return {
        f"{p}_roofline": 100 * ms / sustained(row, f"{p}_") for p, ms in floor.items() if f"{p}_ms" in row
    }
