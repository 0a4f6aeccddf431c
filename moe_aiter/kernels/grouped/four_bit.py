"""Grouped matmul with weights of 4 bits: `out[s:e] = x[s:e] @ w[g].T + bias[g]`, or `x[s:e] @ w[g]`.

`FourBit` (../quantize/four_bit.py) says how w (G, rows, columns) is stored.  A product with w.T is that of
nn.Linear; the other is its gradient of x.  One kernel expands the scales of all blocks to float32, for the
time of the product; the other loads packed bytes, makes a tile of w in the dtype of x, and multiplies.
So w exists in 16 bits only as tiles, and on a CPU as one group at a time.

    out = x @ round(value(code) * scale).T        the product of x and the dequantised weight
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

from torch import Tensor

from ... import tuning
from ...op import binds, define_op, takes
from .. import hopper
from ..base.check import (
    Index,
    Operand,
    check_fields,
    check_plan_values,
    check_rows,
    check_size,
    group_ends,
    take_rows,
    wide,
)
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES, dense, in_units, locate, row_tiles, swizzle, tile_options, unit_of
from ..quantize.four_bit import FORMATS, bind_expand_scales, check_four_bit, dequantized, expanded_scales
from .tgmm import matmul_into


class FourBitInputs(NamedTuple):
    """The inputs of the op `four_bit_gmm`: the product of each group's rows and its weight of 4 bits."""

    x: Annotated[Operand, "M, K"]  # or (T, K) with an order
    packed: Tensor  # (G, rows, columns / 2) uint8
    scales: Tensor  # (G, rows, blocks)
    nested: Tensor | None
    offset: Tensor | None
    table: Tensor | None
    format: str
    transpose: bool  # x @ w[g].T
    group_sizes: Annotated[Index, "G"]
    bias: Annotated[Tensor, "G, N"] | None
    order: Index | None  # (M,): row r of the product takes x[order[r] // top_k]
    top_k: int

    @property
    def rows(self) -> int:
        """Return M, the rows of the product."""
        return self.x.shape[0] if self.order is None else self.order.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return N and K, the columns of the product and the length of its sums."""
        _, rows, half = self.packed.shape
        return (rows, 2 * half) if self.transpose else (2 * half, rows)


# reference


def fill_four_bit_gmm(out: Tensor, i: FourBitInputs) -> None:
    """Compute by torch, one group's weight at a time."""
    x, wide_sum = take_rows(i.x, i.order, i.top_k), i.bias is not None
    scale, zero = expanded_scales(i.packed, i.scales, i.nested, i.offset, i.table, i.format)
    ends = group_ends(i.group_sizes, len(x))
    *outs, rest = out.tensor_split(ends)
    for g, (o, rows) in enumerate(zip(outs, x.tensor_split(ends), strict=False)):
        if len(rows):
            zeros = None if zero is None else zero[g]
            w = dequantized(i.packed[g], scale[g], zeros, i.table, i.format).to(x.dtype)
            y = rows.new_empty(o.shape)
            matmul_into(y, rows, w.T if i.transpose else w)
            o.copy_(wide(y) + i.bias[g] if wide_sum else y)
    rest.zero_()


# kernels


