"""AITER's functions: in an import, replace `aiter` by `moe_aiter.compat.aiter`.

An installed package `aiter` is not changed.
"""

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
from .modules import (
    AITERAttention,
    AITERConv2d,
    AITERLinear,
    attention,
    conv2d,
    dynamic_conv2d,
    gelu,
)
from .ops.deepgemm import deepgemm
from .ops.gemm_op_a8w8 import gemm_a8w8, int8_gemm
from .ops.shuffle import ShuffledWeight, shuffle_weight, unshuffle_weight
from .registry import get_kernel, list_kernels, register_kernel

__all__ = [
    "AITERAttention",
    "AITERConv2d",
    "AITERLinear",
    "ShuffledWeight",
    "__version__",
    "attention",
    "batched_gemm",
    "conv2d",
    "cutlass_gemm",
    "deepgemm",
    "dynamic_conv2d",
    "dynamic_shapes_enabled",
    "enable_dynamic_shapes",
    "enable_fusion",
    "enable_tensor_cores",
    "fusion_enabled",
    "gelu",
    "gemm_a8w8",
    "gemm_bias",
    "gemm_gelu",
    "gemm_relu",
    "get_cache_size",
    "get_default_precision",
    "get_kernel",
    "get_log_level",
    "grouped_gemm",
    "int8_gemm",
    "linear",
    "list_kernels",
    "matmul",
    "quantize",
    "register_kernel",
    "set_cache_size",
    "set_default_precision",
    "set_log_level",
    "shuffle_weight",
    "sparse_gemm",
    "tensor_cores_enabled",
    "unshuffle_weight",
]
