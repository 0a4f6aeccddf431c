"""The processes of a run, its ranks: torchrun starts several, and without it there is one.

Each call here that takes part of all ranks must be made by all, in the same order.  With one rank it does
nothing.
"""

import contextlib
import datetime
import signal
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from moe_aiter.cli import out_of_memory, summary
from moe_aiter.config import ONE_PROCESS, Launch, SettingError, launch
from moe_aiter.op import BackendError

from . import UsageError
from .presets import TrainConfig

TIMEOUT = datetime.timedelta(minutes=10)  # of a rank that waits for the others


class Ranks:
    """All ranks of a run, seen by one of them."""

    def __init__(self, launch: Launch):
        self.launch, self.size = launch, launch.world
        self.first = launch.rank == 0
        self.group = dist.group.WORLD if self.size > 1 else None

    def device(self, name: str) -> torch.device:
        """Return the device of this rank; several ranks of a machine use its GPUs in their order."""
        if self.size > 1 and name == "cuda":
            torch.cuda.set_device(self.launch.local_rank)
            return torch.device("cuda", self.launch.local_rank)
        return torch.device(name)

    def rows(self, batch: int) -> slice:
        """Return this rank's rows of a batch of all ranks."""
        each = batch // self.size
        return slice(self.launch.rank * each, (self.launch.rank + 1) * each)

    def broadcast(self, value):
        """Return the first rank's `value`."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def largest(self, *numbers: int) -> list[int]:
        """Return the largest of all ranks' numbers, for each of them."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(numbers)  # on the CPU, so that no rank waits for its GPU
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def sum(self, t: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(t)
        return t

    def mean(self, t: Tensor) -> Tensor:
        return self.sum(t) / self.size

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that may fail on a single rank: all ranks then raise the same UsageError."""
        error = None
        try:
            yield
        except (UsageError, SettingError, BackendError, OSError, MemoryError, RuntimeError) as caught:
            if self.size == 1 or (isinstance(caught, RuntimeError) and not out_of_memory(caught)):
                raise
            error = caught
        if self.size > 1:
            found = [None] * self.size
            dist.all_gather_object(found, None if error is None else summary(error))
            if messages := [message for message in found if message]:
                raise UsageError(messages[0]) from error


ALONE = Ranks(ONE_PROCESS)


@contextlib.contextmanager
def started() -> Iterator[Ranks]:
    """Join the other ranks during the block, if torchrun has started several."""
    own = launch()
    if own.world == 1:
        yield Ranks(own)
        return
    # tensors on the CPU, such as the signals of `largest`, go through gloo in any case
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # the model changes no output of a module in place, and the new name is not in every torch
    for message in ("FSDP2-wrapped module", "`torch.distributed.all_gather_into_tensor` is deprecated"):
        warnings.filterwarnings("ignore", message)
    # torchrun keeps its store when it starts all ranks again: addresses of ranks that have ended are in it
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(f"start {own.restarts}", store)
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    ranks = Ranks(own)
    try:
        yield ranks
    finally:
        # torchrun ends all ranks as soon as one has ended with an error: let each keep its exit status
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.destroy_process_group()


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Raise UsageError unless the run can be divided among the ranks."""
    size, local = ranks.size, ranks.launch.local_world
    if config.batch % size:
        raise UsageError(f"--batch is {config.batch}, which {size} processes do not divide evenly")
    if config.ep and (size % config.ep or config.num_experts % config.ep):
        raise UsageError(
            f"--ep is {config.ep}; it must divide the number of processes, {size}, and --num-experts, "
            f"{config.num_experts}: pass --ep 0 to choose it"
        )
    if size > 1 and config.device.startswith("cuda:"):
        raise UsageError(f"--device is {config.device}, but each of {size} processes needs a GPU: use cuda")
    if config.device == "cuda" and size > 1 and (gpus := torch.cuda.device_count()) < local:
        raise UsageError(f"there are {local} processes on this machine, but torch sees {gpus} GPUs")
