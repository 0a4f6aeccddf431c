"""The experts of few tokens without gradients, in two launches at the rate at which weights can be read.

    a[r]   = f(gate of z[r]) * h(up of z[r])  with  z[r] = gate_up[e] @ x[token of r] + bias[e]
    out[t] = sum over j of s[t, j] * (down[e] @ a[rank[t, j]] + bias[e])

A tile for tensor cores has 16 rows or more; where an expert has one or two, most of it is empty, and its
loads wait for its products.  Here a program multiplies some rows of a weight by one row, number by number, as
a product of one row does (base/gemm_row.py).  In the down-projection it does so for all experts of a token at
once and adds them up, in a fixed order and without a rounding in between, so that no launch sums rows.

Two rows of one expert read its weights twice.  Programs side by side have the same columns and rows in the
order of the plan, so that the second reads them from L2.

Under batch invariance, the sums must be those of the tiles for many tokens.  Then tensor cores multiply here
too (DOT), by small instructions, which on Hopper give the same bits as the large ones of those tiles; rows of
the down-projection are rounded before they are added up, as rows in memory are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...invariance import batch_invariant
from ...op import forced
from .. import hopper
from ..base.activations import get_activation
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import dense, halves, in_units, locate, unit_of
from ..rows.permute import weights_of
from .inputs import ExpertInputs
from .up import UpInputs, split_gate_up, tile_columns

# by whether the numbers of a column lie side by side in both weights: where not, a tile for tensor cores
# reads those of two tokens at a higher rate
MOST_TOKENS = {True: 8, False: 1}
MOST_CHOICES = 32  # of a token, which a program of the down-projection adds up
MOST_EXPERTS = 1024  # whose sizes each program reads
WARP = 32  # threads of most GPUs
SHARED = 2  # experts for each row: with fewer, too many rows read the same weights
# (columns, numbers of each, warps) of a program, by the same of its weight.  A
# warp reads 512 bytes of a column, or 64 bytes or more of columns side by side
UP = {True: (8, 1024, 4), False: (64, 128, 4)}
DOWN = {True: (2, 2048, 8), False: (16, 1024, 8)}  # the numbers are those of all experts of a token
# the same by tensor cores, which multiply 16 columns by as many rows, here copies of one
UP_DOT, DOWN_DOT, COPIES = (16, 256, 1), (16, 1024, 4), tl.constexpr(16)
STAGES = 4
DEEPEST = 128  # numbers of each of several experts; of one, a program is as of UP_DOT


# kernels


@triton.jit
def multiply_rows(
    x_ptrs,  # (J, BLOCK_K)
    w_ptrs,  # (J, BLOCK_N, BLOCK_K)
    live,  # (J,) or None: rows of x that exist
    K,
    end,  # K again, which the compiler does not know
    x_stride_k, w_stride_k, DOT: tl.constexpr, BY_ROWS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """w[j] @ x[j] for each j: (J, BLOCK_N), in float32, by tensor cores if DOT.

    Otherwise a thread first adds up the EACH numbers of a row that it has: side by side if BY_ROWS, or else
    apart.
    """
    J: tl.constexpr = w_ptrs.shape[0]
    BLOCK_N: tl.constexpr = w_ptrs.shape[1]
    BLOCK_K: tl.constexpr = w_ptrs.shape[2]
    REST: tl.constexpr = BLOCK_K // EACH
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((J, BLOCK_N, COPIES if DOT else REST), tl.float32)
    for first in range(0, K, BLOCK_K):
        mask = (k < K - first)[None, :]
        mask = mask if live is None else live[:, None] & mask
        w = tl.load(w_ptrs, mask=mask[:, None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptrs, mask=mask, other=0.0)
        if DOT:
            acc = tl.dot(w, tl.broadcast_to(x[:, :, None], (J, BLOCK_K, COPIES)), acc)
        elif first < end:  # always: without the branch the assembler puts each load before its product
            p = w.to(tl.float32) * x.to(tl.float32)[:, None, :]
            if BY_ROWS:
                acc += tl.sum(p.reshape(J, BLOCK_N, REST, EACH), 3)
            else:
                acc += tl.sum(p.reshape(J, BLOCK_N, EACH, REST), 2)
        w_ptrs += BLOCK_K * w_stride_k
        x_ptrs += BLOCK_K * x_stride_k
    return tl.max(acc, 2) if DOT else tl.sum(acc, 2)  # copies are equal


@triton.jit
def add_in_order(acc, y, s):
    """acc (N,) + the sum of y (N, J) * s (N, J) over J, as `unpermute` adds up: one after the other."""
    if y.shape[1] == 1:
        return acc + tl.reshape(y, acc.shape) * tl.reshape(s, acc.shape)
    else:
        left, right = halves(y)
        s_left, s_right = halves(s)
        return add_in_order(add_in_order(acc, left, s_left), right, s_right)


@jit_kernel
def up_few_kernel(
    x_ptr,  # (T, K)
    w_ptr,  # (G, width, K)
    bias_ptr,  # (G, width), contiguous, or None
    a_ptr,  # (M, N), contiguous
    experts_ptr,  # (M,) the expert of each row, which is written too
    order_ptr,  # (M,)
    group_sizes_ptr,  # (G,)
    M, G, N, K,
    end,  # K again, which the compiler does not know
    top_k,
    x_strides,  # t, k
    w_strides,  # g, n, k
    ACTIVATION: tl.constexpr, UP: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
    BY_ROWS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = UP is not None
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    N, K, x_strides, w_strides = in_units((N, K, x_strides, w_strides), UNIT)
    row, tile_n = tl.program_id(0) % M, tl.program_id(0) // M
    group, _, _ = locate(row, group_sizes_ptr, M, G, BLOCK_G, 1)
    if group >= G:
        return
    if tile_n == 0:
        tl.store(experts_ptr + row, group.to(tl.int32))
    n, column, column_read = tile_columns(tile_n, N, GATED, INTERLEAVED, BLOCK_N)
    token, group = tl.maximum(tl.load(order_ptr + row), 0).to(tl.int64) // top_k, group.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + token * x_strides[0] + (k.to(tl.int64) * x_strides[1])[None, :]
    w_ptrs = w_ptr + group * w_strides[0] + (column_read.to(tl.int64) * w_strides[1])[None, :, None]
    w_ptrs += (k.to(tl.int64) * w_strides[2])[None, None, :]
    z = multiply_rows(x_ptrs, w_ptrs, None, K, end, x_strides[1], w_strides[2], DOT, BY_ROWS, EACH)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + group * (2 * N if GATED else N) + column
        z += tl.load(bias_ptrs, mask=n < N, other=0.0).to(tl.float32)[None, :]
    gate, up = split_gate_up(z, INTERLEAVED) if GATED else (z, None)
    a = ACTIVATION(gate)[0]
    if UP is not None:
        a *= UP(up)[0]
    n = tile_n * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(a_ptr + tl.cast(row, tl.int64) * N + n, a.to(a_ptr.dtype.element_ty), mask=n < N)


@jit_kernel
def down_few_kernel(
    a_ptr,  # (R, K), contiguous
    w_ptr,  # (G, N, K)
    bias_ptr,  # (G, N), contiguous, or None
    s_ptr,  # (T, TOP_K) or None, which are ones
    out_ptr,  # (T, N), contiguous
    rank_ptr,  # (T, TOP_K)
    experts_ptr,  # (R,) the expert of each row
    T, N, K,
    end,  # K again, which the compiler does not know
    w_strides,  # g, n, k
    TOP_K: tl.constexpr, UNIT: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DOT: tl.constexpr, BY_ROWS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    N, K, w_strides = in_units((N, K, w_strides), UNIT)
    t, tile_n = tl.program_id(0) % T, tl.program_id(0) // T
    j, k = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    choice = t * TOP_K + j
    row = tl.load(rank_ptr + choice, mask=j < TOP_K, other=-1).to(tl.int64)
    live = row >= 0
    expert = tl.load(experts_ptr + row, mask=live, other=0).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs = a_ptr + row[:, None] * K + k[None, :]
    w_ptrs = w_ptr + (expert * w_strides[0])[:, None, None]
    w_ptrs += ((n % N).to(tl.int64) * w_strides[1])[None, :, None]
    w_ptrs += (k.to(tl.int64) * w_strides[2])[None, None, :]
    y = multiply_rows(a_ptrs, w_ptrs, live, K, end, 1, w_strides[2], DOT, BY_ROWS, EACH)
    live_columns = live[:, None] & (n < N)[None, :]
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert[:, None] * N + n[None, :]
        y += tl.load(bias_ptrs, mask=live_columns, other=0.0).to(tl.float32)
    s = tl.where(live, 1.0, 0.0)
    if s_ptr is not None:
        s = tl.load(s_ptr + choice, mask=live, other=0.0).to(tl.float32)
    if DOT:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = add_in_order(
            tl.zeros((BLOCK_N,), tl.float32), y.T, tl.broadcast_to(s[None, :], (BLOCK_N, BLOCK_J))
        )
    else:
        out = tl.sum(tl.where(live_columns, y * s[:, None], 0.0), 0)
    tl.store(out_ptr + tl.cast(t, tl.int64) * N + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


# launchers


def takes_few(i: ExpertInputs) -> bool:
    """Whether these kernels compute inputs that need no gradient."""
    (T, k), E = i.rank.shape, i.group_sizes.shape[0]
    by_rows = i.gate_up.stride(2) == 1 == i.down.stride(2)
    few = MOST_TOKENS[by_rows] >= T and k <= MOST_CHOICES and E <= MOST_EXPERTS and i.gate_up.numel() > 0
    few = few and (T == 1 or SHARED * T * k <= E) and i.down.numel() > 0 and forced() != "hopper"
    return few and (not batch_invariant() or (by_rows and adds_as_many(i)))


def adds_as_many(i: ExpertInputs) -> bool:
    """Whether the sums that tensor cores add up here are those of the kernels for many tokens, Hopper's."""
    routing = i.order, i.rank, i.group_sizes, i.activation, i.interleaved
    up = UpInputs(i.x, i.gate_up, i.gate_up_bias, *routing, False, 0, None)
    return hopper.stands_in(hopper.bind_expert_up, up) and bool(hopper.weight_by_tma(i.down))


