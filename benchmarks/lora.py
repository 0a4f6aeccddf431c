"""`python -m benchmarks lora`: frozen experts with adapters, PEFT's on each implementation of the experts.

Qwen3-MoE's experts with the routing given, and PEFT's adapters of both weights in float32, as it makes them.
As `moe-aiter bench layer`, with the gradients of the adapters, but the weights get no gradients.

A contender with weights of 4 bits is compared with the results of its own weights, dequantised.  Those of
PEFT are written to whole weights before each pass, by code that torch.compile makes.  FP8 weights in blocks
multiply rows that are quantised too, so they are not compared.

With several adapters, each token uses one of copies of the same factors: the results are those of one.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from moe_aiter.bench.command import Asked, Command, Contest, Judge, errors_of
from moe_aiter.bench.layer import SIZES, shape_cells
from moe_aiter.bench.measure import (
    PASSES,
    WHERE,
    Contender,
    PassTimer,
    add_contenders,
    add_shapes,
    built,
    count,
    distances,
    skip,
)  # fmt: skip
from moe_aiter.bench.problem import Problem, Shape, by_experts, named, new_problem
from moe_aiter.integrations import peft as integration
from moe_aiter.integrations.transformers import NAME
from moe_aiter.kernels.quantize.four_bit import FP8, dequantized, expanded_scales, quantized
from moe_aiter.kernels.quantize.scale_blocks import quantize_blocks
from moe_aiter.layers.experts import Experts
from moe_aiter.layers.four_bit import FourBitExperts, from_fp8, to_four_bits
from moe_aiter.layers.lora import LoRAExperts
from moe_aiter.routing.plan import make_plan

DEFAULT = {"cuda": ["C"], "cpu": ["cpu"]}
FOUR_BITS = "nf4", "mxfp4"
SEVERAL = 8  # adapters for each expert
RESULTS = ("output", "dx", "drouting", "dA of gate_up", "dB of gate_up", "dA of down", "dB of down")


def options(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, "C on a GPU, cpu on a CPU", plain=True)
    parser.add_argument("--rank", type=count, default=16, help="rank of the adapters [16]")
    add_contenders(parser)


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    for name, shape in named(args.shape or DEFAULT[kind], plain=True).items():
        title = f"shape {name}: T, H, I, E, k = {shape}; rank {args.rank}"
        make = functools.partial(contest, shape, args.rank)
        yield Asked(title, shape_cells(name, shape) | {"rank": args.rank}, make)


COMMAND = Command(
    [
        *WHERE,
        "shape",
        *SIZES,
        *("rank", "contender"),
        *(f"{name}_{figure}" for name in PASSES for figure in ("ms", "p20", "p80")),
        *("held_mib", "peak_mib", "error", "torch_error"),
    ],
    (
        *("{contender:<32}", *(f"{name} {{{name}_ms:8.2f}} ms," for name in PASSES)),
        *(f"{what} {{{what}_mib:6.0f}} MiB," for what in ("held", "peak")),
        "error {error:.1e}",
    ),
    options,
    asked,
    reps={"cuda": 25, "cpu": 3},  # PEFT as it comes takes seconds for each on a CPU
)


def contest(shape: Shape, rank: int, device: torch.device, dtype: torch.dtype) -> Contest:
    p = new_problem(shape, dtype, device)
    adapters = new_adapters(p, rank)
    timer = PassTimer(p, shape.forward_flops)
    return Contest(list(contenders(p, adapters)), by_whole_weights(p, adapters), timer)


@dataclasses.dataclass
class Adapters:
    """Adapters of both weights, float32: A (E, r, in), B (E, out, r); scaled by 2, PEFT's alpha of 2 r."""

    factors: tuple[Tensor, ...]  # A and B of gate_up, A and B of down
    rank: int
    scaling: float = 2.0


