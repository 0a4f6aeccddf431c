"""FlashInfer's names: `flashinfer` in an import becomes `moe_aiter.compat.flashinfer`."""

from .gemm import bmm_fp8

__all__ = ["bmm_fp8"]
