"""The names of MoE tensors in Hugging Face checkpoints, and the place of each in our tensors.

On the hub, and from transformers' save_pretrained, with N the number of an expert:

    family       block             experts                                    router and rest
    mixtral      block_sparse_moe  experts.N.{w1,w3,w2}.weight                gate.weight
    qwen3_moe    mlp               experts.N.{gate,up,down}_proj.weight       gate.weight
    olmoe        mlp               the same                                   gate.weight
    deepseek_v3  mlp               the same                                   gate.weight,
                                                                              gate.e_score_correction_bias,
                                                                shared_experts.{gate,up,down}_proj.weight
    gpt_oss      mlp               experts.gate_up_proj (E, H, 2I), gate and  router.weight, router.bias
                                   up interleaved, experts.down_proj
                                   (E, I, H), and their _bias (E, 2I), (E, H)

In memory, and from save_pretrained(save_original_format=False), transformers 5 uses the "fused" format: every
block is called `mlp`, and the experts of the first four families are experts.gate_up_proj (E, 2I, H) and
experts.down_proj (E, H, I).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...routing.choices import GroupLimit
from .files import CheckpointError

ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}  # by `hidden_act`
MOST = 2**20  # of whatever config.json counts; more is damage, and would fit no memory
COUNTS = {  # by name, the least
    "hidden_size": 1, "intermediate_size": 1, "moe_intermediate_size": 1, "num_hidden_layers": 1,
    "num_experts": 1, "num_local_experts": 1, "n_routed_experts": 1, "num_experts_per_tok": 1,
    "n_shared_experts": 0, "n_group": 1, "topk_group": 1, "decoder_sparse_step": 1, "moe_layer_freq": 1,
    "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "num_mtp_layers": 0,
}  # fmt: skip
TYPES = {"norm_topk_prob": (bool,), "mlp_only_layers": (list,), "routed_scaling_factor": (int, float)}
OURS = "mlp"  # our block, in every family: it is what transformers 5 calls the module


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
        return ours.mT if self.transposed else ours


class Piece(NamedTuple):
    """A tensor of ours, and theirs that make it up, in the order of its memory."""

    name: str
    shape: tuple[int, ...]
    tensors: tuple[Part, ...]


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers."""

    name: str
    block_class: str  # of transformers
    architecture: str
    num_experts: tuple[str, ...]  # what its configuration calls it; the first is what we write
    width: str
    block: str = "mlp"  # on the hub
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    always_fused: bool = False
    renormalizes: bool | None = None  # where the configuration does not say; None: it has no say

    def block_of(self, fused: bool) -> str:
        return OURS if fused else self.block

    def problems(self, config: dict) -> list[str]:
        """What the configuration asks for that an MoE would not do."""
        found = damage(config)
        for names in (*self.required(), ("num_hidden_layers",)):
            if first(config, names) is None:
                found.append(f"config.json has no {names[0]}")
        if config.get("router_jitter_noise"):
            found.append("router_jitter_noise is not 0: transformers then moves what the experts see too")
        if self.name == "gpt_oss":
            for name, value in {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}.items():
                if config.get(name, value) != value:
                    found.append(f"{name} is {config[name]}; only {value} is known")
        elif first(config, ("hidden_act",), "silu") not in list(ACTIVATIONS):
            found.append(f"hidden_act is {config['hidden_act']!r}; known: {', '.join(ACTIVATIONS)}")
        if self.name == "deepseek_v3":
            for name, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
                if config.get(name, value) != value:
                    found.append(f"{name} is {config[name]!r}; only {value!r} is known")
        sums_to_1 = self.renormalizes is None or first(config, ("norm_topk_prob",), self.renormalizes)
        if sums_to_1 and first(config, ("num_experts_per_tok",)) == 1:
            found.append("num_experts_per_tok is 1 and weights sum to 1: MoE has no router that cannot train")
        return found

    def required(self) -> tuple[tuple[str, ...], ...]:
        return ("hidden_size",), (self.width,), self.num_experts, ("num_experts_per_tok",)

    def moe_kwargs(self, config: dict) -> dict:
        """What to call `MoE` with, `choice` aside all of it fit for JSON."""
        hidden, width, num_experts, top_k = (first(config, names) for names in self.required())
        kwargs = {"hidden": hidden, "intermediate": width, "num_experts": num_experts, "top_k": top_k}
        if self.name == "gpt_oss":
            act = {"activation": "swiglu_oai", "bias": True, "interleaved": True}
            return kwargs | act | {"score": "topk_softmax"}
        kwargs["activation"] = ACTIVATIONS[first(config, ("hidden_act",), "silu")]
        # said also where it is the default: MoE refuses weights of 1, and would weigh otherwise by itself
        says = self.renormalizes is not None
        kwargs["renormalize"] = first(config, ("norm_topk_prob",), self.renormalizes) if says else True
        if self.name == "deepseek_v3":
            kwargs |= {"score": "sigmoid", "selection_bias": True}
            kwargs["scale"] = first(config, ("routed_scaling_factor",), 2.5)
            groups, best = first(config, ("n_group",), 8), first(config, ("topk_group",), 4)
            if best < groups:
                kwargs["choice"] = GroupLimit(groups, best)
            kwargs["shared_intermediate"] = width * first(config, ("n_shared_experts",), 1)
        return kwargs

    def is_sparse(self, config: dict, layer: int) -> bool | None:
        """Whether a layer has experts; None where it may have, in layers that predict further tokens."""
        layers = config["num_hidden_layers"]
        if layer >= layers:
            further = first(config, ("num_nextn_predict_layers", "num_mtp_layers"), 0)
            return None if self.name == "deepseek_v3" and layer < layers + further else False
        if self.name == "qwen3_moe":
            step = first(config, ("decoder_sparse_step",), 1)
            return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0
        if self.name == "deepseek_v3":
            start = first(config, ("first_k_dense_replace",), 3)
            step = first(config, ("moe_layer_freq",), 1)
            return layer >= start and layer % step == 0
        return True

    def pieces(self, kwargs: dict, fused: bool) -> Iterator[Piece]:
        """All tensors of a block.  `kwargs` are those of `moe_kwargs`."""
        E, H, width = kwargs["num_experts"], kwargs["hidden"], kwargs["intermediate"]
        yield same("router.weight", f"{self.router}.weight", E, H)
        if kwargs.get("bias"):
            yield same("router.bias", f"{self.router}.bias", E)
        if kwargs.get("selection_bias"):
            yield same("router.selection_bias", f"{self.router}.e_score_correction_bias", E)
        if self.always_fused:
            for ours, theirs, rows, columns in (("gate_up", "gate_up_proj", 2 * width, H),
                                                ("down", "down_proj", H, width)):  # fmt: skip
                part = Part(f"experts.{theirs}", (E, columns, rows), transposed=True)
                yield Piece(f"experts.{ours}", (E, rows, columns), (part,))
                yield same(f"experts.{ours}_bias", f"experts.{theirs}_bias", E, rows)
        elif fused:
            yield same("experts.gate_up", "experts.gate_up_proj", E, 2 * width, H)
            yield same("experts.down", "experts.down_proj", E, H, width)
        else:
            gate, up, down = self.matrices
            prefixes = [(f"experts.{e}.", (e,)) for e in range(E)]
            yield side_by_side("experts.gate_up", (E,), width, H, prefixes, gate, up)
            tensors = (Part(f"{name}{down}.weight", (H, width), place) for name, place in prefixes)
            yield Piece("experts.down", (E, H, width), tuple(tensors))
        if shared := kwargs.get("shared_intermediate"):
            prefixes = [("shared_experts.", ())]
            yield side_by_side("shared.gate_up.weight", (), shared, H, prefixes, *self.matrices[:2])
            yield same("shared.down.weight", f"shared_experts.{self.matrices[2]}.weight", H, shared)


