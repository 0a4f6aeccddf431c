"""Dense and batched matmul with an epilogue in float32: `act(alpha * x @ w + beta * c + bias)`.

B matrices of M rows, K in, N out.  Shapes say the maths; strides say the layout.  `weight.mT` is the `w` of
an nn.Linear.  On a GPU a measured table chooses between torch's BLAS and the kernels here: see
tuning/choice.py.  `matmul_precision` gives torch's own products of float32 the precision of our kernels.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ... import tuning
from ...invariance import batch_invariant, summing_tokens
from ...op import binds, copy_into, define_op, gradients, runs, takes
from ...private_api import addmm_activation
from ...switches import MATMUL, float32_precision
from .. import hopper
from ..base.activations import FUNCTIONS
from ..base.check import (
    FLOATS,
    apart,
    cast_as_linear,
    check_fields,
    check_floating,
    check_real,
    check_size,
    check_tensor,
    needs_grad,
    packed,
    sum_dtype,
    wide,
)
from ..base.choice import MANY_ROWS, should_use_gemm
from ..base.fixed_rows import each_number, multiply_rows
from ..base.gemm_row import (
    GemmInputs,
    bind_one_row,
    bind_split,
    epilogue_of,
    finish,
    in_triton,
    splits_of,
    takes_row,
)
from ..base.launch import bind_kernel, cdiv, jit_kernel, num_programs, tl
from ..base.tile import TILE_DTYPES, in_units, multiply, swizzle, tile_options, unit_of, whole_units
from ..grouped.tgmm import chosen

# precision


def matmul_precision(x: Tensor) -> contextlib.AbstractContextManager:
    """Give torch's float32 products on a GPU the precision of our kernels inside the block."""
    on_gpu = x.is_cuda and x.dtype == torch.float32
    return MATMUL.set(float32_precision()) if on_gpu else contextlib.nullcontext()


# reference, and the fastest way to it in torch


def gemm_reference(i: GemmInputs) -> tuple[Tensor, Tensor]:
    dtype = i.dtype or i.x.dtype
    product = torch.promote_types(i.x.dtype, dtype)  # rounded once, to what is asked for
    z = i.alpha * wide(multiply_rows(i.x.to(product), i.w.to(product)))
    z = z if i.c is None else z + i.beta * wide(i.c)
    z = z if i.bias is None else z + wide(i.bias)
    out = each_number(FUNCTIONS[i.activation][0], z) if i.activation else z
    return out.to(dtype), z.to(dtype) if i.save_z else z.new_empty(0, dtype=dtype)


def fill_gemm(outs: tuple[Tensor, Tensor], i: GemmInputs) -> None:
    """Multiply by BLAS, whose epilogue adds the bias or c; an activation follows a rounding to `dtype`."""
    out, z = outs
    y = z if i.save_z else out
    if any(t is not None and t.dtype != y.dtype for t in (i.x, i.bias, i.c)):
        return copy_into(outs, gemm_reference(i))
    with matmul_precision(i.x):
        if batch_invariant():
            multiply_rows_into(y, i)
        elif fits_fused(out, i):
            addmm_activation.out(i.bias, i.x[0], i.w[0], out=out[0])
            return
        else:
            multiply_into(y, i)
    if i.activation:
        if batch_invariant():
            out.copy_(each_number(FUNCTIONS[i.activation][0], y))
        else:
            activate_into(out, y, i.activation)


def fits_fused(out: Tensor, i: GemmInputs) -> bool:
    """ReLU of x @ w + bias by cuBLASLt; its GELU would give other bits where no gradient is to come."""
    single = out.is_cuda and out.shape[0] == 1 and i.activation == "relu" and not i.save_z
    return single and i.bias is not None and i.c is None and i.alpha == 1


