"""FlashInfer's names: `flashinfer` in an import becomes `moe_aiter.compat.flashinfer`."""

from .gemm import SegmentGEMMWrapper, bmm_fp8

__all__ = ["SegmentGEMMWrapper", "bmm_fp8"]
