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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.base.check import check_flags, check_shape, check_whole_shape, checked
from ..routing.balance import repeats
from ..routing.router import Router, Routing
from .attached import Attachment, NotCopied, plain_name
from .moe import MoE
from .route_arrays import Route, array_of, calls_of, is_by_layer, numbers, with_weights
from .route_players import Player, RouteRecorder, keep_route, small_ids, take_route

TOPK = torch.topk, Tensor.topk


class RouteDifference(NamedTuple):
    """The difference between the router's own choice and the replayed experts of a layer."""

    choices: float  # share of the replayed choices whose expert is not among the router's own
    tokens: float  # share of the tokens with such a choice


class Foreign(NamedTuple):
    """Experts of another package: the places of two arguments of `forward`, and which experts there are."""

    expert_ids: int
    routing_weights: int
    num_experts: int
    # of the experts: the id of a dropped choice, whose weight is 0; None where they know no such id
    dropped: Callable[[nn.Module], int | None]


Arguments = tuple[tuple[Any, ...], dict[str, Any]] | None  # of a forward pass; None: the same
# integrations add theirs by the name of the package; one may return why routes of a module are out of reach
FINDERS: dict[str, Callable[[nn.Module], Foreign | str | None]] = {}


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


# replay


class RouteReplay:
    """Replays routes in a `with` block: see `replay_routes`."""

    def __init__(self, layers: "Layers", read: Callable[..., dict[str, list[Route]]], in_order: bool):
        self.layers, self.read, self.in_order = layers, read, in_order

    def __enter__(self) -> "RouteReplay":
        self.attachment = attached(self.layers, self.players)
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self.attachment.close()
        if kind is None:
            for player in self.players.values():
                player.check_end()

    def start(self, routes: object, weights: object) -> "RouteReplay":
        calls = self.read(routes, weights)
        self.players = {name: Player(name, calls[name], layer.module) for name, layer in self.layers.items()}
        if self.in_order:
            for before, player in itertools.pairwise(self.players.values()):
                player.before = before
        return self

    @checked
    def load(self, routes: object, *, weights: object = False) -> None:
        """Replace the routes inside the block; the next call of a layer gets the first of them.

        `routes` and `weights` are as for `replay_routes`, which this object remembers the options of.  In a
        layer that a CUDA graph has captured, the routes are copied to the memory that the graph reads; they
        must have the same shapes.

        Raises ValueError and RuntimeError as the end of the block does, if routes of before are still to be
        used, and ValueError that names the layer if a captured one gets other shapes or other weights.
        """
        calls = self.read(routes, weights)
        for name, player in self.players.items():
            player.check_end()
            player.check_load(calls[name])
        for name, player in self.players.items():
            player.load(calls[name])

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
    layers_first: bool | None = None,
    tokens: object = None,
    weights: object = False,
) -> RouteReplay:
    """Let every MoE layer of `model` use recorded experts, inside a `with` block.

        with replay_routes(model, routes) as replay:
            loss = model(tokens, labels=tokens).loss
            loss.backward()
        replay.differences()  # by layer: how much the router's own choice differs

    `routes` is what `record_routes` gave, or a dict with a (T, k) array for each layer, or one array (tokens,
    layers, k) as inference engines return it; or a list of such arrays, one for each forward pass.  An array
    is a tensor, a NumPy array, nested lists, the bytes or base64 of a .npy file, or prime-rl's `data` with
    `shape` and `dtype`; of integers.  An array (batch, tokens, layers, k) has the tokens of a padded batch.
    The id -1 drops a choice; in a layer of transformers or torchtitan it must drop all choices of a token.

    With `layers_first`, arrays are (layers, tokens, k).  With None they are, if the first axis alone has as
    many entries as there are layers.

    `layers` says which layer of the model each column of an array (tokens, layers, k) belongs to: its name,
    as `record_routes` gives it, or its number among the model's MoE layers, from 0 on, in the order in which
    they are registered.  A layer that a forward pass calls twice has two columns.  Columns of names that
    `model` does not have are not used, so each stage of a pipeline takes its own.  Without `layers` the
    columns are in the order of registration, and the first pass that runs layers in another one raises
    ValueError.

    `tokens` says which tokens of the routes this process computes, in their order, where ranks share a
    sequence: an index (T',) integer, or a function of (T, k) that returns (T', k), which slices routes as the
    inputs are sliced.

    The model's router computes the weights of the replayed experts, with gradient.  With `weights=True`,
    recorded weights take their place, and the router gets no gradient through them; so do floating arrays
    as `weights`, in any form of `routes`.

    Calls of a layer get its routes in order.  If activation checkpointing repeats a call, the call gets the
    same route again; run the backward pass inside the block then.  Compiled graphs ask for the route when
    they run, so new routes need no new graph.  A CUDA graph reads the routes where they are: see
    `RouteReplay.load`.

    Raises ValueError that names the layer if layers, calls, tokens, k or ids do not fit; at the end of the
    block, if a layer was called too few times or a checkpointed forward pass still waits for its backward
    pass.  Raises TypeError for routes that are not integers.
    """
    if layers_first is not None:
        check_flags(layers_first=layers_first)
    select = selection(tokens)
    found = replayed_layers(model)
    read = partial(read_routes, found, layers, layers_first, select)
    return RouteReplay(found, read, layers is None and not is_by_layer(routes)).start(routes, weights)