@triton.jit
def weight_tile(
    bytes,  # (ROWS, COLUMNS / 2) uint8
    scale,  # (ROWS, COLUMNS / WIDTH) float32
    shift,  # the same, or None
    values,  # (16,) float32 of NF4, or None
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(ROWS, COLUMNS) of the weight in DTYPE."""
    ROWS: tl.constexpr = bytes.shape[0]
    COLUMNS: tl.constexpr = 2 * bytes.shape[1]
    PARTS: tl.constexpr = scale.shape[1]
    code = bytes.to(tl.int32)
    code = tl.join(code >> 4, code & 15) if FORMAT == "nf4" else tl.join(code & 15, code >> 4)
    if FORMAT == "nf4":  # not by loads, whose results Triton would copy to shared memory first
        w = tl.gather(values, tl.reshape(code, (ROWS * COLUMNS,)), 0)
    elif FORMAT == "mxfp4":  # exponent and mantissa where those of a float32 end and begin, times 2 ** 126
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        w = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:  # the last bits of 2 ** 23: a conversion takes several times as long
        w = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    w = tl.reshape(w, (ROWS, PARTS, COLUMNS // PARTS)) * scale[:, :, None]
    if shift is not None:
        w += shift[:, :, None]
    return tl.reshape(w, (ROWS, COLUMNS)).to(DTYPE)


@jit_kernel
def four_bit_gmm_kernel(
    x_ptr,  # (M, K), or (T, K)
    w_ptr,  # (G, rows, columns / 2) uint8, contiguous
    scale_ptr,  # (G, blocks, rows) float32
    shift_ptr,  # (G, blocks, rows) float32, or None
    table_ptr,  # (16,) float32, or None
    bias_ptr,  # (G, N) or None
    out_ptr,  # (M, N), contiguous
    order_ptr,  # (M,) or None
    group_sizes_ptr,  # (G,)
    M, N, K, G,
    half,  # bytes of a row of w
    top_k, tiles_m,
    x_strides,  # m, k
    bias_strides,  # g, n
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,  # of a block
    TRANSPOSE: tl.constexpr, UNIT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N, K, x_strides = in_units((N, K, x_strides), UNIT)
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M, NUM_DIES)
    group, row, row_end = locate(tile_m, group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
    if row >= row_end:
        return
    # a tile of w stays in its rows and walks along the columns, or the other way round
    ROWS: tl.constexpr = BLOCK_N if TRANSPOSE else BLOCK_K
    COLUMNS: tl.constexpr = BLOCK_K if TRANSPOSE else BLOCK_N
    PARTS: tl.constexpr = COLUMNS // WIDTH if COLUMNS > WIDTH else 1
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns past the end read others' values, which are never stored: cheaper than a mask
    m_read = tl.where(m < row_end, m, row).to(tl.int64)
    if order_ptr is not None:
        m_read = tl.maximum(tl.load(order_ptr + m_read), 0).to(tl.int64) // top_k
    rows, blocks = N if TRANSPOSE else K, 2 * half // WIDTH
    expert = tl.minimum(group, G - 1).to(tl.int64)
    w_base, first_scale = w_ptr + expert * rows * half, expert * rows * blocks
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + group.to(tl.int64) * bias_strides[0] + n * bias_strides[1]
        acc += tl.load(bias_ptrs, mask=(n < N) & (group < G), other=0.0).to(tl.float32)[None, :]
    values = tl.load(table_ptr + tl.arange(0, 16)) if FORMAT == "nf4" else None
    x_ptrs = x_ptr + m_read[:, None] * x_strides[0] + k[None, :] * x_strides[1]
    for k_start in range(0, tl.where(group < G, K, 0), BLOCK_K):
        first_row = tile_n * BLOCK_N if TRANSPOSE else k_start
        first_column = k_start if TRANSPOSE else tile_n * BLOCK_N
        r = first_row + tl.arange(0, ROWS)
        byte = first_column // 2 + tl.arange(0, COLUMNS // 2)
        block = first_column // WIDTH + tl.arange(0, PARTS)
        if TRANSPOSE or not EVEN_K:
            r = r % rows
        if not (TRANSPOSE and EVEN_K):
            byte, block = byte % half, block % blocks
        bytes = tl.load(w_base + r[:, None] * half + byte[None, :])
        at = block[None, :] * rows + r[:, None]
        scale, shift = tl.load(scale_ptr + first_scale + at), None
        if shift_ptr is not None:
            shift = tl.load(shift_ptr + first_scale + at)
        # w repeats itself past its end, where x is 0
        x = tl.load(x_ptrs) if EVEN_K else tl.load(x_ptrs, mask=(k < K - k_start)[None, :], other=0.0)
        w = weight_tile(bytes, scale, shift, values, FORMAT, x_ptr.dtype.element_ty)
        acc = tl.dot(x, tl.trans(w) if TRANSPOSE else w, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K * x_strides[1]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < row_end)[:, None] & (n < N)[None, :])


# launcher


def new_four_bit_gmm(i: FourBitInputs) -> Tensor:
    check_fields(i)
    check_four_bit(i.packed, i.scales, i.nested, i.offset, i.table, i.format)
    N, K = i.sizes
    G = i.packed.shape[0]
    check_size("x is (M, K={})", i.x.shape[1], "the weight needs (M, K={})", K)
    check_rows("x", i.x, "K", i.order, i.top_k, i.rows)
    check_size("group_sizes is ({},)", i.group_sizes.shape[0], "packed is (G={}, rows, columns / 2)", G)
    if i.bias is not None:
        check_size("bias is (G, N={})", i.bias.shape[1], "the weight needs (G, N={})", N)
    return i.x.new_empty(i.rows, N)


@binds
@takes(*TILE_DTYPES)
def bind_four_bit_gmm(i: FourBitInputs) -> Callable:
    (N, K), M, G = i.sizes, i.rows, i.packed.shape[0]
    config = tuning.lookup("four_bit", i.x.dtype, M, N, K, G)
    tiles_m = row_tiles(M, G, config.block_m)
    kernel = bind_kernel(
        four_bit_gmm_kernel, (tiles_m * cdiv(N, config.block_n),),
        FORMAT=i.format, WIDTH=FORMATS[i.format].block, TRANSPOSE=i.transpose,
        UNIT=unit_of((N, K), i.x.stride()), BLOCK_G=next_power_of_2(G + 1),
        EVEN_K=K % config.block_k == 0, **tile_options(config),
    )  # fmt: skip
    expand = bind_expand_scales(i)
    strides = i.x.stride(), (0, 0) if i.bias is None else i.bias.stride()
    numbers = M, N, K, G, i.packed.shape[2], i.top_k, tiles_m, *strides

    def launch(out, i):
        scale, shift = expand(i)
        packed, order, group_sizes = dense(i.packed, i.order, i.group_sizes)
        kernel(i.x, packed, scale, shift, i.table, i.bias, out, order, group_sizes, *numbers)

    return launch


# op

four_bit_gmm_op = define_op(
    "four_bit_gmm", FourBitInputs, new=new_four_bit_gmm,
    check_values=lambda i: check_plan_values(i.rows, i.group_sizes, i.order), torch=fill_four_bit_gmm,
    triton=bind_four_bit_gmm, hopper=hopper.bind_four_bit_gmm,
)  # fmt: skip
