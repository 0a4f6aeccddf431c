"""Gluon kernels for Hopper (sm_90) of ops of other wings; all but those of few rows are warp-specialised.

Each kernel has the meaning and the schema of its op in another wing, and `op.pick` chooses the kernel where
the GPU and the inputs allow it.  Gluon is imported when the first of them runs.

Needed everywhere: a Hopper GPU; bfloat16 or float16, or for products with scales 8 bits; numbers side by side
along one axis, as TMA copies them, in whole units of 16 bytes.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from ... import tuning
from ...invariance import batch_invariant
from ...op import binds, forced, runs
from ..base.activations import get_activation
from ..base.choice import FEW, should_use_gemm, should_use_scaled
from ..base.fp8 import MOST_K, OCP, ROW_BLOCK
from ..base.sources import takes_passes

DTYPES = (torch.bfloat16, torch.float16)
BYTES = (torch.int8, *OCP)
GATHERED_K = 16  # 8-bit floats that a thread gathers at a time
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
    """Return the implementation of that name, imported at its first use, for the inputs that `fits`."""

    @binds
    def bind(*inputs, **options):
        return launcher(module, name)(*inputs, **options)

    bind.takes = takes
    bind.fits = lambda i: is_hopper(i[0].device) and fits(i)
    bind.fits_on_hopper = fits
    return bind


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


def stands_in(impl: Callable, i: tuple) -> bool:
    """Whether a portable kernel is bound in the place of Hopper's kernel `impl`, which takes many rows.

    A token's bits must not depend on which of the two runs.  Both add up the products in the same order, by
    instructions of the same kind.  The portable kernel also adds a bias last then, and takes the activation
    functions of `epilogue.py`.
    """
    return forced() == "auto" and runs(impl, i)


# whether the inputs `i` of an op fit its kernel


def fits_product(x: Tensor, w: Tensor) -> bool | No:
    """Whether the product of grouped rows x (M, K) and w (G, K, N) fits."""
    return by_tma(x) and weight_by_tma(w) and in_eights(w.shape[2], "N")


def fits_guests(i) -> bool | No:
    """Whether a program has room for the groups of guests too, and TMA can address their matrices."""
    if i.guests is None:
        return True
    room = i.group_sizes.shape[0] <= MAX_GROUPS or No(f"there are more than {MAX_GROUPS} experts and guests")
    return room and weight_by_tma(i.guests)


def fits_gmm(i) -> bool | No:
    return fits_product(i.lhs, i.rhs) and i.dtype in (None, i.lhs.dtype) and not i.tile


def fits_gmm_into(i) -> bool | No:
    out = i.existing_out
    fit = fits_product(i.lhs, i.rhs) and out.dtype == i.lhs.dtype and not i.tile and by_tma(out)
    return fit and fits_guests(i)


def fits_segments(i) -> bool | No:
    bounds = i.lens if i.indptr is None else i.indptr
    return fits_product(i.x, i.w) and bounds.shape[0] <= MAX_GROUPS


def fits_expert_up(i) -> bool | No:
    N = i.gate_up.shape[1] // get_activation(i.activation).projections
    fit = by_tma(i.x) and weight_by_tma(i.gate_up) and small(i.x)
    return fit and i.order.numel() > 0 and in_eights(N, "I") and fits_guests(i)


def fits_down_grad(i) -> bool | No:
    fit = by_tma(i.dout, i.z) and weight_by_tma(i.down) and small(i.dout)
    return fit and in_eights(i.down.shape[2], "I") and fits_guests(i)


def fits_up_fp8(i) -> bool | No:
    N = i.w8.shape[1] // get_activation(i.activation).projections
    fit = is_hopper(i.x8.device) and i.dtype in DTYPES and few(i.w8)
    fit = fit and i.order.numel() > 0 and i.x8.numel() < 2**31
    return fit and i.x8.shape[1] % GATHERED_K == 0 and N % 64 == 0


def fits_gmm_fp8(i) -> bool | No:
    rows, w = i.x if i.order is None else i.order, i.w.mT
    fit = is_hopper(i.x.device) and {i.x.dtype, w.dtype} <= set(OCP) and i.dtype in DTYPES
    fit = fit and len(rows) > 0 and w.shape[1] % 8 == 0
    return fit and by_tma(i.x) and weight_by_tma(w) and w.stride(2) == 1


def fits_gmm_unpermute_fp8(i) -> bool | No:
    _, N, K = i.w8.shape
    fit = is_hopper(i.x8.device) and i.dtype in DTYPES and few(i.w8)
    return fit and i.x8.shape[0] > 0 and K % 16 == 0 and N % 8 == 0


def fits_down_grad_fp8(i) -> bool | No:
    _, N, K = i.w8.shape
    fit = is_hopper(i.z.device) and i.z.dtype in DTYPES and few(i.w8)
    return fit and by_tma(i.z) and i.dout8.numel() < 2**31 and K % GATHERED_K == 0 and N % 64 == 0


def fits_tgmm(i) -> bool | No:
    return by_tma(i.x, i.y) and (i.order is None or small(i.x))


def stores_weights(out: Tensor) -> bool | No:
    """Whether TMA can write the matrices of `out` (G, K, N), by rows or by columns."""
    return out.dtype in DTYPES and (by_tma(out) or by_tma(out.mT)) and out.stride(0) % 8 == 0


def fits_tgmm_into(i) -> bool | No:
    out = i.existing_out
    plain = out.dtype == i.x.dtype and stores_weights(out)
    sum_fits = i.accumulate and out.dtype != torch.float64
    return fits_tgmm(i) and not i.tile and (sum_fits or plain)


def fits_tgmm_fp8(i) -> bool:
    (C, N, _), K = i.y8.shape, i.x8.shape[1]
    fit = is_hopper(i.x8.device) and i.dtype in DTYPES and min(i.x8.numel(), i.order.numel() * N) > 0
    return fit and K % 16 == 0 and N % 16 == 0 and C * max(K, N) < 2**31


def fits_scaled_tgmm(i) -> bool:
    (M, K), N, C = i.x.shape, i.y.shape[1], i.x.shape[0] // ROW_BLOCK + i.group_sizes.shape[0]
    fit = is_hopper(i.x.device) and {i.x.dtype, i.y.dtype} <= set(OCP) and M > 0
    fit = fit and i.existing_out.dtype != torch.float64
    return fit and K % 16 == 0 and N % 16 == 0 and C * max(K, N) < 2**31


def fills(rows: int) -> bool:
    """Whether there are rows enough for a tile.  Under batch invariance their number decides nothing."""
    return rows >= (1 if batch_invariant() else MANY)


def fits_masked_gmm(i) -> bool | No:
    near = all(s is None or s.shape[1] * s.stride(1) < 2**31 for s in (i.x_scale, i.w_scale))
    fit = not i.shuffled and near and i.w.dtype in (OCP if i.x.dtype in OCP else DTYPES)
    fit = fit and i.x.shape[1] >= MANY and weight_by_tma(i.w) and i.w.stride(2) == 1
    return fit and all(by_tma(t) and stacked(t) and short(t) for t in (i.x, i.out))


def fits_few_rows(x: Tensor, w: Tensor) -> bool:
    """x (B, M, K) and w (B, N, K) for any N, whose rows are read 16 bytes at a time, and nothing by TMA."""
    return by_tma(x, w) and all(t.shape[0] == 1 or t.stride(0) % 8 == 0 for t in (x, w))


def fits_gemm(i) -> bool | No:
    x, rows = i.x, i.w.stride(2) != 1
    w = i.w.mT if rows else i.w
    if rows and x.shape[1] <= FEW:
        return i.dtype in (None, x.dtype) and fits_few_rows(x, w)
    fit = by_tma(x) and stacked(x) and short(x) and weight_by_tma(w) and i.dtype in (None, x.dtype)
    return fit and w.shape[1 + (not rows)] % 8 == 0


def fits_scaled_gemm(i) -> bool | No:
    x, w, whole = i.x[None], i.w.mT[None], i.w.shape[1] * i.dtype.itemsize % 16 == 0
    fit = whole and x.shape[1] >= MANY and multiplies(x, w)
    return fit and by_tma(x) and stacked(x) and short(x) and weight_by_tma(w) and w.stride(2) == 1


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Whether sums along the last axis are exact of int8, or of 8-bit floats that the GPU knows."""
    return x.shape[-1] <= MOST_K if x.dtype == torch.int8 else {x.dtype, w.dtype} <= set(OCP)


