"""The auxiliary losses under a scaled training loss, and routers that could not train."""

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_aiter import ExpertChoice, MoE, Router, load_balance_loss, route, route_to, set_loss_scale, z_loss
from moe_aiter.routing import choices

H, E, K = 16, 8, 2
COEFS = {"load_balance_coef": 0.3, "z_loss_coef": 0.2}


def layers(device="cpu"):
    """A layer with losses, and a copy to which they are added by hand."""
    ours = MoE(H, 8, E, K, **COEFS, device=device)
    theirs = copy.deepcopy(ours)
    theirs.load_balance_coef = theirs.z_loss_coef = 0.0
    return ours, theirs


def by_hand(moe, x):
    out, (routing, plan) = moe(x, return_routing=True)
    balance = load_balance_loss(routing.scores, group_sizes=plan.group_sizes)
    return out.square().mean() + 0.3 * balance + 0.2 * z_loss(routing.logits)


def assert_same_gradients(ours, theirs, factor=1.0):
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad * factor, rtol=1e-6, atol=1e-6 * factor, msg=name)


@pytest.mark.parametrize("how", ["eager", "checkpoint", "compile"])
def test_micro_batches_of_one_size(device, how):
    ours, theirs = layers(device)
    set_loss_scale(ours, 1 / 4)
    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if how == "compile" else ours
    for x in torch.randn(4, 10, H, device=device):
        out = checkpoint(call, x.requires_grad_(), use_reentrant=False) if how == "checkpoint" else call(x)
        (out.square().mean() / 4).backward()
        (by_hand(theirs, x.detach()) / 4).backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("when", ["before forward", "before backward"])
@pytest.mark.parametrize("compiled", [False, True])
def test_micro_batches_weighed_by_their_tokens(device, when, compiled):
    ours, theirs = layers(device)
    call = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else ours
    ours.loss_scale  # noqa: B018  the scalar exists from here on, also for the compiled graph
    sizes = torch.tensor([3.0, 10.0, 7.0], device=device)
    for n in sizes:
        x, share = torch.randn(int(n), H, device=device), n / sizes.sum()
        if when == "before forward":
            set_loss_scale(ours, share)
        out = call(x)
        if when == "before backward":
            set_loss_scale(ours, share)
        (out.square().mean() * share).backward()
        (by_hand(theirs, x) * share).backward()
    assert_same_gradients(ours, theirs)


def test_grad_scaler(device):
    ours, theirs = layers(device)
    x, scaler = torch.randn(10, H, device=device), torch.amp.GradScaler(device.type, init_scale=2.0**12)
    scale = scaler.scale(torch.ones((), device=device))
    set_loss_scale(ours, scale)
    scaler.scale(ours(x).square().mean()).backward()
    by_hand(theirs, x).backward()
    assert_same_gradients(ours, theirs, factor=2.0**12)


def test_the_scale_is_1_at_first_and_in_no_state_dict(device):
    ours, theirs = layers(device)
    x = torch.randn(10, H, device=device)
    ours(x).square().mean().backward()
    by_hand(theirs, x).backward()
    assert_same_gradients(ours, theirs)
    set_loss_scale(ours, 0.5)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.bfloat16()
    assert ours.loss_scale.dtype == torch.float32 and ours.loss_scale == 0.5
    assert copy.deepcopy(ours).loss_scale == 0.5
    scale = ours.to("meta").loss_scale  # a meta tensor would have no value
    assert scale.device.type == "cpu" and scale == 0.5


def test_first_touched_in_inference_mode(device):
    ours, theirs = layers(device)
    with torch.inference_mode():
        assert ours.loss_scale == 1
        set_loss_scale(ours, 0.25)
    x = torch.randn(10, H, device=device)
    (ours(x).square().mean() / 4).backward()
    (by_hand(theirs, x) / 4).backward()
    assert_same_gradients(ours, theirs)
    set_loss_scale(ours, 0.5)
    assert ours.loss_scale == 0.5


