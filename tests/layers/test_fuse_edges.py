"""Where fused projections must not share, and where they refuse to run."""

import pytest
import torch
from torch import nn

from moe_aiter.layers.fuse import fuse_gate_up

D, D_KV = 16, 8


def test_in_inference_mode_nothing_is_shared():
    """Its tensors do not say that they were changed in place."""
    q, k = fuse_gate_up(nn.Linear(D, D), nn.Linear(D, D_KV))
    with torch.inference_mode():
        x = torch.randn(5, D)
        torch.testing.assert_close(q(x), nn.functional.linear(x, q.weight, q.bias))
        x.mul_(2)
        torch.testing.assert_close(k(x), nn.functional.linear(x, k.weight, k.bias))
    assert not q.shared[0].round.inputs
    with torch.inference_mode():
        q, k = fuse_gate_up(nn.Linear(D, D), nn.Linear(D, D_KV))
    with torch.no_grad():
        q(x.clone())
        torch.testing.assert_close(k(x), nn.functional.linear(x, k.weight, k.bias))


def test_data_parallel_is_refused():
    """It copies modules, which go on to share the weight of the first device."""
    q, _ = fuse_gate_up(nn.Linear(D, D), nn.Linear(D, D_KV))
    with pytest.raises(RuntimeError, match="not for nn.DataParallel"):
        q._replicate_for_data_parallel()(torch.randn(2, D))
