"""AITER's names: `aiter` in an import becomes `moe_aiter.compat.aiter`."""

from .ops.deepgemm import deepgemm
from .ops.shuffle import shuffle_weight, unshuffle_weight

__all__ = ["deepgemm", "shuffle_weight", "unshuffle_weight"]
