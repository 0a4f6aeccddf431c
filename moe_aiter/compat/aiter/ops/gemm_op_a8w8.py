"""AITER's products of 8 bits: see `moe_aiter/kernels/grouped/scaled_gemm.py`."""

import torch
from torch import Tensor

from ....kernels.base.check import check_axes, check_shape, check_sizes, renamed
from ....kernels.grouped.scaled_gemm import scaled_gemm

__all__ = ["gemm_a8w8", "int8_gemm"]


@renamed(x="XQ", w="WQ", out_dtype="dtype")
def gemm_a8w8(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor | float, w_scale: Tensor | float, bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16, splitK: int | None = None,
) -> Tensor:  # fmt: skip
    """`(XQ @ WQ.T) * x_scale * w_scale + bias`: `XQ` (M, K), `WQ` (N, K), both int8 or 8-bit floats; (M, N).

    Scales are float32: a number or one element, `x_scale` (M,) or (M, 1), `w_scale` (N,), (N, 1) or (1, N).
    `bias`, (N,) or (1, N), is of any floating dtype; `dtype` is float16, bfloat16 or float32.  `splitK`, in
    AITER how many programs share a sum, may be any whole number from 0 and has no effect here.
    Raises ValueError for shapes and devices, TypeError for dtypes.
    """
    if splitK not in (None, 0):
        check_sizes(splitK=splitK)
    check_axes(XQ=(XQ, "M, K"), WQ=(WQ, "N, K"))
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if scale is None:
            raise TypeError(f"{name} must be a tensor or a number, not None")
    if isinstance(bias, Tensor) and bias.shape == (1, WQ.shape[0]):
        bias = bias[0]
    return scaled_gemm(XQ, WQ.mT, x_scale, w_scale, bias, out_dtype=dtype)


@renamed(XQ="input", WQ="weight", x_scale="input_scale", w_scale="weight_scale", dtype="output_dtype")
def int8_gemm(
    input: Tensor, weight: Tensor, input_scale: Tensor | float, weight_scale: Tensor | float,
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:  # fmt: skip
    """`(input @ weight.T) * input_scale * weight_scale`: `input` (m, k) and `weight` (n, k), int8; (m, n).

    Sums are exact.  Scales as for `gemm_a8w8`.  What float16 cannot hold is infinite: the default dtype is
    too small for large scales.  Raises as `gemm_a8w8`, and TypeError for operands that are not int8.
    """
    for name, x in (("input", input), ("weight", weight)):
        check_shape(name, x, "m" if name == "input" else "n", "k")
        if x.dtype != torch.int8:
            raise TypeError(f"{name} must be int8, not {x.dtype}")
    return gemm_a8w8(input, weight, input_scale, weight_scale, None, output_dtype)
