"""Quantised checkpoints as a source: each quantised weight is read as the floating-point one it stands for.

The tensors of a weight (out, in) in the formats that can be read, by `quant_method` of config.json; an int32
has 8 numbers of 4 bits, the lowest bits first:

    fp8                 weight (out, in) float8, weight_scale_inv (out / 128, in / 128), rounded up
    gptq                qweight (in / 8, out) int32, qzeros (groups, out / 8) int32, scales (groups, out),
                        and the group of each input, g_idx (in,)
    awq                 qweight (in, out / 8) int32, qzeros (groups, out / 8) int32, scales (groups, out);
                        the 8 outputs are in the order 0, 2, 4, 6, 1, 3, 5, 7
    compressed-tensors  weight_packed (out, in / 8) int32, weight_scale (out, groups), weight_shape, and if
                        it has zero points weight_zero_point (out / 8, groups) int32: "pack-quantized"

In transformers' own format, FP8 experts are tensors (E, out, in), with gate_up_proj_scale_inv and
down_proj_scale_inv beside them.
"""

import math
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...layers.four_bit import AWQ_PLACES, GPTQ_ZEROS, SYMMETRIC, eight_codes
from .files import Checkpoint, CheckpointError, Spec

QUANTISATION = "quantization_config"
INNER = "text_config", "thinker_config"  # entries of config.json that may have it, or the dtype
DTYPES = {
    "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16),
    "float32": ("F32", torch.float32),
}  # fmt: skip
FLOAT8 = "F8_E4M3", "F8_E5M2"
STORED = {  # the dtypes that the tensors may have
    **dict.fromkeys(("qweight", "qzeros", "weight_packed", "weight_zero_point"), ("I32",)),
    **dict.fromkeys(("scales", "weight_scale", "weight_scale_inv"), ("F32", "BF16", "F16", "F8_E8M0")),
    "weight": FLOAT8, "weight_shape": ("I64", "I32"), "g_idx": ("I32", "I64"),
}  # fmt: skip
BLOCK = [128, 128]


Shapes = dict[str, tuple[int, ...]]


class Format(NamedTuple):
    """How the tensors of a weight are called, and what they stand for."""

    first: str  # the end of the key of the tensor that there is one of for each weight
    rest: tuple[str, ...]  # and those of the others, which take its place
    optional: tuple[str, ...]
    weight: Callable[[dict, dict[str, Tensor]], Tensor]  # of the settings and the tensors, by these ends
    # of the settings and the tensors' shapes, the weight's shape, and those that the tensors should have
    shapes: Callable[[dict, Shapes, Callable[[], Tensor]], tuple[tuple[int, ...], Shapes]]


def fp8_weight(settings: dict, parts: dict[str, Tensor]) -> Tensor:
    weight, scales = parts["weight"].float(), parts["weight_scale_inv"].float()
    for dim, size in zip((-2, -1), settings["weight_block_size"], strict=True):
        rows = weight.shape[dim]
        scales = scales.repeat_interleave(min(size, rows), dim).narrow(dim, 0, rows)
    return weight * scales


def fp8_shapes(settings: dict, found: Shapes, read: Callable) -> tuple[tuple[int, ...], Shapes]:
    *outer, out, width = found["weight"]
    blocks = (math.ceil(n / b) for n, b in zip((out, width), settings["weight_block_size"], strict=True))
    return (*outer, out, width), {"weight_scale_inv": (*outer, *blocks)}


def gptq_weight(settings: dict, parts: dict[str, Tensor]) -> Tensor:
    codes = eight_codes(parts["qweight"].T).T.float()  # (in, out)
    stored = eight_codes(parts["qzeros"])[:, : codes.shape[1]]
    less = GPTQ_ZEROS[settings["checkpoint_format"]]
    other = next(name for name in GPTQ_ZEROS if name != settings["checkpoint_format"])
    if (stored == SYMMETRIC - GPTQ_ZEROS[other]).all():
        text = f"its qzeros are those of a symmetric weight in {other!r}, each the zero point {SYMMETRIC}"
        raise ValueError(f"{text}: if it is one, set checkpoint_format to {other!r} in config.json")
    group = parts["g_idx"].long() if "g_idx" in parts else torch.arange(len(codes)) // settings["group_size"]
    if not ((group >= 0) & (group < len(stored))).all():
        raise ValueError(f"its g_idx has numbers outside of 0 to {len(stored) - 1}")
    return ((codes - (stored + less & 15)[group]) * parts["scales"].float()[group]).T


