"""Gluon, what differs between its versions (Triton 3.6 to 3.9), and what launchers of Gluon kernels share.

No other file imports Gluon.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...config import settings
from ...private_api import gluon_internals
from ...tuning import Config
from ..base.launch import Boxed, next_power_of_2

__all__ = [
    "DTYPES", "PLAIN", "Number", "aggregate", "as_tile", "bind_descriptor", "descriptor",
    "fence_async_shared", "gl", "gluon", "jit_kernel", "mbarrier", "mma_v2", "plain_descriptor", "ragged",
    "ragged_descriptor", "row_load", "rows_arrive", "shared_layout", "store_wait", "tma", "tma_load",
    "tma_store", "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait",
]  # fmt: skip

make_aggregate, reinterpret = gluon_internals()
# 3.9 has other names for the copies
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
row_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
rows_arrive = async_copy.mbarrier_arrive
store_wait = tma.store_wait

Number = object  # in an aggregate a number that the compiler may know, 1 say, and so a tensor or a constexpr
FAR = gl.constexpr(0x40000000)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int8: gl.int8,
    torch.uint8: gl.uint8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


jit_kernel = gluon.jit  # marks a kernel that Python launches


def aggregate(cls):
    """A struct for kernels: its fields are the arguments of its constructor, in order."""
    fields = cls.__annotations__

    def init(self, *values):
        for name, value in zip(fields, values, strict=True):
            constant = fields[name] is gl.constexpr or value is None or isinstance(value, int)
            constant = constant and not isinstance(value, gl.constexpr)
            setattr(self, name, gl.constexpr(value) if constant else value)

    init.__triton_builtin__ = True
    cls.__init__ = gluon.constexpr_function(init)
    return make_aggregate(cls)


@functools.cache
def shared_layout(dtype: torch.dtype, *box: int) -> gl.NVMMASharedLayout:
    """The swizzled layout that TMA and wgmma share, for a buffer of this shape."""
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[dtype])


class Descriptor(Boxed, TensorDescriptor):
    """Triton's descriptor without its checks of sizes and strides, which `by_tma` has made."""

    @functools.cached_property  # asked for once by each bound kernel
    def layout(self) -> gl.NVMMASharedLayout:
        return shared_layout(self.base.dtype, *self.block_shape)


def descriptor(x: Tensor, *box: int) -> Descriptor:
    """Return the descriptor by which TMA copies boxes of this shape; TMA clips them at the ends of `x`."""
    return Descriptor(x, x.shape, x.stride(), box)


def weights_layout(w: Tensor) -> str:
    """Return how the numbers of w (G, K, N) lie side by side, by the names of `Weights`."""
    return "columns" if w.stride(2) == 1 else "rows"


def weights_descriptor(w: Tensor, block_n: int, block_k: int) -> Descriptor:
    """Return the descriptor by which `Weights` copies tiles of w (G, K, N), or of w (G, 2, K, N) pairs."""
    shape, strides, box = list(w.shape), list(w.stride()), [1, *w.shape[1:-2], block_k, block_n]
    if shape[0] == 1:
        strides[0] = 16  # it may be any number, and TMA takes multiples of 16 bytes
    if strides[-1] != 1:
        for axes in (shape, strides, box):
            axes[-2:] = axes[:-3:-1]
    return Descriptor(w, tuple(shape), tuple(strides), tuple(box))


def plain_descriptor(x: Tensor, *box: int) -> Descriptor:
    """Return a descriptor for boxes that lie in shared memory row by row, without a swizzle: see `PLAIN`."""
    out = descriptor(x, *box)
    out.layout = gl.NVMMASharedLayout(0, 8 * x.itemsize, len(box))
    return out


def ragged_descriptor(x: Tensor, *box: int, pieces: int = 1) -> Descriptor:
    """Return a descriptor for boxes of rows of `x` (M, N) that end where a group ends: see `ragged`.

    The columns may be several pieces, such as gate and up: a box ends where its piece ends.

    An axis whose index FAR makes the address wrap around to where it was lets the row axis begin anywhere
    (the trick of triton.tools.ragged_tma).
    """
    stride, width = x.stride(0), x.shape[1] // pieces
    shape, strides = (0x7FFF0000, 0x7FFF0000, FAR.value), (2**34 - stride, stride, stride)
    if pieces == 1:
        return Descriptor(x, (*shape, width), (*strides, 1), (1, 1, *box))
    return Descriptor(x, (*shape, pieces, width), (*strides, width, 1), (1, 1, box[0], 1, box[1]))


def bind_descriptor(make: Callable[..., Descriptor], *box: int, **options: int) -> Callable:
    """Return `make(x, *box, **options)` as a function of tensors that are alike in all but addresses.

    It computes shape and strides once, and again with MOE_AITER_DEBUG=1, where AssertionError says if they
    are others.  It returns None for None.
    """
    like = None

    def of(x: Tensor | None) -> Descriptor | None:
        nonlocal like
        if x is None:
            return None
        if like is None or settings.debug:
            made = make(x, *box, **options)
            now = made.shape, made.strides, made.block_shape
            if like not in (None, now):
                raise AssertionError(f"a descriptor is bound to {like}, not to {now}")
            like = now
        return Descriptor(x, *like)

    return of


@gluon.jit
def as_tile(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr = None):
    """A buffer in shared memory, seen with another shape, layout and perhaps DTYPE."""
    return reinterpret(buffer, buffer.dtype if DTYPE is None else DTYPE, SHAPE, LAYOUT)


@gluon.jit
def ragged(row, end, column, PIECE: gl.constexpr = None):
    """Return a box's coordinates for a ragged descriptor: it begins at `row` and is clipped at `end`."""
    if PIECE is None:
        at = [FAR, end, FAR - (end - row), column]
    else:
        at = [FAR, end, FAR - (end - row), PIECE, column]
    return at


# launchers


SHARED_BYTES = 226 * 1024  # of a program; 1 KiB is left for barriers, the tile queue and starting warpgroups


def tile_options(config: Config) -> dict:
    """The launch arguments that every product takes."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def kind_of(x: Tensor) -> str:
    """Return the ending of a product's name in the tables for this dtype, which has tiles of its own."""
    return "" if x.itemsize > 1 else "_int8" if x.dtype == torch.int8 else "_fp8"


def block_g(groups: int) -> int:
    """The length of a list of groups; each of 32 lanes reads as many of them."""
    return max(next_power_of_2(groups), 32)


def flatten(x: Tensor) -> tuple[Tensor, int]:
    """x (G, M, N), whose matrices are `stacked`, as one matrix, and how many of its rows they lie apart."""
    row = x.stride(1)
    apart = x.stride(0) // row if x.shape[0] > 1 else x.shape[1]
    height = (x.shape[0] - 1) * apart + x.shape[1]
    return x.as_strided((height, x.shape[2]), (row, 1)), apart


@functools.cache
def beside_groups(config: Config, buffers: int, groups: int, itemsize: int = 2) -> Config:
    """With as many stages, of elements of so many bytes, as fit beside buffers of so many elements of 16 bits
    and the lists of the groups."""
    stage = itemsize * (config.block_m + config.block_n) * config.block_k
    room = SHARED_BYTES - 2 * buffers - 8 * block_g(groups)
    return dataclasses.replace(config, num_stages=min(config.num_stages, room // stage))
