"""Decide for every key of a checkpoint what it becomes, before anything is written."""

import re
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ...layers.moe import MoE
from .families import family_of, from_json, to_json
from .family import MOST, OURS, Family, Part, Piece
from .files import Checkpoint, CheckpointError, NewTensor, Spec

RECORD = "moe_aiter"  # in config.json: what was converted
BLOCK = r"(?:mlp|block_sparse_moe|mixer|feed_forward|ffn|moe|share_expert)\..+"
PREFIX = r"(?:thinker\.)?(?:model\.)?(?:language_model\.)?|backbone\."
LAYER = re.compile(rf"(({PREFIX})layers\.([0-9]{{1,9}})\.){BLOCK}")
EXPERT = re.compile(
    r"\b(experts|shared_experts?|share_expert|shared_expert_gate|block_sparse_moe|moe"
    r"|(mlp|mixer|feed_forward|ffn)\.(gate|router|moe_statics))\."
)
# beside the layers, what predicts further tokens, and Qwen-Omni's model that speaks; it stays as it is
FURTHER = "mtp.", "model.mtp_", "model.mtp.", "talker."
FLOAT32 = re.compile(  # may be, in a 16-bit model
    r"(?<!shared)\.(gate(\.wg)?|router(\.layer|\.classifier)?)\.weight$"
)
BIASES = "e_score_correction_bias", "selection_bias", "expert_bias", "router_bias", ".gate.bias"
QUANTISED = re.compile(
    r"(_blocks|_scales|_scale_inv|\.scales?|\.weight_(scale|packed)|\.qweight|\.qzeros|\.absmax)$"
)
DTYPES = ("F32", "BF16", "F16")
ADVICE = "save it dequantised, in bfloat16 say, and convert that"


class Plan(NamedTuple):
    """A conversion: the tensors to write, and what both sides are."""

    outputs: list[NewTensor]
    config: dict  # of the target
    family: Family
    fused: bool  # whether theirs are
    kwargs: dict  # of each MoE
    layers: list[str]  # the names of our modules, model.layers.3.mlp
    converted: int = 0  # keys of the source
    copied: int = 0
    kept: tuple[str, ...] = ()  # the names of layers with experts that stay as they are
    rename: Callable[[str], str] = str  # theirs, from the keys that they and ours have otherwise

    def reader(self, checkpoint: Checkpoint, layer: str) -> Callable[..., Tensor]:
        """Return a function that reads a tensor of their module by its name in there, or a place of it."""
        block = self.rename(f"{layer.removesuffix(OURS)}{self.family.prefix(self.fused)}")
        return lambda name, place=(): checkpoint.read(f"{block}{name}", place)


def plan_to_ours(source: Checkpoint) -> Plan:
    """Raises CheckpointError with all that is missing, extra, misshapen, of a mixed dtype or quantised."""
    config = source.config
    if RECORD in config:
        raise CheckpointError(f"{source.folder}", ["it has the layout of moe_aiter already"])
    family = family_of(config)
    settings = family.settings(config)
    problems = family.problems(settings)
    if problems:
        raise CheckpointError(f"{source.folder}", problems)
    kwargs = family.moe_kwargs(settings)
    check_kwargs(kwargs, problems)
    fused = is_fused(source, family, kwargs)
    pieces = list(family.pieces(kwargs, fused))
    expected = {part.name: part.shape for piece in pieces for part in piece.tensors}
    outputs, layers, used, idle = [], [], set(), idle_tensors(source, family, fused, kwargs)
    for stem, sparse in sparse_layers(source, family, problems).items():
        block = f"{stem}{family.prefix(fused)}"
        specs = check_block(source, stem, block, expected, problems, idle, required=sparse)
        used |= specs.keys()
        if specs:
            layers.append(f"{stem}{OURS}")
        if specs and not problems:
            for piece in pieces:
                dtype = specs[block + piece.tensors[0].name].dtype
                made = tuple(reads_of(source, block, piece))
                outputs.append(NewTensor(f"{stem}{OURS}.{piece.name}", Spec(dtype, piece.shape), made))
    kept = check_rest(source, family, used | idle, problems)
    config = config | new_record(family, fused, layers, kwargs)
    return finish(source, problems, Plan(outputs, config, family, fused, kwargs, layers, kept=kept), used)


