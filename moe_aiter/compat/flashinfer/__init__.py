"""FlashInfer's documented names: `from moe_aiter.compat.flashinfer import SegmentGEMMWrapper`."""

from .gemm import SegmentGEMMWrapper

__all__ = ["SegmentGEMMWrapper"]
