"""When it pays to lend an expert, and how many guest slots can pay: rules of thumb, the same on all ranks.

A loan saves the time in which the borrower computes its rows beside the others.  It costs the time in which
the expert's weights travel.  Both are taken for a forward pass.
"""

from typing import NamedTuple

from ..kernels.rows.lend import MOST

MOST_GUESTS = 8  # which serve a Zipf law over eight ranks
MOST_BYTES = 2**30  # of a rank's slots


class Rates(NamedTuple):
    """What ranks do in a second, and the rows of a tile of a product."""

    link: float  # bytes that a rank sends
    flops: float  # of products
    block: int  # a loan is a multiple of so many rows


GPU = Rates(240e9, 600e12, 128)  # H200s: what 16 programs write to another GPU, and products of 16 bits
CPU = Rates(10e9, 200e9, 8)  # for tests: a loan of a few rows pays


def rates_of(device_type: str) -> Rates:
    return CPU if device_type == "cpu" else GPU


def least_rows(bytes_per_expert: int, numbers_per_expert: int, rates: Rates = GPU) -> int:
    """Return the fewest rows whose products take as long as an expert's weights travel.

    A row multiplies each of the expert's numbers once.  On a GPU this is 2,500 rows for weights of 16 bits.
    """
    return max(round(rows_of_transfer(bytes_per_expert, numbers_per_expert, rates)), 1)


def rows_of_transfer(bytes_per_expert: int, numbers_per_expert: int, rates: Rates) -> float:
    """Return how many rows a rank computes while an expert's weights travel; more than all are MOST."""
    return min(bytes_per_expert / numbers_per_expert * (rates.flops / rates.link) / 2, MOST)


def useful_guests(rows: int, least: int, others: int, slot_bytes: int) -> int:
    """Return how many experts a rank can borrow with profit, at a balanced load of so many rows.

    There are `others` experts on other ranks, and a slot takes `slot_bytes`.
    """
    return min(MOST_GUESTS, rows // least, others, MOST_BYTES // slot_bytes)
