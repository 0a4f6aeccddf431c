"""Tensors without values: what runs on them asks for none, so on a GPU it has nothing to wait for."""

import pytest
import torch
from layers.test_routers_on_gpu import COEFS, OPTIONS

from moe_aiter import MoE, balance_step


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_no_value_is_asked_for(options):
    moe = MoE(64, 32, 16, 4, device="meta", **COEFS, **options)
    x = torch.zeros(2, 24, 64, device="meta", requires_grad=True)
    mask = torch.zeros(2, 24, dtype=torch.bool, device="meta")
    out, (routing, _) = moe(x, mask=mask, return_routing=True)
    out.sum().backward()
    balance_step(moe, rule="proportional", zero_mean=True)
    assert all(t.grad.shape == t.shape for t in (x, *moe.parameters()))
    ids, weights = (t.view(2, 24, -1).detach() for t in routing[:2])
    moe(x, expert_ids=ids).sum().backward()
    moe(x, expert_ids=ids, routing_weights=weights, mask=mask).sum().backward()
