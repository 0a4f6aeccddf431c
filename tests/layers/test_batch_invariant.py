"""Under batch invariance the bits of a token depend on that token alone."""

import os
import subprocess
import sys

import pytest
import torch

import moe_aiter
from moe_aiter import (
    Capacity,
    ExpertChoice,
    Experts,
    Forced,
    LoRAExperts,
    MoE,
    Router,
    Sinkhorn,
    TokenRounding,
    route,
)
from moe_aiter.invariance import batch_invariant, invariant

# the switch


@pytest.fixture(autouse=True)
def restored():
    before = moe_aiter.batch_invariance_enabled()
    yield
    moe_aiter.enable_batch_invariance(before)


def test_the_switch():
    assert not moe_aiter.batch_invariance_enabled()
    moe_aiter.enable_batch_invariance()
    assert moe_aiter.batch_invariance_enabled()
    moe_aiter.enable_batch_invariance(False)
    assert not moe_aiter.batch_invariance_enabled()


def test_the_environment():
    command = "import moe_aiter; print(moe_aiter.batch_invariance_enabled())"
    env = os.environ | {"MOE_AITER_BATCH_INVARIANT": "1"}
    assert subprocess.check_output([sys.executable, "-c", command], env=env, text=True).strip() == "True"


class Witness(torch.nn.Module):
    """Experts that remember whether batch invariance is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, routing_weights, plan):
        self.seen.append(batch_invariant())
        return x * routing_weights.sum()


@pytest.mark.parametrize("on", [False, True])
def test_a_layer_has_its_own_answer(on):
    moe = MoE(8, 4, 4, 2, batch_invariant=on)
    moe.experts = Witness()
    moe(torch.randn(3, 8))
    assert moe.experts.seen == [on] and not batch_invariant()


def test_a_backward_pass_has_the_answer_of_its_forward_pass(monkeypatch):
    from moe_aiter.kernels.experts import cpu

    seen = []
    original = cpu.expert_loop_backward_op
    monkeypatch.setattr(
        cpu, "expert_loop_backward_op", lambda *i: (seen.append(batch_invariant()), original(*i))[1]
    )
    moe = MoE(8, 4, 4, 2)
    with invariant():
        out = moe(torch.randn(3, 8))
    out.sum().backward()
    assert seen == [True] and not batch_invariant()


# what cannot be invariant


@pytest.mark.filterwarnings("ignore:ExpertChoice")
@pytest.mark.parametrize("kind", [ExpertChoice, Forced, Sinkhorn, TokenRounding])
def test_a_choice_that_compares_tokens_is_refused(kind):
    choice = kind()
    reason = f"batch invariance is on, but {kind.__name__}.* own scores alone"
    with pytest.raises(ValueError, match=reason):
        MoE(8, 4, 4, 2, choice=choice, renormalize=False, batch_invariant=True)
    with invariant(), pytest.raises(ValueError, match=reason):
        route(torch.randn(6, 4), 2, choice=choice, renormalize=False)


def test_capacity_is_refused():
    with pytest.raises(ValueError, match="batch invariance is on, but Capacity.* other tokens"):
        MoE(8, 4, 4, 2, capacity=Capacity(1.0), batch_invariant=True)
    moe = MoE(8, 4, 4, 2, capacity=Capacity(1.0))
    with invariant(), pytest.raises(ValueError, match="other tokens"):
        moe(torch.randn(3, 8))


def test_jitter_is_refused_in_training():
    with pytest.raises(ValueError, match="batch invariance is on, but jitter is 0.1, which is random noise"):
        MoE(8, 4, 4, 2, jitter=0.1, batch_invariant=True)
    router = Router(8, 4, 2, jitter=0.1)
    with invariant():
        router.eval()(torch.randn(3, 8))
        with pytest.raises(ValueError, match="jitter is 0.1"):
            router.train()(torch.randn(3, 8))


@pytest.mark.parametrize("name", ["dropout", "rank_dropout"])
def test_dropout_of_adapters_is_refused_in_training(name):
    moe = MoE(8, 4, 4, 2)
    moe.experts = LoRAExperts(Experts(4, 8, 4), rank=2, **{name: 0.5})
    with invariant():
        moe.eval()(torch.randn(3, 8))
        with pytest.raises(ValueError, match=f"{name} .*0.5"):
            moe.train()(torch.randn(3, 8))
