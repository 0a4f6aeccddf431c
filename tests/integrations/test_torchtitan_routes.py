"""Routes of torchtitan's models: their own routers weigh the replayed experts."""

import pytest
import torch

pytest.importorskip("torchtitan.config.override", reason="torchtitan 0.3 or newer is not installed")

from torch._dynamo.utils import counters

from moe_aiter import record_routes, replay_routes

from .test_torchtitan import FLAVORS, moe_of, tokens


@pytest.mark.parametrize("overridden", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS[:2], ids=[name for name, _ in FLAVORS[:2]])
def test_replay(flavor, overridden):
    moe = moe_of(flavor, overridden)
    x = tokens(moe)
    with record_routes(moe, weights=True) as routes:
        want = moe(x)
    assert list(routes) == ["routed_experts"]
    with replay_routes(moe, routes) as replay:
        out = moe(x)
        out.square().mean().backward()
    assert torch.equal(out, want) and replay.differences()["routed_experts"] == (0, 0)
    assert moe.router.gate.weight.grad.abs().sum() > 0
    with torch.no_grad():
        moe.router.gate.weight += torch.randn_like(moe.router.gate.weight)
    with record_routes(moe) as other:
        moe(x)
    ids = routes["routed_experts"][0].expert_ids
    assert not torch.equal(other["routed_experts"][0].expert_ids, ids)
    with replay_routes(moe, routes, weights=True) as replay:
        torch.testing.assert_close(moe(x), want)
    assert replay.differences()["routed_experts"].choices > 0


@pytest.mark.parametrize("overridden", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_dropped_tokens(top_k, overridden):
    """No expert adds to them, and torchtitan counts the experts of all of its rows."""
    moe, found = moe_of(FLAVORS[0], overridden), []
    moe.router.top_k = moe.routed_experts.token_dispatcher.top_k = top_k
    x = tokens(moe)
    moe.routed_experts.register_forward_hook(lambda m, args, out: found.append(out.flatten(0, 1)))
    with record_routes(moe) as routes:
        moe(x)
    ids = routes["routed_experts"][0].expert_ids
    ids[[0, 3]] = -1
    with replay_routes(moe, routes):
        moe(x)
    want, out = found
    assert out[[0, 3]].count_nonzero() == 0
    rest = (ids >= 0).any(1)
    torch.testing.assert_close(out[rest], want[rest])


@pytest.mark.parametrize("top_k", [2, 3])
def test_one_group_of_experts(top_k):
    """The score of the group, the sum of two of its experts, is no choice of experts."""
    moe = moe_of(FLAVORS[0], overridden=False)
    moe.router.num_expert_groups = moe.router.num_limited_groups = 1
    moe.router.top_k = moe.routed_experts.token_dispatcher.top_k = top_k
    x = tokens(moe)
    with record_routes(moe) as routes:
        want = moe(x)
    with replay_routes(moe, routes) as replay:
        assert torch.equal(moe(x), want)
    count = x[..., 0].numel()
    assert replay.players["routed_experts"].totals.tolist() == [0, count * top_k, 0, count]


@pytest.mark.full
@pytest.mark.parametrize("overridden", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS[:2], ids=[name for name, _ in FLAVORS[:2]])
def test_compiled(flavor, overridden):
    """Without a graph break; further blocks need no further graph."""
    torch.compiler.reset()
    counters.clear()
    moe = moe_of(flavor, overridden)
    x, found = tokens(moe), []
    with record_routes(moe) as routes:
        moe(x)
    with torch.no_grad():
        moe.router.gate.weight += torch.randn_like(moe.router.gate.weight)
    with replay_routes(moe, routes) as replay:
        want = moe(x)
    differences = replay.differences()
    run = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with replay_routes(moe, routes) as replay:
            out = run(x)
            out.square().mean().backward()
        torch.testing.assert_close(out, want)
        assert replay.differences() == differences
        with record_routes(moe) as again:
            run(x)
        assert len(again["routed_experts"]) == 1
        found.append(counters["stats"]["unique_graphs"])
    assert found == [2, 2]
