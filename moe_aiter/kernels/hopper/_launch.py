"""What the launchers share."""

import dataclasses
import functools

import torch
from torch import Tensor

from ...tuning import Config
from .._triton import next_power_of_2

SHARED_BYTES = 226 * 1024  # of a program, less 1 KiB for barriers, places and what starts the warpgroups


def tile_options(config: Config) -> dict:
    """The launch arguments that every product takes."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def kind_of(x: Tensor) -> str:
    """What the name of a product of such rows ends in: its sums are others, and so are its tiles."""
    return "" if x.itemsize > 1 else "_int8" if x.dtype == torch.int8 else "_fp8"


def block_g(groups: int) -> int:
    """The length of a list of groups; each of 32 lanes reads as many of them."""
    return max(next_power_of_2(groups), 32)


def flatten(x: Tensor) -> tuple[Tensor, int]:
    """x (G, M, N), whose matrices are `stacked`, as one matrix, and how many of its rows they lie apart."""
    row = x.stride(1)
    apart = x.stride(0) // row if x.shape[0] > 1 else x.shape[1]
    height = (x.shape[0] - 1) * apart + x.shape[1]
    return x.as_strided((height, x.shape[2]), (row, 1)), apart


@functools.cache
def beside_groups(config: Config, buffers: int, groups: int, itemsize: int = 2) -> Config:
    """With as many stages, of elements of so many bytes, as fit beside buffers of so many elements of 16 bits
    and the lists of the groups."""
    stage = itemsize * (config.block_m + config.block_n) * config.block_k
    room = SHARED_BYTES - 2 * buffers - 8 * block_g(groups)
    return dataclasses.replace(config, num_stages=min(config.num_stages, room // stage))
