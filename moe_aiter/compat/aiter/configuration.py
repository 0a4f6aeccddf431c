"""AITER's configuration: see `moe_aiter/switches.py` and `moe_aiter/derived.py`."""

from ...derived import cache_size as get_cache_size
from ...derived import set_cache_size
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

__all__ = [
    "dynamic_shapes_enabled",
    "enable_dynamic_shapes",
    "enable_fusion",
    "enable_tensor_cores",
    "fusion_enabled",
    "get_cache_size",
    "get_default_precision",
    "get_log_level",
    "set_cache_size",
    "set_default_precision",
    "set_log_level",
    "tensor_cores_enabled",
]
