"""Sort the choices of T tokens by expert: a stable counting sort.

    order[r] = t*k + j    the choice that sits in row r
    rank[t, j] = r        the row of a choice, the inverse
    group_sizes[e]        rows of expert e

A choice whose expert is negative, usually -1, is dropped, as is one past E - 1 where nothing checks: its rank
is -1, and the rows at and past sum(group_sizes) have the order -1.

Three kernels count, add up and place the choices of each block.  For few choices, each program counts all
of them, in a single kernel.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import binds, copy_into, define_op
from ..base.check import Index, check_fields, check_sizes
from ..base.host import array, check_built, ext, host
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton

BLOCK = 128  # choices of a program; every pair of them is compared
SCAN_BLOCK = 2048  # counts at a time
FEW = 4096  # choices that each program counts by itself
CHUNK = 1024  # of them at a time
MOST = 2**31  # choices, whose numbers are int32


class SortInputs(NamedTuple):
    """The inputs of the op `sort_by_expert`: order, rank and group_sizes of these choices."""

    expert_ids: Annotated[Index, "T, k"]
    num_experts: int


# reference
def sort_reference(i: SortInputs) -> tuple[Tensor, Tensor, Tensor]:
    ids, num_experts = i.expert_ids.flatten().long(), i.num_experts
    dropped = (ids < 0) | (ids >= num_experts)
    ids, order = ids.masked_fill(dropped, num_experts).sort(stable=True)
    rows = torch.arange(len(order), device=ids.device)
    rank = torch.empty_like(order)
    rank[order] = rows
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True)
    order = order.masked_fill(ids == num_experts, -1)
    return order, rank.masked_fill(dropped, -1).view_as(i.expert_ids), ends.diff(prepend=ends.new_zeros(1))


# kernel
@triton.jit
def load_ids(ids_ptr, i, R, E):
    """Choice numbers -> experts; E for a dropped choice, and past the end."""
    ids = tl.load(ids_ptr + i, mask=i < R, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@jit_kernel
def count_kernel(
    ids_ptr,  # (R,)
    counts_ptr,  # (E, blocks) choices of each expert in each block
    R, E, blocks, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    ids = load_ids(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), R, E)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        count = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + e.to(tl.int64) * blocks + block, count, mask=e < E)


@jit_kernel
def scan_kernel(
    counts_ptr,  # (E, blocks) becomes the choices of that expert in the blocks before
    group_sizes_ptr,  # (E,)
    blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64)
    before = 0
    for first in range(0, blocks, BLOCK):
        b = first + tl.arange(0, BLOCK)
        count_ptrs = counts_ptr + e * blocks + b
        count = tl.load(count_ptrs, mask=b < blocks, other=0)
        tl.store(count_ptrs, before + tl.cumsum(count, 0) - count, mask=b < blocks)
        before += tl.sum(count, 0)
    tl.store(group_sizes_ptr + e, before)


@triton.jit
def place_choices(
    ids_ptr,  # (R,)
    order_ptr,  # (R,)
    rank_ptr,  # (R,)
    size,  # (at least E,) rows of each expert
    before,  # and how many of its choices are in the blocks before
    i,  # (BLOCK,) the choices of this block
    R, E,
):  # fmt: skip
    ids = load_ids(ids_ptr, i, R, E)
    # the row of each expert's first choice in this block
    row = tl.cumsum(size, 0) - size + before
    # and the equal choices before this one, counted pair by pair: less work than a scan of each expert
    earlier = (ids[:, None] == ids[None, :]) & (i[:, None] < i[None, :])
    rank = tl.gather(row, tl.minimum(ids, E - 1), 0) + tl.sum(earlier.to(tl.int32), 0)
    tl.store(rank_ptr + i, tl.where(ids < E, rank, -1), mask=i < R)
    tl.store(order_ptr + rank, i, mask=ids < E)
    tl.store(order_ptr + i, -1, mask=(i < R) & (i >= tl.sum(size, 0)))


@jit_kernel
def place_kernel(
    ids_ptr,  # (R,)
    counts_ptr,  # (E, blocks), scanned
    group_sizes_ptr,  # (E,)
    order_ptr,  # (R,)
    rank_ptr,  # (R,)
    R, E, blocks, BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,  # at least E
):  # fmt: skip
    block, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    size = tl.load(group_sizes_ptr + e, mask=e < E, other=0)
    before = tl.load(counts_ptr + e.to(tl.int64) * blocks + block, mask=e < E, other=0)
    place_choices(ids_ptr, order_ptr, rank_ptr, size, before, block * BLOCK + tl.arange(0, BLOCK), R, E)


@jit_kernel
def sort_few_kernel(
    ids_ptr,  # (R,)
    group_sizes_ptr,  # (E,)
    order_ptr,  # (R,)
    rank_ptr,  # (R,)
    R, E, BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,  # at least E
    CHUNK: tl.constexpr,
):  # fmt: skip
    first, e = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK_E)
    size = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, R, CHUNK):
        i = start + tl.arange(0, CHUNK)
        ids = load_ids(ids_ptr, i, R, E)
        size += tl.histogram(ids, BLOCK_E, mask=ids < E)
        before += tl.histogram(ids, BLOCK_E, mask=(ids < E) & (i < first))
    place_choices(ids_ptr, order_ptr, rank_ptr, size, before, first + tl.arange(0, BLOCK), R, E)
    tl.store(group_sizes_ptr + e, size, mask=(e < E) & (first == 0))


# launcher
def new_sort(i: SortInputs) -> tuple[Tensor, Tensor, Tensor]:
    check_fields(i)
    check_sizes(num_experts=i.num_experts)
    num_tokens, top_k = i.expert_ids.shape
    if top_k < 1:
        raise ValueError(f"expert_ids is (T, k={top_k}); k must be at least 1")
    check_built(i.expert_ids)
    choices = num_tokens * top_k
    if isinstance(choices, int) and choices >= MOST:  # a size that torch.export leaves open is not asked
        raise ValueError(
            f"expert_ids is (T={num_tokens}, k={top_k}): {choices} choices, "
            f"but there must be fewer than {MOST}"
        )
    order = i.expert_ids.new_empty(num_tokens * top_k, dtype=torch.int32)
    return order, order.new_empty(num_tokens, top_k), order.new_empty(i.num_experts)


@binds
def bind_sort(i: SortInputs) -> Callable:
    rows, E = i.expert_ids.numel(), i.num_experts
    blocks, block_e = max(cdiv(rows, BLOCK), 1), next_power_of_2(E)
    if rows <= FEW and E <= CHUNK:  # more experts do not fit in registers
        options = {"BLOCK": BLOCK, "BLOCK_E": max(block_e, 32), "CHUNK": CHUNK, "num_warps": 4}
        few = bind_kernel(sort_few_kernel, (blocks,), **options)

        def launch_few(out, i):
            check_on_cpu(i)
            order, rank, group_sizes = out
            few(i.expert_ids.contiguous(), group_sizes, order, rank, rows, E)

        return launch_few
    tile, sizes = max(16, min(64, block_e)), (rows, E, blocks)
    count = bind_kernel(count_kernel, (blocks,), BLOCK=BLOCK, BLOCK_E=tile, num_warps=4)
    scan = bind_kernel(scan_kernel, (E,), BLOCK=SCAN_BLOCK)
    place = bind_kernel(place_kernel, (blocks,), BLOCK=BLOCK, BLOCK_E=block_e, num_warps=4)

    def launch(out, i):
        check_on_cpu(i)
        order, rank, group_sizes = out
        ids, counts = i.expert_ids.contiguous(), group_sizes.new_empty(E, blocks)
        count(ids, counts, *sizes)
        scan(counts, group_sizes, blocks)
        place(ids, counts, group_sizes, order, rank, *sizes)

    return launch


def launch_sort_torch(out: tuple[Tensor, Tensor, Tensor], i: SortInputs) -> None:
    check_on_cpu(i)
    copy_into(out, sort_reference(i))


def launch_sort_host(out: tuple[Tensor, Tensor, Tensor], i: SortInputs) -> None:
    """C++ sees an id past the end while it counts, which costs less than to look for one first."""
    ext.sort_by_expert(array(i.expert_ids), *map(array, out))


def check_ids(i: SortInputs) -> None:
    if (i.expert_ids >= i.num_experts).any():
        raise ValueError(f"expert_ids holds {int(i.expert_ids.max())} but num_experts is {i.num_experts}")


def check_on_cpu(i: SortInputs) -> None:
    """`check_ids` where there is nothing to wait for."""
    if i.expert_ids.is_cpu:
        check_ids(i)


# op
sort_op = define_op(
    "sort_by_expert", SortInputs, outputs=3, new=new_sort, check_values=check_ids, torch=launch_sort_torch,
    triton=bind_sort, host=host(launch_sort_host),
)  # fmt: skip


# public
def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices `expert_ids` (T, k), int32 or int64, by expert, and within an expert by t*k + j.

    Returns three int32 tensors, with R = T*k:

        order (R,)         row r holds the choice order[r] = t*k + j
        rank (T, k)        the inverse: choice (t, j) is in row rank[t, j]
        group_sizes (E,)   the number of rows of each expert

    A choice with a negative expert, usually -1, is dropped: its rank is -1, it is counted nowhere, and the
    rows from sum(group_sizes) on have the order -1.  No host synchronisation; two runs give the same bits.

    Raises ValueError for a shape that is not (T, k), for T*k of 2^31 or more and for `num_experts` below 1,
    TypeError for another dtype; on the CPU also ValueError for an id of E or more.  On a GPU this check would
    synchronise, so it runs only with MOE_AITER_DEBUG=1; otherwise such a choice is dropped.
    """
    return sort_op(expert_ids, num_experts)
