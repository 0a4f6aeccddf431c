"""How tokens reach the experts' ranks and results come back: by collectives, or through symmetric memory.

    transfer = transport.dispatch()       all ranks get the rows of each rank       (T, N) -> (R * T, N)
    transfer = transport.combine()        a rank gets the sum of its rows           (R * T, N) -> (T, N)
    transfer.send(t)                      begins to send a tensor, and returns at once
    transport.fetch(transfer, ...)        after `send`: begins to bring the tokens of other ranks here
    transfer.receive()                    returns what arrived, for each tensor that was sent

Through symmetric memory, the tokens of one rank can be used before those of the next arrive, and parts of a
sum can leave one by one: `Sources`.  All ranks send the same shapes in the same order.  A sum adds in the
order of the ranks, in float32 or float64, and is rounded once, so that two runs give the same bits.  Both
transports do too, unless a rank has more rows than a window: windows are added in another order.
"""

import contextlib
import functools
import itertools
import logging
import operator
import pathlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..files import read_text
from ..kernels.base.fp8 import ROW_BLOCK
from ..kernels.base.sources import by_source
from ..kernels.rows.guests import Places, clear_guests, places_in, send_guests
from ..private_api import process_group, symmetric_memory
from .collective import add_parts, all_gather, combine_tokens, dispatch_tokens

log = logging.getLogger("moe_aiter")

