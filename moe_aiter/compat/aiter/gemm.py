"""AITER's dense products: see `moe_aiter/kernels/dense/gemm.py`.

Both operands have one dtype: float32, float16, bfloat16 or, computed by torch, float64.  The result has this
dtype; a bias and c may have another of the four.  Under torch.autocast, operands are cast to its dtype.  All
products have gradients.  They raise ValueError for shapes and devices, TypeError for dtypes.
"""

from torch import Tensor

from ...kernels.base.activations import FUNCTIONS
from ...kernels.base.check import (
    cast_as_linear,
    check_axes,
    check_flags,
    check_float,
    check_shape,
    check_size,
    check_tensor,
    renamed,
)
from ...kernels.dense.gemm import gemm
from ...kernels.grouped.grouped_gemm import grouped_gemm as _grouped_gemm
from ...kernels.sparse.gemm import sparse_gemm as _sparse_gemm
from ...switches import computed, switches

__all__ = [
    "batched_gemm", "cutlass_gemm", "gemm_bias", "gemm_gelu", "gemm_relu", "grouped_gemm", "linear", "matmul",
    "sparse_gemm",
]  # fmt: skip

grouped_gemm = computed(_grouped_gemm)
sparse_gemm = computed(_sparse_gemm)


@computed
@renamed(x="a", w="b")
def batched_gemm(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Multiply batches of matrices: `a @ b`, (batch, m, k) and (batch, k, n) -> (batch, m, n).

    With `transpose_a` the tensor a is (batch, k, m), with `transpose_b` b is (batch, n, k).
    """
    check_flags(transpose_a=transpose_a, transpose_b=transpose_b)
    axes_of_a = "batch, k, m" if transpose_a else "batch, m, k"
    axes_of_b = "batch, n, k" if transpose_b else "batch, k, n"
    check_axes(a=(a, axes_of_a), b=(b, axes_of_b))
    a, b = cast_as_linear(a, b)
    check_float(a=a, b=b)
    return gemm(a.mT if transpose_a else a, b.mT if transpose_b else b)


@computed
@renamed(x="input", w="weight")
def gemm_bias(input: Tensor, weight: Tensor, bias: Tensor, transpose_weight: bool = True) -> Tensor:
    """`input @ weight.T + bias`: input (..., k), weight (n, k) and bias (n,), or None, give (..., n).

    Without `transpose_weight` the weight is (k, n) and the result `input @ weight + bias`.  Input and weight
    have one floating dtype, which is that of the result; the bias may have another.

    Raises ValueError for shapes and devices, TypeError for dtypes.
    """
    return in_one_or_in_steps(input, as_w(input, weight, transpose_weight), bias)


@computed
@renamed(x="input", w="weight")
def gemm_gelu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, transpose_weight: bool = True,
    approximate: str = "none",
) -> Tensor:  # fmt: skip
    """Apply GELU to the result of `gemm_bias`, whose arguments these are: (..., n).

    `approximate` is "none", for the error function, or "tanh".
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    activation = "gelu_tanh" if approximate == "tanh" else "gelu"
    return in_one_or_in_steps(input, as_w(input, weight, transpose_weight), bias, activation)


@computed
@renamed(x="input", w="weight")
def gemm_relu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, transpose_weight: bool = True
) -> Tensor:
    """Apply ReLU to the result of `gemm_bias`, whose arguments these are: (..., n)."""
    return in_one_or_in_steps(input, as_w(input, weight, transpose_weight), bias, "relu")


@computed
@renamed(x="a", w="b")
def cutlass_gemm(
    a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 0.0, c: Tensor | None = None
) -> Tensor:
    """Compute `alpha * (a @ b) + beta * c` as a new tensor (m, n), for a (m, k) and b (k, n).

    c broadcasts to (m, n).  If `beta` is 0, the default, c is not read.
    """
    check_axes(a=(a, "m, k"), b=(b, "k, n"))
    a, b = cast_as_linear(a, b)
    check_float(a=a, b=b)
    return gemm(a, b, alpha=alpha, beta=beta, c=c)


@computed
@renamed(x="input", w="weight")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear: input (..., in), weight (out, in) and bias (out,)."""
    check_tensor("weight", weight)
    if weight.dim() == 1:  # one output, without an axis
        if bias is not None:
            check_tensor("bias", bias)
            check_size("bias has {} elements", bias.numel(), "weight is (k,), of n={} output", 1)
        return gemm(input, weight[:, None], None if bias is None else bias.reshape(1)).squeeze(-1)
    return in_one_or_in_steps(input, as_w(input, weight, is_option=False), bias)


@computed
@renamed(w="y")
def matmul(x: Tensor, y: Tensor) -> Tensor:
    """torch.matmul: vectors, matrices, and batches whose leading axes are broadcast."""
    check_tensor("x", x)
    check_tensor("y", y)
    if x.dim() == 0 or y.dim() == 0:
        raise ValueError(f"x and y must have an axis, but they are {tuple(x.shape)} and {tuple(y.shape)}")
    x, y = cast_as_linear(x, y)
    check_float(x=x, y=y)
    axes = "k={}" if y.dim() == 1 else "k={}, n" if y.dim() == 2 else "..., k={}, n"
    check_size("x is (..., k={})", x.shape[-1], f"y is ({axes})", y.shape[max(-2, -y.dim())])
    if x.dim() == 1 and y.dim() > 2:
        return gemm(x[None], y).squeeze(-2)
    return gemm(x, y[:, None]).squeeze(-1) if y.dim() == 1 else gemm(x, y)


def as_w(input: Tensor, weight: Tensor, transpose_weight: bool = True, *, is_option: bool = True) -> Tensor:
    """The weight as (k, n).  Errors name what was given; F.linear has no option `transpose_weight`."""
    check_flags(transpose_weight=transpose_weight)
    check_tensor("input", input)
    check_shape("weight", weight, *("nk" if transpose_weight else "kn"))
    if input.dim() == 0:
        raise ValueError("input must be (..., k), but it has no axis")
    input, weight = cast_as_linear(input, weight)
    check_float(input=input, weight=weight)
    option = f" with transpose_weight={transpose_weight}" if is_option else ""
    described = f"weight is {'(n, k={})' if transpose_weight else '(k={}, n)'}{option}"
    check_size("input is (..., k={})", input.shape[-1], described, weight.shape[1 if transpose_weight else 0])
    return weight.mT if transpose_weight else weight


def in_one_or_in_steps(
    input: Tensor, w: Tensor, bias: Tensor | None, activation: str | None = None
) -> Tensor:
    """Compute one product with its epilogue, or separate steps after `enable_fusion(False)`."""
    if switches.fusion:
        return gemm(input, w, bias, activation=activation)
    out = gemm(input, w)
    if bias is not None:
        check_shape("bias", bias, "n")
        check_size("bias is (n={},)", bias.shape[0], "the result is (..., n={})", w.shape[1])
        out = out + bias.to(out.dtype)
    return FUNCTIONS[activation][0](out) if activation else out
