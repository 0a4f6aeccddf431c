"""`moe-aiter bench layer`: forward and step of our layer, and of what people use instead of it.

Contenders whose name begins with "layer" route the tokens themselves; the others are given the routing.
"""

import argparse
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import settings
from ..integrations.transformers import NAME, register
from ..kernels.experts.fp8 import ALL, BLOCK, UpFp8Inputs
from ..kernels.experts.keep_fp8 import keep_fp8_weights
from ..kernels.experts.mlp import expert_mlp
from ..layers.moe import MoE
from ..op import IMPLS, ORDER, runs
from ..routing.plan import make_plan
from .command import Asked, Command, Contest, Error, Judge, errors_of
from .measure import (
    MIB,
    PASSES,
    WHERE,
    Contender,
    PassTimer,
    add_contenders,
    add_shapes,
    built,
    device_name,
    distances,
    floors,
    parameter,
    sustained,
)  # fmt: skip
from .problem import (
    DEFAULT,
    Problem,
    Shape,
    activation,
    checked_experts,
    for_loop,
    named,
    new_problem,
    truth,
)  # fmt: skip

RESULTS = ("output", "dx", "dgate_up", "ddown", "drouting", "dgate_up_bias", "ddown_bias")
PER_EXPERT = ("dgate_up", "ddown", "dgate_up_bias", "ddown_bias")
INVARIANT = ", batch invariant"  # ends the name of a contender
SIZES = ("tokens", "hidden", "intermediate", "experts", "top_k")
HOST = [f"{name}_host_ms" for name in PASSES]
ADDED = ["routing", "forward_roofline", "step_roofline", *HOST]  # columns that older files may lack


def options(parser: argparse.ArgumentParser) -> None:
    add_shapes(parser, "A to E on a GPU, cpu on a CPU")
    text = "normal logits, or skewed experts [normal]"
    parser.add_argument("--routing", choices=("normal", "zipf"), default="normal", help=text)
    text = "also time our layer with batch invariance, and print its price"
    parser.add_argument("--invariant", action="store_true", help=text)
    add_contenders(parser)


def asked(args: argparse.Namespace, kind: str) -> Iterator[Asked]:
    for name, shape in named(args.shape or DEFAULT[kind]).items():
        if args.routing == "zipf" and shape.hidden < shape.num_experts:
            raise ValueError(f"--routing zipf: {name} has more experts than hidden sizes")
        title = f"shape {name}: T, H, I, E, k = {shape}; {args.routing} routing"
        cells = shape_cells(name, shape) | {"routing": args.routing}
        yield Asked(title, cells, functools.partial(contest, shape, args.routing, args.invariant))


COMMAND = Command(
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
        "{contender:<42}",
        *(f"{{{name}_ms:12.3f}} {{{name}_tflops:9.4g}}" for name in PASSES),
        *("{step_host_ms:6.2f}", "{forward_roofline:5.0f}", "{step_roofline:5.0f}"),
        *("{held_mib:8.0f}", "{peak_mib:8.0f}", "{error:9.1e}"),
    ),
    options,
    asked,
    head=f"{'':<42}{''.join(f'{name} ms, TFLOP/s'.rjust(22) for name in PASSES)} "
    f"{'host':>6} {'roofline %':>11} {'held':>8} {'peak MiB':>9} {'error':>9}",
    added=ADDED,
    demands=all,
    summed_up=lambda found: answers(found),
)


def contest(
    shape: Shape, routing: str, invariant: bool, device: torch.device, dtype: torch.dtype
) -> Contest:  # fmt: skip
    p = new_problem(shape, dtype, device, routing)
    floor = floors(shape, device_name(device))  # of what is checked, which computes the same

    def compare(rows: list[dict]) -> None:
        for row in rows:
            row |= shares(row, floor) if "error" in row else {}

    timer = PassTimer(p, shape.forward_flops)
    field = [*contenders(p), *(invariant_layers(p) if invariant else ())]
    return Contest(field, by_loop(p), timer, compare, keeps_refused=True)


