"""Frozen experts in host memory, whose weights are copied to the GPU ahead of their use: `offload(model)`.

A pool has `ahead + 1` buffers on the GPU, each as large as the largest layer.  When a layer runs, the pool
hands out the buffer with its weights, and copies those of the next layers into the other buffers: of later
layers in a forward pass, of earlier layers in a backward pass, also where activation checkpointing repeats a
forward pass.  The order only decides what is copied early; a layer that runs out of turn is copied on demand.

Autograd must not keep a buffer until the backward pass.  While a layer runs, hooks for saved tensors keep the
place of a weight in its buffer instead, and ask the pool again when the backward pass needs the weight.

Copies run on a stream of their own.  The stream of the layer waits for the copy, and the copy waits for the
streams that have used the buffer: the host waits for nothing.
"""

import contextlib
import mmap
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..derived import CACHE, state_of
from ..kernels.base.check import check_sizes, checked
from ..private_api import (
    MOVE,
    SAME,
    graph_task,
    is_alias,
    outside_of_graph,
    own_buffers,
    own_parameters,
    top_hooks,
    version_of,
)
from .attached import Attachment
from .experts import Experts
from .four_bit import FourBitExperts
from .lora import LoRAExperts, LoRAFactors
from .optimized import OptimizedMoELayer
from .quantized import QuantizedExperts

KINDS = Experts, FourBitExperts, LoRAExperts, OptimizedMoELayer, QuantizedExperts
# whether a module is experts; integrations add theirs
FINDERS: list[Callable[[nn.Module], bool]] = [lambda module: isinstance(module, KINDS)]
ALIGNMENT = 256  # bytes, of each weight in a buffer
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs


class BufferPlace(NamedTuple):
    """The place of a tensor in a buffer of bytes; the offset counts numbers, not bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, data: Tensor) -> Tensor:
        return data.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class Layer:
    """The weights of one module, in host memory, and their places in a buffer of `size` bytes."""

    def __init__(self, name: str, module: nn.Module, index: int):
        self.name, self.module, self.index, self.size = name or "the model", module, index, 0
        owners: list[dict[str, Any]] = []
        for part in modules_of_weights(module):
            owners += own_parameters(part), own_buffers(part)
        self.found = [(owner, key) for owner in owners for key, t in owner.items() if t is not None]
        self.layouts: list[tuple[Any, ...]] = []  # of the weights, to which the places belong
        self.places: list[BufferPlace] = []

    def next_place(self, t: Tensor) -> BufferPlace:
        stride = torch.empty_like(t, device="meta").stride()  # that of `t`, unless it has gaps
        offset = self.size // t.itemsize
        self.size += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        return BufferPlace(t.dtype, t.shape, stride, offset)

    def weights(self) -> list[Tensor]:
        """Return the weights in host memory; raise unless they are there, whole, and frozen.

        They may have another dtype or shape than before, and then get other places.
        """
        weights: list[Any] = [owner.get(key) for owner, key in self.found]
        for (_, key), t in zip(self.found, weights, strict=True):
            if t is None:
                raise RuntimeError(f"{key} of {self.name} is offloaded, but something has replaced it")
            if t.requires_grad:
                raise ValueError(
                    f"{key} of {self.name} requires a gradient, and only frozen weights can be offloaded: "
                    "call requires_grad_(False) on the experts"
                )
        layouts = [(type(t), t.is_meta, t.dtype, t.shape, t.stride()) for t in weights]
        if layouts != self.layouts:
            self.check_whole(weights)
            self.layouts, self.size = layouts, 0
            self.places = [self.next_place(t) for t in weights]
        return weights

    def check_whole(self, weights: list[Tensor]) -> None:
        for (_, key), t in zip(self.found, weights, strict=True):
            if type(t) not in (Tensor, nn.Parameter) or t.is_meta:
                kind = "on the meta device" if t.is_meta else type(t).__name__
                raise ValueError(f"{key} of {self.name} is {kind}, but must be a whole weight with numbers")

    @contextlib.contextmanager
    def weights_in(self, data: Tensor | None) -> Iterator[None]:
        """Inside, the weights of the module are those in this buffer, or None."""
        before = [owner[key] for owner, key in self.found]
        try:
            for (owner, key), place in zip(self.found, self.places, strict=True):
                owner[key] = None if data is None else place.view(data)
            yield
        finally:
            for (owner, key), t in zip(self.found, before, strict=True):
                owner[key] = t


def modules_of_weights(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those in it that have its weights: not the adapters."""
    yield module
    for child in module.children():
        if not isinstance(child, LoRAFactors):
            yield from modules_of_weights(child)


State = tuple[weakref.ref[torch.UntypedStorage], int, int]  # storage, version and address of a weight


