"""Gluon kernels for Hopper (sm_90) of ops of other wings; all but those of few rows are warp-specialised.

Each kernel has the meaning and the schema of its op in another wing, and `op.pick` chooses the kernel where
the GPU and the inputs allow it.  Gluon is imported when the first of them runs.

Needed everywhere: a Hopper GPU; bfloat16 or float16, or for products with scales 8 bits; numbers side by side
along one axis, as TMA copies them, in whole units of 16 bytes.
"""

import functools
import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import tuning
from ...op import binds
from ..base.activations import get_activation
from ..base.choice import FEW, should_use_gemm, should_use_scaled
from ..base.fp8 import MOST_K, OCP

DTYPES = (torch.bfloat16, torch.float16)
BYTES = (torch.int8, *OCP)
PROMOTED_K = 256  # of 8-bit floats, gathered: a whole number of the sums that float32 adds up
MAX_GROUPS = 1024  # that a program lists in shared memory
MANY = 128  # rows of a group that a tile is for


class No(str):
    """The reason why inputs are refused: falsy, so that `a and b` is the first reason there is.

    A predicate is a conjunction; a condition of it that can say why it is false ends in `or No("...")`.
    """

    def __bool__(self) -> bool:
        return False


@functools.cache
def is_hopper(device: torch.device) -> bool:
    on_nvidia = device.type == "cuda" and torch.version.hip is None
    return on_nvidia and torch.cuda.get_device_capability(device) == (9, 0)


def implementation(module: str, name: str, fits: Callable, takes: tuple = DTYPES) -> Callable:
    """Return the function of that name, imported at its first use, for the inputs that `fits`.

    A function whose name begins with `bind_` has two stages.
    """

    def run(*inputs, **options):
        return launcher(module, name)(*inputs, **options)

    if name.startswith("bind_"):
        binds(run)
    run.takes = takes
    run.fits = lambda x, *rest: is_hopper(x.device) and fits(x, *rest)
    run.fits_on_hopper = fits
    return run


@functools.cache
def launcher(module: str, name: str) -> Callable:
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def by_tma(*tensors: Tensor) -> bool | No:
    """Whether there is something to copy, with columns in a row, and where TMA can address it."""
    for x in tensors:
        whole = 16 // x.itemsize
        if not x.numel():
            return No("there are no rows")
        if x.stride(-1) != 1:
            return No(f"columns of {named(x)} do not lie in a row")
        if x.stride(-2) == 0:  # NVIDIA does not say whether TMA takes it
            return No(f"rows of {named(x)} lie over each other")
        if x.stride(-2) % whole or x.shape[-1] % whole or x.data_ptr() % 16:
            return No(f"rows of {named(x)} are no multiples of 16 bytes")
    return True


def named(x: Tensor) -> str:
    return f"({', '.join(map(str, x.shape))})"


def in_eights(size: int, name: str) -> bool | No:
    """Whether `size`, which reasons call `name`, is a multiple of 8."""
    return size % 8 == 0 or No(f"{name} = {size} is no multiple of 8")


def small(x: Tensor) -> bool | No:
    """Whether 32 bits hold every offset in x; those of gathered rows have no more."""
    return x.shape[0] * x.stride(0) < 2**31 or No(f"{named(x)} has 2^31 numbers or more")


def few(w: Tensor) -> bool | No:
    """Whether w (G, A, B) has elements, and a program has room for its groups."""
    many = w.shape[0] <= MAX_GROUPS or No(f"there are more than {MAX_GROUPS} experts")
    return many and (w.numel() > 0 or No("there are no weights"))