def by_loop(p: Problem) -> Judge:
    """Judge by the plain loop in float64 and in the dtype; both are computed at their first use."""

    @functools.cache
    def expected(routed: bool) -> tuple[list[Tensor], list[float]]:
        exact = truth(p, p.expert_ids, routed, torch.float64)
        return exact, distances(truth(p, p.expert_ids, routed, p.x.dtype), exact)

    def judge(contender: Contender) -> list[Error]:
        got = contender.results(p)
        if not contender.checked:
            return []
        exact, torch_errors = expected(contender.routed)
        if contender.expert_ids and not torch.equal(contender.expert_ids(), p.expert_ids):
            exact = truth(p, contender.expert_ids(), contender.routed, torch.float64)
        experts = checked_experts(p.shape)  # whose weights' gradients the truth has
        if len(experts) < p.shape.num_experts:
            got = [t[experts] if part in PER_EXPERT else t for part, t in zip(RESULTS, got, strict=False)]
        return errors_of(got, exact, torch_errors, RESULTS)

    return judge


def shares(row: dict, floor: dict[str, float]) -> dict:
    """Return the floor of each pass in percent of its time."""
    return {f"{name}_roofline": 100 * ms / sustained(row, f"{name}_") for name, ms in floor.items()}


# what the last line of a shape compares: ours and a baseline, of the first pair that was measured
RIVALS = (
    ("layer: moe_aiter MoE", "layer: Hugging Face Qwen3-MoE, grouped_mm"),
    ("layer: moe_aiter MoE", "layer: Hugging Face Qwen3-MoE, eager"),
    ("moe_aiter experts", "torch grouped_mm"),
    ("moe_aiter experts", "for-loop over experts"),
)


def answers(
    found: list[tuple[Asked, list[dict]]], subject: str = "shape", rivals: Sequence[tuple[str, str]] = RIVALS
) -> Iterable[str]:
    """Yield a line for each contest: how many times as fast our step is as a baseline's, and both peaks."""
    for asked, rows in found:
        yield f"{asked.cells[subject]}: {answer(rows, rivals)}"
        for text in prices(rows):
            yield f"{asked.cells[subject]}: {text}"


def answer(rows: list[dict], rivals: Sequence[tuple[str, str]]) -> str:
    """Compare the first pair that was measured; name what is missing of the first pair."""
    measured = {row["contender"]: row for row in rows if "step_ms" in row}
    for name in tuple(measured):  # the first of our experts has the backend that a user gets
        if name.startswith("moe_aiter experts, "):
            measured.setdefault("moe_aiter experts", measured[name])
    pairs = [[measured.get(name) for name in pair] for pair in rivals]
    missing = [name for name, row in zip(rivals[0], pairs[0], strict=True) if not row]
    note = f"{' and '.join(map(repr, missing))} not measured (left out, not installed or refused)"
    pair = next((pair for pair in pairs if all(pair)), None)
    if not pair:
        return f"no comparison: {note}"
    return f"{pair[0]['contender']} is {compared(*pair)}; {note}" if missing else compared(*pair)


def prices(rows: list[dict]) -> Iterator[str]:
    """Yield how long our layer takes with batch invariance, in times of the layer without."""
    measured = {row["contender"]: row for row in rows if "step_ms" in row}
    for name, row in measured.items():
        without = measured.get(name.removesuffix(INVARIANT))
        if name.endswith(INVARIANT) and without:
            times = ((p, *(sustained(r, f"{p}_") for r in (row, without))) for p in PASSES)
            text = ", ".join(f"{p} {ms / without_ms:.2f}" for p, ms, without_ms in times)
            yield f"{name}: times as long as without: {text}"


def compared(ours: dict, theirs: dict) -> str:
    ms = [sustained(row, "step_") for row in (ours, theirs)]
    name = theirs["contender"].removeprefix("layer: ")
    text = f"{ms[1] / ms[0]:.1f} times as fast as {name} ({short(ms[0])} instead of {short(ms[1])} ms a step)"
    if not all("peak_mib" in row for row in (ours, theirs)):
        return text
    peaks = [row["peak_mib"] * MIB / 1e9 for row in (ours, theirs)]
    scale, unit = (1, "GB") if max(peaks) >= 0.1 else (1000, "MB")
    return f"{text}, peak memory {short(scale * peaks[0])} instead of {short(scale * peaks[1])} {unit}"