def new_adapters(p: Problem, rank: int) -> Adapters:
    E = p.shape.num_experts
    sizes = [(w.shape[1], w.shape[2]) for w in (p.gate_up, p.down)]
    shapes = [s for out, width in sizes for s in ((E, rank, width), (E, out, rank))]
    factors = (torch.randn(s, device=p.x.device).mul_(0.3 * s[-1] ** -0.5) for s in shapes)
    return Adapters(tuple(factors), rank)


def contenders(p: Problem, adapters: Adapters) -> Iterator[Contender]:
    """Yield the contenders that can run here, ours first; print a line for each one that cannot."""
    yield lora_experts(p, adapters)
    for format in FOUR_BITS:
        try:
            yield lora_experts(p, adapters, format)
        except ValueError as error:
            skip(f"LoRAExperts, {format}", error)
    yield lora_experts(p, adapters, FP8)
    yield lora_experts(p, adapters, several=SEVERAL)
    peft = functools.partial(peft_experts, p, adapters)
    implementations = [NAME, f"{NAME}, whole weights", "grouped_mm", "eager"]
    if p.x.dtype != torch.bfloat16:
        implementations.remove("grouped_mm")
    yield from built((f"PEFT with {name}", functools.partial(peft, name)) for name in implementations)
    torch.compiler.reset()  # or the writers of a second shape reach the limit of recompilations
    for format in FOUR_BITS if "grouped_mm" in implementations else ():
        yield from built([(f"PEFT with grouped_mm, {format}", functools.partial(peft, "grouped_mm", format))])


