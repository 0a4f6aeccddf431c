"""A family of Hugging Face checkpoints: what a row of families.py says, and what follows for an MoE layer."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ...kernels.base.activations import OAI, swiglu_limit
from ...routing.choices import GroupLimit
from ...routing.zero_compute import ZeroCompute

ACTIVATIONS = {  # by `hidden_act`
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu",
}  # fmt: skip
PLAIN = {"relu2": "relu2", "silu": "silu", "gelu": "gelu", "relu": "relu"}  # without a gate
MOST = 2**20  # of whatever config.json counts; more is damage, and would fit no memory
COUNTS = {  # by name, the least
    "hidden_size": 1, "intermediate_size": 1, "moe_intermediate_size": 1, "num_hidden_layers": 1,
    "num_experts": 1, "num_local_experts": 1, "n_routed_experts": 1, "moe_num_experts": 1,
    "num_experts_per_tok": 1, "moe_k": 1, "n_shared_experts": 0, "moe_num_shared_experts": 0,
    "shared_expert_intermediate_size": 0, "moe_shared_expert_intermediate_size": 1,
    "n_group": 1, "topk_group": 1, "decoder_sparse_step": 1, "moe_layer_freq": 1, "moe_layer_interval": 1,
    "moe_layer_start_index": 0, "moe_layer_end_index": -1,
    "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "moe_latent_size": 1,
    "moe_topk": 1, "zero_expert_num": 0, "expert_ffn_hidden_size": 1, "num_layers": 1, "moe_top_k": 1,
    "num_shared_experts": 0, "num_shared_expert": 1, "share_expert_dim": 1, "num_dense_layers": 0,
    "num_hash_layers": 0, "expert_layer_period": 1, "expert_layer_offset": 0,
}  # fmt: skip
TYPES = {
    "norm_topk_prob": (bool,), "mlp_only_layers": (list,), "routed_scaling_factor": (int, float),
    "layers_block_type": (list,), "hybrid_override_pattern": (str,), "mlp_layer_types": (list,),
    "swiglu_limits": (list,), "swiglu_limits_shared": (list,), "use_expert_bias": (bool,),
    "route_scale": (int, float), "moe_router_scaling_factor": (int, float),
}  # fmt: skip
LAYERS: dict[str, Callable] = {  # settings that say which layers have experts, given the layer and the value
    "first_k_dense_replace": lambda layer, start: layer >= start,
    "moe_layer_freq": lambda layer, step: layer % step == 0,
    "decoder_sparse_step": lambda layer, step: (layer + 1) % step == 0,
    "mlp_only_layers": lambda layer, dense: layer not in dense,
    "moe_layer_start_index": lambda layer, start: layer >= start,
    "moe_layer_end_index": lambda layer, end: end == -1 or layer <= end,
    "moe_layer_interval": lambda layer, step: (layer + 1) % step == 0,
    "layers_block_type": lambda layer, kinds: kinds[layer : layer + 1] == ["moe"],
    "hybrid_override_pattern": lambda layer, kinds: kinds[layer : layer + 1] == "E",
    "mlp_layer_types": lambda layer, kinds: kinds[layer : layer + 1] in (["sparse"], ["moe"]),
    "num_dense_layers": lambda layer, start: layer >= start,
    "num_hash_layers": lambda layer, start: layer >= start,
    "expert_layer_period": lambda layer, step: layer % step == 0,
}
LISTED = "layers_block_type", "hybrid_override_pattern"  # those with an entry for each layer
LIMITS = "swiglu_limits", "swiglu_limits_shared"  # of a layer; 0 and None are none
KINDS = "mlp_layer_types"  # likewise; where it is there, the others do not count
WHY = {  # a setting with another value is something that MoE has not
    "mlp_bias": "MoE has biases in the router and all experts, or in none",
    "use_bias": "MoE has biases in the router and all experts, or in none",
    "zero_expert_type": "MoE has the identity here, and what others compute is not documented",
}
OURS = "mlp"  # our block, in every family: it is what transformers 5 calls most of them


class Part(NamedTuple):
    """A tensor of theirs, and the place of it, or of its transpose, in one of ours."""

    name: str
    shape: tuple[int, ...]
    place: tuple = ()
    transposed: bool = False

    def from_theirs(self, theirs: Tensor) -> Tensor:
        return theirs.mT if self.transposed else theirs

    def from_ours(self, ours: Tensor) -> Tensor:
        ours = ours[self.place] if self.place else ours
        return (ours.mT if self.transposed else ours).view(self.shape)


class Piece(NamedTuple):
    """A tensor of ours, and theirs that make it up, in the order of its memory."""

    name: str
    shape: tuple[int, ...]
    tensors: tuple[Part, ...]

    @property
    def alternates(self) -> bool:
        """Whether each tensor of theirs has a part of every expert of ours."""
        return len(self.tensors) > 1 and self.tensors[0].place[:1] == (slice(None),)


class SharedMlp(NamedTuple):
    """The shared expert of a family: a dense MLP in the block."""

    name: str  # of the module
    size: str  # what the configuration calls its width, or its number of experts if it `counts` them
    default: int
    counts: bool = True
    gate: str = ""  # the module whose sigmoid multiplies the output
    always: bool = True  # whether transformers makes the module also for a width of 0


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers.  Names in pairs are those on the hub and in the fused format."""

    name: str
    block_class: str  # of transformers; "" if only checkpoints can be converted
    architecture: str
    num_experts: tuple[str, ...]  # what its configuration calls it; the first is what we write
    width: str
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    act: str = "hidden_act"
    depth: tuple[str, ...] = ("num_hidden_layers",)
    inner: str = ""  # the entry of config.json that has all of this, if not config.json itself
    blocks: tuple[str, str] = ("mlp", OURS)  # "": the tensors are the layer's own
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: the experts have no gate
    roots: tuple[str, str] = ("", "")  # what keys begin with that have one name on the hub and one in there
    stacked: tuple[str, ...] = ()  # on the hub, the tensors of all experts, if there is none of each
    transposed: bool = False  # on the hub, stacked ones are (E, H, 2I) and (E, I, H)
    routers: tuple[str, str] = ("gate", "gate")
    correction: tuple[str, ...] = ()  # the tensor that is added to scores to choose experts
    correction_shape: tuple[int, ...] = ()  # of its axes before the experts
    correction_if: str = ""  # the setting that says whether there is one
    always_fused: bool = False
    score: str = "softmax"
    scores: tuple[str, Mapping] = ("", {})  # the setting that says it instead, and ours by its values
    renormalizes: bool | None = None  # where the configuration does not say; None: it has no say
    added: float = 0.0  # to the sum of the weights before they are divided by it, where MoE adds 1e-20
    scale: float | None = None  # of the routing weights, where the configuration does not say
    scale_key: str = "routed_scaling_factor"
    groups: tuple[int, int] | None = None  # how many there are, and are chosen
    group_score: str = "top2"
    group_method: str = ""  # the topk_method with which groups count
    limit: float | None = None  # `swiglu_limit` of gate and up, where the configuration does not say
    shared: SharedMlp | None = None
    latent: tuple[str, str] | None = None  # the projections around experts that act on latent vectors
    zero_experts: int = 0  # identity experts, where the configuration does not say; 0: it has no say
    layers: Mapping = field(default_factory=dict)  # keys of LAYERS that count, and their defaults
    further: bool = False  # whether layers past the last, which predict further tokens, have experts too
    keeps: str = ""  # why layers with experts of another kind stay as they are
    renames: bool = False  # whether transformers' own format has other keys outside of the block too
    loaders_need: tuple[str, ...] = ()  # settings without which inference engines refuse the checkpoint
    only: Mapping = field(default_factory=dict)  # settings of which a single value is known
    refuses: Callable[[dict], str | None] = lambda config: None  # the reason, if settings together have one

    def prefix(self, fused: bool) -> str:
        """What the block's keys begin with, after the layer's."""
        return f"{self.blocks[fused]}." if self.blocks[fused] else ""

    def hub_name(self, key: str) -> str:
        """Return a key of the fused format as the hub has it, in what is no part of the block."""
        hub, fused = self.roots
        return hub + key.removeprefix(fused) if key.startswith(fused) else key

    def shared_matrices(self, fused: bool) -> tuple[str, ...]:
        return ("gate_proj", "up_proj", "down_proj")[-len(self.matrices) :] if fused else self.matrices

    def stacked_of(self, fused: bool) -> tuple[str, ...]:
        """The tensors of all experts: (E, 2I, H), or two (E, I, H), and (E, H, I).

        None where each expert has its own.
        """
        if not (fused or self.always_fused):
            return self.stacked
        return f"experts.{'gate_up' if len(self.matrices) == 3 else 'up'}_proj", "experts.down_proj"

    def settings(self, config: dict) -> dict:
        """The part of config.json that describes the layers, and of equal entries for each layer one."""
        found = config
        for name in self.inner.split(".") if self.inner else ():
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            return {}
        lists = {name: found[name] for name in COUNTS if isinstance(found.get(name), list)}
        if KINDS in self.layers:
            frequency = lists.pop("moe_layer_freq", None)
            found = {**found, KINDS: kinds_of(frequency, found)}
            found = found if frequency is None else {**found, "moe_layer_freq": None}
        return found | {name: values[0] for name, values in lists.items() if values and is_even(values)}

    def problems(self, config: dict) -> list[str]:
        """Return complaints about settings that are missing, wrong, or not supported by `MoE`."""
        found = damage(config)
        for names in self.required():
            if first(config, names) is None:
                found.append(f"config.json has no {names[0]}")
        if not found and self.num_layers(config) is None:
            found.append(f"config.json has no {self.depth[0]}")
        if config.get("router_jitter_noise"):
            found.append("router_jitter_noise is not 0: transformers then moves what the experts see too")
        acts = self.activations()
        if self.always_fused:
            try:
                oai_activation(config)
            except (TypeError, ValueError) as error:
                found.append(f"swiglu_limit and swiglu_alpha make no activation: {error}")
        elif first(config, (self.act,), next(iter(acts))) not in list(acts):
            found.append(f"{self.act} is {config[self.act]!r}; known: {', '.join(acts)}")
        elif self.limit is not None:
            try:
                self.limited_activation(config)
            except (TypeError, ValueError) as error:
                found.append(f"swiglu_limit makes no activation: {error}")
        found += self.differences(config)
        if not found and (reason := self.refuses(config)):
            found.append(reason)
        if self.sums_to_1(config) and first(config, self.top_k) == 1:
            found.append(f"{self.top_k[0]} is 1 and weights sum to 1: MoE has no router that cannot train")
        return found

    def differences(self, config: dict) -> list[str]:
        """The settings that are not what `only` says, or not among those of `scores`."""
        key, scores = self.scores
        unknown = self.score_of(config) is None
        found = [f"{key} is {config[key]!r}; known: {', '.join(scores)}"] if unknown else []
        return found + [
            f"{name} is {config[name]!r}; only {value!r} is known" + (f": {WHY[name]}" if name in WHY else "")
            for name, value in self.only.items()
            if config.get(name, value) != value
        ]

    def score_of(self, config: dict) -> str | None:
        """`score` of MoE; None for one that has no row in `scores`."""
        value = config.get(self.scores[0])
        return self.score if value is None else self.scores[1].get(str(value))

    def sums_to_1(self, config: dict) -> bool:
        """Whether the weights of a token are divided by their sum."""
        says = self.renormalizes is not None and self.score_of(config) != "topk_softmax"
        return first(config, ("norm_topk_prob",), self.renormalizes) if says else True

    def corrects(self, config: dict) -> bool:
        """Whether the router has a correction bias."""
        return bool(self.correction) and config.get(self.correction_if) is not False

    def group_limit(self, config: dict) -> GroupLimit | None:
        method = config.get("topk_method")
        if self.groups is None or (self.group_method and method != self.group_method):
            return None
        groups, best = (
            first(config, (name,), default)
            for name, default in zip(("n_group", "topk_group"), self.groups, strict=True)
        )
        return GroupLimit(groups, best, self.group_score) if best < groups else None

    def limited_activation(self, config: dict) -> str:
        limit = first(config, ("swiglu_limit",), self.limit)
        return swiglu_limit(limit, limit)

    def activations(self) -> dict[str, str]:
        return ACTIVATIONS if len(self.matrices) == 3 else PLAIN

    def required(self) -> tuple[tuple[str, ...], ...]:
        return ("hidden_size",), (self.width,), self.num_experts, self.top_k

    def num_layers(self, config: dict) -> int | None:
        listed = (config[name] for name in LISTED if name in self.layers and config.get(name) is not None)
        return next((len(kinds) for kinds in listed), first(config, self.depth))

    def moe_kwargs(self, config: dict) -> dict:
        """Return the arguments of `MoE`; all but `choice` can be written as JSON."""
        hidden, width, num_experts, top_k = (first(config, names) for names in self.required())
        kwargs = {"hidden": hidden, "intermediate": width, "num_experts": num_experts, "top_k": top_k}
        if self.always_fused:
            act = {"activation": oai_activation(config), "bias": True, "interleaved": True}
            return kwargs | act | {"score": self.score}
        acts = self.activations()
        act = acts[first(config, (self.act,), next(iter(acts)))]
        kwargs["activation"] = act if self.limit is None else self.limited_activation(config)
        # said also where it is the default: MoE refuses weights of 1, and would weigh otherwise by itself
        kwargs["renormalize"] = self.sums_to_1(config)
        if (score := self.score_of(config)) != "softmax":
            kwargs["score"] = score
        if self.corrects(config):
            kwargs["selection_bias"] = True
        if self.scale is not None:
            kwargs["scale"] = first(config, (self.scale_key,), self.scale)
        if choice := self.group_limit(config):
            kwargs["choice"] = choice
        if self.latent and config.get("moe_latent_size"):
            kwargs["latent"] = config["moe_latent_size"]
        if zero := self.zero_experts and first(config, ("zero_expert_num",), self.zero_experts):
            kwargs["zero_compute"] = ZeroCompute(identity=zero)
        if self.shared is not None:
            size = first(config, (self.shared.size,), self.shared.default)
            kwargs["shared_intermediate"] = width * size if self.shared.counts else size
            if self.shared.gate and kwargs["shared_intermediate"]:
                kwargs["shared_gate"] = True
        return kwargs

    def is_sparse(self, config: dict, layer: int) -> bool | None:
        """Whether a layer has experts; None where it may have, in layers that predict further tokens."""
        layers = self.num_layers(config)
        if layer >= layers:
            further = first(config, ("num_nextn_predict_layers", "num_mtp_layers"), 0)
            return None if self.further and layer < layers + further else False
        return not self.stays(config, layer) and self.is_listed(config, layer)

    def stays(self, config: dict, layer: int) -> bool:
        """Whether a layer's experts, if it has some, are of a kind that MoE has not."""
        if not self.keeps or layer >= self.num_layers(config):
            return False
        limits = (config.get(name) or () for name in LIMITS)
        return any(any(found[layer : layer + 1]) for found in limits) or not self.is_listed(config, layer)

    def is_listed(self, config: dict, layer: int) -> bool:
        given = [name for name in (*LISTED, KINDS) if name in self.layers and config.get(name) is not None]
        rules = dict.fromkeys(given[:1]) or self.layers
        if "expert_layer_period" in rules:
            layer -= first(config, ("expert_layer_offset",), 1)
        values = ((name, first(config, (name,), default)) for name, default in rules.items())
        return all(LAYERS[name](layer, value) for name, value in values if value is not None)

    def pieces(self, kwargs: dict, fused: bool) -> Iterator[Piece]:
        """All tensors of a block.  `kwargs` are those of `moe_kwargs`."""
        E, H, width = kwargs["num_experts"], kwargs["hidden"], kwargs["intermediate"]
        zero, inner = kwargs.get("zero_compute"), kwargs.get("latent") or H
        router, routed = self.routers[fused], E + (zero.count if zero else 0)
        yield same("router.weight", f"{router}.weight", routed, H)
        if kwargs.get("bias"):
            yield same("router.bias", f"{router}.bias", E)
        if kwargs.get("selection_bias"):  # of any number of axes
            part = Part(self.correction[fused], (*self.correction_shape, routed))
            yield Piece("router.selection_bias", (routed,), (part,))
        yield from self.expert_pieces(E, inner, width, fused)
        if kwargs.get("latent"):
            for ours, theirs, *shape in zip(("to", "from"), self.latent, (inner, H), (H, inner), strict=True):
                yield same(f"{ours}_latent.weight", f"{theirs}.weight", *shape)
        if shared := kwargs.get("shared_intermediate"):
            name = f"{self.shared.name}."
            *first_two, down = self.shared_matrices(fused)
            yield side_by_side("shared.gate_up.weight", (), shared, H, [(name, ())], tuple(first_two))
            yield same("shared.down.weight", f"{name}{down}.weight", H, shared)
            if self.shared.gate:
                yield same("shared.gate.weight", f"{self.shared.gate}.weight", 1, H)

    def idle(self, kwargs: dict, fused: bool) -> dict[str, tuple[int, int]]:
        """Return the tensors of a shared expert of width 0 by their shapes: they have no place in `MoE`."""
        if self.shared is None or kwargs.get("shared_intermediate"):
            return {}
        H, (*first_two, down) = kwargs["hidden"], self.shared_matrices(fused)
        shapes = dict.fromkeys((f"{self.shared.name}.{matrix}.weight" for matrix in first_two), (0, H))
        shapes[f"{self.shared.name}.{down}.weight"] = H, 0
        return shapes | ({f"{self.shared.gate}.weight": (1, H)} if self.shared.gate else {})

    def expert_pieces(self, E: int, H: int, width: int, fused: bool) -> Iterator[Piece]:
        rows = (len(self.matrices) - 1) * width
        if self.always_fused or (self.transposed and not fused):
            shapes = ("gate_up", 2 * width, H), ("down", H, width)
            for (ours, *shape), theirs in zip(shapes, self.stacked_of(fused), strict=True):
                part = Part(theirs, (E, *shape[::-1]), transposed=True)
                yield Piece(f"experts.{ours}", (E, *shape), (part,))
                if self.always_fused:
                    yield same(f"experts.{ours}_bias", f"{theirs}_bias", E, shape[0])
        elif stacked := self.stacked_of(fused):
            *ups, down = stacked
            size = rows // len(ups)
            parts = (
                Part(name, (E, size, H), (slice(None), slice(i * size, (i + 1) * size)))
                for i, name in enumerate(ups)
            )
            whole = same("experts.gate_up", ups[0], E, rows, H)
            yield whole if len(ups) == 1 else Piece("experts.gate_up", (E, rows, H), tuple(parts))
            yield same("experts.down", down, E, H, width)
        else:
            prefixes = [(f"experts.{e}.", (e,)) for e in range(E)]
            yield side_by_side("experts.gate_up", (E,), width, H, prefixes, self.matrices[:-1])
            tensors = (
                Part(f"{name}{self.matrices[-1]}.weight", (H, width), place) for name, place in prefixes
            )
            yield Piece("experts.down", (E, H, width), tuple(tensors))


