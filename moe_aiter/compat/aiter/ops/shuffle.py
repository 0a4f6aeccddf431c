"""AITER's `shuffle_weight`, and its inverse, which AITER lacks."""

from ....kernels.shuffle import shuffle_weight, unshuffle_weight

__all__ = ["shuffle_weight", "unshuffle_weight"]
