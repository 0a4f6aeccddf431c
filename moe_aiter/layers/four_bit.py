"""Frozen experts of 4 bits: from `quantize(model, "nf4")`, or from weights that others have quantised."""

import json
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..kernels.base.check import check_plan, check_shape, checked
from ..kernels.experts.glu import glu
from ..kernels.quantize.four_bit import (
    FORMATS,
    NESTED,
    FourBit,
    check_four_bit,
    quantized,
)
from ..private_api import own_parameters
from ..routing.plan import RoutePlan
from .by_step import Projection, experts_by_step
from .experts import Experts, cast_as_linear

PARTS = "packed", "scales", "nested", "offset", "table"
STATE = "quant_state.bitsandbytes__nf4"  # JSON in a tensor of bytes


class FourBitWeight(nn.Module):
    """A frozen weight (E, out, in) of 4 bits: its codes and scales as buffers.

    `format`: "nf4", "mxfp4" or "int4".  Buffers: packed (E, out, in / 2) uint8, two codes in a byte; scales
    (E, out, in / block), for blocks of 64 (nf4), 32 (mxfp4) or 128 (int4); nested, offset and table, which
    only some formats have.  `dtype` is what tiles of it are dequantised to, that of the weight it was made
    of; `.to(dtype)` changes it and no buffer.
    """

    def __init__(self, weight: FourBit):
        super().__init__()
        check_four_bit(weight.packed, *weight.parts)
        for name in PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.format, self.dtype = weight.format, weight.dtype

    def weight(self) -> FourBit:
        """Return the weight as products take it."""
        return FourBit(*(getattr(self, name) for name in PARTS), self.format, self.dtype)

    def dequantize(self) -> Tensor:
        """Return the whole weight (E, out, in) in `dtype`."""
        return self.weight().dequantize()

    def _apply(self, fn, recurse=True):
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight().shape)}, format={self.format!r}, dtype={self.dtype}"


class FourBitExperts(nn.Module):
    """Frozen `Experts` with weights of 4 bits, made by `quantize(model, "nf4")`, "mxfp4" or "int4".

    Products load packed codes and dequantise tiles, forward and for the gradient of `x`: no weight exists in
    16 bits.  `x` must have the dtype of the weights before they were quantised.  `row_chunks`, `recompute`
    and `fp8` of the experts have no effect.  state_dict keys: gate_up.packed (E, 2I, H / 2), gate_up.scales
    and so on (see `FourBitWeight`), down.* alike, and biases.
    `LoRAExperts` trains adapters on them.
    """

    def forward(self, x: Tensor, routing_weights: Tensor, plan: RoutePlan) -> Tensor:
        """As `Experts.forward`: (T, H) -> (T, H).  Differentiable in `x` and `routing_weights`."""
        check_shape("x", x, "T", "H")
        return self.compute(x, routing_weights, plan, self.local_weights())

    def local_weights(self) -> tuple[FourBit | Tensor | None, ...]:
        """Return gate_up, down and their biases."""
        return self.gate_up.weight(), self.down.weight(), self.gate_up_bias, self.down_bias

    def compute(
        self,
        x: Tensor,
        routing_weights: Tensor,
        plan: RoutePlan,
        weights: tuple[FourBit | Tensor | None, ...],
    ) -> Tensor:
        """Return the experts' output as `forward` does, with these `local_weights`."""
        gate_up, down, gate_up_bias, down_bias = weights
        x, gate_up, down = cast_as_linear(x, gate_up, down)
        check_dtype(x, gate_up)
        check_plan(plan)
        up, down = Projection(gate_up, gate_up_bias), Projection(down, down_bias)
        act = partial(glu, activation=self.activation, interleaved=self.interleaved)
        return experts_by_step(x, up, act, down, routing_weights, RoutePlan(*plan))

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, hidden={self.hidden}, intermediate={self.intermediate}"
        rest = f"bias={self.down_bias is not None}, interleaved={self.interleaved}"
        return f"{sizes}, activation={self.activation!r}, {rest}"


def check_dtype(x: Tensor, weight: FourBit) -> None:
    if x.dtype != weight.dtype:
        raise TypeError(f"x is {x.dtype} but the weights of 4 bits stand for {weight.dtype}")


# conversion


@torch.no_grad()
def to_four_bits(experts: Experts, format: str) -> None:
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
    packed, scales = packed.view(torch.uint8).view(E, N, K // 2), scales.view(E, N, -1)
    return FourBitWeight(FourBit(packed, scales, nested, offset, table, "nf4", getattr(torch, how["dtype"])))


def to_bitsandbytes(weight: FourBitWeight, prefix: str) -> dict[str, Tensor]:
    """Return the tensors that `from_bitsandbytes` reads, by their names; ValueError unless it is NF4."""
    w = weight.weight()
    if w.format != "nf4":
        raise ValueError(f"{prefix} is {w.format}, which bitsandbytes does not have")
    how = {"quant_type": "nf4", "blocksize": FORMATS["nf4"].block}
    how |= {"dtype": str(w.dtype).removeprefix("torch."), "shape": list(w.shape)}
    parts = {"": w.packed.reshape(-1, 1), ".absmax": w.scales.flatten(), ".quant_map": w.table[:16]}
    if w.nested is not None:
        offsets = w.offset.unique().tolist()
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
    zeros = joined([[w.offset for w in layers] for layers in experts]) if format == "int4" else None
    return FourBitWeight(FourBit(packed, scales, None, zeros, None, format, dtype))


@checked
def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> FourBitWeight:
    """Return the MXFP4 weight (E, out, in) of gpt-oss's checkpoints, without a copy.

    blocks: (E, out, in / 32, 16) uint8, low halves first.  scales: (E, out, in / 32) uint8, exponents + 127.
    dtype: what tiles of it are dequantised to.
    """
    check_shape("blocks", blocks, "E", "out", "in / 32", "16")
    return FourBitWeight(FourBit(blocks.flatten(2), scales, None, None, None, "mxfp4", dtype))
