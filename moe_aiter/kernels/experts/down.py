"""The down-projection of the experts and the weighted sum of each token's rows, and their gradients.

    y[r]   = down[e] @ a[r] + bias[e]
    out[t] = sum over j of s[t, j] * y[rank[t, j]]

The gradient needs neither a nor y: with u[r] = down[e].T @ dout[t] for row r of token t, whose weight is s,

    ds = <u, f(z)> + <dout, bias>,   dz = s * u * f'(z),   ddown[e] = sum of dout outer s * f(z)

so one kernel gathers dout, multiplies, and writes dz, s * f(z) and ds in its epilogue (as in SonicMoE,
arXiv 2512.14080).  a is an input only to save its computation: backward gives the whole gradient to z.
Each element of dz depends on the same element of z alone, so dz may take the memory of z.
"""

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ... import tuning
from ...invariance import batch_invariant
from ...op import (
    Written,
    binds,
    copy_into,
    define_op,
    extended,
    gradients,
    is_last_use,
    is_unwatched,
    takes,
)
from .. import hopper
from ..base.activations import get_activation
from ..base.check import (
    Extra,
    Float,
    Index,
    Operand,
    check_fields,
    sum_dtype,
    take_rows,
    wide,
)
from ..base.launch import cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.lent import (
    all_weights,
    guest_gradients,
    matrix_of,
    own_part,
    own_sizes,
    unit_with,
)
from ..base.sources import arriving, bind_passes, takes_passes
from ..base.tile import (
    TILE_DTYPES,
    dense,
    halves,
    in_units,
    locate,
    multiply,
    row_tiles,
    swizzle,
    tile_options,
    unit_of,
)
from ..dense.gemm import product_inside
from ..grouped.gmm import (
    GmmUnpermuteInputs,
    GroupedInputs,
    bind_gmm_unpermute,
    gmm_reference,
    gmm_unpermute_reference,
)
from ..grouped.tgmm import add_guest_gradient, weight_gradient
from ..rows.sums import bind_add_partial_sums, group_sum
from .glu import GluBackwardInputs, GluInputs, glu_backward_reference, glu_reference
from .inputs import check_expert_values


class DownInputs(NamedTuple):
    """The inputs of the op `expert_down`: out of the formula above."""

    a: Annotated[Operand, "R, I"]
    z: Annotated[Tensor, "R, width"]  # of which a was made
    down: Annotated[Operand, "E, H, I"]
    bias: Annotated[Extra, "E, H"] | None
    routing_weights: Annotated[Float, "T, k"]
    order: Annotated[Index, "R"]
    rank: Annotated[Index, "T, k"]
    group_sizes: Annotated[Index, "E"]
    activation: str
    interleaved: bool
    spend_z: bool  # whether backward may write dz over z
    row_bytes: int | torch.SymInt  # the most for the rows of y
    main_grad: Tensor | None  # (E, H, I), which the gradient of down is added to
    guests: Tensor | None = None  # (G, H, I): the matrices of further groups, see base/lent.py

    def as_gmm_unpermute(self) -> GmmUnpermuteInputs:
        """Return the inputs of the product and the weighted sum that `expert_down` is."""
        routing = self.order, self.rank, self.routing_weights
        rest = None if self.guests is None else self.guests.mT
        return GmmUnpermuteInputs(
            self.a, self.down.mT, self.group_sizes, self.bias, *routing, self.row_bytes, rest
        )  # fmt: skip


class DownGradInputs(NamedTuple):
    """The inputs of the op `expert_down_grad`: dz, s * f(z) and ds of the formula above."""

    dout: Tensor  # (T, H)
    z: Tensor  # (R, width)
    down: Tensor  # (E, H, I)
    routing_weights: Tensor  # (T, k)
    order: Tensor  # (R,)
    rank: Tensor  # (T, k)
    group_sizes: Tensor  # (E,)
    activation: str
    interleaved: bool
    need_a: bool  # without it s * f(z) has no rows
    guests: Tensor | None = None  # (G, H, I), as for `expert_down`


DownGradOverZInputs = extended("DownGradOverZInputs", DownGradInputs, z=Written)  # z becomes dz


# reference