def selection(tokens: object) -> Callable[[Tensor], Tensor] | None:
    """Return the function that takes this process's tokens of (T, any)."""
    if tokens is None or callable(tokens):
        return tokens
    index = numbers("tokens", array_of("tokens", tokens), False).long()
    check_shape("tokens", index, "T'")

    def select(t: Tensor) -> Tensor:
        if index.numel() and not (index.min() >= 0 and index.max() < len(t)):
            raise ValueError(
                f"tokens has {index.min()} to {index.max()}, but the routes are those of {len(t)} tokens"
            )
        return t[index.to(t.device)]

    return select


def read_routes(
    found: "Layers", layers: Any, layers_first: bool | None, select: Callable[[Tensor], Tensor] | None,
    routes: object, weights: object,
) -> dict[str, list[Route]]:  # fmt: skip
    """Return the routes of the calls of each layer, looked at."""
    names = list(found)
    calls = calls_of(routes, names, layers, layers_first, floats=False)
    if not isinstance(weights, bool):
        given = calls_of(weights, names, layers, layers_first, floats=True)
        calls = {name: with_weights(name, calls[name], given[name]) for name in names}
    take = weights is not False
    return {
        name: [checked_route(name, layer, route, take, select) for route in calls[name]]
        for name, layer in found.items()
    }


def checked_route(
    name: str, layer: "ReplayedLayer | ForeignLayer", route: Route, weights: bool,
    select: Callable[[Tensor], Tensor] | None,
) -> Route:  # fmt: skip
    """Return a route with small ids, without weights that are not used, in memory of its own."""
    ids, given, num_experts = *route, layer.num_experts
    if weights and given is None:
        raise ValueError(f"weights=True, but routes have no routing weights of {name}")
    if given is not None and given.shape != ids.shape:
        raise ValueError(f"{name} has ids {tuple(ids.shape)} but routing weights {tuple(given.shape)}")
    check_ids(name, ids, num_experts)
    with torch.inference_mode(False):
        parts = [t.detach().clone() for t in ((ids, given) if weights and given is not None else (ids,))]
        ids, *own = parts if select is None else map(select, parts)
    if select is not None:
        returned = f"what tokens returns for {name}"
        check_shape(returned, ids, "T'", "k")
        check_ids(name, numbers(returned, ids, False), num_experts)
        for t in own:
            check_whole_shape(f"{returned}, of weights,", t, ids.shape)
    layer.check(name, ids)
    return Route(small_ids(ids, num_experts), *own)


def check_ids(name: str, ids: Tensor, num_experts: int) -> None:
    """Raise ValueError for an id (T, k) that no expert has."""
    if ids.numel() and not (ids.min() >= -1 and ids.max() < num_experts):
        raise ValueError(
            f"{name} has experts 0 to {num_experts - 1}, but its routes have ids {ids.min()} to {ids.max()}"
        )


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
        if isinstance(self.use, RouteRecorder):
            return expert_ids, routing_weights
        ids, weights = take_route(self.use, x.reshape(-1, x.shape[-1]))
        shape = *x.shape[:-1], ids.shape[1]
        return ids.view(shape), None if weights is None else weights.view(shape)

    def see(self, routing: Routing, mask: Tensor | None) -> None:
        """Record a routing, or count where the router would choose otherwise."""
        if isinstance(self.use, RouteRecorder):
            keep_route(self.use, routing.expert_ids, routing.routing_weights, self.num_experts)
        elif torch.compiler.is_compiling() or not repeats():
            own = self.module.router.choose(routing.logits.detach(), False, mask)
            self.use.count(routing.expert_ids, own.expert_ids)


