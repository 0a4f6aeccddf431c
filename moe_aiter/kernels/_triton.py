"""Triton where there is one, and kernels that are launched again and again.

macOS and Windows have no Triton.  There the kernels are never launched, but the files that define them,
which also hold the references and the public functions, must still import.
"""

from types import SimpleNamespace

from ..config import interpret

try:
    import triton
    import triton.language as tl

    from ._launches import Remembering
except ImportError:

    def _no_triton(*args, **kwargs):
        raise RuntimeError("this kernel needs Triton, which is not installed: pip install triton")

    triton = SimpleNamespace(jit=lambda fn: _no_triton, cdiv=_no_triton, next_power_of_2=_no_triton)
    tl = SimpleNamespace(constexpr=lambda value: value)
    jit_kernel = triton.jit
else:
    jit_kernel = triton.jit if interpret else Remembering  # for kernels that Python launches

__all__ = ["jit_kernel", "tl", "triton"]
