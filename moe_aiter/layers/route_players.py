"""Who records a layer's routes or replays them: found by a number when a graph runs.

A compiled graph contains no Python, and which route is next changes with every call.  So the graph calls an
op, which asks the recorder or the player as it runs.  The op finds it by a number, an input of the graph: the
next recorder or player needs no other graph.
"""

import itertools
import weakref
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..kernels.base.check import check_shape
from ..op import Written, define_inplace_op, define_op
from ..replay import always_save, current_pass
from ..routing.balance import count_choices, repeats
from ..torch_ops import NAMESPACE
from .monitor import Recorder
from .route_arrays import ANY_INTEGER, Route

USES: weakref.WeakValueDictionary[int, "RouteRecorder | Player"] = weakref.WeakValueDictionary()
NOT_CAPTURED = (torch.Tag.cudagraph_unsafe,)  # torch.compile's CUDA graphs would ask once and never again
Use = TypeVar("Use")
_numbers = itertools.count()


def use_of(number: Tensor, kind: type[Use]) -> Use:
    """Return the recorder or player whose number an op has got."""
    use = USES.get(int(number))
    if not isinstance(use, kind):
        raise RuntimeError(f"there is no {kind.__name__} of the number {int(number)}")
    return use


def enrolled(use: "RouteRecorder | Player") -> Tensor:
    """Return a number by which an op finds `use`: (1,) int64 on the CPU.

    A compiled graph takes the number as an input, so the next recorder or player needs no other graph.
    """
    number = next(_numbers)
    USES[number] = use
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


# recording


class RouteRecorder:
    """Records one layer."""

    def __init__(self, calls: list[Route], weights: bool):
        self.calls, self.weights = calls, weights
        self.number = enrolled(self)

    def keep(self, expert_ids: Tensor, routing_weights: Tensor, num_experts: int) -> None:
        if not repeats():
            with torch.inference_mode(False):  # a training step could not use inference tensors
                weights = routing_weights.detach().clone() if self.weights else None
                self.calls.append(Route(small_ids(expert_ids.detach().clone(), num_experts), weights))


class KeepInputs(NamedTuple):
    """The inputs of the op `keep_route`: what `RouteRecorder.keep` gets."""

    recorder: Written  # its number; nothing is written, but an op that writes is run once, at its place
    expert_ids: Tensor  # (T, k)
    routing_weights: Tensor  # (T, k)
    num_experts: int
    tags = NOT_CAPTURED  # type: ignore[misc]  # no field


def check_keep(i: KeepInputs) -> None:
    check_shape("recorder", i.recorder, "1")
    check_shape("expert_ids", i.expert_ids, "T", "k")
    check_shape("routing_weights", i.routing_weights, "T", "k")


def keep_reference(i: KeepInputs) -> None:
    use_of(i.recorder, RouteRecorder).keep(i.expert_ids, i.routing_weights, i.num_experts)


keep_op = define_inplace_op("keep_route", KeepInputs, check=check_keep, reference=keep_reference)


def keep_route(
    recorder: RouteRecorder, expert_ids: Tensor, routing_weights: Tensor, num_experts: int
) -> None:
    """Record a call of a layer: ids and weights (T, k)."""
    if torch.compiler.is_compiling():
        keep_op(recorder.number, expert_ids, routing_weights.detach(), num_experts)
    else:
        recorder.keep(expert_ids, routing_weights, num_experts)


def small_ids(expert_ids: Tensor, num_experts: int) -> Tensor:
    """The ids in the smallest dtype; -1 for one that no expert has, as kernels drop it."""
    none = (expert_ids < 0) | (expert_ids >= num_experts)
    return expert_ids.masked_fill(none, -1).to(torch.int16 if num_experts <= 2**15 else torch.int32)


# replay


