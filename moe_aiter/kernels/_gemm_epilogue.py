"""What comes behind the sums of a dense product, in every kernel of it, and sums that programs share."""

from collections.abc import Callable

from torch import Tensor

from ._triton import cdiv, jit_kernel, tl, triton
from .activations import FUNCTIONS

FINISHED = 1024  # elements that a program finishes after a split sum

# kernel


@triton.jit
def finish(
    acc,  # float32: elements (m, n) of a matrix
    m,  # int64
    n,
    mask,
    offsets,  # of the elements in out and z
    bias_ptr,  # (N,) or None
    c_ptr,  # (M, N) or None
    z_ptr,  # or None
    out_ptr,
    alpha,
    beta,
    N,
    bias_stride,
    c_stride_m,
    c_stride_n,
    ACTIVATION: tl.constexpr,
):
    """The epilogue."""
    acc *= alpha
    if c_ptr is not None:
        c_ptrs = c_ptr + (m * c_stride_m + n.to(tl.int64) * c_stride_n)
        acc += beta * tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n.to(tl.int64) * bias_stride, mask=n < N, other=0.0).to(tl.float32)
    if z_ptr is not None:
        tl.store(z_ptr + offsets, acc.to(z_ptr.dtype.element_ty), mask=mask)
    if ACTIVATION is not None:
        acc = ACTIVATION(acc)[0]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit_kernel
def finish_kernel(
    parts_ptr,  # (splits, B, M, N) float32
    bias_ptr,  # (N,) or None
    c_ptr,  # (B, M, N) or None
    z_ptr,  # (B, M, N), contiguous, as is out, or None
    out_ptr,
    splits,
    size,  # B * M * N
    M,
    N,
    alpha,
    beta,
    bias_stride,
    c_strides,  # b, m, n
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of splits, added up in order, and their epilogue."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    acc = tl.zeros((BLOCK,), tl.float32)
    size = tl.cast(size, tl.int64)
    for split in range(0, splits):
        acc += tl.load(parts_ptr + split * size + i, mask=mask, other=0.0)
    row, n = i // N, i % N
    c_base = c_ptr if c_ptr is None else c_ptr + row // M * c_strides[0]
    finish(acc, row % M, n, mask, i, bias_ptr, c_base, z_ptr, out_ptr, alpha, beta,
           N, bias_stride, c_strides[1], c_strides[2], ACTIVATION)  # fmt: skip


# launcher


def splits_of(tiles: int, K: int, block_k: int, units: int) -> tuple[int, int]:
    """How many programs share a sum, and how much of K each has: several where tiles leave units idle."""
    most = cdiv(K, 4 * block_k)  # or there is little to wait for
    wanted = max(min(units // max(tiles, 1), most), 1)
    part = cdiv(cdiv(K, wanted), block_k) * block_k
    return (cdiv(K, part), part) if wanted > 1 else (1, max(K, 1))


def in_triton(activation: str) -> Callable | None:
    return FUNCTIONS[activation][1] if activation else None


def epilogue_of(z: Tensor, bias: Tensor | None, c: Tensor | None, save_z: bool) -> tuple:
    """z or None, and the strides of bias and c."""
    c_strides = (0, 0, 0) if c is None else c.stride()
    return z if save_z else None, 0 if bias is None else bias.stride(0), c_strides


def finish_parts(parts, bias, c, z, out, activation: str, alpha: float, beta: float) -> None:
    """`parts` (splits, B, M, N) added up, and the epilogue; z is None where it is not wanted."""
    splits, _, M, N = parts.shape
    z, bias_stride, c_strides = epilogue_of(z, bias, c, z is not None)
    finish_kernel[(cdiv(out.numel(), FINISHED),)](
        parts, bias, c, z, out, splits, out.numel(), M, N, float(alpha), float(beta),
        bias_stride, c_strides, ACTIVATION=in_triton(activation), BLOCK=FINISHED, num_warps=4,
    )  # fmt: skip
