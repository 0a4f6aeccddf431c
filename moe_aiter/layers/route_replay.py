"""Router replay: record the experts that every MoE layer of a model chooses, and use the same experts again.

Reinforcement learning needs it (Ma et al. 2025, arXiv 2510.11370): an inference engine generates samples, and
training computes their log-probabilities with the experts that the engine chose.  The files `replay.py` and
`kernels/rows/route.py` are about something else: activation checkpointing runs one forward pass twice.

A `MoE` takes the recorded experts in its own forward pass.  The layers of other packages (`FINDERS`) choose
with torch.topk.  While such a layer runs, `ChosenExperts` gives topk the recorded experts instead of the
highest, so that the layer computes their weights by its own rule, with its own gradient.
"""

import contextlib
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..config import settings
from ..kernels.base.check import check_flags, check_shape, check_tensor, checked, is_kind
from ..private_api import outside_of_graph
from ..replay import current_pass
from ..routing.balance import repeats
from ..routing.router import Router, Routing
from .attached import Attachment, NotCopied, plain_name
from .moe import MoE

ANY_INTEGER = 2**63 - 1
UNSIGNED = torch.uint16, torch.uint32, torch.uint64
TOPK = torch.topk, Tensor.topk


class Route(NamedTuple):
    """The experts that the T tokens of one call of a layer went to."""

    expert_ids: Tensor  # (T, k) int16, int32 from 2**15 experts on; -1 drops a choice
    routing_weights: Tensor | None = None  # (T, k)


class RouteDifference(NamedTuple):
    """The difference between the router's own choice and the replayed experts of a layer."""

    choices: float  # share of the replayed choices whose expert is not among the router's own
    tokens: float  # share of the tokens with such a choice


class Foreign(NamedTuple):
    """Experts of another package: the places of two arguments of `forward`, and which experts there are."""

    expert_ids: int
    routing_weights: int
    num_experts: int
    dropped: int  # the id of a dropped choice, whose weight is 0


Arguments = tuple[tuple[Any, ...], dict[str, Any]] | None  # of a forward pass; None: the same
FINDERS: list[Callable[[nn.Module], Foreign | None]] = []  # integrations add theirs
outside = partial(outside_of_graph, "routes are recorded or replayed")


# recording


@checked
def record_routes(
    model: nn.Module, *, weights: bool = False
) -> contextlib.AbstractContextManager[dict[str, list[Route]]]:
    """Record which experts every MoE layer of `model` chooses, inside a `with` block.

        with record_routes(model) as routes:
            model(tokens)
        routes["layers.0.moe"][0].expert_ids  # of the layer's first call: (T, k)

    The block gets a dict: for the name of each layer one `Route` for each call, in order.  The tensors stay
    on the layer's device, and nothing synchronises.  With `weights`, routes have routing weights too.  If
    activation checkpointing repeats a forward pass, the repetition is not recorded.  Choices are those of the
    router, before a `Capacity` drops some.

    Layers are `MoE` and, after `register()`, the experts of transformers' models; those of torchtitan, if
    `moe_aiter.integrations.torchtitan` is imported.
    Raises ValueError for a model without such a layer, and at the end of the block if no layer has run.
    """
    check_flags(weights=weights)
    return recording(replayed_layers(model), weights)


@contextlib.contextmanager
def recording(layers: "Layers", weights: bool) -> Iterator[dict[str, list[Route]]]:
    routes: dict[str, list[Route]] = {name: [] for name in layers}
    with attached(layers, {name: RouteRecorder(calls, weights) for name, calls in routes.items()}):
        yield routes
    if not any(routes.values()):
        raise ValueError(f"no layer of the model has run, for example {next(iter(routes))}")