def plan_to_theirs(source: Checkpoint, hub: bool = False) -> Plan:
    """The way back, or to the keys of the hub.  Raises CheckpointError as `plan_to_ours` does."""
    config = dict(source.config)
    family, fused, kwargs, layers = record = read_record(source)
    fused = family.always_fused if hub else fused
    del config[RECORD]
    pieces = list(family.pieces(kwargs, fused))
    expected = {piece.name: piece.shape for piece in pieces}
    settings, outputs, used, idle = family.settings(config), [], set(), idle_tensors(source, *record[:3])
    problems = family.problems(settings)
    if not problems:  # they may have changed since
        check_kwargs(family.moe_kwargs(settings), problems)
    if hub and family.renames and record[1]:
        text = "transformers gave all keys of this checkpoint names of its own"
        problems.append(f"{text}: save it with save_original_format=True, and convert that")
    if hub:
        lacks = (name for name in family.loaders_need if settings.get(name) is None)
        problems += [f"config.json has no {name}, which vLLM needs: add it" for name in lacks]
    for layer in layers:
        stem, block = layer.removesuffix(OURS), f"{layer}."
        theirs = f"{stem}{family.prefix(fused)}"
        specs = check_block(source, stem, block, expected, problems, idle)
        used |= specs.keys()
        if not problems:
            for piece in pieces:
                dtype = specs[block + piece.name].dtype
                for part in piece.tensors:
                    made = tuple(reads(source, block + piece.name, part, part.place))
                    outputs.append(NewTensor(theirs + part.name, Spec(dtype, part.shape), made))
    kept = check_rest(source, family, used | idle, problems)
    plan = finish(source, problems, Plan(outputs, config, family, fused, kwargs, layers, kept=kept), used)
    rename = family.hub_name if hub and record[1] else str
    outputs = [output._replace(name=rename(output.name)) for output in plan.outputs]
    return plan._replace(outputs=outputs, rename=rename)


def check_kwargs(kwargs: dict, problems: list[str]) -> None:
    """Sizes that no MoE can have, such as more choices than experts."""
    try:
        MoE(**kwargs, device="meta")
    except (TypeError, ValueError, RuntimeError) as error:  # the last from sizes whose product overflows
        problems.append(f"config.json: {error}")


def new_record(family: Family, fused: bool, layers: list[str], kwargs: dict) -> dict:
    """Return the entry of config.json that `read_record` reads."""
    moe = to_json(kwargs)
    return {RECORD: {"version": 1, "family": family.name, "fused": fused, "layers": layers, "moe": moe}}


def read_record(checkpoint: Checkpoint) -> tuple[Family, bool, dict, list[str]]:
    """Return what config.json says about a checkpoint in our layout."""
    record = checkpoint.config.get(RECORD)
    where = f"{checkpoint.folder}"
    if record is None:
        raise CheckpointError(where, [f"config.json has no {RECORD!r}: it was not converted by moe_aiter"])
    try:
        if record["version"] != 1:
            raise ValueError(f"version {record['version']!r}")
        family, kwargs = family_of({"model_type": record["family"]}), from_json(record["moe"])
        MoE(**kwargs, device="meta")
        if kwargs["num_experts"] > MOST:
            raise ValueError(f"num_experts is {kwargs['num_experts']}")
        for _ in family.pieces(kwargs, bool(record["fused"])):  # raises for what the family has not
            pass
        return family, bool(record["fused"]), kwargs, list(map(str, record["layers"]))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        problem = f"config.json: {RECORD!r} is damaged: {type(error).__name__}: {error}"
        raise CheckpointError(where, [problem]) from error


def sparse_layers(source: Checkpoint, family: Family, problems: list[str]) -> dict[str, bool]:
    """The stems of the layers that should have experts, or may: model.layers.3. -> whether it must."""
    matches = [m for m in map(LAYER.fullmatch, source.specs) if m]
    settings, prefix = family.settings(source.config), max((m[2] for m in matches), key=len, default="")
    if (count := family.num_layers(settings)) > len(source.specs):  # before work for each of them
        text = f"config.json has {count} layers, but there are only {len(source.specs)} tensors"
        raise CheckpointError(f"{source.folder}", [text])
    stems = {f"{prefix}layers.{n}.": n for n in range(count)}
    stems |= {m[1]: int(m[3]) for m in sorted(matches, key=lambda m: int(m[3]))}
    return {
        stem: bool(sparse)
        for stem, n in stems.items()
        if (sparse := family.is_sparse(settings, n)) is not False
    }


def idle_tensors(source: Checkpoint, family: Family, fused: bool, kwargs: dict) -> set[str]:
    """Return the keys of shared experts of width 0, which transformers saves: they stay as they are."""
    shapes = {family.prefix(fused) + name: shape for name, shape in family.idle(kwargs, fused).items()}
    layers = ((key, re.match(rf"({PREFIX})layers\.[0-9]{{1,9}}\.", key)) for key in source.specs)
    return {key for key, m in layers if m and source.specs[key].shape == shapes.get(key[m.end() :])}