def multiply_into(y: Tensor, i: GemmInputs) -> None:
    """y (B, M, N) = alpha * x @ w + beta * c + bias."""
    x, w = apart(i.x, i.w)
    added, factor = (i.bias, 1.0) if i.c is None else (i.c, i.beta)
    if y.shape[0] == 1:
        y, x, w = y[0], x[0], w[0]
        added = added if i.c is None else i.c[0]
    elif added is not None:
        added = added.expand(y.shape)
    x, w = packed(x, w)
    if added is None and i.alpha == 1:
        torch.matmul(x, w, out=y)
    else:
        # with a factor of 0 what is added is not read
        added, factor = (y, 0.0) if added is None else (added, factor)
        product = torch.addmm if y.dim() == 2 else torch.baddbmm
        product(added, x, w, beta=factor, alpha=i.alpha, out=y)
    if i.c is not None and i.bias is not None:
        y += i.bias


def multiply_rows_into(y: Tensor, i: GemmInputs) -> None:
    """Do as `multiply_into`, and give a row the same bits in any batch."""
    alone = i.alpha == 1 and i.c is None
    if not alone:
        y.copy_(gemm_reference(i._replace(activation="", dtype=y.dtype, save_z=False))[0])
        return
    for out, x, w in zip(y, i.x, i.w, strict=True):
        chosen(out, x, i.bias)(out, x, w, i.bias)


def activate_into(out: Tensor, z: Tensor, activation: str) -> None:
    """`out` may be z."""
    aten = torch.ops.aten
    if activation == "relu":
        aten.relu.out(z, out=out)
    elif activation == "silu":
        aten.silu.out(z, out=out)
    elif activation == "gelu_tanh":
        aten.gelu.out(z, approximate="tanh", out=out)
    elif z.is_cuda:
        aten.gelu.out(z, out=out)
    else:
        out.copy_(FUNCTIONS[activation][0](z))


def activation_gradient(dout: Tensor, saved: Tensor, activation: str) -> Tensor:
    """Return the gradient of the pre-activation; `saved` is the pre-activation, or for relu the result."""
    aten = torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(dout, saved, 0)
    if activation == "silu":
        if torch.is_grad_enabled():  # torch's own has no second derivative
            sig = torch.sigmoid(saved)
            return dout * sig * (1 + saved * (1 - sig))
        return aten.silu_backward(dout, saved)
    return aten.gelu_backward(dout, saved, approximate="tanh" if activation == "gelu_tanh" else "none")


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
WIDEST_STEP = 1024  # the most of K that a tile has
# with batch invariance, where `has_one_order`: instead of a tile that leaves a GPU idle, and for few rows
FEW_TILES = tuning.Config(64, 32, 64, num_warps=4, num_stages=5)
FEW_ROWS = {  # by whether there are columns for many programs, or loads are narrow
    False: tuning.Config(16, 16, 512, num_warps=2, num_stages=3),
    True: tuning.Config(16, 64, 128, num_warps=4, num_stages=4),
}

# kernel


@jit_kernel
def gemm_kernel(
    x_ptr,  # (B, M, K)
    w_ptr,  # (B, K, N)
    bias_ptr,  # (N,) or None
    c_ptr,  # (B, M, N) or None
    z_ptr,  # (B, M, N) contiguous, as is out, or None
    out_ptr,
    partial_sums_ptr,  # (splits, B, M, N) float32, which gets the sums if K is split, or None
    B, M, N, K,
    part,  # of K that a program sums
    alpha, beta,
    x_strides,  # b, m, k
    w_strides,  # b, k, n
    bias_stride,
    c_strides,  # b, m, n
    ACTIVATION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, part, c_strides = in_units((N, K, part, c_strides), UNIT)
    x_strides, w_strides = in_units((x_strides, w_strides), UNIT)
    x_stride_b, x_stride_m, x_stride_k = x_strides
    w_stride_b, w_stride_k, w_stride_n = w_strides
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile, rest = tl.program_id(0) % (tiles_m * tiles_n), tl.program_id(0) // (tiles_m * tiles_n)
    b, split = (rest % B).to(tl.int64), rest // B
    tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M, NUM_DIES)
    m, n = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    first = tl.cast(split * part, tl.int64)
    x_base = x_ptr + b * x_stride_b + first * x_stride_k
    w_base = w_ptr + b * w_stride_b + first * w_stride_k
    m_read, n_read = (m % M).to(tl.int64), (n % N).to(tl.int64)
    x_ptrs = x_base + m_read[:, None] * x_stride_m + k[None, :] * x_stride_k
    w_ptrs = w_base + k[:, None] * w_stride_k + n_read[None, :] * w_stride_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    depth = whole_units(tl.minimum(K - split * part, part), UNIT)
    acc = multiply(acc, x_ptrs, w_ptrs, depth, x_stride_k, w_stride_k, BLOCK_K, EVEN_K, PRECISION)

    mask = (m < M)[:, None] & (n < N)[None, :]
    m, n = m.to(tl.int64)[:, None], n[None, :]
    if partial_sums_ptr is not None:
        tl.store(partial_sums_ptr + (split * B + b) * M * N + (m * N + n), acc, mask=mask)
    else:
        matrix = b * M * N
        c_base = c_ptr if c_ptr is None else c_ptr + b * c_strides[0]
        z_base = z_ptr if z_ptr is None else z_ptr + matrix
        finish(acc, m, n, mask, m * N + n, bias_ptr, c_base, z_base, out_ptr + matrix, alpha, beta,
               N, bias_stride, c_strides[1], c_strides[2], ACTIVATION)  # fmt: skip


