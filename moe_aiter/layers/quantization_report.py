"""What quantising a model costs in accuracy and saves in memory."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .quantized import Quantized


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One converted layer: its weights before and after, and how far off it is for the same input."""

    name: str
    dtype: str
    bytes_before: int
    bytes_after: int
    error: float | None  # relative, in the Frobenius norm; None where the inputs did not reach it


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """`layers`, one each; and of the whole model its parameters and buffers, and the error of its output."""

    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    error: float

    def __str__(self) -> str:
        rows = [("layer", "dtype", "MB before", "MB after", "error")]
        rows += [line(r.name or "(the model)", r.dtype, r) for r in self.layers]
        rows.append(line("whole model", "", self))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  "
            + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:], strict=True))
            for row in rows
        ]
        return "\n".join(texts)


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


def quantization_report(model: nn.Module, quantized: nn.Module, inputs: Any) -> QuantizationReport:
    """Run `model`, and `quantized`, as `quantize` made it of that, on the same inputs, and compare.

    `inputs` is the argument of the model, a tuple of several, or a dict of those by name.  Each converted
    layer is also given what the one in `model` is given, so that its error is its own and not that of those
    before.  Both run in evaluation mode and without gradients; `print(report)` shows a table.  This waits for
    the device.
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
    layers = tuple(
        LayerReport(name, layer.dtype, size_of(original), size_of(layer), distances[name].relative())
        for name, (original, layer) in pairs.items()
    )
    return QuantizationReport(layers, size_of(model), size_of(quantized), whole.relative())


def size_of(module: nn.Module) -> int:
    """Bytes of the parameters and buffers, those that are shared once."""
    return sum(t.nbytes for t in {*module.parameters(), *module.buffers()})
