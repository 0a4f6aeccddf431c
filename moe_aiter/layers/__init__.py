"""The nn.Modules."""

from .experts import Experts
from .moe import MoE, MoERouting
from .optimized import OptimizedMoELayer

__all__ = ["Experts", "MoE", "MoERouting", "OptimizedMoELayer"]
