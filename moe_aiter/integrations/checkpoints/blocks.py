"""Convert single layers: transformers' blocks to MoE and back in memory; load an MoE from a checkpoint."""

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor, nn

from ...kernels.base.check import check_known, checked
from ...layers.moe import MoE
from ..transformers import four_bits_of, known_gate
from .families import FAMILIES
from .family import Family, Piece
from .files import Checkpoint, CheckpointError
from .plan import read_record


def moe_from_huggingface(block: nn.Module) -> MoE:
    """Return an `MoE` that computes the same as a block of transformers and shares its memory.

    block: of transformers 5, and of a family that `convert` knows: MixtralSparseMoeBlock, for example,
        Qwen3MoeSparseMoeBlock, DeepseekV3MoE or GptOssMLP.

    The experts' and the router's weights are views of the block's, transposed (E, H, 2I) ones in gpt-oss.  A
    shared expert's gate and up projections are two tensors in the block and one here, which is a copy.  The
    parameters are new objects: make the optimizer anew.

    Raises TypeError for another class, ValueError if an `MoE` cannot compute what the block does.
    """
    families = {family.block_class: family for family in FAMILIES.values() if family.block_class}
    family = families.get(type(block).__name__)
    if family is None:
        raise TypeError(f"block is a {type(block).__name__}; known: {', '.join(families)}")
    packed = four_bits_of(block.experts, "down_proj")
    if packed is not None:
        kind = type(block).__name__
        raise ValueError(f"the experts of {kind} have {packed.bits} bits: convert first, then quantize")
    gate = known_gate(block.experts)
    if gate is None:
        raise ValueError(f"the experts of {type(block).__name__} have a gate of their own, which MoE has not")
    if getattr(block, "jitter_noise", 0):
        raise ValueError("block.jitter_noise is not 0: it moves what the experts see too")
    if getattr(block, "is_hash", False):
        raise ValueError("the block chooses experts by the token's id: give those to MoE as expert_ids")
    theirs = dict(block.state_dict())
    config = config_of(block, family)
    problems = family.differences(config)
    problems += [reason] if (reason := family.refuses(config)) else []
    if problems:
        raise ValueError(f"the block's configuration: {'; '.join(problems)}")
    kwargs = family.moe_kwargs(config) | dict(zip(("activation", "interleaved"), gate, strict=True))
    return new_moe(kwargs, ours_from(family.pieces(kwargs, fused=True), theirs.__getitem__)).train(
        block.training
    )


def config_of(block: nn.Module, family: Family) -> dict:
    """Return the settings that the block was built from, by the names of config.json."""
    router = getattr(block, family.routers[1].split(".")[0])
    settings = block.experts.config
    down = block.experts.down_proj.mT if block.experts.is_transposed else block.experts.down_proj
    E, inner, intermediate = down.shape
    config = {name: getattr(settings, name, value) for name, value in family.only.items()}
    further = family.scores[0], family.scale_key, family.correction_if, "topk_method"
    further += "shared_expert_combination_strategy", "swiglu_limit"
    config |= {name: getattr(settings, name) for name in further if name and hasattr(settings, name)}
    hidden = block.get_submodule(family.routers[1]).weight.shape[1]
    config |= {family.num_experts[0]: E, "hidden_size": hidden, family.width: intermediate}
    if family.latent and not isinstance(getattr(block, family.latent[0]), nn.Identity):
        config["moe_latent_size"] = inner
    config[family.top_k[0]] = router.top_k
    names = {"norm_topk_prob": "norm_topk_prob", "n_group": "num_group", "topk_group": "topk_group"}
    names["routed_scaling_factor"] = "routed_scaling_factor"
    config |= {key: getattr(router, name) for key, name in names.items() if hasattr(router, name)}
    if family.shared is not None:
        shared = getattr(block, family.shared.name, None)
        width = 0 if shared is None else shared.down_proj.weight.shape[1]
        config[family.shared.size] = width // intermediate if family.shared.counts else width
    return config


