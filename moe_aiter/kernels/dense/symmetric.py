"""Products whose result is known to be symmetric: one triangle of tiles is computed, and stored twice.

    out = alpha * x @ w + beta * c + gamma * I

as x @ x.mT is, and the product of two symmetric matrices that commute.  Where they commute but for their
roundings, the lower triangle counts.  So `out` equals its transpose to the bit.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

from torch import Tensor

from ... import tuning
from ...op import binds, copy_into, define_op, takes
from ...switches import float32_precision
from ...tuning.choice import choose_backend
from ..base.check import Extra, Operand, check_fields, wide
from ..base.launch import bind_kernel, cdiv, jit_kernel, tl, triton
from ..base.tile import (
    TILE_DTYPES,
    boxes_of,
    in_units,
    load_box,
    multiply,
    no_larger,
    unit_of,
    whole_units,
    with_boxes,
)

# tiles are square, or their triangle would not be one
TILE = tuning.Config(128, 128, 64, num_warps=8, num_stages=3)  # with descriptors
SMALL_TILE = tuning.Config(128, 128, 32, num_warps=8, num_stages=2)


class SymmetricInputs(NamedTuple):
    """The inputs of the op `symmetric_product`, whose result has their dtype."""

    x: Annotated[Operand, "B, N, K"]
    w: Annotated[Operand, "B, K, N"]
    c: Annotated[Extra, "B, N, N"] | None
    alpha: float
    beta: float
    gamma: float


# reference


def symmetric_reference(i: SymmetricInputs) -> Tensor:
    out = i.alpha * wide(i.x) @ wide(i.w)
    out = out if i.c is None else out + i.beta * wide(i.c)
    out.diagonal(dim1=1, dim2=2).add_(i.gamma)
    return out.tril() + out.tril(-1).mT


# kernel


@triton.jit
def triangle(number):
    """Number in a triangle of rows of 1, 2, 3, ... -> (row, column)."""
    row = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@jit_kernel
def symmetric_product_kernel(
    x_ptr,  # (B, N, K), or its descriptor
    w_ptr,  # (B, K, N), or that of its transpose
    c_ptr,  # (B, N, N) or None
    out_ptr,  # (B, N, N), contiguous
    N, K, alpha,
    beta,  # divided by alpha
    gamma,
    x_strides,  # b, n, k
    w_strides,  # b, k, n
    c_strides,  # b, m, n
    X_BOXES: tl.constexpr, W_BOXES: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, x_strides, w_strides, c_strides = in_units((N, K, x_strides, w_strides, c_strides), UNIT)
    rows = tl.cdiv(N, BLOCK)
    tiles = rows * (rows + 1) // 2
    b = tl.program_id(0) // tiles
    tile_m, tile_n = triangle(tl.program_id(0) % tiles)
    m_first, n_first = tile_m * BLOCK, tile_n * BLOCK
    m, n = m_first + tl.arange(0, BLOCK), n_first + tl.arange(0, BLOCK)
    mask = (m < N)[:, None] & (n < N)[None, :]
    m64, n64 = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    if c_ptr is not None:  # the first summand: behind the sum, there are no registers for it
        c_ptrs = c_ptr + b.to(tl.int64) * c_strides[0] + m64 * c_strides[1] + n64 * c_strides[2]
        acc = tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32) * beta
    else:
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    if X_BOXES is not None:
        for k in range(0, K, BLOCK_K):
            x = load_box(x_ptr, b, m_first, k, BLOCK, BLOCK_K, X_BOXES).T
            w = load_box(w_ptr, b, n_first, k, BLOCK, BLOCK_K, W_BOXES)
            acc = tl.dot(x, w, acc)
    else:
        # rows and columns past the end read others' values, which are never stored
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + b.to(tl.int64) * x_strides[0] + (m % N).to(tl.int64)[:, None] * x_strides[1]
        w_ptrs = w_ptr + b.to(tl.int64) * w_strides[0] + (n % N).to(tl.int64)[None, :] * w_strides[2]
        x_ptrs += k[None, :] * x_strides[2]
        w_ptrs += k[:, None] * w_strides[1]
        depth = whole_units(K, UNIT)
        acc = multiply(acc, x_ptrs, w_ptrs, depth, x_strides[2], w_strides[1], BLOCK_K, EVEN_K, PRECISION)
    y = acc * alpha
    y = tl.where(m[:, None] == n[None, :], y + gamma, y).to(out_ptr.dtype.element_ty)
    if tile_m == tile_n:
        y = tl.where(m[:, None] >= n[None, :], y, y.T)
    out_ptr += b.to(tl.int64) * N * N
    tl.store(out_ptr + m64 * N + n64, y, mask=mask)
    if tile_n < tile_m:
        tl.store(out_ptr + n64 * N + m64, y, mask=mask)


# launcher


def new_symmetric(i: SymmetricInputs) -> Tensor:
    size = check_fields(i)
    if i.alpha == 0:
        raise ValueError("alpha is 0: there is no product to compute")
    return i.x.new_empty(size["B"], size["N"], size["N"])


@binds
@takes(*TILE_DTYPES)
def bind_symmetric(i: SymmetricInputs, config: tuning.Config | None = None) -> Callable:
    """`config`: a square tile in place of TILE."""
    (B, N, K), w = i.x.shape, i.w.mT
    c_strides = (0, 0, 0) if i.c is None else i.c.stride()
    unit = unit_of((N, K), i.x.stride(), w.stride(), c_strides)
    boxes = boxes_of(i.x, unit), boxes_of(w, unit)
    boxes = boxes if all(boxes) else (None, None)
    config = config or (TILE if all(boxes) else no_larger(SMALL_TILE, block_k=max(K, 1)))
    rows = cdiv(N, config.block_n)
    kernel = bind_kernel(
        symmetric_product_kernel, (B * (rows * (rows + 1) // 2),), X_BOXES=boxes[0], W_BOXES=boxes[1],
        UNIT=unit, BLOCK=config.block_n, BLOCK_K=config.block_k, EVEN_K=K % config.block_k == 0,
        PRECISION=float32_precision(), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    numbers = N, K, i.alpha, i.beta / i.alpha, i.gamma, i.x.stride(), i.w.stride(), c_strides

    def launch(out: Tensor, i: SymmetricInputs) -> None:
        x, w = with_boxes(i.x, boxes[0], config), with_boxes(i.w.mT, boxes[1], config)
        kernel(x, i.w if boxes[1] is None else w, i.c, out, *numbers)

    return launch


def should_use_triton(i: SymmetricInputs) -> bool:
    """The GPU's table names the fastest; without a row, Triton's kernel on Hopper alone, where it has TMA."""
    if not i.x.is_cuda:
        return True  # the interpreter's
    (B, N, K), unit = i.x.shape, unit_of(i.x.shape[1:], i.x.stride(), i.w.stride())
    fast = boxes_of(i.x, unit) and boxes_of(i.w.mT, unit) and tuning.served()[-1] == "sm90"
    layout = "".join("n" if t.stride(2) == 1 else "t" for t in (i.x, i.w))
    otherwise = "triton" if fast else "torch"
    return choose_backend("symmetric_product", i.x, layout, "none", B * N, N, K, otherwise) == "triton"


bind_symmetric.should_use = should_use_triton


# op

symmetric_op = define_op(
    "symmetric_product", SymmetricInputs, new=new_symmetric, reference=symmetric_reference,
    host=lambda out, i: copy_into(out, symmetric_reference(i)), triton=bind_symmetric,
)  # fmt: skip


def symmetric_product(
    x: Tensor, w: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return alpha * x @ w + beta * c + gamma * I for (B, N, K), (B, K, N) and (B, N, N), symmetric.

    The caller answers for the symmetry: what the products above the diagonal are is not looked at.  Any
    strides.  Sums are float32, rounded once to the dtype of x, w and c, and no gradient is recorded.
    Raises ValueError for shapes, devices and an alpha of 0, TypeError for dtypes.
    """
    return symmetric_op(x, w, c, alpha, beta, gamma)