class Slot:
    """A buffer on the device: the layer that it holds, and the streams that have used it since the copy."""

    def __init__(self, size: int, device: torch.device, stream: torch.cuda.Stream | None):
        with torch.inference_mode(False):  # else it could not serve a training step
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
        self.layer: Layer | None = None
        self.states: list[State] = []  # of the weights, when they were copied
        self.age = 0  # of the cache of `derived`, when they were copied
        self.users: set[torch.cuda.Stream] = set()
        if stream is not None:
            self.ready = torch.cuda.Event()
            self.users.add(torch.cuda.current_stream(device))  # it may still use memory that was freed before
            self.data.record_stream(stream)


class SavedPlace(NamedTuple):
    """The object that autograd keeps in place of a weight or of its view."""

    states: list[State]
    place: BufferPlace


class WeightPool:
    """Buffers for the weights of `layers`, which are copied there `ahead` layers before they run."""

    def __init__(self, layers: list[Layer], device: torch.device, ahead: int):
        self.layers, self.device, self.ahead = layers, device, ahead
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # the slot that was asked for least recently comes first
        self.slots = [self.new_slot() for _ in layers[: ahead + 1]]
        CACHE.follow_optimizers()

    def new_slot(self) -> Slot:
        return Slot(self.size(), self.device, self.stream)

    def size(self) -> int:
        """Return the bytes of the largest layer, which other weights may have changed."""
        return max(layer.size for layer in self.layers)

    def use(self, layer: Layer) -> Slot:
        """Return the slot with the weights of `layer`, for the current stream, and copy the next layers."""
        if self.stream is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{layer.name} is offloaded: a CUDA graph cannot contain it")
        slot = self.fill(layer)
        if self.stream is not None:
            user = torch.cuda.current_stream(self.device)
            user.wait_event(slot.ready)
            slot.users.add(user)
            slot.data.record_stream(user)
        step = 1 if graph_task() == -1 else -1  # -1: no backward pass is running
        for index in range(layer.index + step, layer.index + step * (self.ahead + 1), step):
            if 0 <= index < len(self.layers):
                self.fill(self.layers[index])
        return slot

    def fill(self, layer: Layer) -> Slot:
        """Return the slot that holds the weights of `layer`, or will when the copies have run."""
        weights, age = layer.weights(), CACHE.age_of_frozen
        states = [(weakref.ref(t.untyped_storage()), *state_of(t)) for t in weights]
        slot = next((slot for slot in self.slots if slot.layer is layer), self.slots[0])
        self.slots.remove(slot)
        if slot.data.nbytes != self.size():
            slot = self.new_slot()
        self.slots.append(slot)
        if slot.layer is layer and slot.states == states and slot.age == age:
            return slot
        slot.layer, slot.states, slot.age = layer, states, age
        if self.stream is not None:
            for user in slot.users:
                self.stream.wait_stream(user)
        slot.users.clear()
        # not in inference mode, in which the buffer would keep its version, by which `derived` goes
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self.stream):
            for t, place in zip(weights, layer.places, strict=True):
                place.view(slot.data).copy_(t, non_blocking=True)
            if self.stream is not None:
                slot.ready.record()
        return slot

    def call(self, layer: Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `forward` of the layer's module, with its weights on the device."""
        slot = self.use(layer)
        with layer.weights_in(slot.data), self.hooks(layer, slot):
            return forward(*args, **kwargs)

    def hooks(self, layer: Layer, slot: Slot) -> contextlib.AbstractContextManager[object]:
        """Return hooks for saved tensors: weights are asked for again, and outer hooks see all others."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        # of a tensor without hooks torch checks the version itself
        keep, give = top_hooks(True) or (lambda t: (t, version_of(t)), of_version)

        def pack(t: Tensor) -> Any:
            if not is_alias(t, slot.data):
                return keep(t)
            return SavedPlace(slot.states, BufferPlace(t.dtype, t.shape, t.stride(), int(t.storage_offset())))

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, SavedPlace):
                return give(saved)
            again = self.use(layer)
            if again.states != saved.states:
                raise RuntimeError(f"the weights of {layer.name} have changed since the forward pass")
            return saved.place.view(again.data)

        return saved_tensors_hooks(pack, unpack)

    def attach(self, layer: Layer, attachment: Attachment) -> None:
        """Run and load the module of a layer by this pool, and move the module without its weights."""
        module, reason = layer.module, "experts are offloaded to host memory"
        forward = partial(outside_of_graph, reason, self.call, layer, module.forward)
        setattr(forward, SAME, True)
        attachment.put(module, "forward", forward)
        attachment.put(module, MOVE, partial(without_weights, layer, getattr(module, MOVE)))
        # methods of the pool, for which pickle says why it refuses
        attachment.hook(module.register_load_state_dict_pre_hook(self.before_loading))
        attachment.hook(module.register_load_state_dict_post_hook(partial(self.after_loading, layer)))

    def before_loading(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.synchronize()  # copies may still read the weights

    def after_loading(self, layer: Layer, *_: object) -> None:
        to_host(layer, self.device)  # load_state_dict(assign=True) brings other memory, of any dtype

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an offloaded model cannot be copied or pickled: copy it first, or save its state_dict"
        )


def without_weights(layer: Layer, apply: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Call `apply`, which moves or converts the module of a layer, but not the weights in host memory."""
    with layer.weights_in(None):
        return apply(*args, **kwargs)


def of_version(saved: tuple[Tensor, int]) -> Tensor:
    """Unpack a tensor; raise, in torch's words, if it has changed in place."""
    t, version = saved
    if version_of(t) != version:
        what = f"[{t.type()} {list(t.shape)}] has version {version_of(t)} instead of {version}"
        raise RuntimeError(f"a tensor that backward needs was modified by an inplace operation: {what}")
    return t


# host memory


def to_host(layer: Layer, device: torch.device) -> None:
    """Move the weights of a layer to host memory, page-locked for a GPU."""
    for t, place in zip(layer.weights(), layer.places, strict=True):
        if device.type == "cuda" and not (t.device.type == "cpu" and t.is_pinned()):
            t.data = page_locked(place, t.nbytes, device).copy_(t.data)
        elif t.device.type != "cpu":
            t.data = t.data.cpu()


def page_locked(place: BufferPlace, size: int, device: torch.device) -> Tensor:
    """Return host memory for a tensor of `size` bytes, from which a GPU copies while the host goes on.

    torch's allocator of such memory rounds each size up to a power of two, to almost twice the size.
    """
    block = torch.frombuffer(mmap.mmap(-1, max(size, 16)), dtype=torch.uint8)  # pages of its own
    pointer, size = block.data_ptr(), block.nbytes
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(pointer, size, PORTABLE))
    if error:
        raise RuntimeError(f"{size} bytes of host memory cannot be page-locked: CUDA error {error}")
    weakref.finalize(block.untyped_storage(), unlock, pointer, device).atexit = False
    return place._replace(offset=0).view(block)