class RouteRecorder:
    """Records one layer."""

    def __init__(self, calls: list[Route], weights: bool):
        self.calls, self.weights = calls, weights

    def take(self, num_tokens: int) -> None:
        """Return no route: the layer chooses."""

    def keep(self, expert_ids: Tensor, routing_weights: Tensor, num_experts: int) -> None:
        if not repeats():
            with torch.inference_mode(False):  # a training step could not use inference tensors
                weights = routing_weights.detach().clone() if self.weights else None
                self.calls.append(Route(small_ids(expert_ids.detach().clone(), num_experts), weights))


def small_ids(expert_ids: Tensor, num_experts: int) -> Tensor:
    """The ids in the smallest dtype; -1 for one that no expert has, as kernels drop it."""
    none = (expert_ids < 0) | (expert_ids >= num_experts)
    return expert_ids.masked_fill(none, -1).to(torch.int16 if num_experts <= 2**15 else torch.int32)


# replay


class RouteReplay:
    """Replays routes in a `with` block: see `replay_routes`."""

    def __init__(self, layers: "Layers", routes: dict[str, list[Route]], in_order: bool):
        self.layers = layers
        self.players = {name: Player(name, calls) for name, calls in routes.items()}
        if in_order:
            for before, player in itertools.pairwise(self.players.values()):
                player.before = before

    def __enter__(self) -> "RouteReplay":
        self.attachment = attached(self.layers, self.players)
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self.attachment.close()
        if kind is None:
            for player in self.players.values():
                player.check_end()

    def differences(self) -> dict[str, RouteDifference]:
        """Return by layer how much the router's own choice differed so far; synchronises for each layer."""
        counts = {name: player.totals.tolist() for name, player in self.players.items()}
        return {name: RouteDifference(a / max(b, 1), c / max(d, 1)) for name, (a, b, c, d) in counts.items()}


@checked
def replay_routes(
    model: nn.Module,
    routes: object,
    *,
    layers: list | tuple | range | None = None,  # type: ignore[type-arg]  # what `checked` can look at
    weights: bool = False,
) -> RouteReplay:
    """Let every MoE layer of `model` use recorded experts, inside a `with` block.

        with replay_routes(model, routes) as replay:
            loss = model(tokens, labels=tokens).loss
            loss.backward()
        replay.differences()  # by layer: how much the router's own choice differs

    `routes` is what `record_routes` gave, or a dict with a (T, k) array for each layer, or one array (tokens,
    layers, k) as inference engines return it; or a list of such arrays, one for each forward pass.  An array
    is a tensor or a NumPy array of integers.  The id -1 drops a choice; in a layer of transformers or
    torchtitan it must drop all choices of a token.

    `layers` says which layer of the model each column of an array (tokens, layers, k) belongs to: its name,
    as `record_routes` gives it, or its number among the model's MoE layers, from 0 on, in the order in which
    they are registered.  A layer that a forward pass calls twice has two columns.  Columns of names that
    `model` does not have are not used, so each stage of a pipeline takes its own.  Without `layers` the
    columns are in the order of registration, and the first pass that runs layers in another one raises
    ValueError.

    The model's router computes the weights of the replayed experts, with gradient.  With `weights`, recorded
    weights take their place, and the router gets no gradient through them.

    Calls of a layer get its routes in order.  If activation checkpointing repeats a call, the call gets the
    same route again; run the backward pass inside the block then.

    Raises ValueError that names the layer if layers, calls, tokens, k or ids do not fit; at the end of the
    block, if a layer was called too few times or a checkpointed forward pass still waits for its backward
    pass.  Raises TypeError for routes that are not integers.
    """
    check_flags(weights=weights)
    found = replayed_layers(model)
    calls = calls_of(routes, list(found), layers)
    for name, layer in found.items():
        calls[name] = [checked_route(name, layer, route, weights) for route in calls[name]]
    return RouteReplay(found, calls, layers is None and not isinstance(routes, Mapping))


