"""Grouped matmul: `out[s:e] = lhs[s:e] @ rhs[g] + bias[g]` for each group g, whose rows are [s, e).

M rows, G groups, K in, N out.  Shapes say the maths; strides say the layout.  `w.mT` is a valid `rhs`.

`gmm_unpermute` also returns the rows to token order and adds up those of each token.  It is the second
product of the experts forward, and the gradient of x backward:

    out[t] = sum over j of s[t, j] * rows[rank[t, j]],   rows[s:e] = x[s:e] @ w[g] + bias[g]

The rows (R, N) exist only between the product and the sum, one slice of their columns at a time.

With operands of 8 bits `gmm` is `scaled_gmm` of ./scaled_gemm.py, or with scales of blocks `gmm_fp8`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import (
    IMPLS,
    ROCM,
    Written,
    binds,
    bound,
    define_inplace_op,
    define_op,
    extended,
    fill,
    gradients,
    pick,
    runs,
    takes,
)
from ...tuning.aiter_json import tile_of
from ...tuning.candidates import Config
from .. import hopper
from ..base.check import (
    OCP,
    Float,
    Index,
    Operand,
    cast_as_linear,
    check_device,
    check_existing,
    check_fields,
    check_flags,
    check_floating,
    check_own_memory,
    check_plan_values,
    check_row_values,
    check_shape,
    check_size,
    fourth_argument,
    oriented,
    refuse_gradient,
    renamed,
    result_dtype,
    split_groups,
    take_rows,
    wide,
)
from ..base.fixed_rows import multiply_rows
from ..base.fp8 import check_8_bit_options, check_two_scales, has_8_bits
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl
from ..base.lent import all_weights, matrix_of, own_part, unit_with
from ..base.sources import leaving
from ..base.tile import (
    PERSISTENT,
    TILE_DTYPES,
    boxes_of,
    choose_tile,
    column_slices,
    find_group,
    first_column,
    in_units,
    is_transposed,
    list_groups,
    load_box,
    operand,
    row_tiles,
    swizzle,
    tile_options,
    unit_of,
    walk,
    with_boxes,
)
from ..quantize.layouts import transpose_rows8
from ..quantize.scale_blocks import dequantize
from ..rows.permute import (
    ELSEWHERE,
    UnpermuteInputs,
    bind_unpermute_columns,
    new_routed,
    unpermute_reference,
    weights_of,
)
from ..rows.sums import group_sum
from .scaled_gemm import RESULTS, ScaledGroupsInputs, scaled_gmm_op, shape_of_scaled_gmm
from .tgmm import fill_gmm, weight_and_bias_gradient, weight_gradient

# gmm: inputs


class GroupedInputs(NamedTuple):
    """The inputs of the op `gmm`: out[s:e] = lhs[s:e] @ rhs[g] + bias[g] for each group g of rows [s, e)."""

    lhs: Annotated[Operand, "M, K"]
    rhs: Annotated[Operand, "G, K, N"]
    group_sizes: Annotated[Index, "groups"]
    bias: Tensor | None  # (G, N)
    dtype: torch.dtype | None = None  # of the result; None: that of lhs
    tile: tuple[int, ...] = ()  # the numbers of a tile, in place of the tables'
    programs: int = 0  # as for `walk`


class GroupedIntoInputs(NamedTuple):
    """The inputs of the op `gmm_into`: `gmm` with its result in a tensor that is there."""

    existing_out: Written  # (M, N)
    lhs: Annotated[Operand, "M, K"]
    rhs: Annotated[Operand, "G, K, N"]
    group_sizes: Annotated[Index, "groups"]
    bias: Tensor | None  # (G, N)
    tile: tuple[int, ...] = ()
    programs: int = 0
    starts: Tensor | None = None  # (G,): where groups begin, in ascending order; None: where one ends
    guests: Tensor | None = None  # (guests, K, N): the matrices of further groups, see base/lent.py


# gmm: reference


def gmm_reference(i: GroupedInputs) -> Tensor:
    dtype = i.dtype or i.lhs.dtype
    product = torch.promote_types(i.lhs.dtype, dtype)  # rounded once, to what is asked for
    *rows, rest = split_groups(i.lhs, i.group_sizes)
    out = [multiply_rows(r.to(product), i.rhs[g].to(product)) for g, r in enumerate(rows)]
    if i.bias is not None:
        out = [(wide(o) + i.bias[g]).to(dtype) for g, o in enumerate(out)]
    return torch.cat([*(o.to(dtype) for o in out), rest.new_zeros(len(rest), i.rhs.shape[2], dtype=dtype)])


def fill_gmm_into(i: GroupedIntoInputs) -> None:
    i = i._replace(rhs=all_weights(i.rhs, i.guests), guests=None)
    if i.starts is None:
        return fill_gmm(i.existing_out, i, zero_rest=False)
    for g, (start, size) in enumerate(torch.stack([i.starts, i.group_sizes], 1).tolist()):
        rows, group = slice(start, start + size), slice(g, g + 1)
        bias = None if i.bias is None else i.bias[group]
        mine = GroupedInputs(i.lhs[rows], i.rhs[group], i.group_sizes[group], bias)
        fill_gmm(i.existing_out[rows], mine, zero_rest=False)


# gmm: kernel


@jit_kernel
def gmm_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (own, K, N), or its descriptor where there are BOXES
    guests_ptr,  # (G - own, K, N) or None: see `matrix_of`
    bias_ptr,  # (G, N) or None
    out_ptr,  # (M, N)
    group_sizes_ptr,  # (G,)
    starts_ptr,  # (G,) or None: see `list_groups`
    counts,  # M, G, and own of the G
    N, K,
    x_strides,  # m, k
    w_strides,  # g, k, n, and g of the guests'
    bias_strides,  # g, n
    out_strides,  # m, n
    ZERO_REST: tl.constexpr, PERSISTENT: tl.constexpr, ONE_LOOP: tl.constexpr, BOXES: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS_LAST: tl.constexpr,  # as Hopper's kernel adds it
):  # fmt: skip
    N, K, x_strides, w_strides, out_strides = in_units((N, K, x_strides, w_strides, out_strides), UNIT)
    M, G, own = counts
    x_stride_m, x_stride_k = x_strides
    w_stride_g, w_stride_k, w_stride_n, guests_stride = w_strides
    tiles_n = tl.cdiv(N, BLOCK_N)
    ends, tiles = list_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, starts_ptr)
    tiles_m = tl.max(tiles, 0)
    r, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if ZERO_REST:  # without it, rows past the last group stay
        end = tl.max(ends, 0).to(tl.int64)
        for tile in range(tl.program_id(0), tl.cdiv(M - end, BLOCK_M) * tiles_n, tl.num_programs(0)):
            m = (end + tile // tiles_n * BLOCK_M + r)[:, None]
            column = (tile % tiles_n * BLOCK_N + n)[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty)
            out_ptrs = out_ptr + m * out_strides[0] + column.to(tl.int64) * out_strides[1]
            tl.store(out_ptrs, zeros, mask=(m < M) & (column < N))
    x_offsets = r.to(tl.int64)[:, None] * x_stride_m + k.to(tl.int64)[None, :] * x_stride_k
    w_offsets = (n % N).to(tl.int64)[None, :] * w_stride_n + k.to(tl.int64)[:, None] * w_stride_k
    first_tile, total = tl.program_id(0), tiles_m * tiles_n
    if not PERSISTENT:
        if first_tile >= total:
            return
        total = first_tile + 1
    for tile in tl.range(first_tile, total, tl.num_programs(0) if PERSISTENT else 1, flatten=ONE_LOOP):
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M, NUM_DIES)
        group, row, row_end = find_group(tile_m, ends, tiles, M, G, BLOCK_M, starts_ptr)
        first = first_column(tile_n, N, BLOCK_N, UNIT)
        height = tl.minimum(row_end - row, BLOCK_M).to(tl.int32)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + group.to(tl.int64) * bias_strides[0] + (first + n) * bias_strides[1]
            bias = tl.load(bias_ptrs, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if not BIAS_LAST:  # the epilogue of a large tile has no registers to spare
                acc += bias
        x_base = x_ptr + row * x_stride_m
        if BOXES is None:
            w_base = matrix_of(w_ptr, guests_ptr, group, own, w_stride_g, guests_stride, UNIT)
            w_base += first.to(tl.int64) * w_stride_n
        # steps change no pointers, so that the compiler can make one loop of both
        acc = acc.T if TRANSPOSED else acc
        for step in range(0, tl.cdiv(K, BLOCK_K)):
            depth = tl.zeros((), tl.int64) + step * BLOCK_K
            x_ptrs, k_mask = x_base + depth * x_stride_k + x_offsets, k < K - step * BLOCK_K
            if EVEN_K:
                x = tl.load(x_ptrs, mask=(r < height)[:, None], other=0.0)
            else:
                x = tl.load(x_ptrs, mask=(r < height)[:, None] & k_mask[None, :], other=0.0)
            if BOXES is not None:
                w = load_box(w_ptr, group.to(tl.int32), first, step * BLOCK_K, BLOCK_N, BLOCK_K, BOXES)
            else:
                w_ptrs = w_base + depth * w_stride_k + w_offsets
                w = tl.load(w_ptrs) if EVEN_K else tl.load(w_ptrs, mask=k_mask[:, None], other=0.0)
            left, right = (operand(w).T, operand(x).T) if TRANSPOSED else (operand(x), operand(w))
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        acc = acc.T if TRANSPOSED else acc
        if bias_ptr is not None and BIAS_LAST:
            acc += bias
        column = (first + n)[None, :]
        out_ptrs = out_ptr + (row + r)[:, None] * out_strides[0] + column.to(tl.int64) * out_strides[1]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(r < height)[:, None] & (column < N))


# gmm: launcher

FULL = 128 * 256  # sums of a tile that leave no registers for a second program on a multiprocessor
SHORT = 2048  # the longest sums of one loop without boxes, see `suits_one_loop`


def check_gmm(i: GroupedInputs | GroupedIntoInputs) -> None:
    if isinstance(i, GroupedIntoInputs):
        i = own_part(i, "rhs", "group_sizes", "bias", "starts")
    size = check_fields(i)
    G, N = size["G"], size["N"]
    check_size("group_sizes is ({},)", size["groups"], "rhs is (G={}, K, N)", G)
    check_floating("bias", i.bias, (G, N), f"(G={G}, N={N})")


def new_gmm(i: GroupedInputs) -> Tensor:
    check_gmm(i)
    return i.lhs.new_empty(i.lhs.shape[0], i.rhs.shape[2], dtype=i.dtype)


def check_gmm_into(i: GroupedIntoInputs) -> None:
    check_gmm(i)
    check_floating("existing_out", i.existing_out, (i.lhs.shape[0], i.rhs.shape[2]), "(M, N) = {}")
    check_own_memory("existing_out", i.existing_out)


@binds
@takes(*TILE_DTYPES)
def bind_gmm(i: GroupedInputs) -> Callable:
    """For a contiguous result.  Like it, `lhs` may be a temporary: bind with any tensor of its metadata."""
    return bind_grouped(i, (i.rhs.shape[2], 1))


@binds
@takes(*TILE_DTYPES)
def bind_gmm_into(i: GroupedIntoInputs) -> Callable:
    return bind_grouped(i, i.existing_out.stride(), into=True)


def suits_one_loop(
    i: GroupedInputs | GroupedIntoInputs, config: Config, unit: int, out: torch.dtype, out_strides: tuple,
    boxes: bool,
) -> bool:  # fmt: skip
    """Return whether programs take tile after tile, in one loop over the steps of all their tiles.

    If a tile leaves a multiprocessor no registers for another one, nothing hides how a program begins and
    ends, which takes as long as several steps.  One loop loads the next tile's operands while it writes.  But
    its steps take longer, unless weights come in boxes, so that without them sums must be short (measured on
    an H200, K from 352 to 28672), and sums that begin with a bias are slow.  The tile that is written has
    shared memory of its own: 16 bits a number, by rows.  Where rows are no whole units of 16 bytes, such a
    loop has no room for its addresses.
    """
    K = i.lhs.shape[1]
    full = config.block_m * config.block_n == FULL and i.bias is None
    short = K > 0 and (boxes or K <= SHORT)
    wide = unit >= 8 and i.lhs.stride(1) == 1 == out_strides[1] and i.lhs.itemsize == out.itemsize == 2
    return full and short and wide and not i.tile and not ROCM


def bind_grouped(i: GroupedInputs | GroupedIntoInputs, out_strides: tuple, into: bool = False) -> Callable:
    (M, _), (own, K, N), G = i.lhs.shape, i.rhs.shape, i.group_sizes.shape[0]
    guests = i.guests if into else None
    config, amd = choose_tile(i.tile, "gmm", i.lhs.dtype, M, N, K, G)
    unit = unit_of((N, K), i.lhs.stride(), i.rhs.stride(), out_strides)
    unit, guests_stride = unit_with(unit, i.rhs, guests)
    out_dtype = i.existing_out.dtype if into else i.dtype or i.lhs.dtype
    boxes = boxes_of(i.rhs.mT, unit) if guests is None else None
    one_loop = suits_one_loop(i, config, unit, out_dtype, out_strides, boxes is not None)
    boxes = boxes if one_loop and K > SHORT else None  # no faster for shorter sums
    tiles = row_tiles(M, G, config.block_m) * cdiv(N, config.block_n)
    grid, persistent = walk(tiles, i.programs or (PERSISTENT if one_loop else 0), i.lhs)
    kernel = bind_kernel(
        gmm_kernel, grid, ZERO_REST=not into, PERSISTENT=persistent, ONE_LOOP=one_loop, BOXES=boxes,
        UNIT=unit, BLOCK_G=next_power_of_2(G) or 1, EVEN_K=K % config.block_k == 0,
        TRANSPOSED=is_transposed(config, i.lhs), **tile_options(config, amd),
        BIAS_LAST=not i.tile and hopper.stands_in(hopper.bind_gmm_into if into else hopper.bind_gmm, i),
    )  # fmt: skip
    bias_strides, w_strides = (0, 0) if i.bias is None else i.bias.stride(), (*i.rhs.stride(), guests_stride)
    numbers = (M, G, own), N, K, i.lhs.stride(), w_strides, bias_strides, out_strides

    def launch(out, i):
        (starts, lent), w = (i.starts, i.guests) if into else (None, None), i.rhs
        w = w if boxes is None else with_boxes(w.mT, boxes, config)
        kernel(i.lhs, w, lent, i.bias, out, i.group_sizes.contiguous(), starts, *numbers)

    return launch


# gmm: op


def save_gmm(ctx, i: GroupedInputs, output):
    ctx.save_for_backward(i.lhs, i.rhs, i.group_sizes)
    ctx.bias_dtype = None if i.bias is None else i.bias.dtype


def backward_gmm(ctx, dout):
    lhs, rhs, group_sizes = ctx.saved_tensors
    dlhs = drhs = dbias = None
    needs, dout = GroupedInputs(*ctx.needs_input_grad), dout.to(lhs.dtype)
    if needs.lhs:
        dlhs = gmm_op(dout, rhs.mT, group_sizes, None)
    if needs.rhs and needs.bias:
        drhs, dbias = weight_and_bias_gradient(rhs, lhs, dout, group_sizes)
    elif needs.rhs:
        drhs = weight_gradient(rhs, None, lhs, dout, group_sizes)
    elif needs.bias:
        dbias = group_sum(dout, group_sizes)
    dbias = None if dbias is None else dbias.to(ctx.bias_dtype)
    return gradients(GroupedInputs, lhs=dlhs, rhs=drhs, bias=dbias)


def check_gmm_values(i: GroupedInputs | GroupedIntoInputs) -> None:
    check_plan_values(len(i.lhs), i.group_sizes)


gmm_op = define_op(
    "gmm", GroupedInputs, new=new_gmm, reference=gmm_reference, torch=fill_gmm, check_values=check_gmm_values,
    triton=bind_gmm, hopper=hopper.bind_gmm, backward=backward_gmm, save=save_gmm,
)  # fmt: skip
gmm_into_op = define_inplace_op(
    "gmm_into", GroupedIntoInputs, check=check_gmm_into, check_values=check_gmm_values,
    reference=fill_gmm_into, triton=bind_gmm_into, hopper=hopper.bind_gmm_into,
)  # fmt: skip


# gmm of 8 bits


class GmmFp8Inputs(ScaledGroupsInputs):
    """The inputs of the op `gmm_fp8`: those of `scaled_gmm` with scales of blocks.  Hopper's kernel takes w
    that is contiguous along K.

    x_scale (M, K / 128), or (T, K / 128) with order, and w_scale (G, N / 128, K / 128), rounded up.
    """

    def rounded(self) -> GroupedInputs:
        """Return the inputs of `gmm` that these stand for; operands times scales may not fit into float16."""
        dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        x, w = dequantize(self.x, self.x_scale, dtype), dequantize(self.w.mT, self.w_scale, dtype)
        x = take_rows(x, self.order, self.top_k)
        return GroupedInputs(x, w.mT, self.group_sizes, self.bias, self.dtype)


# of `scaled_gmm_into`: `scaled_gmm` or `gmm_fp8` with its result in a tensor that is there
ScaledIntoInputs = extended(
    "ScaledIntoInputs", ScaledGroupsInputs, {"existing_out": Written}, order=None, top_k=None, dtype=None
)  # fmt: skip


def has_blocks(scale: Tensor) -> bool:
    """Whether these scales of a weight are those of blocks."""
    return scale.dim() == 3


def as_fresh(i: ScaledIntoInputs) -> tuple[str, ScaledGroupsInputs]:
    """Return the op whose result is fresh, and its inputs."""
    op, kind = ("gmm_fp8", GmmFp8Inputs) if has_blocks(i.w_scale) else ("scaled_gmm", ScaledGroupsInputs)
    return op, kind(*i[1:], None, 1, i.existing_out.dtype)


def fill_rounded(out: Tensor, i: GmmFp8Inputs) -> None:
    fill("gmm", out, i.rounded())


def fill_scaled_into(out: Tensor, i: ScaledIntoInputs) -> None:
    rows, end = out.new_empty(out.shape), i.group_sizes.clamp(0, len(out)).sum()
    fill(as_fresh(i)[0], rows, as_fresh(i)[1])
    there = torch.arange(len(out), device=out.device) < end
    out.copy_(rows.where(there[:, None], out))


@binds
def bind_gmm_fp8(i: GmmFp8Inputs) -> Callable:
    return hopper.launcher("gmm", "bind_scaled_gmm")(i, blocks=True)


@binds
def bind_scaled_into(i: ScaledIntoInputs) -> Callable:
    bind = hopper.launcher("gmm", "bind_scaled_gmm")
    launch = bind(as_fresh(i)[1], has_blocks(i.w_scale), zero_rest=False)
    return lambda out, i: launch(out, as_fresh(i)[1])


def fits_scaled_into(i: ScaledIntoInputs) -> bool:
    op, fresh = as_fresh(i)
    return bool(hopper.by_tma(i.existing_out)) and runs(IMPLS[op]["hopper"], fresh)


bind_gmm_fp8.fits = hopper.fits_gmm_fp8
bind_scaled_into.fits = fits_scaled_into


def check_scaled_into(i: ScaledIntoInputs) -> None:
    check_fields(i)
    shape = shape_of_scaled_gmm(as_fresh(i)[1], has_blocks(i.w_scale))
    check_floating("existing_out", i.existing_out, shape, "(M, N) = {}")
    check_own_memory("existing_out", i.existing_out)


gmm_fp8_op = define_op(
    "gmm_fp8", GmmFp8Inputs, new=lambda i: i.x.new_empty(shape_of_scaled_gmm(i, True), dtype=i.dtype),
    check_values=lambda i: check_row_values(i.x, i), torch=fill_rounded, triton=fill_rounded,
    hopper=bind_gmm_fp8,
)  # fmt: skip
scaled_gmm_into_op = define_inplace_op(
    "scaled_gmm_into", ScaledIntoInputs, check=check_scaled_into,
    check_values=lambda i: check_plan_values(len(i.x), i.group_sizes),
    reference=lambda i: fill_scaled_into(i.existing_out, i), triton=fill_scaled_into, hopper=bind_scaled_into,
)  # fmt: skip


@renamed(x="lhs", w="rhs", x_scale="lhs_scale", w_scale="rhs_scale", out_dtype="preferred_element_type")
def gmm_8_bits(
    x: Tensor, w: Tensor, group_sizes: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype | None, out: Tensor | None, config: dict[str, int] | None, grid_dim: int | None,
) -> Tensor:  # fmt: skip
    """`gmm` of operands of 8 bits."""
    check_two_scales(x_scale=x_scale, w_scale=w_scale)
    check_8_bit_options(config=config, grid_dim=grid_dim)
    refuse_gradient("a product of 8 bits", x, w, x_scale, w_scale, bias)
    if (x_scale.dim(), w_scale.dim()) not in ((1, 2), (2, 3)):
        shapes = "(M,) and (G, N), or of blocks (M, K / 128) and (G, N / 128, K / 128)"
        given = tuple(x_scale.shape), tuple(w_scale.shape)
        raise ValueError(f"x_scale and w_scale must be {shapes}, but they are {given[0]} and {given[1]}")
    if out is not None:
        check_existing(out, dtype)
    name, result = ("out_dtype", dtype or torch.bfloat16) if out is None else ("existing_out", out.dtype)
    if result not in RESULTS:
        raise TypeError(f"{name} must be float16, bfloat16 or float32, not {result}")
    if w.is_cuda and w.dtype in OCP:  # as matrix instructions of 8 bits read operands
        w = w if w.stride(1) == 1 else transpose_rows8(w).mT
        x = x if x.stride(1) == 1 else x.contiguous()
    if out is None:
        op = gmm_fp8_op if has_blocks(w_scale) else scaled_gmm_op
        return op(x, w, group_sizes, x_scale, w_scale, bias, None, 1, result)
    with torch.no_grad():
        scaled_gmm_into_op(out, x, w, group_sizes, x_scale, w_scale, bias)
    return out


# gmm: public


def gmm(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *fourth: Tensor | torch.dtype | None,
    bias: Tensor | None = None, preferred_element_type: torch.dtype | None = None,
    existing_out: Tensor | None = None, work_stealing: bool = False, config: dict[str, int] | None = None,
    grid_dim: int | None = None, trans_rhs: bool | None = None, lhs_scale: Tensor | None = None,
    rhs_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply each group of rows of `lhs` (M, K) by its own matrix of `rhs` (G, K, N); returns (M, N).

    group_sizes: (G,) int32 or int64, the rows of each group, in order; they stay on the device.  Sizes that
        are negative or reach past M are clamped.
    bias: (G, N) of any floating dtype, added in float32 before the one rounding.
    preferred_element_type: dtype of the result; that of `lhs` unless given, float32 included.
    existing_out: (M, N), written instead of a fresh tensor, and returned.  Rows past the last group keep what
        they hold; in a fresh result they are zeros.
    work_stealing: a hint that is accepted and changes nothing, neither results nor speed.  In AITER programs
        then take tiles as they come free; here each has its share from the start, as without it.
    config: block sizes as `get_config` returns them, for the Triton kernel, which then runs.  What is left
        out is chosen by shape.
    grid_dim: run as so many programs, each of which takes tiles in turn, say to leave room for other kernels.
    trans_rhs: whether `rhs` is (G, N, K).  Unless given it is where only that fits: a square `rhs` is (G, K,
        N).  Strides are free either way.
    lhs_scale, rhs_scale: float32, of operands that are 8-bit floats, each e4m3fn, e4m3fnuz or e5m2.  Either
        (M,) for rows of `lhs` and (G, N) for columns of `rhs`, also of int8; or of blocks of 128, rounded up,
        (M, K / 128) and (G, N / 128, K / 128), whatever `trans_rhs` is.  The result is bfloat16 unless asked
        for in float16 or float32, and not differentiable; no `config` nor `grid_dim`.  An operand that is not
        contiguous along K is copied.  By blocks, all GPUs but Hopper convert numbers first, to the dtype of
        the result, or to float32 for float16; by rows, GPUs that do not know the format, to float16.
    fourth: the fourth argument by position is `bias` if it is a tensor, and `preferred_element_type` if it is
        a dtype.  All others are given by name.

    Without scales `lhs` and `rhs` share a dtype, or under torch.autocast without an `existing_out` are cast
    to its dtype; sums are of float32.  Differentiable in lhs, rhs and bias, but not with an `existing_out`.

    Raises ValueError for shapes, devices or block sizes that do not fit and for an `existing_out` that shares
    memory with an operand, TypeError for dtypes, RuntimeError for gradients of 8 bits, before anything is
    written; with MOE_AITER_DEBUG=1 also ValueError for group sizes that are negative or sum to more than M.
    """
    if fourth:
        named = {"bias": bias, "preferred_element_type": preferred_element_type}
        bias, preferred_element_type = fourth_argument(gmm, fourth, **named)
    check_shape("lhs", lhs, "M", "K")
    check_shape("rhs", rhs, "G", "K", "N")
    check_flags(work_stealing=work_stealing)
    eight_bits = has_8_bits(lhs, rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    if existing_out is None and not eight_bits:  # torch casts no operands either where an output is given
        lhs, rhs, bias = cast_as_linear(lhs, rhs, bias)
    rhs = oriented("trans_rhs", rhs, -2, lhs.shape[1], trans_rhs)
    if eight_bits:
        how = bias, preferred_element_type, existing_out, config, grid_dim
        return gmm_8_bits(lhs, rhs, group_sizes, lhs_scale, rhs_scale, *how)
    (M, K), (G, _, N) = lhs.shape, rhs.shape
    tile, programs = tile_of("gmm", config, (M, K, N, G), lhs.dtype, grid_dim)
    if existing_out is None:
        dtype = result_dtype(preferred_element_type, lhs)
        return gmm_op(lhs, rhs, group_sizes, bias, dtype, tile, programs)
    check_existing(existing_out, preferred_element_type)
    with torch.no_grad():
        gmm_into_op(existing_out, lhs, rhs, group_sizes, bias, tile, programs)
    return existing_out


# gmm_unpermute: reference


class GmmUnpermuteInputs(NamedTuple):
    """The inputs of the op `gmm_unpermute`: the rows of x @ w[g] + bias[g], summed up for each token."""

    x: Annotated[Operand, "R, K"]
    w: Annotated[Operand, "G, K, N"]
    group_sizes: Annotated[Index, "G"]
    bias: Annotated[Float, "G, N"] | None
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    routing_weights: Annotated[Float, "T, k"] | None
    row_bytes: int | torch.SymInt  # the most for the rows of the product
    guests: Tensor | None = None  # (guests, K, N): the matrices of further groups, see base/lent.py

    def columns(
        self, n: slice, rows: Tensor, group_sizes: Tensor, starts: Tensor | None
    ) -> GroupedIntoInputs:
        """Return the inputs of `gmm_into` for some columns of the rows, and for these groups."""
        bias, w, guests = (columns_of(t, n) for t in (self.bias, self.w, self.guests))
        return GroupedIntoInputs(rows, self.x, w, group_sizes, bias, starts=starts, guests=guests)

    def rows(self) -> Tensor:
        """Return the rows of the product, by the reference."""
        w = all_weights(self.w, self.guests)
        return gmm_reference(GroupedInputs(self.x, w, self.group_sizes, self.bias))


def new_gmm_unpermute(i: GmmUnpermuteInputs) -> Tensor:
    return new_routed(own_part(i, "w", "group_sizes", "bias"), "T", "N")


def gmm_unpermute_reference(i: GmmUnpermuteInputs) -> Tensor:
    return unpermute_reference(UnpermuteInputs(i.rows(), i.order, i.rank, i.routing_weights))


# gmm_unpermute: launcher


@binds
@takes(*TILE_DTYPES)
def bind_gmm_unpermute(i: GmmUnpermuteInputs, some: bool = False) -> Callable:
    """Return `launch(out, i)`; with `some` it leaves tokens without rows alone."""
    (R, _), N, top_k = i.x.shape, i.w.shape[2], i.rank.shape[1]

    def product(n: slice, starts: Tensor | None) -> Callable:
        columns = i.columns(n, i.x.new_empty(1, n.stop - n.start), i.group_sizes, starts)
        return bound(pick("gmm_into", columns), columns)

    slices = column_slices(N, R * i.x.element_size(), i.row_bytes)
    launches = [(n, n.stop - n.start, product(n, None), product(n, i.group_sizes)) for n in slices]
    sum_of = functools.cache(lambda tokens, width, add: bind_token_sum((tokens, top_k), width, N, add, some))

    def launch(out, i):
        for group_sizes, starts, tokens, sums, add in leaving(i.group_sizes, out):
            rank, weights = i.rank, weights_of(i.routing_weights)
            if tokens != slice(None):
                rank, weights = rank[tokens], None if weights is None else weights[tokens]
            for n, width, by_group, by_pass in launches:
                rows = i.x.new_empty(R, width)
                product = by_group if starts is None else by_pass
                product(rows, i.columns(n, rows, group_sizes, starts))
                sum_of(rank.shape[0], width, add)(columns_of(sums, n), rows, rank, weights)
                del rows  # before those of the next columns

    return launch


def columns_of(x: Tensor | None, n: slice) -> Tensor | None:
    """x[..., n], without the time of a view where these are all columns; None for None."""
    return x if x is None or n == slice(0, x.shape[-1]) else x[..., n]


def bind_token_sum(
    choices: Sequence[int], width: int, columns: int, add: bool = False, some: bool = False
) -> Callable:
    """Bind the sum of each token's rows, for `choices`, (T, k), and `width` of an output's `columns`."""
    return bind_unpermute_columns(choices, width, (width, 1), columns, add, some)


# gmm_unpermute: op


gmm_unpermute_op = define_op(
    "gmm_unpermute", GmmUnpermuteInputs, new=new_gmm_unpermute,
    reference=gmm_unpermute_reference, triton=bind_gmm_unpermute,
)  # fmt: skip


# gmm_unpermute_add: `gmm_unpermute` for the rows of another window


class GmmUnpermuteAddInputs(extended("GmmUnpermuteAddInputs", GmmUnpermuteInputs, {"out": Written})):
    """The inputs of the op `gmm_unpermute_add`: `gmm_unpermute` for the tokens that have rows.

    Other tokens are neither read nor written.  If a rank of a token is ELSEWHERE, the sum is added to what
    `out` (T, N), contiguous, holds for this token.  Each sum is rounded to the dtype of `out`.
    """

    def product(self) -> GmmUnpermuteInputs:
        _, *inputs = self
        return GmmUnpermuteInputs(*inputs)


def check_gmm_unpermute_add(i: GmmUnpermuteAddInputs) -> None:
    expected = new_gmm_unpermute(i.product())
    if (i.out.shape, i.out.dtype) != (expected.shape, expected.dtype) or not i.out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {expected.dtype} and (T, N) = {tuple(expected.shape)}, "
            f"but it is {i.out.dtype} {tuple(i.out.shape)} with the strides {i.out.stride()}"
        )
    check_device(x=i.x, out=i.out)


def add_gmm_unpermute(i: GmmUnpermuteAddInputs) -> None:
    rows = wide(i.product().rows())
    sums = unpermute_reference(UnpermuteInputs(rows, i.order, i.rank, i.routing_weights))
    added = (i.rank == ELSEWHERE.value).any(1, keepdim=True)
    sums += wide(i.out).where(added, 0)
    i.out.copy_(sums.where((i.rank >= 0).any(1, keepdim=True), i.out))


@binds
@takes(*TILE_DTYPES)
def bind_gmm_unpermute_add(i: GmmUnpermuteAddInputs) -> Callable:
    launch = bind_gmm_unpermute(i.product(), some=True)
    return lambda out, i: launch(out, i.product())


gmm_unpermute_add_op = define_inplace_op(
    "gmm_unpermute_add", GmmUnpermuteAddInputs, check=check_gmm_unpermute_add, reference=add_gmm_unpermute,
    triton=bind_gmm_unpermute_add,
)  # fmt: skip