def same(ours: str, theirs: str, *shape: int) -> Piece:
    return Piece(ours, shape, (Part(theirs, shape),))


def side_by_side(ours: str, outer: tuple, width: int, H: int, prefixes: list, gate: str, up: str) -> Piece:
    """Rows of the gate, then rows of up."""
    halves = (gate, slice(0, width)), (up, slice(width, 2 * width))
    tensors = [
        Part(f"{name}{matrix}.weight", (width, H), (*place, rows))
        for name, place in prefixes
        for matrix, rows in halves
    ]
    return Piece(ours, (*outer, 2 * width, H), tuple(tensors))


def damage(config: dict) -> list[str]:
    """What is not of its type."""
    found = []
    for name, least in COUNTS.items():
        value = config.get(name)
        if value is not None and not (type(value) is int and least <= value <= MOST):
            found.append(f"{name} is {value!r}; it should be a whole number from {least} to {MOST}")
    for name, types in TYPES.items():
        value = config.get(name)
        if value is not None and type(value) not in types:
            found.append(f"{name} is {value!r}; it should be of type {types[-1].__name__}")
    return found


def first(config: dict, names: tuple[str, ...], default=None):
    found = (config[name] for name in names if config.get(name) is not None)
    return next(found, default)


EXPERTS = "num_experts", "num_local_experts"
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "mixtral", "MixtralSparseMoeBlock", "MixtralForCausalLM",
            EXPERTS[::-1], "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2"),
        ),
        Family(
            "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeForCausalLM", EXPERTS, "moe_intermediate_size",
            renormalizes=False,
        ),
        Family(
            "olmoe", "OlmoeSparseMoeBlock", "OlmoeForCausalLM", EXPERTS, "intermediate_size",
            renormalizes=False,
        ),
        Family(
            "deepseek_v3", "DeepseekV3MoE", "DeepseekV3ForCausalLM",
            ("n_routed_experts", "num_local_experts"), "moe_intermediate_size", renormalizes=True,
        ),
        Family(
            "gpt_oss", "GptOssMLP", "GptOssForCausalLM", EXPERTS[::-1], "intermediate_size",
            router="router", always_fused=True,
        ),
    )
}  # fmt: skip


def family_of(config: dict) -> Family:
    kind = config.get("model_type")
    if kind not in list(FAMILIES):  # it need not be a string
        families = ", ".join(FAMILIES)
        raise CheckpointError(
            "config.json", [f"model_type is {kind!r}; known: {families}; dense ones are for --upcycle"]
        )
    return FAMILIES[kind]


def to_json(kwargs: dict) -> dict:
    """`kwargs` of an MoE as config.json holds them."""
    choice = kwargs.get("choice")
    if choice is None:
        return dict(kwargs)
    return kwargs | {"choice": {"num_groups": choice.num_groups, "top_groups": choice.top_groups}}


def from_json(kwargs: dict) -> dict:
    choice = kwargs.get("choice")
    kwargs = {"renormalize": True} | kwargs  # the default when the first checkpoints were converted
    return kwargs if choice is None else kwargs | {"choice": GroupLimit(**choice)}
