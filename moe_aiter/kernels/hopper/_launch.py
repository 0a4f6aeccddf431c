"""What the launchers share."""

import functools

import torch
from torch import Tensor

from ...tuning import Config


@functools.cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(x: Tensor) -> int:
    """One program for each SM; as many as an H200 has where there is no GPU to ask."""
    return num_sms(x.device.index or 0) if x.is_cuda else 132


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
