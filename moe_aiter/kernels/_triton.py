"""Triton where there is one.

macOS and Windows have no Triton.  There the kernels are never launched, but the files that define them,
which also hold the references and the public functions, must still import.
"""

from types import SimpleNamespace

try:
    import triton
    import triton.language as tl
except ImportError:

    def _no_triton(*args, **kwargs):
        raise RuntimeError("this kernel needs Triton, which is not installed: pip install triton")

    triton = SimpleNamespace(jit=lambda fn: _no_triton, cdiv=_no_triton, next_power_of_2=_no_triton)
    tl = SimpleNamespace(constexpr=lambda value: value)

__all__ = ["tl", "triton"]