class Player:
    """Replays the routes of one layer."""

    def __init__(self, name: str, calls: list[Route]):
        self.name, self.calls = name, calls
        self.next = 0
        self.before: Player | None = None  # of the layer that runs before this one, if that is to be checked
        self.again = False  # whether the last call was a repetition
        self.waiting: dict[
            int, weakref.ref[Tensor]
        ] = {}  # calls in checkpointed regions, until they are repeated
        self.totals = torch.zeros(4, dtype=torch.int64)

    def take(self, num_tokens: int | None = None) -> Route:
        """Return the route of this call: the next one, or in a repetition that of the first run."""
        here, what = current_pass(), f"route {id(self)}"
        call = here.recall(what)
        self.again = call is not None
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
        if num_tokens is not None:
            self.check_tokens(route, num_tokens)
        return route._replace(expert_ids=route.expert_ids.int())  # make_plan takes no smaller ones

    def check_tokens(self, route: Route, num_tokens: int) -> None:
        if num_tokens != len(route.expert_ids):
            given = len(route.expert_ids)
            raise ValueError(f"{self.name} gets {num_tokens} tokens, but its routes have {given}")

    def count(self, replayed: Tensor, own: Tensor) -> None:
        """Count the `replayed` choices (T, k) whose experts are not among the router's `own` (T, any)."""
        if self.again:
            return
        used = replayed >= 0
        other = used & (replayed[:, :, None] != own[:, None, :]).all(2)
        counts = [other.sum(), used.sum(), other.any(1).sum(), used.any(1).sum()]
        with torch.inference_mode(False):
            self.totals = self.totals.to(own.device) + torch.stack(counts).clone()

    def check_end(self) -> None:
        if self.next < len(self.calls):
            raise ValueError(f"{self.name} was called {self.next} times, routes have {len(self.calls)} calls")
        if any(call() is not None for call in self.waiting.values()):
            raise RuntimeError(
                f"{self.name} ran in a checkpointed region, whose backward pass would run it again without "
                "its route: call backward inside the block of replay_routes"
            )


def checked_route(name: str, layer: "ReplayedLayer | ForeignLayer", route: Route, weights: bool) -> Route:
    """Return a route with small ids, and without the weights that are not used."""
    ids, num_experts = route.expert_ids, layer.num_experts
    if ids.numel() and not (ids.min() >= -1 and ids.max() < num_experts):
        raise ValueError(
            f"{name} has experts 0 to {num_experts - 1}, but its routes have ids {ids.min()} to {ids.max()}"
        )
    if weights and route.routing_weights is None:
        raise ValueError(f"weights=True, but routes have no routing weights of {name}")
    layer.check(name, ids)
    return Route(small_ids(ids, num_experts), route.routing_weights if weights else None)


# layers


