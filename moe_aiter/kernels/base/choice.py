"""Choose what computes a dense or a scaled product: torch's BLAS or a kernel here.

* `should_use_gemm`: the table of the GPU names the fastest.  For a product that the table does not list, the
  Hopper kernel computes few rows of a large weight, and torch everything else.
* `should_use_scaled`: torch's BLAS computes products of 8-bit floats that the table says it is faster at.  A
  kernel here computes all others: the Hopper kernel those with enough tiles to fill more than half of the
  GPU.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...invariance import batch_invariant
from ...private_api import scaled_product
from ...tuning.choice import choose_backend
from .gemm_row import GemmInputs
from .launch import cdiv, num_programs

# dense products

FEW = 16  # rows, which `launch_few_rows` is for
LONG = 2**22  # numbers of all weights, 8 MiB: what was measured is as much and more
MANY_ROWS = 4096  # with batch invariance, tables are asked about so many
DEEP = 512  # of them in a row, or some warps of a program would have nothing to read


def should_use_gemm(backend: str) -> Callable[..., bool]:
    """Whether `backend`, which could compute it, should."""

    def check(i: GemmInputs) -> bool:
        if batch_invariant():  # torch's sums, and which of ours is the fastest, depend on the number of rows
            return backend == "triton"
        if i.dtype not in (None, i.x.dtype):  # torch would convert the operands first
            return backend == "triton"
        otherwise = "torch" if i.w.stride(2) == 1 else unmeasured(i.x.shape[1:], i.w.numel(), i.w.itemsize)
        return choose_backend(*question(i), otherwise) == backend

    return check


def unmeasured(size: Sequence[int], numbers: int, itemsize: int) -> str:
    """Return the backend for matrices (M, K) and a weight that lies by rows, which no table lists."""
    M, K = size
    return "hopper" if M <= FEW and K >= DEEP and numbers >= LONG and itemsize == 2 else "torch"


def question(i: GemmInputs) -> tuple:
    """Return the arguments of `choose_backend`."""
    (B, M, K), N = i.x.shape, i.w.shape[2]
    layout = "".join("n" if t.stride(2) == 1 else "t" for t in (i.x, i.w))
    epilogue = i.activation or ("bias" if i.bias is not None else "none" if i.c is None else "c")
    return "gemm" if B == 1 else "bmm", i.x, layout, epilogue, B * M, N, K


# scaled products


E4M3 = torch.float8_e4m3fn
TILE_M, TILE_N = 128, 256  # of Hopper's kernel


def should_use_scaled(backend: str) -> Callable[..., bool]:
    """Whether `backend`, hopper or triton, which could compute it, should."""

    def check(i) -> bool:
        if batch_invariant():
            return backend == "triton"
        (M, K), N = i.x.shape, i.w.shape[1]
        asked = "scaled_fp8", i.x, "nt", "none", M, N, K
        if fits_blas(i) and choose_backend(*asked, otherwise=backend) == "torch":
            return False
        # where there are no more of these than half of the GPU computes at once, smaller tiles are faster
        return backend != "hopper" or 2 * cdiv(M, TILE_M) * cdiv(N, TILE_N) > num_programs(i.x)

    return check


def fits_blas(i) -> bool:
    """Whether cuBLAS has the product of these inputs of `scaled_gemm`: x and w of e4m3, by rows and by
    columns, each with one scale."""
    if not i.x.is_cuda or torch.version.hip or i.bias is not None or {i.x.dtype, i.w.dtype} != {E4M3}:
        return False
    scales = all(s is not None and (len(s) == 1 or s.stride(0) == 0) for s in (i.x_scale, i.w_scale))
    return scales and i.w.shape[1] % 16 == 0 and all(is_aligned(t) for t in (i.x, i.w.mT))


def is_aligned(x: Tensor) -> bool:
    """Whether rows lie one by one, each from a multiple of 16 bytes to another."""
    lines = x.shape[1], x.stride(0), x.data_ptr()
    return (
        x.numel() > 0 and x.stride(1) == 1 and x.stride(0) >= x.shape[1] and all(n % 16 == 0 for n in lines)
    )


def multiply_by_blas(out: Tensor, i) -> None:
    """Sums in float32: without the fast accumulation, which has some 14 bits."""
    scales = i.x_scale[:1], i.w_scale[:1]
    scaled_product(i.x, i.w, *scales, out_dtype=out.dtype, use_fast_accum=False, out=out)
