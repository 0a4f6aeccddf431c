"""What the launchers share."""

import functools

import torch
from torch import Tensor

BIG_WEIGHT = 32 * 2**20  # bytes of one expert's weight


@functools.cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(x: Tensor) -> int:
    """One program for each SM; as many as an H200 has where there is no GPU to ask."""
    return num_sms(x.device.index or 0) if x.is_cuda else 132


def walk(K: int, N: int) -> int:
    """Row tiles that walk the columns together: where one expert's 16-bit weight fits in L2, none need to."""
    return 16 if 2 * K * N > BIG_WEIGHT else 1
