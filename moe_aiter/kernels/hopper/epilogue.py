"""Epilogues on Hopper: activations with their slopes, and sums and scales of 8-bit products.

The activations are those of ../base/activations.py.  The tensor core sums 8-bit floats with some 14 bits
only, so float32 takes over its sums every few stages (`span_of`).
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...tuning import Config
from ..base import activations
from ..base.activations import ALPHA, GATE_MAX
from ..base.fp8 import MOST_IMPRECISE, ROW_BLOCK
from ..base.launch import cdiv, tl, triton
from .gluon import Number, aggregate, gl, gluon, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from .pipeline import blocks, multiply

# activations


@gluon.jit
def sigmoid(x):
    """Use the chip's approximations, exact to 2 ulp: exp and a division would take half of an epilogue."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def silu(x):
    """x * sigmoid(x), and its slope."""
    sig = sigmoid(x)
    value = x * sig
    return value, sig + value - value * sig


@gluon.jit
def gauss_and_reciprocal(x, u):
    """exp(-x^2 / 2) and 1 / u by the chip's own approximations, good to 2 ulp."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t, r; rcp.approx.ftz.f32 r, $3; mul.f32 t, $2, $2; mul.f32 t, t, 0fBF38AA3B; "
        "ex2.approx.ftz.f32 $0, t; mov.f32 $1, r; }",
        "=f,=f,f,f",
        [x, u],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def gelu(x):
    """x * Phi(x) with the normal distribution Phi, to 2e-7, and its slope.

    One exponential serves Phi and its density.  Formula 7.1.26 of Abramowitz and Stegun.
    """
    gauss, t = gauss_and_reciprocal(x, 1 + 0.3275911 * 0.7071067811865476 * gl.abs(x))
    p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * p * gauss  # Phi(-|x|)
    phi = gl.where(x < 0, tail, 1 - tail)
    return x * phi, phi + x * gauss * 0.3989422804014327


@gluon.jit
def gelu_tanh(x):
    """x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3), and its slope."""
    sig = sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
    return x * sig, sig + x * sig * (1 - sig) * 1.5957691216057308 * (1 + 0.134145 * x * x)


@gluon.jit
def silu_limit(x):
    """x * sigmoid(alpha * x), from x = gate_max on a constant, and its slope.  NaN stays NaN."""
    y = gl.minimum(x, GATE_MAX, propagate_nan=tl.PropagateNan.ALL)
    sig = sigmoid(y * ALPHA)
    value = y * sig
    return value, gl.where(x > GATE_MAX, 0.0, sig + (value - value * sig) * ALPHA)


def functions_for(jit: Callable) -> dict[str, Callable]:
    """Return the functions of activations for kernels of `jit`, Gluon's or, with the same bits, Triton's."""
    language = {} if jit is gluon.jit else {"gl": tl}

    def new(function: Callable, **names: Callable) -> Callable:
        return activations.with_globals(function, jit, **language, **names)

    logistic = new(sigmoid)
    capped = new(activations.capped, tanh=new(activations.tanh, sigmoid=logistic))
    return {
        "silu": new(silu, sigmoid=logistic),
        "gelu": new(gelu, gauss_and_reciprocal=new(gauss_and_reciprocal)),
        "gelu_tanh": new(gelu_tanh, sigmoid=logistic),
        "silu_limit": new(silu_limit, sigmoid=logistic),
        "silu_softcap": new(activations.silu_softcap, capped=capped, sigmoid=logistic),
        "up_softcap": new(activations.up_softcap, capped=capped),
        **{name: new(getattr(activations, name)) for name in ("relu", "relu2", "identity", "up_limit")},
    }


FUNCTIONS = functions_for(gluon.jit)


@functools.cache
def kernel_functions(act: activations.Activation) -> dict[str, Callable | None]:
    """f and h by the names that kernels give them; h is None for a plain activation."""
    return act.kernel_functions(FUNCTIONS, gluon.jit)


@functools.cache
def triton_functions(act: activations.Activation) -> dict[str, Callable | None]:
    """Return the same in Triton, for a portable kernel that `stands_in` for one here."""
    return act.kernel_functions(functions_for(triton.jit), triton.jit)


# products of 8 bits: sums and scales


SCALED = gl.constexpr(ROW_BLOCK)  # rows and columns of a block that has a scale
ENOUGH_FOR_BFLOAT16 = 256  # products summed with some 14 bits: a quarter of that dtype's own rounding


def span_of(x: Tensor, c: Config, dtype: torch.dtype, blocks: bool = False) -> int:
    """Return how many stages the tensor core sums before float32 adds, for this dtype: 0, all of them,
    unless x is 8-bit floats.  If scales are of `blocks`, as many as a block has."""
    if x.itemsize > 1 or x.dtype == torch.int8:
        return 0
    most = ENOUGH_FOR_BFLOAT16 if dtype == torch.bfloat16 and not blocks else MOST_IMPRECISE.value
    span = most // c.block_k
    # or the last sum would wait for a stage that never comes
    return 1 if cdiv(x.shape[-1], c.block_k) % span else span


def narrowed(c: Config) -> Config:
    """A tile for scales of blocks: beside sums of more columns, registers hold no scales."""
    if c.block_n <= ROW_BLOCK:
        return c
    return dataclasses.replace(c, block_n=ROW_BLOCK, num_stages=c.num_stages * 3 // 2)


@aggregate
class Scales:
    """The float32 scales of the rows of x and of the weights; None is 1.

    Of BLOCKS, both have a scale for each block of the summed axis, and blocks of the weights also have SCALED
    rows (../quantize/scale_blocks.py): these multiply each sum over a block.
    """

    x_ptr: object  # (G, M), or of BLOCKS (M, across)
    x_group: Number  # strides
    x_row: Number
    w_ptr: object  # (G, N), or of BLOCKS (G, rows, across)
    w_group: Number
    w_row: Number  # 2: the weights are gate and up rows in turn
    M: Number  # rows from one group to the next, where groups lie apart
    BLOCKS: gl.constexpr

    @gluon.jit
    def apply(self, acc, group, row, end, column, limit, offset=0):
        """acc in float32, which begins at a row and a column of a group, multiplied, by zeros past row `end`
        and past column `limit`.  The scales of the columns begin `offset` numbers into those of the group."""
        acc = acc.to(gl.float32)
        if self.x_ptr is not None and not self.BLOCKS:
            m = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
            ptrs = self.x_ptr + group.to(gl.int64) * self.x_group + m * self.x_row
            acc *= gl.load(ptrs, mask=m < end, other=0.0)[:, None]
        if self.w_ptr is not None and not self.BLOCKS:
            n = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
            ptrs = self.w_ptr + group.to(gl.int64) * self.w_group + offset + n * self.w_row
            acc *= gl.load(ptrs, mask=n < limit, other=0.0)[None, :]
        return acc

    @gluon.jit
    def of_blocks(self, k, place, weights, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
        """Return the scales of a tile's sum over the block that begins at k; 0 for rows past the group."""
        gl.static_assert(weights.BLOCK_N <= SCALED)
        group, row, end, tile_n = place
        across, k = gl.cdiv(weights.K, SCALED), k // SCALED
        m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        of_rows = gl.load(self.x_ptr + m * across + k, mask=m < end, other=0.0)[:, None]
        w_ptr = self.w_ptr + group.to(gl.int64) * self.w_group + k
        if weights.LAYOUT == "gate_up_rows":  # each half of the columns has one scale
            CHANNELS: gl.constexpr = weights.BLOCK_N // 2
            gate = tile_n * CHANNELS * self.w_row
            up = gate + weights.N * (2 - self.w_row)
            n = gl.arange(0, weights.BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            of_gate = of_rows * gl.load(w_ptr + gate // SCALED * across)
            out = gl.where(n < CHANNELS, of_gate, of_rows * gl.load(w_ptr + up // SCALED * across))
        else:
            out = of_rows * gl.load(w_ptr + tile_n * weights.BLOCK_N // SCALED * across)
        return out


@gluon.jit
def group_scales(rows, K, BLOCKS: gl.constexpr):
    """Return the number of scales of a group's weights."""
    out = rows
    if BLOCKS:
        out = gl.cdiv(rows, SCALED) * gl.cdiv(K, SCALED)
    return out


@gluon.jit
def multiply_blocks(
    CONSUMER: gl.constexpr, weights, ring, i, depth, scales, place,
    BLOCK_M: gl.constexpr, COUNT: gl.constexpr, SPAN: gl.constexpr, WIDEST: gl.constexpr = 256,
):  # fmt: skip
    """This consumer's half of a tile as COUNT blocks of columns, promoted where there is a SPAN.

    `place`: the tile's group, this consumer's first row, the group's end row, and the column tile.
    """
    if SPAN > 0:
        accs, i = multiply_promoted(CONSUMER, weights, ring, i, depth, scales, place, BLOCK_M, SPAN)
        gl.static_assert(len(accs) == COUNT)
    else:
        acc, i = multiply(CONSUMER, weights, ring, i, depth, BLOCK_M, WIDEST)
        accs = blocks(acc, COUNT)
    return accs, i


@gluon.jit
def multiply_promoted(
    CONSUMER: gl.constexpr, weights, ring, i, depth, scales, place,
    BLOCK_M: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """`multiply` of 8-bit floats, as a tuple of tensors of at most 128 columns.

    The tensor core keeps some 14 bits of a sum, so it adds SPAN stages at a time, of which `depth` holds a
    whole number, and float32 adds the rest, while the tensor core works for the other consumer.  Where scales
    are of blocks, float32 multiplies each of these sums by its scales.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    WIDTH: gl.constexpr = min(weights.BLOCK_N, 128)  # registers hold one such sum of the tensor core's
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zeros = gl.zeros((HALF, WIDTH), gl.float32, layout=layout)
    left, right = zeros, zeros
    for k in range(0, depth, SPAN * weights.BLOCK_K):
        acc = warpgroup_mma_init(zeros)
        if scales.BLOCKS:
            of_blocks = scales.of_blocks(k, place, weights, HALF, layout)
        for s in gl.static_range(SPAN):
            ring.wait_ready(i + s)
            acc = add_stage(acc, weights, ring, i + s, CONSUMER * HALF, 0, s > 0)
        if weights.BLOCK_N > WIDTH:
            left += warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            acc = warpgroup_mma_init(zeros)
            for s in gl.static_range(SPAN):
                acc = add_stage(acc, weights, ring, i + s, CONSUMER * HALF, WIDTH, s > 0)
        for s in gl.static_range(SPAN - 1):
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=SPAN - 1 - s, deps=(acc,)))
            ring.release(i + s)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        ring.release(i + SPAN - 1)
        if weights.BLOCK_N > WIDTH:
            right += part
        else:
            left += part * of_blocks if scales.BLOCKS else part
        i += SPAN
    out = (left, right) if weights.BLOCK_N > WIDTH else (left,)
    return out, i


@gluon.jit
def add_stage(
    acc, weights, ring, i,
    ROW: gl.constexpr, COLUMN: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Start the product of some rows of a and some of b in stage i: added to acc, or in its place."""
    ROWS: gl.constexpr = acc.type.tensor_type.shape[0]
    COLUMNS: gl.constexpr = acc.type.tensor_type.shape[1]
    a = ring.a.index(i % ring.STAGES).slice(ROW, ROWS, 0)
    b = ring.b.index(i % ring.STAGES).slice(COLUMN, COLUMNS, 0).permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=SUMMED, is_async=True)