TRANSPORTS = "auto", "collective", "symmetric"
TIMEOUT = 600_000  # milliseconds that a rank waits for another on its GPU: NCCL's usual ten minutes
ALIGNMENT = 256  # bytes
X, DOUT, SUMS, ROUTING, GUESTS, GRADIENTS = range(6)  # the regions of a pool
Size = tuple[int, torch.dtype]  # n numbers of each guest
SendHome = Callable[[], list[Places]]  # sends gradients home, and returns where those of all ranks are
BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Transfer:
    """What all ranks send into one region.  Keeps tensors until they have arrived."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.arrived: list[Tensor] = []
        self.results: list[Tensor] | None = None

    def send(self, t: Tensor) -> None:
        raise NotImplementedError

    def receive(self) -> list[Tensor]:
        raise NotImplementedError


class Collective:
    """Sends by an all-gather and an all-to-all, through which autograd can differentiate."""

    def __init__(self, group: str, ranks: int):
        self.group = group, ranks

    def begin(self) -> None:
        """Nothing has to be free: each result is a new tensor."""

    def dispatch(self, region: int = X) -> Transfer:
        return CollectiveTransfer(dispatch_tokens, self.group)

    def fetch(self, *transfers: Transfer) -> None:
        """Nothing is left to do: a collective sends and fetches."""

    def combine(self) -> Transfer:
        return CollectiveTransfer(combine_tokens, self.group)

    def lend(
        self, parts: Sequence[Tensor], guests_of: Tensor, first: int, each: int
    ) -> Callable[[], list[Tensor]]:
        """Send each guest's part of `parts` (E, n); returns what returns the guests' (G, n).

        Each rank sends all slots to all ranks, of which it has filled those of its own experts.
        """
        (ranks, guests), group = guests_of.shape, process_group(self.group[0])
        home = guests_of[group.rank()].div(each, rounding_mode="floor").clamp(0, ranks - 1)
        slot, arrived = torch.arange(guests, device=guests_of.device), []
        filled = [t.new_empty(ranks, guests, t.shape[1]) for t in parts]
        send_guests(parts, list(map(places_in, filled)), guests_of, first)
        for sent in filled:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
            arrived.append(received[home, slot])
        return lambda: arrived

    def gradients(self, guests_of: Tensor, sizes: Sequence[Size]) -> tuple[list[Tensor], SendHome]:
        """Return zeros (G, n) for the gradients of guests, and what sends these home."""
        guests, device = guests_of.shape[1], guests_of.device
        zeros = [torch.zeros(guests, n, dtype=dtype, device=device) for n, dtype in sizes]

        def send() -> list[Places]:
            name, ranks = self.group
            received = [t.new_empty(ranks, *t.shape) for t in zeros]
            for t, parts in zip(zeros, received, strict=True):
                all_gather(parts.flatten(0, 1), t, group=process_group(name))
            return list(map(places_in, received))

        return zeros, send


class CollectiveTransfer(Transfer):
    def __init__(self, op: Callable[[Tensor, str, int], Tensor], group: tuple[str, int]):
        super().__init__()
        self.op, self.group = op, group

    def send(self, t: Tensor) -> None:
        self.sent.append(self.op(t, *self.group))

    def receive(self) -> list[Tensor]:
        return self.sent


class Pool:
    """Memory on each rank of a group that all of them can read and write, in regions.

    A dispatch copies a rank's rows into its own region, from where the other ranks fetch them; rows of the
    routing are few, and go to all ranks at once.  A combine copies rows into the region of their home, which
    adds them up.  Large copies take no SM, and run on a stream of their own, beside kernels.  What a dispatch
    returns is memory of the region, and valid until `begin`.
    """

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int], device: torch.device):
        memory = symmetric_memory()
        self.sizes = sizes
        self.starts = [0, *itertools.accumulate(sizes)]
        own, ranks = group.rank(), group.size()
        self.rank, self.ranks = own, ranks
        self.others = [*range(own + 1, ranks), *range(own)]  # not all from or to the same at once
        self.memory = memory.empty(self.starts[-1], dtype=torch.uint8, device=device)
        self.handle = memory.rendezvous(self.memory, group.group_name)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        memories = [self.buffer(rank, 0, 0, (self.starts[-1],), torch.uint8) for rank in range(self.ranks)]
        self.known: dict[tuple[Any, ...], list[Places]] = {}
        self.bases = torch.tensor([t.data_ptr() for t in memories], dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Wait, on the GPU, until no rank uses what arrived earlier."""
        self.barrier()

    def barrier(self) -> None:
        self.handle.barrier(0, TIMEOUT)

    def dispatch(self, region: int = X) -> Transfer:
        return Push(self, region) if region == ROUTING else Fetch(self, region)

    def combine(self) -> Transfer:
        return Push(self, SUMS)

    def fetch(self, *transfers: Transfer) -> None:
        """Begin to fetch what the other ranks have sent, once all of them have done so."""
        own = [transfer for transfer in transfers if isinstance(transfer, Fetch)]
        for transfer in own:
            transfer.wait(self.rank)
        self.barrier()
        for transfer in own:
            transfer.fetch()

    def lend(
        self, parts: Sequence[Tensor], guests_of: Tensor, first: int, each: int
    ) -> Callable[[], list[Tensor]]:
        """Write each guest's part of `parts` (E, n) to its slot; returns what returns the guests' (G, n).

        They are here after the barrier of `fetch`, which comes next.  Products leave this kernel no room, and
        copies of tokens little of the link, so both begin later.
        """
        own = self.places(GUESTS, guests_of.shape[1], [(t.shape[1], t.dtype) for t in parts])
        send_guests(parts, own, guests_of, first)
        # new tensors each time: what was derived from old numbers (derived.py) is not taken for these
        return lambda: [self.again(places) for places in own]

    def gradients(self, guests_of: Tensor, sizes: Sequence[Size]) -> tuple[list[Tensor], SendHome]:
        """Return zeros (G, n) for the gradients of guests, which the other ranks read after a barrier."""
        every = self.places(GRADIENTS, guests_of.shape[1], sizes)
        own = [places.parts[self.rank] for places in every]
        clear_guests(own, guests_of[self.rank])
        return own, lambda: every

    def again(self, places: Places) -> Tensor:
        """Return this rank's part as another tensor."""
        own = places.parts[self.rank]
        return self.buffer(self.rank, 0, places.offset, own.shape, own.dtype)

    def places(self, region: int, guests: int, sizes: Sequence[Size]) -> list[Places]:
        """Return where in a region of each rank tensors of (G, n) lie, one after the other."""
        key = region, guests, *sizes
        if key not in self.known:
            self.known[key] = places = []
            offset = 0
            for n, dtype in sizes:
                every = range(self.ranks)
                parts = [self.buffer(rank, region, offset, (guests, n), dtype) for rank in every]
                places.append(Places(parts, self.bases, self.starts[region] + offset))
                offset += aligned(guests * n * dtype.itemsize)
        return self.known[key]

    def buffer(self, rank: int, region: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a part of a rank's region, which begins `offset` bytes after the region."""
        first = (self.starts[region] + offset) // dtype.itemsize
        part: Tensor = self.handle.get_buffer(rank, shape, dtype, first)
        return part


class PoolTransfer(Transfer):
    """What all ranks send into one region of a pool."""

    def __init__(self, pool: Pool, region: int):
        super().__init__()
        self.pool, self.region, self.offset = pool, region, 0
        self.stream = pool.stream if region != ROUTING else None  # which would wait behind tokens there
        # rank -> recorded once the copies of this rank's part have ended
        self.events: dict[int, torch.cuda.Event | None] = {}

    def buffers(self, part: Tensor) -> list[Tensor]:
        """Return where the parts of all ranks belong, (R * rows, N) on each, and expect them to arrive."""
        pool, (rows, columns) = self.pool, part.shape
        where = self.region, self.offset, (pool.ranks * rows, columns), part.dtype
        self.offset += aligned(pool.ranks * part.nbytes)
        if self.offset > pool.sizes[self.region]:
            raise AssertionError(f"{self.offset} bytes in a region of {pool.sizes[self.region]}")
        buffers = [pool.buffer(rank, *where) for rank in range(pool.ranks)]
        self.arrived.append(buffers[pool.rank])
        return buffers

    def copy(self, rank: int, to: Tensor, part: Tensor) -> None:
        """Begin to copy a part from or to this rank."""
        with beside(self.stream) as stream:
            to.copy_(part, non_blocking=True)
            self.sent.append(part)
            self.events[rank] = None if stream is None else stream.record_event()

    def receive(self) -> list[Tensor]:
        """Return what arrived; the first call waits for it, on the GPU."""
        if self.results is None:
            for rank in self.events:
                self.wait(rank)
            self.results = self.received()
            self.sent = []
        return self.results

    def received(self) -> list[Tensor]:
        """Return what arrived, after the copies from and to this rank."""
        return self.arrived

    def wait(self, rank: int) -> None:
        """Let the current stream wait for the last copy from or to this rank."""
        event = self.events.get(rank)
        if event is not None and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)