class ReplayedLayer(NotCopied):
    """A `MoE`, whose attribute `routes` this is while its routes are recorded or replayed."""

    use: RouteRecorder | Player

    def __init__(self, module: MoE):
        self.module, self.num_experts = module, module.num_routed

    def check(self, name: str, ids: Tensor) -> None:
        """Raise ValueError if the layer cannot use these ids (T, k)."""
        router = self.module.router
        if type(router).forward is not Router.forward:
            raise ValueError(f"{name} has a router of its own, {type(router).__name__}: nothing to replay")
        if router.choice is None and ids.shape[1] != router.top_k:
            raise ValueError(
                f"{name} chooses {router.top_k} experts a token, but its routes have k={ids.shape[1]}"
            )

    def attach(self, use: RouteRecorder | Player, attachment: Attachment) -> None:
        self.use = use
        attachment.put(self.module, "routes", self)

    def given(
        self, x: Tensor, expert_ids: Tensor | None, routing_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return expert ids and routing weights for x (..., H): a route's, or without one the given."""
        route = outside(self.use.take, x.shape[:-1].numel())
        if route is None:
            return expert_ids, routing_weights
        ids, weights = (None if t is None else t.to(x.device).view(*x.shape[:-1], -1) for t in route)
        return ids, weights

    def see(self, routing: Routing, mask: Tensor | None) -> None:
        outside(self.note, routing, mask)

    def note(self, routing: Routing, mask: Tensor | None) -> None:
        if isinstance(self.use, RouteRecorder):
            self.use.keep(routing.expert_ids, routing.routing_weights, self.num_experts)
        elif not self.use.again:
            own = self.module.router.choose(routing.logits.detach(), False, mask)
            self.use.count(routing.expert_ids, own.expert_ids)


class ForeignLayer:
    """Experts of another package, and the `block` whose forward pass chooses experts and calls them."""

    use: RouteRecorder | Player

    def __init__(self, module: nn.Module, block: nn.Module | None, foreign: Foreign):
        self.module, self.block, self.foreign = module, block, foreign
        self.num_experts = foreign.num_experts
        self.chosen: ChosenExperts | None = None

    def check(self, name: str, ids: Tensor) -> None:
        dropped = ids < 0
        if not torch.equal(dropped.any(1), dropped.all(1)):
            raise ValueError(
                f"{name} cannot drop some choices of a token: in routes, all or none of its ids are -1"
            )
        if self.block is None:
            raise ValueError(f"{name} has no router in the model: pass what contains both")

    def attach(self, use: RouteRecorder | Player, attachment: Attachment) -> None:
        self.use = use
        attachment.hook(self.module.register_forward_pre_hook(self.before_experts, with_kwargs=True))
        if isinstance(use, Player) and self.block is not None:
            choose = partial(self.choose, use, self.block.forward)
            attachment.put(self.block, "forward", partial(outside, choose))

    def choose(self, player: Player, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.chosen = chosen = ChosenExperts(player, player.take(), self.num_experts)
        with chosen:
            return forward(*args, **kwargs)

    def before_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """A hook: record the arguments of the experts, or change them."""
        changed: Arguments = outside(self.change, module, args, kwargs)
        return changed

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        call = inspect.signature(module.forward).bind(*args, **kwargs)
        names = [list(call.arguments)[place] for place in self.foreign[:2]]
        ids, weights = (call.arguments[name] for name in names)
        if isinstance(self.use, RouteRecorder):
            self.use.keep(ids.flatten(0, -2), weights.flatten(0, -2), self.num_experts)
            return None
        if self.chosen is None or self.chosen.replayed is None:
            raise ValueError(f"{self.use.name} has chosen its experts without torch.topk")
        replayed, recorded = self.chosen.replayed, self.chosen.route.routing_weights
        if recorded is not None:
            weights = recorded.to(weights).view_as(weights)
        dropped = (replayed < 0).view_as(ids)
        changed = ids.masked_fill(dropped, self.foreign.dropped), weights.masked_fill(dropped, 0)
        call.arguments.update(zip(names, changed, strict=True))
        return call.args, call.kwargs


class ChosenExperts(TorchFunctionMode):
    """Lets torch.topk over all experts choose those of a route; a dropped choice is expert 0 here."""

    def __init__(self, player: Player, route: Route, num_experts: int):
        super().__init__()
        self.player, self.route, self.num_experts = player, route, num_experts
        self.replayed: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return out
        ranked = args[0] if args else kwargs["input"]
        if ranked.shape[-1] != self.num_experts:
            return out  # groups of experts
        self.player.check_tokens(self.route, ranked.shape[:-1].numel())
        k, own = self.route.expert_ids.shape[1], out.indices
        if own.shape[-1] != k:
            raise ValueError(
                f"{self.player.name} chooses {own.shape[-1]} experts a token, but its routes have k={k}"
            )
        self.replayed = self.route.expert_ids.to(own.device)
        self.player.count(self.replayed, own.flatten(0, -2))
        ids = self.replayed.clamp_min(0).to(own).view_as(own)
        return type(out)((ranked.gather(-1, ids), ids))


Layers = dict[str, ReplayedLayer | ForeignLayer]


def replayed_layers(model: nn.Module) -> Layers:
    """Return the MoE layers of a model, by name, in order."""
    modules = dict(model.named_modules())
    layers: Layers = {}
    for name, module in modules.items():
        found = next((found for find in FINDERS if (found := find(module)) is not None), None)
        if isinstance(module, MoE):
            layer: ReplayedLayer | ForeignLayer = ReplayedLayer(module)
        elif found is not None:
            layer = ForeignLayer(module, modules[name.rpartition(".")[0]] if name else None, found)
        else:
            continue
        layers[plain_name(name) or type(module).__name__] = layer
    if not layers:
        raise ValueError(
            f"model has no MoE layer, {type(model).__name__}; for one of transformers, call "
            "moe_aiter.integrations.transformers.register() first"
        )
    return layers


def attached(layers: Layers, uses: Mapping[str, "RouteRecorder | Player"]) -> Attachment:
    """Attach each layer's use to the layer."""
    with Attachment() as attachment:
        for name, layer in layers.items():
            if getattr(layer.module, "routes", None) is not None:
                raise ValueError(f"routes of {name} are recorded or replayed already")
            layer.attach(uses[name], attachment)
        return attachment.pop_all()


# arrays


def calls_of(routes: object, names: list[str], layers: Sequence[Any] | None) -> dict[str, list[Route]]:
    """Return the routes of all calls of each layer, whatever form they have."""
    if not isinstance(routes, Mapping):
        passes = [three_axes("routes", a) for a in (routes if isinstance(routes, list | tuple) else [routes])]
        layers = range(len(names)) if layers is None else layers
        for array in passes:
            if array.shape[1] != len(layers):
                raise ValueError(
                    f"the model has {len(names)} MoE layers, {names[0]} to {names[-1]}, and layers= names "
                    f"{len(layers)}, but routes are (tokens, layers={array.shape[1]}, k): select the layers "
                    "that are MoE"
                )
        columns = columns_by_layer(layers, names)
        return {name: [Route(array[:, c]) for array in passes for c in columns[name]] for name in names}
    if layers is not None:
        raise ValueError("layers are given, but routes are a dict, whose keys name the layers")
    for name in (*(set(names) - set(routes)), *(set(routes) - set(names))):
        where = "the model has it, routes do not" if name in names else "routes have it, the model does not"
        raise ValueError(f"layer {name}: {where} ({len(names)} layers, {len(routes)} in routes)")
    return {name: [as_route(name, r) for r in in_calls(routes[name])] for name in names}


def columns_by_layer(layers: Sequence[Any], names: list[str]) -> dict[str, list[int]]:
    """The columns of each of the model's layers, whose `names` are given, and of others in `layers`."""
    columns: dict[str, list[int]] = defaultdict(list)
    for column, layer in enumerate(layers):
        if is_kind(layer, int):
            if not 0 <= layer < len(names):
                raise ValueError(
                    f"layers holds {layer}, but the model's MoE layers are 0 to {len(names) - 1}"
                )
            layer = names[layer]
        if not isinstance(layer, str):
            raise TypeError(f"layers must be names or numbers of layers, not {type(layer).__name__}")
        columns[plain_name(layer)].append(column)
    for name in names:
        if name not in columns:
            raise ValueError(
                f"layer {name}: the model has it, layers= does not ({len(names)} layers, {len(columns)})"
            )
    return columns


def in_calls(routes: object) -> Sequence[object]:
    """A list of calls; one route alone is a list of one."""
    return routes if isinstance(routes, list | tuple) and not isinstance(routes, Route) else [routes]


def as_route(name: str, route: object) -> Route:
    ids, weights = route if isinstance(route, Route) else (route, None)
    ids = integers(f"routes of {name}", ids)
    check_shape(f"routes of {name}", ids, "T", "k")
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"{name} has ids {tuple(ids.shape)} but routing weights {tuple(weights.shape)}")
    return Route(ids, weights)


def three_axes(name: str, array: object) -> Tensor:
    array = integers(name, array)
    check_shape(name, array, "tokens", "layers", "k")
    return array


def integers(name: str, array: object) -> Tensor:
    if not isinstance(array, Tensor):
        if not hasattr(array, "__array_interface__"):  # NumPy's
            raise TypeError(f"{name} must be tensors or NumPy arrays, not {type(array).__name__}")
        array = torch.tensor(array)  # a copy: it may be read-only
    if array.is_meta:
        raise ValueError(f"{name} must have values, but the device is meta")
    if array.dtype.is_floating_point or array.dtype.is_complex or array.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.dtype in UNSIGNED:  # torch cannot compare them; the highest of 64 bits become negative
        wide = array.long()
        return wide.masked_fill(wide < 0, ANY_INTEGER) if array.dtype == torch.uint64 else wide
    return array if array.itemsize > 2 else array.int()  # where -1 and the number of experts fit


def as_int32(name: str, ids: Tensor) -> Tensor:
    """Raise for ids that do not fit; on a GPU, where that would wait, they stay too high or too low."""
    if ids.dtype != torch.int64:
        return ids.int()
    limits = torch.iinfo(torch.int32)
    if (ids.is_cpu or settings.debug) and ids.numel():
        least, most = ids.min(), ids.max()
        if least < limits.min or most > limits.max:
            raise ValueError(f"{name} has ids {least} to {most}, but ids must fit int32")
    return ids.clamp(limits.min, limits.max).int()


@checked
def pack_routes(
    sequences: list, *, lengths: list | None = None, mask: Tensor | None = None,  # type: ignore[type-arg]
) -> Tensor:  # fmt: skip
    """Join the routes of sequences, (tokens, layers, k) each, to those of a batch: (T, layers, k) int32.

    Without more, sequences follow each other, as in a packed batch.  `lengths` are the numbers of tokens that
    they have there.  `mask` (B, S) bool is True at the tokens of a padded batch, and row b has those of
    sequence b; padding gets the id -1, which drops its choices.  Engines return no route for the last token
    that they sampled, so a sequence may have one route less than tokens: that token gets -1.

    Raises ValueError for other numbers of tokens or sequences, for sequences that differ in layers or k, and
    for ids that do not fit int32: on a GPU, where that would wait, `replay_routes` finds them, or this
    function with MOE_AITER_DEBUG=1.
    """
    if not sequences:
        raise ValueError("sequences is empty")
    if lengths is not None and not all(is_kind(length, int) for length in lengths):
        raise TypeError(f"lengths must be a list of integers, not {lengths}")
    if lengths is not None and mask is not None:
        raise ValueError("lengths and mask are given: pass one of them")
    routes = [three_axes("sequences", sequence) for sequence in sequences]
    routes = [as_int32(f"sequences[{i}]", route) for i, route in enumerate(routes)]
    if mask is not None:
        check_tensor("mask", mask)
        check_shape("mask", mask, "B", "S")
        if mask.dtype != torch.bool or mask.is_meta:
            raise TypeError(f"mask must be bool and have values, not {mask.dtype} on {mask.device}")
        lengths = mask.sum(1).tolist()
    lengths = list(map(len, routes)) if lengths is None else lengths
    if len(lengths) != len(routes):
        given = "lengths has" if mask is None else "mask has rows for"
        raise ValueError(f"{given} {len(lengths)} sequences, but sequences has {len(routes)}")
    first, joined = routes[0], []
    for i, (route, length) in enumerate(zip(routes, lengths, strict=True)):
        if route.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"sequences[{i}] is {tuple(route.shape)} but sequences[0] is {tuple(first.shape)}"
            )
        if length - len(route) not in (0, 1):
            raise ValueError(
                f"sequences[{i}] has the routes of {len(route)} tokens, but lengths or mask {length} tokens"
            )
        joined.append(nn.functional.pad(route, (0, 0, 0, 0, 0, length - len(route)), value=-1))
    packed = torch.cat(joined)
    if mask is None:
        return packed
    whole = packed.new_full((mask.numel(), *packed.shape[1:]), -1)
    whole[mask.flatten().to(packed.device)] = packed
    return whole
