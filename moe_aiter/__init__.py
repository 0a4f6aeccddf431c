"""A Mixture-of-Experts layer for training: Triton on the GPU, C++ and torch on the CPU.

    moe = MoE(hidden=1024, intermediate=512, num_experts=64, top_k=8)
    y = moe(x)  # (..., 1024) -> (..., 1024)

The router sends each token to experts, tokens are permuted to lie by expert, two grouped matmuls run, and the
rows return to token order.  Each step is a differentiable function, listed here.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from . import config as _config  # a wrong setting is an error of `import moe_aiter`
from . import torch_ops as _torch_ops

if TYPE_CHECKING:  # checkers and editors read these; at run time `__getattr__` imports the same
    # isort: off
    # fmt: off
    from .kernels.base.activations import swiglu_limit, swiglu_softcap
    from .kernels.dense.gemm import gemm
    from .kernels.experts.glu import glu
    from .kernels.experts.keep_fp8 import keep_fp8_weights
    from .kernels.experts.mlp import expert_mlp
    from .kernels.grouped.gmm import gmm
    from .kernels.grouped.grouped_gemm import grouped_gemm
    from .kernels.grouped.ptgmm import nptgmm, ptgmm
    from .kernels.grouped.scaled_gemm import scaled_gemm
    from .kernels.grouped.segment_gmm import segment_gmm
    from .kernels.grouped.tgmm import tgmm
    from .kernels.rows.sort import sort_by_expert
    from .kernels.rows.topk import topk
    from .kernels.sparse.gemm import sparse_gemm
    from .kernels.sparse.pattern import SparsePattern
    from .layers import (
        Experts, LayerStatistics, LiveTable, LoRAExperts, LoRALinear, MoE, MoERouting, Monitor,
        OptimizedMoELayer, QuantizationReport, Route, RouteDifference, SegmentGEMMWrapper, aux_loss,
        balance_step, fuse_gate_up, fuse_projections, fuse_qkv, linear_with_split_bias, offload, pack_routes,
        patch_linear, preshuffle_weights, quantization_report, quantize, record_routes, replay_routes,
        set_aux_loss, set_loss_scale, unfuse, unpatch_linear, use_main_grad,
    )
    from .op import register_kernel, use
    from .routing import (
        Capacity, ExpertChoice, Forced, GroupLimit, LoadStatistics, RoutePlan, Router, Routing, Sinkhorn,
        TokenRounding, TopP, ZeroCompute, attach_loss, hash_experts, load_balance_loss, load_statistics,
        make_plan, permute, route, route_to, sequence_balance_loss, unpermute, z_loss,
    )
    from .switches import batch_invariance_enabled, enable_batch_invariance
    # isort: on
    # fmt: on

__version__ = _config.VERSION
__all__ = [
    "Capacity", "ExpertChoice", "Experts", "Forced", "GroupLimit", "LayerStatistics", "LiveTable",
    "LoRAExperts", "LoRALinear", "LoadStatistics", "MoE", "MoERouting", "Monitor", "OptimizedMoELayer",
    "QuantizationReport", "Route", "RouteDifference", "RoutePlan", "Router", "Routing", "SegmentGEMMWrapper",
    "Sinkhorn", "SparsePattern", "TokenRounding", "TopP", "ZeroCompute", "attach_loss", "aux_loss",
    "balance_step", "batch_invariance_enabled", "enable_batch_invariance", "expert_mlp", "fuse_gate_up",
    "fuse_projections", "fuse_qkv", "gemm", "glu", "gmm", "grouped_gemm", "hash_experts", "keep_fp8_weights",
    "linear_with_split_bias", "load_balance_loss", "load_statistics", "make_plan", "nptgmm", "offload",
    "pack_routes", "patch_linear", "permute", "preshuffle_weights", "ptgmm", "quantization_report",
    "quantize", "record_routes", "register_kernel", "replay_routes", "route", "route_to", "scaled_gemm",
    "segment_gmm", "sequence_balance_loss", "set_aux_loss", "set_loss_scale", "sort_by_expert", "sparse_gemm",
    "swiglu_limit", "swiglu_softcap", "tgmm", "topk", "unfuse", "unpatch_linear", "unpermute", "use",
    "use_main_grad", "z_loss",
]  # fmt: skip

_MODULES = {  # module: its public names; all others are of layers
    "kernels.base.activations": "swiglu_limit swiglu_softcap",
    "kernels.dense.gemm": "gemm",
    "kernels.experts.keep_fp8": "keep_fp8_weights",
    "kernels.experts.glu": "glu",
    "kernels.experts.mlp": "expert_mlp",
    "kernels.grouped.gmm": "gmm",
    "kernels.grouped.grouped_gemm": "grouped_gemm",
    "kernels.grouped.ptgmm": "nptgmm ptgmm",
    "kernels.grouped.scaled_gemm": "scaled_gemm",
    "kernels.grouped.segment_gmm": "segment_gmm",
    "kernels.grouped.tgmm": "tgmm",
    "kernels.rows.sort": "sort_by_expert",
    "kernels.rows.topk": "topk",
    "kernels.sparse.gemm": "sparse_gemm",
    "kernels.sparse.pattern": "SparsePattern",
    "op": "register_kernel use",
    "routing": (
        "Capacity ExpertChoice Forced GroupLimit LoadStatistics RoutePlan Router Routing Sinkhorn "
        "TokenRounding TopP ZeroCompute attach_loss hash_experts load_balance_loss load_statistics make_plan "
        "permute route route_to sequence_balance_loss unpermute z_loss"
    ),
    "switches": "batch_invariance_enabled enable_batch_invariance",
}
_MODULE = dict.fromkeys(__all__, "layers")
_MODULE |= {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str):
    """Import a public name, or a module of the package, when it is first asked for."""
    if name in _MODULE:
        globals()[name] = value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
        return value
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_torch_ops.define_on_demand()
