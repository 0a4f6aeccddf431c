"""What travels for tokens and for the gradients of results (T, H): all their bits, or 8 of each number.

Experts with `fp8=` quantise their tokens row by row, or in blocks of a row.  So the rank that has a token can
do it before it sends the token: what arrives has the same bits, and half the bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.base.fp8 import ROW_BLOCK
from ..kernels.base.launch import cdiv
from ..kernels.experts.fp8 import ALL, BLOCK, QuantizedTokens, quantize_tokens
from ..kernels.quantize.rows import FORMATS
from .overflow import options_of
from .transport import Transfer

How = tuple[str, bool] | None  # the format, and whether scales are those of blocks; None: all bits
Slots = Tensor | QuantizedTokens  # the tokens of all ranks (R * T, H)


class Wire(NamedTuple):
    """How the tensors of one call travel."""

    x: How = None  # the tokens
    again: How = None  # the tokens in backward
    dout: How = None


def wire_of(experts: object) -> Wire:
    """Return in which form these experts need what they receive.

    Products of 8 bits read the tokens as codes.  Only if those for the weights' gradients are of 8 bits too,
    backward reads nothing else of the tokens, and of the gradients unless there is a bias.
    """
    options = options_of(experts)
    recipe = None if options is None else options.fp8
    if recipe is None:
        return Wire()
    x = "e4m3", recipe == BLOCK
    if not recipe.endswith(ALL):
        return Wire(x)
    has_bias = getattr(experts, "down_bias", None) is not None
    return Wire(x, x, None if has_bias else (recipe.removesuffix(ALL), False))


def send(transfer: Transfer, t: Tensor, how: How) -> None:
    """Begin to send `t` (T, H)."""
    if how is None:
        return transfer.send(t)
    x8, scale = quantize_tokens(t, *how)
    transfer.send(x8.view(torch.uint8))  # which every collective takes
    transfer.send(scale if how[1] else scale[:, None])


def receive(transfer: Transfer, how: How, like: Tensor) -> Slots:
    """Return what all ranks have sent, which the dtype of `like` is for."""
    x8, *scales = transfer.receive()
    if how is None:
        return x8
    format, blocks = how
    nothing = like.new_zeros(()).expand(x8.shape)
    return QuantizedTokens(nothing, x8.view(FORMATS[format]), scales[0] if blocks else scales[0][:, 0])


def parts_of(slots: Slots) -> tuple[Tensor, ...]:
    """Return the tensors that slots consist of, the first of which is x in a graph."""
    return (slots,) if isinstance(slots, Tensor) else slots


def num_bytes(tokens: int, hidden: int, itemsize: int, how: How) -> int:
    """Return how many bytes travel for (tokens, hidden) numbers of this size."""
    if how is None:
        return tokens * hidden * itemsize
    return tokens * (hidden + 4 * (cdiv(hidden, ROW_BLOCK) if how[1] else 1))
