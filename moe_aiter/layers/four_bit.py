"""Frozen experts of 4 bits: from `quantize(model, "nf4")`, or from weights that others have quantised."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.base.check import (
    cast_as_linear,
    check_parameter_dtype,
    check_plan,
    check_shape,
    check_whole_shape,
    checked,
)
from ..kernels.quantize.four_bit import (
    FORMATS,
    NESTED,
    FourBit,
    blocks_of,
    check_four_bit,
    packed_codes,
    quantized,
    single_scales,
    unpacked,
)
from ..private_api import own_parameters
from ..routing.plan import RoutePlan
from .by_step import Projection, experts_by_step
from .experts import SteppedExperts, Weights, WithOptions, local_part
from .loading import Loading

PARTS = "packed", "scales", "nested", "offset", "table"
AWQ_PLACES = 0, 4, 1, 5, 2, 6, 3, 7  # where AutoAWQ keeps each of 8 outputs, in the order of the bits
GPTQ_ZEROS = {"gptq": 1, "gptq_v2": 0}  # by `checkpoint_format`, how much less than a zero point is stored
SYMMETRIC = 8  # the zero point of a symmetric weight, in every group
STATE = "quant_state.bitsandbytes__nf4"  # JSON in a tensor of bytes


class FourBitWeight(Loading):
    """A frozen weight (E, out, in) of 4 bits: its codes and scales as buffers.

    `format`: "nf4", "mxfp4" or "int4".  Buffers: packed (E, out, in / 2) uint8, two codes in a byte; scales
    (E, out, in / block), for blocks of 64 (nf4), 32 (mxfp4) or 128 (int4); nested, offset and table, which
    only some formats have.  "fp8" has 8 bits: packed (E, out, in) float8_e4m3fn and scales (E, out / 128,
    in / 128) float32, rounded up.  `dtype` is what tiles of it are dequantised to, that of the weight it was
    made of; `.to(dtype)` changes it and no buffer.  If ranks share the experts, buffers are DTensors, of
    which `weight` and `dequantize` return this rank's part.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, weight: FourBit):
        super().__init__()
        check_four_bit(weight.packed, *weight.parts)
        check_parameter_dtype(weight.dtype)
        for name in PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.format, self.dtype = weight.format, weight.dtype

    def forward(self, *args: Any, within: Callable[..., Tensor]) -> Tensor:
        """Return `within(*args)`, which reads this weight: see `through`."""
        return within(*args)

    def weight(self) -> FourBit:
        """Return the weight as products take it."""
        packed, scales, nested, offset, table = (local_part(getattr(self, name)) for name in PARTS)
        return FourBit(packed, scales, nested, offset, table, self.format, self.dtype)

    def dequantize(self) -> Tensor:
        """Return the whole weight (E, out, in) in `dtype`."""
        return self.weight().dequantize()

    def shard(self, shard: Callable[[Tensor], Tensor]) -> None:
        """Replace each buffer that has a part for each expert by `shard` of it.

        Double-quantised scales of NF4, of which 256 share a number, become float32 before.
        """
        weight = self.weight().plain()
        for name in PARTS:
            t = getattr(weight, name)
            setattr(self, name, t if t is None or name == "table" else shard(t))

    def has_other_scales(self, state: Mapping[str, Any], prefix: str) -> bool:
        """Whether a state of NF4 has scales of this weight in the other form, float32 or double-quantised."""
        saved: Any = state.get(f"{prefix}scales")
        if self.format != "nf4" or getattr(saved, "shape", None) != self.scales.shape:
            return False
        return bool((saved.dtype == torch.uint8) != (self.scales.dtype == torch.uint8))

    def make_room(self, state: Mapping[str, Any], prefix: str) -> None:
        if self.has_other_scales(state, prefix) and not self.is_shared:
            parts = self.room_for_scales(double=self.scales.dtype != torch.uint8)
            for name in PARTS[1:]:
                setattr(self, name, parts.get(name))

    @property
    def is_shared(self) -> bool:
        """Whether ranks share the experts: then scales of NF4 are float32, see `shard`."""
        return hasattr(self.packed, "placements")

    def room_for_scales(self, double: bool) -> dict[str, Tensor]:
        """Return tensors for NF4's scales, shared as `scales` are, and for what belongs to them, whole."""
        sizes = {"table": 16 + 256 * double}
        if double:
            sizes |= {"nested": -(-self.scales.numel() // NESTED), "offset": len(self.scales)}
        scales = torch.empty_like(self.scales, dtype=torch.uint8 if double else torch.float32)
        device = self.packed.device
        return {"scales": scales} | {n: torch.empty(size, device=device) for n, size in sizes.items()}

    def own_scales(self, scales: Tensor, nested: Tensor, offset: Tensor, table: Tensor) -> Tensor:
        """Return this rank's part in float32 of double-quantised scales of all experts, which ranks share."""
        from torch.distributed.tensor import distribute_tensor

        numbers, experts = local_part(scales), torch.arange(len(scales), device=scales.device)
        mesh, placements = scales.device_mesh, scales.placements  # type: ignore[attr-defined]  # a DTensor's
        experts = local_part(distribute_tensor(experts, mesh, placements, src_data_rank=None))
        each = scales.shape[1] * scales.shape[2]
        blocks = experts[:, None] * each + torch.arange(each, device=scales.device)
        return single_scales(numbers, nested[blocks // NESTED].view_as(numbers), offset[experts], table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FourBitWeight":
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]  # torch's
        return self

    def extra_repr(self) -> str:
        return f"{tuple(self.weight().shape)}, format={self.format!r}, dtype={self.dtype}"


class FourBitExperts(SteppedExperts, WithOptions):
    """Frozen `Experts` with weights of 4 bits, made by `quantize(model, "nf4")`, "mxfp4" or "int4".

    Products load packed codes and dequantise tiles, forward and for the gradient of `x`: no weight exists in
    16 bits.  `x` must have the dtype of the weights before they were quantised.  `row_chunks`, `recompute`
    and `fp8` of the experts have no effect.  state_dict keys: gate_up.packed (E, 2I, H / 2), gate_up.scales
    and so on (see `FourBitWeight`), down.* alike, and biases.
    `LoRAExperts` trains adapters on them.  Differentiable in `x` and `routing_weights`.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gate_up: FourBitWeight
    down: FourBitWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def owners(self) -> tuple[nn.Module, ...]:
        """Return the modules that have the weights."""
        return self.gate_up, self.down

    def local_weights(self) -> Weights:
        """Return gate_up, down and their biases, for sharded ones the part of this rank."""
        biases = local_part(self.gate_up_bias), local_part(self.down_bias)
        return self.gate_up.weight(), self.down.weight(), *biases

    def compute(
        self, x: Tensor, routing_weights: Tensor, plan: RoutePlan, weights: Weights, save_z: bool = True,
        lent: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the experts' output as `forward` does, with these `local_weights`."""
        gate_up, down, gate_up_bias, down_bias = weights
        x, gate_up, down = cast_as_linear(x, gate_up, down)
        if x.dtype != gate_up.dtype:
            raise TypeError(
                f"x is {x.dtype} but the frozen weights stand for {gate_up.dtype}: call .to({x.dtype}) of "
                "the experts, which changes no code, or give x in the other dtype"
            )
        check_plan(plan)
        up, down = Projection(gate_up, gate_up_bias), Projection(down, down_bias)
        return experts_by_step(x, up, self.options.activate, down, routing_weights, RoutePlan(*plan))

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}"
        rest = f"bias={self.down_bias is not None}, interleaved={self.interleaved}"
        shared = "" if self.dispatcher is None else f", {self.dispatcher}"
        return f"{sizes}, activation={self.activation!r}, {rest}{shared}"


# conversion


@torch.no_grad()
def to_four_bits(experts: nn.Module, format: str) -> None:
    """Make an `Experts` one of 4 bits: in place, so that its hooks and all that refers to it stay."""
    weights = {name: FourBitWeight(quantized(getattr(experts, name), format)) for name in ("gate_up", "down")}
    for name, weight in weights.items():
        own_parameters(experts).pop(name)
        setattr(experts, name, weight)
    experts.requires_grad_(False)
    experts.__class__ = FourBitExperts


def from_bitsandbytes(state: Mapping[str, Tensor], prefix: str, shape: tuple[int, int, int]) -> FourBitWeight:
    """Return the NF4 weight `prefix` of a state_dict that bitsandbytes wrote, of `shape` (E, out, in).

    Its tensors are `prefix`, the codes, and `prefix`.absmax, .quant_map, .quant_state.bitsandbytes__nf4 and,
    double-quantised, .nested_absmax and .nested_quant_map.  Codes and scales are taken over as they are.
    Raises KeyError for missing tensors, ValueError for blocks of another size, or codes for another shape.
    """
    E, N, K = shape
    how = json.loads(bytes(state[f"{prefix}.{STATE}"].tolist()))
    sizes = how["blocksize"], how.get("nested_blocksize", NESTED)
    if sizes != (FORMATS["nf4"].block, NESTED) or K % FORMATS["nf4"].block:
        raise ValueError(f"{prefix} has blocks of {sizes} in rows of {K} numbers, not of (64, {NESTED})")
    packed, scales, table = (state[prefix + end] for end in ("", ".absmax", ".quant_map"))
    if 2 * packed.numel() != E * N * K:
        raise ValueError(f"{prefix} has {2 * packed.numel()} codes, not {E * N * K} for {tuple(shape)}")
    nested = offset = None
    if "nested_offset" in how:
        nested = state[f"{prefix}.nested_absmax"]
        offset = nested.new_full((E,), how["nested_offset"])
        table = torch.cat([table, state[f"{prefix}.nested_quant_map"]])
    packed, scales = packed.view(torch.uint8).view(E, N, K // 2), scales.view(E, N, K // sizes[0])
    return FourBitWeight(FourBit(packed, scales, nested, offset, table, "nf4", getattr(torch, how["dtype"])))


def to_bitsandbytes(weight: FourBitWeight, prefix: str) -> dict[str, Tensor]:
    """Return the tensors that `from_bitsandbytes` reads, by their names; ValueError unless it is NF4."""
    w = weight.weight()
    if w.format != "nf4" or w.table is None:
        raise ValueError(f"{prefix} is {w.format}, which bitsandbytes does not have")
    how = {"quant_type": "nf4", "blocksize": FORMATS["nf4"].block}
    how |= {"dtype": str(w.dtype).removeprefix("torch."), "shape": list(w.shape)}
    parts = {"": w.packed.reshape(-1, 1), ".absmax": w.scales.flatten(), ".quant_map": w.table[:16]}
    if w.nested is not None and w.offset is not None:
        offsets = w.offset.unique().tolist() or [0.0]
        if len(offsets) > 1:
            raise ValueError(f"{prefix} has {len(offsets)} offsets, for which bitsandbytes has one place")
        how |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offsets[0]}
        parts |= {".nested_absmax": w.nested, ".nested_quant_map": w.table[16:]}
    parts[f".{STATE}"] = torch.tensor(list(json.dumps(how).encode()), dtype=torch.uint8)
    return {prefix + end: t.clone() for end, t in parts.items()}


def join_weights(weights: Sequence[Sequence[FourBitWeight]]) -> FourBitWeight:
    """Return one weight (E, out, in) of what others keep in a weight (1, rows, in) for each linear layer.

    weights[e] are the layers of expert e, whose rows are put together: gate and up, or down alone.  Codes are
    taken over as they are.  NF4's scales become float32, 4.5 bits a number in all, because each layer has an
    offset of its own.  Raises ValueError for layers of different formats, dtypes, tables and sizes.
    """
    experts = [[layer.weight() for layer in layers] for layers in weights]
    kinds = [(w.format, w.dtype, *w.shape[::2]) for layers in experts for w in layers]
    tables = [w.table[:16] for layers in experts for w in layers if w.table is not None]
    rows = [sum(w.shape[1] for w in layers) for layers in experts]
    if len({*kinds}) != 1 or len({*rows}) != 1 or kinds[0][2] != 1:
        raise ValueError(
            f"layers are of kinds {sorted({*map(str, kinds)})}, {sorted({*rows})} rows an expert"
        )
    if any(not torch.equal(table, tables[0]) for table in tables):
        raise ValueError("layers have different tables of codes")

    def joined(parts: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.cat([torch.cat(tuple(of_expert), 1) for of_expert in parts])

    format, dtype = kinds[0][:2]
    packed = joined([[w.packed for w in layers] for layers in experts])
    if format == "nf4":
        scales = joined([[w.plain().scales for w in layers] for layers in experts])
        return FourBitWeight(FourBit(packed, scales, None, None, tables[0].clone(), format, dtype))
    scales = joined([[w.scales for w in layers] for layers in experts])
    offsets = [[w.offset for w in layers if w.offset is not None] for layers in experts]
    zeros = joined(offsets) if format == "int4" else None
    return FourBitWeight(FourBit(packed, scales, None, zeros, None, format, dtype))


@checked
def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> FourBitWeight:
    """Return the MXFP4 weight (E, out, in) of gpt-oss's checkpoints, without a copy.

    blocks: (E, out, in / 32, 16) uint8, low halves first.  scales: (E, out, in / 32) uint8, exponents + 127.
    dtype: what tiles of it are dequantised to.
    """
    check_shape("scales", scales, "E", "out", "in / 32")
    check_whole_shape("blocks", blocks, (*scales.shape, 16))
    if blocks.dtype != torch.uint8:
        raise TypeError(f"blocks must be torch.uint8, not {blocks.dtype}")
    return FourBitWeight(FourBit(blocks.flatten(2), scales, None, None, None, "mxfp4", dtype))


@checked
def from_fp8(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> FourBitWeight:
    """Return the FP8 weight (E, out, in) of checkpoints such as DeepSeek-V3's, without a copy.

    weight: (E, out, in) float8_e4m3fn.  scale_inv: what 128 rows of 128 numbers are multiplied by, (E,
    out / 128, in / 128), rounded up; or (E, 1, 1), for a whole expert; float32 or float8_e8m0fnu.
    dtype: that of the products' results.  Products quantise their rows as well: see `fp8="block"`.
    Raises ValueError for shapes, TypeError for dtypes.
    """
    return FourBitWeight(blocks_of(weight, scale_inv, dtype))


@checked
def from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype | None = None
) -> FourBitWeight:
    """Return the weight (1, out, in) of a linear layer that AutoAWQ quantised, version "gemm".

    qweight: (in, out / 8) int32, 4 bits of 8 outputs in each: lowest bits first those of outputs 0, 2, 4, 6,
        1, 3, 5 and 7.
    qzeros: (in / 128, out / 8) int32, alike.  scales: (in / 128, out) float16.
    dtype: what tiles of it are dequantised to [that of scales].  `join_weights` makes one weight of experts.
    Raises ValueError for shapes that do not fit, such as those of another group size; TypeError for dtypes.
    """
    check_shape("scales", scales, "in / 128", "out")
    groups, out = scales.shape
    check_int32(qweight=(qweight, (128 * groups, out // 8)), qzeros=(qzeros, (groups, out // 8)))
    found = (eight_codes(t).unflatten(1, (-1, 8)) for t in (qweight, qzeros))
    codes, zeros = (t[..., AWQ_PLACES].flatten(1) for t in found)
    return int4_layer(packed_codes(codes.T.contiguous(), "int4"), zeros, scales, dtype)


@checked
def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None,
    dtype: torch.dtype | None = None, checkpoint_format: str = "gptq",
) -> FourBitWeight:  # fmt: skip
    """Return the weight (1, out, in) of a linear layer that GPTQModel or AutoGPTQ quantised.

    qweight: (in / 8, out) int32, 4 bits of 8 inputs in each, lowest bits first.  qzeros: (in / 128, out / 8)
    int32, of 8 outputs.  scales: (in / 128, out) float16.  g_idx: (in,), the group of each input.
    checkpoint_format: that of the quantisation's configuration: "gptq", where qzeros holds each zero point
        less 1 in 4 bits, so that 15 stands for 0, or "gptq_v2", where it holds zero points.
    dtype: what tiles of it are dequantised to [that of scales].  `join_weights` makes one weight of experts.
    Raises ValueError for a g_idx that permutes inputs, as `desc_act` does, for an unknown format, for zero
    points of a symmetric weight that are stored in the other format, and for shapes that do not fit, such as
    those of another group size; TypeError for dtypes.
    """
    if checkpoint_format not in GPTQ_ZEROS:
        raise ValueError(f"unknown checkpoint_format {checkpoint_format!r}; known: {', '.join(GPTQ_ZEROS)}")
    check_shape("scales", scales, "in / 128", "out")
    groups, out = scales.shape
    check_int32(qweight=(qweight, (16 * groups, out)), qzeros=(qzeros, (groups, out // 8)))
    in_order = torch.arange(groups, device=scales.device).repeat_interleave(128)
    if g_idx is not None and not torch.equal(g_idx.to(in_order), in_order):
        raise ValueError("g_idx permutes the inputs (desc_act=True): only groups of 128 in order can be read")
    stored, less = eight_codes(qzeros), GPTQ_ZEROS[checkpoint_format]
    other = next(name for name in GPTQ_ZEROS if name != checkpoint_format)
    if stored.numel() and not stored.is_meta and (stored == SYMMETRIC - GPTQ_ZEROS[other]).all():
        raise ValueError(
            f"qzeros holds {SYMMETRIC - GPTQ_ZEROS[other]} alone, which is the zero point {SYMMETRIC} of a "
            f"symmetric weight in {other!r}, not in {checkpoint_format!r}: give checkpoint_format={other!r}"
        )
    return int4_layer(as_bytes(qweight.T), stored + less & 15, scales, dtype)


def check_int32(**tensors: tuple[Tensor, tuple[int, int]]) -> None:
    for name, (t, shape) in tensors.items():
        if t.dtype != torch.int32:
            raise TypeError(f"{name} must be torch.int32, not {t.dtype}")
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} is {tuple(t.shape)}, but scales in groups of 128 need {shape}")


def eight_codes(t: Tensor) -> Tensor:
    """(rows, columns) int32 -> (rows, 8 * columns): each number's 8 codes, lowest bits first."""
    return unpacked(as_bytes(t), "int4")


def as_bytes(t: Tensor) -> Tensor:
    # `contiguous` leaves strides that say nothing as they are, which a view as bytes refuses
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def int4_layer(packed: Tensor, zeros: Tensor, scales: Tensor, dtype: torch.dtype | None) -> FourBitWeight:
    """Return the weight of packed (out, in / 2), and zeros and scales (in / 128, out)."""
    zeros, each = (t.T.contiguous()[None] for t in (zeros, scales))
    return FourBitWeight(FourBit(packed[None], each, None, zeros, None, "int4", dtype or scales.dtype))
