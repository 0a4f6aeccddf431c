"""What becomes of a mask around torch's attention, whose kernels disagree about a query without keys.

    bias, alive = mask_bias(mask, dtype)    what is added to the scores; no row hides every key
    zero_rows(out, alive)                   in place: the result of a query without keys

One small kernel each, and `zero_rows` touches no row that stays: a pass over the result would take as long
as a tenth of the attention itself.
"""

import torch
from torch import Tensor

from ...op import define_inplace_op, define_op, takes
from ..base.check import FLOATS, check_device, check_shape
from ..base.launch import cdiv, jit_kernel, next_power_of_2, tl

ROW = 16  # elements: torch's kernels would copy a bias of whose rows one begins elsewhere
BLOCK_R, BLOCK_D = 128, 32


def lowest(dtype: torch.dtype) -> float:
    """What hides a key.  cuDNN, which computes 16 bits, is not sure of -inf; torch itself gives it this."""
    return -65504.0 if dtype in (torch.float16, torch.bfloat16) else -torch.inf


# reference


def mask_bias_reference(mask, dtype):
    alive = mask.any(3, keepdim=True)
    shown = torch.zeros_like(mask, dtype=dtype)
    return shown.masked_fill(~mask & alive, lowest(dtype)), alive.to(torch.uint8)


def zero_rows_reference(out, alive):
    out.masked_fill_(~alive, 0)


# kernels


@jit_kernel
def mask_bias_kernel(
    mask_ptr,  # (B, H, S, K) uint8
    bias_ptr,  # (B * H * S, K), rows `bias_stride` apart
    alive_ptr,  # (B * H * S,) uint8
    H,
    S,
    K,
    low,
    mask_strides,  # b, h, s, k
    bias_stride,
    BLOCK: tl.constexpr,
):
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
    H,
    S,
    D,
    out_strides,  # b, h, s, d
    alive_strides,  # b, h, s
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
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


def new_mask_bias(mask, dtype):
    check_shape("mask", mask, "B", "H", "Sq", "Sk")
    if mask.dtype != torch.bool or dtype not in FLOATS:
        raise TypeError(f"mask must be bool and the bias floating, but they are {mask.dtype} and {dtype}")
    B, H, S, K = mask.shape
    step = -(-K // ROW) * ROW
    bias = mask.new_empty_strided(mask.shape, (H * S * step, S * step, step, 1), dtype=dtype)
    return bias, mask.new_empty(B, H, S, 1, dtype=torch.uint8)


@takes(torch.bool)
def launch_mask_bias(outs, mask, dtype):
    bias, alive = outs
    _, H, S, K = mask.shape
    mask_bias_kernel[(alive.numel(),)](
        mask.view(torch.uint8), bias, alive,
        H, S, K, lowest(dtype), mask.stride(), bias.stride(2),
        BLOCK=min(2048, next_power_of_2(max(K, 16))),
    )  # fmt: skip


def check_zero_rows(out, alive):
    check_shape("out", out, "B", "H", "S", "D")
    check_shape("alive", alive, "B", "H", "S", "1")
    if alive.dtype != torch.bool:
        raise TypeError(f"alive must be bool, not {alive.dtype}")
    wanted = *out.shape[:3], 1
    if any(n not in (1, size) for n, size in zip(alive.shape, wanted, strict=True)):
        raise ValueError(f"out is {tuple(out.shape)} but alive is {tuple(alive.shape)}")
    check_device(out=out, alive=alive)


@takes(torch.bool)
def launch_zero_rows(out, alive):
    B, H, S, D = out.shape
    flags = alive.expand(B, H, S, 1).view(torch.uint8)
    grid = (cdiv(B * H * S, BLOCK_R),)
    zero_rows_kernel[grid](
        out, flags, B * H * S, H, S, D, out.stride(), flags.stride()[:3], BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D
    )


# ops

mask_bias_op = define_op(
    "mask_bias(Tensor mask, ScalarType? dtype) -> (Tensor, Tensor)",
    new=new_mask_bias,
    reference=mask_bias_reference,
    triton=launch_mask_bias,
)
zero_rows_op = define_inplace_op(
    "zero_rows_(Tensor(a!) out, Tensor alive) -> ()",
    check=check_zero_rows,
    reference=zero_rows_reference,
    triton=launch_zero_rows,
)


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
