"""The up-projection of the experts, which gathers its rows and applies the activation.

    z[r] = gate_up[e] @ x[order[r] // top_k] + bias[e]
    a[r] = f(gate of z[r]) * h(up of z[r])                or f(z[r]) for a plain activation

for each row r of each expert e; rows of no expert are not written.  Only x, z and the routing are kept for
the backward pass:

    dx         each token's rows of dz @ gate_up[e], summed
    dgate_up   dz[s:e].T @ the rows of x, for each expert's rows [s, e)
    dbias      dz[s:e].sum(0)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ...op import binds, define_op, extended, gradients, saved_tensors, takes
from .. import hopper
from ..base.activations import get_activation
from ..base.check import Extra, Index, Operand, check_fields, take_rows
from ..base.launch import cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.lent import (
    all_weights,
    guest_gradients,
    matrix_of,
    own_part,
    own_sizes,
    unit_with,
)
from ..base.sources import arrived, arriving, bind_passes, late, launch_passes, takes_passes
from ..base.tile import (
    TILE_DTYPES,
    at_least_16,
    boxes_of,
    halves,
    in_units,
    is_transposed,
    locate,
    multiply,
    row_tiles,
    swizzle,
    tile_options,
    unit_of,
    with_boxes,
)
from ..grouped.gmm import GroupedInputs, gmm_reference, gmm_unpermute_op
from ..grouped.tgmm import add_guest_gradient, weight_gradient
from ..rows.sums import group_sum
from .inputs import check_expert_values

EPILOGUE_N = tl.constexpr(32)  # columns whose activation fits in registers beside the rest


class UpInputs(NamedTuple):
    """The inputs of the op `expert_up`: z and a of the formula above."""

    x: Annotated[Operand, "T, H"]
    gate_up: Annotated[Operand, "E, width, H"]  # width of 2I or I
    bias: Annotated[Extra, "E, width"] | None
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    group_sizes: Annotated[Index, "E"]
    activation: str
    interleaved: bool
    save_z: bool  # without it z has no rows
    row_bytes: int | torch.SymInt  # the most for the rows of dx
    main_grad: Annotated[Tensor, "E, width, H"] | None  # which the gradient of gate_up is added to
    guests: Tensor | None = None  # (G, width, H): the matrices of further groups, see base/lent.py


# those of `expert_up`, of which z alone is computed
ZInputs = extended("ZInputs", UpInputs, save_z=None, row_bytes=None, main_grad=None)


# reference


def expert_up_reference(i: UpInputs) -> tuple[Tensor, Tensor]:
    z = expert_z_reference(i)
    return (z if i.save_z else z[:0]), get_activation(i.activation)(z, i.interleaved)


def expert_z_reference(i: UpInputs | ZInputs) -> Tensor:
    rows = take_rows(i.x, i.order, i.rank.shape[1])
    w = all_weights(i.gate_up, i.guests)
    return gmm_reference(GroupedInputs(rows, w.mT, i.group_sizes, i.bias))


# kernel


@jit_kernel
def expert_up_kernel(
    x_ptr,  # (T, K)
    w_ptr,  # (own, width, K), or its descriptor where there are BOXES
    guests_ptr,  # (G - own, width, K) or None: see `matrix_of`
    bias_ptr,  # (G, width), contiguous, or None
    z_ptr,  # (M, width), contiguous, or None
    a_ptr,  # (M, N), contiguous, or None
    order_ptr,  # (M,)
    group_sizes_ptr,  # (G,)
    starts_ptr,  # (G,) or None: see `list_groups`
    counts,  # M, G, and own of the G
    N, K, top_k,
    x_strides,  # t, k
    w_strides,  # g, n, k, and g of the guests'
    ACTIVATION: tl.constexpr, UP: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr, BOXES: tl.constexpr,
    BIAS_LAST: tl.constexpr,  # as Hopper's kernel adds it
):  # fmt: skip
    GATED: tl.constexpr = UP is not None
    # a tile has BLOCK_N columns of z: as many of a, or half gate and half up
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    N, K, x_strides, w_strides = in_units((N, K, x_strides, w_strides), UNIT)
    M, G, own = counts
    x_stride_t, x_stride_k = x_strides
    w_stride_g, w_stride_n, w_stride_k, guests_stride = w_strides
    tiles_n = tl.cdiv(N, WIDTH)
    tile_m, tile_n = swizzle(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n, GROUP_M, NUM_DIES)
    group, row, row_end = locate(tile_m, group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, starts_ptr)
    if group >= G:
        return
    m = row + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n, column, column_read = tile_columns(tile_n, N, GATED, INTERLEAVED, BLOCK_N)

    live = m < row_end
    token = tl.maximum(tl.load(order_ptr + m, mask=live, other=0), 0) // top_k
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride_t + k[None, :] * x_stride_k
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + group.to(tl.int64) * (2 * N if GATED else N) + column
        bias = tl.load(bias_ptrs, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if not BIAS_LAST:  # the epilogue of a large tile has no registers to spare
            z += bias
    first = tile_n * (WIDTH if BOXES == "pairs" else BLOCK_N)
    if BOXES is not None:
        w_ptrs = w_ptr
    else:
        w_base = matrix_of(w_ptr, guests_ptr, group, own, w_stride_g, guests_stride, UNIT)
        w_ptrs = w_base + column_read.to(tl.int64)[None, :] * w_stride_n + k[:, None] * w_stride_k
    z = multiply(
        z, x_ptrs, w_ptrs, K, x_stride_k, w_stride_k, BLOCK_K, EVEN_K, PRECISION, TRANSPOSED, live,
        BOXES, group.to(tl.int32), first,
    )  # fmt: skip
    if bias_ptr is not None and BIAS_LAST:
        z += bias

    m, row_mask = m.to(tl.int64)[:, None], live[:, None]
    if z_ptr is not None:
        z_ptrs = z_ptr + m * (2 * N if GATED else N) + column[None, :]
        tl.store(z_ptrs, z.to(z_ptr.dtype.element_ty), mask=row_mask & (n < N)[None, :])
    if a_ptr is not None:
        gate, up = split_gate_up(z, INTERLEAVED) if GATED else (z, None)
        store_activation(gate, up, m, row_mask, tile_n * WIDTH, N, a_ptr, ACTIVATION, UP)


@triton.jit
def store_activation(gate, up, m, row_mask, first, N, a_ptr, ACTIVATION: tl.constexpr, UP: tl.constexpr):
    """Write f(gate) * h(up), or f(gate) without an up, a few columns at a time to spare registers."""
    WIDTH: tl.constexpr = gate.shape[1]
    if WIDTH > EPILOGUE_N:
        half: tl.constexpr = WIDTH // 2
        left, right = halves(gate)
        up_left, up_right = (None, None) if up is None else halves(up)
        store_activation(left, up_left, m, row_mask, first, N, a_ptr, ACTIVATION, UP)
        store_activation(right, up_right, m, row_mask, first + half, N, a_ptr, ACTIVATION, UP)
    else:
        n = first + tl.arange(0, WIDTH)
        a = ACTIVATION(gate)[0]
        if UP is not None:
            a *= UP(up)[0]
        tl.store(a_ptr + m * N + n[None, :], a.to(a_ptr.dtype.element_ty), mask=row_mask & (n < N)[None, :])


@triton.jit
def tile_columns(tile_n, N, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The channel and the column of z for each of a tile's BLOCK_N columns, and a column of z that exists.

    The last is read.  The compiler sees that such columns lie side by side.
    """
    j = tl.arange(0, BLOCK_N)
    if not GATED or INTERLEAVED:
        column = tile_n * BLOCK_N + j
        return column // 2 if GATED else column, column, column % (2 * N if GATED else N)
    half: tl.constexpr = BLOCK_N // 2
    n = tile_n * half + j % half
    column = n + j // half * N
    return n, column, tl.where(n < N, column, j % N)