def short(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def shape_cells(name: str, shape: Shape) -> dict:
    return {"shape": name} | dict(zip(SIZES, shape.sizes, strict=True))


# contenders


def contenders(p: Problem) -> Iterator[Contender]:
    """Yield all contenders that can run here, ours first.

    A peer that is not there, that cannot do what the shape asks for, or of a version that we do not know is
    left out, with a line that says so.
    """
    yield our_layer(p)
    if can_be_graphed(p):
        yield our_layer(p, graphed=True)
    for fp8 in ("e4m3", "e4m3" + ALL, BLOCK) if multiplies_8_bits(p) else ():
        yield our_layer(p, fp8=fp8)
        for both in (False, True):
            yield later_micro_batch(our_layer(p, fp8=fp8), p, both)
    yield from our_experts(p)
    yield Contender("for-loop over experts", lambda: for_loop(p), expert_inputs(p))
    yield from built(peers(p))


def invariant_layers(p: Problem) -> Iterator[Contender]:
    """Yield our layer with batch invariance, as it comes and in a CUDA graph."""
    yield our_layer(p, invariant=True)
    if can_be_graphed(p):
        yield our_layer(p, graphed=True, invariant=True)


def can_be_graphed(p: Problem) -> bool:
    return p.x.is_cuda and not settings.debug and keeps_room(p)  # debug's checks synchronise


def peers(p: Problem) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """The name and the builder of each peer that takes this device and dtype."""
    bfloat16 = p.x.dtype == torch.bfloat16
    if p.x.is_cuda and bfloat16:
        yield "torch", lambda: torch_grouped_mm(p)
        yield "torch, compiled", lambda: torch_compiled(torch_grouped_mm(p))
    yield "torch", lambda: matmuls(p)
    if not p.shape.plain:
        print("skipping the other peers: they are measured for SwiGLU without biases, gate rows first")
        return
    for name in ("eager", "grouped_mm", "moe_aiter"):
        if bfloat16 or name != "grouped_mm":
            yield f"Hugging Face Qwen3-MoE, {name}", functools.partial(hugging_face, p, name)
    if p.x.is_cuda:
        yield "ScatterMoE", lambda: scattermoe(p)
        yield "Liger", lambda: liger(p)
    if p.x.is_cuda and bfloat16:
        yield "MegaBlocks", lambda: megablocks(p)
        yield "SonicMoE", lambda: sonicmoe(p)


def expert_inputs(p: Problem) -> tuple[Tensor, ...]:
    """The leaves of a contender that does not route."""
    return p.x, p.gate_up, p.down, p.routing_weights, *p.biases


def keeps_room(p: Problem) -> bool:
    """Whether memory of their own for one contender's gradients leaves enough for the others."""
    return 8 * (p.gate_up.nbytes + p.down.nbytes) < torch.cuda.get_device_properties(p.x.device).total_memory


def multiplies_8_bits(p: Problem) -> bool:
    """Whether there are kernels for it, and not just their emulation."""
    up = IMPLS["expert_up_fp8"]["hopper"]
    plan = (p.expert_ids.flatten(), p.expert_ids, p.expert_ids)  # of which the sizes count
    act = p.shape.activation, p.shape.interleaved, True
    i = UpFp8Inputs(p.x, None, p.gate_up, None, None, *plan, *act, p.x.dtype)
    return p.x.is_cuda and runs(up, i)


def our_layer(
    p: Problem, graphed: bool = False, fp8: str | None = None, invariant: bool = False
) -> Contender:  # fmt: skip
    shape = p.shape
    how = {"activation": shape.activation, "bias": shape.bias, "interleaved": shape.interleaved}
    where = {"device": "meta", "dtype": p.x.dtype}
    layer = MoE(*shape.sizes[1:], **how, fp8=fp8, batch_invariant=invariant, **where)
    rest = INVARIANT if invariant else ""
    router, experts = layer.router, layer.experts
    router.weight, router.bias = parameter(p.router), None
    experts.gate_up, experts.down = parameter(p.gate_up), parameter(p.down)
    biases = tuple(map(parameter, p.biases))
    experts.gate_up_bias, experts.down_bias = biases or (None, None)
    leaves = (p.x, experts.gate_up, experts.down, router.weight, *biases)
    if fp8 is not None:  # it computes something else, on purpose
        name = f"layer: moe_aiter MoE, FP8 ({fp8})"
        return Contender(name, lambda: layer(p.x), leaves, routed=True, checked=False, ours=True)
    if not graphed:
        name = f"layer: moe_aiter MoE{rest}"
        return Contender(name, lambda: layer(p.x), leaves, routed=True, ours=True)
    name = f"layer: moe_aiter MoE, CUDA graph{rest}"
    replay = torch.cuda.make_graphed_callables(layer, (p.x,))
    return Contender(name, lambda: replay(p.x), leaves, routed=True, ours=True, graphed=True)


def later_micro_batch(contender: Contender, p: Problem, both_orders: bool) -> Contender:
    """Return the contender behind another micro-batch of its step, which has quantised the weights."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with keep_fp8_weights(backward=both_orders):
            contender.gradients(contender.run(), p)
            yield

    name = f"{contender.name}, later micro-batch" + ", both orders" * both_orders
    return dataclasses.replace(contender, name=name, around=around)


def our_experts(p: Problem) -> Iterator[Contender]:
    """The experts as they come, then each other implementation here but the reference on a GPU, a loop."""

    how = {"activation": p.shape.activation, "interleaved": p.shape.interleaved}
    how |= dict(zip(("gate_up_bias", "down_bias"), p.biases, strict=False))

    def run() -> Tensor:
        plan = make_plan(p.expert_ids, p.shape.num_experts)
        return expert_mlp(p.x, p.gate_up, p.down, p.routing_weights, plan, **how)

    there = [b for b in ORDER[p.x.device.type] if b == "hopper" or b in IMPLS["sort_by_expert"]]
    there = [b for b in there if b in IMPLS["expert_mlp"] and runs(IMPLS["expert_mlp"][b], (p.x,))]
    there = [b for b in there if b != "torch" or not p.x.is_cuda]
    yield Contender(f"moe_aiter experts, {there[0]}", run, expert_inputs(p), ours=True)
    for backend in there[1:]:
        yield Contender(f"moe_aiter experts, {backend}", run, expert_inputs(p), ours=True, backend=backend)


def torch_grouped_mm(p: Problem) -> Contender:
    """The usual code in plain torch: sort, gather, two grouped products, sum."""
    top_k, num_experts = p.shape.top_k, p.shape.num_experts
    up_bias, down_bias = p.biases or (None, None)

    def run() -> Tensor:
        flat = p.expert_ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = torch._grouped_mm(x, weight.mT, offs=ends)
            # a product, since the gradient of bias[experts] would be added up in 16 bits
            return y if bias is None else y + F.one_hot(flat[order], num_experts).to(y.dtype) @ bias

        z = linear(p.x[order // top_k], p.gate_up, up_bias)
        y = linear(activation(z, p.shape), p.down, down_bias)
        weighted = y * p.routing_weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(p.x).index_add(0, order // top_k, weighted)

    return Contender("torch grouped_mm", run, expert_inputs(p))


def torch_compiled(contender: Contender) -> Contender:
    """Return the contender compiled by torch.compile, which compiles during the check or a warm-up."""
    torch.compiler.reset()  # else the shapes before count as further shapes of the same function
    run = torch.compile(contender.run, dynamic=False)
    return dataclasses.replace(contender, name=f"{contender.name}, compiled", run=run)


def matmuls(p: Problem) -> Contender:
    """Two plain products with as many multiplications as the experts: what is left if all else were free.

    On a GPU with the experts' own weights, by the library's batched product, as many rows for each.
    """
    shape = p.shape
    rows = -(-shape.num_tokens * shape.top_k // shape.num_experts)
    batch = (shape.num_experts, rows) if p.x.is_cuda else (shape.num_tokens * shape.top_k,)
    gate_up, down = (parameter(w if p.x.is_cuda else w[0]) for w in (p.gate_up, p.down))

    def normal(columns: int) -> Tensor:
        return torch.randn(*batch, columns, device=p.x.device, dtype=p.x.dtype)

    x, a = normal(shape.hidden).requires_grad_(), normal(shape.intermediate).requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        return x @ gate_up.mT, a @ down.mT

    douts = normal(shape.width), normal(shape.hidden)
    name = "batched" if p.x.is_cuda else "dense"
    return Contender(
        f"{name} matmuls of the same FLOPs", run, (x, gate_up, a, down), checked=False, dout=douts
    )


def qwen3_moe(p: Problem, experts: str) -> torch.nn.Module:
    """Hugging Face's Qwen3-MoE block with the weights of `p` and the given implementation of its experts."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=p.shape.hidden,
        moe_intermediate_size=p.shape.intermediate,
        num_experts=p.shape.num_experts,
        num_experts_per_tok=p.shape.top_k,
        norm_topk_prob=p.shape.top_k > 1,
    )
    config._experts_implementation = experts
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight = parameter(p.router)
    block.experts.gate_up_proj, block.experts.down_proj = parameter(p.gate_up), parameter(p.down)
    return block


