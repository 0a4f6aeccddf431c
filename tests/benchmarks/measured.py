"""The rows of a comparison on a CPU."""

import torch

from benchmarks.products import contest
from moe_aiter.bench import command


def measure(case, dtype):
    """The rows, and whether one of ours was refused."""
    torch.manual_seed(0)
    return command.measure(contest(case, torch.device("cpu"), dtype), only=None, reps=1)
