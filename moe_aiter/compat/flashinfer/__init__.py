"""FlashInfer's functions: in an import, replace `flashinfer` by `moe_aiter.compat.flashinfer`."""

from .gemm import SegmentGEMMWrapper, bmm_fp8
from .grouped_mm import grouped_mm_bf16

__all__ = ["SegmentGEMMWrapper", "bmm_fp8", "grouped_mm_bf16"]