def hugging_face(p: Problem, experts: str) -> Contender:
    """The Qwen3-MoE block, with the given implementation of its experts; moe_aiter is ours."""
    if experts == NAME:
        register()
    block = qwen3_moe(p, experts)

    @torch.no_grad()
    def expert_ids() -> Tensor:
        return block.gate(p.x)[2]

    return Contender(
        f"layer: Hugging Face Qwen3-MoE, {experts}",
        lambda: block(p.x[None])[0],
        (p.x, block.experts.gate_up_proj, block.experts.down_proj, block.gate.weight),
        routed=True,
        expert_ids=expert_ids,
    )


def hugging_face_experts(p: Problem) -> Contender:
    """The function under `experts_implementation="grouped_mm"`, with the checkpoint's layout of weights."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    shape = p.shape
    up, down = (w.mT if shape.transposed else w for w in (p.gate_up, p.down))
    up_bias, down_bias = p.biases or (None, None)
    module = types.SimpleNamespace(
        num_experts=shape.num_experts,
        has_gate=shape.width > shape.intermediate,
        has_bias=shape.bias,
        has_post_expert_norm=False,
        is_transposed=shape.transposed,
        _is_expert_parallel=False,
        **{"gate_up_proj": up, "up_proj": up, "down_proj": down},
        **{"gate_up_proj_bias": up_bias, "up_proj_bias": up_bias, "down_proj_bias": down_bias},
        **dict.fromkeys(("_apply_gate", "act_fn"), lambda z: activation(z, shape)),
    )

    def run() -> Tensor:
        weights = p.routing_weights.to(p.x.dtype)  # as its routers return them
        return grouped_mm_experts_forward(module, p.x, p.expert_ids, weights)

    return Contender("Hugging Face experts, grouped_mm", run, expert_inputs(p))


def scattermoe(p: Problem) -> Contender:
    from scattermoe.mlp import GLUMLP

    def swap(gate_up: Tensor) -> Tensor:
        """Its up rows come first."""
        return torch.cat(gate_up.chunk(2, 1)[::-1], 1)

    def as_ours(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return gradients[0], swap(gradients[1]), *gradients[2:]

    with torch.device("meta"):
        mlp = GLUMLP(p.shape.hidden, p.shape.intermediate, p.shape.num_experts, p.shape.top_k)
    mlp.experts.weight = torch.nn.Parameter(swap(p.gate_up.detach()))
    mlp.output_experts.weight = parameter(p.down)
    return Contender(
        "ScatterMoE",
        lambda: mlp(p.x, p.routing_weights.to(p.x.dtype), p.expert_ids),
        (p.x, mlp.experts.weight, mlp.output_experts.weight, p.routing_weights),
        as_ours=as_ours,
    )


def liger(p: Problem) -> Contender:
    """The function under Liger's MoE blocks, which takes routing weights in the dtype of x.

    It tries some 240 tiles for each new shape, minutes of compiling; LIGER_FUSED_MOE_AUTOTUNE=0 takes one.
    """
    from liger_kernel.ops import fused_moe_kernels
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def run() -> Tensor:
        weights = p.routing_weights.to(p.x.dtype)
        return LigerFusedMoEFunction.apply(p.x, p.gate_up, p.down, p.expert_ids.int(), weights)

    name = "Liger, not tuned" if fused_moe_kernels._AUTOTUNE_DISABLED else "Liger"
    return Contender(name, run, (p.x, p.gate_up, p.down, p.routing_weights))


def megablocks(p: Problem) -> Contender:
    """The dropless experts by grouped GEMM, MegaBlocks' default; its block-sparse path refuses Triton 3."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    _, hidden, width, num_experts, top_k = p.shape.sizes
    arguments = Arguments(
        hidden_size=hidden,
        ffn_hidden_size=width,
        bias=False,
        return_bias=False,
        activation_fn=F.silu,
        moe_num_experts=num_experts,
        moe_top_k=top_k,
        mlp_type="glu",
        mlp_impl="grouped",
        fp16=False,
        bf16=True,
        device=torch.device("meta"),
    )
    layer = ParallelDroplessMLP(arguments)
    gate, up = p.gate_up.detach().chunk(2, 1)
    w1, v1, w2 = (torch.nn.Parameter(w.reshape(-1, hidden)) for w in (gate, up, p.down.detach().mT))
    layer.mlp.w1, layer.mlp.v1, layer.mlp.w2 = w1, v1, w2

    def as_ours(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dx, *dweights, dlast = gradients
        dgate, dup, ddown = (dw.view(num_experts, width, hidden) for dw in dweights)
        return dx, torch.cat([dgate, dup], 1), ddown.mT, dlast

    return Contender(
        "MegaBlocks dMoE experts",
        lambda: layer.forward_once(p.x, p.routing_weights.to(p.x.dtype), p.expert_ids)[0],
        (p.x, w1, v1, w2, p.routing_weights),
        as_ours=as_ours,
    )


def sonicmoe(p: Problem) -> Contender:
    """The function that SonicMoE's benchmark times, with its own router and interleaved gate and up rows."""
    import sonicmoe
    from cutlass.base_dsl.common import DSLBaseError
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_Softmax_Topk_Router_Function, moe_TC_softmax_topk_layer

    _, hidden, width, num_experts, top_k = p.shape.sizes
    if top_k == 1:
        raise ValueError("with one expert for each token, its weights are all 1")
    interleaved = p.gate_up.detach().view(num_experts, 2, width, hidden).transpose(1, 2)
    gate_up = torch.nn.Parameter(interleaved.reshape(num_experts, 2 * width, hidden))
    down, router = parameter(p.down), parameter(p.router)
    stream = torch.cuda.current_stream().cuda_stream

    def run() -> Tensor:
        weights = (gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None)
        how = (top_k, stream, ActivationType.SWIGLU, not torch.is_grad_enabled())
        return moe_TC_softmax_topk_layer(p.x, router, *weights, *how)[0]

    @torch.no_grad()
    def expert_ids() -> Tensor:
        logits = F.linear(p.x, router)
        how = num_experts, top_k, True, False  # softmax over the chosen experts, no renormalisation
        return TC_Softmax_Topk_Router_Function.apply(logits, *how)[1].long()

    def as_ours(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dx, dgate_up, *rest = gradients
        return dx, torch.cat([dgate_up[:, ::2], dgate_up[:, 1::2]], 1), *rest

    return Contender(
        f"layer: SonicMoE {sonicmoe.__version__}",
        run,
        (p.x, gate_up, down, router),
        routed=True,
        expert_ids=expert_ids,
        as_ours=as_ours,
        errors=(DSLBaseError,),
    )
