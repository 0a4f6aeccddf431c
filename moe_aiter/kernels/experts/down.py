"""The down-projection of the experts and the way home, and the gradient that starts the backward pass.

    y[r]   = down[e] @ a[r] + bias[e]
    out[t] = sum over j of s[t, j] * y[rank[t, j]]

The gradient needs neither a nor y: with u[r] = down[e].T @ dout[t] for row r of token t, whose weight is s,

    ds = <u, f(z)> + <dout, bias>,   dz = s * u * f'(z),   ddown[e] = sum of dout outer s * f(z)

so one kernel gathers dout, multiplies, and writes dz, s * f(z) and ds in its epilogue (as in SonicMoE,
arXiv 2512.14080).  a is given only to spare its computation: the gradient that it would carry goes to z.
Each element of dz is made of the same element of z, and of no other, so dz may take the memory of z.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ... import tuning
from ...op import copy_into, define_op, is_last_use, is_unwatched, takes
from .. import hopper
from ..base.activations import get_activation
from ..base.check import (
    check_float,
    check_groups,
    check_plan_values,
    check_routing_weights,
    check_shape,
    check_size,
    sum_dtype,
    take_rows,
    wide,
)
from ..base.launch import cdiv, jit_kernel, next_power_of_2, tl, triton
from ..base.tile import TILE_DTYPES, dense, halves, locate, multiply, row_tiles, swizzle, tile_options
from ..grouped.gmm import gmm_reference, gmm_unpermute_reference, launch_gmm_unpermute
from ..grouped.tgmm import weight_gradient
from ..rows.sums import bias_dots, group_sum, sum_parts
from .glu import glu_backward_reference, glu_reference

EPILOGUE_N = {False: 32, True: 8}  # interleaved? -> columns of u whose epilogue fits in registers

# reference


def expert_down_reference(a, z, down, bias, routing_weights, order, rank, group_sizes, *_):
    return gmm_unpermute_reference(a, down.mT, group_sizes, bias, order, rank, routing_weights, None)


def expert_down_grad_reference(
    dout, z, down, routing_weights, order, rank, group_sizes, activation, interleaved, need_a
):
    width = sum_dtype(z)
    u = gmm_reference(take_rows(dout, order, rank.shape[1]), down, group_sizes, None).to(width)
    s = take_rows(routing_weights.to(width).flatten(), order, 1)[:, None]
    live = (torch.arange(len(z), device=z.device) < (order >= 0).sum())[:, None]
    z = wide(z)
    dz = glu_backward_reference(s * u, z, activation, interleaved)
    a = glu_reference(z, activation, interleaved).where(live, 0)
    ds = torch.zeros(routing_weights.numel(), dtype=width, device=z.device)
    ds.index_add_(0, order.clamp(min=0).long(), (u * a).sum(1).where(live[:, 0], 0))
    return dz.where(live, 0), (a * s if need_a else a[:0]), ds.view_as(routing_weights)


# kernel


@jit_kernel
def expert_down_grad_kernel(
    dout_ptr,  # (T, K)
    w_ptr,  # (G, K, N)
    z_ptr,  # (M, parts * N), contiguous
    s_ptr,  # (T * top_k,) float32
    dz_ptr,  # (M, parts * N), contiguous
    a_ptr,  # (M, N), contiguous, or None
    ds_ptr,  # (tiles_n, M) float32: the part of each column tile
    order_ptr,  # (M,)
    group_sizes_ptr,  # (G,)
    M,
    N,
    K,
    G,
    top_k,
    tiles_m,
    dout_strides,  # t, k
    w_strides,  # g, k, n
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPILOGUE_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_DIES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dout_stride_t, dout_stride_k = dout_strides
    w_stride_g, w_stride_k, w_stride_n = w_strides
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M, NUM_DIES)
    group, row, row_end = locate(tile_m, group_sizes_ptr, M, G, BLOCK_G, BLOCK_M)
    if group > G:
        return
    m = row + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = (m < row_end) & (group < G)  # rows past the last group become zeros
    choice = tl.maximum(tl.load(order_ptr + m, mask=live, other=0), 0)

    dout_ptrs = (
        dout_ptr + (choice // top_k).to(tl.int64)[:, None] * dout_stride_t + k[None, :] * dout_stride_k
    )
    w_base = w_ptr + tl.minimum(group, G - 1).to(tl.int64) * w_stride_g
    w_ptrs = w_base + k.to(tl.int64)[:, None] * w_stride_k + (n % N).to(tl.int64)[None, :] * w_stride_n
    u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    depth = tl.where(group < G, K, 0)
    u = multiply(u, dout_ptrs, w_ptrs, depth, dout_stride_k, w_stride_k, BLOCK_K, EVEN_K, PRECISION)

    s = tl.load(s_ptr + choice, mask=live, other=0.0)
    ds = down_grad_epilogue(
        u, s, m, row_end, tile_n * BLOCK_N, N, z_ptr, dz_ptr, a_ptr,
        ACTIVATION, UP, INTERLEAVED, EPILOGUE_N,
    )  # fmt: skip
    tl.store(ds_ptr + tile_n.to(tl.int64) * M + m, ds, mask=m < row_end)


@triton.jit
def down_grad_epilogue(
    u,  # (rows, columns) of one tile, or of a part of it
    s,  # (rows,)
    m,  # (rows,)
    row_end,
    first,  # column
    N,
    z_ptr,  # (M, parts * N)
    dz_ptr,  # (M, parts * N)
    a_ptr,  # (M, N) or None
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPILOGUE_N: tl.constexpr,
):
    """Write dz and s * f(z), a few columns at a time to spare registers; return <u, f(z)> of each row.

    dz may lie over z: behind a barrier no thread is left that has yet to read what another overwrites.
    """
    WIDTH: tl.constexpr = u.shape[1]
    if WIDTH > EPILOGUE_N:
        half: tl.constexpr = WIDTH // 2
        left, right = halves(u)
        ds = down_grad_epilogue(
            left, s, m, row_end, first, N, z_ptr, dz_ptr, a_ptr, ACTIVATION, UP, INTERLEAVED, EPILOGUE_N
        )
        return ds + down_grad_epilogue(
            right, s, m, row_end, first + half, N, z_ptr, dz_ptr, a_ptr,
            ACTIVATION, UP, INTERLEAVED, EPILOGUE_N,
        )  # fmt: skip
    else:
        n = first + tl.arange(0, WIDTH)
        mask = (m < row_end)[:, None] & (n < N)[None, :]
        m = m.to(tl.int64)[:, None]
        du = u * s[:, None]
        if UP is not None:
            a = gated_gradient(du, m, row_end, first, N, z_ptr, dz_ptr, ACTIVATION, UP, INTERLEAVED)
        else:
            at = m * N + n[None, :]
            a, slope = ACTIVATION(tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32))
            tl.debug_barrier()
            tl.store(dz_ptr + at, (du * slope).to(dz_ptr.dtype.element_ty), mask=mask)
        if a_ptr is not None:
            tl.store(a_ptr + m * N + n[None, :], (a * s[:, None]).to(a_ptr.dtype.element_ty), mask=mask)
        return tl.sum(tl.where(mask, u * a, 0.0), 1)


@triton.jit
def gated_gradient(
    du,  # (rows, columns)
    m,  # (rows, 1)
    row_end,
    first,  # column
    N,
    z_ptr,  # (M, 2 * N)
    dz_ptr,  # (M, 2 * N)
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write dz, given du = s * u; return f(gate) * h(up)."""
    WIDTH: tl.constexpr = du.shape[1]
    if INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * WIDTH)[None, :]
        mask, at = (m < row_end) & (column < 2 * N), m * (2 * N) + column
        z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()
        gate, up = tl.split(tl.reshape(z, (z.shape[0], WIDTH, 2)))
        value, slope = ACTIVATION(gate)
        up, up_slope = UP(up)
        dz = tl.reshape(tl.join(du * up * slope, du * value * up_slope), z.shape)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    else:
        n = first + tl.arange(0, WIDTH)[None, :]
        mask, at = (m < row_end) & (n < N), m * (2 * N) + n
        gate = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(z_ptr + at + N, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()
        value, slope = ACTIVATION(gate)
        up, up_slope = UP(up)
        tl.store(dz_ptr + at, (du * up * slope).to(dz_ptr.dtype.element_ty), mask=mask)
        tl.store(dz_ptr + at + N, (du * value * up_slope).to(dz_ptr.dtype.element_ty), mask=mask)
    return value * up


# launcher


def new_expert_down(a, z, down, bias, routing_weights, order, rank, group_sizes, *rest):
    check_shape("down", down, "E", "H", "I")
    N, (E, H, w_N) = a.shape[1], down.shape
    check_size("gate_up gives I={}", N, "down is (E, H, I={})", w_N)
    check_float(x=a, down=down)
    check_routing_weights(routing_weights, rank, a)
    check_groups(group_sizes, a, down=down, bias=bias, order=order, rank=rank, main_grad=rest[-1])
    check_size("group_sizes is ({},)", group_sizes.shape[0], "down is (E={}, H, I)", E)
    if bias is not None and bias.shape != (E, H):
        raise ValueError(f"down_bias must be (E={E}, H={H}), but it has shape {tuple(bias.shape)}")
    return a.new_empty(rank.shape[0], H)


@takes(*TILE_DTYPES)
def launch_expert_down(out, a, z, down, bias, routing_weights, order, rank, group_sizes, *rest):
    *_, row_bytes, _ = rest
    launch_gmm_unpermute(out, a, down.mT, group_sizes, bias, order, rank, routing_weights, row_bytes)


def new_expert_down_grad(dout, z, *rest):
    return torch.empty_like(z), *new_beside_dz(dout, z, *rest)


def new_beside_dz(dout, z, down, routing_weights, order, rank, *rest):
    a = dout.new_empty(order.shape[0] if rest[-1] else 0, down.shape[2])
    return a, routing_weights.new_empty(rank.shape, dtype=sum_dtype(z))


@takes(*TILE_DTYPES)
def launch_expert_down_grad(
    out, dout, z, down, routing_weights, order, rank, group_sizes, activation, interleaved, need_a
):
    dz, a, ds = out
    (E, K, N), R, act = down.shape, order.shape[0], get_activation(activation)
    s, order, rank, group_sizes = dense(routing_weights.float(), order, rank, group_sizes)
    config = tuning.lookup("down_grad", dout.dtype, R, N, K, E)
    tiles_m, tiles_n = row_tiles(R, E, config.block_m), cdiv(N, config.block_n)
    parts = torch.empty(tiles_n, R, dtype=torch.float32, device=dout.device)
    expert_down_grad_kernel[(tiles_m * tiles_n,)](
        dout, down, z, s, dz, a if need_a else None, parts, order, group_sizes,
        R, N, K, E, rank.shape[1], tiles_m, dout.stride(), down.stride(),
        **act.triton_fns, INTERLEAVED=interleaved, EPILOGUE_N=EPILOGUE_N[interleaved],
        BLOCK_G=next_power_of_2(E + 1), EVEN_K=K % config.block_k == 0, **tile_options(config),
    )  # fmt: skip
    sum_parts(parts, rank, ds)


def over_z(launch: Callable) -> Callable:
    """The launcher with dz in the place of z."""

    @functools.wraps(launch)  # and what it takes and fits
    def run(out, dout, z, *rest):
        launch((z, *out), dout, z, *rest)

    return run


# op


def save_expert_down(ctx, inputs, output):
    _, *tensors, activation, interleaved, ctx.spend_z, _, main_grad = inputs
    ctx.save_for_backward(*tensors)
    # the main gradient is not saved as a tensor: other backward passes may add to it first
    ctx.rest = activation, interleaved, main_grad


def backward_expert_down(ctx, dout):
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:4]
    spend_z = ctx.spend_z and is_last_use(saved[0])
    return None, *down_gradients(needs, spend_z, dout, saved, *ctx.rest), *[None] * 8


