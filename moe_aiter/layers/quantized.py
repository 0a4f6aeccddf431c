"""Layers whose weights are quantised once, for inference: `quantize(model, dtype)`, `quantization_report`.

Weights have a scale for each output channel, activations one for each token, found as they come (dynamic).
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..invariance import batch_invariant
from ..kernels.base.check import (
    FLOATS,
    cast_as_linear,
    check_shape,
    check_size,
    check_tensor,
    checked,
    refuse_gradient,
)
from ..kernels.dense.gemm import multiply_linear
from ..kernels.experts.fp8 import quantized_experts
from ..kernels.experts.mlp import mix_experts
from ..kernels.experts.options import ExpertOptions, ExpertWeights
from ..kernels.grouped.scaled_gemm import scaled_gemm
from ..kernels.quantize.four_bit import FORMATS as FOUR_BITS
from ..kernels.quantize.rows import quantize_rows
from ..private_api import own_buffers, own_modules, own_parameters, tree_leaves
from ..routing.plan import RoutePlan, make_plan
from .attached import Attachment
from .experts import Experts, WithOptions
from .four_bit import FourBitExperts, to_four_bits
from .fuse import FusedLinear, FusedPart
from .loading import Loading
from .lora import LoRAExperts, LoRALinear
from .optimized import OptimizedMoELayer

EIGHT_BITS = {"int8": "int8", "fp8": "e4m3"}
SIXTEEN_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = *EIGHT_BITS, *SIXTEEN_BITS
Found = dict[Tensor, list[nn.Parameter | None]]  # a weight -> the converted one and its scale
WHOLE = LoRALinear, LoRAExperts  # modules that read the weights of their submodules
SKIPPED = "skip names it, or what shares its weight"
PRODUCTS = torch.float16, torch.bfloat16, torch.float32


# layers


class Quantized(Loading):
    """The base of converted layers: `dtype`, one of FORMATS, and weights that keep their dtype.

    `.to(dtype)`, `.half()` and the like change the dtype of biases alone.  A state with weights of another
    format is refused.
    """

    dtype: str

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Quantized":
        names = [name for name in self._parameters if not name.endswith("bias")]
        fixed = [self._parameters[name] for name in names]

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            changed = moved.dtype != t.dtype and any(t is w for w in fixed)
            return t.to(moved.device) if changed else moved

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]  # torch's
        return self

    def set_weight(self, name: str, weight: Tensor, bias: nn.Parameter | None, found: Found) -> None:
        """Take a weight (..., out, in), quantised as it is `found` or made, with its scale and its bias."""
        wide = SIXTEEN_BITS.get(self.dtype)
        if weight not in found:
            own = (weight.to(wide, copy=True), None) if wide else None  # the weight is the original's
            narrow = own or quantize_rows(weight, EIGHT_BITS[self.dtype])
            found[weight] = [None if t is None else nn.Parameter(t, requires_grad=False) for t in narrow]
        beside = name.removesuffix("weight")
        beside = f"{beside}_" if beside else ""
        self.register_parameter(name, found[weight][0])
        self.register_parameter(f"{beside}scale", found[weight][1])
        if bias is not None and wide:
            bias = nn.Parameter(bias.to(wide), requires_grad=False)
        self.register_parameter(f"{beside}bias", bias)


class QuantizedLinear(Quantized):
    """nn.Linear for inference: a `weight` (out, in) of int8 or float8_e4m3fn and a float32 `scale` (out,).

        y = (x8 @ weight.T) * x_scale * scale + bias       x8, x_scale = quantize_rows(x)

    in the dtype of `x`, any floating one; under torch.autocast in its dtype, as from nn.Linear.  With `dtype`
    "fp16" or "bf16" the weight has that dtype, so has `x` in the product, and `scale` is None.
    Made by `quantize`.  Raises RuntimeError where 8 bits would need a gradient.
    """

    in_features: int
    out_features: int
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        check_tensor("x", x)
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {tuple(x.shape)} but the layer needs (..., in={self.in_features})")
        (x,) = cast_as_linear(x)
        if self.scale is None:
            product = self.weight.dtype  # `.to(dtype)` has changed that of the bias alone
            bias = None if self.bias is None else self.bias.to(product)
            multiply = multiply_linear if batch_invariant() else F.linear
            return multiply(x.to(product), self.weight, bias).to(x.dtype)
        refuse_gradient("a quantised layer", x)
        x8, x_scale = quantize_rows(x.reshape(x.shape[:-1].numel(), x.shape[-1]), EIGHT_BITS[self.dtype])
        product = x.dtype if x.dtype in PRODUCTS else torch.float32
        out = scaled_gemm(x8, self.weight.mT, x_scale, self.scale, self.bias, out_dtype=product)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, dtype={self.dtype!r}"


class QuantizedExperts(Quantized, WithOptions):
    """`Experts` for inference with 8-bit `gate_up` (E, 2I, H) and `down` (E, H, I), and a float32 scale for
    each row of each expert, `gate_up_scale` (E, 2I) and `down_scale` (E, H); else as QuantizedLinear."""

    gate_up: Tensor
    gate_up_scale: Tensor | None
    gate_up_bias: Tensor | None
    down: Tensor
    down_scale: Tensor | None
    down_bias: Tensor | None

    def forward(self, x: Tensor, routing_weights: Tensor, plan: RoutePlan) -> Tensor:
        """Do as `Experts.forward`: (T, H) -> (T, H) in the dtype of `x`."""
        check_shape("x", x, "T", "H")
        check_size("x is (T, H={})", x.shape[1], "gate_up is (E, 2I, H={})", self.gate_up.shape[2])
        (x,) = cast_as_linear(x)
        if self.gate_up_scale is None or self.down_scale is None:
            weights = ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias)
            narrow, act = x.to(self.gate_up.dtype), ExpertOptions(self.activation, self.interleaved)
            return mix_experts(narrow, weights, routing_weights, plan, act).to(x.dtype)
        gate_up = self.gate_up, self.gate_up_scale, self.gate_up_bias
        down = self.down, self.down_scale, self.down_bias
        return quantized_experts(x, gate_up, down, routing_weights, plan, self.activation, self.interleaved)

    def extra_repr(self) -> str:
        E, H, I = self.down.shape  # noqa: E741
        sizes = f"{E}, hidden={H}, intermediate={I}, activation={self.activation!r}"
        return f"{sizes}, bias={self.down_bias is not None}, dtype={self.dtype!r}"


class QuantizedMoELayer(QuantizedExperts):
    """`OptimizedMoELayer` with weights of 8 bits, laid out as in QuantizedExperts."""

    def forward(  # type: ignore[override]  # the arguments are those of OptimizedMoELayer
        self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor
    ) -> Tensor:
        """Do as `OptimizedMoELayer.forward`: (T, H) -> (T, H) in the dtype of `x`."""
        check_shape("x", x, "T", "H")
        check_shape("expert_ids", expert_ids, "T", "k")
        return super().forward(x, routing_weights, make_plan(expert_ids, len(self.down)))


# conversion


# what is converted -> to what, from which weights and biases
KINDS: dict[type[nn.Module], tuple[type[Quantized], dict[str, tuple[str, str | None]]]] = {
    nn.Linear: (QuantizedLinear, {"weight": ("weight", "bias")}),
    Experts: (
        QuantizedExperts,
        {"gate_up": ("gate_up", "gate_up_bias"), "down": ("down", "down_bias")},
    ),
    OptimizedMoELayer: (QuantizedMoELayer, {"gate_up": ("w1", None), "down": ("w2", None)}),
}


CONVERTED = Quantized, FourBitExperts


def quantize(model: nn.Module, dtype: str = "int8", *, skip: Collection[str] = ()) -> nn.Module:
    """Return a copy of `model` with weights of 4, 8 or 16 bits; `model` stays as it is.

    4 bits, "nf4", "mxfp4" or "int4": every `Experts` gets weights of 4 bits, also those inside a
    `LoRAExperts`; all else stays as it is, trainable parameters too.  They are frozen, and gradients pass
    through them: adapters on them can train.  H and I must be multiples of 64 (nf4), 32 or 128.  The rest of
    this text is about 8 and 16 bits, for inference.  On the meta device, the copy takes no memory until
    `load_state_dict(state, assign=True)`.

    Every nn.Linear, `Experts` and `OptimizedMoELayer`, also `model` itself, gets weights of `dtype`.  "int8"
    and "fp8" (float8_e4m3fn) have a scale for each output channel, and quantise activations row by row in
    each call.  "fp16" and "bf16" have no scales.  A layer's result has the dtype of its input.  With 8 bits,
    biases keep their dtype.  Convolutions, norms, embeddings and routers stay as they are.  Layers that share
    a weight share the converted one; a weight that another module uses too, such as an embedding, stays as it
    is.

    skip: names, as in `model.named_modules()`, of modules that stay as they are, with all modules in them.

    Also not converted: subclasses with a forward of their own, adapters (`LoRALinear`, `LoRAExperts`; merge
    them first), fused projections, weights that are not of 16, 32 or 64 bits, and nn.MultiheadAttention,
    which reads its weights itself; `quantization_report` lists them.  No parameter of the copy requires a
    gradient.  Its state_dict loads into another such copy.
    Raises ValueError for an unknown format, and for a name in `skip` that the model does not have; with 4
    bits also for a model without `Experts`, other sizes, merged adapters, experts that ranks share, and NaN.
    """
    if not isinstance(dtype, str) or dtype not in {*FORMATS, *FOUR_BITS}:
        raise ValueError(f"dtype is {dtype!r}; known formats: {', '.join([*FORMATS, *FOUR_BITS])}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, not {type(model).__name__}")
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    if not isinstance(skip, Collection):
        raise TypeError(f"skip must be a collection of names, not {type(skip).__name__}")
    skip = {skip} if isinstance(skip, str) else set(skip)
    if unknown := skip - names:
        raise ValueError(f"skip names {', '.join(map(repr, sorted(unknown)))}, which the model has not")
    if dtype in FOUR_BITS:
        return with_four_bits(model, dtype, skip)
    # the copy begins with the weights themselves: copies of them would double the memory
    chosen = [(m, KINDS[kind][1]) for m, kind in verdicts(model, skip).items() if not isinstance(kind, str)]
    weights = [own_parameters(m).get(name) for m, names in chosen for name, _ in names.values()]
    memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in weights if p is not None}
    other = copy.deepcopy(model, memo).requires_grad_(False)
    other.zero_grad(set_to_none=True)
    with torch.no_grad():
        found: Found = {}
        for module, kind in verdicts(other, skip).items():
            if not isinstance(kind, str):
                convert(module, kind, dtype, found)
    for module in other.modules():  # its fast path in C++ would read the weights
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
    return other


def with_four_bits(model: nn.Module, format: str, skip: Collection[str]) -> nn.Module:
    """Return a copy of `model`, in which every `Experts` that `skip` does not name has 4 bits."""
    if any(getattr(m, "dispatcher", None) is not None for m in model.modules()):
        raise ValueError("experts are shared among ranks: call quantize before that")
    skipped = {module for name in skip for module in model.get_submodule(name).modules()}
    found = {name: m for name, m in model.named_modules() if type(m) is Experts and m not in skipped}
    found = {name: m for name, m in found.items() if "forward" not in vars(m)}
    if not found:
        kind = type(model).__name__
        if any(isinstance(m, (FourBitExperts, QuantizedExperts)) for m in model.modules()):
            raise ValueError(f"the experts of {kind} are quantised already: give the model as it was before")
        raise ValueError(f"{kind} has no Experts, whose weights {format!r} is for")
    if any(isinstance(m, LoRAExperts) and m.original is not None for m in model.modules()):
        raise ValueError("adapters are merged into the weights: unmerge them first")
    # the copy begins with the weights themselves: copies of them would double the memory
    elsewhere = {p for m in model.modules() if m not in found.values() for p in own_parameters(m).values()}
    weights = {own_parameters(m)[name] for m in found.values() for name in ("gate_up", "down")} - elsewhere
    other = copy.deepcopy(model, {id(p): p for p in weights})
    for name in found:
        to_four_bits(other.get_submodule(name), format)
    return other


def verdicts(model: nn.Module, skip: Collection[str]) -> dict[nn.Module, type[nn.Module] | str]:
    """Return for each module which of KINDS it is, to be converted, or why it stays as it is."""
    found: dict[nn.Module, type[nn.Module] | str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in skip or isinstance(module, WHOLE):
            found |= dict.fromkeys(
                module.modules(), SKIPPED if name in skip else "an adapter: merge it first"
            )
        elif not isinstance(found.get(module), str):
            found[module] = verdict(module)
    everywhere = Counter(p for m in model.modules() for p in set(own_parameters(m).values()))
    chosen = [m for m, kind in found.items() if not isinstance(kind, str)]
    mine = {m: {p for p in own_parameters(m).values() if p is not None} for m in chosen}
    here = Counter(p for parameters in mine.values() for p in parameters)
    for module, parameters in mine.items():
        if any(here[p] != everywhere[p] for p in parameters):
            found[module] = "something else uses its weight too"
    return found


def verdict(module: nn.Module) -> type[nn.Module] | str:
    """Which of KINDS this is, if it does nothing else when it is called, or why it is none."""
    if isinstance(module, (NonDynamicallyQuantizableLinear, nn.MultiheadAttention)):
        return "nn.MultiheadAttention reads its weights itself"
    if isinstance(module, FusedPart):
        return "fused with others"
    if other := {p.dtype for p in own_parameters(module).values() if p is not None} - {*FLOATS}:
        return f"no weights of {min(map(str, other))} are converted"
    own = type(module)
    same = getattr(own, "computes_linear", False)  # a forward of its own, with the same meaning
    kinds = (k for k in KINDS if own.forward is k.forward or (same and issubclass(own, k)))
    if "forward" not in vars(module) and (kind := next(kinds, None)):
        return kind
    return "a forward of its own" if isinstance(module, tuple(KINDS)) else "a kind that is not converted"


def convert(module: nn.Module, kind: type[nn.Module], dtype: str, found: Found) -> None:
    """Make a module what it is converted to: in place, so that its hooks and all that refers to it stay."""
    quantized, weights = KINDS[kind]
    tensors = [(name, getattr(module, w), getattr(module, b or "", None)) for name, (w, b) in weights.items()]
    # torch's own way to remove them would change the original's class
    own_modules(module).pop("parametrizations", None)
    for name in {n for pair in weights.values() for n in pair if n}:
        for place in (own_parameters(module), own_buffers(module), vars(module)):
            place.pop(name, None)
    module.__class__ = quantized
    assert isinstance(module, Quantized)
    module.dtype = dtype
    for name, weight, bias in tensors:
        module.set_weight(name, weight.mT if kind is OptimizedMoELayer else weight, bias, found)


# what it costs in accuracy and saves in memory


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One converted layer: its weights before and after, and how far off it is for the same input."""

    name: str
    dtype: str
    bytes_before: int
    bytes_after: int
    error: float | None  # relative, in the Frobenius norm; None where the inputs did not reach it


