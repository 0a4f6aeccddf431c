"""The nn.Modules, and what is called like one."""

from .attention import mha_fwd
from .experts import Experts
from .fuse import fuse_gate_up, fuse_projections, fuse_qkv, unfuse
from .linear import (
    LinearPatch,
    ShuffledWeight,
    linear_with_split_bias,
    patch_linear,
    preshuffle_weights,
    unpatch_linear,
)
from .lora import LoRAExperts, LoRALinear
from .moe import MoE, MoERouting
from .monitor import LayerStatistics, LiveTable, Monitor
from .offloaded import offload
from .optimized import OptimizedMoELayer
from .quantized import QuantizationReport, quantization_report, quantize
from .route_arrays import Route, pack_routes
from .route_replay import RouteDifference, RouteReplay, record_routes, replay_routes
from .segment import SegmentGEMMWrapper
from .training import aux_loss, balance_step, set_aux_loss, set_loss_scale, use_main_grad

__all__ = [
    "Experts", "LayerStatistics", "LinearPatch", "LiveTable", "LoRAExperts", "LoRALinear", "MoE",
    "MoERouting", "Monitor", "OptimizedMoELayer", "QuantizationReport", "Route", "RouteDifference",
    "RouteReplay", "SegmentGEMMWrapper", "ShuffledWeight", "aux_loss", "balance_step", "fuse_gate_up",
    "fuse_projections", "fuse_qkv", "linear_with_split_bias", "mha_fwd", "offload", "pack_routes",
    "patch_linear", "preshuffle_weights", "quantization_report", "quantize", "record_routes", "replay_routes",
    "set_aux_loss", "set_loss_scale", "unfuse", "unpatch_linear", "use_main_grad",
]  # fmt: skip
