"""Sort the choices of T tokens by expert: a stable counting sort.

    order[r] = t*k + j    the choice that sits in row r
    rank[t, j] = r        the row of a choice, the inverse
    group_sizes[e]        rows of expert e

A choice whose expert lies outside [0, E), usually -1, is dropped: its rank is -1, and the rows at and past
sum(group_sizes) have the order -1.
"""

import torch
from torch import Tensor

from ..backend import define_op
from ._check import check_index, check_shape, check_sizes
from ._host import array, check_built, ext, host
from ._triton import tl, triton

BLOCK = 64  # choices at a time; every pair of them is compared
SCAN_BLOCK = 1024  # counts at a time
MAX_BLOCKS = 2048  # a longer input gets longer blocks, so that the counts (E, blocks) stay small


# reference
def sort_reference(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = expert_ids.flatten().long()
    dropped = (ids < 0) | (ids >= num_experts)
    ids, order = ids.masked_fill(dropped, num_experts).sort(stable=True)
    rows = torch.arange(len(order), device=ids.device)
    rank = torch.empty_like(order)
    rank[order] = rows
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True)
    order = order.masked_fill(ids == num_experts, -1)
    return order, rank.masked_fill(dropped, -1).view_as(expert_ids), ends.diff(prepend=ends.new_zeros(1))


# kernel
@triton.jit
def load_ids(i, ids_ptr, R, E, TOP_K, ids_strides):
    """Choice numbers -> experts; E for a dropped choice, and past the end."""
    mask = i < R
    t, j = (i // TOP_K).to(tl.int64), i % TOP_K
    ids = tl.load(ids_ptr + t * ids_strides[0] + j * ids_strides[1], mask=mask, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit
def count_kernel(
    ids_ptr,  # (T, k)
    counts_ptr,  # (E, blocks) choices of each expert in each block
    R,
    E,
    blocks,
    parts,  # a block is this many times BLOCK choices
    TOP_K: tl.constexpr,
    ids_strides,  # t, k
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        count = tl.zeros((BLOCK_E,), tl.int32)
        for part in range(parts):
            i = (block * parts + part) * BLOCK + tl.arange(0, BLOCK)
            ids = load_ids(i, ids_ptr, R, E, TOP_K, ids_strides)
            count += tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + e.to(tl.int64) * blocks + block, count, mask=e < E)


@triton.jit
def scan_kernel(
    counts_ptr,  # (E, blocks) becomes the choices of that expert in the blocks before
    group_sizes_ptr,  # (E,)
    blocks,
    BLOCK: tl.constexpr,
):
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
def place_kernel(
    ids_ptr,  # (T, k)
    counts_ptr,  # (E, blocks), scanned
    group_sizes_ptr,  # (E,)
    order_ptr,  # (R,)
    rank_ptr,  # (T, k)
    R,
    E,
    blocks,
    parts,
    TOP_K: tl.constexpr,
    ids_strides,  # t, k
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    group_start = 0
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        size = tl.load(group_sizes_ptr + e, mask=e < E, other=0)
        before = tl.load(counts_ptr + e.to(tl.int64) * blocks + block, mask=e < E, other=0)
        row = group_start + tl.cumsum(size, 0) - size + before
        group_start += tl.sum(size, 0)
        for part in range(parts):
            start = (block * parts + part) * BLOCK
            i, j = start + tl.arange(0, BLOCK), start + tl.arange(0, BLOCK)
            ids = load_ids(i, ids_ptr, R, E, TOP_K, ids_strides)
            others = load_ids(j, ids_ptr, R, E, TOP_K, ids_strides)
            mine = ids[:, None] == e[None, :]
            # the equal choices before this one, counted pair by pair: less work than a scan of each expert
            earlier = (ids[:, None] == others[None, :]) & (j[None, :] < i[:, None])
            rank = tl.sum(tl.where(mine, row[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
            here = (ids >= first) & (ids < first + BLOCK_E) & (ids < E)
            tl.store(rank_ptr + i, rank, mask=here)
            tl.store(order_ptr + rank, i, mask=here)
            row += tl.sum(mine.to(tl.int32), 0)

    for part in range(parts):
        i = (block * parts + part) * BLOCK + tl.arange(0, BLOCK)
        ids = load_ids(i, ids_ptr, R, E, TOP_K, ids_strides)
        tl.store(rank_ptr + i, -1, mask=(i < R) & (ids == E))
        tl.store(order_ptr + i, -1, mask=(i < R) & (i >= group_start))


# launcher
def new_sort(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    check_shape("expert_ids", expert_ids, "T", "k")
    check_index(expert_ids=expert_ids)
    check_sizes(num_experts=num_experts)
    if expert_ids.shape[1] < 1:
        raise ValueError(f"expert_ids is (T, k={expert_ids.shape[1]}); k must be at least 1")
    check_built(expert_ids)
    num_tokens, top_k = expert_ids.shape
    order = expert_ids.new_empty(num_tokens * top_k, dtype=torch.int32)
    rank = expert_ids.new_empty(num_tokens, top_k, dtype=torch.int32)
    return order, rank, expert_ids.new_empty(num_experts, dtype=torch.int32)


def launch_sort(out: tuple[Tensor, Tensor, Tensor], expert_ids: Tensor, num_experts: int) -> None:
    order, rank, group_sizes = out
    rows = len(order)
    block_e = max(16, min(64, triton.next_power_of_2(num_experts)))
    parts = triton.cdiv(rows, BLOCK * MAX_BLOCKS)
    blocks = triton.cdiv(rows, BLOCK * parts) if rows else 0
    counts = group_sizes.new_empty(num_experts, blocks)
    place = (rows, num_experts, blocks, parts, rank.shape[1], expert_ids.stride(), BLOCK, block_e)
    if rows:
        count_kernel[(blocks,)](expert_ids, counts, *place, num_warps=4)
    scan_kernel[(num_experts,)](counts, group_sizes, blocks, BLOCK=SCAN_BLOCK)
    if rows:
        place_kernel[(blocks,)](expert_ids, counts, group_sizes, order, rank, *place, num_warps=4)


def launch_sort_host(out: tuple[Tensor, Tensor, Tensor], expert_ids: Tensor, num_experts: int) -> None:
    ext.sort_by_expert(array(expert_ids), *map(array, out))


def check_ids(expert_ids: Tensor, num_experts: int) -> None:
    if (expert_ids >= num_experts).any():
        raise ValueError(f"expert_ids holds {int(expert_ids.max())} but num_experts is {num_experts}")


# op
sort_op = define_op(
    "sort_by_expert(Tensor expert_ids, int num_experts) -> (Tensor, Tensor, Tensor)",
    new=new_sort,
    check_values=check_ids,
    reference=sort_reference,
    triton=launch_sort,
    host=host(launch_sort_host),
)


# public
def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices `expert_ids` (T, k), int32 or int64, by expert, and by t*k + j within one.

    Returns three int32 tensors: `order` (R,) with R = T*k, `order[r]` = t*k + j being the choice in row r;
    `rank` (T, k), its inverse; and `group_sizes` (E,), the rows of each expert.  A choice outside
    [0, `num_experts`), usually -1, is dropped: its rank is -1, it is counted nowhere, and the rows at and
    past sum(group_sizes) have the order -1.  No host synchronisation and no atomics.

    Raises ValueError for a shape that is not (T, k) and for `num_experts` below 1, TypeError for another
    dtype; with MOE_AITER_DEBUG=1 also ValueError for an id of E or more.
    """
    return sort_op(expert_ids, num_experts)
