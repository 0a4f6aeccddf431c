"""Symmetric memory on a CPU: files that all processes of a machine have mapped, in place of GPUs' memory."""

import itertools
import pathlib
import types
import weakref

import pytest
import torch
import torch.distributed as dist

from moe_aiter.distributed import transport
from moe_aiter.private_api import process_group


class Mapped:
    """What `rendezvous` returns: the memory of each rank of a group, and a barrier."""

    def __init__(self, memories: list[torch.Tensor], group: dist.ProcessGroup):
        self.memories, self.group = memories, group

    def get_buffer(self, rank, shape, dtype, first):
        begin = first * dtype.itemsize
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        assert end <= self.memories[rank].numel()
        # as on GPUs, a storage of its own
        return torch.from_numpy(self.memories[rank].numpy()[begin:end]).view(dtype).view(shape)

    def barrier(self, channel, timeout):
        dist.barrier(self.group)


def use_files(folder: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
    """Let `Pool` take its memory from files in `folder`; new memory holds NaN.

    Tokens of another rank arrive when something waits for them; before that, their place holds NaN.
    """
    numbers = itertools.count()

    def mapped(number: int, rank: int, size: int) -> torch.Tensor:
        path = f"{folder}/memory-{number}-{rank}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def empty(size, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(memory, name):
        number, size, group = next(numbers), memory.numel(), process_group(name)
        mapped(number, dist.get_rank(), size).fill_(255)  # NaN in each floating dtype
        dist.barrier(group)
        return Mapped([mapped(number, rank, size) for rank in dist.get_process_group_ranks(group)], group)

    wait = transport.Fetch.wait

    def fetch(transfer):
        for rank, to, _ in transfer.copies:
            to.fill_(float("nan") if to.is_floating_point() else 255)  # as codes of 8 bits, NaN too
            transfer.events[rank] = None

    def wait_and_copy(transfer, rank):
        for _, to, part in [copy for copy in transfer.copies if copy[0] == rank]:
            to.data.copy_(part)  # autograd does not see the copies of GPUs, which began earlier
        transfer.copies = [copy for copy in transfer.copies if copy[0] != rank]
        wait(transfer, rank)

    patch.setattr(transport.Fetch, "fetch", fetch)
    patch.setattr(transport.Fetch, "wait", wait_and_copy)
    patch.setattr(
        transport, "symmetric_memory", lambda: types.SimpleNamespace(empty=empty, rendezvous=rendezvous)
    )
    patch.setattr(transport, "REASONS", weakref.WeakKeyDictionary())  # found without the files
    patch.setattr(transport, "why_not_symmetric", lambda group, device: "")
