"""AITER's `shuffle_weight`, and what AITER lacks: its inverse, and a module that keeps such a weight."""

from ....kernels.base.shuffle import shuffle_weight, unshuffle_weight
from ....layers.linear import ShuffledWeight

__all__ = ["ShuffledWeight", "shuffle_weight", "unshuffle_weight"]
