"""What a step of Muon computes for matrices, between its optimizer's gradient and its weights: see optim.py.

    m = lerp(m, g, 1 - momentum),   u = lerp(g, m, momentum) or m,   x = u / |u|
    x = a x + (b p + c p p) x                   with p = x x^T, `steps` times, in 16 bits
    w = w - lr * weight_decay * w - lr * scale * x

Each line's passes over the matrices are as few as there can be: a norm needs one of its own.

An iteration is one product of x by a polynomial of p.  Of several iterations in a row, all are polynomials of
the first p, symmetric, and commute: p becomes q p q for an iteration's q = a + b p + c p p, and x is
multiplied once, by the product of the q.  Five iterations one by one, of 4 s s l + 2 s s s FLOPs each for
sides s < l, have 20 s s l + 10 s s s.  In rounds of two, two and one they have 9 s s l + 11 s s s, if
symmetric products are half of others.

A round's p holds roundings of its largest values; each iteration makes small values, and these roundings,
a * a times as large.  That is why rounds are short.  Relative errors on an H200, in thousandths:

                                     one by one   rounds of two   one by one in bfloat16
    random                              1.4-1.8         1.0-1.8                     9-12
    columns decay, s < l                1.4-1.5         1.2-2.6                      7-9
    columns decay, s = l                    1.7             4.0                      6.5
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import Written, binds, define_inplace_op, define_op
from ..base.check import Float, check_fields, check_size, check_sizes, wide
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import in_units, unit_of
from .symmetric import SymmetricInputs, should_use_triton, symmetric_product

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan et al.: steep at 0, and near 1 after five steps
ROUND = 2  # iterations that follow on one gram
LEAST = 1e-7  # norm that matrices are divided by
BLOCK_A, BLOCK_B = 16, 256
PARTS = 1024  # the most programs that a matrix has


class DirectionInputs(NamedTuple):
    """The inputs of the op `muon_direction`: the orthogonal update of each matrix, of this dtype.

    With m, the momentum, which is updated; without, of g itself.  n stacks of T matrices, which are gate and
    up or one.
    """

    g: Annotated[Float, "n, T, A, B"]
    m: Annotated[Written, "n, T, A, B"] | None
    momentum: float
    nesterov: bool
    steps: int
    dtype: torch.dtype | None  # None: float16, and bfloat16 on a CPU


class UpdateInputs(NamedTuple):
    """The inputs of the op `muon_update_`: p = p - lr * weight_decay * p - lr * scale * x."""

    p: Annotated[Written, "n, T, A, B"]
    x: Annotated[Float, "n, T, A, B"]
    lr: Tensor  # a number
    weight_decay: float
    scale: float


# iterations


def rounds(steps: int, grams: bool) -> list[int]:
    """Return how many iterations lie between two products with x."""
    most = ROUND if grams else 1
    return [min(most, steps - done) for done in range(0, steps, most)]


def polynomial(x: Tensor, steps: int) -> Tensor:
    """Return the product of the q of so many iterations from x (B, s, l) on."""
    a, b, c = COEFFICIENTS
    p, product = symmetric_product(x, x.mT), None
    for left in reversed(range(steps)):
        q = symmetric_product(p, p, p, alpha=c, beta=b, gamma=a)
        product = q if product is None else symmetric_product(q, product)
        if left:
            p = symmetric_product(p, q)
            p = symmetric_product(p, q)
    return product


def iterate(x: Tensor, out: Tensor, tall: bool) -> None:
    """Do one iteration by torch's products.

    float16 is precise enough for one product to compute (a + b p + c p p) x, as c q q + d with
    q = p + b / 2c; bfloat16 would double the error.
    """
    a, b, c = COEFFICIENTS
    gram = x.mT @ x if tall else x @ x.mT
    if x.dtype == torch.float16:
        gram.diagonal(dim1=1, dim2=2).add_(b / (2 * c))
        factor = torch.baddbmm(gram, gram, gram, beta=0, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a - b * b / (4 * c))
        multiply_by(factor, x, out, tall)
    else:
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (x, factor) if tall else (factor, x)
        torch.baddbmm(x, left, right, beta=a, out=out)


def multiply_by(factor: Tensor, x: Tensor, out: Tensor, tall: bool) -> None:
    torch.bmm(*((x, factor) if tall else (factor, x)), out=out)


def orthogonalize(out: Tensor, i: DirectionInputs, normalize: Callable, grams: bool) -> None:
    """Fill `out` with the iterations from what `normalize(x, i)` fills x with.

    They end in `out`, and have one more buffer of its size.  Where x is tall, p = x^T x and x is multiplied
    from the right.
    """
    tall, parts = out.shape[2] > out.shape[3], rounds(i.steps, grams)
    x, y = out, torch.empty_like(out)
    x, y = (y, x) if len(parts) % 2 else (x, y)
    normalize(x, i)
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    for steps in parts:
        if grams:
            multiply_by(polynomial(x.mT if tall else x, steps), x, y, tall)
        else:
            iterate(x, y, tall)
        x, y = y, x


# reference


def normalize_reference(x: Tensor, i: DirectionInputs) -> None:
    u = i.g
    if i.m is not None:
        i.m.lerp_(i.g.to(i.m.dtype), 1 - i.momentum)
        u = i.g.lerp(i.m.to(i.g.dtype), i.momentum) if i.nesterov else i.m
    wider = torch.promote_types(u.dtype, torch.float32)
    norm = torch.linalg.vector_norm(u, dim=(2, 3), keepdim=True, dtype=wider).clamp(min=LEAST)
    torch.mul(u, 1 / norm, out=x)


def fill_direction(out: Tensor, i: DirectionInputs) -> None:
    orthogonalize(out, i, normalize_reference, grams=False)


def update_reference(i: UpdateInputs) -> None:
    for p, x in zip(i.p, i.x, strict=True):  # in little memory
        p.copy_(torch.addcmul(wide(p) * (1 - i.lr * i.weight_decay), wide(x), i.lr, value=-i.scale))


# kernels


@triton.jit
def tile_at(matrix, tile, T, A, B, strides, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr):
    """Where the numbers of a matrix's tile lie, and which of them there are."""
    tiles_b = tl.cdiv(B, BLOCK_B)
    a = tile // tiles_b * BLOCK_A + tl.arange(0, BLOCK_A)
    b = tile % tiles_b * BLOCK_B + tl.arange(0, BLOCK_B)
    start = (matrix // T).to(tl.int64) * strides[0] + (matrix % T).to(tl.int64) * strides[1]
    at = start + a.to(tl.int64)[:, None] * strides[2] + b.to(tl.int64)[None, :] * strides[3]
    return at, (a < A)[:, None] & (b < B)[None, :]


@triton.jit
def load_float(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@jit_kernel
def momentum_kernel(
    g_ptr,  # (n, T, A, B)
    m_ptr,  # (n, T, A, B) or None
    sums_ptr,  # (n * T, PARTS) float32: of the squares of u
    T, A, B, weight,
    g_strides, m_strides,  # n, t, a, b
    NESTEROV: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Update a part of the momentum of a matrix, and sum up the squares of u."""
    B, g_strides, m_strides = in_units((B, g_strides, m_strides), UNIT)
    matrix, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    squares = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for tile in range(part, tl.cdiv(A, BLOCK_A) * tl.cdiv(B, BLOCK_B), PARTS):
        at, mask = tile_at(matrix, tile, T, A, B, g_strides, BLOCK_A, BLOCK_B)
        g = load_float(g_ptr + at, mask)
        u = g
        if m_ptr is not None:
            at, mask = tile_at(matrix, tile, T, A, B, m_strides, BLOCK_A, BLOCK_B)
            m = load_float(m_ptr + at, mask)
            m = (m + weight * (g - m)).to(m_ptr.dtype.element_ty)
            tl.store(m_ptr + at, m, mask=mask)
            m = m.to(tl.float32)
            u = m + weight * (g - m) if NESTEROV else m
        squares += u * u
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.sum(squares, 1), 0))


@jit_kernel
def normalize_kernel(
    g_ptr,  # (n, T, A, B)
    m_ptr,  # (n, T, A, B), which is updated, or None
    sums_ptr,  # (n * T, PARTS) float32
    x_ptr,  # (n, T, A, B)
    T, A, B, weight, least,
    g_strides, m_strides, x_strides,  # n, t, a, b
    NESTEROV: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """x = u / |u| in a part of a matrix."""
    B, g_strides, m_strides, x_strides = in_units((B, g_strides, m_strides, x_strides), UNIT)
    matrix, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    i = tl.arange(0, BLOCK_PARTS)
    sums = tl.load(sums_ptr + matrix.to(tl.int64) * PARTS + i, mask=i < PARTS, other=0.0)
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(sums, 0)), least)
    for tile in range(part, tl.cdiv(A, BLOCK_A) * tl.cdiv(B, BLOCK_B), PARTS):
        at, mask = tile_at(matrix, tile, T, A, B, g_strides, BLOCK_A, BLOCK_B)
        u = load_float(g_ptr + at, mask)
        if m_ptr is not None:
            at, mask = tile_at(matrix, tile, T, A, B, m_strides, BLOCK_A, BLOCK_B)
            m = load_float(m_ptr + at, mask)
            u = m + weight * (u - m) if NESTEROV else m
        at, mask = tile_at(matrix, tile, T, A, B, x_strides, BLOCK_A, BLOCK_B)
        tl.store(x_ptr + at, (u * inverse).to(x_ptr.dtype.element_ty), mask=mask)


@jit_kernel
def muon_update_kernel(
    p_ptr, x_ptr,  # (n, T, A, B)
    lr_ptr,  # a number
    T, A, B,
    tiles,  # of a matrix
    weight_decay, scale,
    p_strides, x_strides,  # n, t, a, b
    UNIT: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A tile of weights."""
    B, p_strides, x_strides = in_units((B, p_strides, x_strides), UNIT)
    matrix, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lr = tl.load(lr_ptr).to(tl.float32)
    at, mask = tile_at(matrix, tile, T, A, B, x_strides, BLOCK_A, BLOCK_B)
    x = load_float(x_ptr + at, mask)
    at, mask = tile_at(matrix, tile, T, A, B, p_strides, BLOCK_A, BLOCK_B)
    p = load_float(p_ptr + at, mask)
    p = p * (1.0 - lr * weight_decay) - lr * scale * x
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)


# launchers


def new_direction(i: DirectionInputs) -> Tensor:
    """The result's matrices lie in memory by columns where g's do."""
    check_fields(i)
    check_sizes(steps=i.steps)
    n, T, A, B = i.g.shape
    dtype = i.dtype or dtype_on(i.g.device)
    if is_by_columns(i.g):
        return i.g.new_empty(n, T, B, A, dtype=dtype).mT
    return i.g.new_empty(i.g.shape, dtype=dtype)


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of the iterations.  CPUs multiply bfloat16 much faster than float16."""
    return torch.bfloat16 if device.type == "cpu" else torch.float16


def is_by_columns(t: Tensor) -> bool:
    return t.stride(3) != 1 and t.stride(2) == 1


def walked(first: Tensor, *others: Tensor | None) -> tuple[tuple[int, ...], list[tuple[int, ...]], int]:
    """Return T, A, B and the strides of tensors, with A and B swapped where the first lies by columns, and
    the `unit_of` them."""
    turn = (lambda t: t.mT) if is_by_columns(first) else (lambda t: t)
    strides = [(0, 0, 0, 0) if t is None else turn(t).stride() for t in (first, *others)]
    sizes = tuple(turn(first).shape[1:])
    return sizes, strides, unit_of((sizes[2],), *strides)


def bind_momentum(i: DirectionInputs) -> Callable:
    """Return `launch(x, i)`, which updates m and fills x, laid out as the result is, with u / |u|."""
    (T, A, B), (*strides, x_strides), unit = walked(i.g, i.m, new_direction(i))
    matrices, tiles = len(i.g) * T, cdiv(A, BLOCK_A) * cdiv(B, BLOCK_B)
    parts, weight = min(cdiv(tiles, 4), PARTS), 1 - i.momentum
    how = {"NESTEROV": i.nesterov, "PARTS": parts, "UNIT": unit, "BLOCK_A": BLOCK_A, "BLOCK_B": BLOCK_B}
    update = bind_kernel(momentum_kernel, (matrices * parts,), **how)
    scale = bind_kernel(normalize_kernel, (matrices * parts,), **how, BLOCK_PARTS=next_power_of_2(parts))

    def normalize(x: Tensor, i: DirectionInputs) -> None:
        sums = x.new_empty(matrices, parts, dtype=torch.float32)
        update(i.g, i.m, sums, T, A, B, weight, *strides)
        scale(i.g, i.m, sums, x, T, A, B, weight, LEAST, *strides, x_strides)

    return normalize


@binds
def bind_direction(i: DirectionInputs) -> Callable:
    if i.g.dtype == torch.float64 or (i.m is not None and i.m.dtype == torch.float64):
        return fill_direction
    normalize, grams = bind_momentum(i), has_fast_grams(new_direction(i).flatten(0, 1))
    return lambda out, i: orthogonalize(out, i, normalize, grams)


def has_fast_grams(x: Tensor) -> bool:
    """Whether symmetric products of x (B, A, B) in float16 are faster here than whole ones."""
    x = x.mT if x.shape[1] > x.shape[2] else x
    return (
        x.is_cuda
        and x.dtype == torch.float16
        and should_use_triton(SymmetricInputs(x, x.mT, None, 1.0, 0.0, 0.0))
    )


def check_update(i: UpdateInputs) -> None:
    check_fields(i)
    check_size("lr has {} numbers", i.lr.numel(), "must have {}", 1)


@binds
def bind_update(i: UpdateInputs) -> Callable:
    if i.p.dtype == torch.float64:
        return lambda out, i: update_reference(i)
    (T, A, B), strides, unit = walked(i.p, i.x)
    tiles = cdiv(A, BLOCK_A) * cdiv(B, BLOCK_B)
    options = {"UNIT": unit, "BLOCK_A": BLOCK_A, "BLOCK_B": BLOCK_B}
    kernel = bind_kernel(muon_update_kernel, (len(i.p) * T * tiles,), **options)
    numbers = T, A, B, tiles, i.weight_decay, i.scale, *strides
    return lambda out, i: kernel(i.p, i.x, i.lr, *numbers)


# ops

muon_direction = define_op(
    "muon_direction", DirectionInputs, new=new_direction, torch=fill_direction, host=fill_direction,
    triton=bind_direction,
)  # fmt: skip
muon_update = define_inplace_op(
    "muon_update_", UpdateInputs, check=check_update, reference=update_reference,
    host=lambda out, i: update_reference(i), triton=bind_update,
)  # fmt: skip
