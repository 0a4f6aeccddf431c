"""Convert Hugging Face checkpoints to the layout of `MoE` and back, and dense checkpoints to MoE.

    from moe_aiter.integrations.checkpoints import convert, load_moe

    convert("Qwen3-30B-A3B", "converted")
    moe = load_moe("converted", "model.layers.3.mlp")
    convert("converted", "for-transformers", to="huggingface")

The command `moe-aiter convert` does the same.  Both need safetensors: pip install '.[convert]'.
"""

from .blocks import load_moe, moe_from_huggingface, state_dict_to_huggingface
from .convert import Report, convert
from .files import CheckpointError
from .upcycle import upcycle

__all__ = [
    "CheckpointError", "Report", "convert", "load_moe", "moe_from_huggingface", "state_dict_to_huggingface",
    "upcycle",
]  # fmt: skip
