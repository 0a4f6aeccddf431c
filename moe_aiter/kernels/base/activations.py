"""The activations of an expert: name -> f and h, each in torch and in Triton.  The only such list.

A gated activation maps (gate, up) to f(gate) * h(up), a plain one maps up to f(up); f and h are written once
each, with their slopes.  SwiGLU, GEGLU, ReGLU, where h(up) = up: Shazeer 2020, arXiv 2002.05202.
ReLU^2: So et al. 2021, arXiv 2109.08668.
geglu_tanh is GEGLU with the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415).
`swiglu_limit` is the clamped SwiGLU of gpt-oss (OpenAI 2025, arXiv 2508.10925), whose numbers have the name
swiglu_oai, and of DeepSeek-V4 (DeepSeek-AI 2026), whose alpha is 1 and whose up_offset is 0:

    g = min(gate, gate_max)
    u = min(max(up, -up_limit), up_limit)
    out = g * sigmoid(alpha * g) * (u + up_offset)

`swiglu_softcap` is the SwiGLU of Inkling 2 (Thinking Machines Lab 2026):

    out = gate_cap * tanh(gate / gate_cap) * sigmoid(gate) * up_cap * tanh(up / up_cap)
"""

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .check import check_finite, check_positive
from .fixed_rows import each_number
from .launch import tl, triton


class Limits(NamedTuple):
    """The numbers of `swiglu_limit`, by the names of its arguments."""

    gate_max: float
    up_limit: float
    alpha: float
    up_offset: float


class Caps(NamedTuple):
    """The numbers of `swiglu_softcap`, by the names of its arguments."""

    gate_cap: float
    up_cap: float


SMALLEST, LARGEST = torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max
OAI = Limits(gate_max=7.0, up_limit=7.0, alpha=1.702, up_offset=1.0)
# Triton takes constants of a function from its globals; `with_limits` makes copies that have other globals
GATE_MAX, UP_LIMIT, ALPHA, UP_OFFSET = map(tl.constexpr, OAI)
GATE_CAP, UP_CAP = map(tl.constexpr, Caps(gate_cap=4.0, up_cap=25.0))


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
def silu_limit(x):
    """x * sigmoid(alpha * x), from x = gate_max on a constant, and its slope, 0 above.  NaN stays NaN."""
    y = tl.minimum(x, GATE_MAX, propagate_nan=tl.PropagateNan.ALL)
    sig = tl.sigmoid(y * ALPHA)
    value = y * sig
    return value, tl.where(x > GATE_MAX, 0.0, sig + value * ALPHA * (1 - sig))


@triton.jit
def up_limit(x):
    """x held in +-up_limit, plus up_offset, and its slope, 1 at both limits and at NaN.  NaN stays NaN."""
    y = tl.clamp(x, -UP_LIMIT, UP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return y + UP_OFFSET, tl.where(tl.abs(x) > UP_LIMIT, 0.0, 1.0)


@triton.jit
def sigmoid(x):
    return tl.sigmoid(x)


@triton.jit
def tanh(x):
    """Near 0, where the difference would cancel, by a polynomial, exact to 2^-24.  NaN stays NaN."""
    s = x * x
    near = x + x * s * (-0.33332947 + s * (0.13320724 + s * (-0.05267174 + s * 0.01643744)))
    return tl.where(s < 0.3, near, 2 * sigmoid(2 * x) - 1)


@triton.jit
def capped(x, cap: tl.constexpr):
    """cap * tanh(x / cap), and its slope, 0 at both ends."""
    t = tanh(x * (1 / cap))
    return t * cap, 1 - t * t


@triton.jit
def silu_softcap(x):
    """gate_cap * tanh(x / gate_cap) * sigmoid(x), and its slope."""
    sig = sigmoid(x)
    value, slope = capped(x, GATE_CAP)
    return value * sig, sig * (slope + value * (1 - sig))


@triton.jit
def up_softcap(x):
    """up_cap * tanh(x / up_cap), and its slope."""
    return capped(x, UP_CAP)


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


def torch_silu_limit(x: Tensor, n: Limits) -> Tensor:
    x = x.clamp(max=n.gate_max)
    return x * torch.sigmoid(n.alpha * x)


def torch_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


FUNCTIONS = {  # in torch, with its numbers if there are; and in Triton, in float32, x -> (value, slope)
    "silu": (F.silu, silu),
    "gelu": (torch_gelu, gelu),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), gelu_tanh),
    "relu": (F.relu, relu),
    "relu2": (lambda x: F.relu(x).square(), relu2),
    "silu_limit": (torch_silu_limit, silu_limit),
    "up_limit": (lambda x, n: x.clamp(-n.up_limit, n.up_limit) + n.up_offset, up_limit),
    "silu_softcap": (lambda x, n: torch_cap(x, n.gate_cap) * torch.sigmoid(x), silu_softcap),
    "up_softcap": (lambda x, n: torch_cap(x, n.up_cap), up_softcap),
    "identity": (lambda x: x, identity),
}


