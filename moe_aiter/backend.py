"""The former place of these names: deprecated, until 0.3."""

import warnings

from .op import BackendError, register_kernel, use

__all__ = ["BackendError", "register_kernel", "use"]

warnings.warn("moe_aiter.backend is deprecated: import from moe_aiter.op", DeprecationWarning, stacklevel=2)