def down_gradients(
    needs, spend_z, dout, saved, activation, interleaved, main_grad, grad=None, of_weight=weight_gradient
) -> tuple:
    """Those of z, down, bias and routing_weights, of the second and third as needed; `grad` in place of the
    op that begins, and `of_weight` of the product for down."""
    z, down, bias, routing_weights, order, rank, group_sizes = saved
    top_k = rank.shape[1]
    grad = grad or (down_grad_over_z if spend_z and is_unwatched(z, dout) else expert_down_grad_op)
    dz, a, ds = grad(
        dout, z, down, routing_weights, order, rank, group_sizes, activation, interleaved, needs[0]
    )
    dw = dbias = None
    if needs[0]:
        dw = of_weight(down, main_grad, dout, a, group_sizes, order, top_k)
    if bias is not None:
        ds = ds + bias_dots(dout, bias, rank, group_sizes)
        if needs[1]:
            s = routing_weights.to(ds.dtype).contiguous()
            dbias = group_sum(dout, group_sizes, order, top_k, s).to(bias.dtype)
    return dz, dw, dbias, ds.to(routing_weights.dtype)


def down_grad_over_z(dout: Tensor, z: Tensor, *rest) -> tuple[Tensor, ...]:
    """dz, s * a and ds as of `expert_down_grad_op`, but dz is in the memory of z."""
    a, ds = expert_down_grad_over_z_op(dout, z, *rest)
    torch.autograd.graph.increment_version(z)  # if anybody had saved z after all, torch would raise
    return z.detach(), a, ds


