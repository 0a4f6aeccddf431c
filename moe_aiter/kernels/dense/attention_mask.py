"""The mask of torch's attention, whose kernels treat a query without keys in different ways.

    bias, alive = mask_bias(mask, dtype)    what is added to the scores; no row hides every key
    zero_rows(out, alive)                   in place: the result of a query without keys

One small kernel each, and `zero_rows` touches no row that stays: a pass over the result would take as long
as a tenth of the attention itself.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import Written, binds, define_inplace_op, define_op, takes
from ..base.check import FLOATS, check_fields
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl

ROW = 16  # elements: each row of a bias begins at a multiple, or torch's kernels copy the bias
BLOCK_R, BLOCK_D = 128, 32


class MaskBiasInputs(NamedTuple):
    """The inputs of the op `mask_bias`: see the function of this name."""

    mask: Annotated[Tensor, "B, H, Sq, Sk"]  # bool
    dtype: torch.dtype | None


class ZeroRowsInputs(NamedTuple):
    """The inputs of the op `zero_rows_`: see `zero_rows`."""

    out: Annotated[Written, "B, H, S, D"]
    alive: Annotated[Tensor, "B or 1, H or 1, S or 1, 1"]  # bool


def lowest(dtype: torch.dtype) -> float:
    """Return the score that hides a key.  cuDNN is not reliable with -inf; torch passes it this value."""
    return -65504.0 if dtype in (torch.float16, torch.bfloat16) else -torch.inf


# reference


def mask_bias_reference(i: MaskBiasInputs) -> tuple[Tensor, Tensor]:
    alive = i.mask.any(3, keepdim=True)
    shown = torch.zeros_like(i.mask, dtype=i.dtype)
    return shown.masked_fill(~i.mask & alive, lowest(i.dtype)), alive.to(torch.uint8)


# kernels


@jit_kernel
def mask_bias_kernel(
    mask_ptr,  # (B, H, S, K) uint8
    bias_ptr,  # (B * H * S, K), rows `bias_stride` apart
    alive_ptr,  # (B * H * S,) uint8
    H, S, K, low,
    mask_strides,  # b, h, s, k
    bias_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    b, h, s = row // S // H, row // S % H, row % S
    mask_ptr += b * mask_strides[0] + h * mask_strides[1] + s * mask_strides[2]
    seen = tl.zeros((BLOCK,), tl.uint8)
    for first in range(0, K, BLOCK):
        k = (first + tl.arange(0, BLOCK)).to(tl.int64)
        seen |= tl.load(mask_ptr + k * mask_strides[3], mask=k < K, other=0)
    alive = tl.max(seen.to(tl.int32), 0) > 0
    for first in range(0, K, BLOCK):
        k = (first + tl.arange(0, BLOCK)).to(tl.int64)
        shown = (tl.load(mask_ptr + k * mask_strides[3], mask=k < K, other=0) != 0) | (alive == 0)
        bias = tl.where(shown, 0.0, low).to(bias_ptr.dtype.element_ty)
        tl.store(bias_ptr + row * bias_stride + k, bias, mask=k < K)
    tl.store(alive_ptr + row, alive.to(tl.uint8))


@jit_kernel
def zero_rows_kernel(
    out_ptr,  # (B, H, S, D)
    alive_ptr,  # (B, H, S) uint8
    R,  # B * H * S
    H, S, D,
    out_strides,  # b, h, s, d
    alive_strides,  # b, h, s
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some rows, of which most have nothing to be done."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    b, h, s = row // S // H, row // S % H, row % S
    flags = alive_ptr + b * alive_strides[0] + h * alive_strides[1] + s * alive_strides[2]
    dead = tl.load(flags, mask=row < R, other=1) == 0
    if tl.max(dead.to(tl.int32), 0) > 0:
        starts = out_ptr + (b * out_strides[0] + h * out_strides[1] + s * out_strides[2])[:, None]
        for first in range(0, D, BLOCK_D):
            d = (first + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
            zeros = tl.zeros((BLOCK_R, BLOCK_D), out_ptr.dtype.element_ty)
            tl.store(starts + d * out_strides[3], zeros, mask=dead[:, None] & (d < D))


# launchers


def new_mask_bias(i: MaskBiasInputs) -> tuple[Tensor, Tensor]:
    check_fields(i)
    if i.mask.dtype != torch.bool or i.dtype not in FLOATS:
        raise TypeError(f"mask must be bool and the bias floating, but they are {i.mask.dtype} and {i.dtype}")
    B, H, S, K = i.mask.shape
    step = -(-K // ROW) * ROW
    bias = i.mask.new_empty_strided(i.mask.shape, (H * S * step, S * step, step, 1), dtype=i.dtype)
    return bias, i.mask.new_empty(B, H, S, 1, dtype=torch.uint8)


@binds
@takes(torch.bool)
def bind_mask_bias(i: MaskBiasInputs) -> Callable:
    B, H, S, K = i.mask.shape
    kernel = bind_kernel(mask_bias_kernel, (B * H * S,), BLOCK=min(2048, next_power_of_2(max(K, 16))))
    numbers = H, S, K, lowest(i.dtype), i.mask.stride(), -(-K // ROW) * ROW
    return lambda outs, i: kernel(i.mask.view(torch.uint8), *outs, *numbers)


def check_zero_rows(i: ZeroRowsInputs) -> None:
    check_fields(i)
    if i.alive.dtype != torch.bool:
        raise TypeError(f"alive must be bool, not {i.alive.dtype}")
    wanted = *i.out.shape[:3], 1
    if any(n not in (1, size) for n, size in zip(i.alive.shape, wanted, strict=True)):
        raise ValueError(f"out is {tuple(i.out.shape)} but alive is {tuple(i.alive.shape)}")


@binds
@takes(torch.bool)
def bind_zero_rows(i: ZeroRowsInputs) -> Callable:
    B, H, S, D = i.out.shape
    kernel = bind_kernel(zero_rows_kernel, (cdiv(B * H * S, BLOCK_R),), BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D)
    numbers = B * H * S, H, S, D, i.out.stride(), i.alive.expand(B, H, S, 1).stride()[:3]
    return lambda out, i: kernel(out, i.alive.view(torch.uint8), *numbers)


# ops

mask_bias_op = define_op(
    "mask_bias", MaskBiasInputs, outputs=2, new=new_mask_bias, reference=mask_bias_reference,
    triton=bind_mask_bias,
)  # fmt: skip
zero_rows_op = define_inplace_op(
    "zero_rows_", ZeroRowsInputs, check=check_zero_rows, reference=lambda i: i.out.masked_fill_(~i.alive, 0),
    triton=bind_zero_rows,
)  # fmt: skip


# public


def mask_bias(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, H, Sq, Sk) bool, True where a key is seen -> what to add to scores, and which rows see any key.

    The bias is 0 or `lowest(dtype)`, and 0 in all of a row that sees none; `alive` is (B, H, Sq, 1).
    """
    bias, alive = mask_bias_op(mask, dtype)
    return bias, alive.view(torch.bool)


def zero_rows(out: Tensor, alive: Tensor) -> None:
    """Make the rows of out (B, H, S, D) zeros where alive, any axis of which may be 1, is False."""
    zero_rows_op(out, alive)
