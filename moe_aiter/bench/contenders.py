"""What is measured: our layer, and what people use instead of it.

Those whose name begins with "layer" route the tokens themselves; the others are given the routing.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import IMPLS, ORDER, runs, use
from ..config import settings
from ..kernels.experts import expert_mlp
from ..layers.moe import MoE
from ..routing.plan import make_plan
from .problem import Problem, for_loop


def identity(x: Tensor) -> Tensor:
    return x


@dataclasses.dataclass
class Contender:
    """A function without arguments from the current inputs of a problem to (T, H)."""

    name: str
    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]  # x, gate_up, down, and the router or the routing weights
    routed: bool = False  # it chooses the experts itself
    expert_ids: Callable[[], Tensor] | None = None  # what it chooses, if not what problem.expert_ids says
    checked: bool = True  # False for a yardstick that computes something else
    ours: bool = False
    graphed: bool = False  # it runs from a CUDA graph, which keeps memory of its own
    backend: str | None = None  # forced, forward and backward
    dout: Tensor | None = None  # if not problem.dout
    gate_up_order: Callable[[Tensor], Tensor] = identity  # its gradient of gate_up -> gate rows first

    def gradients(self, out: Tensor, p: Problem) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, p.dout if self.dout is None else self.dout)

    def context(self) -> contextlib.AbstractContextManager:
        return use(self.backend) if self.backend else contextlib.nullcontext()


PEER_ERRORS = (RuntimeError, ImportError, AttributeError, TypeError, ValueError)


def contenders(p: Problem) -> Iterator[Contender]:
    """Everything that can run here, ours first.  A peer of a version that we do not know is left out."""
    yield our_layer(p)
    if p.x.is_cuda and not settings.debug:  # whose checks synchronise
        yield our_layer(p, graphed=True)
    yield from our_experts(p)
    yield loop(p)
    for build in peers(p):
        try:
            yield build()
        except PEER_ERRORS as error:
            print(f"left out: {type(error).__name__}: {error}")


def peers(p: Problem) -> Iterator[Callable[[], Contender]]:
    """A builder of each peer that is installed and takes this device and dtype."""
    bfloat16 = p.x.dtype == torch.bfloat16
    if p.x.is_cuda and bfloat16:
        yield lambda: torch_grouped_mm(p)
    if not p.x.is_cuda:
        yield lambda: dense(p)
    if importlib.util.find_spec("transformers"):
        yield lambda: hugging_face(p, "eager")
        if bfloat16:
            yield lambda: hugging_face(p, "grouped_mm")
    if p.x.is_cuda and importlib.util.find_spec("scattermoe"):
        yield lambda: scattermoe(p)


def given(p: Problem) -> tuple[Tensor, ...]:
    """The leaves of a contender that does not route."""
    return p.x, p.gate_up, p.down, p.routing_weights


def loop(p: Problem) -> Contender:
    def run() -> Tensor:
        return for_loop(p.x, p.gate_up, p.down, p.expert_ids, p.routing_weights)

    return Contender("for-loop over experts", run, given(p))


def our_layer(p: Problem, graphed: bool = False) -> Contender:
    shape = p.shape
    layer = MoE(
        shape.hidden, shape.intermediate, shape.num_experts, shape.top_k, device="meta", dtype=p.x.dtype
    )
    layer.router.weight, layer.experts.gate_up, layer.experts.down = map(
        parameter, (p.router, p.gate_up, p.down)
    )
    leaves = (p.x, layer.experts.gate_up, layer.experts.down, layer.router.weight)
    if not graphed:
        return Contender("layer: moe_aiter MoE", lambda: layer(p.x), leaves, routed=True, ours=True)
    name = "layer: moe_aiter MoE, CUDA graph"
    replay = torch.cuda.make_graphed_callables(layer, (p.x,))
    return Contender(name, lambda: replay(p.x), leaves, routed=True, ours=True, graphed=True)


def parameter(x: Tensor) -> torch.nn.Parameter:
    """The same memory as a module's parameter."""
    return torch.nn.Parameter(x.detach())


def our_experts(p: Problem) -> Iterator[Contender]:
    """The experts as they come, then each other implementation here but the reference on a GPU, a loop."""

    def run() -> Tensor:
        plan = make_plan(p.expert_ids, p.shape.num_experts)
        return expert_mlp(p.x, p.gate_up, p.down, p.routing_weights, plan)

    there = [b for b in ORDER[p.x.device.type] if b == "hopper" or b in IMPLS["sort_by_expert"]]
    there = [b for b in there if b in IMPLS["expert_mlp"] and runs(IMPLS["expert_mlp"][b], p.x)]
    there = [b for b in there if b != "torch" or not p.x.is_cuda]
    yield Contender(f"moe_aiter experts, {there[0]}", run, given(p), ours=True)
    for backend in there[1:]:
        yield Contender(f"moe_aiter experts, {backend}", run, given(p), ours=True, backend=backend)


def torch_grouped_mm(p: Problem) -> Contender:
    """What one writes with torch alone: sort, gather, two grouped products, sum."""
    top_k = p.shape.top_k

    def run() -> Tensor:
        flat = p.expert_ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(p.shape.num_experts, dtype=torch.int64, device=flat.device)
        ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
        gate, up = torch._grouped_mm(p.x[order // top_k], p.gate_up.mT, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, p.down.mT, offs=ends)
        weighted = y * p.routing_weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(p.x).index_add(0, order // top_k, weighted)

    return Contender("torch grouped_mm", run, given(p))


def dense(p: Problem) -> Contender:
    """Two plain products with as many multiplications as the experts: what is left if all else were free."""
    shape = p.shape
    rows = torch.randn(shape.num_tokens * shape.top_k, shape.hidden, device=p.x.device, dtype=p.x.dtype)
    rows.requires_grad_()
    gate_up, down = p.gate_up[0].detach().requires_grad_(), p.down[0].detach().requires_grad_()

    def run() -> Tensor:
        z = F.linear(rows, gate_up)
        return F.linear(z[:, : shape.intermediate], down)

    dout = torch.randn_like(rows)
    return Contender("dense matmuls of the same FLOPs", run, (rows, gate_up, down), checked=False, dout=dout)


def hugging_face(p: Problem, experts: str) -> Contender:
    """The Qwen3-MoE block, with the given implementation of its experts."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=p.shape.hidden,
        moe_intermediate_size=p.shape.intermediate,
        num_experts=p.shape.num_experts,
        num_experts_per_tok=p.shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = experts
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.gate.weight = parameter(p.router)
    block.experts.gate_up_proj, block.experts.down_proj = parameter(p.gate_up), parameter(p.down)

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


def scattermoe(p: Problem) -> Contender:
    from scattermoe.mlp import GLUMLP

    def swap(gate_up: Tensor) -> Tensor:
        """Its up rows come first."""
        return torch.cat(gate_up.chunk(2, 1)[::-1], 1)

    with torch.device("meta"):
        mlp = GLUMLP(p.shape.hidden, p.shape.intermediate, p.shape.num_experts, p.shape.top_k)
    mlp.experts.weight = torch.nn.Parameter(swap(p.gate_up.detach()))
    mlp.output_experts.weight = parameter(p.down)
    return Contender(
        "ScatterMoE",
        lambda: mlp(p.x, p.routing_weights.to(p.x.dtype), p.expert_ids),
        (p.x, mlp.experts.weight, mlp.output_experts.weight, p.routing_weights),
        gate_up_order=swap,
    )