@pytest.mark.gpu
def test_a_captured_graph_reads_the_new_scale(no_debug):
    moe = MoE(H, 8, E, K, **COEFS, device="cuda")
    x = torch.randn(10, H, device="cuda")
    set_loss_scale(moe, 1.0)
    for _ in range(3):
        moe.zero_grad()
        moe(x).sum().mul(0).backward()
    moe.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe(x).sum().mul(0).backward()
    found = []
    for scale in (1.0, 0.25):
        set_loss_scale(moe, scale)
        moe.zero_grad(set_to_none=False)
        graph.replay()
        found.append(moe.router.weight.grad.clone())
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0] / 4)


@pytest.mark.parametrize(
    "scale, error, message",
    [
        (torch.ones(2), ValueError, "scale must be a scalar, but it has shape"),
        (float("nan"), ValueError, "scale must be at least 0 and finite, not nan"),
        (-1.0, ValueError, "scale must be at least 0"),
        ("1", TypeError, "scale"),
        (None, TypeError, "scale"),
    ],
)
def test_a_scale_that_cannot_be(scale, error, message):
    with pytest.raises(error, match=message):
        set_loss_scale(layers()[0], scale)


def test_a_model_without_layers():
    with pytest.raises(ValueError, match="the model has no MoE"):
        set_loss_scale(torch.nn.Linear(2, 2), 1.0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_one_expert_a_token_trains_the_router(device, score):
    moe = MoE(H, 8, E, 1, score=score, device=device)
    moe(torch.randn(20, H, device=device)).square().sum().backward()
    assert moe.router.weight.grad.any() and not moe.router.renormalize
    assert MoE(H, 8, E, 2, score=score).router.renormalize


@pytest.mark.parametrize("score, name", [("softmax", "renormalize"), ("topk_softmax", "score")])
def test_weights_of_1_are_refused(score, name):
    kind = {"score": score} | ({"renormalize": True} if name == "renormalize" else {})
    message = f"{name}=.* makes (every|each) routing weight 1,? and the router's gradient 0"
    logits = torch.randn(3, E)
    for call in (
        lambda: MoE(H, 8, E, 1, **kind),
        lambda: Router(H, E, 1, **kind),
        lambda: route(logits, 1, **kind),
        lambda: route_to(logits, torch.zeros(3, 1, dtype=torch.int64), **kind),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_number_of_experts_a_token_can_have_decides(device):
    """Not `top_k`, which is a mean for ExpertChoice."""
    x = torch.randn(20, H, device=device)
    for top_k, choice, renormalize in ((2, ExpertChoice(1), None), (1, ExpertChoice(), True)):
        moe = MoE(H, 8, E, top_k, choice=choice, renormalize=renormalize, device=device)
        moe(x).square().sum().backward()
        assert moe.router.weight.grad.abs().max() > 1e-3
    with pytest.raises(ValueError, match="with one expert a token makes every routing weight 1"):
        MoE(H, 8, E, 2, choice=ExpertChoice(1), renormalize=True)


def test_one_given_expert_trains_the_router(device):
    moe, ids = MoE(H, 8, E, K, device=device), torch.randint(E, (20, 1), device=device)
    moe(torch.randn(20, H, device=device), expert_ids=ids).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-3


def test_the_scale_follows_the_layer(device):
    moe = MoE(H, 8, E, K, **COEFS, device="meta")
    set_loss_scale(moe, 0.5)
    moe.to_empty(device=device).reset_parameters()
    assert moe._loss_scale.device.type == device.type and moe._loss_scale == 0.5
    torch.nn.Sequential(moe).to(torch.float64)
    assert moe._loss_scale == 0.5 and moe._loss_scale.dtype == torch.float32


def test_expert_choice_warns_once():
    choices.warn_of_later_tokens.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ExpertChoice()
        ExpertChoice(2)
    (warning,) = caught
    assert "causal" in str(warning.message) and warning.filename == __file__
