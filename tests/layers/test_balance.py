"""The selection bias: how it chooses, what is counted and when, how it moves, and what is saved of it."""

import copy
import io

import forked
import pytest
import torch
from check import few
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_aiter import MoE, Router, balance_step, load_statistics, route
from moe_aiter.routing.balance import count_choices, selection_bias_step
from moe_aiter.routing.choices import GroupLimit

H, WIDTH, E, K, T = 16, 8, 6, 2, 13


def build(device="cpu", **options):
    return MoE(H, WIDTH, E, K, selection_bias=True, device=device, **options)


def tokens(device="cpu", num_tokens=T, dtype=torch.float32):
    return torch.randn(num_tokens, H, device=device, dtype=dtype)


def step_by_hand(bias, load, rate, rule, zero_mean):
    mean = sum(load) / len(load)
    steps = []
    for c in load:
        v = mean - c
        steps.append(rate * ((v > 0) - (v < 0)) if rule == "sign" else rate * v / mean if mean else 0.0)
    off = sum(steps) / len(steps) if zero_mean else 0.0
    return [b + s - off for b, s in zip(bias, steps, strict=True)]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_chosen_with_the_bias_and_weighed_without(device, score, renormalize):
    logits = torch.randn(T, E, device=device, dtype=torch.float64).requires_grad_()
    bias = torch.tensor([0.5, -0.5, 0.0, 0.25, 0.0, -0.25], device=device)
    routing = route(logits, K, score=score, renormalize=renormalize, scale=1.5, selection_bias=bias)
    p = routing.scores.tolist()
    for t, row in enumerate(p):
        ids = sorted(range(E), key=lambda e, row=row: (-(row[e] + bias[e].item()), e))[:K]
        total = sum(row[e] for e in ids) if renormalize else 1.0
        assert routing.expert_ids[t].tolist() == ids
        torch.testing.assert_close(routing.routing_weights[t].tolist(), [row[e] / total * 1.5 for e in ids])
    assert routing.routing_weights.dtype == torch.float64
    how = {"score": score, "renormalize": renormalize, "selection_bias": bias}
    assert torch.autograd.gradcheck(lambda z: route(z, K, **how)[1:3], logits)


def test_ties_of_biased_scores_go_to_the_lower_expert(device):
    bias = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0, 0.5], device=device)
    routing = route(torch.zeros(3, E, device=device), 4, score="sigmoid", selection_bias=bias)
    assert routing.expert_ids.tolist() == [[1, 3, 5, 0]] * 3


def test_a_group_is_masked_by_0_or_by_minus_infinity(device):
    """Where a biased score is below 0, an expert that is masked by 0 is chosen before it."""
    logits, bias = torch.zeros(1, 4, device=device), torch.tensor([0.0, -1.0, -0.4, -0.4], device=device)
    for masked, ids in ((-float("inf"), [[0, 1]]), (0.0, [[0, 2]])):
        limit = GroupLimit(2, 1, "max", masked)
        routing = route(logits, 2, score="sigmoid", choice=limit, selection_bias=bias)
        assert routing.expert_ids.tolist() == ids


@pytest.mark.parametrize("zero_mean", [False, True])
@pytest.mark.parametrize("rule", ["sign", "proportional"])
@pytest.mark.parametrize(
    "load", [[3, 0, 5, 1], [4, 4, 4, 4], [0, 0, 0, 0], [1, 1, 1, 0], [10**9, 1, 1, 2]], ids=str
)
@pytest.mark.pairwise
def test_step_by_hand(device, load, rule, zero_mean):
    bias = torch.tensor([0.1, 0.0, -0.3, 0.2], device=device)
    step = selection_bias_step(bias, torch.tensor(load, device=device), 0.01, rule, zero_mean)
    want = step_by_hand([0.0] * 4, load, 0.01, rule, zero_mean)
    assert step.dtype == torch.float32
    torch.testing.assert_close(step.tolist(), want, rtol=1e-6, atol=1e-8)


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def keeping_products():
    return create_selective_checkpoint_contexts(keep_products)


MODES = [
    "plain",
    "reentrant",
    "non-reentrant",
    "selective",
    "compiled",
    "compiled inside",
    "compiled outside",
]


