"""Routers and losses on a GPU: nothing waits, a graph replays them, and two runs give the same bits."""

import pytest
import torch
from layers.test_moe_on_gpu import capture, no_synchronisation
from torch.utils.checkpoint import checkpoint

from moe_aiter import (
    Capacity,
    ExpertChoice,
    Forced,
    GroupLimit,
    MoE,
    Sinkhorn,
    TokenRounding,
    TopP,
    ZeroCompute,
    balance_step,
    hash_experts,
    replay_routes,
)

pytestmark = pytest.mark.gpu

H, WIDTH, E, K, B, S = 256, 128, 16, 4, 4, 128
COEFS = {
    "load_balance_coef": 0.1,
    "sequence_balance_coef": 0.1,
    "global_balance_coef": 0.1,
    "z_loss_coef": 0.01,
}
OPTIONS = [
    {"score": "sqrt_softplus"},
    {"score": "sigmoid", "choice": GroupLimit(4, 2), "selection_bias": True},
    {"choice": GroupLimit(4, 2, "max", 0.0)},
    {"choice": TopP(0.7)},
    {"choice": Sinkhorn()},
    {"choice": ExpertChoice(), "renormalize": False},
    {"choice": TokenRounding(64, "nearest", 4)},
    {"choice": Forced("random")},
    {"choice": Forced()},
    {"capacity": Capacity(1.0)},
    {"capacity": Capacity(1.0, "probability")},
    {"jitter": 0.01},
    {"zero_compute": ZeroCompute(4, 2, real_share=0.5), "capacity": Capacity(1.0), "selection_bias": True},
    {"latent": 64},
    {"score": "sigmoid", "selection_bias": True, "quantile_bins": 100},
]


def build(**options):
    return MoE(H, WIDTH, E, K, device="cuda", dtype=torch.bfloat16, **COEFS, **options)


def tokens():
    return torch.randn(B, S, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def padding():
    return torch.arange(S, device="cuda").expand(B, S) < torch.tensor([[128], [100], [1], [0]], device="cuda")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_waits(no_debug, options):
    moe, x, mask = build(**options), tokens(), padding()
    moe(x, mask=mask).sum().backward()  # compiles the kernels
    with no_synchronisation():
        out, _ = moe(x, mask=mask, return_routing=True)
        out.sum().backward()
        balance_step(moe, rule="proportional", zero_mean=True)


def test_a_given_routing_does_not_wait(no_debug):
    moe, x, mask = build(), tokens(), padding()
    ids = hash_experts(1000, E, K, device="cuda")[torch.randint(1000, (B, S), device="cuda")]
    weights = torch.rand(B, S, K, device="cuda")
    for given in ({}, {"routing_weights": weights}):
        moe(x, expert_ids=ids, mask=mask, **given).sum().backward()
        with no_synchronisation():
            moe(x, expert_ids=ids, mask=mask, **given).sum().backward()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_runs_give_the_same_bits(options):
    moe, x, mask = build(**options), tokens(), padding()

    def step():
        torch.manual_seed(3)
        moe.load.zero_()
        out = moe(x, mask=mask)
        return out, *torch.autograd.grad(out.float().square().sum(), [x, *moe.parameters()])

    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(step(), step(), strict=True))


@pytest.mark.parametrize("options", OPTIONS[:7], ids=str)
def test_a_graph_replays_and_counts(no_debug, options):
    moe, x, mask = build(**options), tokens(), padding()

    def step():
        out = moe(x, mask=mask)
        return out, *torch.autograd.grad(out.float().square().sum(), [x, *moe.parameters()])

    graph, results = capture(step)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        moe.load.zero_()
        graph.replay()
        load = moe.load.clone()
        moe.load.zero_()
        for got, want in zip(results, step(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * want.abs().max().item())
        assert torch.equal(load, moe.load) and load.sum() > 0


def drawn_routes(tokens=B * S):
    """(tokens, 1, k) for a model of one layer."""
    return torch.rand(tokens, 1, E, device="cuda").argsort(2)[..., :K]


def test_replay_waits_for_nothing(no_debug):
    moe, x = build(), tokens()
    with replay_routes(moe, [drawn_routes() for _ in range(3)]) as replay:
        moe(x).float().square().sum().backward()  # compiles the kernels
        with no_synchronisation():
            for _ in range(2):
                moe(x).float().square().sum().backward()
    assert 0 < replay.differences()["MoE"].choices < 1


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_graph_reads_the_routes_that_are_loaded(no_debug, reentrant):
    moe, x = MoE(H, WIDTH, E, K, device="cuda", dtype=torch.bfloat16), tokens()
    routes = [drawn_routes() for _ in range(4)]

    def step():
        options = {"use_reentrant": reentrant, "preserve_rng_state": False}  # whose reading would wait
        out = moe(x) if reentrant is None else checkpoint(moe, x, **options)
        out.float().square().sum().backward()
        return out

    def zero():
        for t in (x, *moe.parameters()):
            t.grad = None if t.grad is None else t.grad.zero_()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), replay_routes(moe, routes[:3]):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph, found = torch.cuda.CUDAGraph(), []
    with replay_routes(moe, routes[0]) as replay:
        with torch.cuda.graph(graph):
            out = step()
        for array in routes:
            replay.load(array)
            zero()
            graph.replay()
            found.append([out.clone(), x.grad.clone(), *(p.grad.clone() for p in moe.parameters())])
        differences = replay.differences()
    with replay_routes(moe, routes) as replay:
        for got in found:
            zero()
            want = [step(), x.grad, *(p.grad for p in moe.parameters())]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert replay.differences() == differences
    elsewhere = pytest.raises(ValueError, match="MoE is captured on cuda:0, but its routes are on cpu")
    graph = torch.cuda.CUDAGraph()
    with elsewhere, replay_routes(moe, routes[0].cpu()), torch.cuda.graph(graph):
        step()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_replay(no_debug, mode):
    """torch's own CUDA graphs leave out what asks for a route: their replays would not ask for the next."""
    torch.compiler.reset()
    moe, x = build(), tokens()
    compiled = torch.compile(moe, fullgraph=True, mode=mode)
    for _ in range(4):
        routes = drawn_routes()
        with replay_routes(moe, routes) as replay, torch.no_grad():
            got = compiled(x).clone()
        with replay_routes(moe, routes) as again, torch.no_grad():
            torch.testing.assert_close(got, moe(x), rtol=1e-2, atol=1e-2)
        assert replay.differences() == again.differences()
