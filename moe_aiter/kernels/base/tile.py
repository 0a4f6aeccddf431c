"""Triton helpers shared by the grouped kernels."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from ... import tuning
from ...config import interpret
from ...switches import float32_precision
from ...tuning.aiter_json import AMD_OPTIONS, TILE
from .launch import Descriptor, cdiv, next_power_of_2, num_programs, tl, triton

# what tl.dot can multiply; the interpreter reads bfloat16 as raw bits
TILE_DTYPES = (torch.float16, torch.float32) if interpret else (torch.float16, torch.bfloat16, torch.float32)


FOUND = tl.constexpr(16)  # Triton tells apart arguments that are multiples of it


@triton.jit
def list_groups(group_sizes_ptr, M, G, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, starts_ptr=None):
    """The row where each group ends, and the row tiles up to its last: (BLOCK_G,) each, for `find_group`.

    Sizes that are negative or sum to more than M are clamped, so that nothing outside (M,) is ever touched.
    With starts_ptr (G,), groups begin there, in ascending order, and no tile stands for the other rows.
    """
    g = tl.arange(0, BLOCK_G)
    size = tl.load(group_sizes_ptr + g, mask=g < G, other=0).to(tl.int64)
    size = tl.minimum(tl.maximum(size, 0), M)  # or the sum could overflow
    if starts_ptr is not None:
        end = tl.load(starts_ptr + g, mask=g < G, other=M).to(tl.int64) + size
    else:
        end = tl.cumsum(size, 0)
    start, end = tl.minimum(end - size, M), tl.minimum(end, M)
    end = end.to((tl.program_id(0) + M).dtype)  # 32 bits where M has no more, to spare registers
    return end, tl.cumsum(tl.cdiv(end - start, BLOCK_M).to(tl.int32), 0)


@triton.jit
def find_group(tile, ends, tiles, M, G, BLOCK_M: tl.constexpr, starts_ptr=None):
    """Row tile number -> (group, first row, end row); past the last group, the rows of group G end at M."""
    before = tiles <= tile
    group = tl.minimum(tl.sum(before.to(tl.int32), 0), G)
    row_end = tl.min(tl.where(before, M, ends), 0)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + group, mask=group < G, other=M).to(tl.int64)
        row = start + (tile - tl.max(tl.where(before, tiles, 0), 0)).to(tl.int64) * BLOCK_M
    else:  # ends - tiles * BLOCK_M never rises, so the last group before the tile has the least
        short = tl.min(tl.where(before, ends - tiles.to(tl.int64) * BLOCK_M, 0), 0)
        row = (tl.zeros((), tl.int64) + tile) * BLOCK_M + short
    return group, row, row_end


@triton.jit
def locate(tile, group_sizes_ptr, M, G, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, starts_ptr=None):
    """`find_group` of one tile.  A tile past all M rows has none: its first row is not below its end.

    With starts_ptr, tiles past the last group are of group G.
    """
    ends, tiles = list_groups(group_sizes_ptr, M, G, BLOCK_G, BLOCK_M, starts_ptr)
    return find_group(tile, ends, tiles, M, G, BLOCK_M, starts_ptr)


@triton.jit
def group_rows(group, group_sizes_ptr, M, BLOCK_G: tl.constexpr):
    """Group number -> (first row, end row), clamped as in `list_groups`."""
    g = tl.arange(0, BLOCK_G)
    size = tl.load(group_sizes_ptr + g, mask=g < group, other=0).to(tl.int64)
    row = tl.minimum(tl.sum(tl.minimum(tl.maximum(size, 0), M), 0), M)
    size = tl.load(group_sizes_ptr + group).to(tl.int64)
    return row, row + tl.minimum(tl.maximum(size, 0), M - row)


@triton.jit
def in_units(n, UNIT: tl.constexpr):
    """Tell the compiler that an argument n, or each of a tuple, is 1 or a multiple of UNIT: see `unit_of`."""
    if UNIT == 1 or UNIT == FOUND:
        return n
    elif isinstance(n, tl.tuple):
        return [in_units(part, UNIT) for part in n]
    elif isinstance(n, tl.tensor):
        return whole_units(n, UNIT)
    else:
        return n


@triton.jit
def whole_units(n, UNIT: tl.constexpr):
    """n, rounded down to a multiple of UNIT, which the compiler sees."""
    return n // UNIT * UNIT


@triton.jit
def swizzle(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr, NUM_DIES: tl.constexpr):
    """Program number -> (row tile, column tile): GROUP_M row tiles walk the columns together.

    Where several dies have an L2 each and programs are dealt to them in turn, every die first gets a
    contiguous share of the programs.
    """
    if NUM_DIES > 1:
        total = tiles_m * tiles_n
        share, rest = total // NUM_DIES, total % NUM_DIES
        die = pid % NUM_DIES
        pid = die * share + tl.minimum(die, rest) + pid // NUM_DIES
    width = GROUP_M * tiles_n
    first = pid // width * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + pid % width % height, pid % width // height


@triton.jit
def multiply(
    acc,  # (BLOCK_M, BLOCK_N) float32
    x_ptrs,  # (BLOCK_M, BLOCK_K)
    w_ptrs,  # (BLOCK_K, BLOCK_N)
    K, x_stride_k, w_stride_k, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
    live=None,  # (BLOCK_M,)
    BOXES: tl.constexpr = None, group=None,
    first=None,  # column
):  # fmt: skip
    """acc + x @ w over K, in steps of BLOCK_K.

    live        rows that exist.  Other rows are not read: if all programs read one row in their place, that
                row is a bottleneck.  None: all rows must be readable, as all columns must be.
    TRANSPOSED  as (acc.T + w.T @ x.T).T, see `is_transposed`.
    BOXES       w_ptrs is a descriptor, see `boxes_of`.
    """
    k = tl.arange(0, BLOCK_K)
    if TRANSPOSED:
        acc = acc.T
    for k_start in range(0, K, BLOCK_K):
        k_mask = k < K - k_start
        if EVEN_K:
            x = tl.load(x_ptrs) if live is None else tl.load(x_ptrs, mask=live[:, None], other=0.0)
        else:
            x_mask = k_mask[None, :] if live is None else live[:, None] & k_mask[None, :]
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if BOXES is not None:
            w = load_box(w_ptrs, group, first, k_start, acc.shape[1], BLOCK_K, BOXES)
        else:
            w = tl.load(w_ptrs) if EVEN_K else tl.load(w_ptrs, mask=k_mask[:, None], other=0.0)
        left, right = (operand(w).T, operand(x).T) if TRANSPOSED else (operand(x), operand(w))
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K * x_stride_k
        if BOXES is None:
            w_ptrs += BLOCK_K * w_stride_k
    return acc.T if TRANSPOSED else acc


@triton.jit
def load_box(w_desc, group, n, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BOXES: tl.constexpr):
    """The tile (BLOCK_K, BLOCK_N) of weights from column n and row k on; zeros past their ends."""
    if BOXES == "rows":
        return w_desc.load([group, n, k]).reshape(BLOCK_N, BLOCK_K).T
    elif BOXES == "pairs":
        return w_desc.load([group, 0, n, k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        return w_desc.load([group, k, n]).reshape(BLOCK_K, BLOCK_N)


@triton.jit
def first_column(tile_n, N, BLOCK_N: tl.constexpr, UNIT: tl.constexpr):
    """The first column of a tile.  The last tile begins earlier, to end where the N columns do."""
    return tl.multiple_of(tl.maximum(tl.minimum(tile_n * BLOCK_N, N - BLOCK_N), 0), UNIT)


@triton.jit
def operand(x):
    """Convert x to a dtype that tensor cores of every GPU multiply: 8-bit floats to bfloat16, exactly."""
    return x.to(tl.bfloat16) if x.dtype.is_fp8() else x


@triton.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def add_columns(
    acc,  # (rows, columns) of a tile, or of a part of it
    k,  # (rows,)
    first,  # column
    K, N,
    out_ptr,  # (K, N)
    out_strides,  # g, k, n
):  # fmt: skip
    """out += acc, a few columns at a time: acc and all that it is added to would not fit in registers."""
    WIDTH: tl.constexpr = acc.shape[1]
    if WIDTH > 32:
        half: tl.constexpr = WIDTH // 2
        left, right = halves(acc)
        add_columns(left, k, first, K, N, out_ptr, out_strides)
        add_columns(right, k, first + half, K, N, out_ptr, out_strides)
    else:
        n = first + tl.arange(0, WIDTH)
        out_ptrs = (
            out_ptr + k.to(tl.int64)[:, None] * out_strides[1] + n.to(tl.int64)[None, :] * out_strides[2]
        )
        mask = (k < K)[:, None] & (n < N)[None, :]
        acc += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def dense(*plan: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return contiguous tensors: kernels take no strides of a plan, which is small."""
    return [t if t is None else t.contiguous() for t in plan]


