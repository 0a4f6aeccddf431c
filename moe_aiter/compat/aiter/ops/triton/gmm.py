"""AITER's `aiter.ops.triton.gmm`."""

from .....kernels.grouped.gmm import gmm
from .....kernels.grouped.ptgmm import nptgmm, ptgmm
from .....tuning.aiter_json import get_config

__all__ = ["get_config", "gmm", "nptgmm", "ptgmm"]
