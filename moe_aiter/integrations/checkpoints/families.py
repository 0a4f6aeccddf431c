"""The families of Hugging Face checkpoints: names of MoE tensors, and what config.json says of the layer.

Names on the hub, and from transformers' save_pretrained.  N is the number of an expert; gate, up and down are
short for gate_proj.weight, up_proj.weight and down_proj.weight:

    family           block             experts                         router and rest
    mixtral          block_sparse_moe  experts.N.{w1,w3,w2}.weight     gate.weight
    minimax_m2       block_sparse_moe  the same                        gate.weight,
                                                                       e_score_correction_bias
    qwen3_moe        mlp               experts.N.{gate,up,down}        gate.weight
    olmoe            mlp               the same                        gate.weight
    qwen2_moe        mlp               the same                        gate.weight,
    qwen3_next                                                         shared_expert.{gate,up,down},
    qwen3_5_moe                                                        shared_expert_gate.weight
    deepseek_v3      mlp               the same                        gate.weight,
    glm4_moe                                                           gate.e_score_correction_bias,
                                                                       shared_experts.{gate,up,down}
    ernie4_5_moe     mlp               the same                        gate.weight, shared_experts and
                                                       moe_statics.e_score_correction_bias (1, E)
    nemotron_h       mixer             experts.N.{up,down}             as deepseek_v3, without gate_proj;
                                       of width L if latent            fc1_latent_proj.weight (L, H),
                                                                       fc2_latent_proj.weight (H, L)
    longcat_flash    mlp               experts.N.{gate,up,down}        router.classifier.weight (E + Z, H),
                                       without those of Z zero experts router.e_score_correction_bias (E + Z)
    granitemoe, and  block_sparse_moe  input_linear.weight (E, 2I, H)  router.layer.weight
    -shared, -hybrid                   output_linear.weight (E, H, I)
    gpt_oss          mlp               experts.gate_up_proj            router.weight, router.bias
                                       (E, H, 2I), gate and up
                                       interleaved, experts.down_proj
                                       (E, I, H), and their _bias
                                       (E, 2I), (E, H)

In memory, and from save_pretrained(save_original_format=False), transformers 5 uses the "fused" format: the
experts are experts.gate_up_proj (E, 2I, H), or experts.up_proj (E, I, H) without a gate, and
experts.down_proj (E, H, I).  In this format, the block of mixtral and minimax_m2 is called mlp, the bias of
ernie4_5_moe is part of gate, and the router of Granite has the key router.weight.

`REFUSED` lists the families whose layer `MoE` cannot compute, each with the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from ...kernels.base.activations import OAI, swiglu_limit
from ...routing.choices import GroupLimit
from ...routing.zero_compute import ZeroCompute
from .files import CheckpointError

ACTIVATIONS = {  # by `hidden_act`
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu",
}  # fmt: skip
PLAIN = {"relu2": "relu2", "silu": "silu", "gelu": "gelu", "relu": "relu"}  # without a gate
MOST = 2**20  # of whatever config.json counts; more is damage, and would fit no memory
COUNTS = {  # by name, the least
    "hidden_size": 1, "intermediate_size": 1, "moe_intermediate_size": 1, "num_hidden_layers": 1,
    "num_experts": 1, "num_local_experts": 1, "n_routed_experts": 1, "moe_num_experts": 1,
    "num_experts_per_tok": 1, "moe_k": 1, "n_shared_experts": 0, "moe_num_shared_experts": 0,
    "shared_expert_intermediate_size": 1, "moe_shared_expert_intermediate_size": 1,
    "n_group": 1, "topk_group": 1, "decoder_sparse_step": 1, "moe_layer_freq": 1, "moe_layer_interval": 1,
    "moe_layer_start_index": 0, "moe_layer_end_index": -1,
    "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "moe_latent_size": 1,
    "moe_topk": 1, "zero_expert_num": 0, "expert_ffn_hidden_size": 1, "num_layers": 1,
}  # fmt: skip
TYPES = {
    "norm_topk_prob": (bool,), "mlp_only_layers": (list,), "routed_scaling_factor": (int, float),
    "layers_block_type": (list,), "hybrid_override_pattern": (str,),
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
}
LISTED = "layers_block_type", "hybrid_override_pattern"  # those with an entry for each layer
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


class SharedMlp(NamedTuple):
    """The shared expert of a family: a dense MLP in the block."""

    name: str  # of the module
    size: str  # what the configuration calls its width, or its number of experts if it `counts` them
    default: int
    counts: bool = True
    gate: str = ""  # the module whose sigmoid multiplies the output


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
    blocks: tuple[str, str] = ("mlp", OURS)
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: the experts have no gate
    stacked: tuple[str, ...] = ()  # on the hub, the tensors of all experts, if there is none of each
    routers: tuple[str, str] = ("gate", "gate")
    correction: tuple[str, ...] = ()  # the tensor that is added to scores to choose experts
    correction_shape: tuple[int, ...] = ()  # of its axes before the experts
    always_fused: bool = False
    score: str = "softmax"
    renormalizes: bool | None = None  # where the configuration does not say; None: it has no say
    scale: float | None = None  # of the routing weights, where the configuration does not say
    groups: tuple[int, int] | None = None  # how many there are, and are chosen
    shared: SharedMlp | None = None
    latent: tuple[str, str] | None = None  # the projections around experts that act on latent vectors
    zero_experts: int = 0  # identity experts, where the configuration does not say; 0: it has no say
    layers: Mapping = field(default_factory=dict)  # keys of LAYERS that count, and their defaults
    further: bool = False  # whether layers past the last, which predict further tokens, have experts too
    loaders_need: tuple[str, ...] = ()  # settings without which inference engines refuse the checkpoint
    only: Mapping = field(default_factory=dict)  # settings of which a single value is known

    def stacked_of(self, fused: bool) -> tuple[str, ...]:
        """The two tensors of all experts, (E, 2I, H) and (E, H, I); none where each expert has its own."""
        if not (fused or self.always_fused):
            return self.stacked
        return f"experts.{'gate_up' if len(self.matrices) == 3 else 'up'}_proj", "experts.down_proj"

    def settings(self, config: dict) -> dict:
        """The part of config.json that describes the layers."""
        found = config.get(self.inner) if self.inner else config
        return found if isinstance(found, dict) else {}

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
        found += self.differences(config)
        sums_to_1 = self.renormalizes is None or first(config, ("norm_topk_prob",), self.renormalizes)
        if sums_to_1 and first(config, self.top_k) == 1:
            found.append(f"{self.top_k[0]} is 1 and weights sum to 1: MoE has no router that cannot train")
        return found

    def differences(self, config: dict) -> list[str]:
        """The settings that are not what `only` says."""
        return [
            f"{name} is {config[name]!r}; only {value!r} is known" + (f": {WHY[name]}" if name in WHY else "")
            for name, value in self.only.items()
            if config.get(name, value) != value
        ]

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
        kwargs["activation"] = acts[first(config, (self.act,), next(iter(acts)))]
        # said also where it is the default: MoE refuses weights of 1, and would weigh otherwise by itself
        says = self.renormalizes is not None
        kwargs["renormalize"] = first(config, ("norm_topk_prob",), self.renormalizes) if says else True
        if self.score != "softmax":
            kwargs["score"] = self.score
        if self.correction:
            kwargs["selection_bias"] = True
        if self.scale is not None:
            kwargs["scale"] = first(config, ("routed_scaling_factor",), self.scale)
        if self.groups is not None:
            groups, best = (
                first(config, (name,), default)
                for name, default in zip(("n_group", "topk_group"), self.groups, strict=True)
            )
            if best < groups:
                kwargs["choice"] = GroupLimit(groups, best)
        if self.latent and config.get("moe_latent_size"):
            kwargs["latent"] = config["moe_latent_size"]
        if zero := self.zero_experts and first(config, ("zero_expert_num",), self.zero_experts):
            kwargs["zero_compute"] = ZeroCompute(identity=zero)
        if self.shared is not None:
            size = first(config, (self.shared.size,), self.shared.default)
            kwargs["shared_intermediate"] = width * size if self.shared.counts else size
            if self.shared.gate:
                kwargs["shared_gate"] = True
        return kwargs

    def is_sparse(self, config: dict, layer: int) -> bool | None:
        """Whether a layer has experts; None where it may have, in layers that predict further tokens."""
        layers = self.num_layers(config)
        if layer >= layers:
            further = first(config, ("num_nextn_predict_layers", "num_mtp_layers"), 0)
            return None if self.further and layer < layers + further else False
        values = ((name, first(config, (name,), default)) for name, default in self.layers.items())
        return all(LAYERS[name](layer, value) for name, value in values if value is not None)

    def pieces(self, kwargs: dict, fused: bool) -> Iterator[Piece]:
        """All tensors of a block.  `kwargs` are those of `moe_kwargs`."""
        E, H, width = kwargs["num_experts"], kwargs["hidden"], kwargs["intermediate"]
        zero, inner = kwargs.get("zero_compute"), kwargs.get("latent") or H
        router, routed = self.routers[fused], E + (zero.count if zero else 0)
        yield same("router.weight", f"{router}.weight", routed, H)
        if kwargs.get("bias"):
            yield same("router.bias", f"{router}.bias", E)
        if self.correction:  # of any number of axes
            part = Part(self.correction[fused], (*self.correction_shape, routed))
            yield Piece("router.selection_bias", (routed,), (part,))
        yield from self.expert_pieces(E, inner, width, fused)
        if kwargs.get("latent"):
            for ours, theirs, *shape in zip(("to", "from"), self.latent, (inner, H), (H, inner), strict=True):
                yield same(f"{ours}_latent.weight", f"{theirs}.weight", *shape)
        if shared := kwargs.get("shared_intermediate"):
            name = f"{self.shared.name}."
            yield side_by_side("shared.gate_up.weight", (), shared, H, [(name, ())], self.matrices[:-1])
            yield same("shared.down.weight", f"{name}{self.matrices[-1]}.weight", H, shared)
            if self.shared.gate:
                yield same("shared.gate.weight", f"{self.shared.gate}.weight", 1, H)

    def expert_pieces(self, E: int, H: int, width: int, fused: bool) -> Iterator[Piece]:
        rows = (len(self.matrices) - 1) * width
        if self.always_fused:
            shapes = ("gate_up", 2 * width, H), ("down", H, width)
            for (ours, *shape), theirs in zip(shapes, self.stacked_of(fused), strict=True):
                part = Part(theirs, (E, *shape[::-1]), transposed=True)
                yield Piece(f"experts.{ours}", (E, *shape), (part,))
                yield same(f"experts.{ours}_bias", f"{theirs}_bias", E, shape[0])
        elif stacked := self.stacked_of(fused):
            yield same("experts.gate_up", stacked[0], E, rows, H)
            yield same("experts.down", stacked[1], E, H, width)
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
        if value is not None and not (type(value) is int and least <= value <= MOST):
            found.append(f"{name} is {value!r}; it should be a whole number from {least} to {MOST}")
    for name, types in TYPES.items():
        value = config.get(name)
        huge = type(value) is int and abs(value) > MOST
        if value is not None and (type(value) not in types or huge):
            found.append(f"{name} is {value!r}; it should be of type {types[-1].__name__}")
    return found


def first(config: dict, names: tuple[str, ...], default=None):
    found = (config[name] for name in names if config.get(name) is not None)
    return next(found, default)


EXPERTS = "num_experts", "num_local_experts"
ROUTED = "n_routed_experts", "num_local_experts"
DEEPSEEK = {  # what GLM and Nemotron took from it
    "correction": ("gate.e_score_correction_bias",) * 2, "score": "sigmoid", "renormalizes": True,
}  # fmt: skip
MIXTRAL = {"blocks": ("block_sparse_moe", OURS), "matrices": ("w1", "w3", "w2")}
QWEN_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
QWEN2_SHARED = SharedMlp(
    "shared_expert", "shared_expert_intermediate_size", 5632, counts=False, gate="shared_expert_gate"
)
QWEN_SHARED = QWEN2_SHARED._replace(default=512)
DEEPSEEK_SHARED = SharedMlp("shared_experts", "n_shared_experts", 1)
NEMOTRON_SHARED = SharedMlp("shared_experts", "moe_shared_expert_intermediate_size", 7688, counts=False)
QWEN3_5 = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeForCausalLM", EXPERTS,
    "moe_intermediate_size", shared=QWEN_SHARED,
)  # fmt: skip
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "mixtral", "MixtralSparseMoeBlock", "MixtralForCausalLM", EXPERTS[::-1], "intermediate_size",
            **MIXTRAL,
        ),
        Family(
            "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeForCausalLM", EXPERTS, "moe_intermediate_size",
            renormalizes=False, layers=QWEN_LAYERS,
        ),
        Family(
            "olmoe", "OlmoeSparseMoeBlock", "OlmoeForCausalLM", EXPERTS, "intermediate_size",
            renormalizes=False,
        ),
        Family(
            "deepseek_v3", "DeepseekV3MoE", "DeepseekV3ForCausalLM", ROUTED, "moe_intermediate_size",
            **DEEPSEEK, scale=2.5, groups=(8, 4), shared=DEEPSEEK_SHARED, further=True,
            layers={"first_k_dense_replace": 3, "moe_layer_freq": 1},
            only={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        ),
        Family(
            "gpt_oss", "GptOssMLP", "GptOssForCausalLM", EXPERTS[::-1], "intermediate_size",
            routers=("router", "router"), always_fused=True, score="topk_softmax",
        ),
        Family(
            "glm4_moe", "Glm4MoeMoE", "Glm4MoeForCausalLM", ROUTED, "moe_intermediate_size", **DEEPSEEK,
            scale=1.0, groups=(1, 1), shared=DEEPSEEK_SHARED, further=True,
            layers={"first_k_dense_replace": 1},
        ),
        Family(
            "qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeForCausalLM", EXPERTS, "moe_intermediate_size",
            renormalizes=False, layers=QWEN_LAYERS, shared=QWEN2_SHARED,
        ),
        Family(
            "qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextForCausalLM", EXPERTS,
            "moe_intermediate_size", renormalizes=True, layers=QWEN_LAYERS, shared=QWEN_SHARED,
        ),
        QWEN3_5,
        replace(QWEN3_5, name="qwen3_5_moe", inner="text_config"),
        Family(
            "minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2ForCausalLM", EXPERTS[::-1],
            "intermediate_size", **MIXTRAL, score="sigmoid", correction=("e_score_correction_bias",) * 2,
            only={"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0},
        ),
        Family(
            "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeForCausalLM",
            ("moe_num_experts", *EXPERTS), "moe_intermediate_size", top_k=("moe_k", "num_experts_per_tok"),
            correction=tuple(f"{name}moe_statics.e_score_correction_bias" for name in ("", "gate.")),
            correction_shape=(1,), shared=SharedMlp("shared_experts", "moe_num_shared_experts", 2),
            layers={"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
            only={"use_bias": False, "moe_norm_min": 1e-12},
        ),
        Family(
            "nemotron_h", "NemotronHMoE", "NemotronHForCausalLM", ROUTED,
            "moe_intermediate_size", act="mlp_hidden_act", blocks=("mixer", "mixer"),
            matrices=("up_proj", "down_proj"), **DEEPSEEK, scale=1.0, groups=(1, 1), shared=NEMOTRON_SHARED,
            latent=("fc1_latent_proj", "fc2_latent_proj"), layers=dict.fromkeys(LISTED),
            only={"mlp_bias": False},
        ),
        Family(
            "longcat_flash", "", "LongcatFlashForCausalLM", ROUTED,
            "expert_ffn_hidden_size", top_k=("moe_topk", "num_experts_per_tok"),
            depth=("num_layers", "num_hidden_layers"), routers=("router.classifier",) * 2,
            correction=("router.e_score_correction_bias",) * 2, renormalizes=False, scale=6.0,
            zero_experts=256, loaders_need=("zero_expert_type",),
            only={"router_bias": False, "norm_topk_prob": False, "zero_expert_type": "identity"},
        ),
        *(
            Family(
                f"granitemoe{kind.lower()}", f"GraniteMoe{kind}MoE", f"GraniteMoe{kind}ForCausalLM",
                EXPERTS[::-1], "intermediate_size", blocks=("block_sparse_moe",) * 2,
                routers=("router.layer", "router"), score="topk_softmax",
                stacked=("input_linear.weight", "output_linear.weight"),
            )
            for kind in ("", "Shared", "Hybrid")
        ),
    )
}  # fmt: skip
LLAMA4 = "it multiplies the input of an expert by the routing weight, and MoE the output"
GEMMA4 = "its router has a norm, a scale and a factor for each expert of its own, and MoE has none of them"
REFUSED = {"llama4": LLAMA4, "llama4_text": LLAMA4, "gemma4": GEMMA4, "gemma4_text": GEMMA4}


def family_of(config: dict) -> Family:
    kind = config.get("model_type")
    if kind in list(REFUSED):
        raise CheckpointError("config.json", [f"model_type is {kind!r}: {REFUSED[kind]}"])
    if kind not in list(FAMILIES):  # it need not be a string
        families = ", ".join(FAMILIES)
        raise CheckpointError(
            "config.json", [f"model_type is {kind!r}; known: {families}; dense ones are for --upcycle"]
        )
    return FAMILIES[kind]


def to_json(kwargs: dict) -> dict:
    """`kwargs` of an MoE as config.json holds them."""
    kwargs = dict(kwargs)
    if choice := kwargs.get("choice"):
        kwargs["choice"] = {"num_groups": choice.num_groups, "top_groups": choice.top_groups}
    if zero := kwargs.get("zero_compute"):
        kwargs["zero_compute"] = {"identity": zero.identity}
    return kwargs


def from_json(kwargs: dict) -> dict:
    kinds = {"choice": GroupLimit, "zero_compute": ZeroCompute}
    made = {name: kind(**kwargs[name]) for name, kind in kinds.items() if kwargs.get(name) is not None}
    return {"renormalize": True} | kwargs | made  # the default when the first checkpoints were converted
