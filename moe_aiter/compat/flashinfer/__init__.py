"""FlashInfer's functions: in an import, replace `flashinfer` by `moe_aiter.compat.flashinfer`."""

from .gemm import SegmentGEMMWrapper, bmm_fp8

__all__ = ["SegmentGEMMWrapper", "bmm_fp8"]
