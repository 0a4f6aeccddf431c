"""Products of 8 bits and layers that are quantised, for `python -m benchmarks gemm`: see products.py."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_aiter.bench import cases
from moe_aiter.bench.cases import ASKED, Case, Tunable, draw, gaussian
from moe_aiter.kernels.grouped.masked_gmm import scaled_bmm
from moe_aiter.kernels.grouped.scaled_gemm import scaled_gemm
from moe_aiter.layers.experts import Experts
from moe_aiter.layers.quantized import quantize
from moe_aiter.op import use
from moe_aiter.routing.plan import make_plan

from .products import COPY, Compared, Comparison, compared

LARGE = 8192  # from which 8 bits have to be faster than 16
FORMATS = "int8", "fp8"  # of quantised layers
PEERS = {"int8": "torch._int_mm", "float8_e4m3fn": "torch._scaled_mm"}


def product(operands: Tunable) -> dict[str, Callable[[], Tensor]]:
    x, w, one = operands.tensors
    x16, w16, out = x.bfloat16(), w.bfloat16(), torch.bfloat16
    contenders = {
        "moe_aiter": lambda: scaled_gemm(x, w, one, one, out_dtype=out),
        "torch, bfloat16": lambda: x16 @ w16,
    }
    if x.dtype == torch.int8:
        return contenders | {"torch._int_mm": lambda: torch._int_mm(x, w)}
    rows, columns = one.new_ones(len(x)), one.new_ones(w.shape[1])
    call = functools.partial(torch._scaled_mm, x, w, out_dtype=out)
    return contenders | {
        "torch._scaled_mm": lambda: call(one, one),
        "moe_aiter, scales of rows": lambda: scaled_gemm(x, w, rows, columns, out_dtype=out),
        "torch._scaled_mm, scales of rows": lambda: call(rows[:, None], columns[None]),
    }


def beside(case: Case) -> Comparison:
    M, N, K = case.sizes
    goals = {PEERS[case.dtypes[0]]: 0.97}
    goals |= {"torch, bfloat16": 1.5} if min(M, N, K) >= LARGE else {}
    goals |= {COPY: 0.85} if M <= 16 else {}
    work = {"flops": 2 * M * N * K, "bytes": M * K + N * K + 2 * M * N}
    return compared(case, product, plain=False, goals=goals, **work)


def batch(G: int, M: int, N: int, K: int, **kind) -> Compared:
    x, w = draw(G, M, K, **kind), draw(G, N, K, **kind).mT
    one, x16, w16 = torch.ones(1, device=x.device), x.bfloat16(), w.bfloat16()
    contenders = {
        "moe_aiter": lambda: scaled_bmm(x, w, one, one, out_dtype=torch.bfloat16),
        "torch.bmm, bfloat16": lambda: x16 @ w16,
    }
    return Compared(contenders, exact=lambda: x.double() @ w.double())


def batch_case(G: int, M: int, N: int, K: int, **named) -> Comparison:
    return Comparison(
        f"bmm-fp8-{G}x{M}",
        f"{G} of {M}x{N}x{K}",
        batch,
        (G, M, N, K),
        flops=2 * G * M * N * K,
        bytes=G * (M * K + N * K + 2 * M * N),
        goals={"torch.bmm, bfloat16": 1.0},
        dtypes=("float8_e4m3fn",),
        **named,
    )


def layers(layer: nn.Module, inputs: tuple, format: str) -> Compared:
    """A layer, quantised, beside itself: both as far from the truth as the formula that quantises it is."""
    small, narrow = quantize(layer, format), quantize(layer, "bf16")
    wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]

    def plain() -> Tensor:
        with use("torch"):
            return small(*inputs)

    contenders = {"moe_aiter": lambda: small(*inputs), "bfloat16": lambda: narrow(*inputs)}
    return Compared(contenders, exact=lambda: layer.double()(*wide), plain=plain)


def linear(format: str, M: int, N: int, K: int, **kind) -> Compared:
    return layers(nn.Linear(K, N, **kind), (gaussian(M, K, **kind),), format)


def experts(format: str, T: int, H: int, width: int, E: int, top_k: int, **kind) -> Compared:
    layer, device = Experts(E, H, width, **kind), kind["device"]
    plan = make_plan(torch.rand(T, E, device=device).argsort(1)[:, :top_k], E)
    weights = torch.rand(T, top_k, device=device)
    return layers(layer, (gaussian(T, H, **kind), weights, plan), format)


def linear_case(kind: str, M: int, N: int, K: int, **named) -> Comparison:
    how = {"flops": 2 * M * N * K, "goals": {"bfloat16": 1.0}}
    return Comparison(f"linear-{kind}-{M}", f"{M}x{N}x{K}", linear, (kind, M, N, K), **how, **named)


def experts_case(kind: str, T: int, H: int, width: int, E: int, top_k: int, **named) -> Comparison:
    shape, sizes = f"T {T}, H {H}, I {width}, E {E}, top {top_k}", (kind, T, H, width, E, top_k)
    how = {"flops": 6 * T * top_k * H * width, "goals": {"bfloat16": 1.0}}
    return Comparison(f"experts-{kind}-{T}", shape, experts, sizes, **how, **named)


CASES = [
    *map(beside, cases.SCALED),
    batch_case(16, 48, 80, 256),
    batch_case(16, 1024, 4096, 4096),
    batch_case(2, 5, 16, 32, **ASKED),
    *(linear_case(kind, 16, 4096, 4096, **ASKED) for kind in FORMATS),
    *(linear_case(kind, 4096, 4096, 4096) for kind in FORMATS),
    *(experts_case(kind, 16, 2048, 768, 64, 8, **ASKED) for kind in FORMATS),
    *(experts_case(kind, 8192, 2048, 768, 64, 8) for kind in FORMATS),
    *(linear_case(kind, 5, 32, 48, dtypes=("float32",), **ASKED) for kind in FORMATS),
    *(experts_case(kind, 20, 32, 24, 4, 2, dtypes=("float32",), **ASKED) for kind in FORMATS),
]
