"""Text from a trained model."""

import torch

from .model import Transformer

FREEZING = 1e-6  # logits divided by less could be infinite; from here on the likeliest byte is taken


@torch.no_grad()
def generate(model: Transformer, length: int, temperature: float, seed: int, prompt: bytes = b"\0") -> bytes:
    """Continue `prompt` by `length` bytes.  Byte 0 starts a file, so the default is text from nothing."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)  # (1, S)
    for _ in range(length):
        logits, _ = model(tokens[:, -len(model.cos) :])
        last = logits[0, -1].float().cpu()  # (256,)
        if temperature > FREEZING:
            choice = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
        else:
            choice = last.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, choice.to(device)[None]], 1)
    return bytes(tokens[0, len(prompt) :].tolist())


def readable(text: bytes) -> str:
    """For a terminal: where a new file begins a new line does, and nothing unprintable is left."""
    decoded = text.replace(b"\0", b"\n").decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