expert_down_op = define_op(
    "expert_down(Tensor a, Tensor z, Tensor down, Tensor? bias, Tensor routing_weights, Tensor order, "
    "Tensor rank, Tensor group_sizes, str activation, bool interleaved, bool spend_z, "
    "SymInt row_bytes, Tensor? main_grad) -> Tensor",
    new=new_expert_down,
    check_values=lambda a, z, down, bias, routing_weights, order, rank, group_sizes, *_: check_plan_values(
        len(order), group_sizes, order, rank
    ),
    reference=expert_down_reference,
    triton=launch_expert_down,
    backward=backward_expert_down,
    save=save_expert_down,
)
ARGUMENTS = (
    "Tensor down, Tensor routing_weights, Tensor order, Tensor rank, Tensor group_sizes, "
    "str activation, bool interleaved, bool need_a"
)
expert_down_grad_op = define_op(
    f"expert_down_grad(Tensor dout, Tensor z, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    new=new_expert_down_grad,
    reference=expert_down_grad_reference,
    triton=launch_expert_down_grad,
    hopper=hopper.launch_expert_down_grad,
)
expert_down_grad_over_z_op = define_op(
    f"expert_down_grad_over_z(Tensor dout, Tensor(a!) z, {ARGUMENTS}) -> (Tensor, Tensor)",
    new=new_beside_dz,
    torch=over_z(lambda out, *inputs: copy_into(out, expert_down_grad_reference(*inputs))),
    triton=over_z(launch_expert_down_grad),
    hopper=over_z(hopper.launch_expert_down_grad),
)
