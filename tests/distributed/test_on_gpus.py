"""Experts shared by all GPUs of this machine, over NCCL."""

import copy
import functools
import math

import pytest
import torch
from check import error
from torch.distributed.tensor.parallel import parallelize_module

from moe_aiter import Experts, LoRAExperts, make_plan, use
from moe_aiter.config import settings
from moe_aiter.distributed import ExpertParallel, expert_mesh, guests
from moe_aiter.distributed.loans import GPU
from moe_aiter.kernels.experts.inputs import ExpertInputs

from ..references import expert_loop_reference
from .ranks import captured, of_all_ranks, ranks_on_gpus, run, whole

pytestmark = pytest.mark.gpu
E, K, T, H, I = 16, 4, 512, 256, 128  # noqa: E741  tokens of each rank


def build(dtype=torch.bfloat16, **options) -> Experts:
    torch.manual_seed(0)
    return Experts(E, H, I, device="cuda", dtype=dtype, **options)


def share(experts, world, **options):
    return parallelize_module(copy.deepcopy(experts), mesh_of(world), ExpertParallel(**options))


@functools.cache
def mesh_of(world):
    """One mesh for all layers: over gloo, each would have a group of its own, and a pool of its own."""
    return expert_mesh("cuda", world)["ep"]


def draw(world, seed=1, dtype=torch.bfloat16, skew=0.0):
    """x, ids, routing weights and dout of all ranks, the same on each."""
    generator = torch.Generator().manual_seed(seed)
    n = world * T
    law = torch.arange(1.0, E + 1) ** -skew
    ids = (torch.rand(n, E, generator=generator) ** (1 / law)).argsort(1, descending=True)[:, :K]
    x, s, dout = (torch.randn(n, size, generator=generator) for size in (H, K, H))
    return x.to("cuda", dtype), ids.cuda(), s.softmax(1).cuda(), dout.to("cuda", dtype)


def mine(rank, world, tensors):
    return [t.tensor_split(world)[rank].contiguous() for t in tensors]


def step(fn, experts, x, ids, s, dout) -> dict:
    experts.zero_grad()
    x, s = x.clone().requires_grad_(), s.clone().requires_grad_()
    out = fn(x, s, make_plan(ids, E))
    out.backward(dout)
    grads = {name: p.grad for name, p in experts.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, "ds": s.grad} | grads


def reference(experts, dtype, x, ids, s, dout) -> dict:
    experts = copy.deepcopy(experts).to(dtype)
    weights = experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias
    s = s.to(torch.promote_types(dtype, torch.float32))

    def fn(x, s, plan):
        return expert_loop_reference(*ExpertInputs(x, *weights, s, *plan, "swiglu", False, False))[0]

    return step(fn, experts, x.to(dtype), ids, s, dout.to(dtype))


def check_values(rank, world, backend, dtype, options):
    """As good as plain torch, and the same bits twice; in float32 weights' gradients are one process's."""
    experts, given = build(dtype, bias=True), draw(world, dtype=dtype, skew=2.0 if "guests" in options else 0)
    truth, torchs = (reference(experts, d, *given) for d in (torch.float64, dtype))
    with use(backend):
        alone = step(experts, experts, *given)
        shared = share(experts, world, **options)
        runs = [of_all_ranks(step(shared, shared, *mine(rank, world, given))) for _ in range(2)]
    for what, value in runs[0].items():
        assert torch.equal(value, runs[1][what]), f"{backend}, {options}, {what}: two runs differ"
        got, best = error(value, truth[what]), error(torchs[what], truth[what])
        assert got <= 2 * best + 1e-7, f"{backend}, {dtype}, {options}, {what}: {got:.2e}, torch {best:.2e}"
        if dtype == torch.float32 and what not in ("out", "dx") and not {"rows", "guests"} & {*options}:
            assert torch.equal(value, alone[what]), f"{backend}, {what} is not that of one process"


def check_transports(rank, world, guests=0, lora=False, **options):
    """Three layers of large tensors, whose copies run beside products: the same bits by both transports.

    Memory of tokens that travel again holds those of another layer until they arrive.  With guests, bits are
    those of two runs; sums have another order by the other transport.
    """
    tokens, hidden = 4096, 1024
    torch.manual_seed(rank)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    law = torch.arange(1.0, E + 1, device="cuda") ** -(1.0 if guests else 0.0)
    ids = (torch.rand(3, tokens, E, device="cuda") ** (1 / law)).argsort(2)[..., :K]
    s, results = torch.rand(3, tokens, K, device="cuda"), []
    torch.manual_seed(0)
    layers = [Experts(E, hidden, 512, device="cuda", dtype=torch.bfloat16, **options) for _ in range(3)]
    if lora:
        layers = [LoRAExperts(layer, rank=8) for layer in layers]
        for p in (p for layer in layers for p in layer.parameters() if p.requires_grad):
            torch.nn.init.normal_(p, std=0.05)
    for transport in ("collective", "auto"):
        shared = [share(layer, world, transport=transport, guests=guests) for layer in layers]
        for _ in range(3):
            leaf, weights = x.clone().requires_grad_(), s.clone().requires_grad_()
            out = leaf
            for i, layer in enumerate(shared):
                layer.zero_grad()
                out = out + layer(out, weights[i], make_plan(ids[i], E))
            out.square().mean().backward()
            trained = [p for layer in shared for p in layer.parameters() if p.requires_grad]
            gradients = [whole(p.grad) for p in trained]
            results.append([out.detach(), leaf.grad, weights.grad, *gradients])
        assert shared[0].dispatcher.symmetric == (transport == "auto" and world > 1)
    for first, others in ((0, results[1:3]), (3, results[4:])) if guests else ((0, results[1:]),):
        assert all(all(map(torch.equal, results[first], other)) for other in others)
    assert all(error(*pair) < 1e-2 for pair in zip(results[0], results[3], strict=True))