def lora_experts(p: Problem, adapters: Adapters, format: str = "", several: int = 1) -> Contender:
    """Ours, with weights of 4 or 8 bits if there is a format, and so many adapters for each expert."""
    _, hidden, width, num_experts, _ = p.shape.sizes
    base = Experts(num_experts, hidden, width, device="meta", dtype=p.x.dtype)
    base.gate_up, base.down = frozen(p.gate_up), frozen(p.down)
    if format == FP8:
        for name, w in (("gate_up", p.gate_up), ("down", p.down)):
            delattr(base, name)
            setattr(base, name, from_fp8(*quantize_blocks(w, True), w.dtype))
        base.__class__ = FourBitExperts
    elif format:
        to_four_bits(base, format)
    layer = LoRAExperts(base, several, rank=adapters.rank, alpha=adapters.scaling * adapters.rank)
    leaves = [nn.Parameter(t.repeat_interleave(several, 0)) for t in adapters.factors]
    for lora, pair in zip((layer.gate_up_lora, layer.down_lora), pairs(leaves), strict=True):
        lora.A, lora.B = pair
    ids = torch.randint(several, p.x.shape[:1], device=p.x.device) if several > 1 else None

    def run() -> Tensor:
        plan = make_plan(p.expert_ids, p.shape.num_experts)
        return layer(p.x, p.routing_weights.to(p.x.dtype), plan, ids)

    def as_ours(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *gradients[:2], *(g.unflatten(0, (-1, several)).sum(1) for g in gradients[2:])

    what = format or (f"{several} adapters" if several > 1 else "")
    leaves = (p.x, p.routing_weights, *leaves)
    name = f"moe_aiter LoRAExperts{what and ', '}{what}"
    return Contender(name, run, leaves, checked=format != FP8, as_ours=as_ours, ours=True)


def peft_experts(p: Problem, adapters: Adapters, name: str, format: str = "") -> Contender:
    """Return transformers' experts in PEFT's wrappers, with or without `integrations.peft`."""
    import peft
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    integration.register()
    _, hidden, width, num_experts, top_k = p.shape.sizes
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": num_experts}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=top_k)
    config._experts_implementation = name.partition(",")[0]
    holder = nn.Module()
    with torch.device("meta"):
        holder.experts = Qwen3MoeExperts(config)
    weights = [frozen(w.clone() if format else w) for w in (p.gate_up, p.down)]
    writers = [writer(w, format) for w in weights] if format else []
    holder.experts.gate_up_proj, holder.experts.down_proj = weights
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    alpha = adapters.scaling * adapters.rank
    how = peft.LoraConfig(r=adapters.rank, lora_alpha=alpha, target_modules=[], target_parameters=targets)
    outer = peft.get_peft_model(holder, how).base_model.model.experts  # of down_proj, around gate_up_proj's
    leaves = []
    for wrapper, (a, b) in zip((outer.base_layer, outer), pairs(adapters.factors), strict=True):
        wrapper.lora_A["default"].weight = nn.Parameter(a.flatten(0, 1).clone())
        wrapper.lora_B["default"].weight = nn.Parameter(b.permute(1, 2, 0).flatten(1).clone())
        leaves += [wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight]

    def run() -> Tensor:
        for write in writers:
            write()
        return outer(p.x, p.expert_ids, p.routing_weights.to(p.x.dtype))

    def run_without() -> Tensor:
        integration.unregister()
        try:
            return run()
        finally:
            integration.register()

    def as_ours(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dx, ds, *rest = gradients
        split = [
            (a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1))
            for a, b in pairs(rest)
        ]
        return dx, ds, *split[0], *split[1]

    whole = name.endswith("whole weights")
    leaves = (p.x, p.routing_weights, *leaves)
    call, ours = run_without if whole else run, name == NAME
    return Contender(f"PEFT, {name}{format and ', '}{format}", call, leaves, as_ours=as_ours, ours=ours)


def writer(weight: Tensor, format: str) -> Callable[[], Tensor]:
    """Return what writes `weight` again, from 4 bits."""
    w = quantized(weight, format)

    @torch.no_grad()
    def write() -> Tensor:
        scale, zero = expanded_scales(w.packed, *w.parts)
        return weight.copy_(dequantized(w.packed, scale, zero, w.table, format))

    return torch.compile(write) if weight.is_cuda else write


def frozen(weight: Tensor) -> nn.Parameter:
    """Return a parameter with the memory of `weight`, without gradients."""
    return nn.Parameter(weight.detach(), requires_grad=False)


def pairs(factors) -> list[tuple[Tensor, Tensor]]:
    """A and B of gate_up, A and B of down."""
    return list(zip(factors[::2], factors[1::2], strict=True))


def truth(p: Problem, adapters: Adapters, dtype: torch.dtype) -> list[Tensor]:
    """Return the RESULTS in `dtype`: expert by expert, with the factors' product added to the weights."""
    # the weights as a model of this dtype gives them
    s = p.routing_weights.to(p.x.dtype).to(torch.promote_types(dtype, torch.float32))

    def whole(e: int, factors: list[Tensor]) -> list[Tensor]:
        bases = (w[e].detach().to(dtype) for w in (p.gate_up, p.down))
        return [w + adapters.scaling * (b @ a) for w, (a, b) in zip(bases, pairs(factors), strict=True)]

    every = range(p.shape.num_experts)
    return by_experts(p, p.expert_ids, p.x.to(dtype), s, adapters.factors, every, whole)


def by_whole_weights(p: Problem, adapters: Adapters) -> Judge:
    """Return the judge of every contender, which computes what a format's results should be."""

    @functools.lru_cache(1)  # they are large
    def expected(format: str) -> tuple[list[Tensor], list[float]]:
        weights = {name: getattr(p, name) for name in ("gate_up", "down")}
        if format:
            weights = {name: quantized(w, format).dequantize() for name, w in weights.items()}
        mine = dataclasses.replace(p, **weights)
        exact = truth(mine, adapters, torch.float64)
        return exact, distances(truth(mine, adapters, p.x.dtype), exact)

    def judge(contender: Contender):
        if not contender.checked:
            return []
        format = next((f for f in FOUR_BITS if contender.name.endswith(f", {f}")), "")
        return errors_of(contender.results(p), *expected(format), RESULTS)

    return judge
