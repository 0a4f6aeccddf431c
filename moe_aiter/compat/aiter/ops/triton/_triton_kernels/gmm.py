"""AITER's `aiter.ops.triton._triton_kernels.gmm`: its `get_config`."""

from ......tuning.aiter_json import get_config

__all__ = ["get_config"]
