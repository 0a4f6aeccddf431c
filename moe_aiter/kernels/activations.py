"""The activations of an expert: name -> torch function, Triton function, gated or not.  The only such list.

A gated activation maps (gate, up) to f(gate) * up, a plain one maps up to f(up); f and its slope f' are
written once each.  SwiGLU, GEGLU, ReGLU: Shazeer 2020, arXiv 2002.05202.
ReLU^2: So et al. 2021, arXiv 2109.08668.
"""

import dataclasses
from collections.abc import Callable

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ._triton import tl, triton


@triton.jit
def silu(x):
    """x * sigmoid(x), and its slope."""
    sig = tl.sigmoid(x)
    return x * sig, sig * (1 + x * (1 - sig))


@triton.jit
def gelu(x):
    """x * Phi(x) with the exact normal distribution Phi, and its slope."""
    phi = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    return x * phi, phi + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def relu(x):
    """max(x, 0), and its slope, 0 at 0 and 1 at NaN as in torch.  NaN stays NaN."""
    return tl.where(x < 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)


@triton.jit
def relu2(x):
    """max(x, 0)^2, and its slope.  NaN stays NaN."""
    y = tl.where(x < 0, 0.0, x)
    return y * y, 2 * y


PARTS = {False: "... (parts i)", True: "... (i parts)"}  # interleaved? -> the columns of z


def split_parts(z: Tensor, interleaved: bool) -> Tensor:
    """(..., 2I) -> (2, ..., I): gate and up."""
    return rearrange(z, f"{PARTS[interleaved]} -> parts ... i", parts=2)


def join_parts(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `split_parts`."""
    return rearrange([gate, up], f"parts ... i -> {PARTS[interleaved]}")


def torch_gelu(x: Tensor) -> Tensor:
    """F.gelu, also for inf and near it, where oneDNN's, which float32 on a CPU gets, doubles x first."""
    return F.gelu(x).where(x < 10, x)  # from 9 on, float64 does not know the two apart


def torch_relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


@dataclasses.dataclass(frozen=True)
class Activation:
    name: str
    base: str  # silu, gelu, relu or relu2: the f below, by the name that the C++ extension knows
    torch_fn: Callable[[Tensor], Tensor]  # f
    triton_fn: Callable  # x -> (f(x), f'(x)), in float32
    gated: bool

    @property
    def parts(self) -> int:
        """Rows of the up-projection for each intermediate channel: gate and up, or up alone."""
        return 2 if self.gated else 1

    def __call__(self, z: Tensor, interleaved: bool = False) -> Tensor:
        """(..., parts * I) -> (..., I), in plain torch; differentiable."""
        if not self.gated:
            return self.torch_fn(z)
        gate, up = split_parts(z, interleaved)
        return self.torch_fn(gate) * up


BASES = {
    "silu": (F.silu, silu),
    "gelu": (torch_gelu, gelu),
    "relu": (F.relu, relu),
    "relu2": (torch_relu2, relu2),
}
ACTIVATIONS = {
    a.name: a for a in [Activation(name, name, *fns, gated=False) for name, fns in BASES.items()]
} | {
    name: Activation(name, base, *BASES[base], gated=True)
    for name, base in [("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu")]
}


def get_activation(name: str) -> Activation:
    """The activation of that name, or a ValueError that lists the names there are."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
