"""Where the rows of each group lie in chunks of CHUNK rows, of which every group begins a new one.

How many there are is known on the device alone.  C = rows // CHUNK + G, or 0 without groups, is the most that
there can be; chunks past the last one in use begin past the end of the last group, and nobody reads them.
"""

import torch
from torch import Tensor

from ..op import define_op
from ._check import check_index, check_shape
from ._fp8 import CHUNK
from ._triton import jit_kernel, next_power_of_2, tl


def most_chunks(rows: int, groups: int) -> int:
    return rows // CHUNK + groups if groups else 0


# reference


def plan_chunks_reference(group_sizes, rows):
    G = len(group_sizes)
    size = group_sizes.long().clamp(0, rows)
    end = size.cumsum(0)
    start, end = (end - size).clamp(max=rows), end.clamp(max=rows)
    last = ((end - start + CHUNK - 1) // CHUNK).cumsum(0)
    first = torch.cat((last.new_zeros(1), last[:-1]))
    chunk = torch.arange(most_chunks(rows, G), device=size.device)
    group = torch.searchsorted(last, chunk, right=True).clamp(max=G - 1)
    chunks = torch.stack((start[group] + (chunk - first[group]) * CHUNK, end[group]), 1)
    by_size = (end - start).argsort(descending=True, stable=True)
    return torch.stack((by_size, first[by_size], last[by_size]), 1), chunks


def places_of(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """The row at each place of each chunk, (C, CHUNK), and whether there is one."""
    row = chunks[:, :1].long() + torch.arange(CHUNK, device=chunks.device)
    return row, row < chunks[:, 1:]


def rows_of_chunks(y: Tensor, chunks: Tensor, rows: int) -> Tensor:
    """The inverse: (C, columns, CHUNK) as (rows, columns), zeros for rows in no group."""
    row, there = places_of(chunks)
    out = y.new_zeros(rows + 1, y.shape[1])  # the last one takes what is at places without a row
    out[row.where(there, rows)] = y.mT
    return out[:rows]


# kernel


@jit_kernel
def plan_chunks_kernel(
    group_sizes_ptr,  # (G,)
    places_ptr,  # (G, 3): group, its first chunk and its end, the group of most rows first
    chunks_ptr,  # (C, 2): first row, and the row where the group ends
    M,
    G,
    C,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    size = tl.load(group_sizes_ptr + g, mask=g < G, other=0).to(tl.int64)
    size = tl.minimum(tl.maximum(size, 0), M)  # or the sum could overflow
    end = tl.cumsum(size, 0)
    start, end = tl.minimum(end - size, M), tl.minimum(end, M)
    size = end - start
    count = (size + CHUNK - 1) // CHUNK
    mine = g == group
    my_size, my_count = tl.sum(tl.where(mine, size, 0), 0), tl.sum(tl.where(mine, count, 0), 0)
    my_start, my_end = tl.sum(tl.where(mine, start, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    first = tl.sum(tl.where(g < group, count, 0), 0)
    ahead = (g < G) & ((size > my_size) | ((size == my_size) & (g < group)))
    place_ptr = places_ptr + 3 * tl.sum(ahead.to(tl.int32), 0)
    tl.store(place_ptr, group)
    tl.store(place_ptr + 1, first.to(tl.int32))
    tl.store(place_ptr + 2, (first + my_count).to(tl.int32))
    last = tl.where(group == G - 1, C, first + my_count)  # past the last chunk, rows past the end
    for begin in range(first, last, BLOCK):
        chunk = begin + tl.arange(0, BLOCK)
        row = my_start + (chunk - first) * CHUNK
        tl.store(chunks_ptr + 2 * chunk, row.to(tl.int32), mask=chunk < last)
        tl.store(chunks_ptr + 2 * chunk + 1, my_end.to(tl.int32), mask=chunk < last)


# launcher


def new_plan_chunks(group_sizes, rows):
    check_shape("group_sizes", group_sizes, "G")
    check_index(group_sizes=group_sizes)
    G = group_sizes.shape[0]
    sizes = (G, 3), (most_chunks(rows, G), 2)
    return tuple(group_sizes.new_empty(size, dtype=torch.int32) for size in sizes)


def launch_plan_chunks(out, group_sizes, rows):
    places, chunks = out
    plan_chunks_kernel[(len(group_sizes),)](
        group_sizes.contiguous(), places, chunks, rows, len(group_sizes), len(chunks),
        CHUNK=CHUNK, BLOCK_G=next_power_of_2(len(group_sizes)), BLOCK=128, num_warps=1,
    )  # fmt: skip


# op


plan_chunks_op = define_op(
    "plan_chunks(Tensor group_sizes, SymInt rows) -> (Tensor, Tensor)",
    new=new_plan_chunks,
    reference=plan_chunks_reference,
    triton=launch_plan_chunks,
)


# public


def plan_chunks(group_sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Where so many rows, of which groups have `group_sizes` (G,), lie in chunks; nothing synchronises.

    Returns two int32 tensors: `places` (G, 3), of each group its number, first chunk and end chunk, the group
    of most rows first; and `chunks` (C, 2) with C = rows // CHUNK + G, or 0 without groups, of each chunk its
    first row and the row where its group ends.  Chunks that are not in use begin past an end.
    """
    return plan_chunks_op(group_sizes, rows)
