"""Join the plans of several sources of tokens for some of the experts.

An expert's rows are those of the first source, then those of the second, and so on, each in the order of its
plan.  Choices of other experts are dropped.  A token's row of its own plan says which expert it chose, so
nothing is sorted again.

The rows are divided into windows of a fixed number of rows, which are computed one by one: each has its
group sizes and its ranks.  If a choice's row is in a window that was computed earlier, the choice's rank
in later windows is ELSEWHERE (permute.py).
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...op import binds, copy_into, define_op
from ..base.check import Index, check_fields, check_sizes
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from .permute import ELSEWHERE

BLOCK = 128  # choices of a program


class MergeInputs(NamedTuple):
    """The inputs of the op `merge_plans`: the order of the rows of E of N experts (S * T * k,); for W windows
    their ranks (W, S * T, k) and group sizes (W, E); and the spans of the first window.

    The spans (2, S, E) say where the rows of each source begin, and how many they are.  E is rounded up to a
    multiple of 4, so that the numbers of each source lie at a multiple of 16 bytes.
    """

    rank: Annotated[Index, "S, T * k"]  # of S sources of T tokens with k choices, each in its own plan
    group_sizes: Annotated[Index, "sources, N"]
    top_k: int
    first: int  # of the experts
    num_experts: int  # E
    rows: int  # of a window; W windows hold S * T * k rows
    last_first: bool  # the last window is computed first, and the first window last

    @property
    def windows(self) -> int:
        return max(-(-self.rank.numel() // self.rows), 1)


# reference


def merge_reference(i: MergeInputs) -> tuple:
    rank, group_sizes, top_k, first, num_experts, *_ = i
    sources, choices = rank.shape
    own, sizes, row = slice(first, first + num_experts), group_sizes.long(), rank.long()
    ends = sizes.cumsum(1)
    expert = torch.searchsorted(ends, row.contiguous(), right=True) - first
    mine = (row >= 0) & (expert >= 0) & (expert < num_experts)
    total = sizes[:, own].sum(0)
    starts = total.cumsum(0) - total + sizes[:, own].cumsum(0) - sizes[:, own]
    shift = starts - (ends - sizes)[:, own]
    row = (row + shift.gather(1, expert.clamp(0, num_experts - 1))).masked_fill(~mine, -1)
    order = torch.full((sources * choices,), -1, device=rank.device)
    order[row[mine]] = torch.arange(len(order), device=rank.device).view_as(row)[mine]
    spans = starts.new_zeros(2, sources, spans_width(num_experts))
    spans[0, :, :num_experts] = starts.clamp(max=i.rows)
    spans[1, :, :num_experts] = (starts + sizes[:, own]).clamp(max=i.rows) - spans[0, :, :num_experts]
    ends, ranks, windows = total.cumsum(0), [], []
    for begin in range(0, i.windows * i.rows, i.rows):
        end = begin + i.rows
        elsewhere = row >= end if i.last_first else (row >= 0) & (row < begin)
        inside = (row >= begin) & (row < end)
        ranks.append((row - begin).where(inside, -1).masked_fill(elsewhere, ELSEWHERE.value))
        windows.append((ends.clamp(max=end) - (ends - total).clamp(min=begin)).clamp(min=0))
    return order, torch.stack(ranks).view(i.windows, -1, top_k), torch.stack(windows), spans


# kernel


@triton.jit
def limited(x, least, most):
    """int32 or int64 -> int32, within bounds."""
    return tl.minimum(tl.maximum(x, least), most).to(tl.int32)


@jit_kernel
def merge_kernel(
    rank_ptr,  # (S, R)
    sizes_ptr,  # (S, N)
    order_ptr,  # (S * R,)
    row_ptr,  # (W, S * R)
    group_sizes_ptr,  # (W, E)
    spans_ptr,  # (2, S, width)
    S, R, N, first, E, width, rows, W, rank_stride, sizes_stride, LAST_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,  # at least N
):  # fmt: skip
    block, source = tl.program_id(0), tl.program_id(1)
    n, i = tl.arange(0, BLOCK_N), block * BLOCK + tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK_N,), tl.int32)  # rows of the sources before this one
    total = tl.zeros((BLOCK_N,), tl.int32)
    for s in range(S):
        size = limited(tl.load(sizes_ptr + s * sizes_stride + n, mask=n < N, other=0), 0, R)
        before += tl.where(s < source, size, 0)
        total += size
    size = limited(tl.load(sizes_ptr + source * sizes_stride + n, mask=n < N, other=0), 0, R)
    mine = (n >= first) & (n < first + E)
    total = tl.where(mine, total, 0)
    start = tl.cumsum(total, 0) - total + before
    ends = tl.cumsum(size, 0)

    rank = limited(tl.load(rank_ptr + source * rank_stride + i, mask=i < R, other=-1), -1, R)
    expert = tl.sum((ends[:, None] <= rank[None, :]).to(tl.int32), 0)  # of a choice, by one thread
    here = (rank >= 0) & (expert >= first) & (expert < first + E)
    row = rank + tl.gather(start - (ends - size), tl.minimum(expert, BLOCK_N - 1), 0)
    choice = source * R + i
    tl.store(order_ptr + row, choice, mask=here)
    tl.store(order_ptr + choice, -1, mask=(i < R) & (choice >= tl.sum(total, 0)))
    row = tl.where(here, row, -1)
    last = tl.cumsum(total, 0)
    for w in range(W):
        begin, end = w * rows, w * rows + rows
        rank = tl.where((row >= begin) & (row < end), row - begin, -1)
        elsewhere = (row >= end) if LAST_FIRST else ((row >= 0) & (row < begin))
        rank = tl.where(elsewhere, ELSEWHERE, rank)
        tl.store(row_ptr + w * S * R + choice, rank, mask=i < R)
        if (block == 0) & (source == 0):
            inside = tl.minimum(last, end) - tl.maximum(last - total, begin)
            tl.store(group_sizes_ptr + w * E + n - first, tl.maximum(inside, 0), mask=mine)
    if block == 0:
        to = spans_ptr + source * width + n - first
        tl.store(to, tl.minimum(start, rows), mask=mine)
        tl.store(to + S * width, tl.minimum(start + size, rows) - tl.minimum(start, rows), mask=mine)


# launcher


def spans_width(num_experts: int) -> int:
    return -(-num_experts // 4) * 4


def new_merge(i: MergeInputs) -> tuple[Tensor, ...]:
    check_fields(i)
    check_sizes(top_k=i.top_k, num_experts=i.num_experts, rows=i.rows)
    (S, R), (sources, N) = i.rank.shape, i.group_sizes.shape
    if sources != S or R % i.top_k or not 0 <= i.first <= N - i.num_experts:
        raise ValueError(
            f"rank is ({S}, {R}) and group_sizes ({sources}, {N}), which do not fit top_k={i.top_k} and the "
            f"experts from {i.first} to {i.first + i.num_experts - 1}"
        )
    order = i.rank.new_empty(S * R, dtype=torch.int32)
    rank = order.new_empty(i.windows, S * R // i.top_k, i.top_k)
    sizes = order.new_empty(i.windows, i.num_experts)
    return order, rank, sizes, order.new_empty(2, S, spans_width(i.num_experts))


@binds
def bind_merge(i: MergeInputs) -> Callable:
    (S, R), N, E = i.rank.shape, i.group_sizes.shape[1], i.num_experts
    grid = max(cdiv(R, BLOCK), 1), S
    constants = {"LAST_FIRST": i.last_first, "BLOCK": BLOCK, "BLOCK_N": next_power_of_2(N)}
    kernel = bind_kernel(merge_kernel, grid, **constants)
    numbers = S, R, N, i.first, E, spans_width(E), i.rows, i.windows
    numbers += i.rank.stride(0), i.group_sizes.stride(0)

    def launch(out, i):
        order, rank, sizes, spans = out
        kernel(i.rank, i.group_sizes, order, rank, sizes, spans, *numbers)

    return launch


bind_merge.fits = lambda i: i.rank.stride(-1) == 1 == i.group_sizes.stride(-1) and len(i.rank) > 0


# op


merge_plans = define_op(
    "merge_plans", MergeInputs, outputs=4, new=new_merge, reference=merge_reference,
    host=lambda out, i: copy_into(out, merge_reference(i)), triton=bind_merge,
)  # fmt: skip
