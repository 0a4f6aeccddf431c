"""AITER's `shuffle_weight`, its inverse, and a module for shuffled weights; AITER has only the first."""

from ....kernels.base.shuffle import shuffle_weight, unshuffle_weight
from ....layers.linear import ShuffledWeight

__all__ = ["ShuffledWeight", "shuffle_weight", "unshuffle_weight"]