# launcher


def new_gemm(i: GemmInputs) -> tuple[Tensor, Tensor]:
    size = check_fields(i)
    B, M, N = size["B"], size["M"], size["N"]
    if i.activation not in ("", *ACTIVATIONS):
        raise ValueError(f"activation must be None, {', '.join(ACTIVATIONS)}, not {i.activation!r}")
    check_floating("bias", i.bias, (N,))
    check_floating("c", i.c, (B, M, N))
    if i.dtype not in (None, *FLOATS):
        raise TypeError(f"out_dtype must be a floating dtype, not {i.dtype}")
    out = i.x.new_empty(B, M, N, dtype=i.dtype)
    return out, i.x.new_empty((B, M, N) if i.save_z else 0, dtype=i.dtype)


@binds
@takes(*TILE_DTYPES)
def bind_gemm(i: GemmInputs, config: tuning.Config | None = None) -> Callable:
    """`config`: a tile in place of the tables'."""
    if takes_row(i.x, i.w, config) and not batch_invariant():
        return bind_one_row(i, config)
    config = None if config is not None and config.block_m == 1 else config  # another product's
    (B, M, K), N = i.x.shape, i.w.shape[2]
    full = i.activation or i.c is not None
    config = config or tile_of("gemm_full" if full else "gemm", i)
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n) * B
    units = 1 if batch_invariant() else num_programs(i.x)  # a sum is split for few rows
    splits, part = splits_of(tiles, K, config.block_k, units)
    alpha, beta, bias_stride, c_strides = epilogue_of(i)
    kernel = bind_kernel(
        gemm_kernel, (tiles * splits,), ACTIVATION=in_triton(i.activation),
        UNIT=unit_of((N, K), i.x.stride(), i.w.stride(), c_strides),
        EVEN_K=K % config.block_k == 0, **tile_options(config),
    )  # fmt: skip
    numbers = B, M, N, K, part, alpha, beta, i.x.stride(), i.w.stride(), bias_stride, c_strides
    return bind_split(i, splits, kernel, numbers)


def tile_of(op: str, i: GemmInputs) -> tuning.Config:
    """Return a tile for these inputs.

    With batch invariance, all tiles give the same bits.  On Hopper, the instructions for 64 rows or more add
    up as those for 16 do.
    """
    (B, M, K), N = i.x.shape, i.w.shape[2]
    if not batch_invariant():
        return tuning.lookup(op, i.x.dtype, B * M, N, K, B)
    config = tuning.lookup(op, i.x.dtype, B * MANY_ROWS, N, K, B)
    tiles = B * cdiv(M, config.block_m) * cdiv(N, config.block_n)
    busy = 2 * tiles > num_programs(i.x)
    if i.x.itemsize != 2 or not tuning.has_one_order():
        return config
    if FEW_ROWS[True].block_m >= M:
        by_k = i.x.stride(2) == 1 == i.w.stride(1)
        wide = by_k and unit_of((K,), i.x.stride(), i.w.stride()) >= 8  # or a long tile spills
        return FEW_ROWS[not wide or B * cdiv(N, FEW_ROWS[True].block_n) >= num_programs(i.x)]
    return config if busy else FEW_TILES


