"""Transposed grouped matmul, the gradient of a grouped matmul's weights.

    out[g] = x[s:e].T @ y[s:e]

for each group g, whose rows are [s, e).  With `order`, row r of x stands for row order[r] // top_k.

On a CPU torch computes `gmm` and `tgmm` group by group, and writes each product into its place.  If all
operands and the result have one dtype, torch's product reads the operands as they are, sums in float32 and
rounds once.  If dtypes differ, or under torch.func's vmap, torch has no such product; then all operands are
widened first.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...invariance import batch_invariant
from ...op import Written, binds, define_inplace_op, define_op, is_transformed, takes
from ...private_api import fast_on_cpu
from .. import hopper
from ..base.check import (
    Index,
    Operand,
    apart,
    cast_as_linear,
    check_fields,
    check_floating,
    check_own_memory,
    check_plan_values,
    check_row_values,
    check_rows,
    check_shape,
    check_tensor,
    group_ends,
    multiply_apart,
    split_groups,
    sum_dtype,
    take_rows,
)
from ..base.fixed_rows import multiply_by_blocks
from ..base.launch import Descriptor, bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import (
    BLOCK,
    TILE_DTYPES,
    add_columns,
    choose_tile,
    column_slices,
    dense,
    group_rows,
    has_tma,
    in_units,
    swizzle,
    tile_options,
    unit_of,
    walk,
)
from ..rows.permute import bind_gather_rows
from ..rows.sums import GroupSumInputs, bind_bias_grad, bind_sum_groups, group_sum_reference, sum_rows


class TgmmInputs(NamedTuple):
    """The inputs of the op `tgmm`: out[g] = x[s:e].T @ y[s:e] for each group g of rows [s, e)."""

    x: Operand  # (M, K), or (T, K) with order
    y: Annotated[Operand, "M, N"]
    group_sizes: Annotated[Index, "G"]
    order: Index | None  # (M,): row r of x is row order[r] // top_k
    top_k: int
    columns_first: bool  # return (G, N, K), else (G, K, N)


class TgmmSumsInputs(NamedTuple):
    """The inputs of the op `tgmm_sums`: `tgmm`, and for each group the sum of its rows of y."""

    x: Tensor  # (M, K)
    y: Tensor  # (M, N)
    group_sizes: Tensor  # (G,)
    columns_first: bool

    def product(self) -> TgmmInputs:
        """Return the inputs of `tgmm`."""
        return TgmmInputs(self.x, self.y, self.group_sizes, None, 1, self.columns_first)


class TgmmIntoInputs(NamedTuple):
    """The inputs of the op `tgmm_into`: `tgmm` into a tensor that is there, or added to it."""

    existing_out: Written  # (G, K, N)
    x: Operand  # (M, K), or (T, K) with order
    y: Annotated[Operand, "M, N"]
    group_sizes: Annotated[Index, "G"]
    order: Index | None  # (M,)
    top_k: int
    accumulate: bool = True
    bias_grad: Written | None = None  # (G, K), the sums of the rows of x, or of y (G, N); float32
    sums_of_y: bool = False
    tile: tuple[int, ...] = ()  # the numbers of a tile, in place of the tables'
    programs: int = 0  # as for `walk`
    first: int = 0  # of the groups of the result; `group_sizes` has those before it too


# products in torch, group by group


def multiply_in_place(out: Tensor, x: Tensor, y: Tensor, plus: Tensor | None) -> None:
    """`out = x @ y + plus`, which may be a row, or `out` itself; of one dtype."""
    x, y = apart(x, y)
    if out.is_cuda and 1 in (*x.shape, *y.shape):
        # cuBLAS may refuse the stride of an axis of size 1, which can be any number
        x, y = (t.clone(memory_format=torch.contiguous_format) for t in (x, y))
        out.copy_(x @ y if plus is None else torch.addmm(plus, x, y))
    elif plus is None:
        torch.mm(x, y, out=out)
    else:
        torch.addmm(plus, x, y, out=out)


def multiply_wide(out: Tensor, x: Tensor, y: Tensor, plus: Tensor | None) -> None:
    """Do as `multiply_in_place` in float32 or wider, also for operands of several dtypes, or under vmap."""
    x, y = widened(out, x, y)
    out.copy_(x @ y if plus is None else torch.addmm(plus.to(x.dtype), x, y))


def widened(out: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(sum_dtype(x), out.dtype)
    return x.to(wide), y.to(wide)


def multiply_wide_by_blocks(out: Tensor, x: Tensor, y: Tensor, plus: Tensor | None) -> None:
    """Do as `multiply_wide` by `multiply_by_blocks`."""
    x, y = widened(out, x, y)
    sums = x.new_empty(out.shape)
    multiply_by_blocks(sums, x, y, None if plus is None else plus.to(x.dtype))
    out.copy_(sums)


def chosen(out: Tensor, x: Tensor, plus: Tensor | None, by_row: bool = True) -> Callable:
    """Return `multiply_in_place` where torch can do that and is not slow, or else `multiply_wide`.

    With batch invariance, products by blocks of rows; not where all rows are summed, without `by_row`.
    """
    same = {x.dtype, out.dtype if plus is None else plus.dtype} == {out.dtype}
    slow = out.is_cpu and not fast_on_cpu(out.dtype)
    in_place = same and not slow and not is_transformed()
    if by_row and batch_invariant() and not is_transformed():
        return multiply_by_blocks if in_place else multiply_wide_by_blocks
    return multiply_in_place if in_place else multiply_wide


def matmul_into(out: Tensor, x: Tensor, y: Tensor, plus: Tensor | None = None, by_row: bool = True) -> None:
    """`out = x @ y + plus`, by the function that `chosen` returns."""
    chosen(out, x, plus, by_row)(out, x, y, plus)


def fill_gmm(out: Tensor, i, zero_rest: bool = True) -> None:
    """Fill `out` with the product of the inputs of the op `gmm` or `gmm_into`."""
    product, ends = chosen(out, i.lhs, i.bias), group_ends(i.group_sizes, len(i.lhs))
    *outs, rest = out.tensor_split(ends)
    biases = [None] * len(ends) if i.bias is None else i.bias.unbind()
    for o, x, w, b in zip(outs, i.lhs.tensor_split(ends), i.rhs.unbind(), biases, strict=False):
        if len(x):
            product(o, x, w, b)
    if zero_rest:
        rest.zero_()


def fill_tgmm(out: Tensor, i: TgmmInputs, accumulate: bool = False, first: int = 0) -> None:
    x, y = operands_of(i)
    if x.dtype != out.dtype:  # all groups at once, whose float32 result is then written in place
        x, y = widened(out, x, y)
    product, ends = chosen(out, x, None, by_row=False), group_ends(i.group_sizes, len(x))
    parts = zip(x.tensor_split(ends)[first:], y.tensor_split(ends)[first:], strict=True)
    for o, (a, b) in zip(out.unbind(), parts, strict=False):
        if len(a):
            product(o, a.T, b, o if accumulate else None)
        elif not accumulate:
            o.zero_()


def operands_of(i: TgmmInputs) -> tuple[Tensor, Tensor]:
    """Return the rows of both operands, those of y first if the columns come first."""
    x = take_rows(i.x, i.order, i.top_k)
    return (i.y, x) if i.columns_first else (x, i.y)


def fill_tgmm_sums(outs: tuple[Tensor, Tensor], i: TgmmSumsInputs) -> None:
    fill_tgmm(outs[0], i.product())
    outs[1].copy_(group_sum_reference(GroupSumInputs(i.y, i.group_sizes, None, 1, None)))


def fill_tgmm_into(i: TgmmIntoInputs) -> None:
    inputs = TgmmInputs(i.x, i.y, i.group_sizes, i.order, i.top_k, False)
    fill_tgmm(i.existing_out, inputs, i.accumulate, i.first)
    if i.bias_grad is not None:
        rows, order, top_k = (i.y, None, 1) if i.sums_of_y else (i.x, i.order, i.top_k)
        i.bias_grad.copy_(group_sum_reference(GroupSumInputs(rows, i.group_sizes, order, top_k, None)))


# reference


def tgmm_reference(i: TgmmInputs) -> Tensor:
    x, y = operands_of(i)
    pairs = zip(split_groups(x, i.group_sizes)[:-1], split_groups(y, i.group_sizes)[:-1], strict=True)
    products = [multiply_apart(a.T, b) for a, b in pairs]
    return torch.stack(products) if products else x.new_zeros(0, x.shape[1], y.shape[1])


def tgmm_sums_reference(i: TgmmSumsInputs) -> tuple[Tensor, Tensor]:
    sums = group_sum_reference(GroupSumInputs(i.y, i.group_sizes, None, 1, None))
    return tgmm_reference(i.product()), sums


# kernel


@triton.jit
def multiply_rows(
    acc,  # (BLOCK_M, BLOCK_N)
    x_ptrs,  # (1, BLOCK_M), of row 0
    y_ptrs,  # (1, BLOCK_N), of row 0
    order_ptr, row, row_end, x_stride_m, y_stride_m,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x.T @ y over the rows [row, row_end), in steps of BLOCK_K.  Columns must be readable."""
    m = tl.arange(0, BLOCK_K)
    y_ptrs += (row + m)[:, None] * y_stride_m
    if order_ptr is None:
        x_ptrs += (row + m)[:, None] * x_stride_m
    else:
        order_ptr += row
    for done in range(0, row_end - row, BLOCK_K):
        left = tl.minimum(row_end - row - done, BLOCK_K).to(tl.int32)  # or masks take twice the instructions
        live = (m < left)[:, None]
        if order_ptr is None:
            x = tl.load(x_ptrs, mask=live, other=0.0)
            x_ptrs += BLOCK_K * x_stride_m
        else:  # a dropped row, which no group counts, is row 0
            source = tl.maximum(tl.load(order_ptr + done + m, mask=m < left, other=0), 0) // TOP_K
            x = tl.load(x_ptrs + source.to(tl.int64)[:, None] * x_stride_m, mask=live, other=0.0)
        y = tl.load(y_ptrs, mask=live, other=0.0)
        acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        y_ptrs += BLOCK_K * y_stride_m
    return acc