class ForeignLayer(NotCopied):
    """Experts of another package, and the `block` whose forward pass chooses experts and calls them.

    As of a `MoE`, it is the attribute `routes` of the experts while their routes are recorded or replayed.
    """

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
        attachment.put(self.module, "routes", self)
        self.names = list(inspect.signature(self.module.forward).parameters)
        if isinstance(use, RouteRecorder):
            SteadyForward.of(self.module).attach(self.module, self.record, attachment)
        elif self.block is not None:
            attachment.hook(self.module.register_forward_pre_hook(self.change, with_kwargs=True))
            SteadyForward.of(self.block).attach(self.block, self.choose, attachment)

    def record(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the experts, and record their arguments."""
        assert isinstance(self.use, RouteRecorder)
        ids, weights = self.ids_and_weights(args, kwargs)
        keep_route(self.use, ids.flatten(0, -2), weights.flatten(0, -2), self.num_experts)
        return forward(*args, **kwargs)

    def choose(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block with the experts of a route."""
        assert isinstance(self.use, Player)
        self.chosen = ChosenExperts(self.use, self.num_experts)
        with self.chosen:
            out = forward(*args, **kwargs)
        self.chosen = None
        return out

    def drops(self, ids: Tensor) -> Tensor | bool:
        """Return which choices of `ids`, as the experts get them, a replay drops: whatever their id is."""
        route = None if self.chosen is None else self.chosen.route
        return False if route is None else (route.expert_ids < 0).view_as(ids)

    def ids_and_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        return [args[p] if p < len(args) else kwargs[self.names[p]] for p in self.foreign[:2]]

    def change(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """A hook: change the arguments of the experts."""
        assert isinstance(self.use, Player)
        player = self.use
        ids, weights = self.ids_and_weights(args, kwargs)
        if ids.shape[-1] != player.top_k:
            raise ValueError(
                f"{player.name} chooses {ids.shape[-1]} experts a token, but its routes have k={player.top_k}"
            )
        if self.chosen is None or self.chosen.route is None:
            raise ValueError(f"{player.name} has chosen its experts without torch.topk")
        replayed, recorded = self.chosen.route
        if torch.compiler.is_compiling() or not repeats():
            player.count(replayed, self.chosen.own)
        if recorded is not None:
            weights = recorded.to(weights).view_as(weights)
        dropped = (replayed < 0).view_as(ids)
        none = self.foreign.dropped(module)
        ids = ids if none is None else ids.masked_fill(dropped, none)
        changed = ids, weights.masked_fill(dropped, 0)
        given, named = list(args), dict(kwargs)
        for place, value in zip(self.foreign[:2], changed, strict=True):
            if place < len(given):
                given[place] = value
            else:
                named[self.names[place]] = value
        return tuple(given), named


class SteadyForward:
    """The forward pass of a module while its routes are recorded or replayed: one object for all times.

    A compiled graph holds for this object alone, and would be compiled anew for another.
    """

    known: ClassVar[weakref.WeakKeyDictionary[nn.Module, "SteadyForward"]] = weakref.WeakKeyDictionary()
    module: nn.Module  # this and the rest is there while one is attached
    around: Callable[..., Any]  # runs the module's own forward pass
    own: Callable[..., Any] | None  # the module's attribute `forward`, if it has one

    @classmethod
    def of(cls, module: nn.Module) -> "SteadyForward":
        return cls.known.setdefault(module, cls())

    def attach(self, module: nn.Module, around: Callable[..., Any], attachment: Attachment) -> None:
        for name, value in {"own": vars(module).get("forward"), "module": module, "around": around}.items():
            attachment.put(self, name, value)
        attachment.put(module, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.run, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class ChosenExperts(TorchFunctionMode):
    """Lets torch.topk over all experts choose those of a route; the first k where a token's are dropped.

    So the experts of a token differ, as in any other choice: blocks count them in a map of experts.
    Where all experts are one group, the score of the group is a topk over all experts too.  The last topk of
    as many experts as a route has for a token is the router's choice.
    """

    route: Route | None = None
    own: Tensor  # what the router chose (T, k), if there is a route

    def __init__(self, player: Player, num_experts: int):
        super().__init__()
        self.player, self.num_experts = player, num_experts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return out
        ranked = args[0] if args else kwargs["input"]
        own = out.indices
        if ranked.shape[-1] != self.num_experts or own.shape[-1] != self.player.top_k:
            return out  # groups of experts
        if self.route is None:
            self.route = take_route(self.player, ranked.flatten(0, -2))
        self.own = own.flatten(0, -2)
        ids, first = self.route.expert_ids.to(own), torch.arange(own.shape[-1], device=own.device)
        ids = first.where(ids < 0, ids).view_as(own)
        return type(out)((ranked.gather(-1, ids), ids))


Layers = dict[str, ReplayedLayer | ForeignLayer]


def replayed_layers(model: nn.Module) -> Layers:
    """Return the MoE layers of a model, by name, in order."""
    modules = dict(model.named_modules())
    layers: Layers = {}
    reasons: list[str] = []
    for name, module in modules.items():
        found = [found for find in FINDERS.values() if (found := find(module)) is not None]
        foreign = next((kind for kind in found if isinstance(kind, Foreign)), None)
        if isinstance(module, MoE):
            layer: ReplayedLayer | ForeignLayer = ReplayedLayer(module)
        elif foreign is not None:
            layer = ForeignLayer(module, modules[name.rpartition(".")[0]] if name else None, foreign)
        else:
            reasons += [why for why in found if isinstance(why, str)]
            continue
        layers[plain_name(name) or type(module).__name__] = layer
    if not layers:
        if "transformers" not in FINDERS:
            reasons.append(
                "for one of transformers, call moe_aiter.integrations.transformers.register() first"
            )
        raise ValueError("; ".join([f"model has no MoE layer, {type(model).__name__}", *reasons[:1]]))
    return layers


def attached(layers: Layers, uses: Mapping[str, RouteRecorder | Player]) -> Attachment:
    """Attach each layer's use to the layer."""
    with Attachment() as attachment:
        for name, layer in layers.items():
            if getattr(layer.module, "routes", None) is not None:
                raise ValueError(f"routes of {name} are recorded or replayed already")
            layer.attach(uses[name], attachment)
        return attachment.pop_all()