class Player:
    """Replays the routes of one layer."""

    def __init__(self, name: str, calls: list[Route], module: nn.Module):
        self.name, self.module, self.number = name, module, enrolled(self)
        self.before: Player | None = None  # of the layer that runs before this one, if that is to be checked
        self.captured = False  # whether a CUDA graph reads the routes
        self.calls: list[Route] = []
        with torch.inference_mode(False):
            self.totals = torch.zeros(4, dtype=torch.int64, device=device_for_counts(module))
        self.load(calls)

    def load(self, calls: list[Route]) -> None:
        """Begin anew with the routes of `calls`."""
        if self.captured:
            for old, new in zip(self.calls, calls, strict=True):
                old.expert_ids.copy_(new.expert_ids)
                if old.routing_weights is not None and new.routing_weights is not None:
                    old.routing_weights.copy_(new.routing_weights)
            return
        self.calls, self.next = calls, 0
        self.top_k = calls[0].expert_ids.shape[1] if calls else 1
        self.has_weights = bool(calls) and calls[0].routing_weights is not None
        # calls in checkpointed regions, until they are repeated
        self.waiting: dict[int, weakref.ref[Tensor]] = {}

    def check_load(self, calls: list[Route]) -> None:
        """Raise ValueError if a CUDA graph reads routes of other shapes."""
        if not self.captured:
            return
        old, new = (
            [[None if t is None else tuple(t.shape) for t in call] for call in these]
            for these in (self.calls, calls)
        )
        if old != new:
            raise ValueError(
                f"{self.name} is in a CUDA graph with routes and weights of shapes {old}, but these are {new}"
            )

    def take(self, x: Tensor) -> Route:
        """Return the route of this call with tokens x (T, any): the next one, or that of the first run."""
        here, what = current_pass(), f"route {int(self.number)}"
        call = here.recall(what)
        if call is None:
            if repeats():
                raise RuntimeError(f"{self.name} runs in a backward pass, but in no checkpoint of torch's")
            if self.next == len(self.calls):
                raise ValueError(f"{self.name} is called once more, but routes have {self.next} of its calls")
            if self.before is not None and self.before.next <= self.next:
                raise ValueError(
                    f"{self.name} runs before {self.before.name}, but columns of routes follow the order in "
                    "which the model registers its layers: pass layers=, the name of each column's layer"
                )
            call = torch.tensor(self.next, device="cpu")  # regions keep tensors
            self.next += 1
            if here.first:
                self.waiting[int(call)] = weakref.ref(call)
        here.keep(what, call, ANY_INTEGER)
        if repeats():
            self.waiting.pop(int(call), None)
        route = self.calls[int(call)]
        if len(x) != len(route.expert_ids):
            given = len(route.expert_ids)
            raise ValueError(f"{self.name} gets {len(x)} tokens, but its routes have {given}")
        self.check_capture(route, x)
        weights = None if route.routing_weights is None else route.routing_weights.to(x.device)
        return Route(route.expert_ids.to(x.device).int(), weights)  # make_plan takes no smaller ids

    def check_capture(self, route: Route, x: Tensor) -> None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            if any(t is not None and t.device != x.device for t in route):
                raise ValueError(
                    f"{self.name} is captured on {x.device}, but its routes are on "
                    f"{route.expert_ids.device}: pass routes on {x.device}, which the graph can read"
                )
            self.captured = True

    def count(self, replayed: Tensor, own: Tensor) -> None:
        """Count the `replayed` choices (T, k) whose experts are not among the router's `own` (T, any)."""
        used = replayed >= 0
        other = used & (replayed[:, :, None] != own[:, None, :]).all(2)
        counts = torch.stack([other.sum(), used.sum(), other.any(1).sum(), used.any(1).sum()])
        if self.totals.device != counts.device:  # the model was moved
            with torch.inference_mode(False):
                self.totals = self.totals.to(counts.device)
        count_choices(self.totals, counts)
        monitor = getattr(self.module, "monitor", None)
        if isinstance(monitor, Recorder):
            monitor.record_replay(counts, self.module.training)

    def check_end(self) -> None:
        if self.next < len(self.calls):
            raise ValueError(f"{self.name} was called {self.next} times, routes have {len(self.calls)} calls")
        if any(call() is not None for call in self.waiting.values()):
            raise RuntimeError(
                f"{self.name} ran in a checkpointed region, whose backward pass would run it again without "
                "its route: call backward inside the block of replay_routes"
            )


class TakeInputs(NamedTuple):
    """The inputs of the op `take_route`: a call of a layer, whose route it looks up when it runs."""

    x: Tensor  # (T, any)
    player: Tensor  # its number
    top_k: int
    weights: bool
    tags = NOT_CAPTURED  # type: ignore[misc]  # no field


def new_taken(i: TakeInputs) -> tuple[Tensor, Tensor, Tensor]:
    check_shape("x", i.x, "T", "any")
    check_shape("player", i.player, "1")
    rows, dtype = i.x.shape[0], torch.promote_types(i.x.dtype, torch.float32)
    return (
        i.x.new_empty(rows, i.top_k, dtype=torch.int32),
        i.x.new_empty(rows, i.top_k if i.weights else 0, dtype=dtype),
        torch.empty_like(i.player),  # so that there is something to compute if there are no tokens
    )


def take_reference(i: TakeInputs) -> tuple[Tensor, Tensor, Tensor]:
    player = use_of(i.player, Player)
    ids, weights = player.take(i.x)
    if ids.shape[1] != i.top_k:
        raise ValueError(
            f"{player.name} has routes with k={i.top_k} and with k={ids.shape[1]}, and its graph is "
            "compiled: fill the narrower ones with the id -1"
        )
    return ids, i.x.new_empty(len(i.x), 0) if weights is None else weights, i.player


take_op = define_op("take_route", TakeInputs, outputs=3, new=new_taken, reference=take_reference)
always_save(f"{NAMESPACE}::take_route")


def take_route(player: Player, x: Tensor) -> Route:
    """Return the route of a call with tokens x (T, any): ids (T, k) int32, and weights or None."""
    if not torch.compiler.is_compiling():
        return player.take(x)
    ids, weights, _ = take_op(x.detach(), player.number, player.top_k, player.has_weights)
    return Route(ids, weights if player.has_weights else None)


def device_for_counts(module: nn.Module) -> torch.device:
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device