def awq_weight(settings: dict, parts: dict[str, Tensor]) -> Tensor:
    codes, zeros = (
        eight_codes(parts[name]).unflatten(1, (-1, 8))[..., AWQ_PLACES].flatten(1).float()
        for name in ("qweight", "qzeros")
    )
    each = min(settings["group_size"], len(codes))
    zeros, scales = (t.repeat_interleave(each, 0)[: len(codes)] for t in (zeros, parts["scales"].float()))
    return ((codes - zeros) * scales).T


def columns_shapes(settings: dict, found: Shapes, read: Callable) -> tuple[tuple[int, ...], Shapes]:
    """Return the shapes for GPTQ, which packs inputs, and for AWQ, which packs outputs."""
    width, out = found["qweight"]
    width, out = (width, 8 * out) if settings["quant_method"] == "awq" else (8 * width, out)
    groups = math.ceil(width / settings["group_size"])
    return (out, width), {"qzeros": (groups, math.ceil(out / 8)), "scales": (groups, out), "g_idx": (width,)}


def packed_weight(settings: dict, parts: dict[str, Tensor]) -> Tensor:
    out, width = parts["weight_shape"].tolist()
    codes, scales = eight_codes(parts["weight_packed"])[:, :width].float(), parts["weight_scale"].float()
    zeros = torch.full_like(scales, SYMMETRIC)
    if "weight_zero_point" in parts:
        zeros = eight_codes(parts["weight_zero_point"].T).T[:out].float()
    each = min(settings["group_size"], width)
    zeros, scales = (t.repeat_interleave(each, 1)[:, :width] for t in (zeros, scales))
    return (codes - zeros) * scales


def packed_shapes(settings: dict, found: Shapes, read: Callable) -> tuple[tuple[int, ...], Shapes]:
    out, width = read().tolist()
    groups = math.ceil(width / settings["group_size"])
    wanted = {"weight_packed": (out, math.ceil(width / 8)), "weight_scale": (out, groups)}
    return (out, width), wanted | {"weight_zero_point": (math.ceil(out / 8), groups)}


COLUMNS = "qzeros", "scales"
FORMATS = {
    "fp8": Format("weight_scale_inv", ("weight",), (), fp8_weight, fp8_shapes),
    "gptq": Format("qweight", COLUMNS, ("g_idx",), gptq_weight, columns_shapes),
    "awq": Format("qweight", COLUMNS, (), awq_weight, columns_shapes),
    "compressed-tensors": Format(
        "weight_packed", ("weight_scale", "weight_shape"), ("weight_zero_point",), packed_weight,
        packed_shapes,
    ),
}  # fmt: skip


