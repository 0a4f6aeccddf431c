"""The dense product in torch: its meaning, and torch's fastest way to it."""

import torch
from torch import Tensor

from ._groups import wide
from ._precision import matmul_precision
from .activations import FUNCTIONS


def gemm_reference(x, w, bias, c, activation="", alpha=1.0, beta=0.0, dtype=None, save_z=False):
    dtype = dtype or x.dtype
    product = torch.promote_types(x.dtype, dtype)  # rounded once, to what is asked for
    z = alpha * wide(x.to(product) @ w.to(product))
    z = z if c is None else z + beta * wide(c)
    z = z if bias is None else z + wide(bias)
    out = FUNCTIONS[activation][0](z) if activation else z
    return out.to(dtype), z.to(dtype) if save_z else z.new_empty(0, dtype=dtype)


def fill_gemm(outs, x, w, bias, c, activation, alpha, beta, dtype, save_z) -> None:
    """By BLAS, whose epilogue has the bias or c; an activation comes after a rounding to `dtype`."""
    out, z = outs
    y = z if save_z else out
    if any(t is not None and t.dtype != y.dtype for t in (x, bias, c)):
        found = gemm_reference(x, w, bias, c, activation, alpha, beta, dtype, save_z)
        for target, source in zip(outs, found, strict=True):
            target.copy_(source)
        return
    with matmul_precision(x):
        if fits_fused(out, bias, c, activation, alpha, save_z):
            torch.ops.aten._addmm_activation.out(bias, x[0], w[0], out=out[0])
            return
        multiply_into(y, x, w, bias, c, alpha, beta)
    if activation:
        activate_into(out, y, activation)


def fits_fused(out, bias, c, activation, alpha, save_z) -> bool:
    """ReLU of x @ w + bias by cuBLASLt; its GELU would give other bits where no gradient is to come."""
    single = out.is_cuda and out.shape[0] == 1 and activation == "relu" and not save_z
    return single and bias is not None and c is None and alpha == 1


def multiply_into(
    y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, c: Tensor | None, alpha: float, beta: float
) -> None:
    """y (B, M, N) = alpha * x @ w + beta * c + bias."""
    added, factor = (bias, 1.0) if c is None else (c, beta)
    if y.shape[0] == 1:
        y, x, w = y[0], x[0], w[0]
        added = added if c is None else c[0]
    elif added is not None:
        added = added.expand(y.shape)
    if added is None and alpha == 1:
        torch.matmul(x, w, out=y)
    else:
        # with a factor of 0 what is added is not read
        added, factor = (y, 0.0) if added is None else (added, factor)
        product = torch.addmm if y.dim() == 2 else torch.baddbmm
        product(added, x, w, beta=factor, alpha=alpha, out=y)
    if c is not None and bias is not None:
        y += bias


def activate_into(out: Tensor, z: Tensor, activation: str) -> None:
    """`out` may be z."""
    aten = torch.ops.aten
    if activation == "relu":
        aten.relu.out(z, out=out)
    elif activation == "silu":
        aten.silu.out(z, out=out)
    elif activation == "gelu_tanh":
        aten.gelu.out(z, approximate="tanh", out=out)
    elif z.is_cuda:
        aten.gelu.out(z, out=out)
    else:
        out.copy_(FUNCTIONS[activation][0](z))


def activation_gradient(dout: Tensor, saved: Tensor, activation: str) -> Tensor:
    """That of the pre-activation `saved`, or for relu of the result."""
    aten = torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(dout, saved, 0)
    if activation == "silu":
        if torch.is_grad_enabled():  # torch's own has no second derivative
            sig = torch.sigmoid(saved)
            return dout * sig * (1 + saved * (1 - sig))
        return aten.silu_backward(dout, saved)
    return aten.gelu_backward(dout, saved, approximate="tanh" if activation == "gelu_tanh" else "none")
