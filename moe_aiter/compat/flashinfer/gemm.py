"""`flashinfer.gemm`."""

from ...layers.segment import SegmentGEMMWrapper

__all__ = ["SegmentGEMMWrapper"]
