"""Dense products, for `python -m benchmarks gemm`: see products.py."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moe_aiter.bench import cases
from moe_aiter.bench.cases import FEW, Case, Tunable, by_matmul, gaussian, of_gemm
from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.dense.gemm import gemm
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm
from moe_aiter.kernels.grouped.grouped_gemm import grouped_gemm
from moe_aiter.op import IMPLS, runs, use

from .products import COPY, Compared, Comparison, compared

FUSED = {"relu": False, "gelu_tanh": True}  # what cuBLASLt applies to x @ w + bias: torch's use_gelu
LOOP, STACKED = "torch, loop over experts", "torch, one after another"
Contenders = dict[str, Callable[[], Tensor]]


def grouped(T: int, K: int, N: int, E: int, top_k: int, **kind) -> Compared:
    """Each token times the matrices of its experts, summed, as AITER's page has it."""
    x, w = gaussian(T, K, **kind), gaussian(E, K, N, scale=K**-0.5, **kind)
    ids = torch.randint(0, E, (T, top_k), device=x.device)

    def loop(dtype: torch.dtype = x.dtype) -> Tensor:
        out = torch.zeros(T, N, device=x.device, dtype=dtype)
        for e in range(E):
            token = (ids == e).nonzero()[:, 0]
            out.index_add_(0, token, by_matmul(x[token], w[e], dtype))
        return out

    contenders = {"moe_aiter": lambda: grouped_gemm(x, w, ids), LOOP: loop}
    return Compared(contenders, exact=lambda: loop(torch.float64), plain=loop)


def grouped_case(name: str, T: int, K: int, N: int, E: int, top_k: int, **named) -> Comparison:
    shape, sizes = f"T {T}, K {K}, N {N}, E {E}, top {top_k}", (T, K, N, E, top_k)
    work = {"flops": 2 * T * top_k * K * N, "bytes": 2 * (T * K + E * K * N + T * N)}
    return Comparison(name, shape, grouped, sizes, goals={LOOP: 3.0}, **work, **named)


def linear(activation: str, operands: Tunable) -> Contenders:
    x, weight, bias = operands.tensors
    ours = functools.partial(gemm, x, weight.mT, bias, activation=activation or None)
    found = by_backend(ours, of_gemm(x[None], weight.mT[None], bias, activation=activation))
    found["torch, unfused" if activation else "torch"] = operands.by_torch
    if activation in FUSED and bias is not None:
        how = {"use_gelu": FUSED[activation]}
        found["torch, fused"] = functools.partial(torch._addmm_activation, bias, x, weight.mT, **how)
    return found


def by_backend(ours: Callable[[], Tensor], i: GemmInputs) -> Contenders:
    """Return contenders: what a user gets, and on a GPU also the kernel that could be the fastest."""
    found, many = {"moe_aiter": ours}, i.x.shape[1] > FEW
    kernels = ("hopper", "triton") if many else ("triton",)
    for backend in kernels if i.x.is_cuda else ():
        if runs(IMPLS["gemm"][backend], i):
            return found | {f"moe_aiter, {backend}": functools.partial(forced, backend, ours)}
    return found


def forced(backend: str, run: Callable[[], Tensor]) -> Tensor:
    with use(backend):
        return run()


def added(operands: Tunable) -> Contenders:
    i = operands.tensors
    ours = functools.partial(gemm, i.x[0], i.w[0], alpha=i.alpha, beta=i.beta, c=i.c[0])
    return by_backend(ours, i) | {"torch": operands.by_torch}


def batched(operands: Tunable) -> Contenders:
    a, b, *_ = operands.tensors
    found = by_backend(lambda: gemm(a, b), operands.tensors) | {"torch": lambda: torch.bmm(a, b)}
    return found | {STACKED: lambda: torch.stack([x @ y for x, y in zip(a, b, strict=True)])}


def shuffled(operands: Tunable) -> Contenders:
    x, weight = operands.tensors
    return {"moe_aiter": lambda: tuned_gemm(x, weight, is_shuffled=True), "torch": operands.by_torch}


def beside(case: Case) -> Comparison:
    """Behind GELU the goal is what its fusion saves; in few rows it is a copy of the weight."""
    *batches, M, K, N = (size for size in case.sizes if type(size) is int)
    B = batches[0] if batches else 1
    work = {"flops": 2 * B * M * K * N}
    if case.make is cases.added:
        return compared(case, added, goals={"torch": 0.97}, **work)
    if case.make is cases.shuffled:
        return compared(case, shuffled, goals={"torch": 1.0}, **work)
    work["bytes"] = 2 * B * (M * K + K * N + M * N)
    if case.make is cases.batched:  # the second is what AITER's page claims
        return compared(case, batched, goals={"torch": 1.0, STACKED: 2.0}, **work)
    activation = case.sizes[3]
    least = 1.15 if activation.startswith("gelu") else 0.97
    goals = {"torch, unfused" if activation else "torch": least} | ({COPY: 0.85} if M <= FEW < N else {})
    return compared(case, functools.partial(linear, activation), goals=goals, **work)


CASES = [
    *map(beside, cases.DENSE),
    grouped_case("grouped-aiter", 4096, 512, 2048, 8, 2, dtypes=("float16", "bfloat16", "float32")),
    grouped_case("grouped-E", 4096, 2048, 1024, 64, 8),
    grouped_case("grouped-C", 32768, 2048, 768, 128, 8),
    grouped_case("grouped-toy", 48, 32, 24, 5, 2, dtypes=("float32", "bfloat16"), devices=()),
]