class LeftLayer(NamedTuple):
    """A module with weights of two dimensions or more that stays as it is, and why."""

    name: str
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """Sizes and errors of a quantised model, compared with the original.

    `layers` has an entry for each converted layer, `left` one for each layer with weights that was not
    converted.  `bytes_before` and `bytes_after` count the parameters and buffers of the whole models; `error`
    is the relative error of the quantised model's output.
    """

    layers: tuple[LayerReport, ...]
    left: tuple[LeftLayer, ...]
    bytes_before: int
    bytes_after: int
    error: float

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "dtype", "MB before", "MB after", "error")]
        rows += [line(r.name or "(the model)", r.dtype, r) for r in self.layers]
        rows.append(line("whole model", "", self))
        texts = table(rows, "<<>>>")
        if self.left:
            rows = [(f"  {name or '(the model)'}", *rest) for name, *rest in self.left]
            texts += [f"left as they are: {len(rows)}", *table(rows, "<<<")]
        return "\n".join(texts)


def table(rows: list[tuple[str, ...]], sides: str) -> list[str]:
    """Lines of aligned cells; `sides` has < or > for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def line(name: str, dtype: str, of: LayerReport | QuantizationReport) -> tuple[str, ...]:
    sizes = (f"{size / 1e6:.3f}" for size in (of.bytes_before, of.bytes_after))
    return name, dtype, *sizes, "not run" if of.error is None else f"{of.error:.2e}"


class Distance:
    """The relative distance of some tensors from others, over all that it is told of."""

    def __init__(self) -> None:
        self.off, self.size, self.calls = 0.0, 0.0, 0

    def add(self, got: Any, exact: Any) -> None:
        pairs = zip(floats(got), floats(exact), strict=True)
        for a, b in pairs:
            self.off += (a.double() - b.double()).square().sum().item()
            self.size += b.double().square().sum().item()
        self.calls += 1

    def relative(self) -> float | None:
        if not self.calls:
            return None
        return 0.0 if self.off == 0 else (self.off / self.size) ** 0.5 if self.size else float("inf")


def floats(outputs: Any) -> list[Tensor]:
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


@checked
def quantization_report(model: nn.Module, quantized: nn.Module, inputs: Any) -> QuantizationReport:
    """Run `model` and its quantised copy on the same inputs, and compare their sizes and outputs.

    `quantized` is the result of `quantize(model)`.  `inputs` is the argument of the model, a tuple of
    arguments, or a dict of named arguments.  Each converted layer also runs on the input of the original
    layer, so that its error does not contain the errors of earlier layers.  Layers with weights that were not
    converted are listed with the reason.  Both models run in evaluation mode and without gradients.
    `print(report)` shows a table.  Synchronises.
    Raises ValueError if `quantized` was not made from such a model, or if the two models are swapped.
    """
    pairs: dict[str, tuple[nn.Module, Quantized | FourBitExperts]] = {}
    for name, layer in quantized.named_modules():
        if isinstance(layer, CONVERTED):
            try:
                pairs[name] = model.get_submodule(name), layer
            except AttributeError as error:
                raise ValueError(f"quantized has a layer {name!r} that model has not") from error
    if not pairs and any(isinstance(layer, CONVERTED) for layer in model.modules()):
        raise ValueError("model has quantised layers and quantized has none: the original comes first")
    distances = {name: Distance() for name in pairs}

    def compare(
        name: str, layer: nn.Module, _: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        distances[name].add(layer(*args, **kwargs), output)

    kwargs: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
    args = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
    with Attachment() as attachment, torch.no_grad():
        for module in {*model.modules(), *quantized.modules()}:
            attachment.put(module, "training", False)
        for name, (original, layer) in pairs.items():
            hook = partial(compare, name, layer)
            attachment.hook(original.register_forward_hook(hook, with_kwargs=True))
        expected = model(*args, **kwargs)
        whole = Distance()
        whole.add(quantized(*args, **kwargs), expected)
    converted = tuple(
        LayerReport(name, layer_format(layer), size_of(original), size_of(layer), distances[name].relative())
        for name, (original, layer) in pairs.items()
    )
    only = any(isinstance(layer, FourBitExperts) for _, layer in pairs.values())
    left = tuple(left_in(model, pairs, "only experts get 4 bits" if only else SKIPPED))
    return QuantizationReport(converted, left, size_of(model), size_of(quantized), whole.relative() or 0.0)


def layer_format(layer: Quantized | FourBitExperts) -> str:
    """Return the format of a converted layer."""
    return layer.gate_up.format if isinstance(layer, FourBitExperts) else layer.dtype


def left_in(model: nn.Module, converted: Collection[str], otherwise: str) -> Iterator[LeftLayer]:
    """Yield the modules with weights (parameters of two or more axes) that are not among these names."""
    why = verdicts(model, ())
    inside = tuple(f"{name}." for name in converted)
    for name, module in model.named_modules():
        if has_weights(module) and name not in converted and not name.startswith(inside):
            reason = why[module]
            yield LeftLayer(name, type(module).__name__, reason if isinstance(reason, str) else otherwise)


def has_weights(module: nn.Module) -> bool:
    """Whether the module itself has weights; a fused projection does."""
    large = (p is not None and p.dim() > 1 for p in own_parameters(module).values())
    return isinstance(module, FusedPart) or (any(large) and not isinstance(module, FusedLinear))


def size_of(module: nn.Module) -> int:
    """Bytes of the parameters and buffers, those that are shared once."""
    return sum(t.nbytes for t in {*module.parameters(), *module.buffers()})
