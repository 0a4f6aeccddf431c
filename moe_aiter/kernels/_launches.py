"""Launching a kernel that was launched like this before, past most of Triton's Python.

Triton looks at every argument of every launch to find out what it had compiled for; that takes the host as
long as a small kernel takes the GPU.  Here the same values as before mean the same compiled kernel.
"""

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

MOST = 1024  # launches that a kernel remembers: steps of many different sizes must not fill the memory
BY_VALUE = (int, bool, str, type(None))
ROCM, FAR = torch.version.hip is not None, 2**31  # there, kernels with near memory alone have 32-bit offsets


class Remembering(JITFunction):
    """A function of triton.jit that knows its launches; `run` is what `kernel[grid](...)` calls."""

    def __init__(self, fn):
        super().__init__(fn)
        self.launches = {}  # key -> what to launch

    def run(self, *args, grid, warmup, **constants):
        key = None if warmup or is_watched() else launch_key(args, constants)
        known = self.launches.get(key)
        if known is None:
            compiled = super().run(*args, grid=grid, warmup=warmup, **constants)
            if key is not None and isinstance(compiled, CompiledKernel):
                if len(self.launches) >= MOST:
                    self.launches.clear()
                rest = tuple(constants[name] for name in self.arg_names[len(args) :])
                self.launches[key] = compiled, rest, constants  # constants: they keep what `key` names by id
            return compiled
        compiled, rest, _ = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(key[0])
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(x, y, z, stream, function, metadata, None, None, None, *args, *rest)
        return compiled


def is_watched() -> bool:
    """Whether a profiler, say, wants to hear of each launch: a chain of hooks, or a function in its place."""
    runtime = knobs.runtime
    return any(getattr(h, "calls", h) for h in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def launch_key(args: tuple, constants: dict) -> tuple | None:
    """What decides which compiled kernel these arguments need, and a little more; None off the GPU.

    Triton compiles for a tensor's dtype and whether its address is a multiple of 16, on AMD also for whether
    its memory is below 2 GiB, which no other argument need tell; for a float's type; for an int's size and
    divisibility.  A descriptor says its own `launch_key`.
    """
    key = [torch._C._cuda_getDevice() if torch.cuda.is_initialized() else None]
    for a in args:
        if isinstance(a, Tensor):
            if not a.is_cuda:
                return None
            key += a.dtype, a.data_ptr() % 16 == 0, ROCM and a.untyped_storage().size() < FAR
        elif isinstance(a, float):
            key.append(float)
        else:
            key.append(getattr(a, "launch_key", a))
    key += [v if isinstance(v, BY_VALUE) else id(v) for v in constants.values()]
    return tuple(key)
