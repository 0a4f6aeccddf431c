"""The former place of these names, kept until 0.3."""

from .op import BackendError, register_kernel, use

__all__ = ["BackendError", "register_kernel", "use"]
