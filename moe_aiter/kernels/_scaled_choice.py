"""Who multiplies 8 bits: torch's BLAS where it was measured to be faster, or kernels here, and which."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..tuning.choice import choose_backend
from ._triton import cdiv, num_programs

E4M3 = torch.float8_e4m3fn
TILE_M, TILE_N = 128, 256  # of Hopper's kernel


def wants(backend: str) -> Callable[..., bool]:
    """Whether `backend`, hopper or triton, which could compute it, should."""

    def check(x, w, x_scale, w_scale, bias, dtype) -> bool:
        if fits_blas(x, w, x_scale, w_scale, bias, dtype):
            M, K, N = *x.shape, w.shape[1]
            if choose_backend("scaled_fp8", x, "nt", "none", M, N, K, otherwise=backend) == "torch":
                return False
        # where there are no more of these than half of the GPU computes at once, smaller tiles are faster
        tiles = cdiv(x.shape[0], TILE_M) * cdiv(w.shape[1], TILE_N)
        return backend != "hopper" or 2 * tiles > num_programs(x)

    return check


def fits_blas(x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None, bias, dtype) -> bool:
    """Whether cuBLAS has it: x and w of e4m3, by rows and by columns, each with one scale."""
    if not x.is_cuda or torch.version.hip or bias is not None or x.dtype != E4M3 or w.dtype != E4M3:
        return False
    scales = all(s is not None and (len(s) == 1 or s.stride(0) == 0) for s in (x_scale, w_scale))
    return scales and w.shape[1] % 16 == 0 and all(is_aligned(t) for t in (x, w.mT))


def is_aligned(x: Tensor) -> bool:
    """Whether rows lie one by one, each from a multiple of 16 bytes to another."""
    lines = x.shape[1], x.stride(0), x.data_ptr()
    return (
        x.numel() > 0 and x.stride(1) == 1 and x.stride(0) >= x.shape[1] and all(n % 16 == 0 for n in lines)
    )


def multiply_by_blas(out: Tensor, x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> None:
    """Sums in float32: without the fast accumulation, which has some 14 bits."""
    torch._scaled_mm(x, w, x_scale[:1], w_scale[:1], out_dtype=out.dtype, use_fast_accum=False, out=out)
