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
def gelu(x):
    """x * Phi(x) with the normal distribution Phi, to 1e-7, and its slope.

    One exponential serves Phi and its density.  Formula 7.1.26 of Abramowitz and Stegun.
    """
    gauss = gl.exp(-0.5 * x * x)
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * gl.abs(x))
    p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * p * gauss  # Phi(-|x|)
    phi = gl.where(x < 0, tail, 1 - tail)
    return x * phi, phi + x * gauss * 0.3989422804014327


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
    "silu_oai": silu_oai,
    **{name: gluon.jit(getattr(activations, name).fn) for name in ("relu", "relu2", "identity", "up_oai")},
}


def kernel_functions(act: activations.Activation) -> dict[str, Callable | None]:
    """f and h by the names that kernels give them; h is None for a plain activation."""
    return {"ACTIVATION": FUNCTIONS[act.base], "UP": FUNCTIONS[act.up] if act.gated else None}
