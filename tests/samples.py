"""Inputs of each op, for tests/test_ops.py: tokens of which one choice is dropped, an expert without rows."""

import re

import torch
import torch.distributed as dist
from torch import Tensor

import moe_aiter.distributed.collective
import moe_aiter.kernels.experts.split  # noqa: F401  defines an op, and only torchtitan's models import it
from moe_aiter.kernels.grouped.tgmm_fp8 import quantize_y
from moe_aiter.kernels.quantize.blocks import plan_row_blocks
from moe_aiter.kernels.quantize.four_bit import quantized
from moe_aiter.kernels.quantize.rows import quantize_rows
from moe_aiter.kernels.quantize.scale_blocks import quantize_blocks
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.kernels.sparse.pattern import SparsePattern
from moe_aiter.layers import MoE, Route
from moe_aiter.layers.route_players import Player, RouteRecorder

T, K, E, H, F, N = 4, 2, 3, 8, 4, 6
R = T * K
IDS = torch.tensor([[0, 2], [2, -1], [2, 0], [0, 2]])
ORDER, RANK, SIZES = sort_by_expert(IDS, E)
ROUTING = ORDER, RANK, SIZES
FULL = sort_by_expert(IDS.clamp(min=0), E)  # for ops that do not write rows of no expert
ACT = "swiglu", False
E4M3 = "e4m3"


class Draw:
    """Tensors of one dtype, the same at each call of the same shape and place."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def positive(self, *shape: int) -> Tensor:
        return self(*shape).abs() + 0.1

    def plain(self) -> tuple[Tensor, ...]:
        """x, gate_up, its bias, down, its bias and routing weights."""
        return self(T, H), self(E, 2 * F, H), self(E, 2 * F), self(E, H, F), self(E, H), self.positive(T, K)


def rows8(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, E4M3)


def int8(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).sub(9).to(torch.int8).view(shape)


def of_four_bits(columns: int) -> tuple:
    """A weight (E, 2, columns) in NF4: its codes and other parts."""
    w = quantized(torch.arange(E * 2 * columns).sin().view(E, 2, columns), "nf4")
    return w.packed, *w.parts


def row_blocks() -> Tensor:
    return plan_row_blocks(SIZES, R)[1]


def pattern() -> Tensor:
    return SparsePattern.from_mask(torch.tensor([[1, 0], [1, 1], [0, 1]]), (2, 3)).lists


def alone() -> tuple[str, int]:
    """A process group of this process, by its name, and how many ranks it has."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name, 1


def of_experts(draw: Draw, *rest) -> tuple:
    return *draw.plain(), *ROUTING, *ACT, *rest


def of_loop_backward(draw: Draw) -> tuple:
    return draw(T, H), draw(R, 2 * F), *of_experts(draw, True, None, None), [True, False] * 3


def of_8_bit_gradient(draw: Draw) -> tuple:
    dout8, down8 = rows8(draw(T, H)), rows8(draw(E, H, F).mT)
    return *dout8, draw(R, 2 * F), *down8, draw.positive(T, K), *ROUTING, *ACT, True


def of_8_bit_up(draw: Draw) -> tuple:
    return *rows8(draw(T, H)), *rows8(draw(E, 2 * F, H)), draw(E, 2 * F), *ROUTING, *ACT


def of_blocks(x: Tensor, w: Tensor, sizes: Tensor, order: Tensor | None = None, top_k: int = 1) -> tuple:
    (x8, x_scale), (w8, w_scale) = quantize_blocks(x, False), quantize_blocks(w, True)
    return x8, w8.mT, sizes, x_scale, w_scale, None, order, top_k, x.dtype


def of_8_bit_tgmm(draw: Draw) -> tuple:
    x8, scale = rows8(draw(T, H))
    return (
        x8,
        scale,
        *quantize_y(plan_row_blocks(SIZES, R), ORDER, K, E4M3, scale, draw(R, N)),
        SIZES,
        ORDER,
        K,
    )