def fits_scaled_gmm(i) -> bool | No:
    M, w = i.x.shape[0] if i.order is None else i.order.shape[0], i.w.mT
    fit = fills(M) and i.dtype in DTYPES and w.shape[1] % 8 == 0 and multiplies(i.x, w)
    # the sums of 8-bit floats leave no registers for other cases
    fit = fit and (i.x.dtype == torch.int8 or (i.x_scale is not None and i.w_scale is not None))
    return fit and by_tma(i.x) and weight_by_tma(w) and w.stride(2) == 1


def fits_four_bit_gmm(i) -> bool | No:
    fit = by_tma(i.x) and small(i.x) and few(i.packed) and fills(i.rows) and i.packed.data_ptr() % 16 == 0
    # where packed rows are columns, a part of a block would meet the next group's
    return fit and i.x.shape[1] % 64 == 0 and (not i.transpose or i.packed.shape[1] % 8 == 0)


bind_gemm = implementation("gemm", "bind_gemm", fits_gemm)
bind_gemm.should_use = should_use_gemm("hopper")
bind_gemm.tiles = ("hopper_gemm", "hopper_few_rows", "gemm_row")
bind_gmm = implementation("gmm", "bind_gmm", fits_gmm)
bind_gmm_into = implementation("gmm", "bind_gmm_into", fits_gmm_into)
bind_gmm.should_use = lambda i: should_use_grouped("gmm", i.lhs, i.lhs.shape[0], i.rhs)
bind_gmm_into.should_use = bind_gmm.should_use
bind_masked_gmm = implementation("gmm", "bind_masked_gmm", fits_masked_gmm, (*DTYPES, *OCP))
bind_segments = implementation("gmm", "bind_segments", fits_segments)
bind_four_bit_gmm = implementation("four_bit", "bind_four_bit_gmm", fits_four_bit_gmm)
bind_expert_up = takes_passes(implementation("up", "bind_expert_up", fits_expert_up))
bind_expert_up.should_use = lambda i: should_use_grouped("up", i.x, len(i.order), i.gate_up.mT)
bind_expert_down_grad = implementation("down_grad", "bind_down_grad", fits_down_grad)
bind_tgmm = implementation("tgmm", "bind_tgmm", fits_tgmm)
bind_tgmm_sums = implementation("tgmm", "bind_tgmm_sums", lambda i: by_tma(i.x, i.y))
bind_tgmm_into = implementation("tgmm", "bind_tgmm_into", fits_tgmm_into)
bind_scaled_gemm = implementation("gmm", "bind_scaled_gemm", fits_scaled_gemm, BYTES)
bind_scaled_gemm.should_use = should_use_scaled("hopper")
bind_scaled_gmm = implementation("gmm", "bind_scaled_gmm", fits_scaled_gmm, BYTES)
