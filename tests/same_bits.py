"""Whether a token has the same bits in another batch: its output and its gradients."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Results = dict[str, Tensor]  # by name, (T, ...)


def results(layer: Callable, leaves: Iterable[Tensor], dout: Tensor | None, tokens: Tensor) -> Results:
    """Return what `layer` computes for some tokens: the output, and the gradients of leaves that need one.

    leaves: (T, ...); `layer` takes the rows `tokens` of each.  dout: the gradient of the output, (T, ...), or
    None for inference.
    """
    mine = [t.detach()[tokens].requires_grad_(t.requires_grad and dout is not None) for t in leaves]
    if dout is None:
        with torch.no_grad():
            return {"output": layer(*mine)}
    out = layer(*mine)
    wanted = [t for t in mine if t.requires_grad]
    grads = torch.autograd.grad(out, wanted, dout[tokens])
    return {"output": out.detach()} | {f"gradient {n}": g for n, g in enumerate(grads)}


def differences(found: Results, whole: Results, tokens: Tensor) -> str:
    """Say in how many tokens the results differ from the same tokens of the whole batch; "" if in none."""
    text = []
    for name, got in found.items():
        expected = whole[name][tokens]
        same = (got == expected) | (got.isnan() & expected.isnan())
        wrong = (~same.flatten(1).all(1)).sum().item()
        if wrong:
            text.append(f"{name} of {wrong} of {len(tokens)} tokens")
    return ", ".join(text)
