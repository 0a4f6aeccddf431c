"""What only a GPU can show: no synchronisation, CUDA graphs, Inductor, real bfloat16 kernels."""

import contextlib
import copy

import pytest
import torch
from check import error

from moe_aiter.layers.moe import MoE
from moe_aiter.layers.optimized import OptimizedMoELayer
from moe_aiter.op import use

pytestmark = pytest.mark.gpu

H, WIDTH, E, K, T = 256, 128, 16, 4, 512
FULL = {
    "bias": True,
    "shared_intermediate": 64,
    "shared_gate": True,
    "load_balance_coef": 0.1,
    "z_loss_coef": 0.01,
}


def build(**options):
    return MoE(H, WIDTH, E, K, device="cuda", dtype=torch.bfloat16, **options)


def tokens(num_tokens=T, dtype=torch.bfloat16):
    return torch.randn(num_tokens, H, device="cuda", dtype=dtype, requires_grad=True)


@contextlib.contextmanager
def no_synchronisation():
    """An error for each call that makes the host wait; autograd's threads included."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_forward_and_backward_never_wait(no_debug, score):
    moe, x = build(score=score, **FULL), tokens()
    moe(x).sum().backward()  # compiles the kernels
    with no_synchronisation():
        out, _ = moe(x, return_routing=True)
        out.sum().backward()


def test_accumulation_under_autocast_never_waits(no_debug):
    moe, x = MoE(H, WIDTH, E, K, device="cuda", **FULL), tokens(dtype=torch.float32)
    for p in (moe.experts.gate_up, moe.experts.down):
        p.main_grad = torch.zeros_like(p)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = moe(x).float().square().mean()
        loss.backward()

    step()
    with no_synchronisation():
        step()
    assert moe.experts.gate_up.grad is None and moe.experts.gate_up.main_grad.count_nonzero() > 0


def test_given_routing_never_waits(no_debug):
    layer = OptimizedMoELayer(H, E, WIDTH)
    x = tokens(dtype=torch.float16)
    expert_ids = torch.randint(-1, E, (T, K), device="cuda")
    routing_weights = torch.rand(T, K, device="cuda", requires_grad=True)
    layer(x, expert_ids, routing_weights).sum().backward()
    with no_synchronisation():
        layer(x, expert_ids, routing_weights).sum().backward()


def capture(step):
    """Record one `step` in a CUDA graph; returns the graph and the tensors that a replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_a_graph_replays_under_other_routing(no_debug, options):
    moe, x = build(**options), tokens()
    dout = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)

    def step():
        out, (_, plan) = moe(x, return_routing=True)
        return out, plan.group_sizes, *torch.autograd.grad(out, [x, *moe.parameters()], dout)

    graph, results = capture(step)
    batches = {
        "drawn anew": torch.randn(T, H, device="cuda"),
        "all tokens alike, so k experts take all": torch.randn(1, H, device="cuda").expand(T, H),
        "leaning to one side": torch.randn(T, H, device="cuda") + 2 * moe.router.weight[3].float() * H**0.5,
    }
    seen = set()
    for name, batch in batches.items():
        with torch.no_grad():
            x.copy_(batch)
        graph.replay()
        seen.add(tuple(results[1].tolist()))
        for got, want in zip(results, step(), strict=True):
            close = {} if got.dtype == torch.int32 else {"rtol": 1e-2, "atol": 1e-2 * want.abs().max().item()}
            torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}", **close)
    assert len(seen) == len(batches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, FULL, {"activation": "relu2"}, {"interleaved": True}], ids=str)
def test_kernels_are_as_good_as_torch(options, dtype):
    """Each gradient against float64, and against plain torch in the same dtype, under the same routing."""
    moe = MoE(H, WIDTH, E, K, device="cuda", dtype=dtype, **options)
    moe.load_balance_coef = moe.z_loss_coef = 0.0
    x = tokens(dtype=dtype)
    dout = torch.randn(T, H, device="cuda", dtype=dtype)

    def step(moe, x):
        out, (_, plan) = moe(x, return_routing=True)
        return out, *torch.autograd.grad(out, [x, *moe.parameters()], dout.to(x.dtype)), plan.rank

    ours = step(moe, x)
    with use("torch"):
        theirs = step(moe, x)
    exact = step(copy.deepcopy(moe).double(), x.detach().double().requires_grad_())
    assert torch.equal(ours[-1], exact[-1]), "a near tie: draw other tokens"
    names = ["out", "x", *dict(moe.named_parameters())]
    for name, a, b, truth in zip(names, ours, theirs, exact, strict=False):
        assert a.dtype == dtype and error(a, truth) <= 2 * error(b, truth) + 1e-4, name


def test_two_runs_give_the_same_bits():
    moe, x = build(**FULL), tokens(4096)

    def step():
        out = moe(x)
        return out, *torch.autograd.grad(out.float().square().sum(), [x, *moe.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))


def test_inductor():
    torch.compiler.reset()
    moe = build(**FULL)
    compiled = torch.compile(moe, fullgraph=True)
    for num_tokens in (T, 384):
        x = tokens(num_tokens)
        outs = [fn(x) for fn in (compiled, moe)]
        grads = [torch.autograd.grad(out.sum(), [x, *moe.parameters()]) for out in outs]
        for got, want in zip(*[(out, *g) for out, g in zip(outs, grads, strict=True)], strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def test_large_layer_in_bfloat16():
    """A layer of a real size: finite, and every expert trained."""
    moe = MoE(1024, 512, 64, 8, device="cuda", dtype=torch.bfloat16, load_balance_coef=0.01)
    x = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16)
    out = moe(x)
    out.float().square().mean().backward()
    assert out.isfinite().all() and out.shape == x.shape
    for p in moe.parameters():
        assert p.grad.isfinite().all()
    assert (moe.experts.down.grad.flatten(1).abs().amax(1) > 0).all()
