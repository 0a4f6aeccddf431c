"""The C++ extension `moe_aiter._host`, where it is built.  The only file that imports it.

The extension works on NumPy views of CPU tensors. It makes the views itself from addresses and shapes,
because `Tensor.numpy()` fixes the size of a tensor's storage for good, and FSDP2 resizes the storages of
parameters.
NumPy has no bfloat16, so the extension sees bfloat16 as uint16.
"""

import functools
import importlib.metadata
import logging
import pathlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...config import settings

log = logging.getLogger("moe_aiter")

try:
    from ... import _host as ext

    reason = ""
except ImportError as error:
    ext = None
    reason = str(error)

HOST_DTYPES = (torch.float32, torch.bfloat16)


def host(launch: Callable) -> Callable | None:
    """`launch` as an op's host implementation, or None, so that the op has none, without the extension."""
    return launch if ext is not None else None


def check_built(x: Tensor) -> None:
    """Say once, at the first use of a CPU tensor, that the extension is missing and how to get it."""
    if ext is None and x.device.type == "cpu":
        warn_missing()


@functools.cache
def warn_missing() -> None:
    log.warning(
        "the C++ extension moe_aiter._host is missing (%s); the CPU path is plain torch, which is slower. %s",
        reason,
        remedy(),
    )


PACKAGE = pathlib.Path(__file__).parents[2]


def remedy() -> str:
    """Say how to get the extension; Python may have taken a source folder, not the installed package."""
    if (PACKAGE / "metadata.json").exists():
        return "Copies from the kernel hub have none; an installed package moe-aiter has it"
    for found in importlib.metadata.distributions(name="moe-aiter"):
        for file in found.files or ():
            installed = pathlib.Path(found.locate_file(file))
            if file.match("moe_aiter/_host.*") and installed.parent != PACKAGE and installed.exists():
                return (
                    f"Python took the source folder {PACKAGE}, but the package in {installed.parent} has it: "
                    "leave the folder, or build in place with `python setup.py build_ext --inplace`"
                )
    return "With a C++17 compiler, `pip install .` in the source tree builds it"


VIEWS = (
    {}
    if ext is None
    else {
        torch.float32: ext.view_float32,
        torch.bfloat16: ext.view_bfloat16,
        torch.int32: ext.view_int32,
        torch.int64: ext.view_int64,
    }
)


def array(x: Tensor | None) -> np.ndarray | None:
    """Return a C-contiguous NumPy view of a CPU tensor, or of a contiguous copy if its strides are others."""
    if x is None:
        return None
    if not x.is_cpu or x.dtype not in VIEWS:
        raise TypeError(f"the C++ extension takes {[*VIEWS]} on the CPU, not {x.dtype} on {x.device}")
    if not x.is_contiguous() or x.is_neg():
        x = x.detach().contiguous().resolve_neg()
    return VIEWS[x.dtype](x.data_ptr(), x.shape, x)


def indices(x: Tensor) -> np.ndarray:
    """`array` of indices, as int32."""
    return array(saturated(x))


def saturated(x: Tensor) -> Tensor:
    """Indices as int32.  One that does not fit stays out of range, and a negative one negative."""
    return x if x.dtype == torch.int32 else x.clamp(-1, torch.iinfo(torch.int32).max).int()


def use_huge_pages(*fresh: Tensor) -> None:
    """Ask for huge pages for those outputs that malloc takes from the kernel afresh each time."""
    for x in fresh:
        if x.nbytes >= 2**22:
            ext.use_huge_pages(x.data_ptr(), x.nbytes)


def num_threads() -> int:
    """Never more than torch would use: a forked child, which must not wake threads, need only tell torch."""
    torch_threads = torch.get_num_threads()
    return min(settings.num_threads or torch_threads, torch_threads)
