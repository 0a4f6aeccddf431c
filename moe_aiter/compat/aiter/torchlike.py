"""AITER's names for what torch has as well, computed as AITER's configuration says."""

from ...layers.attention import attention as _attention
from ...layers.convolution import conv2d as _conv2d
from ...switches import computed

__all__ = ["attention", "conv2d", "dynamic_conv2d"]

attention = computed(_attention)
conv2d = computed(_conv2d)
# every shape is welcome to both; what `enable_dynamic_shapes` decides, it decides for both
dynamic_conv2d = conv2d
