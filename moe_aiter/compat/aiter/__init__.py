"""AITER's functions: in an import, replace `aiter` by `moe_aiter.compat.aiter`.

An installed package `aiter` is not changed.
"""

from collections.abc import Callable
from typing import TypeVar, overload

from ...config import VERSION as __version__
from ...derived import cache_size as get_cache_size
from ...derived import set_cache_size
from ...layers.quantized import quantize
from ...switches import (
    dynamic_shapes_enabled,
    enable_dynamic_shapes,
    enable_fusion,
    enable_tensor_cores,
    fusion_enabled,
    get_default_precision,
    get_log_level,
    set_default_precision,
    set_log_level,
    tensor_cores_enabled,
)
from .gemm import (
    batched_gemm,
    cutlass_gemm,
    gemm_bias,
    gemm_gelu,
    gemm_relu,
    grouped_gemm,
    linear,
    matmul,
    sparse_gemm,
)
from .modules import AITERAttention, AITERConv2d, AITERLinear, attention, conv2d, dynamic_conv2d, gelu
from .ops.deepgemm import deepgemm
from .ops.enum import ActivationType, QuantType
from .ops.gemm_op_a8w8 import gemm_a8w8, int8_gemm
from .ops.moe_op import topk_softmax
from .ops.shuffle import ShuffledWeight, shuffle_weight, unshuffle_weight
from .ops.topk import biased_grouped_topk, grouped_topk

__all__ = [
    "AITERAttention", "AITERConv2d", "AITERLinear", "ActivationType", "QuantType", "ShuffledWeight",
    "__version__", "attention", "batched_gemm", "biased_grouped_topk", "conv2d", "cutlass_gemm",
    "deepgemm", "dynamic_conv2d", "dynamic_shapes_enabled", "enable_dynamic_shapes", "enable_fusion",
    "enable_tensor_cores", "fusion_enabled", "gelu", "gemm_a8w8", "gemm_bias", "gemm_gelu", "gemm_relu",
    "get_cache_size", "get_default_precision", "get_kernel", "get_log_level", "grouped_gemm",
    "grouped_topk", "int8_gemm", "linear", "list_kernels", "matmul", "quantize", "register_kernel",
    "set_cache_size", "set_default_precision", "set_log_level", "shuffle_weight", "sparse_gemm",
    "tensor_cores_enabled", "topk_softmax", "unshuffle_weight",
]  # fmt: skip

# functions that a program has registered by name

Kernel = TypeVar("Kernel", bound=Callable)
KERNELS: dict[str, Callable] = {}


@overload
def register_kernel(fn: Kernel, /) -> Kernel: ...
@overload
def register_kernel(*, name: str) -> Callable[[Kernel], Kernel]: ...
def register_kernel(fn: Callable | None = None, /, *, name: str | None = None) -> Callable:
    """Record a function by its own name, `@register_kernel`, or another, `@register_kernel(name="x")`.

    Returns the function itself, so that its gradient stays its own.  A name that is there already stands for
    the new function from then on, as when a cell of a notebook runs again.  Raises TypeError for what cannot
    be called or a name that is not a str, ValueError without a name.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if fn is None:
        return lambda fn: register_kernel(fn, name=name)
    if not callable(fn):
        raise TypeError(f"a kernel is a function, not {type(fn).__name__}")
    name = getattr(fn, "__name__", None) if name is None else name
    if not name:
        raise ValueError(f"{fn!r} has no name; give one by register_kernel(name=...)")
    KERNELS[name] = fn
    return fn


def list_kernels() -> list[str]:
    """The names of what is registered, sorted."""
    return sorted(KERNELS)


def get_kernel(name: str) -> Callable:
    """Return the kernel registered under `name`.  Raises ValueError, with the known names, for others."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if name not in KERNELS:
        raise ValueError(f"name: unknown kernel {name!r}; known: {', '.join(list_kernels()) or 'none'}")
    return KERNELS[name]
