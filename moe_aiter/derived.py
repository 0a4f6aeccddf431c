"""Cache what is computed from a weight while the weight does not change: `derived(w, what, make)`.

The key of a weight is its storage, its position in the storage, and its version counter.  The cache holds a
weak reference to the storage.  So the cache keeps no weight alive, and does not confuse a weight with a later
one at the same address.  An entry is dropped

  * at once, when the storage of its weight is freed
  * when it is asked for and the weight has another version or another address
  * when any optimizer has made a step.  A step may write without a new version: through `.data`, or, with
    FSDP2, to shards from which the same storage is filled again.  Entries made from integers stay, such as
    those made from the indices of a sparse weight, because no optimizer writes integers
  * when the entries take more than `cache_size()`: the entry whose last use is the longest ago goes first

Some changes cannot be seen.  Call `forget()` after them: a write through `.data` by hand, loading shards from
a checkpoint, and the replay of a CUDA graph that contains the optimizer.  Experts in host memory (`offload`)
are then copied again too.

While a CUDA graph is captured, entries made before the capture are reused.  They then live as long as the
weight and never change, because each replay reads them.  Without such an entry, the value is computed within
the graph and not kept.
"""

import dataclasses
import math
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .config import settings
from .op import is_plain, is_transformed
from .private_api import coo_indices, coo_values, current_stream, version_of

T = TypeVar("T")
MB = 2**20  # bytes
DEVICES = "cpu", "cuda"  # of another, we do not know what waits for what
ROWS_FIRST = torch.sparse_csr, torch.sparse_bsr


class Entry(NamedTuple):
    storage: weakref.ref  # of the weight
    state: tuple[int, int]  # the weight's version and address
    value: Any
    size: int  # bytes


class Cache:
    """At most `limit` bytes of what was made of weights."""

    def __init__(self, limit: float = math.inf):
        self.limit, self.size, self.age, self.hook = limit, 0, 0, None
        self.age_of_frozen = 0  # grows when weights without a gradient may have changed without a trace
        self.entries: OrderedDict[tuple, Entry] = OrderedDict()  # what was not asked for longest comes first
        self.dead: deque[tuple] = deque()
        self.lock = threading.Lock()  # autograd runs on threads of its own

    def get(self, w: Tensor, what: str, make: Callable[[], T]) -> T:
        """Return the kept value, or keep and return `make()`.  Callers must not write to the value."""
        if not is_keepable(w):
            return make()
        found = self.find(w, what)
        return self.keep(w, what, make) if found is None else found.value

    def find(self, w: Tensor, what: str) -> Entry | None:
        key = key_of_weight(w, what)
        with self.lock:
            self.bury()
            entry = self.entries.get(key)
            if entry is None or entry.storage() is not w.untyped_storage() or entry.state != state_of(w):
                self.drop(key)
                return None
            self.entries.move_to_end(key)
            return entry

    def keep(self, w: Tensor, what: str, make: Callable[[], T]) -> T:
        if self.limit <= 0:
            return make()
        age, before = self.age, state_of(w)
        with torch.inference_mode(False), torch.no_grad():  # it may serve a training step next
            value = make()
        storages = {t.untyped_storage() for t in tensors(value)}
        size = sum(s.nbytes() for s in storages)
        # a value with the weight's memory, or with a graph, would keep the weight alive
        tied = w.untyped_storage() in storages or any(t.requires_grad for t in tensors(value))
        if tied or size > self.limit or state_of(w) != before:
            return value
        key = key_of_weight(w, what)
        storage = weakref.ref(w.untyped_storage(), lambda gone: self.on_death(key, gone))
        with self.lock:
            self.bury()
            if self.age == age:  # else another thread has dropped everything since
                self.drop(key)
                self.entries[key] = Entry(storage, before, value, size)
                self.size += size
                self.shrink()
                self.follow_optimizers()
        return value

    def follow_optimizers(self) -> None:
        if self.hook is None:
            self.hook = register_optimizer_step_post_hook(self.on_step)

    def on_step(self, optimizer: Optimizer, *_) -> None:
        """Forget values of floats after an optimizer's step, which writes floats only."""
        groups = optimizer.param_groups
        with self.lock:
            self.age += 1
            self.age_of_frozen += any(not p.requires_grad for group in groups for p in group["params"])
            for key in [key for key in self.entries if dtype_in(key).is_floating_point]:
                self.drop(key)

    def forget(self) -> None:
        """Drop everything."""
        with self.lock:
            self.age += 1
            self.age_of_frozen += 1
            self.entries.clear()
            self.size = 0

    def close(self) -> None:
        """Drop everything, and keep nothing from now on."""
        self.limit = 0
        self.forget()
        if self.hook is not None:
            self.hook.remove()

    def on_death(self, key: tuple, storage: weakref.ref) -> None:
        """Note that a weight is gone.  This can run at any time, also in a thread that holds the lock."""
        self.dead.append((key, storage))
        if self.lock.acquire(blocking=False):
            try:
                self.bury()
            finally:
                self.lock.release()

    # the methods below need the lock

    def bury(self) -> None:
        while self.dead:
            key, storage = self.dead.popleft()
            if key in self.entries and self.entries[key].storage is storage:
                self.drop(key)

    def drop(self, key: tuple) -> None:
        entry = self.entries.pop(key, None)
        self.size -= 0 if entry is None else entry.size

    def shrink(self) -> None:
        while self.size > self.limit:
            self.drop(next(iter(self.entries)))