@pytest.mark.parametrize("mode", few(MODES, *MODES[:4], "compiled outside"))
def test_every_choice_counts_once(device, mode):
    """Under every kind of checkpointing, over micro-batches; not in evaluation."""
    torch.compiler.reset()
    moe = build(device)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    run = {
        "plain": moe,
        "reentrant": lambda x: checkpoint(moe, x, use_reentrant=True),
        "non-reentrant": lambda x: checkpoint(moe, x, use_reentrant=False),
        "selective": lambda x: checkpoint(moe, x, use_reentrant=False, context_fn=keeping_products),
        "compiled": compiled,
        "compiled inside": lambda x: checkpoint(compiled, x, use_reentrant=False),
        "compiled outside": torch.compile(
            lambda x: checkpoint(moe, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
        ),
    }[mode]
    want = torch.zeros(E, dtype=torch.int64, device=device)
    for _ in range(3):
        x = tokens(device).requires_grad_()
        run(x).square().sum().backward()
        with torch.no_grad():
            moe.eval()
            want += moe(x, return_routing=True)[1].plan.group_sizes
            moe.train()
    assert torch.equal(moe.load, want) and want.sum() == 3 * T * K
    balance_step(moe, 0.01)
    assert moe.load.count_nonzero() == 0
    step = step_by_hand([0.0] * E, want.tolist(), 0.01, "sign", False)
    torch.testing.assert_close(moe.router.selection_bias.tolist(), step, rtol=1e-6, atol=0)


def test_a_balance_of_numbers_beyond_float32_moves_nothing(device):
    load = torch.full((E,), 2**24 + 1, device=device)
    for rule in ("sign", "proportional"):
        assert selection_bias_step(torch.zeros(E, device=device), load, 0.01, rule).count_nonzero() == 0


def test_a_hook_of_the_optimizer(device):
    model = nn.Sequential(build(device), nn.Linear(H, H, device=device), build(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: balance_step(model, rule="proportional", zero_mean=True))
    model(tokens(device)).sum().backward()
    optimizer.step()
    for moe in (model[0], model[2]):
        assert moe.router.selection_bias.abs().max() > 0 and moe.load.count_nonzero() == 0
        assert moe.router.selection_bias.sum().abs() < 1e-8
        assert not moe.router.selection_bias.requires_grad


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_evens_the_load(device, score):
    moe, x = build(device, score=score), tokens(device, 256) + 1
    imbalance = []
    for _ in range(150):
        moe(x)
        imbalance.append(load_statistics(moe.load).imbalance.item())
        balance_step(moe, 0.01)
    assert imbalance[0] > 0.5 and imbalance[-1] < 0.3


def test_no_tokens_move_nothing(device):
    moe = build(device)
    moe(tokens(device, 0)).sum().backward()
    balance_step(moe, rule="proportional")
    assert moe.router.selection_bias.count_nonzero() == 0


def test_state(device):
    moe = build(device)
    moe.router.selection_bias += torch.linspace(-1, 1, E, device=device)
    moe(tokens(device))
    assert set(moe.state_dict()) == {
        "router.weight",
        "router.selection_bias",
        "experts.gate_up",
        "experts.down",
    }
    file = io.BytesIO()
    torch.save(moe.state_dict(), file)
    file.seek(0)
    other = build(device)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.router.selection_bias, moe.router.selection_bias)
    twin = copy.deepcopy(moe)
    assert torch.equal(twin.load, moe.load) and repr(twin) == repr(moe) and "selection_bias=True" in repr(moe)
    assert Router(H, E, K).selection_bias is None and MoE(H, WIDTH, E, K).load is None


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casts_leave_the_bias_float32(device, cast):
    moe = build(device)
    moe.router.selection_bias += torch.linspace(-1, 1, E, device=device) / 3
    before = moe.router.selection_bias.clone()
    getattr(moe, cast)()
    assert torch.equal(moe.router.selection_bias, before) and moe.router.selection_bias.dtype == torch.float32
    assert "router.selection_bias" in moe.state_dict() and moe.load.dtype == torch.int64
    assert moe(tokens(device, dtype=moe.router.weight.dtype)).dtype == moe.router.weight.dtype


def test_from_the_meta_device(device):
    moe = MoE(H, WIDTH, E, K, selection_bias=True, device="meta").to_empty(device=device)
    moe.reset_parameters()
    assert moe.router.selection_bias.count_nonzero() == 0 and moe.load.count_nonzero() == 0
    moe(tokens(device))
    assert moe.load.sum() == T * K


def one_rank(rank, folder, world):
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(build(), build())
    torch.manual_seed(rank)
    for num_tokens in (3 + rank, 5):  # uneven, over two micro-batches
        model(tokens(num_tokens=num_tokens))
    loads = [moe.load.clone() for moe in model]
    balance_step(model, 0.01, rule="proportional", group=torch.distributed.group.WORLD)
    torch.save((loads, [moe.router.selection_bias for moe in model]), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.ranks
def test_counts_are_summed_over_ranks(tmp_path):
    forked.call(one_rank, 2, str(tmp_path), 2)
    (a_loads, a_bias), (b_loads, b_bias) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for layer in range(2):
        assert torch.equal(a_bias[layer], b_bias[layer])
        load = (a_loads[layer] + b_loads[layer]).tolist()
        assert sum(load) == (3 + 4 + 5 + 5) * K and a_loads[layer].tolist() != b_loads[layer].tolist()
        want = step_by_hand([0.0] * E, load, 0.01, "proportional", False)
        torch.testing.assert_close(a_bias[layer].tolist(), want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: balance_step(build(), rule="tanh"), "unknown rule 'tanh'; known: sign, proportional"),
        (lambda: balance_step(build(), 0.0), "rate must be above 0 and finite, not 0.0"),
        (lambda: balance_step(MoE(H, WIDTH, E, K)), "no MoE with selection_bias=True"),
        (lambda: selection_bias_step(torch.zeros(4), torch.zeros(3), 1.0), r"\(E=4,\) but load is \(E=3,\)"),
        (
            lambda: count_choices(torch.zeros(4), torch.zeros(3)),
            r"total is \(E=4,\) but group_sizes is \(E=3,",
        ),
        (
            lambda: route(torch.zeros(2, E), K, selection_bias=torch.zeros(5)),
            r"logits is \(T, E=6\) but selection_bias is \(E=5,\)",
        ),
        (
            lambda: route(torch.zeros(2, E), K, selection_bias=torch.zeros(2, E)),
            r"selection_bias must be \(E\)",
        ),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()