@checked
def state_dict_to_huggingface(moe: MoE, model_type: str) -> dict[str, Tensor]:
    """Return the state dict of transformers' block for an `MoE`: views, for `block.load_state_dict`.

    model_type: of a family that `convert` knows, mixtral or qwen3_moe, for example.  If the MoE has no shared
        expert, and the family's block always has one, its tensors of width 0 are there too.

    Raises ValueError for another model_type, and for an MoE whose tensors do not fit such a block.
    """
    known = [name for name, family in FAMILIES.items() if family.block_class]
    check_known("model_type", model_type, known)
    ours, experts, family = dict(moe.state_dict()), moe.experts, FAMILIES[model_type]
    kwargs = {"num_experts": moe.num_experts, "hidden": moe.hidden, "intermediate": experts.intermediate}
    kwargs["bias"] = model_type == "gpt_oss"
    biased = getattr(moe.router, "selection_bias", None) is not None
    kwargs["selection_bias"] = bool(family.correction) and (biased or not family.correction_if)
    if family.latent is not None and moe.to_latent is not None:
        kwargs["latent"] = moe.to_latent.out_features
    if family.shared is not None and moe.shared is not None:
        kwargs["shared_intermediate"] = moe.shared.down.in_features
    pieces = list(family.pieces(kwargs, fused=True))
    here = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    there = {piece.name: piece.shape for piece in pieces}
    if here != there or experts.interleaved != (model_type == "gpt_oss"):
        layout = f"{here}, interleaved={experts.interleaved}"
        raise ValueError(f"an MoE of {model_type} has {there}, but this one has {layout}")
    found = {part.name: part.from_ours(ours[piece.name]) for piece in pieces for part in piece.tensors}
    idle = family.idle(kwargs, fused=True) if family.shared is not None and family.shared.always else {}
    return found | {name: experts.down.new_zeros(shape) for name, shape in idle.items()}


@checked
def load_moe(folder: str | Path, layer: str) -> MoE:
    """The `MoE` of a layer, such as model.layers.3.mlp, of a checkpoint that `convert` has written.

    Raises CheckpointError if there is no such layer, or the checkpoint is damaged.
    """
    checkpoint = Checkpoint(folder)
    family, fused, kwargs, layers = read_record(checkpoint)
    if layer not in layers:
        raise CheckpointError(f"{folder}", [f"there is no layer {layer!r}; there are {', '.join(layers)}"])
    shapes = {f"{layer}.{piece.name}": tuple(piece.shape) for piece in family.pieces(kwargs, fused)}
    specs = {name: checkpoint.specs.get(name) for name in shapes}
    problems = [f"{name} is missing" for name, spec in specs.items() if spec is None]
    problems += [f"{name} is {spec.shape}; it should be {shapes[name]}" for name, spec in specs.items()
                 if spec is not None and spec.shape != shapes[name]]  # fmt: skip
    if problems:
        raise CheckpointError(f"{folder}", problems)
    state = {name.removeprefix(f"{layer}."): checkpoint.read(name).clone() for name in shapes}
    return new_moe(kwargs, state)


def new_moe(kwargs: dict, state: dict[str, Tensor]) -> MoE:
    """An MoE whose tensors are those of `state`, not copies."""
    moe = MoE(**kwargs, device="meta")
    moe.load_state_dict(state, assign=True)
    return moe


def ours_from(pieces: Iterable[Piece], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Our state_dict: a view of theirs where a piece is of one tensor, else a copy of several."""
    state = {}
    for piece in pieces:
        if len(piece.tensors) == 1:
            theirs = read(piece.tensors[0].name)
            state[piece.name] = piece.tensors[0].from_theirs(theirs).view(piece.shape)
            continue
        whole = None
        for part in piece.tensors:
            theirs = part.from_theirs(read(part.name))
            whole = theirs.new_empty(piece.shape) if whole is None else whole
            whole[part.place] = theirs
        state[piece.name] = whole
    return state
