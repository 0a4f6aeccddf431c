"""The experts' 8-bit weights, kept from the first micro-batch of an optimizer step to the last.

Process-wide, not a ContextVar: autograd runs CUDA gradients on threads of its own, which would not see one.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ..derived import Cache, is_keepable

T = TypeVar("T")


@dataclasses.dataclass
class Block:
    """The blocks that were entered at one place and not left."""

    count: int = 0
    cache: Cache = dataclasses.field(default_factory=Cache)


OPEN: dict[tuple, Block] = {}
LOCK = threading.Lock()  # of OPEN


@contextlib.contextmanager
def keep_fp8_weights() -> Iterator[None]:
    """Around the micro-batches of one optimizer step: layers with `fp8=` quantise each weight once in it.

        with keep_fp8_weights():
            for micro_batch in batch:
                loss(model(micro_batch)).backward()
        optimizer.step()

    Without it every forward pass quantises both weights, every backward pass does so again in the order that
    it needs, and a recomputed forward pass once more.  Inside, the first that needs them does, for all, and
    backward finds what forward made of gate_up; the results are the same to the bit.  It takes two bytes for
    each weight of an expert, until the end of the block, also by an exception; blocks may be nested, and are
    those of the whole process.

    A weight that changes inside the block (its version counter) is quantised again, and all are after a step
    of any optimizer.  What changes a weight otherwise belongs outside: writes through `.data`, and replays of
    CUDA graphs that hold the optimizer.

    Quantised each time as ever: weights that are computed anew for each micro-batch, as float32 ones are
    under torch.autocast; for backward, in the backward pass of a compiled layer; and what runs on another
    stream than the block was entered on, as a graph captured within the block does (`mode="reduce-overhead"`
    too).  A block that is captured as a whole quantises once in each replay.  Under FSDP2 a weight that was
    resharded in between is quantised again if it comes back at another address: gather once a step, by
    `set_reshard_after_forward(False)` and `set_reshard_after_backward(False)` until the last micro-batch.
    """
    here = places()
    with LOCK:
        for place in here:
            OPEN.setdefault(place, Block()).count += 1
    try:
        yield
    finally:
        with LOCK:
            for place in here:
                OPEN[place].count -= 1
            ended = [OPEN.pop(place).cache for place in here if not OPEN[place].count]
        for cache in ended:
            cache.close()


def places() -> list[tuple]:
    """Where a weight may be used that is kept from now on: on the CPU, and on each GPU's current stream."""
    if not torch.cuda.is_initialized():  # then each GPU's will be the default one, 0
        gpus = [(index, 0, False) for index in range(torch.cuda.device_count())]
    else:
        captured = torch.cuda.is_current_stream_capturing()
        streams = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
        gpus = [(index, stream.cuda_stream, captured) for index, stream in enumerate(streams)]
    return [("cpu",), *gpus]


def place_of(w: Tensor) -> tuple:
    """On one stream nothing is read before it is made, or freed before it is read.  What a capture made, no
    other stream ever computes; what was made before, the graph's replays would find stale."""
    if not w.is_cuda:
        return (w.device.type,)
    stream = torch.cuda.current_stream(w.device).cuda_stream
    return w.get_device(), stream, torch.cuda.is_current_stream_capturing()


def cache_for(w: Tensor) -> Cache | None:
    """That of an open block, for a weight that the next micro-batch will find again."""
    if not OPEN or not is_keepable(w) or not (w.is_leaf or w._is_view()):
        return None
    block = OPEN.get(place_of(w))
    return None if block is None else block.cache


def keeps_fp8(w: Tensor) -> bool:
    """Whether a block is open that keeps what is made of w."""
    return cache_for(w) is not None


def kept_fp8(w: Tensor, what: str, make: Callable[[], T]) -> T:
    """`make()`, or what it returned before in this block."""
    cache = cache_for(w)
    return make() if cache is None else cache.get(w, what, make)