def weight_by_tma(w: Tensor) -> bool | No:
    """Whether TMA can address the matrices of w (G, A, B), by rows or by columns."""
    w = w if w.stride(2) == 1 else w.mT
    aligned = w.shape[0] == 1 or (w.stride(0) > 0 and w.stride(0) % (16 // w.itemsize) == 0)
    apart = aligned and w.stride(1) >= w.shape[2]
    return few(w) and by_tma(w) and (apart or No(f"rows of {named(w)} overlap, or matrices are not aligned"))


def stacked(w: Tensor) -> bool | No:
    """Whether the matrices of w (G, A, B) are blocks of one matrix: some of its columns, whole rows apart."""
    group, row, _ = w.stride()
    blocks = row >= w.shape[2] and (group % row == 0 or w.shape[0] == 1)
    return blocks or No(f"matrices of {named(w)} are no blocks of one matrix")


def short(w: Tensor) -> bool:
    """Whether the matrices of w (G, A, B), which are `stacked`, have fewer rows than `ragged` can count."""
    return w.shape[0] * max(w.shape[1], w.stride(0) // w.stride(1)) < 2**30


def should_use_grouped(op: str, x: Tensor, rows: int, w: Tensor) -> bool:
    """Whether no table has a faster tile of the portable kernel of `op` for rows times w (G, K, N)."""
    G, K, N = w.shape
    return not tuning.prefers_portable(op, x.dtype, rows, N, K, G)


def fits_gmm(
    x: Tensor, w: Tensor, group_sizes: Tensor, bias: Tensor | None,
    dtype: torch.dtype | None = None, tile: Sequence[int] = (), programs: int = 0,
) -> bool:  # fmt: skip
    fit = by_tma(x) and weight_by_tma(w) and in_eights(w.shape[2], "N")
    return fit and dtype in (None, x.dtype) and not tile


def fits_gmm_into(x, w, group_sizes, bias, tile, programs, starts, out) -> bool:
    return fits_gmm(x, w, group_sizes, bias, out.dtype, tile) and by_tma(out)


def fits_segments(x: Tensor, w: Tensor, segments: int) -> bool:
    return fits_gmm(x, w, None, None) and segments <= MAX_GROUPS


def fits_expert_up(x, gate_up, bias, order, rank, group_sizes, activation, interleaved, *_) -> bool:
    N = gate_up.shape[1] // get_activation(activation).projections
    fit = by_tma(x) and weight_by_tma(gate_up) and small(x)
    return fit and order.numel() > 0 and in_eights(N, "I")


def fits_down_grad(
    dout, z, down, routing_weights, order, rank, group_sizes, activation, interleaved, _
) -> bool:
    fit = by_tma(dout, z) and weight_by_tma(down) and small(dout)
    return fit and in_eights(down.shape[2], "I")


def fits_up_fp8(x8, x_scale, w8, w_scale, bias, order, rank, group_sizes, activation, *rest) -> bool:
    N, dtype = w8.shape[1] // get_activation(activation).projections, rest[-1]
    fit = is_hopper(x8.device) and dtype in DTYPES and few(w8) and order.numel() > 0 and x8.numel() < 2**31
    return fit and x8.shape[1] % PROMOTED_K == 0 and N % 64 == 0


def fits_gmm_unpermute_fp8(x8, x_scale, w8, *rest) -> bool:
    (_, N, K), dtype = w8.shape, rest[-1]
    fit = is_hopper(x8.device) and dtype in DTYPES and few(w8)
    return fit and x8.shape[0] > 0 and K % 16 == 0 and N % 8 == 0


def fits_down_grad_fp8(dout8, dout_scale, z, w8, *_) -> bool:
    _, N, K = w8.shape
    fit = is_hopper(z.device) and z.dtype in DTYPES and few(w8) and by_tma(z) and dout8.numel() < 2**31
    return fit and K % PROMOTED_K == 0 and N % 64 == 0


def fits_tgmm(x: Tensor, y: Tensor, group_sizes: Tensor, order: Tensor | None, *_) -> bool:
    return by_tma(x, y) and (order is None or small(x))


def fits_tgmm_into(
    x, y, group_sizes, order, top_k, accumulate, sums, sums_of_y, tile, programs, out
) -> bool:  # fmt: skip
    plain = out.dtype == x.dtype and (by_tma(out) or by_tma(out.mT)) and out.stride(0) % 8 == 0
    return fits_tgmm(x, y, group_sizes, order) and not tile and (accumulate or plain)


def fits_tgmm_fp8(x8, factor, y8, y_scale, spans, row_blocks, dtype, group_sizes, order, *_) -> bool:
    (C, N, _), K = y8.shape, x8.shape[1]
    fit = is_hopper(x8.device) and dtype in DTYPES and min(x8.numel(), order.numel() * N) > 0
    return fit and K % 16 == 0 and N % 16 == 0 and C * max(K, N) < 2**31


def fits_masked_gmm(x, w, group_sizes, x_scale, w_scale, shuffled, out) -> bool:
    near = all(s is None or s.shape[1] * s.stride(1) < 2**31 for s in (x_scale, w_scale))
    fit = not shuffled and near and w.dtype in (OCP if x.dtype in OCP else DTYPES)
    fit = fit and x.shape[1] >= MANY and weight_by_tma(w) and w.stride(2) == 1
    return fit and all(by_tma(t) and stacked(t) and short(t) for t in (x, out))


def fits_few_rows(x: Tensor, w: Tensor) -> bool:
    """x (B, M, K) and w (B, N, K) for any N, whose rows are read 16 bytes at a time, and nothing by TMA."""
    return by_tma(x, w) and all(t.shape[0] == 1 or t.stride(0) % 8 == 0 for t in (x, w))


def fits_gemm(x, w, bias, c, activation, alpha, beta, dtype, save_z) -> bool:
    rows = w.stride(2) != 1
    w = w.mT if rows else w
    if rows and x.shape[1] <= FEW:
        return dtype in (None, x.dtype) and fits_few_rows(x, w)
    fit = by_tma(x) and stacked(x) and short(x) and weight_by_tma(w) and dtype in (None, x.dtype)
    return fit and w.shape[1 + (not rows)] % 8 == 0


def fits_scaled_gemm(x, w, x_scale, w_scale, bias, dtype) -> bool:
    x, w, whole = x[None], w.mT[None], w.shape[1] * dtype.itemsize % 16 == 0
    fit = whole and x.shape[1] >= MANY and multiplies(x, w)
    return fit and by_tma(x) and stacked(x) and short(x) and weight_by_tma(w) and w.stride(2) == 1


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Whether sums along the last axis are exact of int8, or of 8-bit floats that the GPU knows."""
    return x.shape[-1] <= MOST_K if x.dtype == torch.int8 else {x.dtype, w.dtype} <= set(OCP)


def fits_scaled_gmm(x, w, group_sizes, x_scale, w_scale, bias, order, top_k, dtype) -> bool:
    M, w = x.shape[0] if order is None else order.shape[0], w.mT
    fit = M >= MANY and dtype in DTYPES and w.shape[1] % 8 == 0 and multiplies(x, w)
    # the sums of 8-bit floats leave no registers for other cases
    fit = fit and (x.dtype == torch.int8 or (x_scale is not None and w_scale is not None))
    return fit and by_tma(x) and weight_by_tma(w) and w.stride(2) == 1


def fits_four_bit_gmm(
    x, packed, scales, nested, offset, table, format, transpose, group_sizes, bias, order, top_k
) -> bool:
    M, K, N = x.shape[0] if order is None else order.shape[0], x.shape[1], packed.shape[1]
    fit = by_tma(x) and small(x) and few(packed) and M >= MANY and packed.data_ptr() % 16 == 0
    # where packed rows are columns, a part of a block would meet the next group's
    return fit and K % 64 == 0 and (not transpose or N % 8 == 0)


bind_gemm = implementation("gemm", "bind_gemm", fits_gemm)
bind_gemm.should_use = should_use_gemm("hopper")
bind_gemm.tiles = ("hopper_gemm", "hopper_few_rows", "gemm_row")
bind_gmm = implementation("gmm", "bind_gmm", fits_gmm)
bind_gmm_into = implementation("gmm", "bind_gmm_into", fits_gmm_into)
bind_gmm.should_use = lambda x, w, *_: should_use_grouped("gmm", x, x.shape[0], w)
bind_gmm_into.should_use = bind_gmm.should_use
bind_masked_gmm = implementation("gmm", "bind_masked_gmm", fits_masked_gmm, (*DTYPES, *OCP))
bind_segments = implementation("gmm", "bind_segments", fits_segments)
bind_four_bit_gmm = implementation("four_bit", "bind_four_bit_gmm", fits_four_bit_gmm)
bind_expert_up = implementation("up", "bind_expert_up", fits_expert_up)
bind_expert_up.should_use = lambda x, w, _, order, *rest: should_use_grouped("up", x, len(order), w.mT)
bind_expert_down_grad = implementation("down_grad", "bind_down_grad", fits_down_grad)
bind_tgmm = implementation("tgmm", "bind_tgmm", fits_tgmm)
bind_tgmm_sums = implementation("tgmm", "bind_tgmm_sums", lambda x, y, *_: by_tma(x, y))
bind_tgmm_into = implementation("tgmm", "bind_tgmm_into", fits_tgmm_into)
bind_scaled_gemm = implementation("gmm", "bind_scaled_gemm", fits_scaled_gemm, BYTES)
bind_scaled_gemm.should_use = should_use_scaled("hopper")
bind_scaled_gmm = implementation("gmm", "bind_scaled_gmm", fits_scaled_gmm, BYTES)
