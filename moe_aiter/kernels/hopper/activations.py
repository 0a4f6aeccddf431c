"""The activations' f and slope for accumulators; see ../activations.py."""

from .. import activations
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


ACTIVATIONS = {
    "silu": silu,
    **{name: gluon.jit(getattr(activations, name).fn) for name in ("gelu", "relu", "relu2")},
}