class Dequantised(Checkpoint):
    """A quantised checkpoint as if it had been saved dequantised, in the dtype of config.json.

    Raises CheckpointError if tensors of a weight are missing or do not fit each other.
    """

    def __init__(self, source: Checkpoint, settings: dict):
        vars(self).update(vars(source))
        self.settings, self.format = settings, FORMATS[settings["quant_method"]]
        self.stored, self.specs = source.specs, {}
        self.config = {name: without(value) for name, value in source.config.items() if name != QUANTISATION}
        name = found_in(source.config, "dtype") or found_in(source.config, "torch_dtype") or "bfloat16"
        self.dtype = DTYPES.get(str(name).removeprefix("torch."), DTYPES["bfloat16"])
        self.parts: dict[str, dict[str, str]] = {}  # of each weight, by the ends of their keys
        problems: list[str] = []
        for key in self.stored:
            if (parts := self.parts_of(key, problems)) is not None:
                self.parts[parts.pop("")] = parts
        taken = {key for parts in self.parts.values() for key in parts.values()}
        self.specs = {key: spec for key, spec in self.stored.items() if key not in taken}
        loose = [key for key, spec in self.specs.items() if spec.dtype in FLOAT8]
        problems += [f"{key} is {self.specs[key].dtype}, but has no scales of blocks" for key in loose]
        if not problems:
            shapes = {key: self.shape_of(parts, problems) for key, parts in self.parts.items()}
            self.specs |= {key: Spec(self.dtype[0], shape) for key, shape in shapes.items()}
        if problems:
            raise CheckpointError(f"{self.folder}", problems)

    def parts_of(self, key: str, problems: list[str]) -> dict[str, str] | None:
        """Return the keys of the weight whose first tensor is `key`, and as "" the weight's own key."""
        first, rest, optional = self.format[:3]
        stem = key.removesuffix(first)
        if first == "weight_scale_inv" and key.endswith(("gate_up_proj_scale_inv", "down_proj_scale_inv")):
            weight = key.removesuffix("_scale_inv")
            parts = {"weight": weight, first: key, "": weight}
        elif not key.endswith(f".{first}"):
            return None
        else:
            parts = {name: stem + name for name in (first, *rest)} | {"": f"{stem}weight"}
            # GPTQ's groups are in no order then, and of compressed-tensors all weights have zero points
            needed = True in (self.settings.get("desc_act"), self.settings.get("asymmetric"))
            parts |= {name: stem + name for name in optional if needed or stem + name in self.stored}
        missing = [part for name, part in parts.items() if name and part not in self.stored]
        problems += [f"{part} is missing beside {key}" for part in missing]
        return None if missing else parts

    def shape_of(self, parts: dict[str, str], problems: list[str]) -> tuple[int, ...]:
        """Return the shape of a weight; add a problem for each of its tensors that does not fit."""
        specs = {name: self.stored[key] for name, key in parts.items()}
        read = partial(super().read, parts.get("weight_shape", ""))
        try:
            shape, wanted = self.format.shapes(self.settings, {n: s.shape for n, s in specs.items()}, read)
        except (TypeError, ValueError):  # of too many axes, or too few
            shape, wanted = (), {self.format.first: "of a matrix"}
        if len(shape) == 3 and parts["weight"].endswith("gate_up_proj"):
            half, block = shape[1] // 2, self.settings["weight_block_size"][0]
            if half % block > block // 2:  # as many blocks whether gate and up have their own or share one
                problems.append(
                    f"{parts['weight']} has {half} rows of gates, and whether the first rows of up have the "
                    f"scales of the last gates is not known: a multiple of {block} rows is needed"
                )
        for name, spec in specs.items():
            if name in wanted and spec.shape != wanted[name]:
                problems.append(f"{parts[name]} is {spec.shape}; it should be {wanted[name]}")
            if spec.dtype not in STORED[name]:
                problems.append(f"{parts[name]} is {spec.dtype}; known: {', '.join(STORED[name])}")
        return shape

    def read(self, key: str, place: tuple = ()) -> Tensor:
        """Return a tensor, or the part of it at `place`, dequantised if it is a quantised weight."""
        if key not in self.parts:
            return super().read(key, place)
        parts, expert = self.parts[key], ()
        if place and len(self.specs[key].shape) == 3 and isinstance(place[0], int):
            expert, place = place[:1], place[1:]
        found = {name: super(Dequantised, self).read(part, expert) for name, part in parts.items()}
        try:
            weight = self.format.weight(self.settings, found).to(self.dtype[1])
            if not weight.isfinite().all():
                raise ValueError(f"it has numbers that are not finite in {self.dtype[1]}")
        except ValueError as error:
            raise CheckpointError(f"{self.folder}", [f"{key} cannot be dequantised: {error}"]) from error
        return weight[place] if place else weight