def with_globals(function: Callable, jit: Callable, **names) -> Callable:
    """Return a copy of a Triton or Gluon function that finds these functions and constants by their names."""
    fn = function.fn
    return jit(types.FunctionType(fn.__code__, fn.__globals__ | names, fn.__name__))


def with_limits(function: Callable, limits: Limits | Caps, jit: Callable) -> Callable:
    """Return a copy of a Triton or Gluon function with these numbers for its global constants."""
    return with_globals(
        function, jit, **{name.upper(): tl.constexpr(n) for name, n in limits._asdict().items()}
    )


@dataclasses.dataclass(frozen=True)
class Activation:
    name: str
    base: str  # f, by the name that the C++ extension knows, where the h that goes with it is known as well
    up: str | None = None  # h, or None for a plain activation
    limits: tuple[Limits | Caps] | tuple[()] = ()  # further arguments of f and h

    @property
    def gated(self) -> bool:
        return self.up is not None

    @property
    def projections(self) -> int:
        """Rows of the up-projection for each intermediate channel: gate and up, or up alone."""
        return 2 if self.gated else 1

    def torch_fn(self, x: Tensor) -> Tensor:
        """f"""
        return each_number(lambda t: FUNCTIONS[self.base][0](t, *self.limits), x)

    def torch_up(self, x: Tensor) -> Tensor:
        """h"""
        return each_number(lambda t: FUNCTIONS[self.up][0](t, *self.limits), x)

    @functools.cached_property
    def triton_fns(self) -> dict[str, Callable | None]:
        """f and h in Triton, as `kernel_functions` returns them."""
        return self.kernel_functions({name: fns[1] for name, fns in FUNCTIONS.items()}, triton.jit)

    def kernel_functions(
        self, functions: Mapping[str, Callable], jit: Callable
    ) -> dict[str, Callable | None]:
        """f and h by the names that kernels give them; h is None for a plain activation."""
        found = {"ACTIVATION": functions[self.base], "UP": functions[self.up] if self.gated else None}
        if not self.limits:
            return found
        return {name: with_limits(fn, *self.limits, jit) for name, fn in found.items()}

    @property
    def host_arguments(self) -> tuple[str, list[float], bool]:
        """Return the arguments that stand for this activation in the C++ extension."""
        return self.base, [number for limits in self.limits for number in limits], self.gated

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
        Activation("swiglu_oai", "silu_limit", "up_limit", (OAI,)),
        Activation("geglu", "gelu", "identity"),
        Activation("geglu_tanh", "gelu_tanh", "identity"),
        Activation("reglu", "relu", "identity"),
        Activation("silu", "silu"),
        Activation("gelu", "gelu"),
        Activation("relu", "relu"),
        Activation("relu2", "relu2"),
    )
}


