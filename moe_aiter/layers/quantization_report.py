"""What quantising a model costs in accuracy and saves in memory."""

import dataclasses
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..kernels.base.check import checked
from .fuse import FusedLinear, FusedPart
from .quantized import SKIPPED, Quantized, verdicts


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
    """`layers`, one for each that is converted, and `left` for each that is not; and of the whole model its
    parameters and buffers, and the error of its output."""

    layers: tuple[LayerReport, ...]
    left: tuple[LeftLayer, ...]
    bytes_before: int
    bytes_after: int
    error: float

    def __str__(self) -> str:
        rows = [("layer", "dtype", "MB before", "MB after", "error")]
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

    def __init__(self):
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
    """Run `model`, and `quantized`, as `quantize` made it of that, on the same inputs, and compare.

    `inputs` is the argument of the model, a tuple of several, or a dict of those by name.  Each converted
    layer is also given what the one in `model` is given, so that its error is its own and not that of those
    before.  What has weights and was not converted is named with the reason.  Both run in evaluation mode and
    without gradients; `print(report)` shows a table.  This waits for the device.
    Raises ValueError where `quantized` was not made of such a model, or comes before `model`.
    """
    pairs = {}
    for name, layer in quantized.named_modules():
        if isinstance(layer, Quantized):
            try:
                pairs[name] = model.get_submodule(name), layer
            except AttributeError as error:
                raise ValueError(f"quantized has a layer {name!r} that model has not") from error
    if not pairs and any(isinstance(layer, Quantized) for layer in model.modules()):
        raise ValueError("model has quantised layers and quantized has none: the original comes first")
    distances = {name: Distance() for name in pairs}

    def compare(name: str, layer: nn.Module, _, args: tuple, kwargs: dict, output: Any) -> None:
        distances[name].add(layer(*args, **kwargs), output)

    args, kwargs = (), {}
    if isinstance(inputs, dict):
        kwargs = inputs
    else:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
    hooks = []
    training = {m: m.training for whole in (model, quantized) for m in whole.modules()}
    try:
        for m in training:
            m.training = False
        for name, (original, layer) in pairs.items():
            hook = partial(compare, name, layer)
            hooks.append(original.register_forward_hook(hook, with_kwargs=True))
        with torch.no_grad():
            expected = model(*args, **kwargs)
            whole = Distance()
            whole.add(quantized(*args, **kwargs), expected)
    finally:
        for hook in hooks:
            hook.remove()
        for m, mode in training.items():
            m.training = mode
    converted = tuple(
        LayerReport(name, layer.dtype, size_of(original), size_of(layer), distances[name].relative())
        for name, (original, layer) in pairs.items()
    )
    left = tuple(left_in(model, pairs))
    return QuantizationReport(converted, left, size_of(model), size_of(quantized), whole.relative())


def left_in(model: nn.Module, converted: Collection[str]) -> Iterator[LeftLayer]:
    """What has weights, parameters of two dimensions or more, outside of the modules with these names."""
    why = verdicts(model, ())
    inside = tuple(f"{name}." for name in converted)
    for name, module in model.named_modules():
        if has_weights(module) and name not in converted and not name.startswith(inside):
            reason = why[module] if isinstance(why[module], str) else SKIPPED
            yield LeftLayer(name, type(module).__name__, reason)


def has_weights(module: nn.Module) -> bool:
    """Its own ones; what is fused has them for its parts."""
    large = (p is not None and p.dim() > 1 for p in module._parameters.values())
    return isinstance(module, FusedPart) or (any(large) and not isinstance(module, FusedLinear))


def size_of(module: nn.Module) -> int:
    """Bytes of the parameters and buffers, those that are shared once."""
    return sum(t.nbytes for t in {*module.parameters(), *module.buffers()})
