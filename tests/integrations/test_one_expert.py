"""Checkpoints of one expert a token, whose weights transformers divides by themselves."""

import pytest

from moe_aiter import MoE
from moe_aiter.integrations.checkpoints.families import FAMILIES, from_json


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_weights_of_1_are_refused(name):
    """transformers weighs such an expert 1; an MoE would weigh it by its score."""
    config = {"hidden_size": 8, "num_experts_per_tok": 1, "norm_topk_prob": True}
    widths = ("num_experts", "num_local_experts", "moe_intermediate_size", "intermediate_size")
    kwargs = FAMILIES[name].moe_kwargs(config | dict.fromkeys(widths, 4))
    with pytest.raises(ValueError, match="top_k=1 makes every routing weight 1"):
        MoE(**kwargs)
    del kwargs["renormalize"]  # as older versions wrote it for Mixtral
    assert from_json(kwargs)["renormalize"]