USES = (  # which ops find by their numbers
    RouteRecorder([], weights=False),
    Player("layer", [Route(IDS, IDS.float())] * 200, MoE(H, F, E, K)),
)


def of_route_backward(draw: Draw) -> tuple:
    weights, ids = draw(T, E).softmax(1).topk(K)
    return weights, ids, draw(T, E).softmax(1), draw(T, K), None, E, False, False, 1.0


def spread(draw: Draw) -> Tensor:
    """Scores far enough apart that a small step changes no choice."""
    return torch.arange(T * E).mul(7).remainder(T * E).view(T, E).to(draw.dtype) / 4


# op: its inputs, drawn in a dtype
SAMPLES = {
    "adapted_down": lambda d: (d(R, F), d(E, H, F), d(E, H), d(R, 2), d(E, H, 2), d.positive(T, K), *ROUTING),
    "adapted_low": lambda d: (d(T, H), d(E, 2, H), *FULL, torch.arange(E) - 1),
    "adapted_up": lambda d: (d(T, H), d(E, N, H), d(E, N), d(R, 2), d(E, N, 2), *FULL),
    "add_low_rank": lambda d: (d(R, N), d(R, 2), d(E, 2, N), SIZES),
    "attach_loss": lambda d: (d(T, H), d(1)[0], None),
    "count_choices": lambda d: (torch.zeros(E, dtype=torch.int64), SIZES),
    "count_margins": lambda d: (
        torch.zeros(E, 8, dtype=torch.int64),
        d(T, E).softmax(1),
        d(E),
        torch.arange(T) < 3,
        K,
    ),
    "decide": lambda d: (IDS, "experts", E),
    "combine_tokens": lambda d: (d(T, H), *alone()),
    "dispatch_tokens": lambda d: (d(T, H), *alone()),
    "expert_both": lambda d: of_experts(d, True, None, None, 0, 0),
    "expert_down": lambda d: (
        d(R, F),
        d(R, 2 * F),
        d(E, H, F),
        d(E, H),
        d.positive(T, K),
        *FULL,
        *ACT,
        False,
        0,
        None,
    ),
    "expert_down_grad": lambda d: (d(T, H), d(R, 2 * F), d(E, H, F), d.positive(T, K), *FULL, *ACT, True),
    "expert_forward": lambda d: of_experts(d, True, None, None, 0, 0),
    "expert_down_grad_fp8": of_8_bit_gradient,
    "expert_down_grad_fp8_over_z": of_8_bit_gradient,
    "expert_down_grad_over_z": lambda d: (
        d(T, H),
        d(R, 2 * F),
        d(E, H, F),
        d.positive(T, K),
        *FULL,
        *ACT,
        True,
    ),
    "expert_loop": lambda d: of_experts(d, True, None, None),
    "expert_loop_backward": of_loop_backward,
    "expert_up": lambda d: (*d.plain()[:3], *FULL, *ACT, True, 0, None),
    "expert_up_fp8": lambda d: (*of_8_bit_up(d), True, d.dtype),
    "expert_up_split": lambda d: (d.plain()[0], d(E, F, H), d(E, F, H), *FULL, 0, None, None),
    "expert_z": lambda d: (*d.plain()[:3], *FULL, *ACT),
    "expert_z_fp8": lambda d: (*of_8_bit_up(d), d.dtype),
    "experts_fp8": lambda d: of_experts(d, True, None, None, 0, 0, 0, True, False, E4M3, None, None),
    "four_bit_gmm": lambda d: (d(T, 64), *of_four_bits(64), True, SIZES, d(E, 2), ORDER, K),
    "gemm": lambda d: (d(2, T, H), d(2, H, N), d(N), d(2, T, N), "gelu", 0.5, 1.5, None, True),
    "glu": lambda d: (d(R, 2 * F), "swiglu", True),
    "glu_backward": lambda d: (d(R, F), d(R, 2 * F), "geglu", False),
    "gmm": lambda d: (d(R, H), d(E, H, N), SIZES, d(E, N), d.dtype, [], 0),
    "gmm_fp8": lambda d: of_blocks(d(T, H), d(E, N, H), SIZES, ORDER, K),
    "gmm_into": lambda d: (d(R, N), d(R, H), d(E, H, N), SIZES, d(E, N), [], 0),
    "gmm_unpermute": lambda d: (d(R, F), d(E, F, H), SIZES, d(E, H), ORDER, RANK, d.positive(T, K), 0),
    "gmm_unpermute_add": lambda d: (
        d(T, H),
        *(d(R, F), d(E, F, H), SIZES, d(E, H), ORDER, RANK, d.positive(T, K), 0),
    ),
    "gmm_unpermute_fp8": lambda d: (
        *rows8(d(R, F)),
        *rows8(d(E, H, F)),
        SIZES,
        d(E, H),
        ORDER,
        RANK,
        d.positive(T, K),
        0,
        False,
        d.dtype,
    ),
    "group_sum": lambda d: (d(R, N), SIZES, ORDER, 1, d.positive(R)),
    "inner_gemm": lambda d: (d(1, T, H), d(1, H, N), None, None, "", 1.0, 0.0, None, False),
    "keep_route": lambda d: (USES[0].number, IDS, d(T, K), E),
    "lend_rows": lambda d: (torch.tensor([[90, 5, 2], [80, 0, 9]]), 2, 2, 8, 8),
    "mask_bias": lambda d: (torch.arange(40).view(2, 1, 4, 5) % 3 > 0, d.dtype),
    "muon_direction": lambda d: (d(2, 1, 3, 4), None, 0.9, True, 2, d.dtype),
    "muon_update_": lambda d: (d(2, 1, 3, 4), d(2, 1, 3, 4), d(), 0.1, 2.0),
    "masked_gmm": lambda d: (d(E, T, N), d(E, T, H), d(E, N, H), SIZES.clamp(max=T), None, None, False),
    "mha_fwd": lambda d: (*(d(2, 5, 2, H) for _ in "qkv"), 0.0, 0.5, True, -1, -1, True, False, 0),
    "permute": lambda d: (d(T, H), ORDER, RANK, d.positive(T, K)),
    "permute_slots": lambda d: (d(T, K, H), ORDER, RANK),
    "plan_row_blocks": lambda d: (SIZES, R),
    "quantize_blocks": lambda d: (d(E, N, H), True, E4M3),
    "quantize_by_amax": lambda d: (d(T, H), d.positive(T).float() + 9, E4M3),
    "quantize_row_blocks": lambda d: (d(R, N), d.positive(T).float(), ORDER, K, row_blocks(), E4M3),
    "quantize_folded": lambda d: (d(R, H), d.positive(E, H).float(), SIZES, E4M3),
    "quantize_rows": lambda d: (d(T, H), E4M3),
    "quantize_rows_and_amax": lambda d: (d(T, H), E4M3),
    "quantize_transposed": lambda d: (d(E, N, H), d.positive(E, N).float(), E4M3),
    "record_routing": lambda d: (
        torch.zeros(2 * E + 5, dtype=torch.float64),
        IDS,
        SIZES,
        SIZES,
        d(T, E),
        torch.arange(T) < 3,
    ),
    "route": lambda d: (spread(d), K, False, False, 0.5, True, None),
    "route_backward": of_route_backward,
    "route_once": lambda d: (spread(d), K, False, False, 0.5, True),
    "router_logits": lambda d: (d(T, H), d(E, H), d(E)),
    "row_dots": lambda d: (d(R, H), d(T, H), ORDER, RANK),
    "scaled_gemm": lambda d: (
        int8(T, H),
        int8(H, N),
        d.positive(T).float(),
        d.positive(N).float(),
        d(N),
        d.dtype,
    ),
    "scaled_gmm_into": lambda d: (
        d(R, N),
        int8(R, H),
        int8(E, H, N),
        SIZES,
        d.positive(R).float(),
        d.positive(E, N).float(),
        d(E, N),
    ),
    "scaled_gmm": lambda d: (
        int8(T, H),
        int8(E, H, N),
        SIZES,
        d.positive(T).float(),
        d.positive(E, N).float(),
        None,
        ORDER,
        K,
        d.dtype,
    ),
    "scaled_tgmm_into": lambda d: (
        d(E, H, N),
        rows8(d(R, H))[0],
        rows8(d(R, N))[0],
        SIZES,
        d.positive(E, H).float(),
        d.positive(E, N).float(),
        True,
    ),
    "segment_gmm": lambda d: (d(R, H), d(2, H, N), SIZES, None, torch.tensor([1, 0, 1])),
    "segment_gmm_out": lambda d: (d(R, N), d(R, H), d(2, H, N), SIZES, None, torch.tensor([1, 0, 1])),
    "segment_tgmm": lambda d: (d(R, H), d(R, N), SIZES, None, torch.tensor([1, 0, 1]), 2, True),
    "merge_plans": lambda d: (
        torch.stack([RANK.flatten(), RANK.flatten()]),
        SIZES.expand(2, -1),
        K,
        1,
        2,
        5,
        True,
        torch.tensor([[0, 0, 1], [0, 9, 3]]),
        2,
    ),
    "route_few": lambda d: (spread(d), None, K, False, True, 1.0),
    "sort_by_expert": lambda d: (IDS, E),
    "symmetric_product": lambda d: (x := d(2, 3, 4), x.mT, d(2, 3, 3), 2.0, -1.0, 0.5),
    "sparse_matmul": lambda d: (d(T, 6), d(4, 2, 3), d(6), pattern(), 6, 6, False),
    "sparse_matmul_grad": lambda d: (d(T, 6), d(T, 6), pattern(), 2, 3),
    "take_route": lambda d: (d(T, H), USES[1].number, K, True),
    "tgmm": lambda d: (d(T, H), d(R, N), SIZES, ORDER, K, True),
    "tgmm_fp8": lambda d: (*of_8_bit_tgmm(d), 0, True),
    "tgmm_fp8_into": lambda d: (d(E, H, N), *of_8_bit_tgmm(d), 0),
    "tgmm_into": lambda d: (d(E, H, N), d(R, H), d(R, N), SIZES, None, 1, False, d(E, N), True, [], 0),
    "tgmm_sums": lambda d: (d(R, H), d(R, N), SIZES, False),
    "topk": lambda d: (spread(d), K),
    "transpose_row_blocks": lambda d: (rows8(d(T, H))[0], ORDER, K, row_blocks()),
    "transpose_rows8": lambda d: (rows8(d(E, N, H))[0],),
    "tuned_gemm": lambda d: (d(T, H), d(N, H), d(N), None, None, "torch"),
    "unpermute": lambda d: (d(R, H), ORDER, RANK, d.positive(T, K)),
    "weigh_rows": lambda d: (d(R, H), d(R, H), d.positive(T, K), ORDER, RANK),
    "zero_rows_": lambda d: (d(2, 3, 5, 4), torch.arange(10).view(2, 1, 5, 1) % 3 > 0),
}

# why the backward pass of an op is not that of its outputs, or not in float64
NO_GRADCHECK = {
    "attach_loss": "the gradient of the loss is the loss scale, whatever that of the output is",
    "expert_down": "a is a function of z, whose gradient holds that of a: see expert_both",
    "expert_up": "z and a share one gradient, that of z from expert_down: see expert_both",
    "expert_up_split": "as expert_up",
    "experts_fp8": "it rounds to 8 bits",
}


def is_ours(op: str) -> bool:
    """Whether an op is the package's: tests define ops whose names end in a random number."""
    return not re.search("_[0-9a-f]{32}$", op)


# the other outputs are kept for the backward pass, or are no function that has a gradient
FIRST_OUTPUT = {"expert_loop", "mha_fwd"}
