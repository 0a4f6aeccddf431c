"""The transformer: shapes, causality, positions, and what counts as active."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from language_model.model import Transformer, active_params, attend, flops_per_token, rotary, rotate
from language_model.presets import PRESETS

pytestmark = pytest.mark.full
CONFIG = PRESETS["test"]
DENSE = dataclasses.replace(CONFIG, dense=True)


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
def test_logits_and_routing(config):
    model = Transformer(config)
    logits, routings = model(torch.randint(256, (3, config.sequence)))
    assert logits.shape == (3, config.sequence, 256)
    assert len(routings) == (0 if config.dense else config.layers)
    for routing in routings:
        assert routing.routing.scores.shape == (3 * config.sequence, config.num_experts)
        assert routing.plan.group_sizes.sum() == 3 * config.sequence * config.top_k


@pytest.mark.parametrize("way", ["to_empty", "assign"])
def test_from_the_meta_device(way):
    """The angles, which no state dict has, are there."""
    want = Transformer(CONFIG)
    with torch.device("meta"):
        got = Transformer(CONFIG)
    if way == "to_empty":
        got.to_empty(device="cpu")
    got.load_state_dict(want.state_dict(), assign=way == "assign")
    tokens = torch.randint(256, (2, CONFIG.sequence))
    assert torch.equal(got(tokens)[0], want(tokens)[0])


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
def test_no_position_sees_the_future(config):
    model = Transformer(config)
    tokens = torch.randint(256, (2, config.sequence))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-2)


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("top_k", [1, 3])
def test_dense_model_has_the_active_size_of_the_moe_model(top_k, shared):
    config = dataclasses.replace(CONFIG, top_k=top_k, shared_intermediate=shared)
    dense = dataclasses.replace(config, dense=True)
    routers = config.layers * config.hidden * config.num_experts
    moe_model, dense_model = Transformer(config), Transformer(dense)
    assert active_params(moe_model, config) - routers == active_params(dense_model, dense)
    assert active_params(dense_model, dense) == sum(p.numel() for p in dense_model.parameters())


def test_flops_count_every_matmul_of_the_dense_model():
    model = Transformer(DENSE)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    scores = 6 * DENSE.layers * DENSE.hidden * DENSE.sequence
    gains = (2 * DENSE.layers + 1) * DENSE.hidden
    assert flops_per_token(model, DENSE) == 6 * (matrices + gains) + scores


def test_weights_depend_on_the_seed_alone():
    def weights(seed):
        torch.rand(2)
        model = Transformer(dataclasses.replace(CONFIG, seed=seed))
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_positions_are_relative():
    """Turned queries and keys have products that depend on their distance alone, and keep their lengths."""
    turn = rotary(32, 8)
    q, k = (torch.randn(1, 1, 1, 8).expand(1, 32, 1, 8) for _ in range(2))
    turned_q, turned_k = rotate(q, turn)[0, :, 0], rotate(k, turn)[0, :, 0]  # (32, 8)
    products = turned_q @ turned_k.T
    for distance in (0, 1, 9):
        along = products.diagonal(-distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-5)
    assert torch.allclose(turned_q.norm(dim=-1), q[0, :, 0].norm(dim=-1))
    assert products.diagonal(-1)[0] != products.diagonal(-2)[0]


def test_attention_in_bfloat16_is_as_good_as_torchs(device):
    q, k, v = (torch.randn(2, 3, 40, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    theirs = (F.scaled_dot_product_attention(q, k, v, is_causal=True) - exact).norm()
    assert (attend(q, k, v) - exact).norm() <= 2 * theirs