def at_least_16(size: int) -> int:
    """The block that holds so many; 16 is the least that tensor cores multiply."""
    return max(16, next_power_of_2(size))


@functools.cache
def no_larger(config: tuning.Config, **sides: int) -> tuning.Config:
    """A tile with no larger sides than these, or than tensor cores need: `no_larger(config, block_n=N)`."""
    sides = {side: min(getattr(config, side), at_least_16(size)) for side, size in sides.items()}
    return dataclasses.replace(config, **sides)


def row_tiles(M: int, G: int, block_m: int) -> int:
    """An upper bound on the row tiles of G groups and the rows past them, known without the group sizes."""
    return cdiv(M, block_m) + min(G, max(M - 1, 0))


BLOCK = 256  # columns of the widest tile: slices are multiples of it, so that no tile is wasted


def column_slices(columns: int, column_bytes: int, most_bytes: int) -> list[slice]:
    """Return even slices of columns, as few as have `most_bytes` at most, or one block of columns each."""
    blocks = max(-(-columns // BLOCK), 1)
    fit = max(most_bytes // (BLOCK * max(column_bytes, 1)), 1)
    width = -(-blocks // -(-blocks // fit)) * BLOCK
    return [slice(first, min(first + width, columns)) for first in range(0, columns, width)]


def is_transposed(config: tuning.Config, x: torch.Tensor) -> bool:
    """Return whether weights are the left operand of a tile's products, which wants 64 rows or more.

    Instructions read no transposed operands of 32 bits.
    """
    return config.block_m < 64 <= config.block_n and x.itemsize < 4


def tile_options(config: tuning.Config, amd: tuple[int, ...] = ()) -> dict:
    """The launch arguments that every tiled kernel takes; `amd` has a value for each of AMD_OPTIONS."""
    options = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "NUM_DIES": num_dies(),
        "PRECISION": float32_precision(),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if any(amd) and not interpret and triton.runtime.driver.active.get_current_target().backend == "hip":
        options |= {name: n for name, n in zip(AMD_OPTIONS, amd, strict=True) if n}
    return options


def unit_of(sizes: Sequence[int], *strides: Sequence[int]) -> int:
    """Return the largest of 1, 2, 4, 8 and 16 that divides all sizes, and all strides but 1.

    Kernels load so many numbers at once, of 16 bytes at most.  Triton by itself finds multiples of 16 alone,
    and loses them at a minimum.
    """
    return 1 if interpret else math.gcd(FOUND.value, *sizes, *(n for of in strides for n in of if n != 1))


def has_tma(unit: int, itemsize: int) -> bool:
    """Whether Triton's descriptors are copies by TMA here, and TMA can copy rows of such a `unit_of`.

    Not on sm_120: there a program has less than half of Hopper's shared memory, and nothing was measured.
    """
    if unit < 8 or itemsize != 2:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and 90 <= target.arch < 120


def boxes_of(w: torch.Tensor, unit: int, pairs: bool = False) -> str | None:
    """Return how TMA copies tiles of w (G, N, K), or None where the kernel's own loads do.

    BOXES      tensor          box
    rows       (G, N, K)       (1, BLOCK_N, BLOCK_K)
    columns    (G, K, N)       (1, BLOCK_K, BLOCK_N)
    pairs      (G, 2, N, K)    (1, 2, BLOCK_N // 2, BLOCK_K): gate and up of the same channels, by rows
    """
    if not (has_tma(unit, w.itemsize) and w.numel() and w.data_ptr() % 16 == 0):
        return None
    by_rows = w.stride(2) == 1
    group, row, side = w.stride() if by_rows else w.mT.stride()
    aligned = len(w) == 1 or (group > 0 and group % 8 == 0)
    if side != 1 or not aligned or row % 8 or row < w.shape[2 if by_rows else 1]:
        return None
    if by_rows:
        return "pairs" if pairs else "rows"
    return None if pairs else "columns"  # pairs of columns would pass through registers


def with_boxes(w: torch.Tensor, kind: str | None, config: tuning.Config) -> Descriptor | torch.Tensor:
    """Return w (G, N, K) as its descriptor for the boxes that `boxes_of` names, or as it is."""
    (G, N, K), (g, n, k) = w.shape, w.stride()
    g = g if G > 1 else 16  # it may be any number, and TMA takes multiples of 16 bytes
    if kind == "rows":
        return Descriptor(w, (G, N, K), (g, n, 1), (1, config.block_n, config.block_k))
    if kind == "columns":
        return Descriptor(w, (G, K, N), (g, k, 1), (1, config.block_k, config.block_n))
    if kind == "pairs":
        box = 1, 2, config.block_n // 2, config.block_k
        return Descriptor(w, (G, 2, N // 2, K), (g, N // 2 * n, n, 1), box)
    return w


def choose_tile(
    tile: Sequence[int], op: str, dtype: torch.dtype, m: int, n: int, k: int, groups: int
) -> tuple[tuning.Config, tuple[int, ...]]:
    """Return the configuration that an op's caller passed as numbers, or that of the tables; and AMD's."""
    if not tile:
        return tuning.lookup(op, dtype, m, n, k, groups), ()
    return tuning.Config(*tile[: len(TILE)]), tuple(tile[len(TILE) :])


PERSISTENT = -1  # for `programs` of an op: as many as the device runs at once


def walk(tiles: int, programs: int, x: torch.Tensor) -> tuple[tuple[int], bool]:
    """The grid for so many tiles, and whether its programs take more than one each."""
    if programs == 0:
        return (tiles,), False
    return (min(tiles, num_programs(x) if programs == PERSISTENT else programs),), True


def num_dies() -> int:
    """Chiplets of the current GPU with an L2 cache of their own, to which programs are dealt in turn."""
    return 1 if interpret else dies_of(triton.runtime.driver.active.get_current_device())


@functools.cache
def dies_of(device: int) -> int:
    """Return 8 on a whole MI300X or MI350, 6 on MI300A, 1 on a partition of one chiplet and on other GPUs."""
    target = triton.runtime.driver.active.get_current_target()
    units = {"gfx942": 38, "gfx950": 32}.get(target.arch)  # of a chiplet
    if target.backend != "hip" or units is None:
        return 1
    if device >= torch.cuda.device_count():  # a target to compile for, and no GPU that is there
        return 8
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // units)
