"""AITER's `aiter.ops.triton._triton_kernels.gmm`, where its configurations are looked up."""

from ......tuning.aiter_json import get_config

__all__ = ["get_config"]
