"""Products with sparse weights, for `python -m benchmarks gemm`: see products.py.

The weight (N, K) has N = K, and so many percent of its blocks, or of its entries, are zeros.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_aiter.bench import cases
from moe_aiter.bench.cases import ROWS, Case, Tunable, sparse_weight
from moe_aiter.kernels.sparse.gemm import sparse_gemm

from .products import Compared, Comparison, compared

DENSE, BSR, MM = "torch, dense", "torch, F.linear of BSR", "torch.sparse.mm"
LAYOUTS = {"csr": torch.sparse_csr, "coo": torch.sparse_coo}


def blocks(block: int, operands: Tunable) -> dict[str, Callable[[], Tensor]]:
    """The whole call, with a weight of blocks."""
    x, w = operands.tensors
    sparse = w.to_sparse(layout=torch.sparse_bsr, blocksize=(block, block))
    contenders = {"moe_aiter": lambda: sparse_gemm(x, sparse), DENSE: operands.by_torch}
    return contenders | {BSR: lambda: F.linear(x, sparse)}


def entries(layout: str, M: int, N: int, percent: float, **kind) -> Compared:
    """The whole call, with a weight in this layout."""
    x, w = torch.randn(M, N, **kind), sparse_weight(N, percent, 1, **kind)
    sparse, dense = w.to_sparse(layout=LAYOUTS[layout]), functools.partial(F.linear, x, w)
    contenders = {"moe_aiter": lambda: sparse_gemm(x, sparse), MM: lambda: torch.sparse.mm(sparse, x.T).T}
    return Compared(contenders | {DENSE: dense}, lambda: F.linear(x.double(), w.double()), dense)


def step(*sizes, **kind) -> Compared:
    """Forward and backward: values with their pattern, and a weight of BSR that it makes of them.

    The first and the last block stand for the weight's gradient, of which each contender has others.
    """
    x, w, dout, pattern = cases.sparse_step(*sizes, **kind).tensors
    block, _ = pattern.blocksize

    def of_blocks(dw: Tensor) -> tuple[Tensor, Tensor]:
        return dw[0], dw[-1]

    def of_matrix(dw: Tensor) -> tuple[Tensor, Tensor]:
        return dw[:block, :block], dw[-block:, -block:]

    def step(product: Callable, x: Tensor, w: Tensor, dout: Tensor, part: Callable) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        with torch.enable_grad():
            out = product(x, w)
            dx, dw = torch.autograd.grad(out, (x, w), dout)
        return out.detach(), dx, *part(dw)

    def ours(product: Callable) -> Callable:
        return functools.partial(step, product, x, pattern.take(w), dout, of_blocks)

    dense = functools.partial(step, F.linear, x, w, dout, of_matrix)
    contenders = {
        "moe_aiter": ours(lambda x, values: sparse_gemm(x, values, pattern)),
        "moe_aiter, BSR": ours(lambda x, values: sparse_gemm(x, pattern.to_sparse(values))),
        DENSE: dense,
    }
    exact = lambda: step(F.linear, x.double(), w.double(), dout.double(), of_matrix)  # noqa: E731
    return Compared(contenders, exact, dense)


def work(M: int, N: int, percent: float, passes: int = 1) -> dict:
    """FLOPs and bytes of what is not zero."""
    kept = N * N * (100 - percent) / 100
    return {"flops": passes * 2 * M * kept, "bytes": int(passes * 2 * (2 * M * N + kept))}


def beside(case: Case) -> Comparison:
    *sizes, block = case.sizes
    goals = {DENSE: 3.0} if sizes[2] == 90 and block >= 64 else {}
    if case.make is cases.sparse_step:
        return Comparison(**vars(case) | {"make": step, "goals": goals} | work(*sizes, 3))
    return compared(case, functools.partial(blocks, block), goals=goals, **work(*sizes))


def entry_case(layout: str, M: int, N: int, percent: float, name: str, **named) -> Comparison:
    shape = f"{M}x{N}x{N}, {percent} % zeros in {layout.upper()}"
    how = work(M, N, percent) | {"goals": {MM: 0.97}} | named
    return Comparison(name, shape, entries, (layout, M, N, percent), **how)


TOY = {"dtypes": ("float32", "bfloat16"), "devices": ()}
CASES = [
    *map(beside, cases.SPARSE),
    *(entry_case("csr", ROWS, 4096, percent, f"csr-{percent}") for percent in (90, 99, 99.9)),
    *(entry_case("csr", M, 4096, 99.9, f"csr-99.9-{M}") for M in (1, 16, 64)),
    *(entry_case("csr", M, 4096, 99, f"csr-99-{M}") for M in (16, 64)),
    entry_case("coo", ROWS, 4096, 99, "coo-99"),
    *(entry_case(layout, 33, 64, 90, f"{layout}-toy", **TOY) for layout in ("csr", "coo")),
]
