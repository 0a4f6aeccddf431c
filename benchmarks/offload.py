"""`python -m benchmarks offload`: frozen experts with adapters, with weights on the device or in host memory.

Some layers of experts with a residual, as in a model, with the routing given.  A pass of offloaded layers
needs at least the time of the same pass with the weights on the device, and at least the time of its copies
at the rate of a plain copy of all weights from page-locked memory.  The larger of the two is the bound.
"""

import argparse
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moe_aiter.bench.command import Asked, Command, Contest, Judge, errors_of
from moe_aiter.bench.layer import SIZES, shape_cells
from moe_aiter.bench.measure import (
    MIB,
    PASSES,
    WHERE,
    Contender,
    PassTimer,
    add_contenders,
    add_shapes,
    count,
)  # fmt: skip
from moe_aiter.bench.problem import Problem, Shape, named, new_problem
from moe_aiter.kernels.quantize.four_bit import FORMATS as FOUR_BITS
from moe_aiter.layers.experts import Experts
from moe_aiter.layers.four_bit import to_four_bits
from moe_aiter.layers.lora import LoRAExperts
from moe_aiter.layers.offloaded import layers_to_offload, offload
from moe_aiter.routing.plan import make_plan

DEFAULT = {"cuda": ["C-2048", "C-8192", "C"], "cpu": ["cpu"]}
PLAIN = "plain"
FORMATS = PLAIN, *FOUR_BITS
ON_DEVICE, OFFLOADED, COPY = "moe_aiter, on the device", "moe_aiter, offloaded", "copy"
BOUNDS = [f"{name}_{figure}" for name in PASSES for figure in ("bound_ms", "of_bound")]


def options(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, "C with 2048, 8192 and 32768 tokens; cpu on a CPU", plain=True)
    formats = "weights: plain (of --dtype), nf4, mxfp4 or int4 [plain nf4]"
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=[PLAIN, "nf4"], help=formats)
    parser.add_argument("--layers", type=count, default=8, metavar="N", help="layers of experts [8]")
    parser.add_argument("--ahead", type=count, default=1, metavar="N", help="layers to copy ahead [1]")
    parser.add_argument("--rank", type=count, default=16, help="rank of the adapters [16]")
    add_contenders(parser)


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    for name, shape in named(args.shape or DEFAULT[kind], plain=True).items():
        for format in args.format:
            block = 1 if format == PLAIN else FOUR_BITS[format].block
            if shape.hidden % block or shape.intermediate % block:
                raise ValueError(f"--shape {name}: with {format}, H and I must be multiples of {block}")
            how = {"layers": args.layers, "ahead": args.ahead, "rank": args.rank}
            words = f"{args.layers} layers, {format} weights, {args.ahead} ahead, rank {args.rank}"
            cells = shape_cells(name, shape) | {"format": format} | how
            make = functools.partial(contest, shape, format, **how)
            yield Asked(f"shape {name}: T, H, I, E, k = {shape}; {words}", cells, make)


COMMAND = Command(
    [
        *WHERE,
        "shape",
        *SIZES,
        *("format", "layers", "ahead", "rank", "contender"),
        *(f"{name}_{figure}" for name in PASSES for figure in ("ms", "p20", "p80")),
        *BOUNDS,
        *("ms", "gb_per_s", "weights_mib", "held_mib", "peak_mib", "error"),
    ],
    (
        *("{contender:<25}", *(f"{name} {{{name}_ms:8.2f}} ms," for name in PASSES)),
        *(
            "weights {weights_mib:6.0f} MiB,",
            "peak {peak_mib:6.0f} MiB",
            "{ms:8.2f} ms, {gb_per_s:5.1f} GB/s",
        ),
        "of the bound: inference {inference_of_bound:.2f}, step {step_of_bound:.2f}",
    ),
    options,
    asked,
    reps={"cuda": 25, "cpu": 3},
)


def contest(
    shape: Shape, format: str, device: torch.device, dtype: torch.dtype, *, layers: int, ahead: int, rank: int
) -> Contest:
    p = new_problem(shape, dtype, device)
    resident, offloaded = (stack(p, format, layers, rank) for _ in range(2))
    found = layers_to_offload(offloaded)
    size, slots = found[0].size, min(ahead + 1, layers)
    offload(offloaded, device, ahead=ahead)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def copy() -> Tensor:
        for layer in found:
            for t, place in zip(layer.weights(), layer.places, strict=True):
                place.view(buffer).copy_(t, non_blocking=True)
        return buffer

    on_device = contender(p, resident, ON_DEVICE, layers * size)
    field = [
        on_device,
        contender(p, offloaded, OFFLOADED, slots * size),
        Contender(COPY, copy, checked=False, always=True),
    ]

    def judge() -> Judge:
        expected = [t.double() for t in on_device.results(p)]  # to the bit: the bar is an error of 0
        return lambda c: errors_of(c.results(p), expected, [0.0] * len(expected)) if c.checked else []

    # a pass finds the layers that the pass before has used last; a step begins after inference
    backward = layers - slots
    copied = {"inference": backward, "forward": layers, "step": layers + backward}
    shares = {name: count / layers if backward else 0.0 for name, count in copied.items()}
    compare = functools.partial(add_bounds, shares, layers * size)
    return Contest(field, judge(), PassTimer(p, layers * shape.forward_flops), compare)


def stack(p: Problem, format: str, layers: int, rank: int) -> nn.ModuleList:
    """Layers of frozen experts with adapters, each with a copy of the problem's weights."""
    _, hidden, width, num_experts, _ = p.shape.sizes
    found = nn.ModuleList()
    torch.manual_seed(0)
    for _ in range(layers):
        base = Experts(num_experts, hidden, width, device="meta", dtype=p.x.dtype)
        for name in ("gate_up", "down"):
            setattr(base, name, nn.Parameter(getattr(p, name).detach().clone(), requires_grad=False))
        if format != PLAIN:
            to_four_bits(base, format)
        layer = LoRAExperts(base, rank=rank)
        for lora in (layer.gate_up_lora, layer.down_lora):
            nn.init.normal_(lora.B, std=0.01)
        found.append(layer)
    return found


def contender(p: Problem, model: nn.ModuleList, name: str, size: int) -> Contender:
    """`size`: bytes of weights on the device."""

    def run() -> Tensor:
        plan, weights, x = make_plan(p.expert_ids, p.shape.num_experts), p.routing_weights.to(p.x.dtype), p.x
        for layer in model:
            x = x + layer(x, weights, plan)
        return x

    trained = [t for t in model.parameters() if t.requires_grad]
    leaves = p.x, p.routing_weights, *trained
    return Contender(name, run, leaves, ours=True, cells={"weights_mib": size / MIB})


def add_bounds(shares: dict[str, float], size: int, rows: list[dict]) -> None:
    """Add the rate of the plain copy of `size` bytes, and each bound and how many times as long a pass is."""
    by_name = {row["contender"]: row for row in rows}
    if COPY not in by_name:
        return
    copy = by_name[COPY]
    copy["gb_per_s"] = size / copy["ms"] / 1e6
    if ON_DEVICE in by_name and OFFLOADED in by_name:
        row = by_name[OFFLOADED]
        for name, share in shares.items():
            bound = max(by_name[ON_DEVICE][f"{name}_ms"], share * copy["ms"])
            row |= {f"{name}_bound_ms": bound, f"{name}_of_bound": row[f"{name}_ms"] / bound}
