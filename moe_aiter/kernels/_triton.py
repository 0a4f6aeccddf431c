"""Triton where there is one, and kernels that are launched again and again.

macOS and Windows have no Triton.  There the kernels are never launched, but the files that define them,
which also hold the references and the public functions, must still import.
"""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from ..config import interpret

try:
    import triton
    import triton.language as tl

    from ._launches import Remembering
except ImportError:

    def _no_triton(*args, **kwargs):
        raise RuntimeError("this kernel needs Triton, which is not installed: pip install triton")

    triton = SimpleNamespace(jit=lambda fn: _no_triton)
    tl = SimpleNamespace(constexpr=lambda value: value)
    jit_kernel = triton.jit
else:
    jit_kernel = triton.jit if interpret else Remembering  # for kernels that Python launches

__all__ = ["cdiv", "jit_kernel", "next_power_of_2", "num_programs", "num_sms", "tl", "triton"]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.  Triton's own serves kernels as well, and takes launchers microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


@functools.cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(x: Tensor) -> int:
    """One program for each SM; as many as an H200 has where there is no GPU to ask."""
    return num_sms(x.device.index or 0) if x.is_cuda else 132
