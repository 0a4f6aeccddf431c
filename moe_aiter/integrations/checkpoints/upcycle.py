"""Convert a dense checkpoint to one with experts, each of which starts as a copy of the dense MLP.

Komatsuzaki et al. 2022, "Sparse Upcycling", arXiv 2212.05055.  The router's weights are random.  The routing
weights of a token are renormalised to sum to 1.  So without noise, whichever experts the router chooses, the
layer computes the dense MLP until training makes the copies different.
"""

import math
import re
import zlib
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.base.check import check_known, check_not_negative, check_sizes, checked
from .blocks import new_moe, ours_from
from .convert import LAYOUTS, SHARD, Progress, Report, read_moe, write_converted
from .families import FAMILIES
from .family import OURS, Family, Part
from .files import Checkpoint, CheckpointError, NewTensor, Spec, check_target
from .formula import TOKENS, mlp, relative, tolerance
from .plan import Plan, check_block, check_kwargs, finish, new_record

MATRICES = "gate_proj", "up_proj", "down_proj"
# dense model_type: the family it becomes, and what transformers assumes of the dense model where its
# config.json is silent, which of the family would be something else
DENSE = {
    "llama": ("mixtral", {"rms_norm_eps": 1e-6, "sliding_window": None, "max_position_embeddings": 2048}),
    "mistral": ("mixtral", {"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen3": ("qwen3_moe", {"head_dim": 128, "num_key_value_heads": 32}),
}
KEPT = {  # in a layer and outside of its experts, what a family has
    "mixtral": r"self_attn\.[qkvo]_proj\.weight",
    "qwen3_moe": r"self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)",
}
THETA = 10000.0  # of rotary embeddings, where nothing is said; Mixtral's own is another


@checked
def upcycle(
    source: str | Path, target: str | Path, num_experts: int, top_k: int, *, to: str = "moe_aiter",
    noise: float = 0.0, router_std: float = 0.02, seed: int = 0, shard_bytes: int = SHARD, check: bool = True,
    progress: Progress | None = None,
) -> Report:  # fmt: skip
    """Make every MLP of the dense Llama, Mistral or Qwen3 checkpoint in `source` an MoE of its copies.

    to="huggingface" writes a checkpoint that transformers loads, of Mixtral from Llama and Mistral and of
    Qwen3-MoE from Qwen3; to="moe_aiter" the same in our layout.  Router weights are normal with the standard
    deviation `router_std`.  `noise` adds to each weight of an expert a normal number, that many standard
    deviations of its matrix wide.  Both come from `seed` and the tensor's name.

    `check` holds each MoE that was written against the dense MLP that was read.  With `noise` they are not
    the same function: the report says how far apart they are, and no limit holds.

    Raises as `convert` does.
    """
    check_known("to", to, LAYOUTS[:2])  # "huggingface" has the keys of the hub here
    check_sizes(num_experts=num_experts, top_k=top_k)
    check_not_negative(noise=noise, router_std=router_std)
    target = check_target(target, shard_bytes, progress)
    found = Checkpoint(source)
    grow = partial(make_piece, found, noise=noise, router_std=router_std, seed=seed)
    plan = plan_to_experts(found, num_experts, top_k, to, grow)

    def compare(new: Checkpoint, layer: str) -> tuple[float, float]:
        if to == "moe_aiter":
            moe = read_moe(new, layer, plan)
        else:
            pieces = plan.family.pieces(plan.kwargs, plan.fused)
            moe = new_moe(plan.kwargs, ours_from(pieces, plan.reader(new, layer))).eval()
        x = torch.randn(TOKENS, moe.hidden, generator=torch.Generator().manual_seed(0))
        x = x.to(moe.experts.down.dtype)
        with torch.no_grad():
            weights = (found.read(f"{layer}.{matrix}.weight") for matrix in MATRICES)
            distance = relative(moe(x), mlp(found.config, x.float(), *weights))
        return distance, math.inf if noise else tolerance(x.dtype)

    return write_converted(found, target, plan, compare if check else None, shard_bytes, progress)


def plan_to_experts(source: Checkpoint, num_experts: int, top_k: int, to: str, grow: partial) -> Plan:
    config, family, problems = moe_config(source, num_experts, top_k)
    if not problems:
        kwargs = family.moe_kwargs(config)
        check_kwargs(kwargs, problems)
    if problems:
        raise CheckpointError(f"{source.folder}", problems)
    H, width = kwargs["hidden"], kwargs["intermediate"]
    expected = {f"{matrix}.weight": (width, H) for matrix in MATRICES[:2]}
    expected[f"{MATRICES[2]}.weight"] = (H, width)
    prefix = "model." if any(key.startswith("model.layers.") for key in source.specs) else ""
    layers = [f"{prefix}layers.{n}.{OURS}" for n in range(config["num_hidden_layers"])]
    outputs, used, pieces = [], set(), list(family.pieces(kwargs, fused=False))
    for layer in layers:
        specs = check_block(source, layer.removesuffix(OURS), f"{layer}.", expected, problems)
        used |= specs.keys()
        if problems:
            continue
        dtype = specs[f"{layer}.down_proj.weight"].dtype
        block = f"{layer.removesuffix(OURS)}{family.blocks[False]}"
        for piece in pieces:
            made = [partial(grow, layer, family, part) for part in piece.tensors]
            if to == "moe_aiter":
                outputs.append(NewTensor(f"{layer}.{piece.name}", Spec(dtype, piece.shape), tuple(made)))
            else:
                outputs += [
                    NewTensor(f"{block}.{part.name}", Spec(dtype, part.shape), (make,))
                    for part, make in zip(piece.tensors, made, strict=True)
                ]
    dense_keys = re.compile(
        r"(model\.)?((embed_tokens|norm|lm_head)\.weight"
        rf"|layers\.\d+\.((input|post_attention)_layernorm\.weight|{KEPT[family.name]}))"
    )
    rest = (key for key in source.specs if key not in used and not dense_keys.fullmatch(key))
    problems += [f"{key} is unknown to {family.name}" for key in rest]
    if to == "moe_aiter":
        config = config | new_record(family, False, layers, kwargs)
    return finish(source, problems, Plan(outputs, config, family, False, kwargs, layers), used)


def moe_config(source: Checkpoint, num_experts: int, top_k: int) -> tuple[dict, Family, list[str]]:
    """The config.json of the MoE model, and what stands against it."""
    kind = source.config.get("model_type")
    if kind not in list(DENSE):
        problem = f"model_type is {kind!r}; dense ones that are known: {', '.join(DENSE)}"
        raise CheckpointError(f"{source.folder}", [problem])
    name, defaults = DENSE[kind]
    family, config = FAMILIES[name], defaults | source.config
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    if not {"rope_parameters", "rope_theta"} & config.keys():
        config["rope_theta"] = THETA
    config |= {"model_type": name, "architectures": [family.architecture]}
    config |= {family.num_experts[0]: num_experts, "num_experts_per_tok": top_k}
    if name == "qwen3_moe":
        config |= {"moe_intermediate_size": config.get("intermediate_size"), "norm_topk_prob": True}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    problems = family.problems(config)
    if config.get("use_sliding_window"):
        problems.append("use_sliding_window is set, which Qwen3-MoE understands otherwise")
    return config, family, problems


def make_piece(
    source: Checkpoint, layer: str, family: Family, part: Part, *, noise: float, router_std: float, seed: int
) -> Tensor:
    """The tensor `part` of a block: a matrix of an expert, or the router's."""
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(f"{layer}.{part.name}".encode()))
    dense = dict(zip(family.matrices, MATRICES, strict=True))
    if not part.name.startswith("experts."):
        like = source.read(f"{layer}.down_proj.weight")
        return (router_std * torch.randn(part.shape, generator=generator)).to(like.dtype)
    weight = source.read(f"{layer}.{dense[part.name.split('.')[2]]}.weight")
    if not noise:
        return weight
    moved = torch.randn(part.shape, generator=generator) * noise * weight.float().std()
    return (weight.float() + moved).to(weight.dtype)