def unlock(pointer: int, device: torch.device) -> None:
    """End `page_locked`, when no copy reads the memory any more."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(pointer)


# public


@checked
def offload(
    model: nn.Module, device: torch.device | str | None = None, *, ahead: int = 1
) -> Callable[[], None]:
    """Keep the frozen weights of all experts in host memory, and copy each layer's to `device` for its use.

        model.requires_grad_(False)  # at least the experts; add adapters before `offload`
        offload(model)
        model.to("cuda")             # all else

    The weights of `Experts`, `LoRAExperts`, `OptimizedMoELayer`, experts that `quantize` has made, and the
    experts of transformers' models after `register()` move to page-locked memory of their size.  On `device`
    are `ahead + 1` buffers of the size of the largest layer.  Forward and backward pass copy the weights of
    the next `ahead` layers on a stream of their own, and the host does not wait for the GPU.  Results have
    the same bits.  Parameters, buffers and state_dict keep their names, and load_state_dict still works.

    device: where the layers run [the current GPU, or the CPU if there is none].  On a CPU the weights are
    copied too, as a test without a GPU needs it.

    Returns a function that ends it; the weights then stay in host memory until `model.to(device)`.  An
    offloaded model cannot be copied or pickled, and runs in one thread at a time.  A compiled graph ends
    before its experts, and a CUDA graph with its experts raises RuntimeError.

    Raises ValueError for a model without experts, for a device that is neither CPU nor GPU or not there, and
    for weights that require a gradient, belong to other modules too, or are sharded, offloaded or meta
    tensors.
    """
    check_sizes(ahead=ahead)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        raise ValueError(f"device must be a CPU or a GPU that torch can use, not {device}")
    device = torch.empty(0, device=device).device  # with its index
    layers = layers_to_offload(model)
    for layer in layers:
        to_host(layer, device)
    pool = WeightPool(layers, device, ahead)
    attachment = Attachment()
    for layer in layers:
        pool.attach(layer, attachment)
    return attachment.close


def layers_to_offload(model: nn.Module) -> list[Layer]:
    """Return the experts of a model in its order; ValueError unless all can be offloaded."""
    layers: list[Layer] = []
    inside: set[nn.Module] = set()
    owners = [own(m) for m in model.modules() for own in (own_parameters, own_buffers)]
    places = Counter(id(t) for owner in owners for t in owner.values())
    for name, module in model.named_modules():
        if module not in inside and any(find(module) for find in FINDERS):
            inside.update(module.modules())
            layers.append(Layer(name, module, len(layers)))
    for layer in layers:
        if {"forward", MOVE} & {*vars(layer.module)}:
            raise ValueError(f"{layer.name} is offloaded already, or another package replaces its forward")
        if getattr(layer.module, "dispatcher", None) is not None:
            raise ValueError(f"ranks share the experts of {layer.name}, which cannot be offloaded then")
        for (_, key), t in zip(layer.found, layer.weights(), strict=True):
            if places[id(t)] > 1:
                raise ValueError(f"{key} of {layer.name} belongs to other modules too: offload needs its own")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts: there is nothing to offload")
    return layers
