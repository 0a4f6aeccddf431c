"""The activations of an expert: name -> f and h, each in torch and in Triton.  The only such list.

A gated activation maps (gate, up) to f(gate) * h(up), a plain one maps up to f(up); f and h are written once
each, with their slopes.  SwiGLU, GEGLU, ReGLU, where h(up) = up: Shazeer 2020, arXiv 2002.05202.
ReLU^2: So et al. 2021, arXiv 2109.08668.
geglu_tanh is GEGLU with the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415).
swiglu_oai is gpt-oss's clamped SwiGLU (OpenAI 2025, arXiv 2508.10925), with the limit 7 and alpha 1.702:

    g = min(gate, 7)    u = min(max(up, -7), 7)    out = g * sigmoid(1.702 * g) * (u + 1)
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .launch import tl, triton

LIMIT, ALPHA = 7.0, 1.702  # of swiglu_oai; written out in Triton


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
def gelu_tanh(x):
    """x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3), and its slope."""
    y = 1.5957691216057308 * x * (1 + 0.044715 * x * x)  # 2 * u
    sig, rest = tl.sigmoid(y), tl.sigmoid(-y)  # 1 - sig would cancel
    return x * sig, sig + x * sig * rest * 1.5957691216057308 * (1 + 0.134145 * x * x)


@triton.jit
def relu(x):
    """max(x, 0), and its slope, 0 at 0 and 1 at NaN as in torch.  NaN stays NaN."""
    return tl.where(x < 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)


@triton.jit
def relu2(x):
    """max(x, 0)^2, and its slope.  NaN stays NaN."""
    y = tl.where(x < 0, 0.0, x)
    return y * y, 2 * y


@triton.jit
def silu_oai(x):
    """x * sigmoid(1.702 * x), from x = 7 on a constant, and its slope, 0 above 7.  NaN stays NaN."""
    y = tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
    sig = tl.sigmoid(1.702 * y)
    value = y * sig
    return value, tl.where(x > 7.0, 0.0, sig + 1.702 * value * (1 - sig))


@triton.jit
def up_oai(x):
    """x held between -7 and 7, plus 1, and its slope, 1 at both limits and at NaN.  NaN stays NaN."""
    y = tl.clamp(x, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
    return y + 1, tl.where(tl.abs(x) > 7.0, 0.0, 1.0)


@triton.jit
def identity(x):
    """x, and its slope, with which the compiler multiplies nothing."""
    return x, 1.0


COLUMNS = {False: "... (two i)", True: "... (i two)"}  # interleaved? -> the columns of z


def split_gate_up(z: Tensor, interleaved: bool) -> Tensor:
    """(..., 2I) -> (2, ..., I): gate and up."""
    return rearrange(z, f"{COLUMNS[interleaved]} -> two ... i", two=2)


def join_gate_up(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `split_gate_up`."""
    return rearrange([gate, up], f"two ... i -> {COLUMNS[interleaved]}")


def torch_gelu(x: Tensor) -> Tensor:
    """F.gelu, also for inf and near it, where oneDNN's, which float32 on a CPU gets, doubles x first."""
    y = F.gelu(x)
    return y if x.is_cuda else y.where(x < 10, x)  # from 9 on, float64 does not know the two apart


def torch_silu_oai(x: Tensor) -> Tensor:
    x = x.clamp(max=LIMIT)
    return x * torch.sigmoid(ALPHA * x)


FUNCTIONS = {  # in torch; and in Triton, in float32, x -> (value, slope)
    "silu": (F.silu, silu),
    "gelu": (torch_gelu, gelu),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), gelu_tanh),
    "relu": (F.relu, relu),
    "relu2": (lambda x: F.relu(x).square(), relu2),
    "silu_oai": (torch_silu_oai, silu_oai),
    "up_oai": (lambda x: x.clamp(-LIMIT, LIMIT) + 1, up_oai),
    "identity": (lambda x: x, identity),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    name: str
    base: str  # f, by the name that the C++ extension knows, where the h that goes with it is known as well
    up: str | None = None  # h, or None for a plain activation

    @property
    def gated(self) -> bool:
        return self.up is not None

    @property
    def projections(self) -> int:
        """Rows of the up-projection for each intermediate channel: gate and up, or up alone."""
        return 2 if self.gated else 1

    def torch_fn(self, x: Tensor) -> Tensor:
        """f"""
        return FUNCTIONS[self.base][0](x)

    def torch_up(self, x: Tensor) -> Tensor:
        """h"""
        return FUNCTIONS[self.up][0](x)

    @property
    def triton_fns(self) -> dict[str, Callable | None]:
        """f and h by the names that kernels give them; h is None for a plain activation."""
        return {"ACTIVATION": FUNCTIONS[self.base][1], "UP": FUNCTIONS[self.up][1] if self.gated else None}

    def __call__(self, z: Tensor, interleaved: bool = False) -> Tensor:
        """(..., width) -> (..., I), in plain torch; differentiable."""
        if not self.gated:
            return self.torch_fn(z)
        gate, up = split_gate_up(z, interleaved)
        return self.torch_fn(gate) * self.torch_up(up)


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("swiglu", "silu", "identity"),
        Activation("swiglu_oai", "silu_oai", "up_oai"),
        Activation("geglu", "gelu", "identity"),
        Activation("geglu_tanh", "gelu_tanh", "identity"),
        Activation("reglu", "relu", "identity"),
        Activation("silu", "silu"),
        Activation("gelu", "gelu"),
        Activation("relu", "relu"),
        Activation("relu2", "relu2"),
    )
}


def get_activation(name: str) -> Activation:
    """The activation of that name, or a ValueError that lists the names there are."""
    if not isinstance(name, str):
        raise TypeError(f"activation must be a str, not {type(name).__name__}")
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