def is_keepable(w: Tensor) -> bool:
    """Not where memory is not what it seems, nor of an inference tensor, which has no version."""
    if torch.compiler.is_compiling() or is_transformed() or not is_plain((w,)):
        return False
    return not w.is_inference() and w.device.type in DEVICES and w.layout == torch.strided


def key_of_weight(w: Tensor, what: str) -> tuple:
    where = id(w.untyped_storage()), w.storage_offset(), w.shape, w.stride()
    return what, *where, w.dtype, w.is_neg(), w.is_conj()


def dtype_in(key: tuple) -> torch.dtype:
    return key[5]


def state_of(w: Tensor) -> tuple[int, int]:
    """Return version and address: memory freed by `resize_(0)` comes back with other numbers."""
    return version_of(w), w.data_ptr()


def tensors(value) -> Iterator[Tensor]:
    """The strided tensors that a tensor, dense or sparse, or a container or dataclass of such consists of."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
        elif value.layout == torch.sparse_coo:
            yield from (coo_indices(value), coo_values(value))
        elif value.layout in ROWS_FIRST:
            yield from (value.crow_indices(), value.col_indices(), value.values())
        else:
            yield from (value.ccol_indices(), value.row_indices(), value.values())
    elif dataclasses.is_dataclass(value):
        yield from tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


CACHE = Cache(settings.cache_size * MB)


class OnStream(NamedTuple):
    """A value that a CUDA stream has begun to compute."""

    value: Any
    stream: torch.cuda.Stream
    made: torch.cuda.Event

    def wait(self) -> None:
        """Have the stream that is current now wait for it, and its memory for that stream."""
        # a number, not an object: most calls are on the stream that made it, and have nothing to wait for
        if current_stream(self.stream.device_index) != self.stream.cuda_stream:
            stream = torch.cuda.current_stream(self.stream.device)
            stream.wait_event(self.made)
            for t in tensors(self.value):
                t.record_stream(stream)


def derived(w: Tensor, what: str, make: Callable[[], T]) -> T:
    """`make()`, which computes from the weight `w` what the name `what` says, or what it returned before.

    It is kept while `w` has the same storage, offset, shape, strides, dtype and version, and `cache_size()`
    allows: see above.  It may be a tensor, sparse or not, or a tuple, list, dict or dataclass of tensors and
    others.  Its memory must be its own, and no caller may write to it: what shares the memory of `w` or has a
    gradient is returned but not kept.  `make` runs without gradients.

    Never kept: what is made of inference tensors, fake ones and subclasses, or under torch.compile's tracing,
    torch.func or a dispatch mode, or on devices other than CPU and CUDA.  Safe in several threads, which may
    make the same twice, and on several streams.
    """
    if not w.is_cuda or not is_keepable(w):
        return CACHE.get(w, what, make)
    found = CACHE.find(w, what)
    if torch.cuda.is_current_stream_capturing():
        if found is None:
            return make()
        # a capture begins after a synchronisation; no later wait can keep the memory for the replays
        weakref.finalize(w.untyped_storage(), release, found.value).atexit = False
        return found.value.value

    def on_stream() -> OnStream:
        value, stream = make(), torch.cuda.current_stream(w.device)
        return OnStream(value, stream, stream.record_event())

    kept = CACHE.keep(w, what, on_stream) if found is None else found.value
    kept.wait()
    return kept.value


def release(value) -> None:
    """Do nothing.  The finalizer that will call this function holds `value`."""


def set_cache_size(mb: int) -> None:
    """Keep at most so many MB (2^20 bytes) of what `derived` returned; 0 keeps nothing.  In the environment:
    MOE_AITER_CACHE_SIZE.  Raises TypeError unless it is an int, ValueError for less than 0."""
    if not isinstance(mb, int) or isinstance(mb, bool):
        raise TypeError(f"mb must be an int, whole MB, not {type(mb).__name__}")
    if mb < 0:
        raise ValueError(f"mb must be 0 or more, not {mb} MB")
    CACHE.limit = mb * MB
    with CACHE.lock:
        CACHE.shrink()


def cache_size() -> int:
    """The most that is kept, in MB."""
    return int(CACHE.limit) // MB


def forget() -> None:
    """Drop all that is kept, also the copies of `offload`: after a weight has changed without a trace."""
    CACHE.forget()