def check_block(
    source: Checkpoint, stem: str, block: str, expected: dict, problems: list[str],
    idle: Set[str] = frozenset(), required: bool = True,
) -> dict[str, Spec]:  # fmt: skip
    """Hold the keys of a layer's MoE, but not `idle` ones, against `expected`; return their specs by key."""
    pattern = re.compile(re.escape(stem) + BLOCK)
    mine = (key for key in source.specs if key.startswith(stem) and pattern.match(key) and key not in idle)
    there = {key: source.specs[key] for key in mine}
    quantised = [key for key in there if QUANTISED.search(key)]
    if quantised:
        problems += [f"{key} belongs to quantised weights: {ADVICE}" for key in quantised]
        return there
    wanted = {block + name: tuple(shape) for name, shape in expected.items()}
    if there:
        problems += [f"{key} is missing" for key in wanted if key not in there]
    elif required:
        problems.append(f"{block[:-1]} has none of its {len(expected)} tensors")
    problems += [f"{key} is unknown in the MLP of a layer" for key in there if key not in wanted]
    by_dtype: dict[str, list[str]] = {}
    for key, spec in there.items():
        if key in wanted and spec.shape != wanted[key]:
            problems.append(f"{key} is {spec.shape}; it should be {wanted[key]}")
        if key in wanted and spec.dtype not in DTYPES:
            problems.append(f"{key} is {spec.dtype}; known: {', '.join(DTYPES)}; {ADVICE}")
        if key.endswith(BIASES):  # float32 in any model
            continue
        if spec.dtype != "F32" or not FLOAT32.search(key):
            by_dtype.setdefault(spec.dtype, []).append(key)
    if len(by_dtype) > 1:
        *fewer, (most, _) = sorted(by_dtype.items(), key=lambda item: len(item[1]))
        problems += [f"{key} is {dtype}, but most of {block[:-1]} is {most}" for dtype, keys in fewer
                     for key in keys]  # fmt: skip
    return there


def check_rest(source: Checkpoint, family: Family, used: set[str], problems: list[str]) -> tuple[str, ...]:
    """Keys of experts that no layer claims: in a dense layer, say, or past the last.

    Returns the layers whose experts are of a kind that stays as it is.
    """
    settings, kept = family.settings(source.config), {}
    for key in source.specs:
        if key in used or not EXPERT.search(key) or key.startswith(FURTHER):
            continue
        layer = LAYER.fullmatch(key)
        if layer and family.stays(settings, int(layer[3])):
            kept[layer[1].removesuffix(".")] = True
        else:
            problems.append(f"{key} belongs to experts, where config.json has none")
    return tuple(kept)


def finish(source: Checkpoint, problems: list[str], plan: Plan, used: set[str]) -> Plan:
    if not plan.layers and not problems:
        problems = ["no layer has experts"]
    rest = [key for key in source.specs if key not in used]
    written = {output.name for output in plan.outputs}
    problems = problems + [f"{key} would be written twice" for key in rest if key in written]
    if problems:
        raise CheckpointError(f"{source.folder}", problems)
    outputs = plan.outputs + [NewTensor(key, source.specs[key], (partial(source.read, key),)) for key in rest]
    return plan._replace(outputs=outputs, converted=len(used), copied=len(rest))


def reads(source: Checkpoint, key: str, part: Part, place: tuple = ()) -> list[Callable]:
    """Return functions that read `part` from a tensor or a place of it, stacked experts one by one."""
    if part.transposed:
        return [lambda e=e: source.read(key, (e,)).mT for e in range(part.shape[0])]
    if place[:1] == (slice(None),) or (not place and len(part.shape) == 3):  # a dequantised one has no pages
        return [partial(source.read, key, (e, *place[1:])) for e in range(part.shape[0])]
    return [partial(source.read, key, place)]


def reads_of(source: Checkpoint, block: str, piece: Piece) -> Iterator[Callable]:
    """Return functions that read theirs in the order of our memory."""
    if piece.alternates:
        for e in range(piece.shape[0]):
            yield from (partial(source.read, block + part.name, (e,)) for part in piece.tensors)
        return
    for part in piece.tensors:
        yield from reads(source, block + part.name, part)


def is_fused(source: Checkpoint, family: Family, kwargs: dict) -> bool:
    """Whether theirs is transformers' own format."""
    stacked = [f".{family.prefix(True)}{name}" for name in family.stacked_of(True)]
    found = [key for key in source.specs if key.endswith(stacked[0]) and not key.startswith(FURTHER)]
    if family.always_fused or not found or not family.transposed:
        return bool(family.always_fused or found)
    shapes = [part.shape for piece in family.expert_pieces(*sizes(kwargs), True) for part in piece.tensors]
    keys = (found[0], found[0].removesuffix(stacked[0]) + stacked[1])
    return all(source.specs[key].shape == shape for key, shape in zip(keys, shapes, strict=True)
               if key in source.specs)  # fmt: skip


def sizes(kwargs: dict) -> tuple[int, int, int]:
    return kwargs["num_experts"], kwargs["hidden"], kwargs["intermediate"]
