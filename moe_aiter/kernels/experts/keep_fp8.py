"""Keep the 8-bit weights of an optimizer step from its first micro-batch to its last: `keep_fp8_weights`.

A block holds for the whole process instead of a ContextVar: autograd runs CUDA gradients on its own threads,
which would not see one.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ...derived import Cache, is_keepable
from ...private_api import is_view
from ..base.check import check_flags

T = TypeVar("T")


@dataclasses.dataclass
class Block:
    """The blocks that were entered on one stream and not left."""

    count: int = 0
    backward: int = 0  # how many of them keep backward's order
    cache: Cache = dataclasses.field(default_factory=Cache)


OPEN: dict[tuple, Block] = {}
LOCK = threading.Lock()  # of OPEN


@contextlib.contextmanager
def keep_fp8_weights(*, backward: bool = False) -> Iterator[None]:
    """Keep the 8-bit weights of layers with `fp8=` for all micro-batches of an optimizer step.

        with keep_fp8_weights():
            for micro_batch in batch:
                loss(model(micro_batch)).backward()
        optimizer.step()

    Without this block, every forward pass quantises both weights, every backward pass quantises them again in
    the order that it needs, and so does a recomputed forward pass.  The results inside the block are the same
    to the bit.

      * By default, the first pass quantises the weights in forward's order, and later passes reuse them: one
        byte for each number of the experts' weights.  Every backward pass makes its own order and frees it.
      * With `backward=True`, backward's order is kept too: at most two bytes for each number.  The GPU takes
        less time for a step.

    Kept weights are freed when the outermost block ends, also by an exception.  Blocks may be nested: while
    one of the open blocks has `backward=True`, both orders are kept.  Blocks hold for the whole process.
    Raises TypeError if `backward` is not a bool.

    A weight that changes inside the block, by its version counter, is quantised again; so are all weights
    after a step of any optimizer.  Make other changes outside of the block: writes through `.data`, writes to
    DTensors, as by `load_sharded`, and replays of CUDA graphs that contain the optimizer.

    Still quantised in each pass:

      * weights that are computed for each micro-batch, such as float32 weights under torch.autocast
      * for backward, weights in the backward pass of a compiled layer
      * weights on another stream than the one on which the block was entered, as in a CUDA graph that is
        captured within the block (`mode="reduce-overhead"` too)

    A CUDA graph that contains the whole block quantises once in each replay.  Under FSDP2, a weight that was
    resharded is quantised again if it comes back at another address.  So gather weights once a step: use
    `set_reshard_after_forward(False)` and `set_reshard_after_backward(False)` until the last micro-batch.
    """
    check_flags(backward=backward)
    streams = current_streams()
    with LOCK:
        for stream in streams:
            block = OPEN.setdefault(stream, Block())
            block.count, block.backward = block.count + 1, block.backward + backward
    try:
        yield
    finally:
        with LOCK:
            for stream in streams:
                block = OPEN[stream]
                block.count, block.backward = block.count - 1, block.backward - backward
            ended = [OPEN.pop(stream).cache for stream in streams if not OPEN[stream].count]
        for cache in ended:
            cache.close()


def current_streams() -> list[tuple]:
    """Return where kept weights may be used: on the CPU, and on each GPU's current stream."""
    if not torch.cuda.is_initialized():  # then each GPU's will be the default one, 0
        gpus = [(index, 0, False) for index in range(torch.cuda.device_count())]
    else:
        captured = torch.cuda.is_current_stream_capturing()
        streams = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
        gpus = [(index, stream.cuda_stream, captured) for index, stream in enumerate(streams)]
    return [("cpu",), *gpus]


def stream_of(w: Tensor) -> tuple:
    """On one stream nothing is read before it is made, or freed before it is read.  What a capture made, no
    other stream ever computes; what was made before, the graph's replays would find stale."""
    if not w.is_cuda:
        return (w.device.type,)
    stream = torch.cuda.current_stream(w.device).cuda_stream
    return w.get_device(), stream, torch.cuda.is_current_stream_capturing()


def block_for(w: Tensor) -> Block | None:
    """Return the open block of a weight that the next micro-batch uses again."""
    if not OPEN or not is_keepable(w) or not (w.is_leaf or is_view(w)):
        return None
    return OPEN.get(stream_of(w))


def keeps_fp8(w: Tensor) -> bool:
    """Whether a block is open that keeps what forward makes of w."""
    return block_for(w) is not None


def kept_fp8(w: Tensor, what: str, make: Callable[[], T], backward: bool = False) -> T:
    """`make()`, or what it returned before in this block.  `backward`: forward does not need the value."""
    block = block_for(w)
    if block is None or (backward and not block.backward):
        return make()
    return block.cache.get(w, what, make)
