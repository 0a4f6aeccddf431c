"""The functions of `flashinfer.gemm`."""

import torch
from torch import Tensor

from ...kernels.base.check import check_axes, check_device, check_known, check_tensor
from ...kernels.base.fp8 import FP8
from ...kernels.grouped.masked_gmm import scaled_bmm
from ...layers.segment import SegmentGEMMWrapper

__all__ = ["SegmentGEMMWrapper", "bmm_fp8"]

BACKENDS = ("cublas", "cudnn", "cutlass", "cute-dsl", "auto")


def bmm_fp8(
    A: Tensor, B: Tensor, A_scale: Tensor | float, B_scale: Tensor | float, dtype: torch.dtype,
    out: Tensor | None = None, backend: str = "cublas",
) -> Tensor:  # fmt: skip
    """`(A @ B) * A_scale * B_scale` of 8-bit floats, e4m3 or e5m2 in any pair: (b, m, n) in `dtype`.

    `A` (b, m, k) and `B` (b, k, n) may have any strides; a column-major `B`, as FlashInfer asks for, is
    faster.  A scale is a number or a float32 tensor of one element on the device of `A`, and multiplies to
    dequantise.  `dtype` is float16 or bfloat16, and that of `out` where it is given; `out` is overwritten.
    `backend` may be any of FlashInfer's; it has no effect here.

    Raises ValueError for shapes, devices, scales and `dtype` that do not fit, TypeError for other operands.
    """
    check_known("backend", backend, BACKENDS)
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be float16 or bfloat16, not {dtype}")
    if out is not None:
        check_tensor("out", out)
        if out.dtype != dtype:
            raise ValueError(f"dtype is {dtype} but out is {out.dtype}")
    check_fp8_operands(A, B)
    check_device(A=A, B=B, out=out)
    check_one_number(A, A_scale=A_scale, B_scale=B_scale)
    return scaled_bmm(A, B, A_scale, B_scale, out_dtype=dtype, out=out)


def check_fp8_operands(A: Tensor, B: Tensor) -> None:
    for name, x in (("A", A), ("B", B)):
        if not isinstance(x, Tensor) or x.dtype not in FP8:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a tensor of 8-bit floats, not {kind}")
    check_axes(A=(A, "b, m, k"), B=(B, "b, k, n"))


def check_one_number(A: Tensor, **scales: Tensor | float) -> None:
    """Raise unless every scale is one number, as FlashInfer reads the first of whatever it is given."""
    for name, scale in scales.items():
        if isinstance(scale, Tensor) and (scale.dtype != torch.float32 or scale.numel() != 1):
            described = f"{scale.dtype} {tuple(scale.shape)}"
            raise ValueError(f"{name} must be one float32 number, but it is {described}")
        if isinstance(scale, Tensor) and scale.device != A.device:
            raise ValueError(f"A is on {A.device} but {name} is on {scale.device}")
        if not isinstance(scale, (Tensor, float, int)) or isinstance(scale, bool):
            raise ValueError(f"{name} must be one float32 number, not {type(scale).__name__}")
