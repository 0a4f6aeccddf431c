"""Layers that others have published, called as their own benchmarks and examples call them.

Each builder raises ImportError where its package is missing.  A layout other than ours is made once, before
anything is timed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..integrations.transformers import NAME, register
from .contender import Contender, parameter
from .problem import Problem


def hugging_face(p: Problem, experts: str) -> Contender:
    """The Qwen3-MoE block, with the given implementation of its experts; moe_aiter is ours."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    if experts == NAME:
        register()
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
    """The function that SonicMoE's benchmark times; its own router, gate and up rows in turn."""
    from cutlass.base_dsl.common import DSLBaseError
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_Softmax_Topk_Router_Function, moe_TC_softmax_topk_layer

    _, hidden, width, num_experts, top_k = p.shape.sizes
    in_turn = p.gate_up.detach().view(num_experts, 2, width, hidden).transpose(1, 2)
    gate_up = torch.nn.Parameter(in_turn.reshape(num_experts, 2 * width, hidden))
    down, router = parameter(p.down), parameter(p.router)
    stream = torch.cuda.current_stream().cuda_stream

    def run() -> Tensor:
        weights = (gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None)
        how = (top_k, stream, ActivationType.SWIGLU, not torch.is_grad_enabled())
        return moe_TC_softmax_topk_layer(p.x, router, *weights, *how)[0]

    @torch.no_grad()
    def expert_ids() -> Tensor:
        logits = F.linear(p.x, router)
        return TC_Softmax_Topk_Router_Function.apply(logits, num_experts, top_k)[1].long()

    def as_ours(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dx, dgate_up, *rest = gradients
        return dx, torch.cat([dgate_up[:, ::2], dgate_up[:, 1::2]], 1), *rest

    return Contender(
        "layer: SonicMoE",
        run,
        (p.x, gate_up, down, router),
        routed=True,
        expert_ids=expert_ids,
        as_ours=as_ours,
        errors=(DSLBaseError,),
    )