def fits_float32(i: GemmInputs) -> bool:
    """Return whether float32 sums are precise enough, and 32 bits hold a step over K."""
    return i.dtype != torch.float64 and WIDEST_STEP * max(i.x.stride(2), i.w.stride(1)) < 2**31


bind_gemm.fits, bind_gemm.should_use = fits_float32, should_use_gemm("triton")
bind_gemm.tiles = ("gemm", "gemm_row")

# op


def save_gemm(ctx, i: GemmInputs, output):
    out, z = output
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    # a second derivative needs them again
    bias_and_c = (i.bias, i.c) if i.activation else (None, None)
    ctx.save_for_backward(i.x, i.w, *bias_and_c, out if i.activation == "relu" else z)
    ctx.rest = i.activation, i.alpha, i.beta, *(None if t is None else t.dtype for t in (i.bias, i.c))


def backward_gemm(ctx, dout, _):
    return gradients_by(gemm_op, ctx, dout)


def backward_inner_gemm(ctx, dout, _):
    return gradients_by(inner_gemm_op, ctx, dout)


def gradients_by(product: Callable, ctx, dout):
    """Return the gradients of a product, whose own products are of the op `product`."""
    x, w, bias, c, saved = ctx.saved_tensors
    activation, alpha, beta, bias_dtype, c_dtype = ctx.rest
    needs = GemmInputs(*ctx.needs_input_grad)
    dx = dw = dbias = dc = None
    if dout is not None:
        dz = dout
        if activation:
            if torch.is_grad_enabled() and activation != "relu":  # z has no gradient of its own
                saved, _ = product(x, w, bias, c, "", alpha, beta, dout.dtype, False)
            dz = each_number(partial(activation_gradient, activation=activation), dout, saved)
        dc = (beta * dz).to(c_dtype) if needs.c else None
        dbias = dz.sum((0, 1), dtype=sum_dtype(dz)).to(bias_dtype) if needs.bias else None
        dz = dz.to(x.dtype)
        dx = product(dz, w.mT, None, None, "", alpha, 0.0, None, False)[0] if needs.x else None
        with summing_tokens():
            dw = product(x.mT, dz, None, None, "", alpha, 0.0, None, False)[0] if needs.w else None
    return gradients(GemmInputs, x=dx, w=dw, bias=dbias, c=dc)


gemm_op = define_op(
    "gemm", GemmInputs, outputs=2, new=new_gemm, reference=gemm_reference, torch=fill_gemm, triton=bind_gemm,
    hopper=hopper.bind_gemm, backward=backward_gemm, save=save_gemm,
)  # fmt: skip


@binds
def bind_inner_gemm(i: GemmInputs) -> Callable:
    """Bind Triton's kernel, or what torch does for float64, which that does not take."""
    return bind_gemm(i) if runs(bind_gemm, i) else fill_gemm


bind_inner_gemm.should_use = bind_gemm.should_use


# the same inside other ops and in place of F.linear: each forced tier has it, Hopper's by Triton's kernel
inner_gemm_op = define_op(
    "inner_gemm", GemmInputs, outputs=2, new=new_gemm, host=fill_gemm, torch=fill_gemm,
    triton=bind_inner_gemm, backward=backward_inner_gemm, save=save_gemm,
)  # fmt: skip