def dequantised(source: Checkpoint) -> Checkpoint:
    """Return `source`, or if it is quantised in a format that is known, one that reads its weights.

    Raises CheckpointError for other formats of these methods.  Other methods are left to `check_block`, which
    names the keys.
    """
    settings = found_in(source.config, QUANTISATION)
    if not isinstance(settings, dict) or settings.get("quant_method") not in list(FORMATS):
        return source
    if problems := CHECKS[settings["quant_method"]](settings := dict(settings)):
        raise CheckpointError(f"{source.folder}", [f"{QUANTISATION}: {problem}" for problem in problems])
    return Dequantised(source, settings)


def found_in(config: dict, name: str) -> object:
    """Return an entry of config.json, or of the part of it that describes the language model."""
    parts = [config, *(config[inner] for inner in INNER if isinstance(config.get(inner), dict))]
    return next((part[name] for part in parts if part.get(name) is not None), None)


def without(value: object) -> object:
    """Return a value of config.json without what it says of the quantisation."""
    if not isinstance(value, dict):
        return value
    return {name: without(inner) for name, inner in value.items() if name != QUANTISATION}


def check_fp8(settings: dict) -> list[str]:
    block = settings.setdefault("weight_block_size", BLOCK)
    good = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    return [] if good else [f"weight_block_size is {block!r}; only blocks, such as {BLOCK}, are known"]


def check_gptq(settings: dict) -> list[str]:
    found = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    settings["checkpoint_format"], known = found, ", ".join(GPTQ_ZEROS)
    wrong = [] if found in list(GPTQ_ZEROS) else [f"checkpoint_format is {found!r}; known: {known}"]
    return wrong + check_bits(settings)


def check_awq(settings: dict) -> list[str]:
    wrong = []
    version = settings.get("version") or settings.get("format") or "gemm"
    if str(version).lower() != "gemm":
        wrong.append(f"version is {version!r}; only 'gemm' is known")
    if settings.get("zero_point") is False:
        wrong.append("zero_point is False; only True is known")
    return wrong + check_bits(settings)


def check_bits(settings: dict) -> list[str]:
    """Check that there are 4 bits and a size of groups; -1 is one group."""
    bits, each = settings.get("bits", settings.get("w_bit", 4)), settings.get("group_size", 128)
    wrong = [] if bits == 4 else [f"bits is {bits!r}; only 4 is known"]
    if type(each) is not int or not (each > 0 or each == -1):
        return [*wrong, f"group_size is {each!r}; it should be a whole number above 0, or -1"]
    settings["group_size"] = sys.maxsize if each == -1 else each
    return wrong


def check_compressed(settings: dict) -> list[str]:
    """Check that all groups of settings agree, on integers of 4 bits with a scale for each group or row."""
    if settings.get("format") != "pack-quantized":
        return [f"format is {settings.get('format')!r}; only 'pack-quantized' is known"]
    groups = settings.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    keys = "num_bits", "type", "strategy", "group_size", "actorder"
    kinds = {tuple(str(w.get(key)) for key in keys) for w in weights if isinstance(w, dict)}
    if len(kinds) != 1:
        return [f"config_groups has {len(kinds)} kinds of weights; only one is known"]
    bits, kind, strategy, each, order = next(iter(kinds))
    known = (bits, kind) == ("4", "int")
    wrong = [] if known else [f"weights are {kind} of {bits} bits; only int of 4 is known"]
    sized = re.fullmatch("[1-9][0-9]{0,8}", each)
    if strategy not in ("group", "channel") or (strategy == "group" and not sized):
        wrong.append(f"strategy is {strategy!r} with group_size {each}; known: group, channel")
    if order == "group":
        wrong.append("actorder is 'group', which permutes the inputs; known: None, 'weight' and 'static'")
    settings["group_size"] = int(each) if strategy == "group" and sized else sys.maxsize
    settings["asymmetric"] = all(w.get("symmetric") is False for w in weights if isinstance(w, dict))
    return wrong


CHECKS = {"fp8": check_fp8, "gptq": check_gptq, "awq": check_awq, "compressed-tensors": check_compressed}
