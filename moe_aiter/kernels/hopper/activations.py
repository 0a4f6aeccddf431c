"""The activations' f and h, with their slopes, for accumulators; see ../activations.py."""

from collections.abc import Callable

from .. import activations
from .._triton import tl
from ._gluon import gl, gluon


@gluon.jit
def sigmoid(x):
    """By the chip's own approximations, good to 2 ulp: exp and a division cost half of an epilogue."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def silu(x):
    """x * sigmoid(x), and its slope."""
    sig = sigmoid(x)
    value = x * sig
    return value, sig + value - value * sig


@gluon.jit
def gauss_and_reciprocal(x, u):
    """exp(-x^2 / 2) and 1 / u by the chip's own approximations, good to 2 ulp."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t, r; rcp.approx.ftz.f32 r, $3; mul.f32 t, $2, $2; mul.f32 t, t, 0fBF38AA3B; "
        "ex2.approx.ftz.f32 $0, t; mov.f32 $1, r; }",
        "=f,=f,f,f",
        [x, u],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def gelu(x):
    """x * Phi(x) with the normal distribution Phi, to 2e-7, and its slope.

    One exponential serves Phi and its density.  Formula 7.1.26 of Abramowitz and Stegun.
    """
    gauss, t = gauss_and_reciprocal(x, 1 + 0.3275911 * 0.7071067811865476 * gl.abs(x))
    p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * p * gauss  # Phi(-|x|)
    phi = gl.where(x < 0, tail, 1 - tail)
    return x * phi, phi + x * gauss * 0.3989422804014327


@gluon.jit
def gelu_tanh(x):
    """x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3), and its slope."""
    sig = sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
    return x * sig, sig + x * sig * (1 - sig) * 1.5957691216057308 * (1 + 0.134145 * x * x)


@gluon.jit
def silu_oai(x):
    """x * sigmoid(1.702 * x), from x = 7 on a constant, and its slope.  NaN stays NaN."""
    y = gl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
    sig = sigmoid(1.702 * y)
    value = y * sig
    return value, gl.where(x > 7.0, 0.0, sig + 1.702 * (value - value * sig))


FUNCTIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu_oai": silu_oai,
    **{name: gluon.jit(getattr(activations, name).fn) for name in ("relu", "relu2", "identity", "up_oai")},
}


def kernel_functions(act: activations.Activation) -> dict[str, Callable | None]:
    """f and h by the names that kernels give them; h is None for a plain activation."""
    return {"ACTIVATION": FUNCTIONS[act.base], "UP": FUNCTIONS[act.up] if act.gated else None}