def tile_of(w: Tensor, tiles: dict[bool, tuple[int, int, int]], experts: int = 1) -> dict:
    """Return the launch arguments of a tile of so many of the matrices of a weight (G, N, K)."""
    by_rows, dot = w.stride(2) == 1, batch_invariant()
    block_n, numbers, warps = (UP_DOT if experts == 1 else DOWN_DOT) if dot else tiles[by_rows]
    block_k, at_once = max(16, numbers // experts), 16 // w.itemsize
    if dot and experts > 1:
        block_k = min(block_k, DEEPEST)
    each = at_once if by_rows else max(1, block_n * block_k // (warps * WARP * at_once))
    tile = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "DOT": dot}
    tile |= {"num_stages": STAGES} if dot else {}
    return tile | {"BY_ROWS": by_rows, "EACH": min(each, block_k)}


def bind_up_few(i: ExpertInputs) -> Callable:
    """Return `launch(a, experts, i)`, for a (R, I) and the expert of each row (R,), int32."""
    act, R, E = get_activation(i.activation), i.order.shape[0], i.group_sizes.shape[0]
    (_, width, K), tile = i.gate_up.shape, tile_of(i.gate_up, UP)
    N = width // act.projections
    functions = hopper.launcher("epilogue", "triton_functions")(act) if tile["DOT"] else act.triton_fns
    kernel = bind_kernel(
        up_few_kernel, (R * cdiv(width, tile["BLOCK_N"]),), **functions, INTERLEAVED=i.interleaved,
        UNIT=unit_of((N, K), i.x.stride(), i.gate_up.stride()), BLOCK_G=next_power_of_2(E), **tile,
    )  # fmt: skip
    numbers = R, E, N, K, K, i.rank.shape[1], i.x.stride(), i.gate_up.stride()

    def launch(a, experts, i):
        bias, order, sizes = dense(i.gate_up_bias, i.order, i.group_sizes)
        kernel(i.x, i.gate_up, bias, a, experts, order, sizes, *numbers)

    return launch


def bind_down_few(i: ExpertInputs) -> Callable:
    """Return `launch(out, a, experts, i)`, with what `bind_up_few` wrote."""
    (T, k), (N, K) = i.rank.shape, i.down.shape[1:]
    tile = tile_of(i.down, DOWN, next_power_of_2(k))
    kernel = bind_kernel(
        down_few_kernel, (T * cdiv(N, tile["BLOCK_N"]),), TOP_K=k, UNIT=unit_of((N, K), i.down.stride()),
        BLOCK_J=next_power_of_2(k), **tile,
    )  # fmt: skip
    numbers = T, N, K, K, i.down.stride()

    def launch(out, a, experts, i):
        bias, s, rank = dense(i.down_bias, weights_of(i.routing_weights), i.rank)
        kernel(a, i.down, bias, s, out, rank, experts, *numbers)

    return launch


def bind_few(i: ExpertInputs) -> Callable:
    """Return `launch(out, i)` for inputs that `takes_few` lets through."""
    up, down, shape = bind_up_few(i), bind_down_few(i), (len(i.order), i.down.shape[2])

    def launch(out, i):
        a, experts = i.x.new_empty(shape), i.order.new_empty(shape[:1], dtype=torch.int32)
        up(a, experts, i)
        down(out, a, experts, i)

    return launch