def expert_down_grad_reference(i: DownGradInputs | DownGradOverZInputs) -> tuple[Tensor, Tensor, Tensor]:
    z, weights, act = wide(i.z), i.routing_weights.to(sum_dtype(i.z)), (i.activation, i.interleaved)
    dout = take_rows(i.dout, i.order, i.rank.shape[1])
    u = wide(gmm_reference(GroupedInputs(dout, all_weights(i.down, i.guests), i.group_sizes, None)))
    s = take_rows(weights.flatten(), i.order, 1)[:, None]
    live = (torch.arange(len(z), device=z.device) < (i.order >= 0).sum())[:, None]
    dz = glu_backward_reference(GluBackwardInputs(s * u, z, *act))
    a = glu_reference(GluInputs(z, *act)).where(live, 0)
    ds = weights.new_zeros(weights.numel())
    ds.index_add_(0, i.order.clamp(min=0).long(), (u * a).sum(1).where(live[:, 0], 0))
    return dz.where(live, 0), (a * s if i.need_a else a[:0]), ds.view_as(weights)


# kernel


@jit_kernel
def expert_down_grad_kernel(
    dout_ptr,  # (T, K)
    w_ptr,  # (own, K, N)
    guests_ptr,  # (G - own, K, N) or None: see `matrix_of`
    z_ptr,  # (M, width), contiguous
    s_ptr,  # (T * top_k,) float32
    dz_ptr,  # (M, width), contiguous
    a_ptr,  # (M, N), contiguous, or None
    ds_ptr,  # (tiles_n, M) float32: the part of each column tile
    order_ptr,  # (M,)
    group_sizes_ptr,  # (G,)
    starts_ptr,  # (G,) or None: see `list_groups`
    counts,  # M, G, and own of the G
    N, K, top_k,
    dout_strides,  # t, k
    w_strides,  # g, k, n, and g of the guests'
    ACTIVATION: tl.constexpr, UP: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,  # parts of z, see `down_grad_epilogue`
):  # fmt: skip
    N, K, dout_strides, w_strides = in_units((N, K, dout_strides, w_strides), UNIT)
    M, G, own = counts
    dout_stride_t, dout_stride_k = dout_strides
    w_stride_g, w_stride_k, w_stride_n, guests_stride = w_strides
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = swizzle(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n, GROUP_M, NUM_DIES)
    group, row, row_end = locate(tile_m, group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, starts_ptr)
    if group >= G:
        return
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = m < row_end
    choice = tl.maximum(tl.load(order_ptr + m, mask=live, other=0), 0)

    dout_ptrs = (
        dout_ptr + (choice // top_k).to(tl.int64)[:, None] * dout_stride_t + k[None, :] * dout_stride_k
    )
    w_base = matrix_of(w_ptr, guests_ptr, group, own, w_stride_g, guests_stride, UNIT)
    w_ptrs = w_base + k.to(tl.int64)[:, None] * w_stride_k + (n % N).to(tl.int64)[None, :] * w_stride_n
    u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    u = multiply(u, dout_ptrs, w_ptrs, K, dout_stride_k, w_stride_k, BLOCK_K, EVEN_K, PRECISION, False, live)

    s = tl.load(s_ptr + choice, mask=live, other=0.0)[:, None]
    MOST: tl.constexpr = 8 if INTERLEAVED else 32  # more channels would not fit in registers
    PART: tl.constexpr = MOST if MOST < BLOCK_N else BLOCK_N
    EACH: tl.constexpr = 2 if INTERLEAVED else 1  # columns of z side by side for a channel
    row, first = m.to(tl.int64)[:, None], tile_n * BLOCK_N
    at = row * ((1 if UP is None else 2) * N) + EACH * first + tl.arange(0, EACH * PART)[None, :]
    a_ptrs = None if a_ptr is None else a_ptr + (row * N + first + tl.arange(0, PART)[None, :])
    z_ptrs, live_rows, left = z_ptr + at, live[:, None], N - first
    z = (load_z(z_ptrs, live_rows, left, N, UP, INTERLEAVED, 0),)
    for channel in tl.static_range(PART, min(AHEAD * PART, BLOCK_N), PART):
        z += (load_z(z_ptrs, live_rows, left, N, UP, INTERLEAVED, channel),)
    ds, _ = down_grad_epilogue(
        u, z, s, live_rows, left, N, z_ptrs, dz_ptr + at, a_ptrs,
        ACTIVATION, UP, INTERLEAVED, PART, BLOCK_N,
    )  # fmt: skip
    tl.store(ds_ptr + tile_n.to(tl.int64) * M + m, ds, mask=live)


@triton.jit
def down_grad_epilogue(
    u,  # (rows, columns) of one tile, or of a part of it
    z,  # the parts from channel FIRST on that are read already, see `load_z`
    s,  # (rows, 1)
    live,  # (rows, 1)
    left,  # channels from the tile's first one on
    N,
    z_ptrs,  # of the tile's first part
    dz_ptrs,
    a_ptrs,  # or None
    ACTIVATION: tl.constexpr, UP: tl.constexpr, INTERLEAVED: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr,  # channels of the tile
    FIRST: tl.constexpr = 0,  # channel of u in the tile
):  # fmt: skip
    """Write dz and s * f(z), PART channels at a time to spare registers.

    Return <u, f(z)> of each row, and the parts of z that follow.  A part is read before earlier ones are
    written: a program that waited for each would spend as long here as on its product.
    dz may lie over z: behind a barrier no thread is left that has yet to read what another overwrites.
    """
    if u.shape[1] > PART:
        HALF: tl.constexpr = u.shape[1] // 2
        u_left, u_right = halves(u)
        ds, z = down_grad_epilogue(
            u_left, z, s, live, left, N, z_ptrs, dz_ptrs, a_ptrs,
            ACTIVATION, UP, INTERLEAVED, PART, TILE, FIRST,
        )  # fmt: skip
        ds_right, z = down_grad_epilogue(
            u_right, z, s, live, left, N, z_ptrs, dz_ptrs, a_ptrs,
            ACTIVATION, UP, INTERLEAVED, PART, TILE, FIRST + HALF,
        )  # fmt: skip
        return ds + ds_right, z
    else:
        following = z[1:]
        if FIRST + len(z) * PART < TILE:
            following += (load_z(z_ptrs, live, left, N, UP, INTERLEAVED, FIRST + len(z) * PART),)
        tl.debug_barrier()
        du = u * s
        if UP is None:
            a, slope = ACTIVATION(z[0][0].to(tl.float32))
            dz = (du * slope,)
        else:
            a, dz = gated_gradient(du, z[0], ACTIVATION, UP, INTERLEAVED)
        for i in tl.static_range(len(dz)):
            mask = in_part(live, left, FIRST, dz[i].shape[1], INTERLEAVED)
            ptrs = dz_ptrs + i * N + FIRST * (2 if INTERLEAVED else 1)
            tl.store(ptrs, dz[i].to(ptrs.dtype.element_ty), mask=mask)
        mask = in_part(live, left, FIRST, PART, False)
        if a_ptrs is not None:
            tl.store(a_ptrs + FIRST, (a * s).to(a_ptrs.dtype.element_ty), mask=mask)
        return tl.sum(tl.where(mask, u * a, 0.0), 1), following


@triton.jit
def in_part(live, left, FIRST: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Whether rows and columns exist, for WIDTH columns from channel FIRST of the tile on."""
    return live & (tl.arange(0, WIDTH) < (left - FIRST) * (2 if INTERLEAVED else 1))[None, :]


@triton.jit
def load_z(z_ptrs, live, left, N, UP: tl.constexpr, INTERLEAVED: tl.constexpr, FIRST: tl.constexpr):
    """The part of z from channel FIRST of the tile on: (gate, up), or in one tensor what has no halves."""
    mask = in_part(live, left, FIRST, z_ptrs.shape[1], INTERLEAVED)
    z = tl.load(z_ptrs + FIRST * (2 if INTERLEAVED else 1), mask=mask, other=0.0)
    if UP is None or INTERLEAVED:
        return (z,)
    else:
        return z, tl.load(z_ptrs + N + FIRST, mask=mask, other=0.0)


@triton.jit
def gated_gradient(du, z, ACTIVATION: tl.constexpr, UP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """f(gate) * h(up), and dz in the form of z, given du = s * u."""
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(z[0].to(tl.float32), (du.shape[0], du.shape[1], 2)))
    else:
        gate, up = z[0].to(tl.float32), z[1].to(tl.float32)
    value, slope = ACTIVATION(gate)
    up, up_slope = UP(up)
    dgate, dup = du * up * slope, du * value * up_slope
    if INTERLEAVED:
        return value * up, (tl.reshape(tl.join(dgate, dup), z[0].shape),)
    else:
        return value * up, (dgate, dup)


# launcher


def new_expert_down(i: DownInputs) -> Tensor:
    size = check_fields(own_part(i, "down", "group_sizes", "bias"))
    return i.a.new_empty(size["T"], size["H"])


@binds
@takes(*TILE_DTYPES)
@takes_passes
def bind_expert_down(i: DownInputs) -> Callable:
    launch = bind_gmm_unpermute(i.as_gmm_unpermute())
    return lambda out, i: launch(out, i.as_gmm_unpermute())


def new_expert_down_grad(i: DownGradInputs) -> tuple[Tensor, ...]:
    return torch.empty_like(i.z), *new_beside_dz(i)


def new_beside_dz(i: DownGradInputs | DownGradOverZInputs) -> tuple[Tensor, Tensor]:
    a = i.z.new_empty(i.order.shape[0] if i.need_a else 0, i.down.shape[2])
    return a, i.routing_weights.new_empty(i.rank.shape, dtype=sum_dtype(i.z))


@binds
@takes(*TILE_DTYPES)
def bind_expert_down_grad(i: DownGradInputs) -> Callable:
    (own, K, N), R, act = i.down.shape, i.order.shape[0], get_activation(i.activation)
    unit = unit_of((N, K), i.dout.stride(), i.down.stride())
    E, (unit, guests_stride) = i.group_sizes.shape[0], unit_with(unit, i.down, i.guests)
    config = tuning.lookup("down_grad", i.dout.dtype, R, N, K, E)
    tiles_m, tiles_n = row_tiles(R, E, config.block_m), cdiv(N, config.block_n)
    interleaved = act.gated and i.interleaved
    # registers have room for more parts where f is SwiGLU's and parts are narrow
    ahead = 3 if interleaved and act.base.startswith("silu") else 1
    launch_for = bind_passes(
        expert_down_grad_kernel, (tiles_m * tiles_n,),
        **act.triton_fns, INTERLEAVED=interleaved, AHEAD=ahead,
        UNIT=unit, BLOCK_G=next_power_of_2(E) or 1, EVEN_K=K % config.block_k == 0, **tile_options(config),
    )  # fmt: skip
    w_strides = *i.down.stride(), guests_stride
    numbers = (R, E, own), N, K, i.rank.shape[1], i.dout.stride(), w_strides
    sum_columns, need_a = bind_add_partial_sums(tiles_n, R, i.rank.numel()), i.need_a

    def launch(out, i):
        dz, a, ds = out
        s, order, rank = dense(i.routing_weights.float(), i.order, i.rank)
        partial_sums = torch.empty(tiles_n, R, dtype=torch.float32, device=dz.device)
        a = a if need_a else None
        tensors = i.dout, i.down, i.guests, i.z, s, dz, a, partial_sums, order
        for group_sizes, starts in arriving(i.group_sizes):
            launch_for(starts)(*tensors, group_sizes, starts, *numbers)
        sum_columns(partial_sums, rank, ds)

    return launch


def over_z(bind: Callable) -> Callable:
    """Return the implementation of `expert_down_grad_over_z` that uses the kernel of `expert_down_grad`."""

    def bind_over_z(i: DownGradOverZInputs) -> Callable:
        launch = bind(i)
        return lambda out, i: launch((i.z, *out), i)

    functools.update_wrapper(bind_over_z, bind)  # and what it takes and fits
    return bind_over_z


# op


def save_expert_down(ctx, i: DownInputs, output):
    ctx.save_for_backward(i.z, i.down, i.bias, i.routing_weights, i.order, i.rank, i.group_sizes, i.guests)
    # the main gradient is not saved as a tensor: other backward passes may add to it first
    ctx.spend_z, ctx.rest = i.spend_z, (i.activation, i.interleaved, i.main_grad)


def backward_expert_down(ctx, dout):
    (*saved, guests), needs = ctx.saved_tensors, DownInputs(*ctx.needs_input_grad)
    spend_z = ctx.spend_z and is_last_use(saved[0])
    computed = down_gradients((needs.down, needs.bias), spend_z, dout, saved, *ctx.rest, guests=guests)
    return gradients(DownInputs, **dict(zip(("z", "down", "bias", "routing_weights"), computed, strict=True)))


def down_gradients(
    needs, spend_z, dout, saved, activation, interleaved, main_grad, grad=None, of_weight=weight_gradient,
    guests=None,
) -> tuple:  # fmt: skip
    """Return the gradients of z, down, bias and routing_weights; those of down and bias if `needs` says so.

    `grad` replaces the op for dz, s * f(z) and ds, and `of_weight` the product for down.
    """
    z, down, bias, routing_weights, order, rank, group_sizes = saved
    z = z.contiguous()  # as it was saved: a program's hooks for saved tensors may return other strides
    top_k = rank.shape[1]
    inputs = dout, z, down, routing_weights, order, rank, group_sizes, activation, interleaved, needs[0]
    if grad is not None:
        dz, a, ds = grad(*inputs)
    elif spend_z and is_unwatched(z, dout):
        dz, a, ds = down_grad_over_z(*inputs, guests)
    else:
        dz, a, ds = expert_down_grad_op(*inputs, guests)
    dw = dbias = None
    if needs[0]:
        sizes = own_sizes(group_sizes, down, guests)
        dw = of_weight(down, main_grad, dout, a, sizes, order, top_k)
        if guests is not None:
            add_guest_gradient(guest_gradients.get()[1], dout, a, group_sizes, order, top_k)
    if bias is not None:
        ds = ds + bias_dots(dout, bias, rank, group_sizes)
        if needs[1]:
            s = routing_weights.to(ds.dtype).contiguous()
            dbias = group_sum(dout, group_sizes, order, top_k, s).to(bias.dtype)
    return dz, dw, dbias, ds.to(routing_weights.dtype)


def bias_dots(dout: Tensor, bias: Tensor, rank: Tensor, group_sizes: Tensor) -> Tensor:
    """<dout, bias> of each choice (T, k), 0 for a dropped one: of every expert, then of the chosen ones.

    E products a token instead of k rows gathered.  Products of 16 bits are exact, and their sums float32.
    """
    expert = torch.searchsorted(group_sizes.cumsum(0), rank.long(), right=True).clamp(max=len(bias) - 1)
    dtype = sum_dtype(dout)
    if bias.dtype == dtype != dout.dtype and batch_invariant():
        # beside guests, a bias of 16 bits is wide: then the first product has all of it, and its bits
        most = torch.finfo(dout.dtype).max
        near = bias.clamp(-most, most).to(dout.dtype)
        rest = bias - near.to(dtype)
        dots = product_inside(dout, near.T, dtype) + product_inside(dout.to(dtype), rest.T, dtype)
    else:
        dout, bias = (dout, bias) if dout.dtype == bias.dtype else (dout.to(dtype), bias.to(dtype))
        dots = product_inside(dout, bias.T, dtype)
    return dots.gather(1, expert).masked_fill(rank < 0, 0)


def down_grad_over_z(dout: Tensor, z: Tensor, *rest) -> tuple[Tensor, ...]:
    """Return dz, s * f(z) and ds as `expert_down_grad_op` does, but write dz over z."""
    beside = expert_down_grad_over_z_op(dout, z, *rest)
    return z.detach(), *beside


expert_down_op = define_op(
    "expert_down", DownInputs, new=new_expert_down,
    check_values=check_expert_values, reference=lambda i: gmm_unpermute_reference(i.as_gmm_unpermute()),
    triton=bind_expert_down, backward=backward_expert_down, save=save_expert_down,
)  # fmt: skip
expert_down_grad_op = define_op(
    "expert_down_grad", DownGradInputs, outputs=3, new=new_expert_down_grad,
    reference=expert_down_grad_reference, triton=bind_expert_down_grad, hopper=hopper.bind_expert_down_grad,
)  # fmt: skip
expert_down_grad_over_z_op = define_op(
    "expert_down_grad_over_z", DownGradOverZInputs, outputs=2, new=new_beside_dz,
    torch=lambda out, i: copy_into((i.z, *out), expert_down_grad_reference(i)),
    triton=over_z(bind_expert_down_grad), hopper=over_z(hopper.bind_expert_down_grad),
)  # fmt: skip
