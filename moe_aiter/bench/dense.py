"""Dense products, for `bench gemm`: see products.py."""

import functools

import torch
from torch import Tensor

from ..kernels.grouped_gemm import grouped_gemm
from .products import Case, Problem


def normal(*shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).mul_(scale)


def grouped(T: int, K: int, N: int, E: int, top_k: int, device, dtype, seed: int) -> Problem:
    """Each token times the matrices of its experts, summed, as AITER's page has it."""
    torch.manual_seed(seed)
    x = normal(T, K, device=device, dtype=dtype)
    w = normal(E, K, N, device=device, dtype=dtype, scale=K**-0.5)
    ids = torch.randint(0, E, (T, top_k), device=device)

    def loop(kind: torch.dtype = dtype) -> Tensor:
        out = torch.zeros(T, N, device=device, dtype=kind)
        for e in range(E):
            token = (ids == e).nonzero()[:, 0]
            out.index_add_(0, token, x[token].to(kind) @ w[e].to(kind))
        return out

    contenders = {"moe_aiter": lambda: grouped_gemm(x, w, ids), "torch, loop over experts": loop}
    return Problem(contenders, exact=lambda: loop(torch.float64), plain=loop)


def grouped_case(name: str, *sizes: int, **named) -> Case:
    T, K, N, E, top_k = sizes
    return Case(
        name,
        f"T {T}, K {K}, N {N}, E {E}, top {top_k}",
        functools.partial(grouped, *sizes),
        flops=2 * T * top_k * K * N,
        bytes=2 * (T * K + E * K * N + T * N),
        goals={"torch, loop over experts": 3.0},
        **named,
    )


CASES = [
    grouped_case("grouped-aiter", 4096, 512, 2048, 8, 2, dtypes=("float16", "bfloat16", "float32")),
    grouped_case("grouped-E", 4096, 2048, 1024, 64, 8),
    grouped_case("grouped-C", 32768, 2048, 768, 128, 8),
    grouped_case("grouped-toy", 48, 32, 24, 5, 2, dtypes=("float32", "bfloat16"), devices=()),
]
