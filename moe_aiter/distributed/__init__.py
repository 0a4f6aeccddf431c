"""Several GPUs: expert parallelism, FSDP2 and sharded checkpoints, on torch.distributed."""

from .checkpoint import export_safetensors, load_sharded, save_sharded
from .clip import clip_grad_norm_
from .experts import ExpertDispatcher
from .mesh import expert_mesh
from .parallelize import parallelize, parameter_groups, reduce_gradients
from .simulate import simulate
from .style import ExpertParallel

__all__ = [
    "ExpertDispatcher", "ExpertParallel", "clip_grad_norm_", "expert_mesh", "export_safetensors",
    "load_sharded", "parallelize", "parameter_groups", "reduce_gradients", "save_sharded",
    "simulate",
]  # fmt: skip