@triton.jit
def split_gate_up(z, INTERLEAVED: tl.constexpr):
    """Gate and up of a tile of z whose columns are those of `tile_columns`."""
    if INTERLEAVED:
        return tl.split(tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2)))
    return halves(z)


# launcher


def new_expert_up(i: UpInputs) -> tuple[Tensor, Tensor]:
    size = check_fields(own_part(i, "gate_up", "group_sizes", "bias"))
    projections = get_activation(i.activation).projections
    R, width = size["R"], size["width"]
    if width % projections:
        raise ValueError(f"gate_up is (E, {width}, H), but {i.activation} needs a multiple of {projections}")
    return i.x.new_empty(R if i.save_z else 0, width), i.x.new_empty(R, width // projections)


@binds
@takes(*TILE_DTYPES)
@takes_passes
def bind_expert_up(i: UpInputs, write_a: bool = True) -> Callable:
    (own, width, K), R, act = i.gate_up.shape, i.order.shape[0], get_activation(i.activation)
    E = i.group_sizes.shape[0]
    N, write_z = width // act.projections, i.save_z
    config = tuning.lookup("up", i.x.dtype, R, width, K, E)
    if not act.gated:  # an adapter's rank is less than a tile
        config = dataclasses.replace(config, block_n=min(config.block_n, at_least_16(N)))
    tiles_m = row_tiles(R, E, config.block_m)
    tiles_n = cdiv(N, config.block_n // act.projections)
    unit = unit_of((N, K), i.x.stride(), i.gate_up.stride())
    unit, guests_stride = unit_with(unit, i.gate_up, i.guests)
    transposed = is_transposed(config, i.x)
    plain = i.guests is None and not transposed
    kind = boxes_of(i.gate_up, unit, act.gated and not i.interleaved) if plain else None
    as_hopper = hopper.stands_in(hopper.bind_expert_up, i)
    functions = hopper.launcher("epilogue", "triton_functions")(act) if as_hopper else act.triton_fns
    launch_for = bind_passes(
        expert_up_kernel, (tiles_m * tiles_n,), **functions, INTERLEAVED=i.interleaved, UNIT=unit,
        BLOCK_G=next_power_of_2(E) or 1, EVEN_K=K % config.block_k == 0, BIAS_LAST=as_hopper,
        TRANSPOSED=transposed, BOXES=kind, **tile_options(config),
    )  # fmt: skip
    sizes = (R, E, own), N, K, i.rank.shape[1]
    strides = i.x.stride(), (*i.gate_up.stride(), guests_stride)

    def launch(out, i):
        z, a = out[0] if write_z else None, out[1] if write_a else None
        w, bias = with_boxes(i.gate_up, kind, config), None if i.bias is None else i.bias.contiguous()
        tensors = i.x, w, i.guests, bias, z, a, i.order.contiguous()
        launch_passes(
            launch_for(starts)(*tensors, group_sizes, starts, *sizes, *strides)
            for group_sizes, starts in arriving(i.group_sizes)
        )

    return launch


def z_alone(bind: Callable) -> Callable:
    """Return the implementation of `expert_z` that uses the kernel of `expert_up`, without a."""

    def bind_z(i: ZInputs) -> Callable:
        *inputs, guests = i
        launch = bind(UpInputs(*inputs, True, 0, None, guests), write_a=False)
        return lambda z, i: launch((z, None), i)

    functools.update_wrapper(bind_z, bind)  # and what it takes and fits
    return bind_z


# op


def save_expert_up(ctx, i: UpInputs, output):
    ctx.x_shape = i.x.shape
    x = i.x if ctx.needs_input_grad[1] else None
    ctx.save_for_backward(x, i.gate_up, i.guests, i.order, i.rank, i.group_sizes)
    # the main gradient is not saved as a tensor: other backward passes may add to it first
    ctx.rest = None if i.bias is None else i.bias.dtype, i.row_bytes, i.main_grad
    ctx.set_materialize_grads(False)


def backward_expert_up(ctx, dz, da):
    # da is always None: expert_down gives the whole gradient to z
    with late():
        x, gate_up, guests, *routing = saved_tensors(ctx)
    needs = ctx.needs_input_grad[:3]
    dx, dw, dbias = up_gradients(needs, dz, x, gate_up, *routing, *ctx.rest, guests=guests)
    return gradients(UpInputs, x=dx, gate_up=dw, bias=dbias)


def add_to_gate_up(x: Tensor, dz: Tensor, group_sizes: Tensor, order: Tensor, top_k: int) -> None:
    """Add the gradient of the guests' gate_up to that which travels home."""
    to, _ = guest_gradients.get()
    add_guest_gradient(None if to is None else to.mT, x, dz, group_sizes, order, top_k)


def up_gradients(
    needs, dz, x, gate_up, order, rank, group_sizes, bias_dtype, row_bytes, main_grad,
    of_weight=weight_gradient, guests=None,
) -> tuple:  # fmt: skip
    """Return the gradients of x, gate_up and bias, as `needs` says; the largest is computed last.

    `of_weight` is the product for gate_up, and with that for the `guests` the only one that reads x, which
    may still be on its way.
    """
    dx = dw = dbias = None
    if needs[0]:
        dx = gmm_unpermute_op(dz, gate_up, group_sizes, None, order, rank, None, row_bytes, guests)
    if needs[2]:
        dbias = group_sum(dz, group_sizes).to(bias_dtype)
    if needs[1]:
        main_grad = None if main_grad is None else main_grad.mT
        x, plan = arrived(x), (order, rank.shape[1])
        dw = of_weight(gate_up.mT, main_grad, x, dz, own_sizes(group_sizes, gate_up, guests), *plan)
        dw = None if dw is None else dw.mT
        if guests is not None:
            add_to_gate_up(x, dz, group_sizes, *plan)
    return dx, dw, dbias


expert_up_op = define_op(
    "expert_up", UpInputs, outputs=2, new=new_expert_up,
    check_values=check_expert_values,
    reference=expert_up_reference, triton=bind_expert_up, hopper=hopper.bind_expert_up,
    backward=backward_expert_up, save=save_expert_up,
)  # fmt: skip
expert_z_op = define_op(
    "expert_z", ZInputs, new=lambda i: i.x.new_empty(i.order.shape[0], i.gate_up.shape[1]),
    reference=expert_z_reference, triton=z_alone(bind_expert_up), hopper=z_alone(hopper.bind_expert_up),
)  # fmt: skip