def swiglu_limit(gate_max: float, up_limit: float, alpha: float = 1.0, up_offset: float = 0.0) -> str:
    """Return the name of SwiGLU with limits, which every `activation` argument takes.

        g = min(gate, gate_max)
        u = min(max(up, -up_limit), up_limit)
        out = g * sigmoid(alpha * g) * (u + up_offset)

    DeepSeek-V4 and HY-V4 have (10, 10), gpt-oss (7, 7, 1.702, 1), whose name is "swiglu_oai".  A gradient
    is 0 beyond a limit.  Each set of numbers has kernels of its own, compiled when they are first used.

    Source: gpt-oss (OpenAI 2025, arXiv 2508.10925); DeepSeek-V4 (DeepSeek-AI 2026).
    Raises ValueError unless all numbers but up_offset are above 0, and all that are not 0 within the normal
    numbers of float16, 6.1e-5 to 65504; TypeError if one is no number.
    """
    check_positive(gate_max=gate_max, up_limit=up_limit, alpha=alpha)
    check_finite(up_offset=up_offset)
    limits = Limits(*map(float, (gate_max, up_limit, alpha, up_offset)))
    return "swiglu_oai" if limits == OAI else named("swiglu_limit", limits)


def swiglu_softcap(gate_cap: float, up_cap: float) -> str:
    """Return the name of SwiGLU with soft caps, which every `activation` argument takes.

        out = gate_cap * tanh(gate / gate_cap) * sigmoid(gate) * up_cap * tanh(up / up_cap)

    Inkling 2 has (4, 25).  Each pair of numbers has kernels of its own, compiled when they are first used.

    Source: Inkling 2 (Thinking Machines Lab 2026), as transformers has it.
    Raises ValueError unless both numbers are above 0 and within the normal numbers of float16, 6.1e-5 to
    65504; TypeError if one is no number.
    """
    check_positive(gate_cap=gate_cap, up_cap=up_cap)
    return named("swiglu_softcap", Caps(float(gate_cap), float(up_cap)))


def named(function: str, numbers: Limits | Caps) -> str:
    """Return the name that a function of `NUMBERED` gives to these numbers; checks that float16 has them."""
    for name, number in numbers._asdict().items():
        if number and not SMALLEST <= abs(number) <= LARGEST:
            raise ValueError(
                f"{name} must be a normal float16, {SMALLEST:.2g} to {LARGEST:.0f}, not {number}"
            )
    return f"{function}({', '.join(map(repr, numbers))})"


NUMBERED = {  # functions that name activations, of 2 numbers or more; the numbers, f and h
    "swiglu_limit": (swiglu_limit, Limits, "silu_limit", "up_limit"),
    "swiglu_softcap": (swiglu_softcap, Caps, "silu_softcap", "up_softcap"),
}
_numbered: dict[str, Activation] = {}  # by name; torch.compile warns of functools.cache
FORM = re.compile(rf"({'|'.join(NUMBERED)})\((.*)\)")  # an activation by its numbers, as `named` writes it


def get_activation(name: str) -> Activation:
    """The activation of that name, or a ValueError that lists the names there are."""
    if not isinstance(name, str):
        raise TypeError(f"activation must be a str, not {type(name).__name__}")
    return ACTIVATIONS.get(name) or _numbered.get(name) or with_numbers(name)


def with_numbers(name: str) -> Activation:
    """Return the activation that `name` describes, "swiglu_limit(10, 10)" for example."""
    match = FORM.fullmatch(name)
    if not match:
        known, functions = ", ".join(sorted(ACTIVATIONS)), " and ".join(f"{fn}()" for fn in NUMBERED)
        raise ValueError(f"unknown activation {name!r}; known: {known}, and what {functions} return")
    function, kind, f, h = NUMBERED[match[1]]
    try:
        numbers = [float(number) for number in match[2].split(",")]
    except ValueError:
        numbers = []
    most = len(kind._fields)
    if not 2 <= len(numbers) <= most:
        takes = " to ".join(map(str, sorted({2, most})))
        raise ValueError(f"activation is {name!r}, but {match[1]} takes {takes} numbers")
    same = function(*numbers)
    if same != name:
        return get_activation(same)
    found = Activation(name, f, h, (kind(*numbers),))
    if not torch.compiler.is_compiling():  # what a trace has read must not change
        _numbered[name] = found
    return found