class Push(PoolTransfer):
    """Each rank writes into the memory of the others, and a barrier tells when all have."""

    def send(self, t: Tensor) -> None:
        t, ranks = t.contiguous(), self.pool.ranks
        parts = t.chunk(ranks) if self.region == SUMS and t.shape[0] else (t,) * ranks
        places = self.places(parts[0])
        for rank in (self.pool.rank, *self.pool.others):
            self.copy(rank, places[rank], parts[rank])

    def places(self, part: Tensor) -> list[Tensor]:
        """Return where on each rank a part of this shape from this rank belongs."""
        first = self.pool.rank * part.shape[0]
        return [buffer[first : first + part.shape[0]] for buffer in self.buffers(part)]

    def received(self) -> list[Tensor]:
        self.pool.barrier()
        arrived, self.arrived = self.arrived, []
        return arrived if self.region != SUMS else list(map(self.added, arrived))

    def added(self, parts: Tensor) -> Tensor:
        out = parts.new_empty(parts.shape[0] // self.pool.ranks, parts.shape[1])
        add_parts(out, parts, self.pool.ranks)
        return out


class Fetch(PoolTransfer):
    """Each rank copies its rows into its own memory; after a barrier, the others read them there in turn."""

    def __init__(self, pool: Pool, region: int):
        super().__init__(pool, region)
        self.copies: list[tuple[int, Tensor, Tensor]] = []  # that `fetch` makes

    def send(self, t: Tensor) -> None:
        buffers, own = self.buffers(t), self.pool.rank
        parts = [buffer.view(self.pool.ranks, *t.shape).unbind() for buffer in buffers]
        self.copy(own, parts[own][own], t.contiguous())
        self.copies += [(rank, parts[own][rank], parts[rank][rank]) for rank in self.pool.others]

    def fetch(self) -> None:
        """Begin to copy the rows of the other ranks."""
        for copy in self.copies:
            self.copy(*copy)
        self.copies = []


Transport = Collective | Pool


class Sources:
    """The passes of `kernels/base/sources.py`: the rows of own tokens first, then those of each rank as they
    arrive; the sums of other ranks' tokens first, which travel while the own ones are computed.

    spans      as `merge_plans` returns them, without their last columns
    dispatch   what the products read
    tokens     what the products of other windows read: the same, or in backward the tokens
    sums       what their sums are sent by
    sum_others adds the sums of the other windows' rows for the tokens of one rank, before a pass does; or
               None.  It is given the passes of these windows for that rank, the last window first
    """

    def __init__(
        self, spans: Tensor, dispatch: Transfer, tokens: Transfer, sums: Transfer,
        sum_others: Callable[[Tensor, Sequence["Pass"]], None] | None,
    ):  # fmt: skip
        assert isinstance(dispatch, Fetch) and isinstance(tokens, Fetch) and isinstance(sums, Push)
        every = [[part.unbind() for part in window.unbind()] for window in spans.unbind()]
        (self.starts, self.sizes), *others = every
        self.others = others[::-1]
        self.dispatch, self.tokens, self.sums = dispatch, tokens, sums
        self.sum_others = sum_others

    def arriving(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rank in (self.dispatch.pool.rank, *self.dispatch.pool.others):  # in which they arrive
            self.dispatch.wait(rank)
            yield self.sizes[rank], self.starts[rank]
        self.dispatch.receive()

    def leaving(self, out: Tensor) -> Iterator[tuple[Tensor, Tensor, slice, Tensor, bool]]:
        add = self.sum_others is not None
        own, ranks = self.sums.pool.rank, self.sums.pool.ranks
        tokens, parts = out.shape[0] // ranks, out.chunk(ranks)
        places = self.sums.places(parts[own])
        for rank in (*self.sums.pool.others, own):
            here, in_place = slice(rank * tokens, (rank + 1) * tokens), rank == own and not add
            if self.sum_others is not None:
                passes = [
                    Pass(starts[rank], sizes[rank], here, functools.partial(self.tokens.wait, rank))
                    for starts, sizes in self.others
                ]
                with by_source.set(None):
                    self.sum_others(out, passes)
            yield self.sizes[rank], self.starts[rank], here, places[own] if in_place else parts[rank], add
            if not in_place:
                self.sums.copy(rank, places[rank], parts[rank])


class Pass(NamedTuple):
    """One window's pass for the tokens of one rank, `here` in all slots and, after `wait`, arrived."""

    starts: Tensor
    sizes: Tensor
    here: slice
    wait: Callable[[], None]

    def arriving(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.wait()
        yield self.sizes, self.starts

    def leaving(self, out: Tensor) -> Iterator[tuple[Tensor, Tensor, slice, Tensor, bool]]:
        yield self.sizes, self.starts, self.here, out[self.here], False


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[torch.cuda.Stream | None]:
    """Run the block on this stream, after what the current stream has begun; without one just run it."""
    if stream is None:
        yield None
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield stream


# group -> its pools; the last one is the largest
POOLS: WeakKeyDictionary[dist.ProcessGroup, list[Pool]] = WeakKeyDictionary()


def pool_for(group: dist.ProcessGroup, sizes: Sequence[int], device: torch.device) -> Pool:
    """Return the group's pool, with regions of at least these bytes; all ranks make the same calls.

    A pool that has become too small stays, because a CUDA graph may use it.  A region that was too small
    grows by at least a quarter, so that slowly growing numbers of tokens need few pools.
    """
    pools = POOLS.setdefault(group, [])
    largest = pools[-1].sizes if pools else [0] * len(sizes)
    if not pools or any(map(operator.gt, sizes, largest)):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "experts shared by ranks need larger buffers for these tokens, which cannot be made during a "
                "capture: run a step with as many tokens before"
            )
        pairs = zip(sizes, largest, strict=True)
        grown = [max(new, aligned(old * 5 // 4)) if new > old else old for new, old in pairs]
        pools.append(Pool(group, grown, device))
    return pools[-1]


def region_sizes(
    ranks: int, x: Tensor, s: Tensor, num_experts: int, guests: tuple[int, int] = (0, 0)
) -> list[int]:
    """Return the bytes of each region for x (T, H), its plan and routing weights s (T, k), and gradients.

    `guests` are those of the guests' weights and of their gradients.
    """
    tokens, routing = (max(aligned(ranks * t.nbytes), ALIGNMENT) for t in (x, s))
    # short rows take more in 8 bits, with their scales
    scales = 4 * len(x) * -(-x.shape[1] // ROW_BLOCK)
    tokens = max(tokens, aligned(ranks * x.numel()) + aligned(ranks * scales))
    # of fixed size are the numbers of rows and of tokens
    return [tokens, tokens, tokens + routing, aligned(4 * ranks * (num_experts + 1)) + 2 * routing, *guests]


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# group -> type of device -> why not, or ""
REASONS: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def why_not_symmetric(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return why these ranks cannot write into each other's memory, or "" if they can; a collective call."""
    if device.type != "cuda":
        return f"the tokens are on the device {device.type}"
    host = read_text(BOOT) if BOOT.exists() else socket.gethostname()
    mine = host, str(torch.cuda.get_device_properties(device).uuid)
    everyone = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    hosts, gpus = map(set, zip(*everyone, strict=True))
    if len(hosts) > 1:
        return "the ranks are on several hosts"
    if len(gpus) < group.size():
        return "ranks share a GPU"
    failed = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        Pool(group, [ALIGNMENT], device)
    except RuntimeError as error:
        log.info("symmetric memory: %s", error)
        failed += 1
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    return "torch could not map the memory of one GPU on another" if failed.item() else ""


def uses_symmetric(transport: str, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the ranks of a group use symmetric memory, on all ranks the same; a collective call.

    Raises RuntimeError on all ranks if `transport` is "symmetric" and they cannot.
    """
    if transport == "collective" or group.size() == 1:
        return False
    reasons = REASONS.setdefault(group, {})
    if device.type not in reasons:
        why = reasons[device.type] = why_not_symmetric(group, device)
        how = f"by collectives: {why}" if why else "through symmetric memory"
        log.info("expert parallelism sends tokens %s", how)
    why = reasons[device.type]
    if why and transport == "symmetric":
        raise RuntimeError(f"transport='symmetric' is not possible: {why}")
    return not why