def product_inside(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x @ w of matrices inside another op."""
    return inner_gemm_op(x[None], w[None], None, None, "", 1.0, 0.0, dtype, False)[0][0]


def multiply_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Do as F.linear by a product here: (..., K) -> (..., N), of this dtype."""
    x, w, bias = cast_as_linear(input, weight.mT, bias)
    x3, w3, shape = as_batches(x, w)
    return inner_gemm_op(x3, w3, bias, None, "", 1.0, 0.0, dtype, False)[0].view(shape)


# public


def gemm(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, activation: str | None = None, alpha: float = 1.0,
    beta: float = 0.0, c: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Multiply matrices and apply an epilogue: `act(alpha * x @ w + beta * c + bias)`, (..., M, N).

    x: (..., M, K), or (K,) if w is (K, N).
    w: (K, N), or (..., K, N) for batches; leading axes broadcast as in torch.matmul.  Any strides: the weight
        (N, K) of an nn.Linear is `weight.mT`.
    bias, c: (N,), and a shape that broadcasts to the result, (..., M, N); any floating dtype.  If beta is 0,
        c is not read, even if it holds NaN, and gets no gradient.
    activation: None, "relu", "gelu" (by the error function), "gelu_tanh" or "silu".
    out_dtype: dtype of the result [that of `x`].

    Under torch.autocast, operands are cast to its dtype.
    Sums and epilogue are float32, or float64 if the result is, and rounded once.  Exception: on a CPU, and
    where the GPU's table prefers torch's BLAS, the input of the activation is rounded too.  float32 is
    multiplied in IEEE precision unless MOE_AITER_MATMUL_PRECISION is tf32.

    Differentiable in x, w, bias and c.  For backward, "relu" saves the result and other activations save
    their input, in `out_dtype`, as torch does.  Without gradients nothing is saved.

    Raises ValueError for shapes, devices, an unknown activation, and a beta without c; TypeError for dtypes.
    Source: torch.addmm; the epilogues are those of AITER's `gemm_a16w16`.
    """
    for name, t in (("x", x), ("w", w)):
        check_tensor(name, t)
    if bias is not None:
        check_tensor("bias", bias)
    for name, number in (("alpha", alpha), ("beta", beta)):
        if type(number) is not float:
            check_real(name, number)
    if c is not None:
        check_tensor("c", c)
    x, w, bias, c = cast_as_linear(x, w, bias, c)
    if c is None and beta != 0:
        raise ValueError(f"beta is {beta} but c is None")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None, {', '.join(ACTIVATIONS)}, not {activation!r}")
    x3, w3, shape = as_batches(x, w)
    c = None if beta == 0 else broadcast(c, shape, (x3.shape[0], x3.shape[1], w3.shape[2]))
    save_z = needs_grad(x, w, bias, c) and activation not in (None, "relu")
    inputs = activation or "", float(alpha), float(beta), out_dtype, save_z
    return gemm_op(x3, w3, bias, c, *inputs)[0].view(shape)


def as_batches(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Sequence[int]]:
    """x (B, M, K), w (B, K, N) and the shape of the result; one w for all is one matrix of all rows."""
    if w.dim() < 2 or x.dim() < 1 or (x.dim() == 1 and w.dim() > 2):
        raise ValueError(f"x must be (..., M, K) and w (..., K, N), but they are {shapes(x, w)}")
    *lead, K, N = w.shape
    check_size("x is (..., K={})", x.shape[-1], "w is (..., K={}, N)", K)
    try:
        batch = torch.broadcast_shapes(x.shape[:-2], tuple(lead)) if lead else x.shape[:-2]
    except RuntimeError as mistake:
        raise ValueError(f"the leading axes of x and w do not fit: {shapes(x, w)}") from mistake
    if all(size == 1 for size in lead):
        rows = math.prod(x.shape[:-1])
        return x.reshape(1, rows, K), w.reshape(1, K, N), (*batch, *x.shape[-2:-1], N)
    M, B = x.shape[-2], math.prod(batch)
    x3, w3 = x.expand(*batch, M, K).reshape(B, M, K), w.expand(*batch, K, N).reshape(B, K, N)
    return x3, w3, (*batch, M, N)


def broadcast(c: Tensor, shape: Sequence[int], flat: Sequence[int]) -> Tensor:
    check_tensor("c", c)
    try:
        return c.expand(shape).reshape(flat)
    except RuntimeError as mistake:
        raise ValueError(f"c is {tuple(c.shape)} but the result is {tuple(shape)}") from mistake


def shapes(x: Tensor, w: Tensor) -> str:
    return f"{tuple(x.shape)} and {tuple(w.shape)}"
