"""Random tokens in two batches, with the same bits in both: `make scan-invariance`.

The number of a case decides all that is random: `--first N` resumes.  Both batches run with batch invariance,
in training and in inference, on the backend of choice or on another one.  Without a GPU they run on the CPU.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import moe_aiter
from moe_aiter import Experts, LoRAExperts, MoE
from moe_aiter.invariance import invariant
from moe_aiter.kernels.base.activations import get_activation

from ..same_bits import differences, results
from ..shapes import NAMES
from . import batches, scan
from .draw import DEVICE, ON_GPU

KINDS = {"experts": 5, "fp8": 3, "layer": 4, "lora": 3, "4 bits": 2, "linear": 2, "gmm": 1}
HALVES = torch.bfloat16, torch.float16
CASES = 1000 if ON_GPU else 2000


def differing(number: int) -> str | None:
    """Run a case; say which tokens differ between the batches."""
    draw = scan.Shape(number)
    torch.manual_seed(number)
    kind = draw.of.form.choices(list(KINDS), list(KINDS.values()))[0]
    dtype, other = draw.dtype(), "triton" if ON_GPU else "torch"
    dtype = dtype if kind != "fp8" or dtype in HALVES else torch.bfloat16
    backend = other if draw.of.flip(0.4) and not (ON_GPU and dtype == torch.float64) else "auto"
    T = draw.pick(draw.size(), 200, 1000 if ON_GPU else 300)
    layer, leaves, out = new_layer(draw, kind, T, dtype)
    dout = torch.randn(T, out, device=DEVICE, dtype=dtype)
    tokens = torch.randperm(T)[: draw.pick(1, 2, draw.size(), T // 2, T)].to(DEVICE)
    with moe_aiter.use(backend), invariant():
        whole = results(layer, leaves, dout, torch.arange(T, device=DEVICE))
        for gradient in (dout, None):
            said = differences(results(layer, leaves, gradient, tokens), whole, tokens)
            if said:
                how = "inference" if gradient is None else "training"
                return f"{kind}, {backend}, {dtype}, T = {T} and {len(tokens)}, {how}: {said}"
    return None


def new_layer(draw: scan.Shape, kind: str, T: int, dtype) -> tuple[Callable, list[Tensor], int]:
    """Return a function of tokens, what it takes for T of them, and the columns of its result."""
    of, like = draw.of, {"device": DEVICE, "dtype": dtype}
    unit = 64 if kind == "4 bits" else 1  # which is a block's
    H, inner = unit * draw.size(), unit * draw.size()
    if unit > 1:
        H, inner = (min(n, 512) for n in (H, inner))
    E, k, activation = of.form.randint(2, 12), of.form.randint(2, 4), of.pick(*NAMES)
    k = min(k, E)
    x = torch.randn(T, H, **like).requires_grad_()
    if kind == "linear":
        w = torch.randn(inner, H, **like) * H**-0.5
        return lambda x: moe_aiter.gemm(x, w.T), [x], inner
    if kind == "gmm":
        return grouped(x, E, inner)
    gated = get_activation(activation).gated
    how = {"activation": activation, "interleaved": gated and of.flip(), "bias": of.flip(0.4)}
    how["recompute"] = of.pick("none", "none", "z")
    if kind == "layer":
        score = of.pick("softmax", "topk_softmax", "sigmoid")
        moe = MoE(H, inner, E, k, score=score, **how, **like).requires_grad_(False)
        return moe, [x], H
    if kind == "fp8":
        how["fp8"] = of.pick("e4m3", "e5m2", "e4m3_all", "block")
    experts = Experts(E, H, inner, row_chunks=of.pick(None, None, 2), **how, **like).requires_grad_(False)
    experts = moe_aiter.quantize(experts, "nf4") if kind == "4 bits" else experts
    if kind == "lora" or (kind == "4 bits" and of.flip()):
        experts = LoRAExperts(experts, rank=of.pick(3, 8, 16, 80)).requires_grad_(False)
        for lora in (experts.gate_up_lora, experts.down_lora):
            lora.B.normal_()
    weights, ids = torch.rand(T, E, device=DEVICE).topk(k)
    ids = ids.masked_fill(torch.rand(T, k, device=DEVICE) < 0.05, -1)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return experts(x, weights, moe_aiter.make_plan(ids, E))

    return run, [x, weights.requires_grad_(), ids], H


def grouped(x: Tensor, E: int, columns: int) -> tuple[Callable, list[Tensor], int]:
    """Return a grouped product of tokens, each in the group that it asks for."""
    w, bias = x.new_empty(E, x.shape[1], columns).normal_(), x.new_empty(E, columns).normal_()

    def run(x: Tensor, ids: Tensor) -> Tensor:
        plan = moe_aiter.make_plan(ids[:, None], E)
        y = moe_aiter.gmm(moe_aiter.permute(x, plan), w, plan.group_sizes, bias=bias, trans_rhs=False)
        return moe_aiter.unpermute(y, plan)

    return run, [x, torch.randint(E, (len(x),), device=x.device)], columns


if __name__ == "__main__":
    sys.exit(scan.main(batches.differing, CASES, __doc__))
