"""Join the plans of several sources of tokens for some of the experts.

An expert's rows are those of the first source, then those of the second, and so on, each in the order of its
plan.  Choices of other experts are dropped.  A token's row of its own plan says which expert it chose, so
nothing is sorted again.

The rows are divided into windows of a fixed number of rows, which are computed one by one: each has its
group sizes and its ranks.  If a choice's row is in a window that was computed earlier, the choice's rank
in later windows is ELSEWHERE (permute.py).

Where ranks lend experts (lend.py), `shares` says which rows of each expert this rank computes.  Rows of its
guests, the experts that it has borrowed, come behind those of its own experts.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...op import binds, copy_into, define_op
from ..base.check import Index, check_fields, check_not_negative, check_sizes
from ..base.launch import bind_kernel, cdiv, jit_kernel, next_power_of_2, tl, triton
from .permute import ELSEWHERE

BLOCK = 128  # choices of a program


class MergeInputs(NamedTuple):
    """The inputs of the op `merge_plans`: the order of the rows of E of N experts (S * T * k,); for W windows
    their ranks (W, S * T, k) and group sizes (W, E), and the spans of each source's rows.

    The spans (W, 2, S, E) say where in a window the rows of each source begin, and how many they are.  The
    number of groups is rounded up to a multiple of 4, so that the numbers of each source lie at a multiple of
    16 bytes.

    With guests, there are so many groups more: group E + g is the g-th of the other experts of which this
    rank computes rows.
    """

    rank: Annotated[Index, "S, T * k"]  # of S sources of T tokens with k choices, each in its own plan
    group_sizes: Annotated[Index, "sources, N"]
    top_k: int
    first: int  # of the experts
    num_experts: int  # E
    rows: int  # of a window; W windows hold S * T * k rows
    last_first: bool  # the last window is computed first, and the first window last
    shares: Annotated[Index, "bounds, N"] | None = None  # from which row of an expert to which; None: all
    guests: int = 0

    @property
    def windows(self) -> int:
        return max(-(-self.rank.numel() // self.rows), 1)

    @property
    def groups(self) -> int:
        return self.num_experts + self.guests


# reference


def merge_reference(i: MergeInputs) -> tuple:
    rank, group_sizes, top_k, first, num_experts, *_ = i
    (sources, choices), experts = rank.shape, group_sizes.shape[1]
    sizes, row, n = group_sizes.long(), rank.long(), torch.arange(experts, device=rank.device)
    ends, total, before = sizes.cumsum(1), sizes.sum(0), sizes.cumsum(0) - sizes
    own = (n >= first) & (n < first + num_experts)
    begin, end = (torch.zeros_like(n), total * own) if i.shares is None else i.shares.long()
    end = end.clamp(min=0).minimum(total)
    begin = begin.clamp(min=0).minimum(end)
    lent = ~own & (end > begin)
    lent &= lent.cumsum(0) <= i.guests
    groups = torch.cat([own.nonzero(), lent.nonzero()]).flatten()  # in the order of their rows
    total = end - begin
    starts = -begin  # where an expert's rows begin, whoever computes its first one
    starts[groups] += total[groups].cumsum(0) - total[groups]

    expert = torch.searchsorted(ends, row.contiguous(), right=True)
    known = expert.clamp(max=experts - 1)
    place = row + (before - (ends - sizes)).gather(1, known)  # among the rows of the expert
    computed = (row >= 0) & (expert < experts) & (place >= begin[known]) & (place < end[known])
    row = (place + starts[known]).masked_fill(~(computed & (own | lent)[known]), -1)
    order = torch.full((sources * choices,), -1, device=rank.device)
    order[row[row >= 0]] = torch.arange(sources * choices, device=rank.device).view_as(row)[row >= 0]

    free = i.groups - len(groups)  # slots, which begin and end behind all others
    total = F.pad(total[groups], (0, free))
    parts = [t.maximum(begin).minimum(end) + starts for t in (before, before + sizes)]
    first_rows, last_rows = (F.pad(t[:, groups], (0, free), value=int(total.sum())) for t in parts)
    ends, ranks, windows, spans = total.cumsum(0), [], [], []
    for begin in range(0, i.windows * i.rows, i.rows):
        end = begin + i.rows
        begins, past = ((t - begin).clamp(0, i.rows) for t in (first_rows, last_rows))
        spans.append(F.pad(torch.stack([begins, past - begins]), (0, spans_width(i.groups) - i.groups)))
        elsewhere = row >= end if i.last_first else (row >= 0) & (row < begin)
        inside = (row >= begin) & (row < end)
        ranks.append((row - begin).where(inside, -1).masked_fill(elsewhere, ELSEWHERE.value))
        windows.append((ends.clamp(max=end) - (ends - total).clamp(min=begin)).clamp(min=0))
    return order, torch.stack(ranks).view(i.windows, -1, top_k), torch.stack(windows), torch.stack(spans)


# kernel


@triton.jit
def limited(x, least, most):
    """int32 or int64 -> int32, within bounds."""
    return tl.minimum(tl.maximum(x, least), most).to(tl.int32)


@triton.jit
def share_of(shares_ptr, shares_stride, before, size, total, n, N):
    """Of `size` rows of a source, behind those of others: how many come before those that this rank computes,
    the place of the latter among all that it computes, their number, and the number of all."""
    upper = limited(tl.load(shares_ptr + shares_stride + n, mask=n < N, other=0), 0, total)
    lower = limited(tl.load(shares_ptr + n, mask=n < N, other=0), 0, upper)
    begin, end = limited(before, lower, upper), limited(before + size, lower, upper)
    return begin - before, begin - lower, end - begin, upper - lower


@jit_kernel
def merge_kernel(
    rank_ptr,  # (S, R)
    sizes_ptr,  # (S, N)
    shares_ptr,  # (2, N) or None
    order_ptr,  # (S * R,)
    row_ptr,  # (W, S * R)
    group_sizes_ptr,  # (W, E + GUESTS)
    spans_ptr,  # (W, 2, S, width)
    S, R, N, first, E, width, rows, W, rank_stride, sizes_stride, shares_stride,
    LAST_FIRST: tl.constexpr,
    GUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,  # at least N, and E + GUESTS
):  # fmt: skip
    block, source = tl.program_id(0), tl.program_id(1)
    n, i = tl.arange(0, BLOCK_N), block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_N,), tl.int32)
    before = total  # rows of the sources before this one
    for s in range(S):
        size = limited(tl.load(sizes_ptr + s * sizes_stride + n, mask=n < N, other=0), 0, R)
        before += tl.where(s < source, size, 0)
        total += size
    size = limited(tl.load(sizes_ptr + source * sizes_stride + n, mask=n < N, other=0), 0, R)
    ends = tl.cumsum(size, 0)
    own = (n >= first) & (n < first + E)
    # of each expert this rank computes some rows of this source: the first one's place among the rows that
    # this rank computes, how many they are, and the first one's row in the plan of the source
    mine, group, start, count, at = own, n - first, before, size, ends - size
    if shares_ptr is not None:
        skipped, start, count, total = share_of(shares_ptr, shares_stride, before, size, total, n, N)
        at += skipped
    own_total = tl.where(own, total, 0)
    last = tl.cumsum(own_total, 0)  # where an expert's rows end
    if GUESTS > 0:
        lent = (total > 0) & (own == 0)
        slot = tl.cumsum(lent.to(tl.int32), 0) - 1
        lent &= slot < GUESTS
        group = tl.where(lent, E + slot, group)
        guest_total = tl.where(lent, total, 0)
        last = tl.where(lent, tl.sum(own_total, 0) + tl.cumsum(guest_total, 0), last)
        mine |= lent
    total, count = tl.where(mine, total, 0), tl.where(mine, count, 0)
    start += last - total
    rank = limited(tl.load(rank_ptr + source * rank_stride + i, mask=i < R, other=-1), -1, R)
    expert = tl.sum((ends[:, None] <= rank[None, :]).to(tl.int32), 0)  # of a choice, by one thread
    known = tl.minimum(expert, BLOCK_N - 1)
    here = (rank >= 0) & (expert >= first) & (expert < first + E)
    row = rank + tl.gather(start - at, known, 0)
    if shares_ptr is not None:
        least = tl.gather(at, known, 0)
        here = (rank >= least) & (rank < least + tl.gather(count, known, 0))
    choice = source * R + i
    tl.store(order_ptr + row, choice, mask=here)
    tl.store(order_ptr + choice, -1, mask=(i < R) & (choice >= tl.sum(total, 0)))
    row = tl.where(here, row, -1)
    for w in range(W):
        begin, end = w * rows, w * rows + rows
        rank = tl.where((row >= begin) & (row < end), row - begin, -1)
        elsewhere = (row >= end) if LAST_FIRST else ((row >= 0) & (row < begin))
        rank = tl.where(elsewhere, ELSEWHERE, rank)
        tl.store(row_ptr + w * S * R + choice, rank, mask=i < R)
        if (block == 0) & (source == 0):
            inside = tl.minimum(last, end) - tl.maximum(last - total, begin)
            tl.store(group_sizes_ptr + w * (E + GUESTS) + group, tl.maximum(inside, 0), mask=mine)
        if block == 0:
            to = spans_ptr + (2 * w * S + source) * width
            first_row, end_row = limited(start - begin, 0, rows), limited(start + count - begin, 0, rows)
            tl.store(to + group, first_row, mask=mine)
            tl.store(to + S * width + group, end_row - first_row, mask=mine)
            if GUESTS > 0:
                free = (n >= tl.sum(mine.to(tl.int32), 0)) & (n < E + GUESTS)
                tl.store(to + n, limited(tl.sum(total, 0) - begin, 0, rows), mask=free)  # as starts ascend
                tl.store(to + S * width + n, 0, mask=free)
                tl.store(group_sizes_ptr + w * (E + GUESTS) + n, 0, mask=free & (source == 0))


# launcher


def spans_width(groups: int) -> int:
    return -(-groups // 4) * 4


def new_merge(i: MergeInputs) -> tuple[Tensor, ...]:
    check_fields(i)
    check_sizes(top_k=i.top_k, num_experts=i.num_experts, rows=i.rows)
    check_not_negative(guests=i.guests)
    (S, R), (sources, N) = i.rank.shape, i.group_sizes.shape
    if sources != S or R % i.top_k or not 0 <= i.first <= N - i.num_experts:
        raise ValueError(
            f"rank is ({S}, {R}) and group_sizes ({sources}, {N}), which do not fit top_k={i.top_k} and the "
            f"experts from {i.first} to {i.first + i.num_experts - 1}"
        )
    if i.shares is not None and len(i.shares) != 2:
        raise ValueError(f"shares is {tuple(i.shares.shape)} but must be (2, {N})")
    if i.shares is None and i.guests:
        raise ValueError(f"guests={i.guests} needs shares, which say what their rows are")
    order = i.rank.new_empty(S * R, dtype=torch.int32)
    rank = order.new_empty(i.windows, S * R // i.top_k, i.top_k)
    sizes = order.new_empty(i.windows, i.groups)
    return order, rank, sizes, order.new_empty(i.windows, 2, S, spans_width(i.groups))


@binds
def bind_merge(i: MergeInputs) -> Callable:
    (S, R), N, E = i.rank.shape, i.group_sizes.shape[1], i.num_experts
    grid = max(cdiv(R, BLOCK), 1), S
    constants = {"LAST_FIRST": i.last_first, "GUESTS": i.guests, "BLOCK": BLOCK}
    kernel = bind_kernel(merge_kernel, grid, **constants, BLOCK_N=next_power_of_2(max(N, i.groups)))
    numbers = S, R, N, i.first, E, spans_width(i.groups), i.rows, i.windows
    numbers += i.rank.stride(0), i.group_sizes.stride(0), 0 if i.shares is None else i.shares.stride(0)

    def launch(out, i):
        order, rank, sizes, spans = out
        kernel(i.rank, i.group_sizes, i.shares, order, rank, sizes, spans, *numbers)

    return launch


def fits_merge(i: MergeInputs) -> bool:
    dense = (t is None or t.stride(-1) == 1 for t in (i.rank, i.group_sizes, i.shares))
    return len(i.rank) > 0 and all(dense)


bind_merge.fits = fits_merge


# op


merge_plans = define_op(
    "merge_plans", MergeInputs, outputs=4, new=new_merge, reference=merge_reference,
    host=lambda out, i: copy_into(out, merge_reference(i)), triton=bind_merge,
)  # fmt: skip
