"""What lending experts would bring for given expert loads: a plan and a model of its time, without a GPU."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.base.check import check_not_negative, check_positive, check_sizes, checked
from ..kernels.rows.lend import MOST, LendInputs, lend_reference
from .experts import experts_of_a_rank
from .loans import GPU, least_rows, rows_of_transfer, useful_guests

HEAD = "rank", "rows before", "rows after", "borrowed experts (rows)"


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` returns; its text is a table."""

    rows_before: tuple[int, ...]  # of each rank
    rows_after: tuple[int, ...]
    borrowed: tuple[dict[int, int], ...]  # by each rank: experts, and how many of their rows it computes
    share_before: float  # predicted rate, as a share of that at a balanced load
    share_after: float
    guests: int  # slots of a rank
    slot_bytes: int  # of all slots of a rank
    least: int  # rows of the smallest loan that pays

    def __str__(self) -> str:
        lines = [HEAD]
        ranks = zip(self.rows_before, self.rows_after, self.borrowed, strict=True)
        for rank, (before, after, guests) in enumerate(ranks):
            loans = ", ".join(f"{expert} ({rows:,})" for expert, rows in guests.items())
            lines.append((str(rank), f"{before:,}", f"{after:,}", loans or "none"))
        widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:3]]
        table = ["  ".join([*map(str.rjust, line, widths), line[3]]) for line in lines]
        shares = f"{self.share_before:.0%} before, {self.share_after:.0%} after"
        slots = f"guest slots of a rank: {self.guests}, {self.slot_bytes / 1e6:,.1f} MB"
        return "\n".join([*table, f"predicted share of the balanced rate: {shares}; {slots}"])


@checked
def simulate(
    counts: Any, ranks: int, guests: int | str, sizes: Sequence[int], *,
    dtype: torch.dtype = torch.bfloat16, gated: bool = True, link: float = GPU.link, rate: float = GPU.flops,
) -> Simulation:  # fmt: skip
    """Plan which experts ranks would lend each other at these expert loads, and predict the gain.

        statistics = monitor.read()["layers.3.mlp"]                  # of a Monitor
        print(simulate(statistics.choices / steps, ranks=8, guests="auto", sizes=(2048, 768)))

    counts    (E,) or (S, E), a tensor, an array or a sequence: how many choices each expert has in one call,
              from all ranks together or from each of S sources.  Fractions, such as means, are rounded.
    ranks     R, of the expert-parallel group; each holds E / R experts, as in `ExpertDispatcher`.
    guests    slots of a rank, at most as many as other ranks have experts.  "auto": at most 8, and no more
              than a balanced load has rows for, or than fit into a GiB.  One rank has none.
    sizes     (H, I): hidden and intermediate size of an expert.
    dtype     of the weights, which travel.  A slot holds them, and their gradients in float32.
    gated     True: an expert has 3 * H * I weights.  False: 2 * H * I.
    link      bytes a second that a rank can send, and receive.
    rate      FLOP a second of a rank's products.

    The plan is that of GPUs: a loan is a multiple of 128 rows, and its rows take at least as long to compute
    as the expert takes to travel.  Returns a record, whose `str` is a table: the rows of each rank before and
    after, the experts that it borrows, and the bytes of its slots.  Its shares compare the predicted rate
    with that at a balanced load: of the products of a forward pass, in which no transfer is hidden.

    Raises ValueError for counts of another shape, below 0, or too many for one call; if a rank would have no
    expert; for more guests than other ranks have experts; and for sizes that no tensor has.  TypeError for
    other types, and for sparse counts.
    """
    check_sizes(ranks=ranks)
    check_positive(link=link, rate=rate)
    totals, rates = totals_of(counts, ranks), GPU._replace(link=link, flops=rate)
    experts, balanced = len(totals), float(totals.sum()) / ranks
    each = experts_of_a_rank(experts, ranks)
    numbers = (3 if gated else 2) * product_of(sizes)
    sent = numbers * bytes_of(dtype)
    least, slot = least_rows(sent, numbers, rates), sent + 4 * numbers
    slots = slots_of(guests, useful_guests(int(balanced), least, experts - each, slot), experts - each)

    sources = F.pad(totals[None], (0, 0, 0, ranks - 1))
    plan = LendInputs(sources, each, max(slots, 1), rates.block, least if slots else MOST)
    rows = lend_reference(plan)[0].diff(dim=1)[:, 0]  # of each rank and expert
    home = torch.arange(experts) // each
    loans = rows.where(home != torch.arange(ranks)[:, None], 0)
    before, lent = totals.new_zeros(2, ranks).index_add(1, home, torch.stack([totals, (loans > 0).sum(0)]))
    moves = lent.maximum((loans > 0).sum(1))  # what a rank sends travels while it receives
    busiest = (rows.sum(1) + moves.double() * rows_of_transfer(sent, numbers, rates)).max()  # in rows
    return Simulation(
        rows_before=tuple(before.tolist()),
        rows_after=tuple(rows.sum(1).tolist()),
        borrowed=tuple({n: of[n] for n in range(experts) if of[n]} for of in loans.tolist()),
        share_before=balanced / int(before.max()) if balanced else 1.0,
        share_after=balanced / float(busiest) if balanced else 1.0,
        guests=slots,
        slot_bytes=slots * slot,
        least=least,
    )


def totals_of(counts: Any, ranks: int) -> Tensor:
    """Return the choices of each expert; raise unless they are those of a call."""
    try:
        loads = torch.as_tensor(counts, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"counts must be numbers, of shape (E,) or (S, E): {error}") from error
    if loads.is_complex() or loads.dtype == torch.bool or loads.layout != torch.strided:
        raise TypeError(f"counts must be dense real numbers, not {loads.layout} of {loads.dtype}")
    if loads.dim() not in (1, 2) or not loads.numel():
        raise ValueError(f"counts must be (E,) or (S, E), but it has shape {tuple(loads.shape)}")
    loads = loads.double().reshape(-1, loads.shape[-1])
    most = MOST // ranks
    if not ((loads >= 0).all() and (loads.sum(0) <= most).all()):
        raise ValueError(f"counts must be from 0 to {most} for an expert, as in one call of {ranks} ranks")
    return loads.sum(0).round().long()


def product_of(sizes: Sequence[int]) -> int:
    if not isinstance(sizes, (tuple, list, torch.Size)):
        raise TypeError(f"sizes must be (H, I), not {type(sizes).__name__}")
    if len(sizes) != 2:
        raise ValueError(f"sizes must be (H, I), not {tuple(sizes)}")
    hidden, intermediate = sizes
    check_sizes(**{"sizes[0]": hidden, "sizes[1]": intermediate})
    if max(sizes) > MOST:
        raise ValueError(f"sizes must be at most {MOST}, not {tuple(sizes)}")
    return hidden * intermediate


def bytes_of(dtype: torch.dtype) -> int:
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be one of floating-point numbers, not {dtype}")
    return dtype.itemsize


def slots_of(guests: int | str, useful: int, others: int) -> int:
    """Return the slots of a rank, of which so many are useful, where other ranks have `others` experts."""
    if isinstance(guests, str):
        if guests != "auto":
            raise ValueError(f"guests must be a number or 'auto', not {guests!r}")
        return useful
    check_not_negative(guests=guests)
    if guests > others > 0:
        raise ValueError(f"guests={guests}, but the other ranks hold {others} experts")
    return min(guests, others)