@triton.jit
def multiply_rows_last(
    acc, x_ptrs, y_ptrs, row, row_end, x_stride_m, y_stride_m,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do as `multiply_rows`, 8 rows at a time, where rows of x lie side by side.

    The ends of a group, which may begin anywhere, are read row by row.  Read in whole units, rows of other
    groups would have to be zeroed in registers, which Hopper's products may read too late.  Ends come first:
    where a product is behind a loop that may be skipped, ptxas 12.8 may compute where its operands lie as it
    enters that loop, and nowhere else.
    """
    begin = row // 8 * 8 + BLOCK_K
    steps = tl.maximum(row_end - begin - 1, 0) // BLOCK_K
    for last in tl.range(0, 2, num_stages=1):
        m = begin + tl.where(last == 1, steps * BLOCK_K, -BLOCK_K) + tl.arange(0, BLOCK_K)
        live = ((m >= row) & (m < row_end))[:, None]
        x = tl.load(x_ptrs + m[:, None] * x_stride_m, mask=live, other=0.0)
        y = tl.load(y_ptrs + m[:, None] * y_stride_m, mask=live, other=0.0)
        acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
    m = begin + tl.arange(0, BLOCK_K)
    y_ptrs += m[:, None] * y_stride_m
    for _ in range(0, steps):
        x = tl.load(x_ptrs + m[:, None] * x_stride_m)
        y = tl.load(y_ptrs)
        acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        m += BLOCK_K
        y_ptrs += BLOCK_K * y_stride_m
    return acc


@jit_kernel
def tgmm_kernel(
    x_ptr,  # (M, K), or (T, K) read at order // top_k
    y_ptr,  # (M, N)
    order_ptr,  # (M,) or None
    out_ptr,  # (G, K, N), or its descriptor for a BOX
    sums_ptr,  # (G, K) or, of y, (G, N), float32; or None
    group_sizes_ptr,  # (G,)
    M, N, K, G,
    x_strides,  # m, k
    y_strides,  # m, n
    out_strides,  # g, k, n
    sums_strides,  # g, k or n
    TOP_K: tl.constexpr, ACCUMULATE: tl.constexpr, SUMS_OF_Y: tl.constexpr, ROWS_LAST: tl.constexpr,
    PERSISTENT: tl.constexpr, BOX: tl.constexpr, UNIT: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr,  # groups before the G of the result, which have rows alone
):  # fmt: skip
    N, K, x_strides, y_strides, out_strides = in_units((N, K, x_strides, y_strides, out_strides), UNIT)
    # here BLOCK_M x BLOCK_N is a tile of out[g] (K, N), and BLOCK_K rows are summed over at a time
    tiles_k, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0)
    end = G * tiles_k * tiles_n if PERSISTENT else first + 1
    for tile in range(first, end, tl.num_programs(0) if PERSISTENT else 1):
        tile_k, tile_n = swizzle(tile, G * tiles_k, tiles_n, GROUP_M, NUM_DIES)
        group = tile_k // tiles_k
        row, row_end = group_rows(group + FIRST, group_sizes_ptr, M, BLOCK_G)
        k = tile_k % tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if sums_ptr is not None:
            sums_base = sums_ptr + group.to(tl.int64) * sums_strides[0]
            if SUMS_OF_Y:
                if tile_k % tiles_k == 0:
                    total = sum_rows(y_ptr, None, None, row, row_end, n, N, 1, y_strides, 16)
                    tl.store(sums_base + n * sums_strides[1], total, mask=n < N)
            elif tile_n == 0:
                unit: tl.constexpr = UNIT if ROWS_LAST else 1
                total = sum_rows(x_ptr, order_ptr, None, row, row_end, k, K, TOP_K, x_strides, 16, unit)
                tl.store(sums_base + k * sums_strides[1], total, mask=k < K)

        x_ptrs = x_ptr + (k % K).to(tl.int64)[None, :] * x_strides[1]
        y_ptrs = y_ptr + (n % N).to(tl.int64)[None, :] * y_strides[1]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if ROWS_LAST:
            acc = multiply_rows_last(
                acc, x_ptrs, y_ptrs, row, row_end, x_strides[0], y_strides[0], BLOCK_K, PRECISION
            )
        else:
            acc = multiply_rows(
                acc, x_ptrs, y_ptrs, order_ptr, row, row_end, x_strides[0], y_strides[0], TOP_K, BLOCK_K,
                PRECISION,
            )  # fmt: skip

        if BOX:
            box = acc.to(out_ptr.dtype).reshape(1, BLOCK_M, BLOCK_N)
            out_ptr.store([group, tile_k % tiles_k * BLOCK_M, tile_n * BLOCK_N], box)
        elif ACCUMULATE:
            out_base = out_ptr + group.to(tl.int64) * out_strides[0]
            add_columns(acc, k, tile_n * BLOCK_N, tl.where(row < row_end, K, 0), N, out_base, out_strides)
        else:
            out_base = out_ptr + group.to(tl.int64) * out_strides[0]
            at = k.to(tl.int64)[:, None] * out_strides[1] + n.to(tl.int64)[None, :] * out_strides[2]
            mask = (k < K)[:, None] & (n < N)[None, :]
            tl.store(out_base + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


# launcher


def shape_of_tgmm(i: TgmmInputs | TgmmIntoInputs) -> tuple[int, int, int]:
    """(G, K, N), once x and y fit the groups, and everything is on one device."""
    check_shape("y", i.y, "M", "N")
    check_rows("x", i.x, "K", i.order, i.top_k, i.y.shape[0])
    check_fields(i)
    return i.group_sizes.shape[0], i.x.shape[1], i.y.shape[1]


def new_tgmm(i: TgmmInputs) -> Tensor:
    G, K, N = shape_of_tgmm(i)
    return i.x.new_empty(G, N, K) if i.columns_first else i.x.new_empty(G, K, N)


def new_tgmm_sums(i: TgmmSumsInputs) -> tuple[Tensor, Tensor]:
    return new_tgmm(i.product()), i.y.new_empty(i.group_sizes.shape[0], i.y.shape[1], dtype=sum_dtype(i.y))


def check_tgmm_into(i: TgmmIntoInputs) -> None:
    out, sums = i.existing_out, i.bias_grad
    G, K, N = shape_of_tgmm(i)
    if not 0 <= i.first <= G or (i.first and (sums is not None or not i.accumulate)):
        raise ValueError(f"first={i.first} of {G} groups: such a result is accumulated, without a bias_grad")
    G -= i.first
    check_sum("out", out, (G, K, N))
    if sums is not None:
        axes, expected = ("(G, N)", (G, N)) if i.sums_of_y else ("(G, K)", (G, K))
        if sums.dtype != torch.float32:
            raise TypeError(f"bias_grad must be torch.float32, not {sums.dtype}")
        if sums.shape != expected:
            raise ValueError(f"bias_grad must be {axes} = {expected}, but it has shape {tuple(sums.shape)}")
        check_own_memory("bias_grad", sums)


def check_sum(name: str, out: Tensor, expected: tuple[int, int, int]) -> None:
    """Raise unless the gradient of a weight can be added to `out`."""
    check_floating(name, out, expected, "(G, K, N) = {}")
    check_own_memory(name, out)


@binds
@takes(*TILE_DTYPES)
def bind_tgmm(i: TgmmInputs) -> Callable:
    strides = new_strides(i)
    product = bind_gathered(i.x, i.y, i.group_sizes, i.order, i.top_k, strides, fresh=True)

    def launch(out, i):
        product(out.mT if i.columns_first else out, i.x, i.y, i.group_sizes, i.order)

    return launch


@binds
@takes(*TILE_DTYPES)
def bind_tgmm_sums(i: TgmmSumsInputs) -> Callable:
    (M, N), G = i.y.shape, i.group_sizes.shape[0]
    if i.x.shape[1] == 0:
        add = bind_sum_groups(M, N, G, 1, i.y.stride(), (N, 1))
        return lambda outs, i: add(outs[1], i.y, i.group_sizes, None, None)
    product = bind_outer(i.x, i.y, i.group_sizes, new_strides(i), sums_strides=(N, 1), sums_of_y=True)
    return lambda outs, i: product(outs[0], i.x, i.y, i.group_sizes, None, outs[1])


@binds
@takes(*TILE_DTYPES)
def bind_tgmm_into(i: TgmmIntoInputs) -> Callable:
    if i.existing_out.numel() == 0:  # there are no tiles, whose programs would sum rows beside them
        return bind_bias_grad(i)
    product = bind_gathered(
        i.x, i.y, i.group_sizes, i.order, i.top_k, i.existing_out.stride(), accumulate=i.accumulate,
        sums_strides=(0, 0) if i.bias_grad is None else i.bias_grad.stride(), sums_of_y=i.sums_of_y,
        tile=i.tile, programs=i.programs, first=i.first,
    )  # fmt: skip
    return lambda out, i: product(out, i.x, i.y, i.group_sizes, i.order, i.bias_grad)


def new_strides(i: TgmmInputs | TgmmSumsInputs) -> tuple[int, int, int]:
    """Return the strides of a new result along its axes (G, K, N)."""
    K, N = i.x.shape[1], i.y.shape[1]
    return (N * K, 1, K) if i.columns_first else (K * N, N, 1)


MOST = 4  # slices of x: more cost more time than their memory is worth
NARROW = 128  # columns of a tile
SLACK = 8  # the gathered rows may take a part in so many of what else the product reads and writes
WIDE, FEW = 768, 512  # columns of y, and rows of a group: see `gathers_first`


def gathers_first(x: Tensor, y: Tensor, groups: int) -> bool:
    """Return whether the rows of x are gathered before the product, rather than as it loads them.

    A product that gathers waits twice, for the rows' numbers and for the rows.  That costs more than to write
    the rows once if there are many columns to multiply each row by, and if groups have few rows (H200).
    """
    by_columns = x.stride(0) == 1 != x.stride(1)
    return by_columns or y.shape[1] >= WIDE or len(y) <= FEW * groups


def bind_gathered(
    x: Tensor, y: Tensor, group_sizes: Tensor, order: Tensor | None, top_k: int, out_strides: Sequence[int],
    *, sums_of_y: bool = False, first: int = 0, **options,
) -> Callable[..., None]:  # fmt: skip
    """Return `product(out, x, y, group_sizes, order, sums)` for a result with elements (G, K, N).

    Where the rows of x are gathered first, that is done for a slice of their columns at a time.
    """
    (M, N), K, G = y.shape, x.shape[1], group_sizes.shape[0]
    options["first"] = first  # rows of groups before it need not be gathered
    if order is None or first or not gathers_first(x, y, G):
        how = {"gathers": order is not None, "top_k": top_k, "sums_of_y": sums_of_y}
        return bind_outer(x, y, group_sizes, out_strides, **how, **options)
    column_bytes = M * x.element_size()
    most = (M * N + G * K * N) * x.element_size() // SLACK
    slices = column_slices(K, column_bytes, max(most, column_bytes * cdiv(K, MOST * BLOCK) * BLOCK))

    launches = {}
    for width in {n.stop - n.start for n in slices}:
        rows = torch.empty(M, width, dtype=x.dtype, device="meta")
        product = bind_outer(rows, y, group_sizes, out_strides, sums_of_y=sums_of_y, **options)
        launches[width] = bind_gather_rows(x[:, :width], M, top_k), product

    def launch(out, x, y, group_sizes, order, sums=None):
        for n in slices:
            gather, product = launches[n.stop - n.start]
            rows, some = x.new_empty(M, n.stop - n.start), sums is None or sums_of_y
            gather(x[:, n], order, rows)
            product(out[:, n], rows, y, group_sizes, None, sums if some else sums[:, n])
            del rows  # before those of the next columns

    return launch


def bind_outer(
    x: Tensor, y: Tensor, group_sizes: Tensor, out_strides: Sequence[int],
    *, gathers: bool = False, top_k: int = 1, accumulate: bool = False, sums_strides: Sequence[int] = (0, 0),
    sums_of_y: bool = False, tile: Sequence[int] = (), programs: int = 0, fresh: bool = False, first: int = 0,
) -> Callable[..., None]:  # fmt: skip
    """Return `product(out, x, y, group_sizes, order, sums)` for a result with elements (G, K, N).

    Of x and y the metadata alone counts.  A `fresh` result begins at a multiple of 16 bytes.
    """
    g, k, n = out_strides
    if k == 1 != n and x.stride(1) == 1 and not gathers and not tile:
        turned = bind_outer(  # out.mT = y.T @ x, whose tiles are written row by row
            y, x, group_sizes, (g, n, k), accumulate=accumulate, sums_strides=sums_strides,
            sums_of_y=not sums_of_y, programs=programs, fresh=fresh, first=first,
        )  # fmt: skip
        return lambda out, x, y, group_sizes, _, sums=None: turned(out.mT, y, x, group_sizes, None, sums)
    (M, N), K, all_groups = y.shape, x.shape[1], group_sizes.shape[0]
    G = all_groups - first
    # the pipeline spends stages on the indices, so gathering has rows of its own
    config, amd = choose_tile(tile, "tgmm_gather" if gathers else "tgmm", x.dtype, M, N, K, all_groups)
    grid, persistent = walk(G * cdiv(K, config.block_m) * cdiv(N, config.block_n), programs, group_sizes)
    rows_last = x.stride(0) == 1 != x.stride(1)
    unit = unit_of((N, K, M if rows_last else 0), x.stride(), y.stride(), out_strides)
    # by TMA, a narrow tile takes .91 to .99 of the time, a wide one .99 to 1.44 (H200)
    box = fresh and n == 1 and config.block_n <= NARROW and has_tma(unit, x.itemsize)
    kernel = bind_kernel(
        tgmm_kernel, grid, TOP_K=top_k, ACCUMULATE=accumulate, SUMS_OF_Y=sums_of_y, ROWS_LAST=rows_last,
        PERSISTENT=persistent, BOX=box, UNIT=unit, BLOCK_G=next_power_of_2(all_groups), FIRST=first,
        **tile_options(config, amd),
    )  # fmt: skip
    numbers = M, N, K, G, x.stride(), y.stride(), out_strides, sums_strides

    def product(out, x, y, group_sizes, order, sums=None):
        order, group_sizes = dense(order, group_sizes)
        to = Descriptor(out, out.shape, out_strides, (1, config.block_m, config.block_n)) if box else out
        kernel(x, y, order, to, sums, group_sizes, *numbers)

    return product


# op


tgmm_op = define_op(
    "tgmm", TgmmInputs, new=new_tgmm, check_values=lambda i: check_row_values(i.x, i),
    reference=tgmm_reference, torch=fill_tgmm, triton=bind_tgmm, hopper=hopper.bind_tgmm,
)  # fmt: skip
tgmm_sums_op = define_op(
    "tgmm_sums", TgmmSumsInputs, outputs=2, new=new_tgmm_sums,
    check_values=lambda i: check_plan_values(len(i.y), i.group_sizes), reference=tgmm_sums_reference,
    torch=fill_tgmm_sums, triton=bind_tgmm_sums, hopper=hopper.bind_tgmm_sums,
)  # fmt: skip
tgmm_into_op = define_inplace_op(
    "tgmm_into", TgmmIntoInputs, check=check_tgmm_into, check_values=lambda i: check_row_values(i.x, i),
    reference=fill_tgmm_into, triton=bind_tgmm_into, hopper=hopper.bind_tgmm_into,
)  # fmt: skip


# public


def tgmm(x: Tensor, y: Tensor, group_sizes: Tensor, order: Tensor | None = None, top_k: int = 1) -> Tensor:
    """Multiply `x[s:e].T @ y[s:e]` for each group of rows [s, e): (M, K), (M, N) -> (G, K, N).

    This is the gradient of `gmm`'s `rhs`.  With `order` (M,), `x` is (T, K) with M <= T * top_k, and row r
    stands for `x[order[r] // top_k]`.  A group without rows gives
    exact zeros.  Not differentiable.  Dtypes, strides and errors as in `gmm`.
    """
    check_tensor("x", x)
    check_tensor("y", y)
    return tgmm_op(*cast_as_linear(x, y), group_sizes, order, top_k, False)


def tgmm_accumulate(
    out: Tensor, x: Tensor, y: Tensor, group_sizes: Tensor, order: Tensor | None = None, top_k: int = 1
) -> None:
    """Add `tgmm(x, y, ...)` to `out` (G, K, N), of any floating dtype: float32 `main_grad` accumulation."""
    tgmm_into_op(out, x, y, group_sizes, order, top_k)


def weight_gradient(w, main_grad, x, y, group_sizes, order=None, top_k=1) -> Tensor | None:
    """The gradient of a weight `w` (G, K, N), in the memory layout of `w`, so that autograd need not copy it.

    With a `main_grad` it is added there, and None is returned.
    """
    if main_grad is not None:
        return tgmm_into_op(main_grad, x, y, group_sizes, order, top_k)
    columns_first = w.stride(1) < w.stride(2)
    dw = tgmm_op(x, y, group_sizes, order, top_k, columns_first)
    return dw.mT if columns_first else dw


def add_guest_gradient(to: Tensor | None, x, y, group_sizes, order=None, top_k=1) -> None:
    """Add `tgmm` of the last groups, those of guests, to `to` (G, K, N), one of `guest_gradients`."""
    if to is not None:
        rows = TgmmIntoInputs(to, x, y, group_sizes, order, top_k, first=len(group_sizes) - len(to))
        tgmm_into_op(*rows)


def weight_and_bias_gradient(w, x, y, group_sizes) -> tuple[Tensor, Tensor]:
    """`weight_gradient` and the sums of the rows of `y`, the gradient of a bias, in float32, in one pass."""
    columns_first = w.stride(1) < w.stride(2)
    dw, dbias = tgmm_sums_op(x, y, group_sizes, columns_first)
    return dw.mT if columns_first else dw, dbias