def oai_activation(config: dict) -> str:
    """Return gpt-oss's activation with the numbers of the configuration; raise what `swiglu_limit` does."""
    limit = first(config, ("swiglu_limit",), OAI.gate_max)
    return swiglu_limit(limit, limit, first(config, ("swiglu_alpha",), OAI.alpha), OAI.up_offset)


def same(ours: str, theirs: str, *shape: int) -> Piece:
    return Piece(ours, shape, (Part(theirs, shape),))


def side_by_side(ours: str, outer: tuple, width: int, H: int, prefixes: list, matrices: tuple) -> Piece:
    """Rows of the gate, then rows of up; or rows of up alone."""
    tensors = [
        Part(f"{name}{matrix}.weight", (width, H), (*place, slice(i * width, (i + 1) * width)))
        for name, place in prefixes
        for i, matrix in enumerate(matrices)
    ]
    return Piece(ours, (*outer, len(matrices) * width, H), tuple(tensors))


def damage(config: dict) -> list[str]:
    """Return complaints about settings of a wrong type or size."""
    found = []
    for name, least in COUNTS.items():
        value = config.get(name)
        if type(value) is list:
            found.append(f"{name} is {value!r}: one value for all layers is known, not one for each")
        elif value is not None and not (type(value) is int and least <= value <= MOST):
            found.append(f"{name} is {value!r}; it should be a whole number from {least} to {MOST}")
    for name, types in TYPES.items():
        value = config.get(name)
        huge = type(value) is int and abs(value) > MOST
        if value is not None and (type(value) not in types or huge):
            found.append(f"{name} is {value!r}; it should be of type {types[-1].__name__}")
    return found


def is_even(values: list) -> bool:
    return all(value == values[0] for value in values)


def kinds_of(frequency: list | None, config: dict) -> list[str] | None:
    """Return `mlp_layer_types`, also from an older setting.

    That is a list of 0 and 1 (MiMo) or of false and true (EXAONE), or a text such as "3,4,5" (Step).
    """
    if config.get(KINDS) is not None:
        return config[KINDS]
    if isinstance(config.get("is_moe_layer"), list):
        frequency = config["is_moe_layer"]
    named = config.get("moe_layers_enum")
    if isinstance(named, str) and re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", named):
        layers = set(map(int, named.split(",")))
        frequency = [layer in layers for layer in range(max(layers) + 1)]
    return None if frequency is None else ["sparse" if has else "dense" for has in frequency]


def first(config: dict, names: tuple[str, ...], default=None):
    found = (config[name] for name in names if config.get(name) is not None)
    return next(found, default)