def check_no_synchronisation(rank, world, fp8=None, **options):
    """100 steps in which nothing may wait for the GPU."""
    experts = share(build(fp8=fp8), world, **options)
    x, ids, s, dout = mine(rank, world, draw(world, skew=2.0))
    plan = make_plan(ids, E)
    for i in range(103):
        if i == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        step(experts, experts, x, ids, s, dout)
    torch.cuda.set_sync_debug_mode("default")
    assert plan.group_sizes.sum() == T * K


def check_graph(rank, world, fp8=None, **options):
    """One CUDA graph, replayed with five routings, has the bits of eager steps."""
    experts = share(build(fp8=fp8), world, **options)
    x, ids, s, dout = mine(rank, world, draw(world))
    x, s = x.requires_grad_(), s.requires_grad_()
    weights = experts.gate_up, experts.down

    def run_once():
        out = experts(x, s, make_plan(ids, E))
        return out, *torch.autograd.grad(out, (x, s, *weights), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run_once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_once()
    for seed in range(5):  # of which those with guests lend in some
        new = mine(rank, world, draw(world, seed, skew=2.0 if seed % 2 else 0))
        with torch.no_grad():
            for old, value in zip((x, ids, s, dout), new, strict=True):
                old.copy_(value)
        graph.replay()
        got = [whole(t).clone() for t in results]
        want = [whole(t) for t in run_once()]
        assert all(map(torch.equal, got, want)), seed


def check_empty_ranks(rank, world, transport):
    """1,000 steps of random routing: some ranks have no tokens, others no rows for their experts."""
    alone, generator = build(), torch.Generator().manual_seed(0)
    experts = share(alone, world, transport=transport, max_tokens=T)
    each = E // world
    for i in range(1000):
        counts, some = (torch.randint(0, n, (world,), generator=generator) for n in (T + 1, 2))
        busy = torch.rand(world, generator=generator).argsort()[: max(K // each, i % world + 1)]
        scores = torch.rand(T, E, generator=generator)
        scores.view(T, world, each)[:, busy] += 1
        n = counts[rank] * some[rank]
        x = torch.randn(T, H, generator=generator)[:n].to("cuda", torch.bfloat16).requires_grad_()
        plan, s = make_plan(scores.topk(K).indices[:n].cuda(), E), scores[:n, :K].cuda()
        out = experts(x, s, plan)
        out.sum().backward()
        if i % 100 == 0:
            (dx,) = torch.autograd.grad(alone(x, s, plan).sum(), x)
            assert error(x.grad, dx) < 1e-2 and error(out.detach(), alone(x, s, plan).detach()) < 1e-2
    assert all(whole(p.grad).isfinite().all() for p in experts.parameters())


def lends(rank, world, folder):
    """Experts lent for one call, also of few rows, and transfers that take no time."""
    guests.rates_of = lambda kind: GPU._replace(link=math.inf)
    few = {"guests": min(4, E - E // world)}
    for backend in ("triton", "auto"):
        for dtype in (torch.bfloat16, torch.float32):
            for options in (few, few | {"rows": 0.5}, few | {"max_tokens": T + 3}):
                for transport in ("collective", "symmetric"):
                    check_values(rank, world, backend, dtype, options | {"transport": transport})
    check_transports(rank, world, **few)
    object.__setattr__(settings, "debug", False)  # whose checks of values synchronise
    for transport in captured():
        check_no_synchronisation(rank, world, transport=transport, **few)
        check_graph(rank, world, transport=transport, **few)
    check_graph(rank, world, rows=0.5, **few)


def everything(rank, world, folder):
    for backend in ("triton", "auto"):
        for dtype in (torch.bfloat16, torch.float32):
            for options in ({}, {"keep_x": True}, {"rows": 0.5}, {"max_tokens": T + 3}):
                for transport in ("collective", "symmetric"):
                    if transport == "collective" or (world > 1 and "keep_x" not in options):
                        check_values(rank, world, backend, dtype, options | {"transport": transport})
    for options in {}, {"recompute": "z"}, {"fp8": "e4m3"}, {"fp8": "e4m3", "recompute": "z"}, {"lora": True}:
        check_transports(rank, world, **options)
    object.__setattr__(settings, "debug", False)  # whose checks of values synchronise
    for transport in captured():
        check_no_synchronisation(rank, world, transport=transport)
        check_graph(rank, world, transport=transport)
        check_graph(rank, world, transport=transport, rows=0.5)
    for transport in ("collective", "auto"):
        check_empty_ranks(rank, world, transport)


def test_on_gpus(tmp_path):
    run(ranks_on_gpus(), everything, tmp_path, "nccl")


@pytest.mark.skipif(ranks_on_gpus() < 2, reason="it needs two GPUs, or ranks that share one")
def test_guests_on_gpus(tmp_path):
    run(ranks_on_gpus(), lends, tmp_path, "nccl")
