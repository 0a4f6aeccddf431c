"""Products with sparse weights, for `bench gemm`: see products.py.

The weight (N, K) has N = K, and so many percent of its blocks, or of its entries, are zeros.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.sparse.gemm import sparse_gemm
from ..kernels.sparse.pattern import SparsePattern
from .products import Case, Problem
from .tiles import Kernel, launches_of

DENSE, BSR, MM = "torch, dense", "torch, F.linear of BSR", "torch.sparse.mm"
ROWS = 4096  # of x
LAYOUTS = {"bsr": torch.sparse_bsr, "csr": torch.sparse_csr, "coo": torch.sparse_coo}
TOY = {"dtypes": ("float32", "bfloat16"), "devices": ()}


def weight(N: int, percent: int, block: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    kept = (torch.rand(N // block, N // block, device=device) * 100 >= percent).to(dtype)
    kept[0, 0] = kept[-1, -1] = 1  # whose gradients are compared
    w = torch.randn(N, N, device=device, dtype=dtype).mul_((N * (100 - percent) / 100) ** -0.5)
    return w.mul_(kept.repeat_interleave(block, 0).repeat_interleave(block, 1))


def forward(layout: str, M: int, N: int, percent: float, block: int, device, dtype, seed: int) -> Problem:
    """The whole call, with a weight in this layout."""
    torch.manual_seed(seed)
    x, w = torch.randn(M, N, device=device, dtype=dtype), weight(N, percent, block, device, dtype)
    sparse = w.to_sparse(layout=LAYOUTS[layout], blocksize=(block, block) if layout == "bsr" else None)
    dense = functools.partial(F.linear, x, w)
    contenders = {"moe_aiter": lambda: sparse_gemm(x, sparse)}
    if layout == "bsr":
        contenders |= {DENSE: dense, BSR: lambda: F.linear(x, sparse)}
    else:
        contenders |= {MM: lambda: torch.sparse.mm(sparse, x.T).T, DENSE: dense}
    kernels = (lambda: [forward_kernel(x, w, block)]) if layout == "bsr" else None
    return Problem(contenders, lambda: F.linear(x.double(), w.double()), dense, kernels)


def forward_kernel(x: Tensor, w: Tensor, block: int) -> Kernel:
    pattern = SparsePattern.from_dense(w, block)
    launches = launches_of("sparse_matmul", x, pattern.take(w), None, pattern.lists, *w.shape, False)
    return Kernel(
        "forward",
        x.new_empty(len(x), len(w)),
        {backend: launch for backend, launch in launches.items() if backend != "torch"},
        flops=2 * len(x) * pattern.num_blocks * block**2,
        exact=lambda: F.linear(x.double(), w.double()),
        plain=lambda: F.linear(x, w),
    )


def gradient_kernel(x: Tensor, dout: Tensor, pattern: SparsePattern) -> Kernel:
    """Return the kernel of the values' gradient."""
    a, b = pattern.blocksize
    launches = launches_of("sparse_matmul_grad", dout, x, pattern.lists, a, b)
    return Kernel(
        "gradient",
        x.new_empty(pattern.num_blocks, a, b),
        {backend: launch for backend, launch in launches.items() if backend != "torch"},
        flops=2 * len(x) * pattern.num_blocks * a * b,
        exact=lambda: pattern.take(dout.double().T @ x.double()),
        plain=lambda: pattern.take(dout.T @ x),
    )


def blocks_step(M: int, N: int, percent: int, block: int, device, dtype, seed: int) -> Problem:
    """Forward and backward: values with their pattern, and a weight of BSR that it makes of them.

    The first and the last block stand for the weight's gradient, of which each contender has others.
    """
    torch.manual_seed(seed)
    x, dout = torch.randn(2, M, N, device=device, dtype=dtype)
    w = weight(N, percent, block, device, dtype)
    pattern = SparsePattern.from_dense(w, block)

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
    return Problem(
        {
            "moe_aiter": ours(lambda x, values: sparse_gemm(x, values, pattern)),
            "moe_aiter, BSR": ours(lambda x, values: sparse_gemm(x, pattern.to_sparse(values))),
            DENSE: dense,
        },
        exact=lambda: step(F.linear, x.double(), w.double(), dout.double(), of_matrix),
        plain=dense,
        kernels=lambda: [gradient_kernel(x, dout, pattern)],
    )


def work(M: int, N: int, percent: float, passes: int = 1) -> dict:
    """FLOPs and bytes of what is not zero."""
    kept = N * N * (100 - percent) / 100
    return {"flops": passes * 2 * M * kept, "bytes": int(passes * 2 * (2 * M * N + kept))}


def block_cases(M: int, N: int, percent: int, block: int, name: str, **named) -> list[Case]:
    shape, sizes = f"{M}x{N}x{N}, {percent} % zeros in blocks of {block}", (M, N, percent, block)
    goals = {DENSE: 3.0} if percent == 90 and block >= 64 else {}
    make, step = functools.partial(forward, "bsr", *sizes), functools.partial(blocks_step, *sizes)
    case = Case(name, shape, make, **work(M, N, percent), goals=goals, **named)
    if percent != 90:  # steps are measured where the goals are
        return [case]
    shape = f"{shape}, with gradients"
    return [case, Case(f"{name}-step", shape, step, **work(M, N, percent, 3), goals=goals, **named)]


def entry_case(layout: str, M: int, N: int, percent: float, name: str, **named) -> Case:
    make = functools.partial(forward, layout, M, N, percent, 1)
    shape = f"{M}x{N}x{N}, {percent} % zeros in {layout.upper()}"
    return Case(name, shape, make, **work(M, N, percent), goals={MM: 0.97}, **named)


CASES = [
    *(
        case
        for block, percents in ((32, [90]), (64, [50, 80, 90, 95]), (128, [90]))
        for percent in percents
        for case in block_cases(ROWS, 4096, percent, block, f"block{block}-{percent}")
    ),
    *(case for b in (64, 128) for case in block_cases(ROWS, 8192, 90, b, f"block{b}-90-8192")),
    *(entry_case("csr", ROWS, 4096, percent, f"csr-{percent}") for percent in (90, 99, 99.9)),
    *(entry_case("csr", M, 4096, 99.9, f"csr-99.9-{M}") for M in (1, 16, 64)),
    *(entry_case("csr", M, 4096, 99, f"csr-99-{M}") for M in (16, 64)),
    entry_case("coo", ROWS, 4096, 99, "coo-99"),
    *block_cases(33, 64, 90, 16, "block-toy", **TOY),
    *(entry_case(layout, 33, 64, 90, f"{layout}-toy", **TOY) for layout in ("csr", "coo")),
]
