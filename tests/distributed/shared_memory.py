"""Symmetric memory on a CPU: files that all processes of a machine have mapped, in place of GPUs' memory."""

import itertools
import pathlib
import types

import pytest
import torch
import torch.distributed as dist

from moe_aiter.distributed import transport


class Mapped:
    """What `rendezvous` returns: the memory of each rank, and a barrier."""

    def __init__(self, memories: list[torch.Tensor]):
        self.memories = memories

    def get_buffer(self, rank, shape, dtype, first):
        memory = self.memories[rank].view(dtype)
        size = torch.Size(shape).numel()
        assert first + size <= memory.numel()
        return memory[first : first + size].view(shape)

    def barrier(self, channel, timeout):
        dist.barrier()


def use_files(folder: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
    """Let `Pool` take its memory from files in `folder`; new memory holds NaN."""
    numbers = itertools.count()

    def mapped(number: int, rank: int, size: int) -> torch.Tensor:
        return torch.from_file(f"{folder}/{number}-{rank}", shared=True, size=size, dtype=torch.uint8)

    def empty(size, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(memory, group):
        number, size = next(numbers), memory.numel()
        mapped(number, dist.get_rank(), size).fill_(255)  # NaN in each floating dtype
        dist.barrier()
        return Mapped([mapped(number, rank, size) for rank in range(dist.get_world_size())])

    patch.setattr(
        transport, "symmetric_memory", lambda: types.SimpleNamespace(empty=empty, rendezvous=rendezvous)
    )
    patch.setattr(transport, "why_not_symmetric", lambda group, device: "")
